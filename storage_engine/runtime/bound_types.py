"""Entity and relation classes that belong together: those of one session, those of one module.

Promise: no two of them are stored under one name.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from storage_engine.errors import ConfigurationError, TypeDeclarationError
from storage_engine.model.declarations import Entity, Relation, Stored, spec_of
from storage_engine.model.spec import TypeSpec

StoredClass = type[Entity] | type[Relation[Any, Any]]


class BoundTypes:
    """The types of one session.

    Given types are all there are. Without any, types are bound as they come.
    """

    def __init__(
        self,
        entity_types: Iterable[type[Entity]] | None = None,
        relation_types: Iterable[type[Relation[Any, Any]]] | None = None,
    ) -> None:
        self._by_name: dict[str, TypeSpec] = {}  # SQL cannot tell names by case: lower case
        self._specs: dict[Any, TypeSpec] = {}
        self._closed = False
        for option, base, classes in (
            ("entity_types", Entity, entity_types),
            ("relation_types", Relation, relation_types),
        ):
            for cls in _listed(option, classes):
                if not (isinstance(cls, type) and issubclass(cls, base)):
                    raise ConfigurationError(
                        f"{option} takes {base.__name__} classes, not {_show(cls)}"
                    )
                self.bind(cls)
        self._closed = bool(self._specs)

    def fresh(self) -> BoundTypes:
        """For another session: the given types, or none yet."""
        return self if self._closed else BoundTypes()

    def bind(self, cls: Any) -> TypeSpec:
        """The spec of a class, which becomes one of the session's types."""
        bound = self._specs.get(cls)
        if bound is not None:
            return bound
        spec = spec_of(cls)
        if self._closed:
            option = "entity_types" if spec.kind == "entity" else "relation_types"
            names = ", ".join(s.name for s in self._specs.values())
            raise ConfigurationError(
                f"{spec.name} is not among this session's types ({names}); add the class to "
                f"{option}"
            )
        other = self._by_name.setdefault(spec.name.lower(), spec)
        if other.name != spec.name:
            raise ConfigurationError(
                f"the types {other.name} and {spec.name} differ in case only, which SQL cannot "
                "tell; give one of them another name"
            )
        if other is not spec:
            raise ConfigurationError(
                f"two classes are stored as {spec.name}: {_origin(other)} and {_origin(spec)}; "
                "give one of them another name, or open a new session if the class was declared "
                "again"
            )
        self._specs[cls] = spec
        return spec

    def find(self, named: Any) -> TypeSpec:
        """The type that a class or a stored name stands for."""
        if not isinstance(named, str):
            try:
                return self.bind(named)
            except TypeDeclarationError as error:
                raise ConfigurationError(str(error)) from None
        spec = self._by_name.get(named.lower())
        if spec is None or spec.name != named:
            raise ConfigurationError(
                f"{named!r} is not a type of this session; give the class itself"
            )
        return spec


def _listed(option: str, classes: Any) -> list[Any]:
    if classes is None:
        return []
    if isinstance(classes, type) or not isinstance(classes, Iterable):
        raise ConfigurationError(f"{option} takes a list of classes, not {_show(classes)}")
    return list(classes)


def _show(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else repr(value)


def _origin(spec: TypeSpec) -> str:
    cls = spec.python_class
    return f"{cls.__module__}.{cls.__qualname__}" if cls is not None else spec.name


# --- the types of a module ----------------------------------------------------------------------


def declared_types(name: str, *, option: str = "--models") -> dict[tuple[str, str], TypeSpec]:
    """The types in a module's namespace, declared there or imported, by kind and name.

    `option` is what the user knows the name by.
    """
    specs: dict[tuple[str, str], TypeSpec] = {}
    for value in vars(_imported(name, option)).values():
        if not (isinstance(value, type) and issubclass(value, Stored)):
            continue
        declaration = getattr(value, "__declaration__", None)
        if declaration is None or declaration.abstract:
            continue
        spec = spec_of(value)
        other = specs.setdefault(spec.ref, spec)
        if other is not spec:
            raise ConfigurationError(
                f"{option} {name}: two {spec.kind} classes are stored as {spec.name}; give one of "
                "them another name"
            )
    if not specs:
        raise ConfigurationError(f"{option} {name}: declares no entity or relation types")
    return specs


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
