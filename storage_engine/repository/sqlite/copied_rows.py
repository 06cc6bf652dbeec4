"""Rows of one schema version as those of the next, made by SQLite alone.

That is so where a field stays as it is, gets another name, goes from int to float, or is new with
one value for all rows. It saves the way through Python, and what comes out is the same: new values
are taken from a row that was rewritten in the ordinary way, and integers that a float cannot hold
are left to it as well, which refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage_engine.model.field_types import unordered
from storage_engine.model.spec import MISSING, FieldSpec, TypeSpec
from storage_engine.repository.sqlite.data_table import quoted
from storage_engine.schema.diff import source_fields, widens
from storage_engine.schema.migration import TypeMigration

EXACT = 2.0**53  # from here on, not every integer has a float of its own


@dataclass(frozen=True, slots=True)
class CopiedFields:
    """For each field of the new version an SQL expression on alias `h`, or None for a value that
    is the same in all rows; `widened` are the places of those that were integers."""

    expressions: Sequence[str | None]
    widened: Sequence[int]

    @property
    def constants(self) -> list[int]:
        return [n for n, expression in enumerate(self.expressions) if expression is None]

    def columns(self) -> list[str]:
        """Constants are the parameters :constant0, ..."""
        return [
            expression if expression is not None else f":constant{n}"
            for n, expression in enumerate(self.expressions)
        ]


def copied_fields(migration: TypeMigration) -> CopiedFields | None:
    """How SQLite can make the rows; None where it cannot."""
    if migration.source is None or migration.steps:
        return None
    before, now = migration.source.spec, migration.spec
    sources = source_fields(before, now)
    expressions = []
    widened = []
    for place, field in enumerate(now.fields):
        change = _change(before, field, sources)
        if change is None:
            return None
        expression, is_widened = change
        expressions.append(expression)
        widened += [place] if is_widened else []
    return CopiedFields(expressions, widened)


def _change(
    before: TypeSpec, now: FieldSpec, sources: Mapping[str, str]
) -> tuple[str | None, bool] | None:
    if now.name not in sources:
        computed = now.default is MISSING and now.default_factory is not None
        return None if computed else (None, False)
    source = before.field(sources[now.name])
    column = f"h.{quoted(source.name)}"
    same = unordered(source.type_spec) == unordered(now.type_spec)
    if source.storage == now.storage and (same or _is_wider(source, now)):
        return column, False
    if (source.storage, now.storage) == ("int", "float"):
        return f"CAST({column} AS REAL)", True
    return None


def _is_wider(before: FieldSpec, now: FieldSpec) -> bool:
    """Whether a typed column takes more values, and those that it has are stored as they were."""
    return now.storage != "json" and widens(before.type_spec, now.type_spec)
