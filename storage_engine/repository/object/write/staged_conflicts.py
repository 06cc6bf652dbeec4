"""Rows that were staged on one head, compared with what is stored before they are published.

Another commit may have written identities that are in our parts. What we knew of them is stale, so
they are left as that commit made them; with an order column its value decides instead. Only parts
whose key range meets what was written are read, and of those only identity (and order) columns.

Writers that see one partition of their input at a time, such as Spark's data sources, stage rows
as they come and have all of them compared here. The rules are those of all bulk writes: rows that
differ are written, and nothing else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog import ranges
from storage_engine.commitlog.records import CommitFile, Entry, Head
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.query.dialects import quoted
from storage_engine.repository.duck import Stream
from storage_engine.repository.object.read.latest import Versions, prune_by_keys
from storage_engine.repository.object.write.bulk import (
    BulkPart,
    chunks,
    encode_part,
    in_memory,
    key_bounds,
)
from storage_engine.repository.object.write.reconcile import INSERT_FLAG, delta_sql
from storage_engine.repository.protocol import CONFLICTS_SHOWN


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
        for chunk in chunks(Stream(versions.duck, stored.cursor, sql).batches(), part_bytes):
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


_PART = "part"
_WINS = "wins"


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Rows of ours whose identity another commit wrote: `part`, identity, and whether ours wins."""

    spec: TypeSpec
    rows: pa.Table

    def __bool__(self) -> bool:
        return bool(self.rows.num_rows)

    def identities(self) -> list[object]:
        """Of the first hundred."""
        shown = self.rows.slice(0, CONFLICTS_SHOWN)
        columns = [shown.column(name).to_pylist() for name in self.spec.identity]
        return list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))

    def parts(self) -> list[int]:
        return sorted(self.rows.column(_PART).unique().to_pylist())

    def losing(self, part: int) -> pa.Table:
        """Identities that go out of a part."""
        mine = pc.equal(self.rows.column(_PART), part)
        rows = self.rows.filter(pc.and_(mine, pc.invert(self.rows.column(_WINS))))
        return rows.select(list(self.spec.identity))

    def known_before(self, versions: Versions, head: Head, upto: int) -> pa.Table:
        """These rows, with a column `known`: whether the identity was there at commit `upto`."""
        keys = ", ".join(quoted(name) for name in self.spec.identity)
        if upto == 0:
            return self.rows.append_column("known", pa.repeat(False, self.rows.num_rows))
        resolved = versions.resolve(self.spec, head).entries
        entries = prune_by_keys(resolved, self.spec.identity[0], self.rows)
        with versions.scan(self.spec, entries, overtaken=self.rows) as cursor:
            return cursor.execute(
                f"WITH before AS (SELECT DISTINCT {keys} FROM versions WHERE commit_id <= ?) "
                f"SELECT o.{_PART}, o.{_WINS}, b.{quoted(self.spec.identity[0])} IS NOT NULL "
                f"AS known FROM overtaken o LEFT JOIN before b USING ({keys})",
                [upto],
            ).to_arrow_table()

    def counts(self, part: int, earlier: pa.Table) -> tuple[int, int, int]:
        """Of one part: rows that go, those of them that had counted as inserts, and rows that
        stay but are no inserts any more."""
        mine = earlier.filter(pc.equal(earlier.column(_PART), part))
        new = pc.invert(mine.column("known"))
        wins = mine.column(_WINS)
        loses = pc.invert(wins)
        return _count(loses), _count(pc.and_(loses, new)), _count(pc.and_(wins, new))


