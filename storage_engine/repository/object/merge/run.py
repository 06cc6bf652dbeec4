"""One merge or update from start to end: look at both heads, compare, draft, publish.

Everything is looked at before the lock is taken, and again under it where a head has moved since:
first the target's, then the source's, at every attempt. So cost under the lock is that of what
came in between. The source is only read; it may go on, and be deleted afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.branches import list_heads
from storage_engine.commitlog.chain import HeadVersion
from storage_engine.commitlog.records import (
    BranchPoint,
    CommitFile,
    Head,
    Manifest,
    MergePoint,
    TypeHead,
    TypeRef,
    UnitVersion,
    UpdatePoint,
    timestamp,
)
from storage_engine.commitlog.series import MERGE, UPDATE, Draft, Upload
from storage_engine.commitlog.swap import Base
from storage_engine.errors import ConfigurationError
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.object.merge.report import Conflict, MergeReport, TypeMerge
from storage_engine.repository.object.merge.rows import MergedRows, Policy, merge_rows
from storage_engine.repository.object.merge.schema import SchemaChange, schema_change
from storage_engine.repository.object.read.plan import CommitWindow
from storage_engine.repository.object.write.parquet import encode_bytes, stored_table

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository

_PART_ROWS = 1_000_000
_MERGED_KEPT = 16  # entries of `merged`, beyond which those of deleted branches go

Policies = Mapping[TypeRef | None, Policy]  # by type; None: of all others


def merge(
    target: ObjectRepository,
    source: ObjectRepository,
    policies: Policies,
    *,
    dry_run: bool = False,
    metadata: Mapping[str, str] | None = None,
    holder: Mapping[str, Any] | None = None,
) -> MergeReport:
    """Bring the net changes of a branch into its parent, as one commit, or say what that would
    be. MergeConflictError has all conflicts that the policies leave; nothing is done then."""
    fork = source.fork
    if fork is None or fork.parent_incarnation != target.chain.incarnation:
        parent = fork.parent if fork is not None else None
        where = f"is a branch of {parent!r}: merge it there" if parent else "is nobody's branch"
        raise ConfigurationError(
            f"{source.branch!r} cannot be merged into {target.branch!r}: it {where}"
        )
    run = _MergeRun(target, source, fork, MERGE, policies, metadata or {})
    return run.look() if dry_run else run.publish(holder or {})


def update(
    target: ObjectRepository,
    source: ObjectRepository,
    policies: Policies,
    *,
    dry_run: bool = False,
    metadata: Mapping[str, str] | None = None,
    holder: Mapping[str, Any] | None = None,
) -> MergeReport:
    """Bring the changes of its parent into a branch, in the same way."""
    assert target.fork is not None
    assert target.fork.parent_incarnation == source.chain.incarnation
    run = _MergeRun(target, source, target.fork, UPDATE, policies, metadata or {})
    return run.look() if dry_run else run.publish(holder or {})


@dataclass(frozen=True, slots=True)
class _Agreement:
    """How far the two sides know of each other: the parent's commit of the base or of the last
    update, and the branch's commit of its last merge; None: it was never merged."""

    parent: int
    branch: int | None


@dataclass(frozen=True)
class _TypeResult:
    """What comes of one type: rows to write, or files to adopt."""

    spec: TypeSpec
    schema: SchemaChange
    rows: MergedRows | None = None
    adopted: Sequence[CommitFile] = ()

    @property
    def written(self) -> bool:
        return bool(self.adopted) or (self.rows is not None and self.rows.rows.num_rows > 0)

    @property
    def resolved(self) -> int:
        """Conflicts that were decided: worth a commit, or they would come up again."""
        return self.rows.resolved if self.rows is not None else 0

    def described(self) -> TypeMerge:
        rows = self.rows
        inserted = rows.inserted if rows is not None else _inserted(self.adopted)
        total = rows.rows.num_rows if rows is not None else sum(f.row_count for f in self.adopted)
        return TypeMerge(
            *self.schema.ref,
            inserted=inserted,
            updated=total - inserted,
            resolved=self.resolved,
            adopted=bool(self.adopted),
            schema=self.schema.what,
        )


