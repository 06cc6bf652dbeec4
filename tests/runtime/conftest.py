"""A test that takes `uri` runs on every engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_engine import Session
from tests.runtime.support import ENGINES, make_storage


@pytest.fixture(params=ENGINES)
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return make_storage(tmp_path, request.param)


@pytest.fixture
def session(uri: str) -> Iterator[Session]:
    opened = Session(uri)
    yield opened
    opened.close()


@pytest.fixture
def local() -> Iterator[Session]:
    """For what does not depend on the engine."""
    opened = Session(":memory:")
    yield opened
    opened.close()
