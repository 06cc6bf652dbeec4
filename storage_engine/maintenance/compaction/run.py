"""Carries out compactions: lease the type, merge off the lock, prove, upload, publish.

A crash at any point leaves every read as it was: outputs nobody names are orphans, and the lease
runs out. Running it again finishes the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.conditional import Won, write_conditionally
from storage_engine.commitlog.lock import Lease, WriteLock
from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.config import MIB
from storage_engine.errors import LockContentionError
from storage_engine.maintenance.compaction.attempt import Attempt
from storage_engine.maintenance.compaction.inputs import open_inputs
from storage_engine.maintenance.compaction.merge import MergeOrder, Output, merge
from storage_engine.maintenance.compaction.plan import (
    CompactionPlan,
    RunPlan,
    TypePlan,
    plan_compaction,
)
from storage_engine.maintenance.compaction.policy import CompactionPolicy
from storage_engine.maintenance.compaction.proof import prove
from storage_engine.maintenance.compaction.publish import (
    Outcome,
    paths,
    publish,
    update_index,
)
from storage_engine.maintenance.compaction.workspace import Workspace, open_workspace
from storage_engine.repository.object.parquet import SnapshotSettings

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository
    from storage_engine.repository.protocol import Repository

log = logging.getLogger(__name__)

_LEASE_WAIT_MS = 250  # enough to ask again after an unanswered request, not to wait for a holder
_LOCK_WAIT_MS = 60_000  # at least: the work is done by then, and would have to be done again
_CREATE_WHOLE = 128 * MIB  # what a conditional create takes, which needs it in memory


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
        return sum(run.rows for run in self.runs if run.outcome == Outcome.PUBLISHED.value)

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
) -> CompactionReport:
    """Carry out a plan, or plan by a policy (for `types` or all) and carry that out.

    Types that another compactor works on are skipped; runs that no longer stand as planned are
    left alone. Raises IntegrityError, with nothing published of that run, when inputs are damaged
    or a merge cannot be proven; LockContentionError and LeaseExpiredError as a commit does.
    """
    if isinstance(plan_or_policy, CompactionPlan):
        plan = plan_or_policy
    else:
        plan = plan_compaction(repository, plan_or_policy, types)
    if plan.note is not None:
        return CompactionReport(repository.uri, note=plan.note)
    return _Compactor(repository, plan.log_id, progress).run(plan)  # type: ignore[arg-type]


class _Compactor:
    def __init__(
        self, repository: ObjectRepository, log_id: str, progress: Progress | None
    ) -> None:
        self._repository = repository
        self._store = repository.store
        self._config = repository.config
        self._settings = SnapshotSettings.of(repository.config)
        self._log_id = log_id
        self._progress = progress
        patience_ms = max(_LOCK_WAIT_MS, self._config.s3_lock_timeout_ms)
        self._lock = self._lease_on(layout.LOCK, patience_ms)

    def run(self, plan: CompactionPlan) -> CompactionReport:
        self._repository.flush()  # our own lingering lease would only keep us waiting
        reports: list[RunReport] = []
        skipped: dict[str, str] = {}
        reindexed: list[str] = []
        for item in plan.types:
            if not item.work:
                continue
            try:
                lease = self._lease_on(layout.compaction_lease(*item.ref), _LEASE_WAIT_MS).acquire()
            except LockContentionError as error:
                skipped[item.type_name] = f"{error.owner_id or 'another compactor'} works on it"
                continue
            try:
                for run in item.runs:
                    reports.append(self._compact(run, lease))
                if self._bring_index(item):
                    reindexed.append(item.type_name)
            finally:
                lease.release()
        return CompactionReport(self._repository.uri, tuple(reports), skipped, tuple(reindexed))

    def _lease_on(self, key: str, timeout_ms: int) -> WriteLock:
        return WriteLock(
            self._store,
            owner_id=self._config.runtime_id,
            lease_ttl_ms=self._config.s3_lease_ttl_ms,
            timeout_ms=timeout_ms,
            holder={"operation": "compact"},
            keep_alive=self._store.kind != "memory",
            warn=self._repository.warn,
            key=key,
        )

    # -- one run ------------------------------------------------------------------------------

    def _compact(self, run: RunPlan, lease: Lease) -> RunReport:
        if not self._stands(run):
            return self._report(run, Outcome.SUPERSEDED, ())
        holder = {**self._lock.holder, "type": run.type_name}
        attempt = Attempt(self._store, holder=holder, beat_s=self._config.s3_lease_ttl_ms / 3000)
        with attempt, open_workspace(self._config.s3_duckdb_memory_limit) as workspace:
            outputs = self._merge(run, attempt, workspace)
            lease.guard()  # else somebody has taken this type over and does the same work
            self._tell(run, "upload", 0)
            snapshot = self._upload(run, attempt, outputs)
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
        known = state.current_checkpoint(self._repository.chain, head).entries.get(run.ref, ())
        standing = {path for entry in known for path in paths(entry)}
        return head.log_id == self._log_id and standing.issuperset(run.paths)

    def _merge(self, run: RunPlan, attempt: Attempt, workspace: Workspace) -> list[Output]:
        self._tell(run, "read", 0)
        inputs = open_inputs(self._store, run.entries, workspace.folder)
        merged = 0

        def advance(count: int) -> None:
            nonlocal merged
            merged += count
            self._tell(run, "merge", merged)

        order = MergeOrder(
            run.kind,
            self._repository.engine_version,
            self._settings,
            expected_rows=run.rows,
            expected_bytes=run.expected_bytes,
            mark=attempt.id,
        )
        outputs = merge(workspace, inputs, order, advance)
        self._tell(run, "prove", run.rows)
        prove(workspace, run.kind, inputs, outputs)
        return outputs

    def _upload(self, run: RunPlan, attempt: Attempt, outputs: Sequence[Output]) -> Entry:
        counts = {role: sum(o.role == role for o in outputs) for role in {o.role for o in outputs}}
        numbers = dict.fromkeys(counts, 0)
        named: list[tuple[CommitFile, Output]] = []
        for output in outputs:
            number = numbers[output.role] if counts[output.role] > 1 else None
            numbers[output.role] += 1
            key = self._key(run, attempt, output, number)
            named.append((_described(run, key, output, number), output))
        files = self._store.parallel.map(lambda item: self._put(run, attempt, *item), named)
        return Entry(run.min_commit_id, run.max_commit_id, tuple(files))

    def _key(self, run: RunPlan, attempt: Attempt, output: Output, number: int | None) -> str:
        stem = layout.snapshot(*run.ref, run.min_commit_id, run.max_commit_id)
        if output.role is None:
            return f"{stem}.parquet"
        stem = f"{stem}-{attempt.id}/{output.role}"
        return f"{stem}.parquet" if number is None else f"{stem}/part-{number:05d}.parquet"

    def _put(self, run: RunPlan, attempt: Attempt, file: CommitFile, output: Output) -> CommitFile:
        if output.role is not None:
            self._store.put_file(file.path, output.path)
            return file
        # v1: the specification's key, which has no attempt in it, is taken only if it is free.
        if file.bytes <= _CREATE_WHOLE:
            won = write_conditionally(
                self._store, file.path, output.path.read_bytes(), write_id=attempt.id, etag=None
            )
            if isinstance(won, Won):
                return file
        own = replace(file, path=f"{file.path.removesuffix('.parquet')}-{attempt.id}.parquet")
        self._store.put_file(own.path, output.path)
        return own

    def _bring_index(self, item: TypePlan) -> bool:
        """Where an earlier compaction could not: nothing else does it before the next one."""
        if not item.index_behind:
            return False
        chain = self._repository.chain
        lease = self._lock.acquire()
        try:
            update_index(self._repository, chain.read_head().head, item.ref, lease)
        finally:
            lease.release()
        return True

    # -- telling ------------------------------------------------------------------------------

    def _tell(self, run: RunPlan, stage: str, done: int) -> None:
        if self._progress is not None:
            self._progress(
                CompactionProgress(
                    run.type_name, run.min_commit_id, run.max_commit_id, stage, done, run.rows
                )
            )

    def _report(self, run: RunPlan, outcome: Outcome, files: Sequence[CommitFile]) -> RunReport:
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


def _described(run: RunPlan, key: str, output: Output, number: int | None) -> CommitFile:
    part = output.part
    return CommitFile(
        kind=run.kind,
        type_name=run.type_name,
        path=key,
        row_count=part.rows,
        schema_version_id=run.entries[0].schema_version_id,
        content_sha256=part.sha256,
        bytes=part.size,
        part=number,
        role=output.role,
        stats=part.stats,
        key_range=part.key_range,
    )
