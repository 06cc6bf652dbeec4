"""The entity and relation types that a Python module declares, found by the module's name."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from types import ModuleType

from storage_engine.errors import ConfigurationError
from storage_engine.model.spec import TypeSpec
from storage_engine.model.stored import Stored, spec_of


def declared_types(name: str, *, option: str = "--models") -> dict[tuple[str, str], TypeSpec]:
    """The types in a module's namespace, declared there or imported, by kind and name.

    `option` is what the user knows the name by.
    """
    found: dict[tuple[str, str], TypeSpec] = {}
    for value in vars(_imported(name, option)).values():
        if not (isinstance(value, type) and issubclass(value, Stored)):
            continue
        declaration = getattr(value, "__declaration__", None)
        if declaration is None or declaration.abstract:
            continue
        spec = spec_of(value)
        other = found.setdefault(spec.ref, spec)
        if other is not spec:
            raise ConfigurationError(
                f"{option} {name}: two {spec.kind} classes are stored as {spec.name}; give one of "
                "them another name"
            )
    if not found:
        raise ConfigurationError(f"{option} {name}: declares no entity or relation types")
    return found


def _imported(name: str, option: str) -> ModuleType:
    if name.endswith(".py") or "/" in name or not name.strip():
        raise ConfigurationError(
            f"{option} takes the name of a module, such as shop.models, not {name!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:  # as with `python -m`: modules of the current folder are found
        sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
            return importlib.import_module(name)
    except Exception as error:
        raise ConfigurationError(
            f"{option} {name}: cannot be imported: {type(error).__name__}: {error}"
        ) from error
