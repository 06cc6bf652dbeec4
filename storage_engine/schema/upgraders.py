"""Upgraders: functions that make a row of the next schema version from one of the version before.

    @upgrader("Customer", from_version=1)
    def full_name(row: dict[str, Any]) -> dict[str, Any]:
        row["name"] = f"{row.pop('first')} {row.pop('last')}"
        return row

A row is a dict of Python values by field name, keys included. With `batch=True` the function takes
and gives an Arrow table of many rows instead, in which JSON fields are of Arrow's JSON type. Rows
may be handed out in any number of batches and more than once, so an upgrader keeps no state.
Identity stays: an upgrader cannot change keys, add rows or leave rows out.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from storage_engine.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])
UpgraderKey = tuple[str, int]  # stored name of the type, and the version that it upgrades from


@dataclass(frozen=True, slots=True)
class Upgrader:
    """A step from one schema version of a type to the next."""

    type_name: str
    from_version: int
    function: Callable[[Any], Any]
    batch: bool = False

    @property
    def key(self) -> UpgraderKey:
        return self.type_name, self.from_version

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


UpgraderSource = (
    Mapping[UpgraderKey, Callable[[Any], Any] | Upgrader]
    | Iterable[Callable[[Any], Any]]
    | ModuleType
    | str
)

_MARK = "__ontologia_upgraders__"
_declared: dict[UpgraderKey, Upgrader] = {}


def upgrader(type_name: str, *, from_version: int, batch: bool = False) -> Callable[[F], F]:
    """Declare a function as the upgrader of a type from a version to the next one."""
    given: object = type_name  # callers without a type checker pass a class
    if not isinstance(given, str) or not given:
        raise ConfigurationError(f"an upgrader is for a type's stored name, not {given!r}")
    if type(from_version) is not int or from_version < 1:
        raise ConfigurationError(
            f"upgrader of {type_name}: from_version is a schema version, 1 or more, not "
            f"{from_version!r}"
        )

    def declare(function: F) -> F:
        step = Upgrader(type_name, from_version, function, batch)
        earlier = _declared.get(step.key)
        if earlier is not None and _origin(earlier.function) != _origin(function):
            raise ConfigurationError(
                f"{type_name} has two upgraders from version {from_version}: "
                f"{_shown(earlier.function)} and {_shown(function)}; keep one"
            )
        _declared[step.key] = step
        steps: tuple[Upgrader, ...] = getattr(function, _MARK, ())
        setattr(function, _MARK, (*(s for s in steps if s.key != step.key), step))
        return function

    return declare


def load_upgraders(module: str | ModuleType) -> dict[UpgraderKey, Upgrader]:
    """The upgraders that a module has by name, its own and those that it imports."""
    if isinstance(module, str):
        try:
            module = importlib.import_module(module)
        except ImportError as error:
            raise ConfigurationError(
                f"cannot import the upgraders' module {module!r}: {error}; it must be on the "
                "Python path (PYTHONPATH=. for the current folder)"
            ) from error
    return _collected(vars(module).values(), module.__name__)


def resolve_upgraders(source: UpgraderSource | None) -> dict[UpgraderKey, Upgrader]:
    """Upgraders however they are given; None means all that were declared in this process."""
    if source is None:
        return dict(_declared)
    if isinstance(source, str | ModuleType):
        return load_upgraders(source)
    if not isinstance(source, Mapping):
        return _collected(_functions(source), "what was given")
    resolved = {}
    for key, given in source.items():
        name, version = _checked_key(key)
        if isinstance(given, Upgrader):
            resolved[key] = Upgrader(name, version, given.function, given.batch)
            continue
        marked: Sequence[Upgrader] = getattr(given, _MARK, ())
        batch = any(step.batch for step in marked)
        resolved[key] = Upgrader(name, version, given, batch)
    return resolved


def _functions(source: Any) -> list[Callable[[Any], Any]]:
    """In a module everything else is passed over; whoever lists functions means each of them."""
    if not isinstance(source, Iterable):
        raise ConfigurationError(
            "upgraders are given as a module, a mapping such as {('Customer', 1): function}, or a "
            f"list of functions with @upgrader, not {source!r}"
        )
    functions = list(source)
    for function in functions:
        if not getattr(function, _MARK, ()):
            raise ConfigurationError(
                f"{function!r} does not say what it upgrades: declare it with "
                "@upgrader('Customer', from_version=1), or give a mapping such as "
                "{('Customer', 1): function}"
            )
    return functions


def _checked_key(key: Any) -> UpgraderKey:
    match key:
        case (str(name), int(version)):
            return name, version
    raise ConfigurationError(
        f"upgraders are given by the type's stored name and the version that they upgrade from, "
        f'such as ("Customer", 1), not {key!r}'
    )


def steps_from(
    upgraders: Mapping[UpgraderKey, Upgrader], names: Sequence[str], version: int
) -> list[Upgrader]:
    """The upgraders that lead on from a version, one after the other, as far as they go. `names`
    are those that the type has and had."""
    steps: list[Upgrader] = []
    while True:
        at = version + len(steps)
        step = next((upgraders[name, at] for name in names if (name, at) in upgraders), None)
        if step is None:
            return steps
        steps.append(step)


def _collected(values: Iterable[Any], where: str) -> dict[UpgraderKey, Upgrader]:
    collected: dict[UpgraderKey, Upgrader] = {}
    for value in values:
        steps: Sequence[Upgrader] = getattr(value, _MARK, ()) if callable(value) else ()
        for step in steps:
            other = collected.setdefault(step.key, step)
            if other.function is not step.function:
                raise ConfigurationError(
                    f"{where} has two upgraders of {step.type_name} from version "
                    f"{step.from_version}: {other.name} and {step.name}; keep one"
                )
    return collected


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    """Where a function was written: written again (a notebook's cell, a reload) it is the same."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", "")
    file = getattr(code, "co_filename", module) if module in sys.modules else module
    return str(file) if module != "__main__" else module, getattr(function, "__qualname__", "")


def _shown(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"
