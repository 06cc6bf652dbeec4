"""The master that Pipes tests submit to."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def spark_master() -> str:
    return "local[1]"
