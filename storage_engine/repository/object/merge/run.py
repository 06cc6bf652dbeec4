"""One merge or update from start to end: look at both heads, compare, draft, publish.

Everything is looked at before the lock is taken, and again under it where a head has moved since:
first the target's, then (beside the uploads) the source's, at every attempt. So cost under the lock
is that of what came in between. The source is only read; it may go on, and be deleted afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.branches import list_heads
from storage_engine.commitlog.chain import Chain, HeadVersion
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
from storage_engine.commitlog.swap import Base, PublishedCommit
from storage_engine.errors import (
    CommitStateUnknownError,
    ConfigurationError,
    HeadMismatchError,
    IntegrityError,
    OntologiaError,
)
from storage_engine.repository.object.merge.bulk import BulkMerge, RowMerger
from storage_engine.repository.object.merge.comparison import Agreement, TypeComparison, TypeResult
from storage_engine.repository.object.merge.report import Conflict, MergeReport
from storage_engine.repository.object.merge.rows import Policy
from storage_engine.repository.object.merge.rules import MergedType, Rules, broken_rules
from storage_engine.repository.object.merge.sides import MergeSide
from storage_engine.repository.object.write.parquet import encode_bytes, stored_table
from storage_engine.schema.upgraders import Upgrader, UpgraderKey

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository

_PART_ROWS = 1_000_000
_MERGED_KEPT = 16  # entries of `merged`, beyond which those of deleted branches go
_BULK_TRIES = 5  # to compare without the lock; then it is done with it, as a last resort
_SOURCE_LOOKS = 2  # at a source that moves, before it is merged as it was
_MERGED_LOOK = 4  # every so many commits: to find out takes a listing and their heads
_CHANGES_KEPT = 100  # names of changes to one type, the newest: a manifest stays small

Policies = Mapping[TypeRef | None, Policy]  # by type; None: of all others


@dataclass(frozen=True)
class MergeTerms:
    """What whoever merges says: which side counts by type, which rules the result must keep, how
    rows of older versions are brought up, and what the commit carries. `expect` is the target's
    latest commit on which that was decided: HeadMismatchError where there is a later one.
    `unknown`: names of types that the target has not, so that the source must have them: a rule for
    a name that was misspelt would be kept by everything."""

    policies: Policies = field(default_factory=dict)
    rules: Rules = field(default_factory=dict)
    upgraders: Mapping[UpgraderKey, Upgrader] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    holder: Mapping[str, Any] = field(default_factory=dict)
    merger: RowMerger | None = None  # for types with many changed rows
    expect: int | None = None
    unknown: frozenset[str] = frozenset()

    def policy(self, ref: TypeRef) -> Policy:
        return self.policies.get(ref, self.policies.get(None, "fail"))


Heads = tuple[HeadVersion, HeadVersion]  # the target's and the source's, read just now


def merge(
    target: ObjectRepository,
    source: ObjectRepository,
    terms: MergeTerms,
    heads: Heads,
    *,
    dry_run: bool = False,
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
    run = _MergeRun(target, source, fork, MERGE, terms, heads)
    return run.look() if dry_run else run.publish()


def update(
    target: ObjectRepository,
    source: ObjectRepository,
    terms: MergeTerms,
    heads: Heads,
    *,
    dry_run: bool = False,
) -> MergeReport:
    """Bring the changes of its parent into a branch, in the same way."""
    assert target.fork is not None
    assert target.fork.parent_incarnation == source.chain.incarnation
    run = _MergeRun(target, source, target.fork, UPDATE, terms, heads)
    return run.look() if dry_run else run.publish()


@dataclass(frozen=True)
class _MergeEvaluation:
    """What a merge comes to on two heads."""

    target: HeadVersion
    source: HeadVersion
    results: Sequence[TypeResult] = ()
    conflicts: Sequence[Conflict] = ()
    events: Sequence[Mapping[str, Any]] = ()
    marks: Mapping[str, Sequence[UnitVersion]] = field(default_factory=dict)
    changes: Mapping[TypeRef, Sequence[str]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.results or self.events or self.marks)

    @property
    def staged(self) -> list[CommitFile]:
        return [file for r in self.results if r.staged is not None for file in r.staged.files]

    def fits(self, target: HeadVersion, source: HeadVersion) -> bool:
        """Whether the heads are still those that it is of."""
        return (self.target.etag, self.source.etag) == (target.etag, source.etag)


class _HeadMoved(Exception):
    """A head moved between a large comparison and the lock: compare again without it."""


class _MergeRun:
    def __init__(
        self,
        target: ObjectRepository,
        source: ObjectRepository,
        fork: BranchPoint,
        kind: str,
        terms: MergeTerms,
        heads: Heads,
    ) -> None:
        self._target = target
        self._source = source
        self._fork = fork
        self._kind = kind
        self._terms = terms
        self._target_version, self._source_version = heads
        self._last: _MergeEvaluation | None = None
        self._bulk: BulkMerge | None = None
        self._tries = _BULK_TRIES
        self._looks_left = _SOURCE_LOOKS
        self._publishing = False

    def look(self) -> MergeReport:
        """What publishing would do now."""
        self._expect(self._target_version.head)
        self._bulk = self._bulk_merge(rehearsal=True)
        return self._report(self._evaluate(self._target_version), None, dry_run=True)

    def _bulk_merge(self, *, rehearsal: bool) -> BulkMerge | None:
        """Rules look at all rows that come: where there are some, this process compares them."""
        terms = self._terms
        if terms.merger is None or terms.rules:
            return None
        return BulkMerge(terms.merger, self._target, terms.holder, rehearsal=rehearsal)

    def publish(self) -> MergeReport:
        self._bulk = bulk = self._bulk_merge(rehearsal=False)
        files: Sequence[CommitFile] = ()
        settled = False
        try:
            published = self._publish()
            files = published.manifest.files if published is not None else ()
            settled = True
        except OntologiaError as error:
            settled = not isinstance(error, CommitStateUnknownError)
            raise
        finally:
            if bulk is not None:
                bulk.close(files, outcome_known=settled or not self._publishing)
        assert self._last is not None
        commit_id = published.manifest.commit_id if published is not None else None
        return self._report(self._last, commit_id)

    def _publish(self) -> PublishedCommit | None:
        while True:
            self._expect(self._target_version.head)
            evaluation = self._evaluate(self._target_version)
            self._report(evaluation, None).require()
            if evaluation.empty:
                return None
            self._tries -= 1
            self._publishing = True
            try:
                return self._target.publish_merge(self._draft, self._terms.holder)
            except _HeadMoved:
                self._publishing = False
            self._target_version = self._target.chain.read_head()
            self._source_version = self._source.chain.read_head()

    def _expect(self, target: Head) -> None:
        if self._terms.expect not in (None, target.commit_id):
            raise HeadMismatchError(1)

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

    def _evaluate(self, target: HeadVersion) -> _MergeEvaluation:
        last, source = self._last, self._source_version
        if last is None or not last.fits(target, source):
            self._last = last = self._compared(target, source)
        return last

    def _compared(self, target: HeadVersion, source: HeadVersion) -> _MergeEvaluation:
        fetches = [
            partial(self._target.chain.head_manifest, target.head),
            partial(self._source.chain.head_manifest, source.head),
        ]
        self._target.chain.parallel.gather(fetches)
        self._require_types(target.head, source.head)
        agreed = self._agreement(target.head, source.head)
        since = agreed.parent
        if self._kind == MERGE:
            since = max(self._fork.base_commit, agreed.branch or 0)
        chain = self._source.chain
        above = [m for _, m in reversed(chain.stretch(source.head.link, above=since))]
        # What an update has brought is the parent's own.
        own = [m for m in above if not (self._kind == MERGE and m.kind == UPDATE)]
        refs = sorted({ref for m in own for ref in (*m.touched(), *m.schema_changed())})
        comparisons = [
            self._comparison(target.head, source.head, agreed, since, ref) for ref in refs
        ]
        types: dict[TypeRef, MergedType] = {}
        conflicts: list[Conflict] = []
        for comparison, result in zip(
            comparisons, self._results(comparisons, above, own), strict=True
        ):
            if isinstance(result, Conflict):
                conflicts.append(result)
                continue
            conflicts += result.conflicts
            if result.written or result.schema.what or result.resolved:
                types[comparison.source.ref] = MergedType(comparison, result)
        results = [compared.result for compared in types.values()]
        conflicts += broken_rules(
            self._terms.rules,
            types,
            lambda ref: self._comparison(target.head, source.head, agreed, since, ref),
        )
        events = [event for m in own for event in m.events] if self._kind == MERGE else ()
        marks = _marks(own, source.head)
        if not (results or events):  # are they worth a commit?
            marks = {
                app_id: left
                for app_id, versions in marks.items()
                if (left := [v for v in versions if self._lacks(target.head, app_id, v)])
            }
        foreign = [m for m in own if not self._is_ours(m)]
        changes = {
            r.schema.ref: _changes(foreign, r.schema.ref) or _changes(own, r.schema.ref)
            for r in results
        }
        return _MergeEvaluation(target, source, results, conflicts, events, marks, changes)

    def _require_types(self, target: Head, source: Head) -> None:
        """ConfigurationError where the terms name a type that neither side has or has had."""
        if not self._terms.unknown:
            return
        sides = (self._target.chain, target), (self._source.chain, source)
        names = sorted({name for chain, head in sides for _, name in chain.type_heads_at(head)})
        for name in sorted(self._terms.unknown.difference(names)):
            near = get_close_matches(name, names, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(names)}"
            raise ConfigurationError(
                f"no type {name!r} in {self._source.branch!r} or {self._target.branch!r}; {hint}"
            )

    def _results(
        self,
        comparisons: Sequence[TypeComparison],
        above: Sequence[Manifest],
        own: Sequence[Manifest],
    ) -> Sequence[TypeResult | Conflict]:
        """All types together, unless somebody's function decides, which is called by one thread."""
        work = [
            partial(each.run, [m for m in above if each.source.ref in m.touched()], own)
            for each in comparisons
        ]
        if any(callable(each.policy) for each in comparisons):
            return [run() for run in work]
        return self._target.chain.parallel.gather(work)

    def _comparison(
        self, target: Head, source: Head, agreed: Agreement, since: int, ref: TypeRef
    ) -> TypeComparison:
        merging = self._kind == MERGE
        return TypeComparison(
            self._target.duck,
            MergeSide(self._target, target, ref),
            MergeSide(self._source, source, ref),
            merging=merging,
            agreed=agreed,
            since=since,
            # Of an update: the branch has changed what its own commits touched since the base.
            target_since=agreed.parent if merging else self._fork.base_commit,
            policy=self._terms.policy(ref),
            upgraders=self._terms.upgraders,
            bulk=self._bulk,
        )

    def _is_ours(self, manifest: Manifest) -> bool:
        """Whether a commit of the parent is a merge of the branch that is updated."""
        point = manifest.merged.get(self._fork.incarnation)
        return self._kind == UPDATE and point is not None and point.commit_id == manifest.commit_id

    def _lacks(self, head: Head, app_id: str, version: UnitVersion) -> bool:
        return state.applied(self._target.chain, head, app_id, version) is None

    def _agreement(self, target: Head, source: Head) -> Agreement:
        merging = self._kind == MERGE
        parent, branch = (target, source) if merging else (source, target)
        parent_chain = (self._target if merging else self._source).chain
        branch_chain = (self._source if merging else self._target).chain
        parent_manifest = parent_chain.head_manifest(parent)
        branch_manifest = branch_chain.head_manifest(branch)
        updated = branch_manifest.updated if branch_manifest is not None else None
        agreed, base = self._fork.base_commit, self._fork.base
        path = base.path if base is not None else ""
        if updated is not None and updated.incarnation == self._fork.incarnation:
            agreed, path = max((agreed, path), (updated.commit_id, updated.manifest))
        _require_part(parent_chain, parent, agreed, path)
        merged = parent_manifest.merged if parent_manifest is not None else {}
        point = merged.get(self._fork.incarnation)
        if point is None:
            return Agreement(agreed, None)
        _require_part(branch_chain, branch, point.source, point.manifest)
        if agreed >= point.commit_id:
            return Agreement(agreed, point.source)  # the update has seen the merge
        seen = updated is None or self._updated_by(branch_chain, branch, point.source) == updated
        return Agreement(agreed, point.source, by_update=not seen, by_merge=True)

    def _updated_by(self, chain: Chain, head: Head, commit_id: int) -> UpdatePoint | None:
        """The last update of a branch as of one of its commits."""
        link = chain.locate(head, commit_id)
        return chain.manifest(link).updated if link is not None else None

    # -- under the lock ---------------------------------------------------------------------------

    def _draft(self, base: Base) -> Draft | None:
        self._expect(base.head)
        moved = self._last is None or not self._last.fits(base.version, self._source_version)
        if moved and self._tries and self._bulk is not None and self._bulk.used:
            raise _HeadMoved  # comparing much again is nothing to do while others wait
        evaluation = self._evaluate(base.version)
        self._report(evaluation, None).require()
        if evaluation.empty:
            return None
        if self._bulk is not None:
            self._bulk.check(evaluation.staged)
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
            metadata={**self._terms.metadata, self._kind: self._source.branch},
            kind=self._kind,
            schema=_schema_of(evaluation.results),
            events=[{**event, "created_at": now} for event in evaluation.events],
            merged=self._merged(base, evaluation, manifest.merged if manifest else {}),
            updated=self._updated(evaluation),
            merged_marks=evaluation.marks,
            changes=evaluation.changes,
            confirm=self._source_stands,
        )

    def _source_stands(self) -> bool:
        """Whether what was evaluated of the source may be published. It is read after the target's
        head: what a collection takes that finds it deleted, it takes after it has rewritten that
        head. One that others go on writing to is looked at again, but not for ever: then it is
        merged as it was, which is part of what it is now."""
        before, now = self._source_version, self._source.chain.read_head()
        if before.etag == now.etag:
            return True
        self._looks_left -= 1
        if self._looks_left < 0 and self._is_part(before.head, now.head):
            return True
        self._source_version = now
        return False

    def _is_part(self, before: Head, now: Head) -> bool:
        """Whether the source has only gone on, and files that are adopted are still its own."""
        assert self._last is not None
        adopts = any(result.adopted for result in self._last.results)
        if adopts and before.checkpoint != now.checkpoint:
            return False  # it may have been compacted, and they purged
        path = before.manifest_path
        return path is not None and self._source.chain.has(now, path)

    def _placed(
        self, base: Base, result: TypeResult, version: int
    ) -> Iterator[tuple[CommitFile, Upload | None]]:
        """The files of a type: those that are adopted, or new ones."""
        yield from ((file, None) for file in result.adopted)
        if result.staged is not None:
            yield from ((file, None) for file in result.staged.files)
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
        if len(kept) >= _MERGED_KEPT and base.commit_id % _MERGED_LOOK == 0:
            heads = list_heads(self._target.store, log_id=base.head.log_id)
            alive = {version.head.incarnation for version in heads}
            kept = {incarnation: p for incarnation, p in kept.items() if incarnation in alive}
        source = evaluation.source.head
        point = MergePoint(source.commit_id, base.commit_id, source.manifest_path or "")
        return {**kept, self._fork.incarnation: point}

    def _updated(self, evaluation: _MergeEvaluation) -> UpdatePoint | None:
        if self._kind == MERGE:
            return None
        source = evaluation.source.head
        return UpdatePoint(self._fork.incarnation, source.commit_id, source.manifest_path or "")