def overtaken(
    versions: Versions,
    spec: TypeSpec,
    files: Sequence[CommitFile],
    fresh: Sequence[Entry],
    *,
    since: int,
    order_by: str | None,
) -> Overtaken:
    """Which rows of `files` have an identity that the entries hold a version of beyond `since`."""
    met = [n for n, file in enumerate(files) if any(_meet(spec, file, e) for e in fresh)]
    keys = ", ".join(quoted(name) for name in spec.identity)
    order = quoted(order_by) if order_by is not None else "NULL"
    written = pa.table({})
    if met:
        meeting = [e for e in fresh if any(_meet(spec, files[n], e) for n in met)]
        with versions.scan(spec, meeting) as cursor:
            # A snapshot that compaction made meanwhile holds older rows too: the id tells.
            written = cursor.execute(
                f"SELECT {keys}, arg_max({order}, commit_id) AS stored FROM versions "
                f"WHERE commit_id > ? GROUP BY {keys}",
                [since],
            ).to_arrow_table()
    if not written.num_rows:
        return Overtaken(spec, pa.table({_PART: pa.array([], pa.int64())}))
    # The number of a part rides as its commit id, so that one scan covers all of them.
    numbered = [Entry(n, n, (files[n],)) for n in met]
    wins = (
        f"v.{order} IS NOT NULL AND (w.stored IS NULL OR v.{order} > w.stored)"
        if order_by is not None
        else "false"
    )
    listed = ", ".join(f"v.{quoted(name)}" for name in spec.identity)
    with versions.scan(spec, numbered, written=written) as cursor:
        rows = cursor.execute(
            f"SELECT v.commit_id AS {_PART}, {listed}, {wins} AS {_WINS} "
            f"FROM versions v JOIN written w USING ({keys}) ORDER BY ALL"
        ).to_arrow_table()
    return Overtaken(spec, rows)


@contextmanager
def without(
    versions: Versions, spec: TypeSpec, file: CommitFile, identities: pa.Table
) -> Iterator[BulkPart]:
    """A part again, without some of its rows, as a local file for as long as the block runs."""
    keys = ", ".join(quoted(name) for name in spec.identity)
    schema = row_schema(spec)
    columns = ", ".join(quoted(name) for name in schema.names)
    with versions.scan(spec, [Entry(0, 0, (file,))], gone=identities) as cursor:
        rows = cursor.execute(
            f"SELECT {columns} FROM versions ANTI JOIN gone USING ({keys})"
        ).to_arrow_table()
    with tempfile.TemporaryDirectory(prefix="ontologia-part-") as folder:
        yield encode_part(
            spec,
            rows.cast(schema),
            Path(folder) / "part.parquet",
            schema_version_id=file.schema_version_id,
            inserted=0,
        )


def repeated(versions: Versions, spec: TypeSpec, files: Sequence[CommitFile]) -> list[object]:
    """Identities that are in the files more than once (three at most)."""
    keys = ", ".join(quoted(name) for name in spec.identity)
    rows = sum(file.row_count for file in files)

    def look() -> list[Any]:
        with versions.scan(spec, [Entry(0, 0, tuple(files))]) as cursor:
            distinct = f"SELECT count(*) FROM (SELECT DISTINCT hash({keys}) FROM versions)"
            if _single(cursor.execute(distinct).fetchone()) == rows:
                return []  # and if fewer: hashes may collide, so the identities themselves decide
            return cursor.execute(
                f"SELECT {keys} FROM versions GROUP BY {keys} HAVING count(*) > 1 "
                f"ORDER BY {keys} LIMIT 3"
            ).fetchall()

    twice = versions.duck.within_memory(held_bytes(spec, files), look)
    return [row[0] if len(row) == 1 else row for row in twice]


def disjoint(files: Iterable[CommitFile]) -> bool:
    """Whether no two files can hold the same identity, by their ranges of the first key."""
    return ranges.disjoint(file.leading_keys for file in files)


def held_bytes(spec: TypeSpec, files: Iterable[CommitFile]) -> int:
    """About how many bytes a join holds of these files."""
    files = tuple(files)
    rows = sum(file.row_count for file in files)
    return in_memory(spec, rows, sum(file.bytes for file in files))


def _meet(spec: TypeSpec, file: CommitFile, entry: Entry) -> bool:
    name = spec.identity[0]
    keys = file.keys(name)
    return any(keys.overlaps(other.keys(name)) for other in entry.files)


def _count(mask: pa.ChunkedArray) -> int:
    return int(pc.sum(mask).as_py() or 0)


def _single(row: Any) -> int:
    return int(row[0])
