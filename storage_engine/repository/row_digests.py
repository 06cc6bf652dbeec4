"""Digests of rows by commit, so that two storages can be compared without being held in memory.

As compaction proves its merges: how many rows, and a sum of their hashes, which does not depend on
the order. Engines agree on values, not on how they keep them, so rows are digested as they travel,
in a type's row schema. SQLite has no negative zero: 0.0 and -0.0 count as the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from storage_engine.model.columns import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.query.dialects import quoted

if TYPE_CHECKING:
    import duckdb

_HELD_BYTES = 16 << 20  # of Arrow data, digested at once


class RowDigest(NamedTuple):
    """Of a multiset of rows."""

    rows: int
    content: int


class RowDigests:
    """Digests rows, one batch after the other."""

    def __init__(self) -> None:
        import duckdb  # here: importing storage_engine stays light

        self._connection: duckdb.DuckDBPyConnection = duckdb.connect(":memory:")
        self._connection.execute("SET threads = 1")

    def close(self) -> None:
        self._connection.close()

    def of(self, spec: TypeSpec, batches: Iterable[pa.RecordBatch]) -> Mapping[int, RowDigest]:
        """By commit."""
        sums: dict[int, RowDigest] = {}
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(b.nbytes for b in held) >= _HELD_BYTES:
                self._add(spec, held, sums)
                held = []
        if held:
            self._add(spec, held, sums)
        return sums

    def _add(
        self, spec: TypeSpec, batches: list[pa.RecordBatch], sums: dict[int, RowDigest]
    ) -> None:
        floats = {field.name for field in spec.fields if field.storage == "float"}
        names = row_schema(spec).names
        hashed = ", ".join(
            f"{quoted(name)} + 0.0" if name in floats else quoted(name) for name in names
        )
        cursor = self._connection.cursor()
        try:
            cursor.register("told_rows", pa.Table.from_batches(batches))
            digests = cursor.execute(
                f"SELECT commit_id, count(*), sum(hash({hashed})::HUGEINT) FROM told_rows "
                "GROUP BY commit_id"
            ).fetchall()
        finally:
            cursor.close()
        for commit_id, rows, content in digests:
            before = sums.get(commit_id, RowDigest(0, 0))
            sums[commit_id] = RowDigest(before.rows + rows, before.content + int(content))