@dataclass(frozen=True)
class _MergeEvaluation:
    """What a merge comes to on two heads."""

    target: HeadVersion
    source: HeadVersion
    results: Sequence[_TypeResult] = ()
    conflicts: Sequence[Conflict] = ()
    events: Sequence[Mapping[str, Any]] = ()
    marks: Mapping[str, Sequence[UnitVersion]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.results or self.events or self.marks)


class _MergeRun:
    def __init__(
        self,
        target: ObjectRepository,
        source: ObjectRepository,
        fork: BranchPoint,
        kind: str,
        policies: Policies,
        metadata: Mapping[str, str],
    ) -> None:
        self._target = target
        self._source = source
        self._fork = fork
        self._kind = kind
        self._policies = policies
        self._metadata = metadata
        self._last: _MergeEvaluation | None = None

    def look(self) -> MergeReport:
        """What publishing would do now."""
        target, source = self._target.chain.read_head(), self._source.chain.read_head()
        return self._report(self._evaluate(target, source), None, dry_run=True)

    def publish(self, holder: Mapping[str, Any]) -> MergeReport:
        evaluation = self._evaluate(self._target.chain.read_head(), self._source.chain.read_head())
        self._report(evaluation, None).require()
        if evaluation.empty:
            return self._report(evaluation, None)
        published = self._target.publish_merge(self._draft, holder)
        assert self._last is not None
        commit_id = published.manifest.commit_id if published is not None else None
        return self._report(self._last, commit_id)

    def _report(
        self, evaluation: _MergeEvaluation, commit_id: int | None, *, dry_run: bool = False
    ) -> MergeReport:
        return MergeReport(
            self._source.branch,
            self._target.branch,
            evaluation.source.head.commit_id,
            commit_id,
            [result.described() for result in evaluation.results],
            evaluation.conflicts,
            len(evaluation.events),
            dry_run,
        )

    # -- comparing --------------------------------------------------------------------------------

    def _evaluate(self, target: HeadVersion, source: HeadVersion) -> _MergeEvaluation:
        last = self._last
        if last is None or (last.target.etag, last.source.etag) != (target.etag, source.etag):
            self._last = last = self._compared(target, source)
        return last

    def _compared(self, target: HeadVersion, source: HeadVersion) -> _MergeEvaluation:
        agreed = self._agreement(target.head, source.head)
        since = agreed.parent
        if self._kind == MERGE:
            since = max(self._fork.base_commit, agreed.branch or 0)
        chain = self._source.chain
        above = [m for _, m in reversed(chain.stretch(source.head.link, above=since))]
        # What an update has brought is the parent's own.
        own = [m for m in above if not (self._kind == MERGE and m.kind == UPDATE)]
        results: list[_TypeResult] = []
        conflicts: list[Conflict] = []
        for ref in sorted({ref for m in own for ref in (*m.touched(), *m.schema_changed())}):
            compared = _TypeComparison(self, target.head, source.head, agreed, since, ref)
            result = compared.run([m for m in above if ref in m.touched()], own)
            if isinstance(result, Conflict):
                conflicts.append(result)
                continue
            if result.rows is not None:
                conflicts += result.rows.conflicts
            if result.written or result.schema.what or result.resolved:
                results.append(result)
        events = [event for m in own for event in m.events] if self._kind == MERGE else ()
        marks = _marks(own, source.head)
        if not (results or events):  # are they worth a commit?
            marks = {
                app_id: left
                for app_id, versions in marks.items()
                if (left := [v for v in versions if self._lacks(target.head, app_id, v)])
            }
        return _MergeEvaluation(target, source, results, conflicts, events, marks)

    def _lacks(self, head: Head, app_id: str, version: UnitVersion) -> bool:
        return state.applied(self._target.chain, head, app_id, version) is None

    def _agreement(self, target: Head, source: Head) -> _Agreement:
        merging = self._kind == MERGE
        parent, branch = (target, source) if merging else (source, target)
        parent_chain = (self._target if merging else self._source).chain
        branch_chain = (self._source if merging else self._target).chain
        parent_manifest = parent_chain.head_manifest(parent)
        branch_manifest = branch_chain.head_manifest(branch)
        updated = branch_manifest.updated if branch_manifest is not None else None
        agreed = self._fork.base_commit
        if updated is not None and updated.incarnation == self._fork.incarnation:
            agreed = max(agreed, updated.commit_id)
        merged = parent_manifest.merged if parent_manifest is not None else {}
        point = merged.get(self._fork.incarnation)
        return _Agreement(agreed, point.source if point is not None else None)

    def policy(self, ref: TypeRef) -> Policy:
        return self._policies.get(ref, self._policies.get(None, "fail"))

    @property
    def target(self) -> ObjectRepository:
        return self._target

    @property
    def source(self) -> ObjectRepository:
        return self._source

    @property
    def merging(self) -> bool:
        return self._kind == MERGE

    # -- under the lock ---------------------------------------------------------------------------

    def _draft(self, base: Base) -> Draft | None:
        evaluation = self._evaluate(base.version, self._source.chain.read_head())
        self._report(evaluation, None).require()
        if evaluation.empty:
            return None
        heads = self._target.chain.type_heads_at(base.head)
        files: list[CommitFile] = []
        uploads: list[Upload] = []
        touched: dict[TypeRef, TypeHead] = {}
        amended: dict[TypeRef, TypeHead] = {}
        for result in evaluation.results:
            before = heads.get(result.schema.ref)
            after = result.schema.head_after(before, base.commit_id, written=result.written)
            (touched if result.written else amended)[result.schema.ref] = after
            for file, upload in self._placed(base, result, after.schema_version_id):
                files.append(file)
                uploads += [upload] if upload is not None else []
        manifest = base.manifest
        now = timestamp(self._target.store.now())
        return Draft(
            files=files,
            uploads=uploads,
            touched=touched,
            amended=amended,
            metadata={**self._metadata, self._kind: self._source.branch},
            kind=self._kind,
            schema=_schema_of(evaluation.results),
            events=[{**event, "created_at": now} for event in evaluation.events],
            merged=self._merged(base, evaluation, manifest.merged if manifest else {}),
            updated=self._updated(evaluation),
            merged_marks=evaluation.marks,
        )

    def _placed(
        self, base: Base, result: _TypeResult, version: int
    ) -> Iterator[tuple[CommitFile, Upload | None]]:
        """The files of a type: those that are adopted, or new ones."""
        yield from ((file, None) for file in result.adopted)
        if result.rows is None or not result.rows.rows.num_rows:
            return
        rows, spec = result.rows.rows, result.spec
        starts = range(0, rows.num_rows, _PART_ROWS)
        on_branch = bool(self._target.chain.incarnation)
        prefix = layout.attempt_prefix(base.commit_id, base.attempt)
        if on_branch:  # as all that a branch writes
            attempt = layout.on_chain(layout.new_id(), self._target.chain.incarnation)
            prefix = layout.staged_prefix(attempt)
        left = result.rows.inserted
        for number, start in enumerate(starts):
            part = rows.slice(start, _PART_ROWS)
            table = stored_table(
                spec,
                part,
                engine_version="v2",
                schema_version_id=version,
                commit_id=None if on_branch else base.commit_id,
            )
            encoded = encode_bytes(spec, table)
            position = number if on_branch or len(starts) > 1 else None
            key = layout.data_file(prefix, spec.kind, spec.name, "v2", version, position)
            inserted = min(left, part.num_rows)
            left -= inserted
            file = encoded.describe(
                spec,
                key,
                schema_version_id=version,
                part=position,
                inserted=inserted,
                commit_id_source="manifest" if on_branch else "column",
            )
            yield file, Upload(key, encoded.content)

    def _merged(
        self, base: Base, evaluation: _MergeEvaluation, before: Mapping[str, MergePoint]
    ) -> Mapping[str, MergePoint] | None:
        if self._kind == UPDATE:
            return None
        kept = dict(before)
        if len(kept) >= _MERGED_KEPT:
            heads = list_heads(self._target.store, log_id=base.head.log_id)
            alive = {version.head.incarnation for version in heads}
            kept = {incarnation: p for incarnation, p in kept.items() if incarnation in alive}
        point = MergePoint(evaluation.source.head.commit_id, base.commit_id)
        return {**kept, self._fork.incarnation: point}

    def _updated(self, evaluation: _MergeEvaluation) -> UpdatePoint | None:
        if self._kind == MERGE:
            return None
        return UpdatePoint(self._fork.incarnation, evaluation.source.head.commit_id)


