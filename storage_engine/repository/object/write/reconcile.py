"""Intent against latest state: one vectorised join per type, never a query per row.

A row is new when its identity is unknown, changed when any field differs, and otherwise nothing.
Values are compared by `IS DISTINCT FROM`, so NULL equals NULL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog.ranges import KeyRange
from storage_engine.commitlog.records import Entry
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.duck import quoted
from storage_engine.repository.object.read.resident import ResidentType

if TYPE_CHECKING:
    import duckdb

INSERT_FLAG = "__insert"
CONFLICTS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Delta:
    """The rows that a commit must write, and which of them are new."""

    rows: pa.Table
    inserted: int

    @property
    def updated(self) -> int:
        return int(self.rows.num_rows) - self.inserted


def delta_sql(spec: TypeSpec, *, unique: bool, only: str | None = None) -> str:
    """New and changed rows of `intents` against `versions`, with an insert flag.

    Only joins and a narrow GROUP BY: these spill, where a window over whole rows would not.
    `unique`: no identity has two versions, so all of them are the latest. `only`: a condition on
    changed rows `i` and the latest ones `l`, under which they replace them.
    """
    names = row_schema(spec).names
    keys = ", ".join(quoted(name) for name in spec.identity)
    columns = ", ".join(f"i.{quoted(name)}" for name in names)
    changed = " OR ".join(
        f"i.{quoted(f.name)} IS DISTINCT FROM l.{quoted(f.name)}" for f in spec.fields
    )
    if changed and only is not None:
        changed = f"({changed}) AND {only}"
    newest = f"""
        SELECT {keys}, max(commit_id) AS commit_id
        FROM versions SEMI JOIN intents USING ({keys}) GROUP BY {keys}
    """
    latest = f"FROM versions SEMI JOIN ({newest}) USING ({keys}, commit_id)"
    return f"""
        WITH latest AS ({"FROM versions" if unique else latest})
        SELECT {columns}, l.commit_id IS NULL AS {INSERT_FLAG}
        FROM intents i LEFT JOIN latest l USING ({keys})
        WHERE l.commit_id IS NULL{f" OR {changed}" if changed else ""}
    """


def reconcile(cursor: duckdb.DuckDBPyConnection, spec: TypeSpec, *, unique: bool) -> Delta:
    """The delta of the registered table `intents`, in memory, ordered by identity."""
    order = ", ".join(quoted(name) for name in spec.identity)
    found = cursor.execute(f"{delta_sql(spec, unique=unique)} ORDER BY {order}").to_arrow_table()
    return split(spec, found)


def reconcile_resident(spec: TypeSpec, resident: ResidentType, intents: pa.Table) -> Delta:
    """The same against rows in memory, without the cost of planning a query."""
    positions = resident.positions(intents)
    stored = resident.rows_at(positions)
    unknown = pc.is_null(positions)
    write = unknown
    for field in spec.fields:
        write = pc.or_(write, _distinct(intents.column(field.name), stored.column(field.name)))
    rows = intents.filter(write).sort_by([(name, "ascending") for name in spec.identity])
    return Delta(rows, pc.sum(unknown).as_py() or 0)


def resident_changed_since(
    resident: ResidentType, intents: pa.Table, snapshot: int
) -> list[object]:
    """Identities of `intents` whose stored row is later than `snapshot` (the first hundred)."""
    stored = resident.rows_at(resident.positions(intents))
    later = pc.fill_null(pc.greater(stored.column("commit_id"), snapshot), False)
    return list(resident.identities(intents.filter(later)))[:CONFLICTS_SHOWN]


def _distinct(a: pa.ChunkedArray, b: pa.ChunkedArray) -> pa.ChunkedArray:
    """IS DISTINCT FROM."""
    differ = pc.fill_null(pc.not_equal(a, b), True)
    return pc.and_(differ, pc.invert(pc.and_(pc.is_null(a), pc.is_null(b))))


def all_new(spec: TypeSpec, rows: pa.Table) -> Delta:
    """Nothing is stored yet: every row is an insert."""
    ordered = rows.sort_by([(name, "ascending") for name in spec.identity])
    return Delta(ordered, rows.num_rows)


def split(spec: TypeSpec, flagged: pa.Table) -> Delta:
    """Take the insert flag off a delta."""
    inserted = pc.sum(flagged.column(INSERT_FLAG)).as_py() or 0
    return Delta(flagged.select(row_schema(spec).names).cast(row_schema(spec)), int(inserted))


def changed_since(cursor: duckdb.DuckDBPyConnection, spec: TypeSpec, snapshot: int) -> list[object]:
    """Identities of `intents` that have a version later than `snapshot` (the first hundred)."""
    keys = ", ".join(quoted(name) for name in spec.identity)
    rows = cursor.execute(
        f"SELECT DISTINCT {keys} FROM versions v SEMI JOIN intents i USING ({keys}) "
        f"WHERE v.commit_id > ? ORDER BY {keys} LIMIT {CONFLICTS_SHOWN}",
        [snapshot],
    ).fetchall()
    return [row[0] if len(row) == 1 else row for row in rows]


def prune_by_keys(entries: Sequence[Entry], spec: TypeSpec, keys: pa.Table) -> list[Entry]:
    """Entries with a file whose key range can hold one of `keys`."""
    name = spec.identity[0]
    if keys.num_rows == 0:
        return []
    bounds = pc.min_max(keys.column(name)).as_py()
    wanted = KeyRange(bounds["min"], bounds["max"])
    return [
        entry for entry in entries if any(file.keys(name).overlaps(wanted) for file in entry.files)
    ]
