"""The line of commits of one opened storage: who waits is published by whoever's turn it is.

There is no thread and no timer. The first who waits for an answer leads: it takes what is in the
line, oldest first, and has the engine publish all of it at once. Who comes meanwhile queues, and
when the leader is done, the first of those leads. So a lone commit is published by its own thread
at once, and many at a time cost little more than one.

Nobody is told anything but by the engine's answer. A leader that is interrupted (Ctrl-C) answers
for those whose outcome is known or can no longer be known, and leaves the others in the line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Self, TypeVar

from storage_engine.config import MIB
from storage_engine.errors import (
    ConfigurationError,
    ForkedSessionError,
    LockContentionError,
    OntologiaError,
)
from storage_engine.process import renew_after_fork
from storage_engine.repository.protocol import CommitRequest, CommitResult, TypeRef

MOST_TOGETHER = 256
MOST_BYTES = 32 * MIB  # of rows, as they are in memory

E = TypeVar("E", bound=Exception)


class PendingCommit:
    """A request in the line. `result` waits for what becomes of it.

    As a context it takes the request out again where nobody has begun with it.
    """

    def __init__(self, queue: CommitQueue, request: CommitRequest) -> None:
        self.request = request
        self.done = False
        self.size = sum(i.table.nbytes for i in request.inputs if i.table is not None)
        # What is read only once may belong to the thread that gave it, and takes long.
        self.alone = any(i.table is None for i in request.inputs)
        self.joined = 0.0  # when
        self.turn: Turn | None = None  # in which it was taken last
        self.waiters: list[_Waiter] = []
        self._queue = queue
        self._answer: CommitResult | None = None
        self._error: Exception | None = None

    def result(self) -> CommitResult | None:
        """As `Repository.commit` returns or raises it. May be asked for again."""
        self._queue.wait_for(self)
        if self._error is not None:
            raise self._error
        return self._answer

    def withdraw(self) -> bool:
        """Take the request out of the line; False if it was begun with, or answered before."""
        return self._queue.withdraw(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.withdraw()

    # -- for the one who leads ----------------------------------------------------------------

    def succeed(self, answer: CommitResult | None) -> None:
        self._answer = answer
        self.done = True
        self._queue.leave(self)

    def fail(self, error: Exception) -> None:
        self._error = error
        self.done = True
        self._queue.leave(self)


class Turn:
    """What the leader may publish now."""

    def __init__(self, queue: CommitQueue, leader: PendingCommit, waited_s: float) -> None:
        self._queue = queue
        self.leader = leader
        self.waited_s = waited_s  # for the storage's lock, by others on behalf of the leader
        self.taken: list[PendingCommit] = []

    def take(self) -> Sequence[PendingCommit]:
        """What was taken before and is unanswered, with those who have come since: in the order of
        the line, as far as they may go together."""
        return self._queue.take(self)


class CommitQueue:
    """`publish` is given a turn and answers those that it takes, at least one. What it raises is
    the answer for all that it took, and for the leader if it took nobody. But where the storage's
    lock was not to be had in time, that is told only to those who have waited as long."""

    def __init__(
        self, publish: Callable[[Turn], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._publish = publish
        self._clock = clock
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """What was in the line is the parent's."""
        self._mutex = threading.Lock()
        self._line: dict[PendingCommit, None] = {}  # in order
        self._leader: _Waiter | None = None
        self._turn: Turn | None = None
        self._contended = False  # the turn before has waited for the lock in vain

    def __len__(self) -> int:
        """How many wait for an answer, those that are being published included."""
        return len(self._line)

    def refs(self) -> set[TypeRef]:
        """The types that those in the line write."""
        with self._mutex:
            return {item.spec.ref for pending in self._line for item in pending.request.inputs}

    def submit(self, request: CommitRequest) -> PendingCommit:
        pending = PendingCommit(self, request)
        self._join(pending)
        return pending

    def commit(self, request: CommitRequest) -> CommitResult | None:
        pending = PendingCommit(self, request)
        with pending, pending:  # twice: Ctrl-C may come at the first instruction of leaving
            self._join(pending)
            return pending.result()

    def flush(self) -> None:
        """Wait until everything that is in the line now is answered, whatever the answers are."""
        for pending in list(self._line):
            self.wait_for(pending)

    def _join(self, pending: PendingCommit) -> None:
        pending.joined = self._clock()
        with self._mutex:
            self._line[pending] = None

    # -- waiting and leading --------------------------------------------------------------------

    def wait_for(self, pending: PendingCommit) -> None:
        if pending.done:
            return
        self._refuse_reentry()
        waiter = _Waiter(self, pending)
        with waiter, waiter:  # twice, as above
            while not pending.done:
                if self._leads(waiter):
                    self._lead(pending)
                else:
                    waiter.sleep()

    def _refuse_reentry(self) -> None:
        leader = self._leader
        if leader is not None and leader.thread == threading.get_ident():
            raise ConfigurationError(
                "a commit was asked for by what provides the rows of another one of the same "
                "storage, in the same thread: it would wait for itself; commit before or after"
            )

    def _leads(self, waiter: _Waiter) -> bool:
        """Whether it is this one's turn. Rows that only the thread that waits for them may read
        are published by that."""
        with self._mutex:
            if self._leader is None:
                self._leader = waiter
            if self._leader is not waiter:
                return False
            first = next(iter(self._line), None)
            if first is None or not first.alone or not first.waiters or waiter in first.waiters:
                return True
            self._pass_on(first.waiters[0])
            return False

    def _lead(self, pending: PendingCommit) -> None:
        waited_s = max(0.0, self._clock() - pending.joined) if self._contended else 0.0
        self._turn = turn = Turn(self, pending, waited_s)
        try:
            if pending not in self._line and not pending.done:
                raise ForkedSessionError("a commit in a line")
            self._publish(turn)
            self._contended = False
        except Exception as error:  # noqa: BLE001 - it is the answer
            failed = turn.taken or [pending]
            self._contended = False
            if isinstance(error, LockContentionError):
                self._contended = True
                since = self._clock() - turn.waited_s - error.waited_ms / 1000
                failed = [p for p in failed if p is pending or p.alone or p.joined <= since]
            for each in failed:
                if not each.done:
                    each.fail(error if each is pending else copy_of(error))

    def enter(self, waiter: _Waiter) -> None:
        with self._mutex:
            if waiter not in waiter.pending.waiters:
                waiter.pending.waiters.append(waiter)

    def stop_waiting(self, waiter: _Waiter) -> None:
        """Whoever led lets the first lead that somebody waits for. Those who were answered are
        woken once more: Ctrl-C may have come between the two."""
        with self._mutex:
            if waiter in waiter.pending.waiters:
                waiter.pending.waiters.remove(waiter)
            if self._leader is not waiter:
                return
            for pending in self._turn.taken if self._turn is not None else ():
                for other in pending.waiters if pending.done else ():
                    other.wake()
            self._turn = None
            self._line = {pending: None for pending in self._line if not pending.done}
            first = next((pending for pending in self._line if pending.waiters), None)
            self._pass_on(first.waiters[0] if first is not None else None)

    def _pass_on(self, to: _Waiter | None) -> None:
        self._leader = to
        if to is not None:
            to.wake()

    # -- the line -------------------------------------------------------------------------------

    def take(self, turn: Turn) -> Sequence[PendingCommit]:
        with self._mutex:
            turn.taken = [pending for pending in turn.taken if not pending.done]
            size = sum(pending.size for pending in turn.taken)
            for pending in self._line:
                if pending.done or pending.turn is turn:
                    continue
                size += pending.size
                full = len(turn.taken) >= MOST_TOGETHER or size > MOST_BYTES
                together = not (pending.alone or (turn.taken and turn.taken[0].alone))
                if turn.taken and (full or not together):
                    break
                pending.turn = turn
                turn.taken.append(pending)
            return list(turn.taken)

    def leave(self, pending: PendingCommit) -> None:
        """It is answered."""
        with self._mutex:
            self._line.pop(pending, None)
            for waiter in pending.waiters:
                waiter.wake()

    def withdraw(self, pending: PendingCommit) -> bool:
        with self._mutex:
            if pending.done or (pending.turn is not None and pending.turn is self._turn):
                return False
            self._line.pop(pending, None)
        pending.fail(OntologiaError("this commit was taken back before it was published"))
        return True


class _Waiter:
    """One who waits for an answer, as a context that can be left twice."""

    def __init__(self, queue: CommitQueue, pending: PendingCommit) -> None:
        self.pending = pending
        self.thread = threading.get_ident()
        self._queue = queue
        self._wake: SimpleQueue[None] = SimpleQueue()

    def __enter__(self) -> None:
        self._queue.enter(self)

    def __exit__(self, *_: object) -> None:
        self._queue.stop_waiting(self)

    def wake(self) -> None:
        self._wake.put(None)

    def sleep(self) -> None:
        self._wake.get()


def copy_of(error: E) -> E:
    """For another thread: who catches an error may add to it."""
    twin = type(error).__new__(type(error))
    twin.args = error.args
    twin.__dict__.update(error.__dict__)
    twin.__cause__ = error.__cause__
    return twin
