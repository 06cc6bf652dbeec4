"""Latest state of small types, kept in memory between commits and brought forward.

A session that commits again need not read its own past: the rows it wrote are added here, and of
other writers' commits only those since are fetched. Types above a size are not kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog.records import TypeRef
from storage_engine.config import MIB
from storage_engine.model.spec import TypeSpec

_TYPE_FILE_BYTES = 16 * MIB  # of Parquet, which grows several times in memory
_TYPE_ROWS = 250_000
_KEPT_ROWS = 500_000
_CHUNKS = 64

# Log id and schema version: rows of another log (the storage was erased and begun anew), or of
# another version, are not brought forward.
Epoch = tuple[str, int]


class ResidentType:
    """The latest row per identity of one type as of a commit, found by identity at once."""

    def __init__(self, spec: TypeSpec, versions: pa.Table, *, upto: int, epoch: Epoch) -> None:
        self.upto = 0
        self.epoch = epoch
        self._identity = spec.identity
        self._rows = versions.schema.empty_table()
        self._positions: dict[Hashable, int] = {}
        self.add(versions, upto=upto)

    def __len__(self) -> int:
        return len(self._positions)

    def add(self, versions: pa.Table, *, upto: int) -> None:
        """Take in the versions (commit_id and row columns) of commits past ours and up to `upto`.

        Others may be among them, where a snapshot spans both or an index is ahead of the head:
        taken in twice, a row would be published twice.
        """
        commit_ids = versions.column("commit_id")
        later = pc.and_(pc.greater(commit_ids, self.upto), pc.less_equal(commit_ids, upto))
        start = self._rows.num_rows
        ordered = versions.filter(later).sort_by("commit_id")
        self._rows = pa.concat_tables([self._rows, ordered])
        for offset, identity in enumerate(self.identities(ordered)):
            self._positions[identity] = start + offset
        self.upto = upto
        if self._rows.column(0).num_chunks > _CHUNKS or self._rows.num_rows > 2 * len(self) + 1000:
            self._tidy()

    def positions(self, intents: pa.Table) -> pa.Array:
        """Where the stored row of each intent is; null for unknown identities."""
        found = self._positions
        return pa.array([found.get(i) for i in self.identities(intents)], pa.int64())

    def rows_at(self, positions: pa.Array) -> pa.Table:
        """Stored rows in the order asked for; all null where the position is."""
        return self._rows.take(positions)

    def table(self) -> pa.Table:
        """All kept rows; superseded ones may be among them."""
        return self._rows

    def identities(self, table: pa.Table) -> Iterable[Hashable]:
        columns = [table.column(name).to_pylist() for name in self._identity]
        return columns[0] if len(columns) == 1 else zip(*columns, strict=True)

    def _tidy(self) -> None:
        kept = pa.array(self._positions.values(), pa.int64())
        self._rows = self._rows.take(kept).combine_chunks()
        self._positions = {identity: at for at, identity in enumerate(self._positions)}


class Resident:
    """A bounded set of resident types, least recently used first out."""

    def __init__(self) -> None:
        self._types: OrderedDict[TypeRef, ResidentType] = OrderedDict()
        self._mutex = threading.Lock()

    @staticmethod
    def fits(*, file_bytes: int, rows: int) -> bool:
        return file_bytes <= _TYPE_FILE_BYTES and rows <= _TYPE_ROWS

    def get(self, ref: TypeRef) -> ResidentType | None:
        with self._mutex:
            found = self._types.get(ref)
            if found is not None:
                self._types.move_to_end(ref)
            return found

    def keep(self, ref: TypeRef, resident: ResidentType) -> None:
        with self._mutex:
            self._types[ref] = resident
            self._types.move_to_end(ref)
            if len(resident) > _TYPE_ROWS:
                self._types.pop(ref)
            while sum(len(t) for t in self._types.values()) > _KEPT_ROWS:
                self._types.popitem(last=False)

    def drop(self, ref: TypeRef) -> None:
        with self._mutex:
            self._types.pop(ref, None)
