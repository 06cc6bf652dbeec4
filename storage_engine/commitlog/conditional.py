"""Conditional writes with their three outcomes: won, lost, unknown.

The store may apply a write and fail to say so, or say that a condition is false because our own
earlier request made it false. So whatever is not a plain success is settled by reading back and
looking for our write id, never by guessing; and a request that may still be on its way is sent
again with identical bytes, so that at most one of the two can apply.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectNotFound,
    ObjectStore,
    OutcomeUnknown,
    PreconditionFailed,
    StoredObject,
)

ATTEMPTS = 8
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Won:
    etag: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Another version stands; `current` is None when the object is gone."""

    current: StoredObject | None


class StillUnknown(StorageBackendError):
    """The store did not answer within the budget: the write may or may not have landed."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the store did not say whether {key} was written",
            operation="conditional write",
            key=key,
            retryable=True,
        )


def write_conditionally(
    store: ObjectStore,
    key: str,
    data: bytes,
    *,
    write_id: str,
    etag: str | None,
    attempts: int = ATTEMPTS,
) -> Won | Lost:
    """Create (`etag` None) or replace exactly the version `etag`. Raises StillUnknown, or another
    StorageBackendError when nothing was sent or the store refused it: then it did not land.

    `data` must contain `write_id`; the read-back recognises our write by it.
    """
    marker = write_id.encode()
    failure: Exception | None = None
    for attempt in range(attempts):
        if attempt:
            _pause(store, attempt)
        try:
            if etag is None:
                return Won(store.put_if_absent(key, data, write_id=write_id))
            return Won(store.put_if_match(key, data, etag, write_id=write_id))
        except (PreconditionFailed, ConditionalConflict, OutcomeUnknown) as answer:
            failure = answer
        except StorageBackendError:
            if failure is None:
                raise
            continue  # a refusal now says nothing about the request before
        try:
            current = _read_back(store, key)
        except StorageBackendError as error:
            failure = error
            continue
        if current is not None and marker in current.data:
            return Won(current.etag)
        if not _stands_as_expected(current, etag):
            return Lost(current)
        # Not applied, but the request may still land: repeat the same bytes. (Also when the store
        # said 412 and yet shows the expected version, as after a lock came and went.)
    raise StillUnknown(key) from failure


def _read_back(store: ObjectStore, key: str) -> StoredObject | None:
    try:
        return store.get(key)
    except ObjectNotFound:
        return None


def _stands_as_expected(current: StoredObject | None, etag: str | None) -> bool:
    return current is None if etag is None else current is not None and current.etag == etag


def _pause(store: ObjectStore, attempt: int) -> None:
    ceiling = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
    store.sleep(ceiling * random.uniform(0.5, 1.0))
