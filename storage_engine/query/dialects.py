"""What an SQL engine must say so that filters can be compiled for it, and how DuckDB and SQLite do.

Values never become part of the SQL text: they are bound under names (`q0`, `q1`, ...), JSON paths
too. Identifiers are quoted. The names begin with a prefix, so that the text can be put into a
larger statement with parameters of its own. Nothing is executed here.

What SQLite (3.38 and later) cannot do is done by functions that `install` adds to a connection:
texts that contain NUL, which json_extract cuts off there, base64, and decimals.
"""

from __future__ import annotations

import re
import sqlite3
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any, Self

import orjson

from storage_engine.model.canonical import leaf
from storage_engine.model.decimals import MAX_PRECISION, decimal_type


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as SQL has it."""
    return "'" + text.replace("'", "''") + "'"


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
    def mean(self, sql: str, kind: str) -> str:
        """AVG, a float."""


@dataclass(frozen=True)
class DocumentPath:
    """A path into a document, as both engines have it."""

    dialect: Dialect
    document: str
    keys: tuple[str, ...]

    @property
    def _path(self) -> str:
        return self.dialect.mark(json_path(self.keys))

    @property
    def _type(self) -> str:
        return f"json_type({self.document}, {self._path})"

    def at(self, keys: Sequence[str]) -> Self:
        return replace(self, keys=(*self.keys, *keys))

    def length(self) -> str:
        return f"json_array_length({self.document}, {self._path})"


_TYPES = {
    "str": "VARCHAR",
    "int": "BIGINT",
    "float": "DOUBLE",
    "bool": "BOOLEAN",
    "datetime": "TIMESTAMPTZ",
    "date": "DATE",
    "time": "TIME",
    "bytes": "BLOB",
}
_JSON_TYPES_DUCKDB = {
    "int": "IN ('UBIGINT', 'BIGINT')",
    "float": "= 'DOUBLE'",
    "bool": "= 'BOOLEAN'",
    "list": "= 'ARRAY'",
    "dict": "= 'OBJECT'",
}


def _sql_type(kind: str) -> str:
    decimals = decimal_type(kind)
    return _TYPES[kind] if decimals is None else decimals.sql


class DuckDb(Dialect):
    name = "duckdb"
    shows_json = False

    def mark(self, value: Any) -> str:
        return f"${self.binder.name(value)}"

    def literal(self, kind: str, value: Any, *, in_json: bool) -> str:
        if kind in ("datetime", "date", "time"):
            # As text: DuckDB's own conversion of Python datetimes depends on their tzinfo.
            text = f"{self.mark(leaf(value))}::VARCHAR"
            return text if in_json else f"CAST({text} AS {_TYPES[kind]})"
        if decimal_type(kind) is not None:
            return f"CAST({self.mark(leaf(value))}::VARCHAR AS {_sql_type(kind)})"
        return f"{self.mark(value)}::{_TYPES[kind]}"

    def document(self, sql: str) -> Json:
        return DuckJson(self, sql, ())

    def with_default(self, sql: str, name: str, default: str) -> Json:
        path = self.mark(json_path([name]))
        document = (
            f"CASE WHEN json_type({sql}, {path}) IS NULL THEN {self.mark(default)}::JSON "
            f"ELSE json_extract({sql}, {path}) END"
        )
        return DuckJson(self, document, ())

    def starts(self, text: str, prefix: str) -> str:
        return f"starts_with({text}, {self.literal('str', prefix, in_json=False)})"

    def ends(self, text: str, suffix: str) -> str:
        return f"ends_with({text}, {self.literal('str', suffix, in_json=False)})"

    def has_part(self, text: str, part: str) -> str:
        return f"contains({text}, {self.literal('str', part, in_json=False)})"

    def is_bool(self, column: str, wanted: bool) -> str:
        return f"({column} IS NOT NULL AND {column} = {'TRUE' if wanted else 'FALSE'})"

    def shown(self, sql: str, kind: str, *, in_json: bool) -> str:
        if kind == "float":
            return f"({sql} + 0.0::DOUBLE)"  # -0.0 and 0.0 are one value
        return f"CAST({sql} AS {_sql_type(kind)})" if in_json else sql

    def total(self, sql: str, kind: str) -> str:
        decimals = decimal_type(kind)
        if decimals is None:
            return f"CAST(SUM({sql}) AS {_TYPES[kind]})"
        # By its text: DuckDB lets a sum grow a digit too long, and looks at digits there only.
        return f"CAST(CAST(SUM({sql}) AS VARCHAR) AS {decimals.total.sql})"

    def mean(self, sql: str, kind: str) -> str:
        return f"CAST(AVG({sql}) AS DOUBLE)"


@dataclass(frozen=True)
class DuckJson(DocumentPath, Json):
    dialect: DuckDb

    def absent(self) -> str:
        return f"(COALESCE({self._type}, 'NULL') = 'NULL')"

    def is_kind(self, kind: str) -> str:
        test = _JSON_TYPES_DUCKDB.get(kind, "= 'VARCHAR'")  # what JSON lacks is text in it
        return f"({self._type} {test})"

    def value(self, kind: str) -> str:
        text = f"json_extract_string({self.document}, {self._path})"
        match kind:
            case "int" | "float" | "bool":
                return f"TRY_CAST({text} AS {_TYPES[kind]})"
            case "bytes":
                return f"from_base64({text})"
            case _ if decimal_type(kind) is not None:
                return f"TRY_CAST({text} AS {_sql_type(kind)})"
            case _:
                return text

    def some(self, alias: str, condition: Callable[[Json], str]) -> str:
        path = self.dialect.mark(f"{json_path(self.keys)}[*]")
        tested = condition(DuckJson(self.dialect, alias, ()))
        items = f"json_extract({self.document}, {path})"
        return f"COALESCE(len(list_filter({items}, lambda {alias}: {tested})) > 0, FALSE)"


_NUL = r"'\u0000'"  # how JSON writes it: SQLite takes the backslash for itself
_JSON_TYPES_SQLITE = {
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
    connection.create_function("ontologia_decimal", 2, _decimal_column, deterministic=True)
    connection.create_aggregate("ontologia_decimal_sum", 2, _DecimalSum)  # type: ignore[arg-type]
    connection.create_aggregate("ontologia_decimal_avg", 2, _DecimalMean)  # type: ignore[arg-type]


def _text(json: str | None) -> str | None:
    value = None if json is None else orjson.loads(json)
    return value if isinstance(value, str) else None


def _bytes(encoded: str | None) -> bytes | None:
    return None if encoded is None else b64decode(encoded)


def _decimal_column(text: str | None, kind: str) -> int | str | None:
    """The text of a decimal in JSON as a column of its kind has it."""
    decimals = decimal_type(kind)
    if text is None or decimals is None:
        return None
    return decimals.to_sqlite(decimals.read(text))


class _DecimalSum:
    """Adds up stored decimals of a kind, exactly."""

    def __init__(self) -> None:
        self._units = 0
        self._count = 0
        self._kind = ""

    def step(self, stored: int | str | None, kind: str) -> None:
        decimals = decimal_type(kind)
        if stored is not None and decimals is not None:
            self._units += decimals.unscaled(decimals.from_sqlite(stored))
            self._count += 1
            self._kind = kind

    def finalize(self) -> Any:
        decimals = decimal_type(self._kind)
        if decimals is None:
            return None
        if abs(self._units) >= 10**MAX_PRECISION:
            # Not OverflowError, which sqlite3 takes for a text that is too long.
            raise ValueError("a sum of more digits than a decimal has")
        total = decimals.total
        return total.to_sqlite(total.of_unscaled(self._units))


class _DecimalMean(_DecimalSum):
    def finalize(self) -> Any:
        decimals = decimal_type(self._kind)
        if decimals is None:
            return None
        return self._units / (self._count * 10**decimals.scale)  # of integers: rounded once


class Sqlite(Dialect):
    name = "sqlite"
    shows_json = True

    def mark(self, value: Any) -> str:
        return f":{self.binder.name(value)}"

    def literal(self, kind: str, value: Any, *, in_json: bool) -> str:
        if isinstance(value, datetime):
            text = leaf(value)  # columns end in Z where JSON has +00:00 (repository.sqlite.codec)
            return self.mark(text if in_json else text.removesuffix("+00:00") + "Z")
        if kind in ("date", "time"):
            return self.mark(leaf(value))
        if isinstance(value, Decimal):
            decimals = decimal_type(kind)
            assert decimals is not None
            return self.mark(decimals.to_sqlite(value))
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
        if decimal_type(kind) is not None:
            return f"ontologia_decimal_sum({sql}, '{kind}')"
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

    def mean(self, sql: str, kind: str) -> str:
        if decimal_type(kind) is not None:
            return f"ontologia_decimal_avg({sql}, '{kind}')"
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
        test = _JSON_TYPES_SQLITE.get(kind, "= 'text'")  # what JSON lacks is text in it
        return f"({self._type} {test})"

    def value(self, kind: str) -> str:
        match kind:
            case "str":
                return self._text
            case "float":
                return f"CAST({self._value} AS REAL)"
            case "bytes":
                return f"ontologia_bytes({self._value})"
            case _ if decimal_type(kind) is not None:
                return f"ontologia_decimal({self._value}, '{kind}')"
            case _:
                return self._value

    def some(self, alias: str, condition: Callable[[Json], str]) -> str:
        tested = condition(SqliteElement(self.dialect, alias))
        items = f"CASE WHEN {self._type} = 'array' THEN {self._document} END"
        return f"EXISTS (SELECT 1 FROM json_each({items}) AS {alias} WHERE {tested})"


@dataclass(frozen=True)
class SqliteJson(DocumentPath, _SqliteValue):
    """A path into a document."""

    dialect: Sqlite

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