class _TypeComparison:
    """One type on both sides."""

    def __init__(
        self,
        run: _MergeRun,
        target: Head,
        source: Head,
        agreed: _Agreement,
        since: int,
        ref: TypeRef,
    ) -> None:
        self._run = run
        self._target_head, self._source_head = target, source
        self._agreed = agreed
        self._since = since
        self._ref = ref
        self._ours = run.target.chain.type_heads_at(target).get(ref)
        self._theirs = run.source.chain.type_heads_at(source).get(ref)

    def run(self, above: Sequence[Manifest], own: Sequence[Manifest]) -> _TypeResult | Conflict:
        """`above`: the commits of the source that wrote rows of the type; `own`: all that count."""
        target_moved = self._moved_target()
        change = schema_change(
            self._ref,
            self._ours,
            self._theirs,
            own,
            target_moved=target_moved,
            source_branch=self._run.source.branch,
            target_branch=self._run.target.branch,
        )
        if isinstance(change, Conflict):
            return change
        writing = [m for m in above if m in own]
        if not writing or self._theirs is None or self._theirs.is_dropped:
            return _TypeResult(_nameless(self._ref), change)  # no rows come
        (spec,) = self._run.source.types_at(self._source_head, [self._ref])
        candidate = self._adoptable(above, writing)
        if candidate is not None and not target_moved and self._agreed.branch is None:
            return _TypeResult(spec, change, adopted=candidate)  # nothing to compare
        if change.registered and not change.is_new:  # all its rows are of the new version
            everything = self._candidates(spec, above, above).select(row_schema(spec).names)
            inserted = sum(_inserted(m.files_of(self._ref)) for m in writing)
            return _TypeResult(spec, change, MergedRows(everything, inserted))
        rows = self._compared(spec, above, writing, target_moved, change)
        count = sum(file.row_count for file in candidate or ())
        if candidate is not None and not rows.resolved and rows.rows.num_rows == count:
            return _TypeResult(spec, change, adopted=_recounted(candidate, rows.inserted))
        return _TypeResult(spec, change, rows)

    def _moved_target(self) -> bool:
        """Whether the target has changed the type since the two last agreed."""
        if self._ours is None:
            return False
        agreed = self._agreed.parent if self._run.merging else self._run_base()
        return self._ours.changed_by > agreed or (self._ours.dropped_commit_id or 0) > agreed

    def _run_base(self) -> int:
        """Of an update: the branch has changed what its own commits touched since the base."""
        fork = self._target_head.fork
        assert fork is not None
        return fork.base_commit

    def _adoptable(
        self, above: Sequence[Manifest], writing: Sequence[Manifest]
    ) -> tuple[CommitFile, ...] | None:
        """The files of the one commit that changed the type, if they leave its id to a manifest."""
        if len(writing) != 1 or len(above) != 1:
            return None
        files = writing[0].files_of(self._ref)
        version = self._theirs.schema_version_id if self._theirs is not None else None
        fits = all(
            f.commit_id_source == "manifest" and f.schema_version_id == version for f in files
        )
        return files if fits else None

    def _compared(
        self,
        spec: TypeSpec,
        above: Sequence[Manifest],
        writing: Sequence[Manifest],
        target_moved: bool,
        change: SchemaChange,
    ) -> MergedRows:
        run = self._run
        theirs = self._candidates(spec, above, writing)
        keys = theirs.select(list(spec.identity))
        nothing = theirs.schema.empty_table()
        parent, branch = (run.target, run.source) if run.merging else (run.source, run.target)
        parent_head, branch_head = (
            (self._target_head, self._source_head)
            if run.merging
            else (self._source_head, self._target_head)
        )
        shared = [nothing]
        if not change.is_new:
            window = CommitWindow(self._agreed.parent)
            shared = [parent.reader().read_at(parent_head, spec, window, keys)]
        if self._agreed.branch is not None:
            window = CommitWindow(self._agreed.branch)
            shared.append(branch.reader().read_at(branch_head, spec, window, keys))
        ours = shared[0]
        if change.is_new:
            ours = nothing
        elif target_moved or not run.merging:
            window = CommitWindow(self._target_head.commit_id)
            ours = run.target.reader().read_at(self._target_head, spec, window, keys)
        return merge_rows(
            run.target.duck, spec, run.policy(self._ref), theirs=theirs, ours=ours, shared=shared
        )

    def _candidates(
        self, spec: TypeSpec, above: Sequence[Manifest], writing: Sequence[Manifest]
    ) -> pa.Table:
        """The source's rows now, of the identities that its own commits changed."""
        reader, head = self._run.source.reader(), self._source_head
        changed = reader.read_at(head, spec, CommitWindow(head.commit_id, self._since))
        if len(writing) == len(above):
            return changed
        ids = [manifest.commit_id for manifest in writing]
        window = CommitWindow(head.commit_id, self._since, history=True)
        versions = reader.read_at(head, spec, window)
        with self._run.target.duck.cursor() as cursor, self._run.target.duck.errors():
            cursor.register("changed", changed)
            cursor.register("versions", versions)
            keys = ", ".join(f'"{name}"' for name in spec.identity)
            listed = ", ".join(f"{number:d}" for number in ids)
            sql = (
                f"FROM changed SEMI JOIN (SELECT {keys} FROM versions WHERE commit_id IN "
                f"({listed})) USING ({keys}) ORDER BY {keys}"
            )
            return cursor.execute(sql).to_arrow_table().cast(changed.schema)


