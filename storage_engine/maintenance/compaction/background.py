"""Storages keep themselves compact: a writer merges a type's full tail beside its commits.

After a commit a look at the index that it wrote tells, without a request, whether a type's tail is
full. Then its newest entries are merged in the background, as compaction does it: one writer at a
time for a type (by the lease that compactors hold), announced by a heartbeat, proven, uploaded.
The snapshot then waits for this writer's next commit, whose checkpoint carries it and whose CAS
publishes both; when none comes for a moment, or the storage is flushed or closed, head is rewritten
for it, as compaction does.

No commit waits for a merge or fails by it. Whatever goes wrong (a lease that another holds, a store
that does not answer, a crash) leaves the log as it was, and perhaps files for garbage collection;
the tail is still full, so that a later commit begins again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.lock import WriteLock
from storage_engine.commitlog.records import Checkpoint, Entry, TypeRef
from storage_engine.commitlog.swap import PublishedCommit
from storage_engine.errors import (
    ConfigurationError,
    IntegrityError,
    LockContentionError,
)
from storage_engine.maintenance.compaction.plan import RunPlan, TierPolicy, planned_run
from storage_engine.objectstore.parallel import Background

# What merges and publishes is imported by the first merge: every session has this module loaded.
if TYPE_CHECKING:
    from storage_engine.maintenance.compaction.build import Attempt
    from storage_engine.repository.object.engine import ObjectRepository

log = logging.getLogger(__name__)

IDLE_S = 1.0  # how long a snapshot waits for the next commit of its writer
PATIENCE_S = 10.0  # of `flush` and `close`, with a merge that is on its way
_STEP_S = 0.1  # between two looks whether the process is ending


def keep_compact(repository: ObjectRepository, policy: TierPolicy | None = None) -> None:
    """Have an opened storage merge its own tails, unless its settings say no."""
    if repository.fork is not None:
        return  # what a branch writes is merged, or thrown away
    if repository.config.auto_compact and repository.upkeep is None:
        merges = BackgroundMerges(repository, policy or TierPolicy())
        repository.upkeep = merges
        repository.publisher.waiting = merges


class GivenUpMerge(Exception):
    """The storage is being closed, or the process ends."""


class MergedSnapshot:
    """A proven snapshot in the store, its attempt alive, its type leased."""

    def __init__(
        self,
        repository: ObjectRepository,
        run: RunPlan,
        snapshot: Entry,
        attempt: Attempt,
        log_id: str,
        held: ExitStack,
    ) -> None:
        self.ref = run.ref
        self.run = run
        self.snapshot = snapshot
        self.attempt = attempt
        self.log_id = log_id
        self.refused = False
        self.superseded = False
        self.published = False
        self._repository = repository
        self._held = held

    def place(self, checkpoint: Checkpoint) -> Checkpoint:
        """As `WaitingSnapshot` says."""
        from storage_engine.maintenance.compaction.run import placed

        entries = checkpoint.entries.get(self.ref, ())
        changed = placed(entries, self.run, self.snapshot)
        self.superseded = changed is None or checkpoint.log_id != self.log_id
        if changed is None or self.superseded:
            return checkpoint
        return replace(checkpoint, entries={**checkpoint.entries, self.ref: changed})

    @property
    def checks(self) -> Sequence[Callable[[], None]]:
        """As `WaitingSnapshot` says."""
        from storage_engine.maintenance.compaction.run import check_present

        if self.superseded:
            return ()
        present = partial(check_present, self._repository, self.snapshot)
        return partial(self._check, self.attempt.check), partial(self._check, present)

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Exception as error:  # noqa: BLE001 - the commit goes on without it
            log.info("a snapshot of %s is not published: %s", self.ref[1], error)
            self.refused = True

    @property
    def settled(self) -> bool:
        """Whether nothing is left to be done with it."""
        return self.published or self.refused or self.superseded

    def let_go(self) -> None:
        """End the attempt and the lease."""
        self._held.close()


class BackgroundMerges:
    """The merges of one opened storage: at most one at a time."""

    def __init__(self, repository: ObjectRepository, policy: TierPolicy) -> None:
        self._repository = repository
        self._store = repository.store
        self._config = repository.config
        self._policy = policy
        self._pause = max(1, policy.tail // 4)  # commits until the next look, after one in vain
        self._condition = threading.Condition()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._waiting: MergedSnapshot | None = None
        self._work: Background[None] | None = None
        self._waiter: threading.Thread | None = None
        self._busy = False  # from the start of a merge until its snapshot is settled
        self._hurried = 0  # who waits for the end
        self._closing = False
        self._abandoned = False
        self._paused: dict[TypeRef, int] = {}  # commits of a type to let pass

    # -- what the engine and its publisher call -------------------------------------------------

    def after_commits(self, published: Sequence[PublishedCommit]) -> None:
        """Begin a merge when a tail is full."""
        if self._process != os.getpid():
            self._condition = threading.Condition()
            self._begin_anew()  # a forked child: the merge and its leases are the parent's
        touched = dict.fromkeys(ref for each in published for ref in each.manifest.touched())
        carried = {each.carried for each in published}
        for ref in touched:
            if ref not in carried and self._is_full(ref) and self._claim():
                contended = published[-1].base.lease.contended
                self._work = self._store.parallel.start(partial(self._run, ref, contended))
                return

    @contextmanager
    def carry(self) -> Iterator[MergedSnapshot | None]:
        """As `WaitingSnapshots` says."""
        snapshot = self._take()
        try:
            yield snapshot
        finally:
            if snapshot is not None:
                self._give_back(snapshot)

    def flush(self) -> None:
        """Publish what was merged; wait for a merge, but not for ever."""
        if self._process != os.getpid():
            return
        if self._store.timers:
            with self._condition:
                self._hurried += 1
                self._condition.notify_all()
                self._condition.wait_for(lambda: not self._busy, timeout=PATIENCE_S)
                self._hurried -= 1
        else:
            snapshot = self._take()
            if snapshot is not None:
                self._publish(snapshot)
                self._give_back(snapshot, done=True)
        if self._work is not None and self._work.done:
            self._work.wait()

    def close(self) -> None:
        """Flush; then whatever is still on its way is given up at its next step."""
        if self._process != os.getpid():
            return
        with self._condition:
            self._closing = True
        try:
            self.flush()
        finally:
            with self._condition:
                self._abandoned = True
                self._condition.notify_all()
            if self._waiter is not None:
                self._waiter.join(PATIENCE_S)

    # -- one merge ------------------------------------------------------------------------------

    def _is_full(self, ref: TypeRef) -> bool:
        """By the index as we know it; whoever could not merge lets some commits pass."""
        left = self._paused.get(ref, 0)
        if left > 0:
            self._paused[ref] = left - 1
            return False
        seen = self._repository.indices.seen(ref)
        return seen is not None and self._policy.full(seen.value.entries)

    def _claim(self) -> bool:
        with self._condition:
            if self._busy or self._closing:
                return False
            self._busy = True
            return True

    def _run(self, ref: TypeRef, contended: bool) -> None:
        snapshot: MergedSnapshot | None = None
        try:
            snapshot = self._merge(ref, contended)
            if snapshot is None:
                self._paused[ref] = self._pause
        except GivenUpMerge:
            log.info("the merge of %s was given up", ref[1])
        except LockContentionError as error:
            log.debug("%s is merged by %s", ref[1], error.owner_id or "another")
            self._paused[ref] = self._pause
        except (IntegrityError, ConfigurationError) as error:
            self._repository.warn(f"{ref[1]} cannot be merged: {error}")
            self._paused[ref] = 100 * self._pause
        except Exception as error:  # noqa: BLE001 - no commit fails by a merge
            log.info("%s is merged another time: %s", ref[1], error)
            self._paused[ref] = self._pause
        finally:
            with self._condition:
                self._waiting = snapshot
                self._busy = snapshot is not None
                self._condition.notify_all()
        if snapshot is not None and self._store.timers:
            # No thread of a pool: these are waited for when the process ends, before anything can
            # tell that it does. What a killed thread leaves is what a crash leaves.
            self._waiter = threading.Thread(
                target=self._see_off, args=(snapshot,), name="onto-merge", daemon=True
            )
            self._waiter.start()

    def _merge(self, ref: TypeRef, contended: bool) -> MergedSnapshot | None:
        """None when the log says that there is nothing to do. Of many writers that find the tail
        full at once only the one with the lease reads the log for that."""
        from storage_engine.maintenance.compaction.build import Attempt, LocalBuild

        if not contended and self._due(ref) is None:
            return None
        with ExitStack() as held:
            lease = self._lock(layout.compaction_lease(*ref), timeout_ms=0).acquire()
            held.callback(lease.release)
            planned = self._due(ref)  # again: who had the lease before may have done it
            if planned is None:
                return None
            log_id, run = planned
            holder = {**self._repository.lock.holder, "operation": "merge", "type": ref[1]}
            beat_s = self._config.s3_lease_ttl_ms / 3000
            attempt = held.enter_context(Attempt(self._store, holder=holder, beat_s=beat_s))
            attempt.announce()
            snapshot = LocalBuild(self._repository)(
                run, attempt, tell=lambda *_: self._go_on(), guard=lease.guard
            )
            self._go_on()
            return MergedSnapshot(self._repository, run, snapshot, attempt, log_id, held.pop_all())

    def _due(self, ref: TypeRef) -> tuple[str, RunPlan] | None:
        """What to merge by the log as far as we know it (with its id), without a request where
        this writer made the last commits. Whether it still stands is looked at when it is
        published."""
        version = self._repository.chain.known_head()
        if version is None:
            return None
        truth = state.current_checkpoint(self._repository.chain, version.head)
        entries = self._policy.due(truth.entries.get(ref, ()))
        if entries is None:
            return None
        return version.head.log_id, planned_run(self._repository, ref, entries)

    def _go_on(self) -> None:
        if self._abandoned or not threading.main_thread().is_alive():
            raise GivenUpMerge

    def _lock(self, key: str, *, timeout_ms: int) -> WriteLock:
        return WriteLock(
            self._store,
            owner_id=self._config.runtime_id,
            lease_ttl_ms=self._config.s3_lease_ttl_ms,
            timeout_ms=timeout_ms,
            holder={"operation": "merge"},
            warn=log.info,
            key=key,
        )

    # -- a snapshot that waits ------------------------------------------------------------------

    def _take(self) -> MergedSnapshot | None:
        """For one who tries to publish it: nobody else does meanwhile."""
        if self._process != os.getpid():
            return None
        with self._condition:
            snapshot, self._waiting = self._waiting, None
            return snapshot

    def _give_back(self, snapshot: MergedSnapshot, *, done: bool = False) -> None:
        """It waits on, unless it is settled (or `done` with, whatever became of it)."""
        if not (done or snapshot.settled):
            with self._condition:
                self._waiting = snapshot
                self._condition.notify_all()
            return
        self._work = self._store.parallel.start(lambda: self._let_go(snapshot))

    def _let_go(self, snapshot: MergedSnapshot) -> None:
        try:
            snapshot.let_go()
        except Exception as error:  # noqa: BLE001 - its lease runs out
            log.info("the attempt at a snapshot of %s is left: %s", snapshot.ref[1], error)
        finally:
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def _see_off(self, snapshot: MergedSnapshot) -> None:
        """Publish it when no commit of ours does."""
        waited_s = 0.0
        while True:
            with self._condition:
                if not self._busy:
                    return  # a commit has carried it
                mine = self._waiting is snapshot
                ending = self._abandoned or not threading.main_thread().is_alive()
                if mine and (ending or self._hurried or waited_s >= IDLE_S):
                    self._waiting = None
                else:
                    mine = False
                    self._condition.wait(_STEP_S)
                    waited_s += _STEP_S
            if mine:
                if not ending:
                    self._publish(snapshot)
                if ending or self._hurried or snapshot.settled:
                    self._let_go(snapshot)
                    return
                waited_s = 0.0
                with self._condition:
                    self._waiting = snapshot

    def _publish(self, snapshot: MergedSnapshot) -> None:
        """By a head of its own."""
        from storage_engine.maintenance.compaction.run import publish

        lock = self._lock(layout.LOCK, timeout_ms=self._config.s3_lock_timeout_ms)
        try:
            publish(
                self._repository,
                lock,
                snapshot.run,
                snapshot.snapshot,
                log_id=snapshot.log_id,
                still_ours=snapshot.attempt.check,
            )
            snapshot.published = True  # or superseded, which is as good an end
        except LockContentionError as error:
            log.info("a snapshot of %s waits on: %s", snapshot.ref[1], error)
        except Exception as error:  # noqa: BLE001 - the next merge makes up for it
            log.info("a snapshot of %s was not published: %s", snapshot.ref[1], error)
            snapshot.refused = True
