"""`world` is an empty v2 storage on the simulated store; `either_world` is one of each engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.commitlog.support import World, made_world


@pytest.fixture
def world() -> Iterator[World]:
    with made_world("v2") as made:
        yield made


@pytest.fixture(params=["v1", "v2"])
def either_world(request: pytest.FixtureRequest) -> Iterator[World]:
    with made_world(str(request.param)) as made:
        yield made