def _nameless(ref: TypeRef) -> TypeSpec:
    return TypeSpec(kind=ref[0], name=ref[1], fields=())  # type: ignore[arg-type]


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


def _schema_of(results: Sequence[_TypeResult]) -> dict[str, Any]:
    registered = [record for result in results for record in result.schema.registered]
    dropped = [result.schema.dropped for result in results if result.schema.dropped]
    changes: dict[str, Any] = {"registered": registered} if registered else {}
    return changes | ({"dropped": dropped} if dropped else {})


def _marks(own: Sequence[Manifest], head: Head) -> dict[str, Sequence[UnitVersion]]:
    """By application, the units of work that the source's commits have done, and those that
    changed nothing; of each the last, and what merges have brought beside it."""
    marks: dict[str, Sequence[UnitVersion]] = {}
    inherited = head.fork.marks.items() if head.fork is not None else ()
    for manifest in own:
        marks |= {m: (v,) for m, v in manifest.marks.items() if (m, v) not in inherited}
        for app_id, versions in manifest.merged_marks.items():
            marks[app_id] = tuple(dict.fromkeys((*versions, *marks.get(app_id, ()))))
        if manifest.idempotency is not None:
            marks[manifest.idempotency["app_id"]] = (manifest.idempotency["version"],)
    marks |= {m: (v,) for m, v in head.marks.items() if (m, v) not in inherited}
    return marks
