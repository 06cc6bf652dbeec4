"""Many files to few: sorted by DuckDB, which spills, written as a stream, and proven.

v2 rows go in identity order to two kinds of files: `current` (the newest row of each identity in
the run) and `superseded` (the others), each in parts of about the target size whose identities do
not overlap. v1 has one file in the order that the specification gives it.

A merge has a scratch folder and a DuckDB of its own, in bounded memory: it must not take the memory
of queries, and with a thread for each core of a large machine it would not fit into the limit.

Nothing is published without the proof that the merge lost, changed and invented nothing. It looks
at the inputs and at the encoded outputs, not at how one became the other: as many rows, the same
multiset of rows (a sum of row hashes does not depend on order), and in the `current` files exactly
the newest row of each identity, because latest reads open nothing else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.errors import ConfigurationError, IntegrityError, StorageBackendError
from storage_engine.maintenance.compaction.inputs import Inputs
from storage_engine.model.columns import EngineVersion
from storage_engine.repository.duck import quoted
from storage_engine.repository.object.read.files import parquet
from storage_engine.repository.object.write.parquet import (
    EncodedPart,
    SnapshotPart,
    SnapshotSettings,
)

if TYPE_CHECKING:
    import duckdb

_THREADS = 2


class Workspace:
    """A folder for files, and cursors that spill into it."""

    def __init__(self, folder: Path, connection: duckdb.DuckDBPyConnection) -> None:
        self.folder = folder
        self._connection = connection

    def cursor(self) -> duckdb.DuckDBPyConnection:
        return self._connection.cursor()


@contextmanager
def open_workspace(memory_limit: str) -> Iterator[Workspace]:
    """Gone with all its files at the end. What DuckDB cannot do for want of memory or disk is
    raised as an error that says so."""
    import duckdb  # here: importing storage_engine stays light

    with tempfile.TemporaryDirectory(prefix="ontologia-compact-") as folder:
        connection = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": memory_limit,
                "temp_directory": f"{folder}/spill",
                "threads": _THREADS,
                "preserve_insertion_order": "false",
                "autoinstall_known_extensions": "false",
            },
        )
        try:
            connection.execute("SET GLOBAL TimeZone = 'UTC'")
            connection.execute("SET enable_progress_bar = false")
            yield Workspace(Path(folder), connection)
        except duckdb.OutOfMemoryException as error:
            raise ConfigurationError(
                f"the merge does not fit into s3_duckdb_memory_limit ({memory_limit}), raise it; "
                f"nothing was published: {_first_line(error)}"
            ) from error
        except (duckdb.IOException, OSError) as error:
            raise StorageBackendError(
                f"the merge failed in {tempfile.gettempdir()}, where temporary files are; nothing "
                f"was published: {_first_line(error)}",
                operation="compact",
                retryable=True,
            ) from error
        finally:
            connection.close()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Digest:
    """Of a multiset of rows."""

    rows: int
    content: int

    def __str__(self) -> str:
        return f"{self.rows} rows (content {self.content:x})"


def prove(workspace: Workspace, kind: str, inputs: Inputs, outputs: Sequence[MergedFile]) -> Digest:
    """The digest that inputs and outputs share. Raises IntegrityError when they do not."""
    columns = inputs.names
    keys = [*IDENTITY[kind], "commit_id"]
    before = _digest(workspace, inputs.sql(), columns)
    after = _digest(workspace, _files(outputs), columns)
    demand(before, after, "the rows of the inputs and of the snapshot")
    current = [output for output in outputs if output.role == CURRENT]
    if current:
        identity = ", ".join(quoted(name) for name in IDENTITY[kind])
        newest = (
            f"SELECT {identity}, max(commit_id) AS commit_id FROM ({inputs.sql()}) "
            f"GROUP BY {identity}"
        )
        expected = _digest(workspace, newest, keys)
        demand(expected, _digest(workspace, _files(current), keys), "the newest rows by identity")
    return before


def _files(outputs: Sequence[MergedFile]) -> str:
    return f"FROM {parquet([str(output.path) for output in outputs])}"


def _digest(workspace: Workspace, rows: str, columns: Sequence[str]) -> Digest:
    hashed = ", ".join(quoted(name) for name in columns)
    cursor = workspace.cursor()
    try:
        row = cursor.execute(
            f"SELECT count(*), coalesce(sum(hash({hashed})::HUGEINT), 0) FROM ({rows})"
        ).fetchone()
    finally:
        cursor.close()
    assert row is not None
    return Digest(int(row[0]), int(row[1]))


def demand(before: Digest, after: Digest, what: str) -> None:
    """Raises IntegrityError when the digests differ."""
    if before != after:
        raise IntegrityError(
            f"compaction is refused: {what} differ, {before} before and {after} after; "
            "nothing was published"
        )


_BATCH_ROWS = 64 * 1024
IDENTITY = {"entity": ("entity_key",), "relation": ("left_key", "right_key", "instance_key")}
CURRENT, SUPERSEDED = "current", "superseded"

Advance = Callable[[int], None]  # told how many more rows are merged


@dataclass(frozen=True, slots=True)
class MergedFile:
    """A local file of a snapshot."""

    role: str | None
    part: EncodedPart

    @property
    def path(self) -> Path:
        assert isinstance(self.part.content, Path)
        return self.part.content


@dataclass(frozen=True, slots=True)
class MergeOrder:
    """How to merge one run."""

    kind: str
    engine_version: EngineVersion
    settings: SnapshotSettings
    expected_rows: int
    expected_bytes: int
    mark: str  # kept in each file, so that its writer recognises it


def merge(
    workspace: Workspace, inputs: Inputs, order: MergeOrder, advance: Advance
) -> list[MergedFile]:
    """Write all rows of the inputs to new files in the workspace."""
    folder = workspace.folder
    identity = IDENTITY[order.kind]
    keys = [*identity, "commit_id"] if order.engine_version == "v2" else ["commit_id", *identity]
    ordered = f"{inputs.sql()} ORDER BY {', '.join(quoted(key) for key in keys)}"
    schema = inputs.schema.with_metadata({"ontologia.attempt": order.mark})
    cursor = workspace.cursor()
    writers: list[RoleWriter] = []
    try:
        reader = cursor.execute(ordered).to_arrow_reader(_BATCH_ROWS)
        batches = _counted((pa.Table.from_batches([b]).cast(schema) for b in reader), advance)
        if order.engine_version == "v1":
            whole = RoleWriter(folder, None, schema, identity, order, rolling=False)
            writers.append(whole)
            for batch in batches:
                whole.add(batch)
            return whole.close()
        current = RoleWriter(folder, CURRENT, schema, identity, order)
        superseded = RoleWriter(folder, SUPERSEDED, schema, identity, order)
        writers += [current, superseded]
        for newest, older in split(batches, identity):
            current.add(newest)
            superseded.add(older)
        return [*current.close(), *superseded.close()]
    finally:
        cursor.close()
        for writer in writers:
            writer.abort()


def split(
    batches: Iterable[pa.Table], identity: tuple[str, ...]
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Rows sorted by identity and commit, as (newest of their identity, the others). The last
    row of a batch waits for the next one, which tells whether it is the newest."""
    held: pa.Table | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        table = batch if held is None else pa.concat_tables([held, batch])
        last = table.num_rows - 1
        rows, held = table.slice(0, last), table.slice(last)
        if last:
            repeats = _equals_next(table, identity)
            yield rows.filter(pc.invert(repeats)), rows.filter(repeats)
    if held is not None:
        yield held, held.slice(0, 0)


