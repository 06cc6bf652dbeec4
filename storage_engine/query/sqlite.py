"""Filters as SQLite SQL, for SQLite 3.38 and later.

Two things SQLite's JSON functions cannot do are done by functions that `install` adds to a
connection: texts that contain NUL, which json_extract cuts off there, and base64.
"""

from __future__ import annotations

import sqlite3
from abc import abstractmethod
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from storage_engine.model.canonical import leaf
from storage_engine.query.dialect import Dialect, Json, json_path

_NUL = r"'\u0000'"  # how JSON writes it: SQLite takes the backslash for itself
_JSON_TYPES = {
    "str": "= 'text'",
    "int": "= 'integer'",
    "float": "= 'real'",
    "bool": "IN ('true', 'false')",
    "list": "= 'array'",
    "dict": "= 'object'",
}


def install(connection: sqlite3.Connection) -> None:
    """Add the functions that compiled filters use. Calling it again does no harm."""
    connection.create_function("ontologia_text", 1, _text, deterministic=True)
    connection.create_function("ontologia_bytes", 1, _bytes, deterministic=True)


def _text(json: str | None) -> str | None:
    value = None if json is None else orjson.loads(json)
    return value if isinstance(value, str) else None


def _bytes(encoded: str | None) -> bytes | None:
    return None if encoded is None else b64decode(encoded)


class Sqlite(Dialect):
    name = "sqlite"
    shows_json = True

    def mark(self, value: Any) -> str:
        return f":{self.binder.name(value)}"

    def literal(self, kind: str, value: Any, *, in_json: bool) -> str:
        if isinstance(value, datetime):
            text = leaf(value)  # columns end in Z where JSON has +00:00 (repository.sqlite.codec)
            return self.mark(text if in_json else text.removesuffix("+00:00") + "Z")
        if kind == "date":
            return self.mark(leaf(value))
        return self.mark(int(value) if kind == "bool" else value)

    def document(self, sql: str) -> Json:
        return SqliteJson(self, sql, ())

    def with_default(self, sql: str, name: str, default: str) -> Json:
        path = self.mark(json_path([name]))
        document = f"COALESCE({sql} -> {path}, {self.mark(default)})"  # null is a JSON text here
        return SqliteJson(self, document, ())

    def starts(self, text: str, prefix: str) -> str:
        return self._same(text, prefix, "1, {}")

    def ends(self, text: str, suffix: str) -> str:
        return self._same(text, suffix, "-{}")

    def _same(self, text: str, part: str, where: str) -> str:
        length = len(part.encode())
        if not length:
            return f"({text} = {text})"
        whole = f"CAST({text} AS BLOB)"  # substr of an empty one is NULL, hence the length
        cut = f"substr({whole}, {where.format(length)})"
        return f"(length({whole}) >= {length} AND {cut} = {self._blob(part)})"

    def has_part(self, text: str, part: str) -> str:
        return f"(instr(CAST({text} AS BLOB), {self._blob(part)}) > 0)"

    def _blob(self, text: str) -> str:
        return self.mark(text.encode())  # bytes: SQLite counts characters only up to a NUL

    def is_bool(self, column: str, wanted: bool) -> str:
        return f"({column} IS {int(wanted)})"

    def shown(self, sql: str, kind: str, *, in_json: bool) -> str:
        return f"({sql} + 0.0)" if kind == "float" else sql  # -0.0 and 0.0 are one value

    def total(self, sql: str, kind: str) -> str:
        if kind != "int":
            return f"SUM({sql})"
        # SQLite's own sum fails when it leaves 64 bits on the way, even if it would come back. So
        # the halves are summed apart; `abs` is there for its error, "integer overflow".
        low = f"SUM({sql} & 4294967295)"
        high = f"(SUM({sql} >> 32) + ({low} >> 32))"
        return (
            f"CASE WHEN {high} BETWEEN -2147483648 AND 2147483647 "
            f"THEN ({high} << 32) | ({low} & 4294967295) "
            f"WHEN {high} IS NOT NULL THEN abs(min({high}, -9223372036854775808)) END"
        )

    def mean(self, sql: str) -> str:
        return f"AVG({sql})"


class _SqliteValue(Json):
    """What documents and elements have in common."""

    dialect: Sqlite

    @property
    @abstractmethod
    def _type(self) -> str:
        """SQLite's name for the type of the value."""

    @property
    @abstractmethod
    def _value(self) -> str:
        """The value as SQLite extracts it."""

    @property
    @abstractmethod
    def _document(self) -> str:
        """The value as JSON text, known to be a list or an object."""

    @property
    @abstractmethod
    def _text(self) -> str:
        """The value, known to be a string."""

    def absent(self) -> str:
        return f"(COALESCE({self._type}, 'null') = 'null')"

    def is_kind(self, kind: str) -> str:
        test = _JSON_TYPES.get(kind, "= 'text'")  # what JSON lacks is text in it
        return f"({self._type} {test})"

    def value(self, kind: str) -> str:
        match kind:
            case "str":
                return self._text
            case "float":
                return f"CAST({self._value} AS REAL)"
            case "bytes":
                return f"ontologia_bytes({self._value})"
            case _:
                return self._value

    def some(self, alias: str, condition: Callable[[Json], str]) -> str:
        tested = condition(SqliteElement(self.dialect, alias))
        items = f"CASE WHEN {self._type} = 'array' THEN {self._document} END"
        return f"EXISTS (SELECT 1 FROM json_each({items}) AS {alias} WHERE {tested})"


@dataclass(frozen=True)
class SqliteJson(_SqliteValue):
    """A path into a document."""

    dialect: Sqlite
    document: str
    keys: tuple[str, ...]

    @property
    def _path(self) -> str:
        return self.dialect.mark(json_path(self.keys))

    @property
    def _type(self) -> str:
        return f"json_type({self.document}, {self._path})"

    @property
    def _value(self) -> str:
        return f"json_extract({self.document}, {self._path})"

    @property
    def _document(self) -> str:
        return f"({self.document} -> {self._path})"

    @property
    def _text(self) -> str:
        return (
            f"CASE WHEN instr({self.document}, {_NUL}) "
            f"THEN ontologia_text({self._document}) ELSE {self._value} END"
        )

    def at(self, keys: Sequence[str]) -> Json:
        return SqliteJson(self.dialect, self.document, (*self.keys, *keys))

    def length(self) -> str:
        return f"json_array_length({self.document}, {self._path})"


@dataclass(frozen=True)
class SqliteElement(_SqliteValue):
    """A row of json_each: scalars come out of it as SQL values, not as JSON."""

    dialect: Sqlite
    alias: str

    @property
    def _type(self) -> str:
        return f"{self.alias}.type"

    @property
    def _value(self) -> str:
        return f"{self.alias}.value"

    @property
    def _document(self) -> str:
        return f"{self.alias}.value"

    @property
    def _text(self) -> str:
        whole = f"{self.alias}.json"
        return (
            f"CASE WHEN instr({whole}, {_NUL}) "
            f"THEN ontologia_text({whole} -> {self.alias}.fullkey) ELSE {self._value} END"
        )

    def at(self, keys: Sequence[str]) -> Json:
        nested = f"CASE WHEN {self._type} IN ('object', 'array') THEN {self._value} END"
        return SqliteJson(self.dialect, f"({nested})", tuple(keys))

    def length(self) -> str:
        return f"json_array_length({self._document})"
