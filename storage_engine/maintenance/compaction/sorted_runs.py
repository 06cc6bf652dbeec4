"""Rows of any number of files in one order, in bounded memory.

Most files are in order as they are: those of commits and of snapshots. Small ones are collected to
runs, which are sorted in memory where they are not yet in order; what does not stay in memory goes
to scratch files. Large ones are read as a stream, unless they are in no order (bulk loads): these
are cut into runs, too.

Runs are merged block by block. Up to the smallest of the keys that the blocks at hand end with,
all rows are there: these are sorted, which costs little as they consist of a few ascending pieces.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.config import KIB
from storage_engine.maintenance.compaction.inputs import Input
from storage_engine.maintenance.compaction.workspace import Workspace

# Shares of the memory limit. Each of two threads holds a run twice while it sorts it.
_RUN_SHARE = 12
_HELD_SHARE = 4
_BLOCKS_SHARE = 6
_LEAST_BLOCK = 64 * KIB
_PIECE_ROWS = 32 * 1024  # of keys that are sorted in a core's own cache

See = Callable[[pa.Table], None]  # is shown all rows as they were decoded


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Ascending by these columns: identities and `commit_id`."""

    keys: tuple[str, ...]

    def holds(self, rows: pa.Table) -> bool:
        if rows.num_rows < 2:
            return True
        columns = [rows.column(name).combine_chunks() for name in self.keys]
        ascends: pa.Array | None = None
        for column in reversed(columns):
            this, following = column.slice(0, len(column) - 1), column.slice(1)
            less = pc.less(this, following)
            if ascends is None:
                ascends = pc.or_(less, pc.equal(this, following))
            else:
                ascends = pc.or_(less, pc.and_(pc.equal(this, following), ascends))
        return bool(pc.all(ascends).as_py())

    def of(self, rows: pa.Table) -> pa.Table:
        """The rows in this order. They should come from older to newer commits: then a stable sort
        by identity does, at half of the price."""
        if self.holds(rows.slice(0, _PIECE_ROWS)) and self.holds(rows):
            return rows
        rows = rows.combine_chunks()
        if self.keys[-1] == "commit_id":
            made = rows.take(_indices(rows, self.keys[:-1]))
            if self.holds(made):
                return made
        return rows.take(_indices(rows, self.keys))


