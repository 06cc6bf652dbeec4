"""Requests that need nothing of one another, sent together: one hop.

Ctrl-C may come at any moment of the main thread, so it waits by what a signal cannot leave half
done (a lock of the interpreter's own, a `SimpleQueue`), never by a `Condition`, of which a `Future`
has one: a worker that then finds it locked for ever would keep `close` waiting.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Generic, TypeVar, cast

from storage_engine.objectstore.metering import HopTrace, current_trace, enter, leave, tracing
from storage_engine.process import Owner

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

_UNFINISHED = RuntimeError("not run")
_in_pool: contextvars.ContextVar[bool] = contextvars.ContextVar("in_pool", default=False)


class Parallel:
    """A bounded thread pool that keeps the hop count right and never deadlocks by nesting."""

    def __init__(self, workers: int = 32, *, inline: bool = False) -> None:
        """`inline` runs everything in the calling thread, in order: for the simulated store."""
        self._inline = inline
        self._workers = workers
        self._owner = Owner("an object storage")
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="onto-io")
        # Background work waits for `_pool`, so it must not take that pool's threads.
        self._background = ThreadPoolExecutor(8, thread_name_prefix="onto-background")

    def gather(self, thunks: Sequence[Callable[[], T]]) -> list[T]:
        """Run all, wait for all, return results in order; then raise the first failure, if any."""
        outcomes = self.gather_outcomes(thunks)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes  # type: ignore[return-value]

    def gather_outcomes(self, thunks: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Like `gather`, but failures come back in their place instead of being raised."""
        self._owner.check()
        start = _depth()
        traces = [HopTrace(start) for _ in thunks]
        if len(thunks) == 1 or self._inline or _in_pool.get():
            # A worker that waits for its own pool can starve it: nested work runs in place.
            results = [
                self._attempt(thunk, trace) for thunk, trace in zip(thunks, traces, strict=True)
            ]
        else:
            results = self._together(thunks, traces)
        _reach(traces)
        return results

    def _together(
        self, thunks: Sequence[Callable[[], T]], traces: Sequence[HopTrace]
    ) -> list[T | BaseException]:
        """Each thread takes the next thunk until none is left, so no thread is woken per thunk."""
        results: list[T | BaseException] = [_UNFINISHED] * len(thunks)
        work = enumerate(zip(thunks, traces, strict=True))  # its next() is atomic
        ended: SimpleQueue[None] = SimpleQueue()

        def lane() -> None:
            token = _in_pool.set(True)
            try:
                for number, (thunk, trace) in work:
                    results[number] = self._attempt(thunk, trace)
            finally:
                _in_pool.reset(token)
                ended.put(None)

        lanes = [self._pool.submit(lane) for _ in range(min(self._workers, len(thunks)))]
        for _ in lanes:
            ended.get()
        return results

    def gathering(self) -> Gathering:
        """Requests that go out as they become known."""
        self._owner.check()
        return Gathering(self._pool, 0 if self._inline or _in_pool.get() else self._workers)

    def both(self, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
        """Two different requests together."""
        thunks: list[Callable[[], A | B]] = [first, second]
        results = self.gather(thunks)
        return cast(A, results[0]), cast(B, results[1])

    def map(self, function: Callable[[A], T], items: Iterable[A]) -> list[T]:
        return self.gather([lambda item=item: function(item) for item in items])  # type: ignore[misc]

    def start(self, thunk: Callable[[], T]) -> Background[T]:
        """Run in the background; its hops count from here, and join when it is waited for."""
        self._owner.check()
        background = Background(thunk, HopTrace(_depth()))
        context = contextvars.copy_context()
        self._background.submit(context.run, background.run)
        if self._inline:
            background.settle()
        return background

    @property
    def elsewhere(self) -> bool:
        """Whether this is a fork of the process that has the threads."""
        return self._owner.elsewhere

    def close(self) -> None:
        if self.elsewhere:
            return  # its threads are the parent's
        self._background.shutdown(wait=True)
        self._pool.shutdown(wait=True)

    @staticmethod
    def _attempt(thunk: Callable[[], T], trace: HopTrace) -> T | BaseException:
        return _attempt(thunk, trace)


def _attempt(thunk: Callable[[], T], trace: HopTrace) -> T | BaseException:
    token = enter(trace)
    try:
        return thunk()
    except BaseException as error:  # noqa: BLE001 - handed to the caller
        return error
    finally:
        leave(token)


class Gathering:
    """What `gather_outcomes` does for requests that are not known all at once: each goes out when
    it is added, beside whatever its caller does meanwhile. Their hops count from there."""

    def __init__(self, pool: ThreadPoolExecutor, workers: int) -> None:
        """`workers`: 0 for none, so that each request is made where it is added."""
        self._pool = pool
        self._workers = workers
        self._added: list[tuple[Callable[[], None], HopTrace]] = []
        self._outcomes: list[BaseException | None] = []
        self._next = 0  # of those that were added, whom nobody has begun with
        self._lanes = 0
        self._mutex = threading.Lock()
        self._ended: SimpleQueue[None] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._added)

    def add(self, thunk: Callable[[], None]) -> None:
        trace = HopTrace(_depth())
        if not self._workers:
            self._added.append((thunk, trace))
            self._outcomes.append(_attempt(thunk, trace))
            return
        with self._mutex:
            self._added.append((thunk, trace))
            self._outcomes.append(_UNFINISHED)
            if self._lanes == self._workers:
                return
            self._lanes += 1
        self._pool.submit(self._lane)

    def outcomes(self) -> list[BaseException | None]:
        """Wait for all; what each has failed with, in the order in which they were added."""
        for _ in range(len(self._added) if self._workers else 0):
            self._ended.get()
        _reach([trace for _, trace in self._added])
        return self._outcomes

    def _lane(self) -> None:
        token = _in_pool.set(True)
        try:
            while (number := self._taken()) is not None:
                self._outcomes[number] = _attempt(*self._added[number])
                self._ended.put(None)
        finally:
            _in_pool.reset(token)

    def _taken(self) -> int | None:
        with self._mutex:
            if self._next == len(self._added):
                self._lanes -= 1
                return None
            self._next += 1
            return self._next - 1


