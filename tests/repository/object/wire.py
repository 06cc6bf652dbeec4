"""Clients of one object store, each standing for a process, with a hook at each of their requests.

The store is in memory or a directory; time is virtual for both.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from storage_engine.objectstore.local import DirectoryStore
from storage_engine.objectstore.memory import MemoryBackend, SimulatedCrash
from storage_engine.objectstore.parallel import Parallel
from storage_engine.objectstore.protocol import ObjectInfo, ObjectStore, StoredObject

T = TypeVar("T")
KINDS = ("memory", "directory")


class Client:
    """One process's way to the store. `before` and `after` are called with the number of the
    request (from 1), its kind and its key; what they raise is what the request raises."""

    timers = False

    def __init__(self, place: Place, inner: ObjectStore) -> None:
        self._place = place
        self._inner = inner
        self.parallel = Parallel(1, inline=True)
        self.requests = 0
        self.before: Callable[[int, str, str], None] = lambda *_: None
        self.after: Callable[[int, str, str], None] = lambda *_: None
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def bulk(self) -> Client:
        return self

    def crash_at(self, number: int, *, applied: bool) -> None:
        def crash(now: int, _kind: str, _key: str) -> None:
            if now == number:
                self.dead = True
                raise SimulatedCrash(f"at request {number}")

        if applied:
            self.after = crash
        else:
            self.before = crash

    def now(self) -> datetime:
        return self._inner.now() + self._place.passed

    def sleep(self, seconds: float) -> None:
        self._place.passed += timedelta(seconds=seconds)

    def get(self, key: str) -> StoredObject:
        return self._send("get", key, lambda: self._inner.get(key))

    def get_range(self, key: str, start: int, size: int) -> bytes:
        return self._send("get", key, lambda: self._inner.get_range(key, start, size))

    def get_if_changed(self, key: str, etag: str) -> StoredObject | None:
        return self._send("get", key, lambda: self._inner.get_if_changed(key, etag))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        return iter(
            self._send(
                "list", prefix, lambda: list(self._inner.list(prefix, start_after=start_after))
            )
        )

    def put(self, key: str, data: bytes) -> None:
        self._send("put", key, lambda: self._inner.put(key, data))

    def put_file(self, key: str, path: Path) -> None:
        self._send("put", key, lambda: self._inner.put_file(key, path))

    def put_if_absent(self, key: str, data: bytes, *, write_id: str) -> str:
        return self._send(
            "put_if_absent", key, lambda: self._inner.put_if_absent(key, data, write_id=write_id)
        )

    def put_if_match(self, key: str, data: bytes, etag: str, *, write_id: str) -> str:
        return self._send(
            "put_if_match",
            key,
            lambda: self._inner.put_if_match(key, data, etag, write_id=write_id),
        )

    def delete_if_match(self, key: str, etag: str) -> None:
        self._send("delete_if_match", key, lambda: self._inner.delete_if_match(key, etag))

    def delete_many(self, keys: Sequence[str]) -> None:
        self._send("delete_many", keys[0] if keys else "", lambda: self._inner.delete_many(keys))

    def close(self) -> None:
        self.parallel.close()
        self._inner.close()

    def _send(self, kind: str, key: str, action: Callable[[], T]) -> T:
        if self.dead:
            raise SimulatedCrash("dead")
        self.requests += 1
        number = self.requests
        self.before(number, kind, key)
        try:
            return action()
        finally:
            self.after(number, kind, key)


class Place:
    """Where one storage is."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.passed = timedelta()
        self._backend = MemoryBackend(uuid.uuid4().hex) if kind == "memory" else None
        self._folder = folder / uuid.uuid4().hex
        self._clients: list[Client] = []

    def client(self) -> Client:
        inner: ObjectStore
        if self._backend is not None:
            inner = self._backend.client()
        else:
            inner = DirectoryStore(self._folder)
        client = Client(self, inner)
        self._clients.append(client)
        return client

    def objects(self) -> dict[str, bytes]:
        store = self.client()
        return {info.key: store.get(info.key).data for info in store.list("")}

    def close(self) -> None:
        for client in self._clients:
            client.close()
