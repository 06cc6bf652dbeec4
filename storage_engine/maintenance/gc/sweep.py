"""Carries a plan out: fence, look again, delete.

Fences are what makes deleting safe beside stalled writers, whenever they wake: a silent attempt
loses its heartbeat, without which it cannot publish, and one that has none yet finds that name
taken; head is rewritten, so that a swap which is already on its way must fail; the indices of
types that lose files are rewritten. They need the write lock for a moment, in which nothing is
listed: what needs listings (are the indices right? is anything of the plan needed after all?) is
done before and after. Afterwards what is doomed can never be named again, so neither the second
look, at the very head that was fenced, nor the deletes hold anything up. A crash leaves less
garbage, or as much; the next run goes on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.branches import Branch, delete_branch, list_heads, read_branch
from storage_engine.commitlog.chain import HeadVersion
from storage_engine.commitlog.json_object import Won, write_conditionally
from storage_engine.commitlog.lock import Lease, Tenure, WriteLock
from storage_engine.commitlog.records import timestamp, to_json
from storage_engine.errors import (
    ConfigurationError,
    HeadMismatchError,
    IntegrityError,
    ProtectedBranchError,
    StorageBackendError,
    UnknownBranchError,
)
from storage_engine.index.record import IndexObjects, TypeIndex
from storage_engine.index.verify import Examination
from storage_engine.maintenance.gc.plan import Fence, GarbageObject, GcPlan, moment_in, silence
from storage_engine.maintenance.gc.reach import Reach, reach
from storage_engine.maintenance.indices import index_verifier
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectNotFound,
    ObjectStoreError,
    OutcomeUnknown,
    PreconditionFailed,
)
from storage_engine.repository.object.branches import lock_key
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.wording import counted

log = logging.getLogger(__name__)

_BATCH = 500
_WAVE = 16  # batches between two reports of progress
_ATTEMPTS = 5
_DELETE_TRIES = 4

Progress = Callable[[int, int], None]  # deleted, of all


@dataclass(slots=True)
class GcReport:
    """What was deleted, and what was spared because it turned out to be needed or alive."""

    uri: str
    objects: int = 0
    bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    spared: int = 0
    branches: list[str] = field(default_factory=list)  # expired ones that were deleted

    def as_dict(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "objects": self.objects,
            "bytes": self.bytes,
            "reasons": dict(sorted(self.reasons.items())),
            "spared": self.spared,
            **({"expired_branches": list(self.branches)} if self.branches else {}),
        }


def sweep(
    repository: ObjectRepository, plan: GcPlan, *, progress: Progress | None = None
) -> GcReport:
    """Delete what the plan says, as far as it still holds.

    Raises LockContentionError or LeaseExpiredError before anything that needs a fence is deleted.
    """
    return _Sweeper(repository, plan, progress).run()


class _Sweeper:
    def __init__(
        self, repository: ObjectRepository, plan: GcPlan, progress: Progress | None
    ) -> None:
        self._repository = repository
        self._chain = repository.chain
        self._store = repository.store
        self._plan = plan
        self._progress = progress
        self._report = GcReport(repository.uri)
        self._verifier = index_verifier(repository)
        self._taken: dict[str, str] = {}  # heartbeats that stand for nobody: key -> ETag

    def run(self) -> GcReport:
        plain = [item for item in self._plan.doomed if item.fence is Fence.NONE]
        leases = [item for item in self._plan.doomed if item.fence is Fence.UNCHANGED]
        simple = {Fence.NONE, Fence.UNCHANGED}
        fenced = [item for item in self._plan.doomed if item.fence not in simple]
        if self._chain.read_head().head.log_id != self._plan.head.log_id:
            self._report.spared = len(self._plan.doomed)
            return self._report  # the storage was begun anew
        self._delete_expired()
        if fenced:
            self._repository.flush()
            examined = self._examine(fenced)
            given_up, version = self._fence(fenced, examined)
            self._fence_branches(given_up)
            left = self._still_doomed(given_up, version)
            plain += self._delete_reusable(left)
        self._delete(plain)
        self._free_names()
        for lease in leases:
            if self._silenced(lease, "expires_at"):
                self._count([lease])
            else:
                self._report.spared += 1
        return self._report

    # -- before the lock ----------------------------------------------------------------------

    def _examine(self, doomed: Sequence[GarbageObject]) -> list[Examination]:
        """The indices that are to be rewritten, compared with the log."""
        refs = {item.ref for item in doomed if item.fence is Fence.INDEX and item.ref is not None}
        if not refs:
            return []
        head = self._chain.read_head().head
        return [e for e in self._verifier.examine(head).types if e.ref in refs]

    # -- under the lock -----------------------------------------------------------------------

    def _fence(
        self, doomed: Sequence[GarbageObject], examined: Sequence[Examination]
    ) -> tuple[list[GarbageObject], HeadVersion]:
        """What can never be published from now on, and the head as of which that is so."""
        with Tenure() as tenure, tenure:
            lease = self._repository.lock.acquire(tenure)
            given_up = self._give_up(doomed, lease)
            for _ in range(_ATTEMPTS):
                lease.guard()
                lease.note_head(None)
                version = self._rewrite_head()
                if version is not None and self._rewrite_indices(examined, version, lease):
                    return given_up, version
            raise HeadMismatchError(_ATTEMPTS)

    def _give_up(self, doomed: Sequence[GarbageObject], lease: Lease) -> list[GarbageObject]:
        """Delete the heartbeats of silent writers; whoever beats meanwhile keeps its objects."""
        alive: set[str] = set()
        announced: set[str] = set()
        for item in doomed:
            if item.key.startswith(layout.ATTEMPTS):
                assert item.attempt is not None
                announced.add(item.attempt)
                lease.guard()
                if self._silenced(item, "heartbeat_at"):
                    self._count([item])
                else:
                    alive.add(item.attempt)
        silent = {item.attempt for item in doomed if item.fence is Fence.ATTEMPT and item.attempt}
        for attempt in sorted(silent - announced):
            lease.guard()
            if not self._take_name(attempt):
                alive.add(attempt)
        spared = [item for item in doomed if item.attempt in alive]
        self._report.spared += len(spared)
        return [
            item
            for item in doomed
            if item.attempt not in alive and not item.key.startswith(layout.ATTEMPTS)
        ]

    def _take_name(self, attempt: str) -> bool:
        """Parts can be staged before their writer announces itself (Spark's data source does so).
        From here on it cannot; False when it has done so since the plan."""
        key, write_id = layout.attempt_heartbeat(attempt), layout.new_write_id()
        facts = {
            "attempt": attempt,
            "holder": {"operation": "gc"},
            "heartbeat_at": timestamp(self._store.now()),
            "write_id": write_id,
        }
        outcome = write_conditionally(
            self._store, key, to_json(facts), write_id=write_id, etag=None
        )
        if not isinstance(outcome, Won):
            return False
        self._taken[key] = outcome.etag
        return True

    def _free_names(self) -> None:
        """What is left behind here grows old, as the heartbeat of a dead writer does."""
        for key, etag in self._taken.items():
            try:
                self._store.delete_if_match(key, etag)
            except (ObjectStoreError, StorageBackendError) as error:
                log.info("%s stays for the next run: %s", key, error)

    def _silenced(self, item: GarbageObject, name: str) -> bool:
        """Delete what is still past its time, in the version that says so."""
        try:
            stored = self._store.get(item.key)
        except ObjectNotFound:
            return True
        told = moment_in(stored.data, name, item.modified)
        if told > self._store.now() - silence(self._repository, self._plan.grace):
            return False
        try:
            self._store.delete_if_match(item.key, stored.etag)
        except (PreconditionFailed, ConditionalConflict, OutcomeUnknown):
            try:
                self._store.get(item.key)
            except ObjectNotFound:
                return True
            return False  # it beats, or the store did not answer: another time
        return True

    def _rewrite_head(self) -> HeadVersion | None:
        """The same head in a new version; None when it moved meanwhile. Its time stays: that is
        when it was published."""
        version = self._chain.read_head()
        if version.head.log_id != self._plan.head.log_id:
            raise IntegrityError("the storage was begun anew meanwhile; nothing was deleted")
        fenced = self._rewritten(self._chain.head_key, version)
        if fenced is not None:
            self._chain.note_head(fenced)
        return fenced

    def _rewritten(self, key: str, version: HeadVersion) -> HeadVersion | None:
        head = replace(version.head, write_id=layout.new_write_id())
        outcome = write_conditionally(
            self._store, key, head.to_bytes(), write_id=head.write_id, etag=version.etag
        )
        return HeadVersion(head, outcome.etag) if isinstance(outcome, Won) else None

    # -- branches -----------------------------------------------------------------------------

    def _delete_expired(self) -> None:
        """What only they have is garbage from now on, for the next run."""
        log_id = self._plan.head.log_id
        for name in self._plan.expired:
            version = read_branch(self._store, name, log_id=log_id)
            if version is None or not Branch.of(version.head).expired(self._store.now()):
                continue
            try:
                delete_branch(self._store, name, log_id=log_id)
            except (ConfigurationError, UnknownBranchError, ProtectedBranchError) as error:
                log.info("expired branch %s stays: %s", name, error)
                continue
            log.info("expired branch %s was deleted", name)
            self._report.branches.append(name)

    def _fence_branches(self, doomed: Sequence[GarbageObject]) -> None:
        """Rewrite the heads of branches that a stalled writer or merge could still move to what is
        doomed, each under its own lock. One that is gone moves nowhere."""
        fenced = [item for item in doomed if item.fence in (Fence.HEAD, Fence.ATTEMPT)]
        wanted = {item.chain for item in fenced}
        if not wanted - {""}:
            return
        for version in list_heads(self._store, log_id=self._plan.head.log_id):
            if None in wanted or version.head.incarnation in wanted:
                self._fence_branch(version)

    def _fence_branch(self, version: HeadVersion) -> None:
        fork = version.head.fork
        assert fork is not None
        lock = self._repository.lock
        own = WriteLock(
            self._store,
            owner_id=lock.owner_id,
            lease_ttl_ms=lock.lease_ttl_ms,
            timeout_ms=lock.timeout_ms,
            key=lock_key(fork),
        )
        with Tenure() as tenure, tenure:
            lease = own.acquire(tenure)
            for _ in range(_ATTEMPTS):
                lease.guard()
                lease.note_head(None)
                now = read_branch(self._store, fork.branch, log_id=version.head.log_id)
                if now is None or now.head.incarnation != fork.incarnation:
                    return
                if self._rewritten(layout.branch_head(fork.branch), now) is not None:
                    return
        raise HeadMismatchError(_ATTEMPTS)

    def _rewrite_indices(
        self, examined: Sequence[Examination], version: HeadVersion, lease: Lease
    ) -> bool:
        """As they should be, or as they are where a commit was here since we looked: the new
        version is what fences. False, with nothing written, when head has moved."""
        if not examined:
            return True
        lease.guard()
        if self._chain.read_head().etag != version.etag:
            return False

        def rewrite(examination: Examination) -> None:
            def change(index: TypeIndex) -> TypeIndex:
                lease.guard()
                right, was = examination.correct, examination.version.value
                newer = right.max_indexed_commit >= was.max_indexed_commit
                return right if index == was and newer else index

            ref, log_id = examination.ref, version.head.log_id
            self._verifier.indices.update(ref, log_id=log_id, change=change)

        self._store.parallel.map(rewrite, examined)
        return True

    # -- after the lock -----------------------------------------------------------------------

    def _still_doomed(
        self, doomed: Iterable[GarbageObject], version: HeadVersion
    ) -> list[GarbageObject]:
        """The second look: whatever was published until the fence, indexed or tagged since the
        plan, stays. As of the fenced head, not a later one: what that names, readers may use for
        a grace, even if it was replaced since."""
        indices = IndexObjects(self._store, engine_version=self._repository.engine_version)
        now = reach(self._chain, indices, version.head)
        doomed = list(doomed)
        left = [item for item in doomed if not self._needed(item, now)]
        self._report.spared += len(doomed) - len(left)
        return left

    def _needed(self, item: GarbageObject, now: Reach) -> bool:
        if now.needs(item.key):
            return True
        if item.key.startswith(layout.CHECKPOINTS):
            return item.key in now.checkpoints
        if item.fence is Fence.HEAD:
            attempt = layout.commit_attempt(item.key)
            if attempt is not None and attempt.prefix in now.attempts:
                return True
            return item.chain != "" and item.key in now.staged_in_chain(self._chain)
        if item.fence is Fence.ATTEMPT:
            published = now.staged_in_chain(self._chain)
            return item.key in published or item.key in now.files_of_branches(self._chain)
        return False

    def _delete_reusable(self, doomed: Sequence[GarbageObject]) -> list[GarbageObject]:
        """v1 snapshots without an attempt in their key: another compactor may take the key once
        it is free, and a delete that is tried again would hit its file, so the lock is held: it
        cannot publish meanwhile, and looks for its files before it does."""
        reusable = [
            item
            for item in doomed
            if item.key.startswith(layout.SNAPSHOTS) and item.attempt is None
        ]
        if reusable:
            with Tenure() as tenure, tenure:
                self._repository.lock.acquire(tenure).guard()
                self._delete(reusable)
        freed = {item.key for item in reusable}
        return [item for item in doomed if item.key not in freed]

    # -- deleting -----------------------------------------------------------------------------

    def _delete(self, doomed: Sequence[GarbageObject]) -> None:
        batches = [doomed[start : start + _BATCH] for start in range(0, len(doomed), _BATCH)]
        failure: BaseException | None = None
        for start in range(0, len(batches), _WAVE):
            wave = batches[start : start + _WAVE]
            outcomes = self._store.parallel.gather_outcomes(
                [lambda batch=batch: self._delete_batch(batch) for batch in wave]  # type: ignore[misc]
            )
            for batch, outcome in zip(wave, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    failure = failure or outcome
                else:
                    self._count(batch)
            if failure is not None:
                break
        if isinstance(failure, StorageBackendError):
            raise StorageBackendError(
                f"{failure}; deleted so far: {counted(self._report.objects, 'object')}; run it "
                "again for the rest",
                operation="gc",
                key=failure.key,
                retryable=failure.retryable,
            ) from failure
        if failure is not None:
            raise failure

    def _delete_batch(self, batch: Sequence[GarbageObject]) -> None:
        for tried in range(1, _DELETE_TRIES + 1):
            try:
                self._store.delete_many([item.key for item in batch])
                return
            except StorageBackendError as error:
                if not error.retryable or tried == _DELETE_TRIES:
                    raise
                self._store.sleep(0.1 * 2**tried)  # deleting again what is gone is safe

    def _count(self, batch: Sequence[GarbageObject]) -> None:
        self._report.objects += len(batch)
        self._report.bytes += sum(item.size for item in batch)
        self._report.reasons.update(item.reason for item in batch)
        if self._progress is not None:
            self._progress(self._report.objects, len(self._plan.doomed))
