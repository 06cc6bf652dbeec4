"""One type of a merge: what both sides have made of it, and what comes of that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog.records import CommitFile, Manifest, TypeHead, entry_of
from storage_engine.commitlog.series import UPDATE
from storage_engine.errors import MissingUpgraderError
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.query.dialects import quoted
from storage_engine.repository.duck import Duck
from storage_engine.repository.object.merge.bulk import (
    BulkMerge,
    LargeType,
    LargeVerdict,
    MergedParts,
    RowSet,
)
from storage_engine.repository.object.merge.report import Conflict, TypeMerge
from storage_engine.repository.object.merge.rows import MergedRows, Policy, merge_rows
from storage_engine.repository.object.merge.schema import (
    SchemaChange,
    missing_upgrader,
    schema_change,
)
from storage_engine.repository.object.merge.sides import MergeSide, VersionedReader
from storage_engine.repository.object.read.plan import CommitWindow
from storage_engine.schema.upgraders import Upgrader, UpgraderKey


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the two sides know of each other: the parent's commit of the base or of the last
    update, and the branch's commit of its last merge; None: it was never merged.

    The later of the two tells what both know (an older one would take a change that was taken
    back for no change); both do where neither has seen the other (`by_update`, `by_merge`)."""

    parent: int
    branch: int | None
    by_update: bool = True
    by_merge: bool = False


@dataclass(frozen=True)
class TypeResult:
    """What comes of one type: rows to write, files to adopt, or parts that others have staged.
    `side` has the version that counts from now on."""

    side: MergeSide
    schema: SchemaChange
    rows: MergedRows | None = None
    adopted: Sequence[CommitFile] = ()
    staged: MergedParts | None = None

    @property
    def spec(self) -> TypeSpec:
        return self.side.spec  # which is looked up only where rows are

    @property
    def written(self) -> bool:
        return self._row_count > 0 or bool(self.adopted)

    @property
    def resolved(self) -> int:
        """Conflicts that were decided: worth a commit, or they would come up again."""
        return sum(part.resolved for part in (self.rows, self.staged) if part is not None)

    @property
    def conflicts(self) -> Sequence[Conflict]:
        return [
            conflict
            for part in (self.rows, self.staged)
            if part is not None
            for conflict in part.conflicts
        ]

    @property
    def _row_count(self) -> int:
        rows = self.rows.rows.num_rows if self.rows is not None else 0
        staged = self.staged.rows if self.staged is not None else 0
        return int(rows) + staged + sum(file.row_count for file in self.adopted)

    def described(self) -> TypeMerge:
        inserted = _inserted(self.adopted)
        inserted += sum(part.inserted for part in (self.rows, self.staged) if part is not None)
        total = self._row_count
        return TypeMerge(
            *self.schema.ref,
            inserted=inserted,
            updated=total - inserted,
            resolved=self.resolved,
            adopted=bool(self.adopted),
            schema=self.schema.what,
        )


