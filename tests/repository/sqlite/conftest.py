"""Every test that takes `engine` or `repository` runs on both engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_engine.repository.sqlite.engine import SqliteRepository
from tests.repository.sqlite.support import open_at


@pytest.fixture(params=["v1", "v2"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "onto.db"


@pytest.fixture
def repository(path: Path, engine: str) -> Iterator[SqliteRepository]:
    opened = open_at(path, engine)
    yield opened
    opened.close()
