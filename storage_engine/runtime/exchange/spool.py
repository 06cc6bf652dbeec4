"""The rows of an import, in local files: one row for each identity, in the order of identities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage_engine.model.columns import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.query.dialects import quoted
from storage_engine.repository.duck import Duck
from storage_engine.repository.protocol import Identity, ReadWindow, Repository, TypeRef

KEYS_AT_ONCE = 16_384
AT_HAND = 10_000  # so many rows are dealt with in memory
EXAMPLES = 10


@dataclass(slots=True)
class SpooledRows:
    """A file of rows of one type."""

    spec: TypeSpec
    path: Path
    rows: int = 0

    def batches(self, size: int = KEYS_AT_ONCE) -> Iterator[pa.RecordBatch]:
        if not self.rows:
            return
        schema = row_schema(self.spec)
        with pq.ParquetFile(self.path, pre_buffer=False) as file:
            for batch in file.iter_batches(size, columns=schema.names):
                yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    def table(self) -> pa.Table:
        return pa.Table.from_batches(self.batches(), schema=row_schema(self.spec))


class SpoolWriter:
    """Writes one such file, in the order that rows come in."""

    def __init__(self, spec: TypeSpec, path: Path) -> None:
        self.spooled = SpooledRows(spec, path)
        self.ascending = True
        self._last: Identity = ()
        self._writer = pq.ParquetWriter(path, row_schema(spec), compression="lz4")

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        if not rows.num_rows:
            return
        self._writer.write(rows)
        self.spooled.rows += rows.num_rows
        if self.ascending:
            columns = [rows.column(name).to_pylist() for name in self.spooled.spec.identity]
            for identity in zip(*columns, strict=True):
                if identity <= self._last:
                    self.ascending = False
                    break
                self._last = identity

    def close(self) -> None:
        self._writer.close()


class Spool:
    """All rows of an import, by type."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[TypeRef, SpoolWriter] = {}
        self.repeated: dict[TypeRef, int] = {}

    def add(self, spec: TypeSpec, rows: pa.RecordBatch) -> None:
        writer = self._writers.get(spec.ref)
        if writer is None:
            writer = self._writers[spec.ref] = self.writer(spec, "read")
        writer.write(rows)

    def writer(self, spec: TypeSpec, step: str) -> SpoolWriter:
        return SpoolWriter(spec, self._folder / f"{step}-{spec.kind}-{spec.name}.parquet")

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def settled(self, duck: Duck) -> dict[TypeRef, SpooledRows]:
        """Entities first. Of an identity that is stated more than once, the last statement counts,
        as everywhere; `repeated` tells how many did not."""
        made: dict[TypeRef, SpooledRows] = {}
        for ref, writer in sorted(self._writers.items()):
            before = writer.spooled
            made[ref] = before if writer.ascending else self._sorted(before, duck)
            self.repeated[ref] = before.rows - made[ref].rows
        return made

    def _sorted(self, spooled: SpooledRows, duck: Duck) -> SpooledRows:
        writer = self.writer(spooled.spec, "sorted")
        try:
            if spooled.rows <= AT_HAND:
                writer.write(_last_rows(spooled))
            else:
                self._sort_by_duckdb(spooled, writer, duck)
        finally:
            writer.close()
        return writer.spooled

    def _sort_by_duckdb(self, spooled: SpooledRows, writer: SpoolWriter, duck: Duck) -> None:
        """Keys alone are grouped, so that little is in memory; what sorts the rows spills."""
        spec = spooled.spec
        keys = ", ".join(quoted(name) for name in spec.identity)
        columns = ", ".join(f"r.{quoted(name)}" for name in row_schema(spec).names)
        source = f"read_parquet('{_literal(spooled.path)}', file_row_number = true)"
        statement = (
            f"SELECT {columns} FROM {source} AS r JOIN (SELECT max(file_row_number) AS last "
            f"FROM {source} GROUP BY {keys}) AS l ON r.file_row_number = l.last "
            f"ORDER BY {', '.join(f'r.{quoted(name)}' for name in spec.identity)}"
        )
        schema = row_schema(spec)
        with duck.cursor() as cursor, duck.errors():
            for batch in cursor.execute(statement).to_arrow_reader(KEYS_AT_ONCE):
                writer.write(pa.Table.from_batches([batch]).cast(schema))


def _last_rows(spooled: SpooledRows) -> pa.Table:
    """The last row of each identity, in their order."""
    table = spooled.table()
    columns = [table.column(name).to_pylist() for name in spooled.spec.identity]
    places = {identity: row for row, identity in enumerate(zip(*columns, strict=True))}
    return table.take(pa.array([places[identity] for identity in sorted(places)], pa.int64()))