class Background(Generic[T]):
    """Work that goes on while the caller does; `wait` joins its hops into the caller's."""

    def __init__(self, thunk: Callable[[], T], trace: HopTrace) -> None:
        self._thunk = thunk
        self._trace = trace
        self._outcome: T | BaseException = _UNFINISHED
        self._ended = Latch()
        self._owner = Owner("work in the background")

    @property
    def elsewhere(self) -> bool:
        """Whether another process does it, of which this one is a fork: it would not end here."""
        return self._owner.elsewhere

    def run(self) -> None:
        """Called once, by a thread of the pool."""
        try:
            with tracing(self._trace):
                self._outcome = self._thunk()
        except BaseException as error:  # noqa: BLE001 - handed to who waits
            self._outcome = error
        finally:
            self._ended.open()

    @property
    def done(self) -> bool:
        return self._ended.is_open

    def settle(self) -> None:
        """Wait for the end, whatever it is, without joining: it was another line of work."""
        self._owner.check()
        self._ended.wait()

    def wait(self) -> T:
        self._owner.check()
        self._ended.wait()
        _reach([self._trace])
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class Latch:
    """Opens once, and lets everybody through from then on."""

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Once, by one thread."""
        self.is_open = True
        self._lock.release()

    def wait(self) -> None:
        with self._lock:  # no signal is looked at between taking and giving back
            pass


def _depth() -> int:
    trace = current_trace()
    return trace.depth if trace is not None else 0


def _reach(traces: Iterable[HopTrace]) -> None:
    trace = current_trace()
    if trace is not None:
        trace.depth = max([trace.depth, *(t.depth for t in traces)])