def _indices(rows: pa.Table, keys: Sequence[str]) -> pa.Array:
    """Where the rows of the sorted table are in this one; equal ones stay in their order."""
    if len(keys) > 1:
        return pc.sort_indices(rows.select(keys), sort_keys=[(name, "ascending") for name in keys])
    column = rows.column(keys[0])
    if RowOrder((keys[0],)).holds(rows.slice(0, _PIECE_ROWS // 16)):
        return pc.sort_indices(column)  # a few ascending pieces, as it seems
    places, pieces = [], []
    for start in range(0, len(column), _PIECE_ROWS):
        piece = column.slice(start, _PIECE_ROWS)
        order = pc.sort_indices(piece)
        pieces += piece.take(order).chunks
        places.append(pc.add(order, pa.scalar(start, pa.uint64())))
    return pa.concat_arrays(places).take(pc.sort_indices(pa.chunked_array(pieces)))


class SortedRun(Protocol):
    """Rows in order."""

    def blocks(self, block_bytes: int) -> Iterator[pa.Table]: ...


@dataclass(frozen=True, slots=True)
class HeldRun:
    """In memory."""

    rows: pa.Table

    def blocks(self, block_bytes: int) -> Iterator[pa.Table]:
        step = _rows_in(block_bytes, self.rows.nbytes, self.rows.num_rows)
        for start in range(0, self.rows.num_rows, step):
            yield self.rows.slice(start, step)


@dataclass(frozen=True, slots=True)
class SpilledRun:
    """In a scratch file."""

    path: Path
    schema: pa.Schema

    @classmethod
    def of(cls, rows: pa.Table, path: Path) -> SpilledRun:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as writer:
            step = _rows_in(4 * _LEAST_BLOCK, rows.nbytes, rows.num_rows)
            writer.write_table(rows, max_chunksize=step)
        return cls(path, rows.schema)

    def blocks(self, block_bytes: int) -> Iterator[pa.Table]:
        with pa.OSFile(str(self.path)) as source, pa.ipc.open_stream(source) as reader:
            yield from grouped(iter(reader), self.schema, block_bytes)


@dataclass(frozen=True, slots=True)
class FileRun:
    """A file that is in order, read as a stream."""

    file: Input
    schema: pa.Schema
    see: See

    def blocks(self, block_bytes: int) -> Iterator[pa.Table]:
        for block in grouped(self.file.batches(self.schema, block_bytes), self.schema, block_bytes):
            self.see(block)
            yield block


def _rows_in(wanted_bytes: int, size: int, rows: int) -> int:
    return max(1, wanted_bytes * rows // max(1, size))


def grouped(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, block_bytes: int
) -> Iterator[pa.Table]:
    """Tables of at least so many bytes, but for the last."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            size += batch.nbytes
        if size >= block_bytes:
            yield pa.Table.from_batches(held, schema)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held, schema)


class RunMaker:
    """Makes the runs of a merge: two at a time, each decoded, seen, sorted and kept."""

    def __init__(self, workspace: Workspace, schema: pa.Schema, order: RowOrder, see: See) -> None:
        self._workspace = workspace
        self._schema = schema
        self._order = order
        self._see = see
        self._run_bytes = workspace.memory_bytes // _RUN_SHARE
        self._room = workspace.memory_bytes // _HELD_SHARE
        self._spilled = 0
        self._lock = threading.Lock()

    def runs(self, files: Iterable[Input], step: Callable[[], None]) -> list[SortedRun]:
        """Of files from older to newer commits; so are the runs. `step` is called at each."""
        made: list[SortedRun] = []
        for some in self._workspace.ahead(self._works(files)):
            made += some
            step()
        return made

    def _works(self, files: Iterable[Input]) -> Iterator[Callable[[], list[SortedRun]]]:
        collected: list[Input] = []
        size = 0
        for file in files:
            if collected and size + file.decoded_bytes > self._run_bytes:
                yield partial(self._collect, collected)
                collected, size = [], 0
            if file.decoded_bytes > self._run_bytes:
                yield partial(self._large, file)
            else:
                collected.append(file)
                size += file.decoded_bytes
        if collected:
            yield partial(self._collect, collected)

    def _large(self, file: Input) -> list[SortedRun]:
        keys = pa.schema([self._schema.field(name) for name in self._order.keys])
        last: pa.Table | None = None
        for batch in file.batches(keys, self._run_bytes):
            block = pa.Table.from_batches([batch])
            joined = block if last is None else pa.concat_tables([last, block])
            if not self._order.holds(joined):
                return self._collect([file])
            last = block.slice(max(0, block.num_rows - 1))
        return [FileRun(file, self._schema, self._see)]

    def _collect(self, files: Sequence[Input]) -> list[SortedRun]:
        batches = (b for file in files for b in file.batches(self._schema, self._run_bytes))
        return [self._kept(rows) for rows in grouped(batches, self._schema, self._run_bytes)]

    def _kept(self, rows: pa.Table) -> SortedRun:
        self._see(rows)
        rows = self._order.of(rows)
        with self._lock:
            self._room -= rows.nbytes
            if self._room >= 0:
                return HeldRun(rows)
            self._room += rows.nbytes
            self._spilled += 1
            path = self._workspace.folder / f"run-{self._spilled:06d}.arrow"
        return SpilledRun.of(rows, path)


def merged(workspace: Workspace, runs: Sequence[SortedRun], order: RowOrder) -> Iterator[pa.Table]:
    """All rows of the runs in order. Of equal ones, those of earlier runs come first."""
    block_bytes = max(_LEAST_BLOCK, workspace.memory_bytes // _BLOCKS_SHARE // max(1, len(runs)))
    pieces = _pieces([_Cursor(run.blocks(block_bytes), order.keys) for run in runs])
    yield from workspace.ahead(partial(_joined, some, order) for some in pieces)


def _joined(pieces: Sequence[pa.Table], order: RowOrder) -> pa.Table:
    return order.of(pa.concat_tables(pieces)) if len(pieces) > 1 else pieces[0]


def _pieces(cursors: Sequence[_Cursor]) -> Iterator[list[pa.Table]]:
    """What to sort together: all rows up to a key that no later rows are below."""
    cursors = [cursor for cursor in cursors if cursor.advance()]
    while cursors:
        bound = min(cursor.last for cursor in cursors)
        pieces = [cursor.upto(bound) for cursor in cursors]
        yield [piece for piece in pieces if piece.num_rows]
        cursors = [cursor for cursor in cursors if cursor.rest or cursor.advance()]


class _Cursor:
    """How far a run is taken."""

    def __init__(self, blocks: Iterator[pa.Table], keys: Sequence[str]) -> None:
        self._blocks = blocks
        self._names = keys
        self.rest = 0  # rows of the block at hand

    def advance(self) -> bool:
        """Go on to the next block; whether there is one."""
        block = next(self._blocks, None)
        if block is None:
            return False
        self._block = block
        # Texts as bytes: these are what is sorted by, and no text needs to be well-formed for it.
        self._keys = [
            column.cast(pa.binary()) if pa.types.is_string(column.type) else column
            for column in (block.column(name) for name in self._names)
        ]
        self.rest = block.num_rows
        self.last = self._key(block.num_rows - 1)
        return True

    def upto(self, bound: tuple[Any, ...]) -> pa.Table:
        start = self._block.num_rows - self.rest
        stop = self._block.num_rows
        if bound < self.last:
            stop = bisect_right(range(stop), bound, start, stop, key=self._key)
        self.rest = self._block.num_rows - stop
        return self._block.slice(start, stop - start)

    def _key(self, row: int) -> tuple[Any, ...]:
        return tuple(column[row].as_py() for column in self._keys)
