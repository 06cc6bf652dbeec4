"""The writer's nine steps: lock, head, data and manifest, guard, CAS, projections, release.

The commit is made by the CAS on head and by nothing else. Before it, whatever was written is
invisible; after it, nothing raises: projections and the release of the lock are best effort, run
in the background, and report by warnings.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial

from storage_engine.commitlog.ahead import Ahead
from storage_engine.commitlog.chain import Chain, HeadVersion
from storage_engine.commitlog.lease_keeper import LINGER_S, LeaseKeeper
from storage_engine.commitlog.lock import Lease, Tenure, WriteLock
from storage_engine.commitlog.records import Head
from storage_engine.commitlog.swap import (
    Committer,
    Prepare,
    PublishedCommit,
    Swap,
    WaitingSnapshots,
)
from storage_engine.errors import HeadMismatchError, LeaseExpiredError
from storage_engine.objectstore.parallel import Background
from storage_engine.process import at_end_of_child

log = logging.getLogger(__name__)

# What follows commits that were published by one swap, oldest first.
Projector = Callable[[Sequence[PublishedCommit]], Sequence[Callable[[], object]]]


class Publisher:
    """Publishes drafts for one opened storage, one swap of head at a time."""

    def __init__(
        self,
        chain: Chain,
        lock: WriteLock,
        *,
        runtime_id: str,
        max_attempts: int,
        checkpoint_interval: int,
        project: Projector,
        warn: Callable[[str], None],
        queued: Callable[[], bool] = lambda: False,
        foresee: Callable[[Head], None] = lambda head: None,
    ) -> None:
        """`queued`: whether commits wait to be published by it. `foresee`: begins to fetch what
        they will need on a head that others have made, beside its manifest."""
        self._chain = chain
        self._store = chain.store
        self._parallel = chain.parallel
        self._lock = lock
        self._runtime_id = runtime_id
        self._max_attempts = max_attempts
        self._checkpoint_interval = checkpoint_interval
        self._project = project
        self._warn = warn
        self._foresee = foresee
        self.waiting: WaitingSnapshots | None = None
        self._leases = LeaseKeeper(LINGER_S if chain.store.timers else 0.0, queued)
        self._finishing: Background[None] | None = None
        self._mutex = threading.Lock()

    def publish(self, prepare: Prepare) -> PublishedCommit | None:
        """Run `prepare` on the head under the lock and publish what it drafts.

        None when it drafts nothing, or a mark alone. `prepare` runs again on the new head after a
        lost CAS, and what it raises ends the attempt with nothing published.
        """
        alone = Committer(prepare)
        self.publish_together(lambda: [alone])
        return alone.result()

    def publish_together(
        self,
        take: Callable[[], Sequence[Committer]],
        join: Callable[[], Sequence[Committer]] = tuple,
        *,
        foresee: bool = False,
    ) -> None:
        """The same for several, with one CAS: all that they draft or none of it, each on what
        those before it have drafted. Everyone that was taken is decided, unless this raises, which
        then counts for all of them; one that fails by itself leaves the others alone.

        `take` is called at each attempt, under the lock or as good as, and tells who is to be
        decided; `join`, when these have drafted, who has come meanwhile, until that is nobody.

        `foresee`: they may draft on a head that does not stand yet, and again if it never does:
        once, as one that others never let stand could be followed by the next for ever.

        Who misses its turn, as it stood still when the lock was offered to it, waits for another
        one, and accepts that before anything else: so it happens once at most.
        """
        with self._mutex, Tenure() as tenure, tenure:
            waited_ms = 0.0
            number = 0
            missed = False
            lease: Lease | None = None
            while number < self._max_attempts:
                number += 1
                if number > 1:
                    self._back_off(number)
                lease, version, wait = self._begin(tenure, lease, foresee=foresee, quiet=not missed)
                foresee = foresee and not version.foreseen
                waited_ms += wait
                swap = self._swap(lease, version, number, waited_ms)
                try:
                    swap.run(take(), join)
                    if lease.promised and not swap.settled:
                        lease.guard()  # it may have gone wrong before the lock was ours
                except LeaseExpiredError:
                    if missed or not lease.on_offer:
                        raise
                    missed = True
                    number -= 1
                    tenure.give_back()
                    lease = None
                    continue
                if swap.settled and not swap.failed:
                    self._finish(swap.published, lease)
                    tenure.hand_over(lease)
                if swap.settled:
                    return
                if not swap.counts:
                    number -= 1  # nobody came first
                keep = lease.contended or not swap.counts  # in line, we would be the last again
                if not (keep and lease.renew()):
                    tenure.give_back()
                    lease = None
            raise HeadMismatchError(self._max_attempts)

    def _swap(self, lease: Lease, version: HeadVersion, number: int, waited_ms: float) -> Swap:
        return Swap(
            self._chain,
            lease,
            version,
            number=number,
            waited_ms=waited_ms,
            runtime_id=self._runtime_id,
            checkpoint_interval=self._checkpoint_interval,
            waiting=self.waiting,
        )

    @property
    def pending(self) -> bool:
        """Whether projections of our own latest commit are still on their way."""
        return self._finishing is not None and not self._finishing.done

    def flush(self) -> None:
        """Wait until projections are written and the lock is given back."""
        if self._parallel.elsewhere:
            return  # the parent's, which sees to it
        self._leases.stop_lingering()
        if (finishing := self._finishing) is not None:
            finishing.wait()

    # -- steps --------------------------------------------------------------------------------

    def _begin(
        self,
        tenure: Tenure,
        held: Lease | None = None,
        *,
        foresee: bool = False,
        quiet: bool = False,
    ) -> tuple[Lease, HeadVersion, float]:
        """Lock and head together: the CAS makes an early head read safe."""
        if held is not None:
            return held, self._chain.read_head(), 0.0
        head = self._chain.known_head()
        lease = self._leases.take_over(tenure)
        if lease is not None and head is not None:
            return lease, head, 0.0  # we published it and have held the lock since
        started = self._store.now()
        read: Lease | HeadVersion | BaseException | None = None
        if not self._lock.passed_on:
            requests: list[Callable[[], Lease | HeadVersion | None]] = [
                partial(self._lock.try_acquire, tenure),
                self._chain.read_head,
            ]
            acquired, read = self._parallel.gather_outcomes(requests)
            if isinstance(acquired, BaseException):
                raise acquired
            lease = acquired if isinstance(acquired, Lease) else None
        if lease is None:
            ahead = Ahead(self._chain, foresee=foresee)
            lease = self._lock.acquire(tenure, tried=True, early=ahead, quiet=quiet)
            read = ahead.version if lease.promised else self._left_head(lease)
            if read is not None and self._store.timers:
                self._foresee(read.head)
        version = read if isinstance(read, HeadVersion) else self._chain.read_head()
        waited = (self._store.now() - started).total_seconds() * 1000
        return lease, version, waited

    def _left_head(self, lease: Lease) -> HeadVersion | None:
        """The head that a lease begins with, where the holder before has told."""
        version = lease.left_head
        if version is None or not self._chain.is_ours(version.head):
            return None
        self._chain.note_head(version)
        return version

    def _back_off(self, attempt: int) -> None:
        ceiling = min(1.0, 0.01 * 2 ** (attempt - 1))
        self._store.sleep(ceiling * random.uniform(0.5, 1.0) + random.uniform(0, 0.02))

    # -- after the CAS ------------------------------------------------------------------------

    def _finish(self, published: Sequence[PublishedCommit], lease: Lease) -> None:
        earlier = self._finishing
        if lease.contended:
            self._lock.note_passed_on(True, lease.others_take_ms)  # it will be, in a moment
        release = self._leases.lingering_release(lease)

        def finish() -> None:
            if earlier is not None:
                earlier.settle()  # its index versions are what ours replace
            writes: list[Callable[[], object]] = []
            if published:
                try:
                    writes += self._project(published)
                except Exception as error:  # noqa: BLE001 - after the CAS nothing raises
                    self._warn(f"after commit {published[-1].manifest.commit_id}: {error}")
            for outcome in self._parallel.gather_outcomes([*writes, release]):
                if isinstance(outcome, Exception):
                    self._warn(f"after commit: {outcome}")
                elif isinstance(outcome, BaseException):
                    raise outcome

        self._finishing = self._parallel.start(finish)
        _note_unfinished(self._finishing)


_unfinished: list[Background[None]] = []  # of all publishers of this process, the latest ones


def _note_unfinished(background: Background[None]) -> None:
    _unfinished[:] = [earlier for earlier in _unfinished if not earlier.done]
    _unfinished.append(background)
    at_end_of_child(_finish_all)


def _finish_all() -> None:
    for background in _unfinished:
        if not background.elsewhere:
            background.settle()
