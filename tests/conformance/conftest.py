"""An empty storage of every engine, for the tests that take `storage`."""

import pytest

from tests.engines import parametrize_storage, storage

__all__ = ["storage"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_storage(metafunc)
