"""The versions of a type as of a head: from memory where they are at hand, else from files.

The latest rows of small types stay in memory between commits and are brought forward: a session
that commits again need not read its own past, as the rows that it wrote are added, and of other
writers' commits only those since are fetched. Types above a size are not kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog import state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.ranges import KeyRange
from storage_engine.commitlog.records import CommitFile, Entry, Head, TypeHead, TypeRef
from storage_engine.config import MIB
from storage_engine.errors import OntologiaError
from storage_engine.index.record import IndexObjects, IndexVersion, TypeIndex
from storage_engine.index.resolve import (
    Early,
    Resolution,
    read_early,
    resolve,
    resolve_from_chain,
    resolve_type,
)
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.parallel import Background
from storage_engine.objectstore.protocol import ObjectStoreError
from storage_engine.repository.duck import Duck
from storage_engine.repository.object.read.files import DataFile, MissingFileError, Scanner

if TYPE_CHECKING:
    import duckdb

_TYPE_FILE_BYTES = 16 * MIB  # of Parquet, which grows several times in memory
_TYPE_ROWS = 250_000
_KEPT_ROWS = 500_000
_CHUNKS = 64
_UNREAD = 4096  # entries that are left unread at most
_READ_AT_ONCE = 64  # so many small files cost little more than one

# Log id and schema version: rows of another log (the storage was erased and begun anew), or of
# another version, are not brought forward.
Epoch = tuple[str, int]
# The commit that last touched the type, and its manifest: the number alone proves nothing.
Top = tuple[int, str]


class UnreadEntries:
    """Entries of a type whose rows nobody has asked for, found by the keys that may be in them.

    Writers beside this one, whose commits are of one object each, leave thousands of entries with
    one key. Who writes other keys need not read any of them, nor look at each to know that.
    """

    def __init__(self, spec: TypeSpec) -> None:
        self._column = spec.identity[0]
        self._wide: dict[int, Entry] = {}
        self._single: dict[str, dict[int, Entry]] = {}  # by the key that all of its rows have
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        yield from self._wide.values()
        for entries in self._single.values():
            yield from entries.values()

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            key = only_key(entry, self._column)
            place = self._wide if key is None else self._single.setdefault(key, {})
            self._count += id(entry) not in place
            place[id(entry)] = entry

    def take(self, keys: pa.Table | None) -> list[Entry]:
        """Those that may hold one of `keys` (all, for None): they are not among these any more."""
        taken = self.met(keys)
        for entry in taken:
            key = only_key(entry, self._column)
            place = self._wide if key is None else self._single[key]
            del place[id(entry)]
            if key is not None and not place:
                del self._single[key]
        self._count -= len(taken)
        return taken

    def met(self, keys: pa.Table | None) -> list[Entry]:
        """Those that may hold one of `keys`; all, for None."""
        if keys is None:
            return list(self)
        entries = prune_by_keys(list(self._wide.values()), self._column, keys) if self._wide else []
        if self._single:
            for key in dict.fromkeys(keys.column(self._column).to_pylist()):
                entries += self._single.get(key, {}).values()
        return entries


class ResidentType:
    """The latest row per identity of one type as of a commit, found by identity at once."""

    def __init__(
        self, spec: TypeSpec, versions: pa.Table, *, upto: int, epoch: Epoch, top: Top
    ) -> None:
        self.upto = 0
        self.epoch = epoch
        self.top = top
        self.unread = UnreadEntries(spec)  # up to `upto`
        self._identity = spec.identity
        self._rows = versions.schema.empty_table()
        self._fresh: list[tuple[int, pa.Table]] = []  # rows of later commits, to follow these
        self._count = 0  # of both
        self._positions: dict[Hashable, int] = {}
        self.add(versions, upto=upto, top=top)

    def __len__(self) -> int:
        return len(self._positions)

    def add_commit(self, rows: pa.Table, commit_id: int, *, top: Top) -> None:
        """Take in the rows of the next commit, of one version each: at little cost, as most that
        is drafted together meets nothing of one another."""
        for offset, identity in enumerate(self.identities(rows), self._count):
            self._positions[identity] = offset
        self._fresh.append((commit_id, rows))
        self._count += rows.num_rows
        self.upto = commit_id
        self.top = top

    def _all_rows(self) -> pa.Table:
        """With the fresh ones in their places."""
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            commit_ids = [commit_id for commit_id, each in fresh for _ in range(each.num_rows)]
            schema = self._rows.schema
            column = pa.array(commit_ids, schema.field(0).type)
            added = pa.concat_tables([each for _, each in fresh]).combine_chunks()
            added = added.add_column(0, schema.field(0), column).cast(schema)
            self._rows = pa.concat_tables([self._rows, added])
        return self._rows

    def _append(self, ordered: pa.Table) -> None:
        for offset, identity in enumerate(self.identities(ordered), self._count):
            self._positions[identity] = offset
        self._rows = pa.concat_tables([self._all_rows(), ordered])
        self._count = self._rows.num_rows
        if self._rows.column(0).num_chunks > _CHUNKS or self._count > 2 * len(self) + 1000:
            self._tidy()

    def add(self, versions: pa.Table, *, upto: int, top: Top) -> None:
        """Take in the versions (commit_id and row columns) of commits past ours and up to `upto`.

        Others may be among them, where a snapshot spans both or an index is ahead of the head:
        taken in twice, a row would be published twice.
        """
        commit_ids = versions.column("commit_id")
        later = pc.and_(pc.greater(commit_ids, self.upto), pc.less_equal(commit_ids, upto))
        self._append(versions.filter(later).sort_by("commit_id"))
        self.upto = upto
        self.top = top

    def add_late(self, versions: pa.Table) -> None:
        """Take in versions of commits that we have been past already, where they are newer than
        what we know of their identities."""
        ordered = versions.sort_by("commit_id")
        commit_ids = ordered.column("commit_id").to_pylist()
        earlier = self._all_rows().column("commit_id").take(self.positions(ordered)).to_pylist()
        latest: dict[Hashable, int] = {}
        newer = []
        for identity, commit_id, before in zip(
            self.identities(ordered), commit_ids, earlier, strict=True
        ):
            # A snapshot and a commit that it spans may both be among them.
            is_newer = commit_id <= self.upto and latest.get(identity, before or 0) < commit_id
            newer.append(is_newer)
            if is_newer:
                latest[identity] = commit_id
        self._append(ordered.filter(pa.array(newer, pa.bool_())))

    def positions(self, intents: pa.Table) -> pa.Array:
        """Where the stored row of each intent is; null for unknown identities."""
        positions = self._positions
        return pa.array([positions.get(i) for i in self.identities(intents)], pa.int64())

    def rows_at(self, positions: pa.Array) -> pa.Table:
        """Stored rows in the order asked for; all null where the position is."""
        return self._all_rows().take(positions)

    def table(self) -> pa.Table:
        """All kept rows; superseded ones may be among them."""
        return self._all_rows()

    def identities(self, table: pa.Table) -> Iterable[Hashable]:
        columns = [table.column(name).to_pylist() for name in self._identity]
        return columns[0] if len(columns) == 1 else zip(*columns, strict=True)

    def _tidy(self) -> None:
        kept = pa.array(self._positions.values(), pa.int64())
        self._rows = self._rows.take(kept).combine_chunks()
        self._count = self._rows.num_rows
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
            resident = self._types.get(ref)
            if resident is not None:
                self._types.move_to_end(ref)
            return resident

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


@dataclass(frozen=True, slots=True)
class OpenVersions:
    """A cursor with the view `versions`; `unique` when no identity can be in it twice."""

    cursor: duckdb.DuckDBPyConnection
    unique: bool


def newest(entries: Sequence[Entry], upto: int) -> list[Entry]:
    """The entries without the files in which no latest row can be."""
    return [replace(entry, files=entry.newest_files(upto)) for entry in entries]


def only_key(entry: Entry, column: str) -> str | None:
    """The key that all rows of an entry have in an identity column, if it says so."""
    bounds = {file.keys(column) for file in entry.files}
    (low, high), *others = bounds or {KeyRange()}
    return low if not others and low == high else None


def prune_by_keys(entries: Sequence[Entry], column: str, keys: pa.Table) -> list[Entry]:
    """Entries with a file whose key range can hold one of `keys`."""
    if keys.num_rows == 0:
        return []
    bounds = pc.min_max(keys.column(column)).as_py()
    wanted = KeyRange(bounds["min"], bounds["max"])
    return [
        entry
        for entry in entries
        if any(file.keys(column).overlaps(wanted) for file in entry.files)
    ]


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
        self._foreseen: dict[TypeRef, Background[IndexVersion]] = {}

    @property
    def duck(self) -> Duck:
        """What `open` and `scan` give cursors of."""
        return self._scanner.duck

    def open_ahead(self) -> None:
        """Have DuckDB opened for who is about to `open` or `scan`."""
        self._scanner.open_ahead()

    def read_early(self, specs: Sequence[TypeSpec], expected: Head | None) -> tuple[Head, Early]:
        """The head now, with what `resolve_all` takes to need one hop less."""
        refs = [spec.ref for spec in specs]
        return read_early(self._chain, self._indices, refs, expected)

    def type_head(self, spec: TypeSpec, head: Head) -> TypeHead | None:
        return self._chain.type_heads_at(head).get(spec.ref)

    def resolve(self, spec: TypeSpec, head: Head, *, trust_index: bool = True) -> Resolution:
        """Entries of the current schema version (v1: of all), index first."""
        return self.resolve_all([spec], head, trust_index=trust_index)[0]

    def all_entries(self, spec: TypeSpec, head: Head) -> tuple[Entry, ...]:
        """Of all schema versions, index first."""
        (resolution,) = resolve(
            self._chain, self._indices, head, [spec.ref], watermark_is_head=self._v1
        )
        if resolution.warning is not None:
            self._warn(resolution.warning)
        return resolution.entries

    def resolve_all(
        self,
        specs: Sequence[TypeSpec],
        head: Head,
        *,
        trust_index: bool = True,
        only: int | None = None,
        upto: int | None = None,
        history: bool = False,
        early: Early | None = None,
    ) -> list[Resolution]:
        """The same for several types, which costs no more hops.

        `only`: of the first type the entries of that schema version. What is read of them is the
        latest as of `upto`, or of head; with `history` all.
        """
        refs = [spec.ref for spec in specs]
        if trust_index:
            resolutions = resolve(
                self._chain, self._indices, head, refs, watermark_is_head=self._v1, early=early
            )
        else:
            resolutions = resolve_from_chain(self._chain, head, refs)
        return [
            self._readable(
                spec, head, resolution, only=only if n == 0 else None, upto=upto, history=history
            )
            for n, (spec, resolution) in enumerate(zip(specs, resolutions, strict=True))
        ]

    def _readable(
        self,
        spec: TypeSpec,
        head: Head,
        resolution: Resolution,
        *,
        only: int | None,
        upto: int | None,
        history: bool,
    ) -> Resolution:
        """The entries of the version that is asked for, of the current one, or (v1) of all since
        the type was created. A migration has written the latest rows anew: to find these, nothing
        before it is looked at."""
        if resolution.warning is not None:
            self._warn(resolution.warning)
        top = self.type_head(spec, head)
        entries = resolution.entries
        if only is not None:
            kept = tuple(e for e in entries if e.schema_version_id == only)
        elif top is None or top.is_dropped:
            kept = ()
        elif self._v1 and not top.past_versions:
            return resolution  # also where another implementation counts versions in its own way
        elif self._v1 and (history or (upto is not None and upto < top.activation_commit_id)):
            kept = tuple(e for e in entries if e.schema_version_id >= top.first_version_id)
        else:
            kept = tuple(e for e in entries if e.schema_version_id == top.schema_version_id)
        return Resolution(kept, resolution.fallback, resolution.warning)

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
        resolution = self.resolve(spec, head, trust_index=trust_index)
        entries = prune_by_keys(resolution.entries, spec.identity[0], keys)
        return newest(entries, head.commit_id)

    def add_view(
        self,
        cursor: duckdb.DuckDBPyConnection,
        name: str,
        spec: TypeSpec,
        files: Sequence[CommitFile],
    ) -> None:
        """A view of the rows of files that are not (yet) part of any commit."""
        data_files = [DataFile(Entry(0, 0, (file,)), file) for file in files]
        cursor.execute(
            f"CREATE TEMP VIEW {name} AS {self._scanner.source(cursor, spec, data_files)}"
        )

    @contextmanager
    def scan(
        self, spec: TypeSpec, entries: Sequence[Entry], **tables: pa.Table
    ) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._scanner.versions(spec, entries, **tables) as cursor:
            yield cursor

    def resident(
        self,
        spec: TypeSpec,
        head: Head,
        *,
        keys: pa.Table | None = None,
        trust_index: bool = True,
    ) -> ResidentType | None:
        """The type's latest rows in memory as of `head`; None when it is too large to keep.

        With `keys`, what others have written since is left unread where none of them can be in it;
        so are, of many entries, those of another key each.
        """
        top = self.type_head(spec, head)
        if top is None:
            return None
        kept = self._resident.get(spec.ref)
        epoch = (head.log_id, top.schema_version_id)
        at = (top.commit_id, top.manifest_path)
        if kept is not None and kept.epoch != epoch:
            kept = None
        if kept is not None and kept.top == at and not kept.unread.met(keys):
            return kept
        missing: list[Entry] = []
        if kept is not None and kept.top != at:
            missing = self._since(spec, head, top, kept)
            if not self._follow(missing, kept, head):
                kept = None  # of a history that head does not have: it was put back
        if kept is None:
            missing = list(self.resolve(spec, head, trust_index=trust_index).entries)
        missing = newest(missing, head.commit_id)
        unread = list(kept.unread) if kept is not None else []
        files = [file for entry in [*unread, *missing] for file in entry.files]
        if not self._resident.fits(
            file_bytes=sum(f.bytes for f in files), rows=sum(f.row_count for f in files)
        ):
            self._resident.drop(spec.ref)
            return None
        # Where head never comes to stand, other commits follow the type's last one.
        upto = top.commit_id if self._chain.may_never_stand(head) else head.commit_id
        try:
            if kept is None:
                kept = self._begin(spec, missing, keys, upto=upto, epoch=epoch, top=at)
            else:
                self._bring_forward(kept, spec, missing, keys, upto=upto, top=at)
        except MissingFileError:
            if not unread and (kept is not None or not trust_index):
                raise
            self._resident.drop(spec.ref)  # what was left unread may have been merged and be gone
            return self.resident(spec, head, keys=keys, trust_index=bool(unread))
        self._resident.keep(spec.ref, kept)
        return kept

    def foresee(self, refs: Iterable[TypeRef], head: Head) -> None:
        """Begin to read the indices of types that are in memory, where more than the last commit
        was made by others since: `resident` will ask for them."""
        self._foreseen.clear()
        for ref in refs:
            kept = self._resident.get(ref)
            if kept is not None and kept.top[0] < head.commit_id - 1:
                read = partial(self._indices.read, ref, log_id=head.log_id)
                self._foreseen[ref] = self._chain.parallel.start(read)

    def _index(self, ref: TypeRef, log_id: str) -> TypeIndex:
        foreseen = self._foreseen.pop(ref, None)
        if foreseen is not None:
            with suppress(OntologiaError, ObjectStoreError):
                return foreseen.wait().value
        return self._indices.read(ref, log_id=log_id).value

    def _since(self, spec: TypeSpec, head: Head, top: TypeHead, kept: ResidentType) -> list[Entry]:
        """The entries past what is kept. The manifest of the type's head tells of one; more come
        from the index, which is one request for all of them, or from the chain where it lags."""
        chain, above = self._chain, kept.upto
        manifest = chain.head_manifest(head)
        if manifest is not None and manifest.commit_id == top.commit_id:
            previous = next((file.previous for file in manifest.files_of(spec.ref)), None)
            if previous is not None and previous.commit_id > kept.top[0]:
                index = self._index(spec.ref, head.log_id)
                entries, last = index.upto(head.commit_id)
                if last is not None and last.commit_id > kept.top[0]:
                    entries = resolve_type(chain, index, head, spec.ref, top, self._v1).entries
                    return [entry for entry in entries if entry.max_commit_id > above]
        return state.entries(chain, head, spec.ref, top=top, above=above)

    def _begin(
        self,
        spec: TypeSpec,
        entries: Sequence[Entry],
        keys: pa.Table | None,
        *,
        upto: int,
        epoch: Epoch,
        top: Top,
    ) -> ResidentType:
        """Read what `keys` may be in, and all that is of more keys than one."""
        left = UnreadEntries(spec)
        if keys is not None and _READ_AT_ONCE < len(entries) <= _UNREAD:
            left.add(e for e in entries if only_key(e, spec.identity[0]) is not None)
            left.take(keys)
        unread = {id(entry) for entry in left}
        rows = self._scanner.table(spec, [e for e in entries if id(e) not in unread])
        begun = ResidentType(spec, rows, upto=upto, epoch=epoch, top=top)
        begun.unread = left
        return begun

    def _bring_forward(
        self,
        kept: ResidentType,
        spec: TypeSpec,
        missing: Sequence[Entry],
        keys: pa.Table | None,
        *,
        upto: int,
        top: Top,
    ) -> None:
        """Read what `keys` may be in: of the entries that were left before, and of new ones."""
        if len(kept.unread) + len(missing) > _UNREAD:
            keys = None
        late = kept.unread.met(keys)
        since = UnreadEntries(spec)
        since.add(missing)
        now = since.take(keys)
        rows = self._scanner.table(spec, [*late, *now]) if late or now else None
        kept.unread.take(keys)
        kept.unread.add(since)
        if late:
            assert rows is not None
            kept.upto, kept.top = upto, top
            kept.add_late(rows)
        elif rows is not None:
            kept.add(rows, upto=upto, top=top)
        else:
            kept.upto, kept.top = upto, top

    def _follow(self, missing: Sequence[Entry], kept: ResidentType, head: Head) -> bool:
        """Whether entries go on from what is kept; without a request where they say so."""
        if not missing:
            return False
        named = missing[0].files[0].previous
        if named is not None and (named.commit_id, named.manifest_path) == kept.top:
            return True
        link = self._chain.locate(head, kept.top[0])
        return link is not None and link.path == kept.top[1]