def keys_without(
    relations: SpooledRows, side: str, entities: SpooledRows | None, duck: Duck
) -> Iterator[pa.Table]:
    """The keys on one side of relations that no entity of the same import has, each once, some
    thousands at a time."""
    there = entities.rows if entities is not None else 0
    if max(relations.rows, there) <= AT_HAND:
        keys = {*relations.table().column(side).to_pylist()}
        if entities is not None:
            keys -= {*entities.table().column("entity_key").to_pylist()}
        if keys:
            yield pa.table({"entity_key": pa.array(sorted(keys), pa.string())})
        return
    statement = f"SELECT DISTINCT r.{quoted(side)} AS entity_key FROM {_rows_of(relations)} AS r"
    if entities is not None and there:
        statement += f" ANTI JOIN {_rows_of(entities)} AS e ON r.{quoted(side)} = e.entity_key"
    with duck.cursor() as cursor, duck.errors():
        reader = cursor.execute(f"{statement} ORDER BY 1").to_arrow_reader(KEYS_AT_ONCE)
        for batch in reader:
            yield pa.Table.from_batches([batch]).cast(pa.schema([("entity_key", pa.string())]))


def _rows_of(spooled: SpooledRows) -> str:
    return f"read_parquet('{_literal(spooled.path)}')"


def _literal(path: Path) -> str:
    return str(path).replace("'", "''")


# --- against what is stored -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComparedType:
    """The rows of a type against a storage, as of one commit."""

    spec: TypeSpec
    rows: int
    inserted: SpooledRows
    changed: SpooledRows  # stored otherwise: these conflict
    examples: tuple[Identity, ...]

    @property
    def unchanged(self) -> int:
        return self.rows - self.inserted.rows - self.changed.rows


def compare_rows(
    repository: Repository,
    spooled: SpooledRows,
    spool: Spool,
    tell: Callable[[int], None],
    *,
    as_of: int,
    is_stored: bool,
) -> ComparedType:
    """Which rows are new, and which are stored otherwise. Some thousands are looked up at once, in
    the order of keys, so that each lookup opens few files. `tell` is told how many are through."""
    spec = spooled.spec
    if not is_stored:
        none = SpooledRows(spec, spooled.path)
        return ComparedType(spec, spooled.rows, spooled, none, ())
    inserted, changed = spool.writer(spec, "new"), spool.writer(spec, "changed")
    examples: list[Identity] = []
    done = 0
    try:
        for batch in spooled.batches():
            rows = pa.Table.from_batches([batch])
            keys = rows.select(list(spec.identity))
            stored = repository.read(spec, ReadWindow(as_of=as_of), keys=keys)
            is_new, differs = _states(spec, rows, stored)
            inserted.write(rows.filter(is_new))
            conflicting = rows.filter(differs)
            changed.write(conflicting)
            if conflicting.num_rows and len(examples) < EXAMPLES:
                columns = [conflicting.column(name).to_pylist() for name in spec.identity]
                examples += [*zip(*columns, strict=True)][: EXAMPLES - len(examples)]
            done += batch.num_rows
            tell(done)
    finally:
        inserted.close()
        changed.close()
    return ComparedType(spec, spooled.rows, inserted.spooled, changed.spooled, tuple(examples))


def _states(spec: TypeSpec, rows: pa.Table, stored: pa.Table) -> tuple[pa.Array, pa.Array]:
    """Of each row: is its identity not stored, and is it stored with other values?"""
    columns = [stored.column(name).to_pylist() for name in spec.identity]
    places = {identity: row for row, identity in enumerate(zip(*columns, strict=True))}
    wanted = [rows.column(name).to_pylist() for name in spec.identity]
    indices = pa.array([places.get(i) for i in zip(*wanted, strict=True)], pa.int64())
    is_new = pc.is_null(indices)
    differs = pa.repeat(pa.scalar(False), len(indices))
    for field in spec.fields:
        before = stored.column(field.name).take(indices)
        differs = pc.or_(differs, pc.invert(_equal(rows.column(field.name), before)))
    return is_new, pc.and_(differs, pc.invert(is_new))


def _equal(left: pa.ChunkedArray, right: pa.ChunkedArray) -> pa.ChunkedArray:
    """NULL equals NULL."""
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.or_(pc.fill_null(pc.equal(left, right), False), both_null)
