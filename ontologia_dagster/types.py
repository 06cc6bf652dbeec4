"""The classes that declarations name, found when they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from storage_engine.cli.models import declared_types
from storage_engine.errors import ConfigurationError

if TYPE_CHECKING:
    from storage_engine.model.spec import TypeSpec


def declared_type(models: str, name: str) -> TypeSpec:
    """The type of that stored name that a module declares or imports."""
    found = declared_types(models)
    for spec in found.values():
        if spec.name == name:
            return spec
    names = ", ".join(sorted(spec.name for spec in found.values()))
    raise ConfigurationError(f"{models} declares no type {name!r}; it has {names}")
