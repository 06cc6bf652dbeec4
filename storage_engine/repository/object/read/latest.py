"""The versions of a type as of a head: from memory where they are at hand, else from files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from storage_engine.commitlog import state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import CommitFile, Entry, Head, TypeHead
from storage_engine.index.record import IndexObjects
from storage_engine.index.resolve import Resolution, resolve, resolve_from_chain
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.object.read.files import DataFile, MissingFileError, Scanner
from storage_engine.repository.object.read.resident import Resident, ResidentType
from storage_engine.repository.object.write.reconcile import prune_by_keys

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, slots=True)
class OpenVersions:
    """A cursor with the view `versions`; `unique` when no identity can be in it twice."""

    cursor: duckdb.DuckDBPyConnection
    unique: bool


def newest(entries: Sequence[Entry], upto: int) -> list[Entry]:
    """The entries without the files in which no latest row can be."""
    return [replace(entry, files=entry.newest_files(upto)) for entry in entries]


class Versions:
    """Finds and opens the rows of types for reading and for reconciling."""

    def __init__(
        self,
        chain: Chain,
        indices: IndexObjects,
        scanner: Scanner,
        resident: Resident,
        *,
        engine_version: str,
        warn: Callable[[str], None],
    ) -> None:
        self._chain = chain
        self._indices = indices
        self._scanner = scanner
        self._resident = resident
        self._v1 = engine_version == "v1"
        self._warn = warn

    def type_head(self, spec: TypeSpec, head: Head) -> TypeHead | None:
        return state.type_heads(self._chain, head).get(spec.ref)

    def resolve(self, spec: TypeSpec, head: Head, *, trust_index: bool = True) -> Resolution:
        """Entries of the current schema version (v1: of all), index first."""
        return self.resolve_all([spec], head, trust_index=trust_index)[0]

    def resolve_all(
        self, specs: Sequence[TypeSpec], head: Head, *, trust_index: bool = True
    ) -> list[Resolution]:
        """The same for several types, which costs no more hops."""
        refs = [spec.ref for spec in specs]
        if trust_index:
            found = resolve(self._chain, self._indices, head, refs, watermark_is_head=self._v1)
        else:
            found = resolve_from_chain(self._chain, head, refs)
        return [self._current(spec, head, one) for spec, one in zip(specs, found, strict=True)]

    def _current(self, spec: TypeSpec, head: Head, found: Resolution) -> Resolution:
        if found.warning is not None:
            self._warn(found.warning)
        if self._v1:
            return found
        top = self.type_head(spec, head)
        current = top.schema_version_id if top is not None else None
        kept = tuple(e for e in found.entries if e.schema_version_id == current)
        return Resolution(kept, found.fallback, found.warning)

    @contextmanager
    def open(
        self, spec: TypeSpec, head: Head, keys: pa.Table, **tables: pa.Table
    ) -> Iterator[OpenVersions]:
        """The view `versions`, in which the latest version of all `keys` is."""
        resident = self.resident(spec, head)
        if resident is not None:
            rows = resident.table()
            with self._scanner.versions(spec, (), resident_rows=rows, **tables) as cursor:
                cursor.execute("CREATE OR REPLACE TEMP VIEW versions AS FROM resident_rows")
                yield OpenVersions(cursor, unique=rows.num_rows == len(resident))
            return
        entries = self._holding(spec, head, keys)
        if self._scanner.lacks(spec, entries):
            entries = self._holding(spec, head, keys, trust_index=False)
        alone = len(entries) <= 1 and all(e.unique(head.commit_id) for e in entries)
        with self._scanner.versions(spec, entries, **tables) as cursor:
            yield OpenVersions(cursor, unique=alone)

    def _holding(
        self, spec: TypeSpec, head: Head, keys: pa.Table, *, trust_index: bool = True
    ) -> list[Entry]:
        """Where the latest versions of `keys` can be."""
        found = self.resolve(spec, head, trust_index=trust_index)
        return newest(prune_by_keys(found.entries, spec, keys), head.commit_id)

    def add_view(
        self,
        cursor: duckdb.DuckDBPyConnection,
        name: str,
        spec: TypeSpec,
        files: Sequence[CommitFile],
    ) -> None:
        """A view of the rows of files that are not (yet) part of any commit."""
        found = [DataFile(Entry(0, 0, (file,)), file) for file in files]
        cursor.execute(f"CREATE TEMP VIEW {name} AS {self._scanner.source(cursor, spec, found)}")

    @contextmanager
    def scan(
        self, spec: TypeSpec, entries: Sequence[Entry], **tables: pa.Table
    ) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._scanner.versions(spec, entries, **tables) as cursor:
            yield cursor

    def resident(
        self, spec: TypeSpec, head: Head, *, trust_index: bool = True
    ) -> ResidentType | None:
        """The type's latest rows in memory as of `head`; None when it is too large to keep."""
        top = self.type_head(spec, head)
        if top is None:
            return None
        known = self._resident.get(spec.ref)
        epoch = (head.log_id, top.schema_version_id)
        if known is not None and known.epoch != epoch:
            known = None
        if known is not None and known.upto >= top.commit_id:
            return known
        if known is not None:
            missing = state.entries(self._chain, head, spec.ref, top=top, above=known.upto)
        else:
            missing = list(self.resolve(spec, head, trust_index=trust_index).entries)
        missing = newest(missing, head.commit_id)
        files = [file for entry in missing for file in entry.files]
        if not self._resident.fits(
            file_bytes=sum(f.bytes for f in files), rows=sum(f.row_count for f in files)
        ):
            self._resident.drop(spec.ref)
            return None
        try:
            rows = self._scanner.table(spec, missing)
        except MissingFileError:
            if known is not None or not trust_index:
                raise
            return self.resident(spec, head, trust_index=False)
        if known is None:
            known = ResidentType(spec, rows, upto=head.commit_id, epoch=epoch)
        else:
            known.add(rows, upto=head.commit_id)
        self._resident.keep(spec.ref, known)
        return known
