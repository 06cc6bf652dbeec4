"""Many files to few: sorted runs merged as a stream, split by role, encoded meanwhile.

v2 rows go in identity order to two kinds of files: `current` (the newest row of each identity in
the run) and `superseded` (the others), each in parts of about the target size whose identities do
not overlap. v1 has one file in the order that the specification gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.maintenance.compaction.inputs import CURRENT, SUPERSEDED, Inputs
from storage_engine.maintenance.compaction.proof import Digest, InputDigest
from storage_engine.maintenance.compaction.sorted_runs import RowOrder, RunMaker, merged
from storage_engine.maintenance.compaction.workspace import Workspace
from storage_engine.model.columns import EngineVersion
from storage_engine.repository.object.write.parquet import (
    EncodedPart,
    SnapshotPart,
    SnapshotSettings,
)

IDENTITY = {"entity": ("entity_key",), "relation": ("left_key", "right_key", "instance_key")}

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
) -> tuple[list[MergedFile], Digest]:
    """Write all rows of the inputs to new files in the workspace; with the inputs' digest."""
    identity = IDENTITY[order.kind]
    v2 = order.engine_version == "v2"
    rows = RowOrder((*identity, "commit_id") if v2 else ("commit_id", *identity))
    schema = inputs.schema.with_metadata({"ontologia.attempt": order.mark})
    digest = InputDigest(workspace, inputs.varying.names)
    writers = [
        RoleWriter(
            workspace.folder, role, schema, identity, order, rolling=v2, constants=inputs.constants
        )
        for role in ((CURRENT, SUPERSEDED) if v2 else (None,))
    ]
    try:
        runs = RunMaker(workspace, inputs.varying, rows, digest.add).runs(
            inputs.files, lambda: advance(0)
        )
        tables = _counted(merged(workspace, runs, rows), advance)
        _write(workspace, writers, split(tables, identity) if v2 else ((t,) for t in tables))
        return [file for writer in writers for file in writer.close()], digest.total
    finally:
        workspace.settle()
        for writer in writers:
            writer.abort()


def _write(
    workspace: Workspace, writers: Sequence[RoleWriter], shares: Iterable[tuple[pa.Table, ...]]
) -> None:
    """Give each writer its share. Each encodes in a thread while the next share is made."""
    begun: list[Callable[[], None]] = []
    for share in shares:
        for wait in begun:
            wait()
        begun = [
            workspace.start(partial(writer.add, rows))
            for writer, rows in zip(writers, share, strict=True)
        ]
    for wait in begun:
        wait()


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
        constants: Mapping[str, Any] | None = None,
    ) -> None:
        """`constants`: columns that the rows come without, each with its value."""
        self._constants = constants or {}
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
        rows = self._whole(rows)
        for start in range(0, rows.num_rows, step):
            self._add(rows.slice(start, step))

    def _whole(self, rows: pa.Table) -> pa.Table:
        for name, value in self._constants.items():
            at = self._schema.get_field_index(name)
            field = self._schema.field(at)
            column = pa.repeat(pa.scalar(value, field.type), rows.num_rows)
            rows = rows.append_column(field, column)
        return rows.select(self._schema.names) if self._constants else rows

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