@dataclass(frozen=True)
class TypeComparison:
    """One type on both sides. `parent` and `branch` are the same two by what they are to each
    other; `since` is the source's commit after which its changes count, `target_since` the
    target's after which its changes are not known to the source."""

    duck: Duck
    target: MergeSide
    source: MergeSide
    merging: bool  # upwards; else an update
    agreed: Agreement
    since: int
    target_since: int
    policy: Policy = "fail"
    upgraders: Mapping[UpgraderKey, Upgrader] = field(default_factory=dict)
    bulk: BulkMerge | None = None

    def run(self, above: Sequence[Manifest], own: Sequence[Manifest]) -> TypeResult | Conflict:
        """`above`: the commits of the source that wrote rows of the type; `own`: all that count."""
        change = schema_change(
            self.target, self.source, own, changed_by_others=self._changed_by_others
        )
        if isinstance(change, Conflict):
            return change
        try:
            return self._result(change, above, [m for m in above if m in own])
        except MissingUpgraderError as error:
            return missing_upgrader(self.target, self.source, error)

    @property
    def target_moved(self) -> bool:
        """Whether the target has changed the type since the two last agreed."""
        top = self.target.top
        if top is None:
            return False
        return max(top.changed_by, top.dropped_commit_id or 0) > self.target_since

    def _changed_by_others(self) -> bool:
        """Whether the target has changed the type since then, and not by what the source brought:
        a merge of the branch, or its update; nor by what the branch has given to its parent."""
        if not self.target_moved:
            return False
        merged = 0 if self.merging else self.agreed.branch or 0
        since = max(self.target_since, merged)
        ref = self.source.ref
        return any(
            ref in (*m.touched(), *m.schema_changed()) and not self._brought(m)
            for _, m in self.target.repository.chain.stretch(self.target.head.link, above=since)
        )

    def _brought(self, manifest: Manifest) -> bool:
        """Whether a commit of the target is a merge of the source, or an update from it."""
        if not self.merging:
            return manifest.kind == UPDATE
        point = manifest.merged.get(self.source.repository.chain.incarnation)
        return point is not None and point.commit_id == manifest.commit_id

    def changed_on_target(self, reader: VersionedReader) -> pa.Table:
        """The target's rows now, of the identities that it changed since the two agreed."""
        if not self.target_moved:
            return reader.empty()
        head = self.target.head
        return reader.read(self.target, CommitWindow(head.commit_id, self.target_since))

    def reader(self, change: SchemaChange) -> VersionedReader:
        return VersionedReader(self.target if change.target_ahead else self.source, self.upgraders)

    def target_reader(self) -> VersionedReader:
        """Of a type that the source has not changed."""
        return VersionedReader(self.target, self.upgraders)

    def brought(self, result: TypeResult) -> pa.Table:
        """The rows that come, also where files are adopted."""
        names = row_schema(result.spec).names
        if result.rows is not None:
            return result.rows.rows.select(names)
        if not result.adopted:
            return row_schema(result.spec).empty_table()
        window = CommitWindow(self.source.head.commit_id, self.since)
        return self.reader(result.schema).read(self.source, window).select(names)

    def _result(
        self, change: SchemaChange, above: Sequence[Manifest], writing: Sequence[Manifest]
    ) -> TypeResult:
        theirs = self.source.top
        assert theirs is not None
        moved = self.target_moved and not (change.is_new or change.anew)
        if theirs.is_dropped or not (writing or (change.migrates and moved)):
            return TypeResult(self.source, change)  # no rows come
        reader = self.reader(change)
        candidate = None if change.target_ahead else self._adoptable(above, writing)
        if candidate is not None and not moved and self.agreed.branch is None:
            return TypeResult(reader.ahead, change, adopted=candidate)  # nothing to compare
        if change.migrates:
            return TypeResult(reader.ahead, change, self._migrated(reader, writing, moved))
        changed = sum(file.row_count for m in writing for file in m.files_of(self.source.ref))
        if self.bulk is not None and self.bulk.takes(changed):
            large = self._large(reader, change, above, writing)
            if large is not None:
                return self._in_bulk(self.bulk, reader, change, large, candidate)
        rows = self._compared(reader, change, self._candidates(reader, above, writing))
        count = sum(file.row_count for file in candidate or ())
        if candidate is not None and not rows.resolved and rows.rows.num_rows == count:
            return TypeResult(reader.ahead, change, adopted=_recounted(candidate, rows.inserted))
        return TypeResult(reader.ahead, change, rows)

    def _adoptable(
        self, above: Sequence[Manifest], writing: Sequence[Manifest]
    ) -> tuple[CommitFile, ...] | None:
        """The files of the one commit that changed the type, if they leave its id to a manifest."""
        if len(writing) != 1 or len(above) != 1:
            return None
        files = writing[0].files_of(self.source.ref)
        assert self.source.top is not None
        version = self.source.top.schema_version_id
        fits = all(
            f.commit_id_source == "manifest" and f.schema_version_id == version for f in files
        )
        return files if fits else None

    # -- rows -------------------------------------------------------------------------------------

    def _compared(
        self, reader: VersionedReader, change: SchemaChange, theirs: pa.Table
    ) -> MergedRows:
        keys = theirs.select(list(reader.spec.identity))
        if change.is_new or not keys.num_rows:
            nothing = reader.empty()
            shared, ours = [nothing], nothing
        else:
            ours = reader.read(self.target, CommitWindow(self.target.head.commit_id), keys)
            shared = self._shared(reader, keys, ours)
        return merge_rows(
            self.duck, reader.spec, self.policy, theirs=theirs, ours=ours, shared=shared
        )

    def _shared(self, reader: VersionedReader, keys: pa.Table, ours: pa.Table) -> list[pa.Table]:
        """What both sides knew of these identities, of which `ours` are the target's rows now.

        Those that are older than the agreement are what was known then: on the parent itself, and
        on a branch as long as it was not updated. So only what both have changed is looked up.
        """
        parent, branch = self.target, self.source
        if not self.merging:
            parent, branch = branch, parent
        shared = []
        if self.agreed.by_update:
            shared.append(self._parent_knew(reader, parent, keys, ours))
        if self.agreed.by_merge:
            assert self.agreed.branch is not None
            shared.append(reader.read(branch, CommitWindow(self.agreed.branch), keys))
        return shared

    def _parent_knew(
        self, reader: VersionedReader, parent: MergeSide, keys: pa.Table, ours: pa.Table
    ) -> pa.Table:
        agreed_rows, unclear = reader.empty(), keys
        if self.merging or self.agreed.parent == self.target_since:
            older = pc.less_equal(ours.column("commit_id"), self.agreed.parent)
            agreed_rows = ours.filter(older)
            names = list(reader.spec.identity)
            unclear = ours.filter(pc.invert(older)).select(names)
            if not self.merging:  # the parent's row may be newer than the branch
                unclear = self.where(keys, agreed_rows.select(names), negate=True)
        if unclear.num_rows:
            looked_up = reader.read(parent, CommitWindow(self.agreed.parent), unclear)
            agreed_rows = pa.concat_tables([agreed_rows, looked_up])
        return agreed_rows

    def _candidates(
        self, reader: VersionedReader, above: Sequence[Manifest], writing: Sequence[Manifest]
    ) -> pa.Table:
        """The source's rows now, of the identities that its own commits changed."""
        window = CommitWindow(self.source.head.commit_id, self.since)
        changed = reader.read(self.source, window)
        if len(writing) == len(above):
            return changed
        return self.where(changed, self.source.identities(writing))

    def _large(
        self,
        reader: VersionedReader,
        change: SchemaChange,
        above: Sequence[Manifest],
        writing: Sequence[Manifest],
    ) -> LargeType | None:
        """The same question for whoever compares many rows; None where some of them have to be
        brought up to another version first."""
        source, target = self.source, self.target
        asked = [(source, CommitWindow(source.head.commit_id, self.since))]
        agreed = self.agreed
        if not change.is_new:
            parent, branch = (target, source) if self.merging else (source, target)
            if agreed.by_update:
                asked.append((parent, CommitWindow(agreed.parent)))
            if agreed.by_merge:
                assert agreed.branch is not None
                asked.append((branch, CommitWindow(agreed.branch)))
        ours = None
        unmoved = self.merging and agreed.by_update and not self.target_moved
        if not change.is_new and not unmoved:
            ours = target, CommitWindow(target.head.commit_id)
            asked.append(ours)
        if not all(side.top is not None and reader.is_current(side, w) for side, w in asked):
            return None
        sets = [RowSet(side, reader.spec, window) for side, window in asked]
        entries = [entry for m in writing if (entry := entry_of(m, source.ref)) is not None]
        return LargeType(
            reader.spec,
            self.policy,
            theirs=sets[0],
            ours=sets[-1] if ours is not None else None,
            shared=sets[1:-1] if ours is not None else sets[1:],
            own=entries if len(writing) < len(above) else None,
        )

    def _in_bulk(
        self,
        bulk: BulkMerge,
        reader: VersionedReader,
        change: SchemaChange,
        large: LargeType,
        candidate: Sequence[CommitFile] | None,
    ) -> TypeResult:
        count = sum(file.row_count for file in candidate) if candidate is not None else None
        top = self.source.top
        assert top is not None
        tops = (_version(top), _version(self.target.top))
        state = (tops, self.agreed, self.since, self.target_since)
        large = replace(large, adoptable=count)
        staged = bulk.compare(state, large, top.schema_version_id, self._decided(large.spec))
        if staged.adopts and candidate is not None:
            adopted = _recounted(candidate, staged.inserted)
            return TypeResult(reader.ahead, change, adopted=adopted)
        return TypeResult(reader.ahead, change, staged=staged)

    def _decided(self, spec: TypeSpec) -> Callable[[LargeVerdict], MergedRows]:
        """What the policy makes of the conflicts that a comparison elsewhere has left."""

        def decide(compared: LargeVerdict) -> MergedRows:
            assert compared.theirs is not None
            assert compared.ours is not None
            return merge_rows(
                self.duck,
                spec,
                self.policy,
                theirs=compared.theirs,
                ours=compared.ours,
                shared=compared.shared,
            )

        return decide

    def _migrated(
        self, reader: VersionedReader, writing: Sequence[Manifest], moved: bool
    ) -> MergedRows:
        """All rows of the type in the source's version: its own, and those that the target has
        changed meanwhile, brought up."""
        spec = reader.spec
        names = row_schema(spec).names
        everything = reader.read(self.source, CommitWindow(self.source.head.commit_id))
        if not moved:
            inserted = sum(_inserted(m.files_of(spec.ref)) for m in writing)
            return MergedRows(everything.select(names), inserted)
        ours = self.changed_on_target(reader)
        keys = ours.select(list(spec.identity))
        merged = merge_rows(
            self.duck,
            spec,
            self.policy,
            theirs=self.where(everything, keys),
            ours=ours,
            shared=self._shared(reader, keys, ours),
        )
        untouched = self.where(everything, keys, negate=True)
        kept = self.where(ours, merged.rows.select(list(spec.identity)), negate=True)
        rows = pa.concat_tables([untouched.select(names), merged.rows, kept.select(names)])
        rows = rows.sort_by([(name, "ascending") for name in spec.identity])
        return replace(merged, rows=rows, inserted=rows.num_rows - self.target.row_count())

    def where(self, rows: pa.Table, keys: pa.Table, *, negate: bool = False) -> pa.Table:
        """The rows with one of these identities, or with none of them."""
        columns = ", ".join(quoted(name) for name in keys.column_names)
        join = "ANTI" if negate else "SEMI"
        with self.duck.cursor() as cursor, self.duck.errors():
            cursor.register("given", rows)
            cursor.register("wanted", keys)
            sql = f"FROM given {join} JOIN wanted USING ({columns}) ORDER BY {columns}"
            return cursor.execute(sql).to_arrow_table().cast(rows.schema)


def _version(top: TypeHead | None) -> Hashable:
    """What a type's rows are as of its head; hashes of manifests may be filled in later."""
    if top is None:
        return None
    return top.commit_id, top.manifest_path, top.changed_by, top.schema_sha256, top.is_dropped


def _inserted(files: Sequence[CommitFile]) -> int:
    return sum(file.inserted or 0 for file in files)


def _recounted(files: Sequence[CommitFile], inserted: int) -> tuple[CommitFile, ...]:
    """The files with as many new rows in all as they have on the target."""
    if _inserted(files) == inserted:
        return tuple(files)
    counted = []
    for file in files:
        new = min(inserted, file.row_count)
        inserted -= new
        counted.append(replace(file, inserted=new, updated=file.row_count - new))
    return tuple(counted)
