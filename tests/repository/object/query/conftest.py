"""Worlds on the simulated store, and a directory storage to look at plans of."""

from tests.commitlog.conftest import either_world, world

__all__ = ["either_world", "world"]
