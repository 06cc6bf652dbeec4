"""A writer that kills itself with SIGKILL at a chosen request of a commit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from storage_engine.commitlog import layout
from storage_engine.errors import LeaseExpiredError
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.repository import TypeInput
from storage_engine.repository.open import open_object_repository
from tests.engines import (
    CUSTOMER,
    PRODUCT,
    Storage,
    commit,
    customer,
    product,
    rows_of,
    stream_of,
)

LEASE_TTL_MS = 10_000  # long for a busy machine; who is dead is known to be, and not waited for
_REQUESTS = {
    "get",
    "get_if_changed",
    "list",
    "put",
    "put_file",
    "put_if_absent",
    "put_if_match",
    "delete_if_match",
    "delete_many",
}
# What the tests know to be there before, and what the killed commit states.
BEFORE_CUSTOMERS = [customer("a", "old"), customer("b", "kept")]
STATED_CUSTOMERS = [customer("a", "new"), customer("b", "kept"), customer("c", "new")]
STATED_PRODUCTS = [product("p", 1.0), product("q", 2.0)]

When = Literal["before", "after"]


@dataclass(frozen=True)
class KillPoint:
    """Request number `number`, or the first one like `operation` on a key with `key` in it."""

    when: When
    number: int = 0
    operation: str = ""
    key: str = ""

    def is_at(self, number: int, operation: str, key: str) -> bool:
        if self.number:
            return number == self.number
        return operation == self.operation and self.key in key


class KillingStore:
    """Passes requests on and counts them; the process dies at the kill point."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self._point: KillPoint | None = None
        self._mutex = threading.Lock()
        self.requests: list[str] = []

    def arm(self, point: KillPoint | None) -> None:
        self.requests.clear()
        self._point = point

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return self._counted(name, attribute) if name in _REQUESTS else attribute

    def _counted(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(key: Any, *args: Any, **options: Any) -> Any:
            place = key if isinstance(key, str) else ",".join(key)
            if operation == "put_if_match" and place == layout.LOCK:
                return call(key, *args, **options)  # a renewal: comes when time has passed
            with self._mutex:
                self.requests.append(f"{operation} {place}")
                number = len(self.requests)
            point = self._point
            due = point is not None and point.is_at(number, operation, place)
            if due and point is not None and point.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            answer = call(key, *args, **options)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return counted


def stated(form: str) -> list[TypeInput]:
    """The killed commit: an update, an insert, and a type that is new."""
    if form == "bulk":
        return [stream_of(CUSTOMER, STATED_CUSTOMERS), stream_of(PRODUCT, STATED_PRODUCTS)]
    return [rows_of(CUSTOMER, *STATED_CUSTOMERS), rows_of(PRODUCT, *STATED_PRODUCTS)]


def write(storage: Storage, form: str, point: KillPoint | None, notes: str) -> None:
    """Commit and close. `notes` gets what was acknowledged, and the requests of a whole run."""
    from storage_engine.objectstore.open import open_store

    config = storage.config(runtime_id="doomed", s3_lease_ttl_ms=LEASE_TTL_MS)
    store = KillingStore(open_store(storage.uri, config))
    repository = open_object_repository(cast(ObjectStore, store), config)
    while True:
        store.arm(point)
        try:
            result = commit(repository, *stated(form))
            break
        except LeaseExpiredError:
            continue  # the short lease and a busy machine
    assert result is not None
    Path(notes, "acknowledged").write_text(str(result.commit_id))
    repository.close()
    Path(notes, "requests").write_text("\n".join(store.requests))
