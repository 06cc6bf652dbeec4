"""Carries out compactions: lease the type, merge off the lock, prove, upload, publish.

A crash at any point leaves every read as it was: outputs nobody names are orphans, and the lease
runs out. Running it again finishes the work.

A proven snapshot becomes part of the log as a new checkpoint, by a CAS of head. Under the lock it
is looked at once more whether the replaced entries still stand, next to each other, in the
checkpoint that head names plus the manifests since. Commits that landed meanwhile stay as they
are. The index follows, best effort: it is a projection.
"""

from __future__ import annotations

import logging
import os.path
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.lock import Lease, Tenure, WriteLock
from storage_engine.commitlog.records import Checkpoint, CommitFile, Entry, Head, TypeRef
from storage_engine.commitlog.rewrite import rewrite_head
from storage_engine.errors import LockContentionError, OntologiaError, StorageBackendError
from storage_engine.index.maintain import with_snapshots
from storage_engine.maintenance.compaction.build import Attempt, Build, LocalBuild
from storage_engine.maintenance.compaction.plan import (
    CompactionPlan,
    CompactionPolicy,
    RunPlan,
    TypeCompaction,
    plan_compaction,
)
from storage_engine.objectstore.protocol import ObjectStoreError

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository
    from storage_engine.repository.protocol import Repository


class RunOutcome(Enum):
    PUBLISHED = "published"
    SUPERSEDED = "superseded"  # another compactor has replaced the same entries


def publish(
    repository: ObjectRepository,
    lock: WriteLock,
    run: RunPlan,
    snapshot: Entry,
    *,
    log_id: str,
    still_ours: Callable[[], None],
) -> RunOutcome:
    """`still_ours` raises when the snapshot's files may be collected."""
    chain = repository.chain
    outcome = RunOutcome.SUPERSEDED

    def change(head: Head) -> Checkpoint | None:
        nonlocal outcome
        outcome = RunOutcome.SUPERSEDED
        if head.log_id != log_id:
            return None  # the storage was erased and begun anew
        truth = state.current_checkpoint(chain, head)
        entries = truth.entries.get(run.ref, ())
        replaced = placed(entries, run, snapshot)
        if replaced is None:
            return None
        outcome = RunOutcome.PUBLISHED
        if replaced == entries:
            return None  # by an attempt of ours whose answer was lost
        still_ours()
        check_present(repository, snapshot)
        return replace(truth, entries={**truth.entries, run.ref: replaced})

    rewrite_head(
        chain,
        lock,
        runtime_id=repository.config.runtime_id,
        max_attempts=repository.config.commit_max_attempts,
        change=change,
        after=lambda head, lease: update_index(repository, head, run.ref, lease),
    )
    return outcome


def placed(entries: tuple[Entry, ...], run: RunPlan, snapshot: Entry) -> tuple[Entry, ...] | None:
    """The entries with the run's replaced by the snapshot, or as they are when it is one of them;
    None when those of the run do not all stand, as planned and next to each other."""
    standing = [paths(entry) for entry in entries]
    if paths(snapshot) in standing:
        return entries
    planned = [paths(entry) for entry in run.entries]
    if planned[0] not in standing:
        return None
    start = standing.index(planned[0])
    stop = start + len(planned)
    if standing[start:stop] != planned:
        return None
    return (*entries[:start], snapshot, *entries[stop:])


def paths(entry: Entry) -> tuple[str, ...]:
    """What an entry is known by: the content of a path never changes."""
    return tuple(file.path for file in entry.files)


def check_present(repository: ObjectRepository, snapshot: Entry) -> None:
    """All files of the snapshot are there, whole."""
    prefix = os.path.commonpath(paths(snapshot))
    sizes = {info.key: info.size for info in repository.store.list(prefix)}
    for file in snapshot.files:
        if sizes.get(file.path) != file.bytes:
            raise StorageBackendError(
                f"{file.path} is gone or changed before it was published; nothing was published, "
                "compact again",
                operation="compact",
                key=file.path,
                retryable=True,
            )


