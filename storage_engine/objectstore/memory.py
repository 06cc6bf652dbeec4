"""The simulated store: objects in memory, a virtual clock, injected faults, a log of requests.

It promises S3's semantics (strong consistency, conditional writes judged atomically, ETags by
content), and that nothing depends on real time or chance: the same calls with the same fault
plans give the same outcomes. Several clients, each standing for a process with its own clock,
faults and meter, share one `MemoryBackend`. It is safe to use from many threads.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.clock import Clock, VirtualClock
from storage_engine.objectstore.faults import (
    CONDITIONAL,
    READS,
    Fault,
    FaultKind,
    FaultPlan,
    RequestRecord,
    SimulatedCrash,
)
from storage_engine.objectstore.metering import RequestMeter
from storage_engine.objectstore.parallel import Parallel
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectInfo,
    ObjectNotFound,
    ObjectStoreError,
    OutcomeUnknown,
    PreconditionFailed,
    StoredObject,
    check_key,
    check_prefix,
    content_etag,
)

T = TypeVar("T")

__all__ = ["Clock", "MemoryBackend", "MemoryStore", "RequestRecord", "VirtualClock"]

PAGE = 1000


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: StoredObject
    modified: datetime


@dataclass(frozen=True, slots=True)
class _Pending:
    due_at: datetime | None
    due_request: int | None
    apply: Callable[[], object]


class MemoryBackend:
    """The objects themselves, shared by the clients of one simulated store."""

    def __init__(self, name: str = "memory", *, clock: Clock | None = None) -> None:
        self.name = name
        self.clock: Clock = clock if clock is not None else VirtualClock()
        self.log: list[RequestRecord] = []
        self.lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._keys: list[str] = []  # sorted: code point order is the byte order of UTF-8
        self._pending: list[_Pending] = []
        self._requests = 0
        self._clients = 0

    def client(
        self,
        name: str = "",
        *,
        clock: Clock | None = None,
        skew: float = 0.0,
        faults: FaultPlan | None = None,
        page_size: int = PAGE,
    ) -> MemoryStore:
        """Another client of the same objects, as from another process."""
        return MemoryStore(
            self, name=name, clock=clock, skew=skew, faults=faults, page_size=page_size
        )

    def objects(self) -> dict[str, bytes]:
        """All objects as they stand, seen from outside: no request, no fault, no count."""
        with self.lock:
            self._land_due()
            return {key: self._entries[key].stored.data for key in self._keys}

    @property
    def pending(self) -> int:
        """How many delayed writes have yet to land."""
        with self.lock:
            self._land_due()
            return len(self._pending)

    def land_all(self) -> None:
        """Let every delayed write land now, in the order in which they were sent."""
        with self.lock:
            landing, self._pending = self._pending, []
            for pending in landing:
                self._land(pending)

    # What follows is called by clients, with the lock held or taking it.

    def join(self, name: str) -> str:
        with self.lock:
            self._clients += 1
            return name or f"client-{self._clients}"

    def serve(self, action: Callable[[], T]) -> T:
        """Apply one request at once, after what was due to land before it."""
        with self.lock:
            self._land_due()
            self._requests += 1
            return action()

    def serve_later(self, action: Callable[[], object], fault: Fault) -> None:
        with self.lock:
            self._land_due()
            self._requests += 1
            if fault.requests is not None:
                pending = _Pending(None, self._requests + fault.requests, action)
            else:
                at = self.clock.now() + timedelta(seconds=fault.seconds)
                pending = _Pending(at, None, action)
            self._pending.append(pending)

    def record(self, client: str, kind: str, operation: str, key: str, outcome: str) -> None:
        with self.lock:
            number = len(self.log) + 1
            self.log.append(RequestRecord(number, client, kind, operation, key, outcome))

    def read(self, key: str) -> StoredObject:
        entry = self._entries.get(key)
        if entry is None:
            raise ObjectNotFound(key)
        return entry.stored

    def write(self, key: str, data: bytes) -> str:
        stored = StoredObject(data, content_etag(data))
        if key not in self._entries:
            insort(self._keys, key)
        self._entries[key] = _Entry(stored, self.clock.now())
        return stored.etag

    def create(self, key: str, data: bytes) -> str:
        if key in self._entries:
            raise PreconditionFailed(f"{key} exists")
        return self.write(key, data)

    def replace(self, key: str, data: bytes, etag: str) -> str:
        self._require(key, etag)
        return self.write(key, data)

    def remove_exact(self, key: str, etag: str) -> None:
        self._require(key, etag)
        self.remove([key])

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self._entries.pop(key, None) is not None:
                del self._keys[bisect_right(self._keys, key) - 1]

    def page(self, prefix: str, after: str, size: int) -> tuple[list[ObjectInfo], bool]:
        """Up to `size` objects past `after`, and whether there are more."""
        past = prefix > after
        start = bisect_left(self._keys, prefix) if past else bisect_right(self._keys, after)
        found: list[ObjectInfo] = []
        for key in self._keys[start : start + size + 1]:
            if not key.startswith(prefix):
                break
            entry = self._entries[key]
            found.append(ObjectInfo(key, len(entry.stored.data), entry.modified))
        return found[:size], len(found) > size

    def _require(self, key: str, etag: str) -> None:
        entry = self._entries.get(key)
        if entry is None:
            raise PreconditionFailed(f"{key} is gone")
        if entry.stored.etag != etag.strip('"'):
            raise PreconditionFailed(f"{key} has another ETag")

    def _land_due(self) -> None:
        now = self.clock.now()
        due = [
            p
            for p in self._pending
            if (p.due_at is not None and p.due_at <= now)
            or (p.due_request is not None and p.due_request <= self._requests)
        ]
        if due:
            self._pending = [p for p in self._pending if p not in due]
            for pending in due:
                self._land(pending)

    @staticmethod
    def _land(pending: _Pending) -> None:
        # A condition that is no longer true is nobody's concern: no client waits for the answer.
        with suppress(ObjectStoreError):
            pending.apply()


class MemoryStore:
    """One client of a `MemoryBackend`; alone, it makes a backend of its own.

    After a SimulatedCrash the client is dead: each further request of it raises the same, as the
    process that it stands for would send no more.
    """

    kind = "memory"

    def __init__(
        self,
        backend: MemoryBackend | None = None,
        *,
        name: str = "",
        clock: Clock | None = None,
        skew: float = 0.0,
        faults: FaultPlan | None = None,
        page_size: int = PAGE,
    ) -> None:
        """`skew` is the error in seconds of this client's idea of the store's time."""
        self.backend = backend if backend is not None else MemoryBackend(clock=clock)
        self.name = self.backend.join(name)
        self.uri = f"memory://{self.backend.name}"
        self.clock: Clock = clock if clock is not None else self.backend.clock
        self.skew = skew
        self.faults = faults if faults is not None else FaultPlan()
        self.meter = RequestMeter()
        self.parallel = Parallel(workers=1, inline=True)
        self.crashed = False
        self._page_size = page_size
        self._before: list[Callable[[str, str], None]] = []
        self._after: list[Callable[[str, str], None]] = []
        self._fault_lock = threading.Lock()

    def on_request(
        self, callback: Callable[[str, str], None], *, when: str = "before"
    ) -> Callable[[], None]:
        """Call `callback(kind, key)` at each request; returns what takes it away again.

        "before": about to be applied; "after": applied, but not yet answered. The callback may
        block, use other clients, or raise.
        """
        hooks = {"before": self._before, "after": self._after}[when]
        hooks.append(callback)
        return lambda: hooks.remove(callback) if callback in hooks else None

    def get(self, key: str) -> StoredObject:
        check_key(key)
        stored = self._request("GET", "get", key, partial(self.backend.read, key))
        self.meter.add_bytes(read=len(stored.data))
        return stored

    def get_if_changed(self, key: str, etag: str) -> StoredObject | None:
        check_key(key)
        stored = self._request("GET", "get_if_changed", key, partial(self.backend.read, key))
        if stored.etag == etag.strip('"'):
            return None
        self.meter.add_bytes(read=len(stored.data))
        return stored

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._list(prefix, start_after)

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        more = True
        while more:
            action = partial(self.backend.page, prefix, after, self._page_size)
            page, more = self._request("LIST", "list", prefix, action)
            yield from page
            if page:
                after = page[-1].key

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        self.meter.add_bytes(written=len(data))
        self._request("PUT", "put", key, partial(self.backend.write, key, data))

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def put_if_absent(self, key: str, data: bytes, *, write_id: str) -> str:
        check_key(key)
        self.meter.add_bytes(written=len(data))
        return self._request("PUT_IF", "put_if_absent", key, lambda: self.backend.create(key, data))

    def put_if_match(self, key: str, data: bytes, etag: str, *, write_id: str) -> str:
        check_key(key)
        self.meter.add_bytes(written=len(data))
        action = partial(self.backend.replace, key, data, etag)
        return self._request("PUT_IF", "put_if_match", key, action)

    def delete_if_match(self, key: str, etag: str) -> None:
        check_key(key)
        action = partial(self.backend.remove_exact, key, etag)
        self._request("DELETE_IF", "delete_if_match", key, action)

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        for start in range(0, len(keys), PAGE):
            batch = keys[start : start + PAGE]
            self._request("DELETE", "delete_many", batch[0], partial(self.backend.remove, batch))

    def now(self) -> datetime:
        return self.clock.now() + timedelta(seconds=self.skew)

    def sleep(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def local_path(self, key: str) -> Path | None:
        return None

    def close(self) -> None:
        self.parallel.close()

    def _request(self, kind: str, operation: str, key: str, action: Callable[[], T]) -> T:
        self._alive()
        self.meter.count(kind)
        outcome = "ok"
        try:
            for hook in list(self._before):
                hook(kind, key)
            self._alive()
            with self._fault_lock:
                fault = self.faults.next(kind, operation, key)
            if fault is None:
                result = self.backend.serve(action)
            else:
                outcome = fault.kind.value
                result = self._faulty(kind, operation, key, action, fault)
            for hook in list(self._after):
                hook(kind, key)
            return result
        except BaseException as error:
            cause = type(error).__name__
            outcome = cause if outcome == "ok" else f"{outcome}: {cause}"
            raise
        finally:
            self.backend.record(self.name, kind, operation, key, outcome)

    def _faulty(
        self, kind: str, operation: str, key: str, action: Callable[[], T], fault: Fault
    ) -> T:
        match fault.kind:
            case FaultKind.SLOW:
                self.clock.sleep(fault.seconds)
                return self.backend.serve(action)
            case FaultKind.SKEW:
                self.skew += fault.seconds
                return self.backend.serve(action)
            case FaultKind.CRASH_BEFORE:
                self.crashed = True
                raise SimulatedCrash(f"before {operation} {key}")
            case FaultKind.DELAYED if kind not in READS:
                self.backend.serve_later(action, fault)
            case FaultKind.CRASH_AFTER | FaultKind.RESPONSE_LOST:
                self._serve_quietly(action)
            case _ if fault.applied:
                self._serve_quietly(action)
        if fault.kind is FaultKind.CRASH_AFTER:
            self.crashed = True
            raise SimulatedCrash(f"after {operation} {key}")
        raise self._failure(kind, operation, key, fault)

    def _serve_quietly(self, action: Callable[[], object]) -> None:
        with suppress(ObjectStoreError):  # The answer is lost, whatever it was.
            self.backend.serve(action)

    def _failure(self, kind: str, operation: str, key: str, fault: Fault) -> Exception:
        what = f"simulated {fault.kind.value} at {operation} {key}"
        if fault.kind is FaultKind.CONFLICT:
            return ConditionalConflict(what)
        if fault.kind is FaultKind.PRECONDITION:
            return PreconditionFailed(what)
        if kind in CONDITIONAL:
            return OutcomeUnknown(what)
        # Reads, and writes that are safe to repeat, may simply be tried again.
        return StorageBackendError(what, operation=operation, key=key, retryable=True)

    def _alive(self) -> None:
        if self.crashed:
            raise SimulatedCrash(f"{self.name} is dead")
