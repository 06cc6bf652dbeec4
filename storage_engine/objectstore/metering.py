"""Counts requests by kind, and serial hops: how many of them had to wait for one another.

Hops follow dependencies, not timing. Each line of work carries a depth; a request adds one to
the depth of the line it runs in; lines that `gather` starts together begin at the same depth,
and the caller goes on at the deepest of them. So a figure is exact whatever the thread pool did.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from storage_engine.process import Owner


@dataclass(slots=True)
class HopTrace:
    """The depth reached by one line of work."""

    depth: int = 0


_trace: contextvars.ContextVar[HopTrace | None] = contextvars.ContextVar("hops", default=None)


def current_trace() -> HopTrace | None:
    return _trace.get()


@contextmanager
def tracing(trace: HopTrace) -> Iterator[HopTrace]:
    """Run a line of work that counts its requests into `trace`."""
    token = enter(trace)
    try:
        yield trace
    finally:
        leave(token)


def enter(trace: HopTrace) -> contextvars.Token[HopTrace | None]:
    """`tracing` for where it is done for every request: give the token to `leave`."""
    return _trace.set(trace)


def leave(token: contextvars.Token[HopTrace | None]) -> None:
    _trace.reset(token)


@dataclass(slots=True)
class RequestMeter:
    """Totals of one store, safe to use from many threads.

    Kinds: GET, PUT (unconditional), PUT_IF (conditional), LIST, DELETE, DELETE_IF, HEAD.
    """

    requests: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    bytes_written: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _owner: Owner = field(default_factory=lambda: Owner("an object storage"), repr=False)

    def count(self, kind: str, *, read: int = 0, written: int = 0) -> None:
        """Note one request. Call it when the request is sent, answered or not.

        In a fork of the process that opened the store it is refused, and so never sent.
        """
        self._owner.check()
        trace = _trace.get()
        if trace is not None:
            trace.depth += 1
        with self._lock:
            self.requests[kind] += 1
            self.bytes_read += read
            self.bytes_written += written

    def add_bytes(self, *, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self.bytes_read += read
            self.bytes_written += written

    def snapshot(self) -> dict[str, int]:
        """Requests by kind, their sum as `total`, and bytes moved."""
        self._owner.check()
        with self._lock:
            return {
                **self.requests,
                "total": sum(self.requests.values()),
                "bytes_read": self.bytes_read,
                "bytes_written": self.bytes_written,
            }
