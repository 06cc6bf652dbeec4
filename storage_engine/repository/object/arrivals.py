"""Parts that were staged as their rows came, compared with what is stored only before the publish.

For writers that see one partition of their input at a time, such as Spark's data sources. The
rules are those of all bulk writes: rows that differ are written, and nothing else; what a commit
after the writer's start has made of an identity stays; with an order column its values decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog.records import CommitFile, Head
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.duck import quoted
from storage_engine.repository.object.bulk import chunks, key_bounds
from storage_engine.repository.object.reconcile import INSERT_FLAG, delta_sql
from storage_engine.repository.object.versions import Versions

_BATCH_ROWS = 64 * 1024


def differing(
    versions: Versions,
    spec: TypeSpec,
    head: Head,
    files: Sequence[CommitFile],
    *,
    since: int,
    order_by: str | None,
    part_bytes: int,
) -> Iterator[tuple[pa.Table, int]]:
    """What is to be written of the files: rows for a part at a time, and how many are new."""
    schema = row_schema(spec)
    with versions.open(spec, head, key_bounds(spec, (file.key_range for file in files))) as stored:
        versions.add_view(stored.cursor, "arrived", spec, files)
        stored.cursor.execute(f"CREATE TEMP VIEW intents AS {_chosen(spec, order_by)}")
        sql = delta_sql(spec, unique=stored.unique, only=_may_replace(since, order_by))
        reader = stored.cursor.execute(sql).to_arrow_reader(_BATCH_ROWS)
        for chunk in chunks(reader, part_bytes):
            inserted = int(pc.sum(chunk.column(INSERT_FLAG)).as_py() or 0)
            yield chunk.select(schema.names).cast(schema), inserted


def _chosen(spec: TypeSpec, order_by: str | None) -> str:
    """The rows that count: of one identity those with the greatest order value. A row said twice
    is one row then; other repetitions are found later."""
    columns = ", ".join(f"a.{quoted(name)}" for name in row_schema(spec).names)
    if order_by is None:
        return f"SELECT {columns} FROM arrived a"
    keys = ", ".join(quoted(name) for name in spec.identity)
    order = quoted(order_by)
    return (
        f"SELECT DISTINCT {columns} FROM arrived a JOIN "
        f"(SELECT {keys}, max({order}) AS newest FROM arrived GROUP BY {keys}) m USING ({keys}) "
        f"WHERE a.{order} IS NOT DISTINCT FROM m.newest"
    )


def _may_replace(since: int, order_by: str | None) -> str:
    """When a row (i) that differs from the stored one (l) is written."""
    if order_by is None:
        return f"l.commit_id <= {since:d}"
    ours, theirs = f"i.{quoted(order_by)}", f"l.{quoted(order_by)}"
    newer = f"({ours} IS NOT NULL AND ({theirs} IS NULL OR {ours} > {theirs}))"
    as_new = f"({theirs} IS NULL OR {ours} >= {theirs})"
    return f"CASE WHEN l.commit_id <= {since:d} THEN {as_new} ELSE {newer} END"
