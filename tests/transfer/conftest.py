"""Two storages for a test of copies: `source` is empty, `target` not yet made."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_engine.repository import initialize_storage
from tests.engines import LOCAL, Storage, new_storage


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty storage."""
    (tmp_path / "source").mkdir()
    made = new_storage(str(request.param), request, tmp_path / "source")
    initialize_storage(made.uri, made.engine_version, made.config())
    return made


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A place for a storage."""
    (tmp_path / "target").mkdir()
    return new_storage(str(request.param), request, tmp_path / "target")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Both: every pair of engines. One of them: every engine, unless the test names some."""
    chosen: set[str] = set()
    for mark in metafunc.definition.iter_markers("parametrize"):
        chosen |= {mark.args[0]} if isinstance(mark.args[0], str) else set(mark.args[0])
    for name in ("source", "target"):
        if name in metafunc.fixturenames and name not in chosen:
            metafunc.parametrize(name, LOCAL, indirect=True)
