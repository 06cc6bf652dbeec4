"""`world` is an empty v2 storage on the simulated store."""

from __future__ import annotations

from tests.commitlog.conftest import world

__all__ = ["world"]