def _require_part(chain: Chain, head: Head, commit_id: int, path: str) -> None:
    """IntegrityError where a commit that both sides know of is not one of this side any more:
    what they know of each other is of another history, and its numbers mean other commits."""
    if commit_id <= head.commit_id and (not path or chain.has(head, path)):
        return
    raise IntegrityError(
        f"commit {commit_id}, up to which the two branches know of each other, is not one of "
        f"{chain.branch!r} (any more): its head was put back to an older version, or copied at "
        "another time. Nothing was merged: look at both, fork a new branch and state there what "
        "is to be kept",
        key=chain.head_key,
    )


def _schema_of(results: Sequence[TypeResult]) -> dict[str, Any]:
    registered = [record for result in results for record in result.schema.registered]
    dropped = [result.schema.dropped for result in results if result.schema.dropped]
    changes: dict[str, Any] = {"registered": registered} if registered else {}
    return changes | ({"dropped": dropped} if dropped else {})


def _changes(own: Sequence[Manifest], ref: TypeRef) -> Sequence[str]:
    """What the source's commits did to a type, each change by the name that it was made with."""
    writing = [m for m in own if ref in m.touched() or ref in m.schema_changed()]
    return list(dict.fromkeys(name for m in writing for name in m.changes_of(ref)))[-_CHANGES_KEPT:]


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
