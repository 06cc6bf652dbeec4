"""Values that are more than their column shows: enums, literals, UUIDs, times of day.

An enum or a `Literal` is stored as its values, a UUID as its canonical text; `lowered` gives what
is stored of a value. Back to enum members takes the class, which no storage keeps: a class that
declares a field brings a function for it (`reviver`), and whoever has only a stored schema reads
plain values.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from datetime import time
from enum import Enum
from functools import partial
from typing import Annotated, Any, NotRequired, Required, Union, get_args, get_origin
from uuid import UUID

from typing_extensions import ReadOnly, get_type_hints, is_typeddict

UUID_TEXT = r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
TIME_TEXT = r"^[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?$"
_UUID = re.compile(UUID_TEXT.removesuffix("$"))
_TIME = re.compile(TIME_TEXT.removesuffix("$"))
_SHOWN_VALUES = 8

Reviver = Callable[[Any], Any]


def lowered(value: Any) -> Any:
    """What is stored, and compared, of a scalar: an enum's value, a UUID's text."""
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, UUID) else value


# --- reading: ValueError is the end of a sentence that begins with the field -------------------


def read_uuid(value: Any) -> UUID:
    if isinstance(value, UUID):
        return value
    if isinstance(value, str) and _UUID.fullmatch(value):
        return UUID(value)
    raise ValueError("is not a UUID, such as 'c9bf9e57-1685-4c89-bafb-ff5af830be8a'")


def read_time(value: Any) -> time:
    if isinstance(value, str) and _TIME.fullmatch(value):
        try:
            return time.fromisoformat(value)
        except ValueError:
            raise ValueError("is not a time of day") from None
    if isinstance(value, time):
        if value.tzinfo is not None:
            raise ValueError("has a time zone; a time of day is stored without one")
        if type(value) is time and not value.fold:
            return value
        return time(value.hour, value.minute, value.second, value.microsecond)
    raise ValueError("is not a time of day in ISO 8601 with at most microseconds")


def read_literal(values: frozenset[Any], kind: type, value: Any) -> Any:
    plain = lowered(value)
    if type(plain) is not kind and isinstance(plain, kind) and not isinstance(plain, bool):
        plain = kind(str.__str__(plain) if kind is str else plain)
    if type(plain) is kind and plain in values:
        return plain
    raise ValueError(f"is none of {listed(sorted(values))}")


def listed(values: list[Any]) -> str:
    """Allowed values for people; the first few of many."""
    shown = ", ".join(repr(value) for value in values[:_SHOWN_VALUES])
    rest = len(values) - _SHOWN_VALUES
    return f"{shown} and {rest} more" if rest > 0 else shown


# --- back to enum members -----------------------------------------------------------------------


def reviver(annotation: Any, localns: Mapping[str, Any]) -> Reviver | None:
    """From plain values of an annotated type to those with enum members; None without enums."""
    made = _Revivers(dict(localns))
    return made.of(annotation) if made.has_enums(annotation, ()) else None


class _Revivers:
    def __init__(self, localns: dict[str, Any]) -> None:
        self._localns = localns
        self._hints: dict[Any, dict[str, Any]] = {}
        self._of_dicts: dict[Any, dict[str, Reviver]] = {}

    def has_enums(self, annotation: Any, enclosing: tuple[Any, ...]) -> bool:
        if is_enum(annotation):
            return True
        if is_typeddict(annotation):
            if annotation in enclosing:
                return False
            hints = self._hints_of(annotation).values()
            return any(self.has_enums(hint, (*enclosing, annotation)) for hint in hints)
        return any(self.has_enums(part, enclosing) for part in _parts(annotation))

    def of(self, annotation: Any) -> Reviver:
        """Asked only of annotations that `build_type_spec` has accepted."""
        if is_enum(annotation):
            return partial(_member, annotation)
        if is_typeddict(annotation):
            if annotation not in self._of_dicts:
                inner = self._of_dicts[annotation] = {}  # there before it refers to itself
                for key, hint in self._hints_of(annotation).items():
                    if self.has_enums(hint, ()):
                        inner[key] = self.of(hint)
            return partial(_by_key, self._of_dicts[annotation])
        origin, parts = get_origin(annotation), _parts(annotation)
        if origin is list:
            return partial(_items, self.of(parts[0]))
        if origin is dict:
            return partial(_values, self.of(parts[1]))
        if origin in (Union, types.UnionType):
            arms = [(_shape(part), self.of(part)) for part in parts if self.has_enums(part, ())]
            return partial(_arm, arms)
        return self.of(parts[0])  # Required[...] and the like

    def _hints_of(self, annotation: Any) -> dict[str, Any]:
        if annotation not in self._hints:
            names = {**self._localns, annotation.__name__: annotation}
            self._hints[annotation] = get_type_hints(annotation, localns=names, include_extras=True)
        return self._hints[annotation]


def is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def _parts(annotation: Any) -> tuple[Any, ...]:
    origin: Any = get_origin(annotation)
    if origin in (Annotated, Required, NotRequired, ReadOnly):
        return (get_args(annotation)[0],)
    return get_args(annotation) if origin in (Union, types.UnionType, list, dict) else ()


def _shape(annotation: Any) -> type | tuple[type, ...]:
    """The Python types of the plain values: members of a union never share them."""
    if is_enum(annotation):
        return (str,) if isinstance(next(iter(annotation)).value, str) else (int,)
    return list if get_origin(annotation) is list else dict


def _member(enum: type[Enum], value: Any) -> Any:
    return value if value is None else enum(value)


def _items(revive: Reviver, value: Any) -> Any:
    return None if value is None else [revive(item) for item in value]


def _values(revive: Reviver, value: Any) -> Any:
    return None if value is None else {key: revive(item) for key, item in value.items()}


def _by_key(revivers: Mapping[str, Reviver], value: Any) -> Any:
    if value is None:
        return None
    return {key: revivers[key](item) if key in revivers else item for key, item in value.items()}


def _arm(arms: list[tuple[Any, Reviver]], value: Any) -> Any:
    for shape, revive in arms:
        if isinstance(value, shape) and not isinstance(value, bool):
            return revive(value)
    return value
