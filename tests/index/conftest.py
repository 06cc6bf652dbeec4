"""`world` is an empty v2 storage on the simulated store; `either_world` is one of each engine."""

from tests.commitlog.conftest import either_world, world

__all__ = ["either_world", "world"]
