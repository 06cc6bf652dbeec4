"""What data must satisfy before it may be published, as plain data.

An expectation names columns of an input (field names; a relation also has `left_key`, `right_key`
and its instance key). Whoever writes in bulk evaluates them and publishes nothing while one is
broken. Promise: `parse_expectation(e.as_dict()) == e`, and `as_dict` is JSON.

    {"not_null": "name"}
    {"unique": "email"}                                      or several: {"unique": ["a", "b"]}
    {"range": {"column": "seats", "min": 1, "max": 500}}     either bound may be left out
    {"pattern": {"column": "code", "pattern": "[A-Z]{3}"}}   the whole value must match
    {"referential": {"column": "left_key", "type": "Customer"}}

A null satisfies all but `not_null`: whether a value must be there is a question of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import date
from math import isnan
from typing import Any

from storage_engine.errors import ConfigurationError

Bound = int | float | str  # dates and times in ISO notation


@dataclass(frozen=True, slots=True)
class NotNull:
    """Every row has a value in this column."""

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def describe(self) -> str:
        return f"{self.column} is not null"

    def as_dict(self) -> dict[str, Any]:
        return {"not_null": self.column}


@dataclass(frozen=True, slots=True)
class Unique:
    """No two rows of the input have the same values in these columns."""

    columns: tuple[str, ...]

    def describe(self) -> str:
        return f"{' + '.join(self.columns)} is unique"

    def as_dict(self) -> dict[str, Any]:
        return {"unique": self.columns[0] if len(self.columns) == 1 else list(self.columns)}


@dataclass(frozen=True, slots=True)
class InRange:
    """Values are within these bounds, which belong to the range."""

    column: str
    min: Bound | None = None
    max: Bound | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def describe(self) -> str:
        if self.max is None:
            return f"{self.column} is at least {self.min}"
        if self.min is None:
            return f"{self.column} is at most {self.max}"
        return f"{self.column} is between {self.min} and {self.max}"

    def as_dict(self) -> dict[str, Any]:
        bounds = {"min": self.min, "max": self.max}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        return {"range": {"column": self.column, **given}}


@dataclass(frozen=True, slots=True)
class Matches:
    """Values match a regular expression as a whole."""

    column: str
    pattern: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def describe(self) -> str:
        return f"{self.column} matches {self.pattern}"

    def as_dict(self) -> dict[str, Any]:
        return {"pattern": {"column": self.column, "pattern": self.pattern}}


@dataclass(frozen=True, slots=True)
class RefersTo:
    """Values are keys of stored entities of a type."""

    column: str
    type_name: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def describe(self) -> str:
        return f"{self.column} refers to a stored {self.type_name}"

    def as_dict(self) -> dict[str, Any]:
        return {"referential": {"column": self.column, "type": self.type_name}}


Expectation = NotNull | Unique | InRange | Matches | RefersTo


def parse_expectation(raw: Any) -> Expectation:
    """The expectation that a dict from YAML or JSON states; ConfigurationError says what is
    wrong with it."""
    if not isinstance(raw, Mapping) or len(raw) != 1:
        raise _wrong(raw, f"an expectation is one of {', '.join(_PARSERS)} with what it is about")
    (name, about), *_ = raw.items()
    parser = _PARSERS.get(name)
    if parser is None:
        raise _wrong(raw, f"{name!r} is not known; known are {', '.join(_PARSERS)}")
    return parser(raw, about)


def parse_expectations(raw: Any) -> tuple[Expectation, ...]:
    if raw is None:
        return ()
    if isinstance(raw, str | Mapping) or not isinstance(raw, Iterable):
        raise _wrong(raw, "expectations are a list")
    return tuple(parse_expectation(item) for item in raw)


def _not_null(raw: Any, about: Any) -> Expectation:
    return NotNull(_text(raw, "not_null", about))


def _unique(raw: Any, about: Any) -> Expectation:
    listed = [about] if isinstance(about, str) else about
    if not isinstance(listed, list | tuple) or not listed:
        raise _wrong(raw, "unique takes a column or a list of columns")
    columns = tuple(_text(raw, "unique", column) for column in listed)
    if len(set(columns)) < len(columns):
        raise _wrong(raw, "unique names a column twice")
    return Unique(columns)


def _range(raw: Any, about: Any) -> Expectation:
    given = _members(raw, "range", about, {"column"}, {"min", "max"})
    low, high = (_bound(raw, given.get(name)) for name in ("min", "max"))
    if low is None and high is None:
        raise _wrong(raw, "range needs min, max or both")
    if low is not None and high is not None:
        if isinstance(low, str) != isinstance(high, str):
            raise _wrong(raw, "min and max of a range are of different kinds")
        if low > high:  # type: ignore[operator]
            raise _wrong(raw, f"no value is at least {low} and at most {high}")
    return InRange(_text(raw, "range.column", given["column"]), low, high)


def _pattern(raw: Any, about: Any) -> Expectation:
    given = _members(raw, "pattern", about, {"column", "pattern"})
    pattern = _text(raw, "pattern.pattern", given["pattern"])
    try:
        re.compile(pattern)
    except re.error as error:
        raise _wrong(raw, f"{pattern!r} is not a regular expression: {error}") from None
    return Matches(_text(raw, "pattern.column", given["column"]), pattern)


def _referential(raw: Any, about: Any) -> Expectation:
    given = _members(raw, "referential", about, {"column", "type"})
    return RefersTo(
        _text(raw, "referential.column", given["column"]),
        _text(raw, "referential.type", given["type"]),
    )


_PARSERS: dict[str, Callable[[Any, Any], Expectation]] = {
    "not_null": _not_null,
    "unique": _unique,
    "range": _range,
    "pattern": _pattern,
    "referential": _referential,
}


def _members(
    raw: Any,
    name: str,
    about: Any,
    needed: AbstractSet[str],
    optional: AbstractSet[str] = frozenset(),
) -> Mapping[str, Any]:
    takes = ", ".join([*sorted(needed), *sorted(optional)])
    if not isinstance(about, Mapping) or not needed <= set(about) <= needed | optional:
        raise _wrong(raw, f"{name} takes {takes}")
    return about


def _text(raw: Any, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(raw, f"{name} takes a text, not {value!r}")
    return value


def _bound(raw: Any, value: Any) -> Bound | None:
    if isinstance(value, date):  # YAML reads dates and times by itself; datetime is a date too
        return value.isoformat()
    is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    if value is None or (is_plain and not (isinstance(value, float) and isnan(value))):
        return value  # type: ignore[no-any-return]
    raise _wrong(raw, f"a bound is a number, a text, a date or a time, not {value!r}")


def _wrong(raw: Any, why: str) -> ConfigurationError:
    return ConfigurationError(f"expectation {raw!r}: {why}")