def _equals_next(table: pa.Table, identity: tuple[str, ...]) -> pa.Array:
    """For each row but the last: whether the next one has the same identity."""
    same: pa.Array | None = None
    for name in identity:
        column = table.column(name).combine_chunks()
        equal = pc.equal(column.slice(0, len(column) - 1), column.slice(1))
        same = equal if same is None else pc.and_(same, equal)
    assert same is not None
    return same


def _counted(tables: Iterable[pa.Table], advance: Advance) -> Iterator[pa.Table]:
    for table in tables:
        yield table
        advance(table.num_rows)


class RoleWriter:
    """The parts of one role."""

    def __init__(
        self,
        folder: Path,
        role: str | None,
        schema: pa.Schema,
        identity: tuple[str, ...],
        order: MergeOrder,
        *,
        rolling: bool = True,
    ) -> None:
        self._folder = folder
        self._role = role
        self._schema = schema
        self._identity = identity
        self._order = order
        self._rolling = rolling
        self._open: SnapshotPart | None = None
        self._last: pa.Table | None = None  # the last row written
        self._done: list[MergedFile] = []

    def add(self, rows: pa.Table) -> None:
        """A row group at a time: after each one a part may be full."""
        step = self._order.settings.row_group_rows
        for start in range(0, rows.num_rows, step):
            self._add(rows.slice(start, step))

    def _add(self, rows: pa.Table) -> None:
        if self._open is not None and self._rolling and self._open.full:
            at = self._next_identity(rows)
            self._open.write(rows.slice(0, at))
            rows = rows.slice(at)
            if not rows.num_rows:
                return
            self._finish()
        if self._open is None:
            self._open = self._new()
        self._open.write(rows)
        self._last = rows.slice(rows.num_rows - 1).combine_chunks()

    def close(self) -> list[MergedFile]:
        if self._open is not None:
            self._finish()
        return self._done

    def abort(self) -> None:
        if self._open is not None:
            self._open.abort()
            self._open = None

    def _next_identity(self, rows: pa.Table) -> int:
        """Where an identity begins that the open part has not: parts may not share one."""
        assert self._last is not None
        repeats = _equals_next(pa.concat_tables([self._last, rows]), self._identity)
        at = pc.index(repeats, False).as_py()
        return rows.num_rows if at < 0 else int(at)

    def _new(self) -> SnapshotPart:
        name = f"out-{self._role or 'all'}-{len(self._done):05d}.parquet"
        return SnapshotPart(
            self._folder / name,
            self._schema,
            identity=self._identity,
            settings=self._order.settings,
            expected_rows=self._order.expected_rows,
            expected_bytes=self._order.expected_bytes,
        )

    def _finish(self) -> None:
        assert self._open is not None
        self._done.append(MergedFile(self._role, self._open.close()))
        self._open = None
