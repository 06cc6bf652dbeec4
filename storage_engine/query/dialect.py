"""What an SQL engine must say so that filters can be compiled for it.

Values never become part of the SQL text: they are bound under names (`q0`, `q1`, ...), JSON paths
too. Identifiers are quoted. The names begin with a prefix, so that the text can be put into a
larger statement with parameters of its own.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def json_path(keys: Sequence[str]) -> str:
    """A JSON path that both engines read as exactly these keys (`model.expressions.check_key`)."""
    return "$" + "".join(f'."{key}"' for key in keys)


class Binder:
    """Collects the values of a statement; equal ones share a name."""

    def __init__(self, prefix: str = "q") -> None:
        self.values: dict[str, Any] = {}
        self._prefix = prefix
        self._names: dict[tuple[type, str], str] = {}

    def name(self, value: Any) -> str:
        key = (type(value), repr(value))
        if key not in self._names:
            self._names[key] = f"{self._prefix}{len(self.values)}"
            self.values[self._names[key]] = value
        return self._names[key]

    def used(self, sql: str) -> dict[str, Any]:
        """The values that a text refers to; DuckDB objects to others."""
        named = set(re.findall(rf"[$:]({self._prefix}\d+)\b", sql))
        return {name: value for name, value in self.values.items() if name in named}


@dataclass(frozen=True)
class SqlColumn:
    """A typed column, or any SQL expression of such a type."""

    sql: str
    kind: str


class Json(ABC):
    """A place in a JSON document."""

    @abstractmethod
    def at(self, keys: Sequence[str]) -> Json:
        """The place under these keys."""

    @abstractmethod
    def absent(self) -> str:
        """Whether there is nothing: no such place, or null. True or false, never NULL."""

    @abstractmethod
    def is_kind(self, kind: str) -> str:
        """Whether a value of that kind is there; false or NULL when not."""

    @abstractmethod
    def value(self, kind: str) -> str:
        """The value, known to be of that kind, in the form in which `Dialect.literal` has it;
        NULL when absent."""

    @abstractmethod
    def length(self) -> str:
        """The number of elements, known to be a list."""

    @abstractmethod
    def some(self, alias: str, condition: Callable[[Json], str]) -> str:
        """Whether some element meets a condition; false when it is no list. Never NULL."""


class Dialect(ABC):
    """One SQL engine."""

    name: str
    shows_json: bool  # whether `shown` leaves dates and datetimes as JSON has them

    def __init__(self, binder: Binder) -> None:
        self.binder = binder

    @abstractmethod
    def mark(self, value: Any) -> str:
        """A parameter with that value."""

    @abstractmethod
    def literal(self, kind: str, value: Any, *, in_json: bool) -> str:
        """A value of a kind, comparable with a typed column or with what `Json.value` gives."""

    @abstractmethod
    def document(self, sql: str) -> Json:
        """The root of the JSON text that an expression gives."""

    @abstractmethod
    def with_default(self, sql: str, name: str, default: str) -> Json:
        """What a document has under a name; the JSON text `default` when it lacks the name."""

    @abstractmethod
    def starts(self, text: str, prefix: str) -> str: ...

    @abstractmethod
    def ends(self, text: str, suffix: str) -> str: ...

    @abstractmethod
    def has_part(self, text: str, part: str) -> str: ...

    @abstractmethod
    def is_bool(self, column: str, wanted: bool) -> str:
        """Whether a boolean column is exactly that; never NULL."""

    @abstractmethod
    def shown(self, sql: str, kind: str, *, in_json: bool) -> str:
        """A value as a column of a result."""

    @abstractmethod
    def total(self, sql: str, kind: str) -> str:
        """SUM, of the kind of its values."""

    @abstractmethod
    def mean(self, sql: str) -> str:
        """AVG, a float."""
