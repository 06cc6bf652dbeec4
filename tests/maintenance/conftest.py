"""Storages for the tests of upkeep: `storage` of every engine, `objects` of those on an object
store, `world` on the simulated store."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_engine.repository import initialize_storage
from tests.commitlog.conftest import either_world, world
from tests.engines import ON_SERVERS, Storage, new_storage, parametrize_storage, storage

__all__ = ["either_world", "storage", "world"]


@pytest.fixture
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty storage on an object store."""
    made = new_storage(str(request.param), request, tmp_path)
    initialize_storage(made.uri, made.engine_version, made.config())
    return made


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_storage(metafunc)
    chosen = [m.args[0] for m in metafunc.definition.iter_markers("parametrize")]
    if "objects" in metafunc.fixturenames and "objects" not in chosen:
        servers = ON_SERVERS if hasattr(metafunc.function, "on_servers") else ()
        marked = [pytest.param(name, marks=pytest.mark.s3) for name in servers]
        names = ["directory-v1", "directory-v2", *marked]
        metafunc.parametrize("objects", names, indirect=True)
