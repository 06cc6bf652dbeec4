"""The simulated store: objects in memory, a virtual clock, a log of requests.

It promises S3's semantics (strong consistency, conditional writes judged atomically, ETags by
content), and that nothing depends on real time or chance: the same calls give the same outcomes.
Several clients, each standing for a process with its own clock, faults and meter, share one
`MemoryBackend`. It is safe to use from many threads. What goes wrong is decided by whoever stands
between a client and the backend: see `Faults`, and `storage_engine.testing.faults`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from storage_engine.objectstore.metering import RequestMeter
from storage_engine.objectstore.parallel import Parallel
from storage_engine.objectstore.protocol import (
    Caching,
    ObjectInfo,
    ObjectNotFound,
    ObjectStoreError,
    PreconditionFailed,
    StoredObject,
    check_key,
    check_prefix,
    content_etag,
)
from storage_engine.process import renew_after_fork

T = TypeVar("T")

PAGE = 1000
_START = datetime(2026, 1, 1, tzinfo=UTC)


class SimulatedCrash(BaseException):
    """The simulated process died here. Not an Exception: no handler of the engine may catch it."""


class Clock(Protocol):
    """Where a simulated client takes its time from."""

    def now(self) -> datetime:
        """The time, in UTC."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


class VirtualClock:
    """A clock that moves only when someone sleeps."""

    def __init__(self, start: datetime = _START) -> None:
        self._now = start
        self._lock = threading.Lock()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def now(self) -> datetime:
        with self._lock:
            return self._now

    def sleep(self, seconds: float) -> None:
        """Move on by `seconds`; a clock never goes back."""
        with self._lock:
            self._now += timedelta(seconds=max(0.0, seconds))


