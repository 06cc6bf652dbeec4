"""What the tables of a SQLite storage hold as text, parsed once: types and ranges, not only keys.

Whatever is not what we wrote is an IntegrityError that names table, row and column. SQLite itself
takes any value in any column, so a file that something else has changed is still a sound database.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from storage_engine.errors import IntegrityError
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.protocol import TypeChange

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


class StoredRow(NamedTuple):
    """Where a value comes from, in words."""

    table: str
    row: object  # its key

    def damaged(self, problem: str) -> IntegrityError:
        return IntegrityError(
            f"table {self.table}, row {self.row!r}: {problem}; something else has changed the "
            "file: restore it from a backup (`onto verify --deep` looks for more)",
            key=f"{self.table}/{self.row}",
        )

    def text(self, column: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.damaged(f"{column} should be a text, not {_shown(value)}")
        return value

    def integer(self, column: str, value: Any, *, least: int = 0) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.damaged(
                f"{column} should be a whole number from {least} on, not {_shown(value)}"
            )
        return value

    def instant(self, column: str, value: Any) -> datetime:
        try:
            moment = datetime.fromisoformat(self.text(column, value))
        except ValueError:
            raise self.damaged(f"{column} should be a time, not {_shown(value)}") from None
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)

    def json(self, column: str, value: Any) -> Any:
        try:
            return json.loads(self.text(column, value))
        except (ValueError, RecursionError):
            raise self.damaged(f"{column} should be JSON, not {_shown(value)}") from None

    def json_object(self, column: str, value: Any) -> dict[str, Any]:
        parsed = self.json(column, value)
        if not isinstance(parsed, dict):
            raise self.damaged(f"{column} should be a JSON object, not {_shown(value)}")
        return parsed

    def json_list(self, column: str, value: Any) -> list[dict[str, Any]]:
        parsed = self.json(column, value)
        if not isinstance(parsed, list) or not all(isinstance(item, dict) for item in parsed):
            raise self.damaged(f"{column} should be a JSON list of objects, not {_shown(value)}")
        return parsed

    def texts(self, column: str, value: Any) -> Mapping[str, str]:
        """A JSON object of texts."""
        parsed = self.json_object(column, value)
        if not all(isinstance(text, str) for text in parsed.values()):
            raise self.damaged(f"{column} should be a JSON object of texts, not {_shown(value)}")
        return parsed

    def changes(self, column: str, value: Any) -> list[TypeChange]:
        """What a commit says that it wrote."""
        changes = []
        for item in self.json_list(column, value):
            match item:
                case {
                    "kind": "entity" | "relation" as kind,
                    "type_name": str(name),
                    "inserted": int(inserted),
                    "updated": int(updated),
                } if min(inserted, updated) >= 0:
                    changes.append(TypeChange(kind, name, inserted=inserted, updated=updated))
                case _:
                    raise self.damaged(f"{column} should list types and their rows, not {item}")
        return changes

    def schema(self, value: Any, sha256: Any) -> TypeSpec:
        """A schema, which has its hash beside it."""
        text, wanted = self.text("schema_json", value), self.text("schema_sha256", sha256)
        try:
            return _schema(text, wanted)
        except UNREADABLE as error:
            raise self.damaged(
                f"schema_json is no schema with the hash in schema_sha256 ({error})"
            ) from None


@functools.lru_cache(maxsize=4096)
def _schema(text: str, sha256: str) -> TypeSpec:
    spec = TypeSpec.from_schema_dict(json.loads(text))
    if spec.schema_sha256 != sha256:
        raise ValueError("it has another one")
    return spec


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
