"""Requests that need nothing of one another, sent together: one hop."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Generic, TypeVar, cast

from storage_engine.objectstore.metering import HopTrace, current_trace, enter, leave, tracing

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

        def lane() -> None:
            token = _in_pool.set(True)
            try:
                for number, (thunk, trace) in work:
                    results[number] = self._attempt(thunk, trace)
            finally:
                _in_pool.reset(token)

        lanes = [self._pool.submit(lane) for _ in range(min(self._workers, len(thunks)))]
        wait_for(lanes)
        return results

    def both(self, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
        """Two different requests together."""
        thunks: list[Callable[[], A | B]] = [first, second]
        results = self.gather(thunks)
        return cast(A, results[0]), cast(B, results[1])

    def map(self, function: Callable[[A], T], items: Iterable[A]) -> list[T]:
        return self.gather([lambda item=item: function(item) for item in items])  # type: ignore[misc]

    def start(self, thunk: Callable[[], T]) -> Background[T]:
        """Run in the background; its hops count from here, and join when it is waited for."""
        trace = HopTrace(_depth())
        context = contextvars.copy_context()
        future = self._background.submit(context.run, self._traced, thunk, trace)
        if self._inline:
            wait_for([future])
        return Background(future, trace)

    def close(self) -> None:
        self._background.shutdown(wait=True)
        self._pool.shutdown(wait=True)

    @staticmethod
    def _traced(thunk: Callable[[], T], trace: HopTrace) -> T:
        with tracing(trace):
            return thunk()

    @staticmethod
    def _attempt(thunk: Callable[[], T], trace: HopTrace) -> T | BaseException:
        token = enter(trace)
        try:
            return thunk()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            return error
        finally:
            leave(token)


class Background(Generic[T]):
    """Work that goes on while the caller does; `wait` joins its hops into the caller's."""

    def __init__(self, future: Future[T], trace: HopTrace) -> None:
        self._future = future
        self._trace = trace

    @property
    def done(self) -> bool:
        return self._future.done()

    def settle(self) -> None:
        """Wait for the end, whatever it is, without joining: it was another line of work."""
        wait_for([self._future])

    def wait(self) -> T:
        try:
            return self._future.result()
        finally:
            _reach([self._trace])


def _depth() -> int:
    trace = current_trace()
    return trace.depth if trace is not None else 0


def _reach(traces: Iterable[HopTrace]) -> None:
    trace = current_trace()
    if trace is not None:
        trace.depth = max([trace.depth, *(t.depth for t in traces)])