@dataclass(slots=True)
class ClientRequest:
    """One request on its way from a client to the backend."""

    kind: str  # as the meter counts it: "PUT_IF"
    operation: str  # of the port: "put_if_match"
    key: str
    outcome: str = "ok"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the log keeps it: who asked what, and how it ended for the client."""

    number: int
    client: str
    kind: str
    operation: str
    key: str
    outcome: str


class Faults(Protocol):
    """Stands between one client and the backend, and may drop, delay or misreport a request."""

    def serve(self, client: MemoryStore, request: ClientRequest, action: Callable[[], T]) -> T:
        """Answer a request that `client.backend.serve(action)` would answer properly."""


@dataclass(frozen=True, slots=True)
class _MemoryObject:
    stored: StoredObject
    modified: datetime


@dataclass(frozen=True, slots=True)
class _DelayedWrite:
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
        self._objects: dict[str, _MemoryObject] = {}
        self._keys: list[str] = []  # sorted: code point order is the byte order of UTF-8
        self._pending: list[_DelayedWrite] = []
        self._requests = 0
        self._clients = 0
        renew_after_fork(self)

    def after_fork(self) -> None:
        """From here on these are other objects than the parent's."""
        self.lock = threading.RLock()

    def client(
        self,
        name: str = "",
        *,
        clock: Clock | None = None,
        skew: float = 0.0,
        faults: Faults | None = None,
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
            return {key: self._objects[key].stored.data for key in self._keys}

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

    def serve_later(
        self, action: Callable[[], object], *, seconds: float = 0.0, requests: int | None = None
    ) -> None:
        """Apply one request once `seconds` have passed, or after that many more `requests`."""
        with self.lock:
            self._land_due()
            self._requests += 1
            if requests is not None:
                delayed = _DelayedWrite(None, self._requests + requests, action)
            else:
                at = self.clock.now() + timedelta(seconds=seconds)
                delayed = _DelayedWrite(at, None, action)
            self._pending.append(delayed)

    def record(self, client: str, request: ClientRequest) -> None:
        with self.lock:
            number = len(self.log) + 1
            what = (request.kind, request.operation, request.key)
            self.log.append(RequestRecord(number, client, *what, request.outcome))

    def read(self, key: str) -> StoredObject:
        entry = self._objects.get(key)
        if entry is None:
            raise ObjectNotFound(key)
        return entry.stored

    def write(self, key: str, data: bytes) -> str:
        stored = StoredObject(data, content_etag(data))
        if key not in self._objects:
            insort(self._keys, key)
        self._objects[key] = _MemoryObject(stored, self.clock.now())
        return stored.etag

    def create(self, key: str, data: bytes) -> str:
        if key in self._objects:
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
            if self._objects.pop(key, None) is not None:
                del self._keys[bisect_right(self._keys, key) - 1]

    def page(self, prefix: str, after: str, size: int) -> tuple[list[ObjectInfo], bool]:
        """Up to `size` objects past `after`, and whether there are more."""
        past = prefix > after
        start = bisect_left(self._keys, prefix) if past else bisect_right(self._keys, after)
        infos: list[ObjectInfo] = []
        for key in self._keys[start : start + size + 1]:
            if not key.startswith(prefix):
                break
            entry = self._objects[key]
            infos.append(ObjectInfo(key, len(entry.stored.data), entry.modified))
        return infos[:size], len(infos) > size

    def _require(self, key: str, etag: str) -> None:
        entry = self._objects.get(key)
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
    def _land(pending: _DelayedWrite) -> None:
        # A condition that is no longer true is nobody's concern: no client waits for the answer.
        with suppress(ObjectStoreError):
            pending.apply()


class MemoryStore:
    """One client of a `MemoryBackend`; alone, it makes a backend of its own.

    After a SimulatedCrash the client is dead: each further request of it raises the same, as the
    process that it stands for would send no more.
    """

    kind = "memory"
    timers = False
    caching: Caching = "on_request"
    server = None

    def __init__(
        self,
        backend: MemoryBackend | None = None,
        *,
        name: str = "",
        clock: Clock | None = None,
        skew: float = 0.0,
        faults: Faults | None = None,
        page_size: int = PAGE,
    ) -> None:
        """`skew` is the error in seconds of this client's idea of the store's time."""
        self.backend = backend if backend is not None else MemoryBackend(clock=clock)
        self.name = self.backend.join(name)
        self.uri = f"memory://{self.backend.name}"
        self.clock: Clock = clock if clock is not None else self.backend.clock
        self.skew = skew
        self.faults = faults
        self.facts: dict[str, str] = {}
        self.meter = RequestMeter()
        self.parallel = Parallel(workers=1, inline=True)
        self.crashed = False
        self._page_size = page_size
        self._before: list[Callable[[str, str], None]] = []
        self._after: list[Callable[[str, str], None]] = []

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

    def get_range(self, key: str, start: int, size: int) -> bytes:
        check_key(key)
        stored = self._request("GET", "get_range", key, partial(self.backend.read, key))
        data = stored.data[start : start + size]
        self.meter.add_bytes(read=len(data))
        return data

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

    def duckdb_url(self, key: str) -> str | None:
        return None

    def duckdb_secret(self) -> dict[str, str]:
        return {}

    @property
    def bulk(self) -> MemoryStore:
        return self

    def close(self) -> None:
        self.parallel.close()

    def _request(self, kind: str, operation: str, key: str, action: Callable[[], T]) -> T:
        self._alive()
        self.meter.count(kind)
        request = ClientRequest(kind, operation, key)
        try:
            for hook in list(self._before):
                hook(kind, key)
            self._alive()
            if self.faults is None:
                result = self.backend.serve(action)
            else:
                result = self.faults.serve(self, request, action)
            for hook in list(self._after):
                hook(kind, key)
            return result
        except BaseException as error:
            cause = type(error).__name__
            request.outcome = cause if request.outcome == "ok" else f"{request.outcome}: {cause}"
            raise
        finally:
            self.backend.record(self.name, request)

    def _alive(self) -> None:
        if self.crashed:
            raise SimulatedCrash(f"{self.name} is dead")
