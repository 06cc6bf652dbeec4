"""Filters as DuckDB SQL. Knows DuckDB's language, not its library: nothing is executed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from storage_engine.model.canonical import leaf
from storage_engine.query.dialect import Dialect, Json, json_path

_TYPES = {
    "str": "VARCHAR",
    "int": "BIGINT",
    "float": "DOUBLE",
    "bool": "BOOLEAN",
    "datetime": "TIMESTAMPTZ",
    "date": "DATE",
    "bytes": "BLOB",
}
_JSON_TYPES = {
    "int": "IN ('UBIGINT', 'BIGINT')",
    "float": "= 'DOUBLE'",
    "bool": "= 'BOOLEAN'",
    "list": "= 'ARRAY'",
    "dict": "= 'OBJECT'",
}


class DuckDb(Dialect):
    name = "duckdb"
    shows_json = False

    def mark(self, value: Any) -> str:
        return f"${self.binder.name(value)}"

    def literal(self, kind: str, value: Any, *, in_json: bool) -> str:
        if kind in ("datetime", "date"):
            # As text: DuckDB's own conversion of Python datetimes depends on their tzinfo.
            text = f"{self.mark(leaf(value))}::VARCHAR"
            return text if in_json else f"CAST({text} AS {_TYPES[kind]})"
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
        return f"CAST({sql} AS {_TYPES[kind]})" if in_json else sql

    def total(self, sql: str, kind: str) -> str:
        return f"CAST(SUM({sql}) AS {_TYPES[kind]})"

    def mean(self, sql: str) -> str:
        return f"CAST(AVG({sql}) AS DOUBLE)"


@dataclass(frozen=True)
class DuckJson(Json):
    dialect: DuckDb
    document: str
    keys: tuple[str, ...]

    @property
    def _path(self) -> str:
        return self.dialect.mark(json_path(self.keys))

    @property
    def _type(self) -> str:
        return f"json_type({self.document}, {self._path})"

    def at(self, keys: Sequence[str]) -> Json:
        return DuckJson(self.dialect, self.document, (*self.keys, *keys))

    def absent(self) -> str:
        return f"(COALESCE({self._type}, 'NULL') = 'NULL')"

    def is_kind(self, kind: str) -> str:
        test = _JSON_TYPES.get(kind, "= 'VARCHAR'")  # what JSON lacks is text in it
        return f"({self._type} {test})"

    def value(self, kind: str) -> str:
        text = f"json_extract_string({self.document}, {self._path})"
        match kind:
            case "int" | "float" | "bool":
                return f"TRY_CAST({text} AS {_TYPES[kind]})"
            case "bytes":
                return f"from_base64({text})"
            case _:
                return text

    def length(self) -> str:
        return f"json_array_length({self.document}, {self._path})"

    def some(self, alias: str, condition: Callable[[Json], str]) -> str:
        path = self.dialect.mark(f"{json_path(self.keys)}[*]")
        tested = condition(DuckJson(self.dialect, alias, ()))
        items = f"json_extract({self.document}, {path})"
        return f"COALESCE(len(list_filter({items}, lambda {alias}: {tested})) > 0, FALSE)"
