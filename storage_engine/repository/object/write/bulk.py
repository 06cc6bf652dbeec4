"""Bulk input: a stream of any length, spooled to local files, reconciled and staged as parts.

Nothing here holds the write lock. Rows are encoded once, in the form they are published in when
the type is new (the usual first load), so that such parts go up while later ones are being read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog.ranges import KeyRange, ascending
from storage_engine.commitlog.records import CommitFile, Head, TypeHead
from storage_engine.errors import SchemaOutdatedError
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.query.dialects import quoted
from storage_engine.repository.duck import Duck, Stream
from storage_engine.repository.object.read.files import parquet
from storage_engine.repository.object.read.latest import Versions
from storage_engine.repository.object.stored_schema import FIRST_VERSION
from storage_engine.repository.object.write.parquet import (
    EncodedPart,
    encode_file,
    scratch_folder,
    stored_table,
)
from storage_engine.repository.object.write.reconcile import INSERT_FLAG, changed_since, delta_sql
from storage_engine.repository.protocol import Identity, Snapshot

if TYPE_CHECKING:
    import duckdb

_VALUE_BYTES = 24  # of one value in a join: short texts, with their share of hash and pointer
_SIDES = 2  # of a join: what is stated and what is stored
_UNPACKED = 4  # times the size in a file

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BulkPart:
    """One local file of new and changed rows."""

    encoded: EncodedPart
    inserted: int
    ascending: bool  # by the first identity column, strictly: so no identity is in it twice


@dataclass(frozen=True, slots=True)
class BulkParts:
    """What is to be published of a bulk input, as local files; `staged` once they are uploaded."""

    parts: tuple[BulkPart, ...]
    staged: tuple[CommitFile, ...] | None = None

    @property
    def rows(self) -> int:
        if self.staged is not None:
            return sum(file.row_count for file in self.staged)
        return sum(part.encoded.rows for part in self.parts)


Stage = Callable[[TypeSpec, BulkPart], CommitFile]


class PartsSource(Protocol):
    """Where a commit gets the parts of a type that is too large to hold."""

    def parts(self, head: Head, top: TypeHead | None, *, snapshot: Snapshot | None) -> BulkParts:
        """What is to be published of the type as of `head`; asked again when head moved."""


class BulkInput:
    """One type's stream. `stage` uploads a part before the lock; None where the engine has no
    staging (v1), which uploads under the lock instead."""

    def __init__(
        self,
        spec: TypeSpec,
        versions: Versions,
        duck: Duck,
        *,
        schema_version_id: int,
        part_bytes: int,
        stage: Stage | None,
    ) -> None:
        self.spec = self._spec = spec
        self._versions = versions
        self._duck = duck
        self._schema_version_id = schema_version_id
        self._part_bytes = part_bytes
        self._stage = stage
        self._folder = scratch_folder("ontologia-bulk-")
        self._spool: BulkParts = BulkParts(())
        self._unique: bool | None = None
        self._repeated = 0
        self._found: tuple[int, BulkParts] | None = None  # as of the type's head
        self._passes = 0

    def spool(self, stream: Iterable[pa.RecordBatch], *, stage_at_once: bool) -> None:
        """Read the stream to its end. `stage_at_once` when the type is new: then what is spooled
        is what will be published, unless identities repeat."""
        if not stage_at_once:
            self._versions.open_ahead()  # to compare with what is stored
        stage = self._stage if stage_at_once else None
        rows = ((chunk, chunk.num_rows) for chunk in chunks(stream, self._part_bytes))
        self._spool = self._encode(rows, stage)

    def parts(self, head: Head, top: TypeHead | None, *, snapshot: Snapshot | None) -> BulkParts:
        """The new and changed rows as of `head`."""
        version = top.schema_version_id if top is not None else FIRST_VERSION
        if version != self._schema_version_id:
            raise version_moved(self._spec, version, self._schema_version_id)
        if not self._spool.parts:
            return self._spool
        as_of = top.commit_id if top is not None else 0
        if self._found is not None:
            known_as_of, earlier = self._found
            if known_as_of == as_of or not self._touched(head, known_as_of):
                return earlier
        if snapshot is not None and as_of > snapshot.since(self._spec.ref):
            self._check_unchanged(head, snapshot)
        if top is None and self._is_unique():
            parts = self._spool
            if self._stage is not None and parts.staged is None:
                staged = tuple(self._stage(self._spec, part) for part in parts.parts)
                parts = BulkParts(parts.parts, staged)
        else:
            parts = self._within_memory(lambda: self._reconcile(head))
        self._found = (as_of, parts)
        return parts

    @property
    def repeated(self) -> int:
        """How many rows state an identity again, as far as it was looked at."""
        return self._repeated

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- reconcile ----------------------------------------------------------------------------

    def _within_memory(self, work: Callable[[], T]) -> T:
        """What compares all rows of the stream: they are what a join or grouping holds."""
        size = sum(part.encoded.size for part in self._spool.parts)
        return self._duck.within_memory(
            in_memory(self._spec, self._spool.rows, size),
            work,
            columns=_SIDES * len(row_schema(self._spec)),
        )

    def _reconcile(self, head: Head) -> BulkParts:
        keys = self._key_bounds()
        with self._versions.open(self._spec, head, keys) as stored:
            self._create_intents(stored.cursor)
            rows = Stream(self._duck, stored.cursor, delta_sql(self._spec, unique=stored.unique))
            return self._encode(self._flagged(rows.batches()), self._stage)

    def _flagged(self, reader: Iterable[pa.RecordBatch]) -> Iterator[tuple[pa.Table, int]]:
        for chunk in chunks(reader, self._part_bytes):
            inserted = pc.sum(chunk.column(INSERT_FLAG)).as_py() or 0
            yield chunk.select(row_schema(self._spec).names), int(inserted)

    def _touched(self, head: Head, since: int) -> bool:
        """Whether another commit since then changed one of our identities."""
        return self._changed_since(head, since, any)

    def _check_unchanged(self, head: Head, snapshot: Snapshot) -> None:
        ref = self._spec.ref
        self._changed_since(head, snapshot.since(ref), lambda rows: snapshot.check(ref, rows))

    def _changed_since(
        self, head: Head, since: int, use: Callable[[Iterator[tuple[Identity, int]]], T]
    ) -> T:
        """What `use` makes of our identities that were changed, with their latest commits."""

        def look() -> T:
            with self._versions.open(self._spec, head, self._key_bounds()) as stored:
                self._create_intents(stored.cursor)
                return use(changed_since(stored.cursor, self._spec, since))

        return self._within_memory(look)

    def _create_intents(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """A view of the spooled rows, one per identity: the last one stated."""
        last = ""
        if not self._is_unique():
            keys = ", ".join(quoted(name) for name in self._spec.identity)
            last = (
                f" QUALIFY row_number() OVER (PARTITION BY {keys} "
                "ORDER BY filename DESC, file_row_number DESC) = 1"
            )
        names = ", ".join(quoted(name) for name in row_schema(self._spec).names)
        cursor.execute(f"CREATE TEMP VIEW intents AS SELECT {names} FROM {self._spooled()}{last}")

    def _is_unique(self) -> bool:
        """Whether no identity repeats, by the cheapest proof that there is."""
        if self._unique is None:
            keys = ", ".join(quoted(name) for name in self._spec.identity)
            rows = self._spool.rows
            if not self._is_ascending() and self._distinct(f"hash({keys})") != rows:
                self._repeated = rows - self._distinct(keys)  # hashes may collide
            self._unique = self._repeated == 0
        return self._unique

    def _is_ascending(self) -> bool:
        """Sorted input, as extracts often are: each part ascends and ends before the next."""
        name = self._spec.identity[0]
        return all(part.ascending for part in self._spool.parts) and ascending(
            KeyRange.parse(part.encoded.key_range.get(name)) for part in self._spool.parts
        )

    def _distinct(self, expression: str) -> int:
        def count() -> int:
            with self._duck.cursor() as cursor, self._duck.errors():
                row = cursor.execute(
                    f"SELECT count(*) FROM (SELECT DISTINCT {expression} FROM {self._spooled()})"
                ).fetchone()
            return int(row[0]) if row else 0

        return self._within_memory(count)

    def _spooled(self) -> str:
        files = [str(part.encoded.content) for part in self._spool.parts]
        return parquet(files, "filename = true", "file_row_number = true")

    def _key_bounds(self) -> pa.Table:
        return key_bounds(self._spec, (part.encoded.key_range for part in self._spool.parts))

    # -- encoding -----------------------------------------------------------------------------

    def _encode(self, chunks: Iterable[tuple[pa.Table, int]], stage: Stage | None) -> BulkParts:
        """Encode (and stage) chunks on all cores, with no more in flight than there are cores."""
        self._passes += 1
        workers = max(2, os.cpu_count() or 1)
        done: list[tuple[BulkPart, CommitFile | None]] = []
        with ThreadPoolExecutor(workers, thread_name_prefix="onto-encode") as pool:
            running: list[Future[tuple[BulkPart, CommitFile | None]]] = []
            for number, (chunk, inserted) in enumerate(chunks):
                if len(running) >= workers:
                    done.append(running.pop(0).result())
                running.append(pool.submit(self._encode_one, number, chunk, inserted, stage))
                del chunk
            done += [future.result() for future in running]
        parts = tuple(part for part, _ in done)
        staged = tuple(file for _, file in done if file is not None)
        return BulkParts(parts, staged if stage is not None else None)

    def _encode_one(
        self, number: int, rows: pa.Table, inserted: int, stage: Stage | None
    ) -> tuple[BulkPart, CommitFile | None]:
        # Names sort in the order of the stream: the last statement of an identity is found by it.
        path = self._folder / f"{self._passes:03d}-{number:06d}.parquet"
        part = encode_part(
            self._spec, rows, path, schema_version_id=self._schema_version_id, inserted=inserted
        )
        return part, stage(self._spec, part) if stage is not None else None


def version_moved(spec: TypeSpec, now: int, staged: int) -> SchemaOutdatedError:
    """What a writer is told whose rows were encoded for a version that is not current any more."""
    return SchemaOutdatedError(
        f"{spec.name} got another schema version while its rows were staged (now {now}, staged "
        f"for {staged}); nothing was published, write the data again",
        type=spec.name,
        stored_version=now,
    )


def in_memory(spec: TypeSpec, rows: int, file_bytes: int) -> int:
    """About how many bytes a join holds of rows that are so many in Parquet files."""
    return max(rows * len(row_schema(spec).names) * _VALUE_BYTES, file_bytes * _UNPACKED)


def encode_part(
    spec: TypeSpec, rows: pa.Table, path: Path, *, schema_version_id: int, inserted: int
) -> BulkPart:
    """Rows (in the row schema) as a local file, in the form that staged parts have: of engine v2,
    and without a commit, which the manifest will say. Whoever stages, encodes by this."""
    table = stored_table(
        spec, rows, engine_version="v2", schema_version_id=schema_version_id, commit_id=None
    )
    return BulkPart(
        encode_file(spec, table, path), inserted, ascends(rows.column(spec.identity[0]))
    )


def ascends(keys: pa.ChunkedArray) -> bool:
    """Strictly: no key is there twice."""
    whole = keys.combine_chunks()
    return pc.all(pc.less(whole[:-1], whole[1:])).as_py() is not False


def key_bounds(spec: TypeSpec, ranges: Iterable[Mapping[str, Any]]) -> pa.Table:
    """The least and greatest keys of some files, enough to prune stored ones by."""
    name = spec.identity[0]
    bounds: list[str] = []
    for stored in ranges:
        low, high = KeyRange.parse(stored.get(name))
        bounds += [low if low is not None else "", high if high is not None else "\U0010ffff"]
    return pa.table({name: pa.array(bounds, pa.string())})


def chunks(stream: Iterable[pa.RecordBatch], part_bytes: int) -> Iterator[pa.Table]:
    """Tables of about a part's size, counted as Arrow data; a few are in memory at once."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in stream:
        if batch.num_rows == 0:
            continue
        held.append(batch)
        size += batch.nbytes
        if size >= part_bytes:
            yield pa.Table.from_batches(held)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held)
