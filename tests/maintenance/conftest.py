"""Storages for the tests of upkeep: `storage` of every engine, `world` on the simulated store."""

from __future__ import annotations

import pytest

from tests.commitlog.conftest import either_world, world
from tests.engines import parametrize_storage, storage

__all__ = ["either_world", "storage", "world"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_storage(metafunc)