def update_index(repository: ObjectRepository, head: Head, ref: TypeRef, lease: Lease) -> None:
    """Bring the index to what the log says. What fails here is made up for by the next run."""
    try:
        lease.guard()
        top = repository.chain.type_heads_at(head).get(ref)
        truth = state.entries(repository.chain, head, ref, top=top)
        repository.indices.update(
            ref,
            log_id=head.log_id,
            change=lambda index: with_snapshots(repository.chain, index, truth, head, ref, top),
        )
    except (ObjectStoreError, OntologiaError) as error:
        repository.warn(f"index of {ref[1]} does not have its new snapshot yet: {error}")


log = logging.getLogger(__name__)

_LEASE_WAIT_MS = 250  # enough to ask again after an unanswered request, not to wait for a holder
_LOCK_WAIT_MS = 60_000  # at least: the work is done by then, and would have to be done again


@dataclass(frozen=True, slots=True)
class CompactionProgress:
    """How far a compaction is: `done` of `total` rows of this run, in this stage."""

    type_name: str
    min_commit_id: int
    max_commit_id: int
    stage: str  # "read", "merge", "prove", "upload", "publish"
    done: int
    total: int


Progress = Callable[[CompactionProgress], None]


@dataclass(frozen=True, slots=True)
class RunReport:
    """What became of a run."""

    kind: str
    type_name: str
    min_commit_id: int
    max_commit_id: int
    outcome: str  # "published" or "superseded"
    entries: int
    files_in: int
    files_out: int
    rows: int
    bytes_in: int
    bytes_out: int

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What a compaction did."""

    uri: str
    runs: tuple[RunReport, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)  # type name -> who works on it
    reindexed: tuple[str, ...] = ()  # types whose index was brought to what the log has
    note: str | None = None

    @property
    def rows_rewritten(self) -> int:
        return sum(run.rows for run in self.runs if run.outcome == RunOutcome.PUBLISHED.value)

    def as_dict(self) -> dict[str, Any]:
        return {
            "storage": self.uri,
            "note": self.note,
            "runs": [run.as_dict() for run in self.runs],
            "skipped": dict(self.skipped),
            "reindexed": list(self.reindexed),
            "rows_rewritten": self.rows_rewritten,
        }


def compact(
    repository: Repository,
    plan_or_policy: CompactionPlan | CompactionPolicy | None = None,
    progress: Progress | None = None,
    *,
    types: Iterable[str] | None = None,
    build: Callable[[RunPlan], Build | None] | None = None,
) -> CompactionReport:
    """Carry out a plan, or plan by a policy (for `types` or all) and carry that out.

    `build` may name, for a run, what makes its snapshot instead of this machine.

    Types that another compactor works on are skipped; runs that no longer stand as planned are
    left alone. Raises IntegrityError, with nothing published of that run, when inputs are damaged
    or a merge cannot be proven; LockContentionError and LeaseExpiredError as a commit does.
    """
    objects = repository.objects
    if objects is not None:
        # Before planning: a merge of our own that is on its way would supersede the plan, and our
        # own lingering lease would only keep us waiting.
        objects.flush()
    if isinstance(plan_or_policy, CompactionPlan):
        plan = plan_or_policy
    else:
        plan = plan_compaction(repository, plan_or_policy, types)
    if objects is None or plan.note is not None:
        return CompactionReport(repository.uri, note=plan.note)
    return _Compactor(objects, plan.log_id, progress, build).run(plan)


class _Compactor:
    def __init__(
        self,
        repository: ObjectRepository,
        log_id: str,
        progress: Progress | None,
        build: Callable[[RunPlan], Build | None] | None,
    ) -> None:
        self._repository = repository
        self._store = repository.store
        self._config = repository.config
        self._log_id = log_id
        self._progress = progress
        self._other = build
        self._local = LocalBuild(repository)
        patience_ms = max(_LOCK_WAIT_MS, self._config.s3_lock_timeout_ms)
        self._lock = self._lease_on(layout.LOCK, patience_ms)

    def run(self, plan: CompactionPlan) -> CompactionReport:
        reports: list[RunReport] = []
        skipped: dict[str, str] = {}
        reindexed: list[str] = []
        for item in plan.types:
            if not item.work:
                continue
            lock = self._lease_on(layout.compaction_lease(*item.ref), _LEASE_WAIT_MS)
            with Tenure() as tenure, tenure:
                try:
                    lease = lock.acquire(tenure)
                except LockContentionError as error:
                    skipped[item.type_name] = f"{error.owner_id or 'another compactor'} works on it"
                    continue
                for run in item.runs:
                    reports.append(self._compact(run, lease))
                if self._bring_index(item):
                    reindexed.append(item.type_name)
        return CompactionReport(self._repository.uri, tuple(reports), skipped, tuple(reindexed))

    def _lease_on(self, key: str, timeout_ms: int) -> WriteLock:
        return WriteLock(
            self._store,
            owner_id=self._config.runtime_id,
            lease_ttl_ms=self._config.s3_lease_ttl_ms,
            timeout_ms=timeout_ms,
            holder={"operation": "compact"},
            warn=self._repository.warn,
            key=key,
        )

    # -- one run ------------------------------------------------------------------------------

    def _compact(self, run: RunPlan, lease: Lease) -> RunReport:
        if not self._stands(run):
            return self._report(run, RunOutcome.SUPERSEDED, ())
        holder = {**self._lock.holder, "type": run.type_name}
        attempt = Attempt(self._store, holder=holder, beat_s=self._config.s3_lease_ttl_ms / 3000)
        with attempt, attempt:
            attempt.announce()
            build = (self._other and self._other(run)) or self._local
            snapshot = build(
                run,
                attempt,
                tell=lambda stage, done: self._tell(run, stage, done),
                guard=lease.guard,  # else somebody has taken the type over and does the same work
            )
            self._tell(run, "publish", run.rows)
            outcome = publish(
                self._repository,
                self._lock,
                run,
                snapshot,
                log_id=self._log_id,
                still_ours=attempt.check,
            )
        return self._report(run, outcome, snapshot.files)

    def _stands(self, run: RunPlan) -> bool:
        """A plan may be old, and another compactor may have just released the type."""
        head = self._repository.chain.read_head().head
        entries = state.current_checkpoint(self._repository.chain, head).entries.get(run.ref, ())
        standing = {path for entry in entries for path in paths(entry)}
        return head.log_id == self._log_id and standing.issuperset(run.paths)

    def _bring_index(self, item: TypeCompaction) -> bool:
        """Where an earlier compaction could not: nothing else does it before the next one."""
        if not item.index_behind:
            return False
        chain = self._repository.chain
        with Tenure() as tenure, tenure:
            lease = self._lock.acquire(tenure)
            update_index(self._repository, chain.read_head().head, item.ref, lease)
        return True

    # -- telling ------------------------------------------------------------------------------

    def _tell(self, run: RunPlan, stage: str, done: int) -> None:
        if self._progress is not None:
            self._progress(
                CompactionProgress(
                    run.type_name, run.min_commit_id, run.max_commit_id, stage, done, run.rows
                )
            )

    def _report(self, run: RunPlan, outcome: RunOutcome, files: Sequence[CommitFile]) -> RunReport:
        return RunReport(
            *run.ref,
            run.min_commit_id,
            run.max_commit_id,
            outcome.value,
            entries=len(run.entries),
            files_in=len(run.paths),
            files_out=len(files),
            rows=run.rows,
            bytes_in=run.bytes,
            bytes_out=sum(file.bytes for file in files),
        )
