"""Does the store honour conditional writes? Everything that Ontologia promises rests on them.

Some S3-compatible servers accept the headers and ignore them. On such a server two writers would
overwrite one another's commits without a word, so it is asked before the first commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TypeVar

from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectNotFound,
    ObjectStore,
    OutcomeUnknown,
    PreconditionFailed,
)

T = TypeVar("T")


def probe_conditional_writes(store: ObjectStore, key: str) -> None:
    """Try each conditional request on an object of its own; raise if one is not honoured."""
    try:
        _probe(store, key)
    except (ConditionalConflict, OutcomeUnknown) as error:
        raise StorageBackendError(
            f"{store.uri} did not answer the test of conditional writes ({error}); try again",
            operation="probe",
            key=key,
            retryable=True,
        ) from error
    finally:
        store.delete_many([key])


def _probe(store: ObjectStore, key: str) -> None:
    first = _accepted(store, key, "If-None-Match: * on PutObject", lambda: _create(store, key))
    _refused(
        store,
        key,
        "If-None-Match: * on PutObject (create only if absent)",
        lambda: _create(store, key),
    )
    stale = _accepted(store, key, "If-Match on PutObject", lambda: _replace(store, key, first))
    _refused(
        store,
        key,
        "If-Match on PutObject (replace only the version read)",
        lambda: _replace(store, key, first),
    )
    current = _accepted(store, key, "If-Match on PutObject", lambda: _replace(store, key, stale))
    _refused(
        store,
        key,
        "If-Match on DeleteObject (delete only the version read)",
        lambda: store.delete_if_match(key, stale),
    )
    try:
        store.get(key)
    except ObjectNotFound:
        raise _ignored(
            store, key, "If-Match on DeleteObject (it answered 412 and deleted all the same)"
        ) from None
    _accepted(store, key, "If-Match on DeleteObject", lambda: store.delete_if_match(key, current))
    try:
        store.get(key)
    except ObjectNotFound:
        return
    raise _ignored(store, key, "If-Match on DeleteObject (it answered success and kept the object)")


def _create(store: ObjectStore, key: str) -> str:
    # Each body differs, as equal content would have an equal ETag.
    unique = uuid.uuid4().hex
    return store.put_if_absent(key, unique.encode(), write_id=unique)


def _replace(store: ObjectStore, key: str, etag: str) -> str:
    unique = uuid.uuid4().hex
    return store.put_if_match(key, unique.encode(), etag, write_id=unique)


def _refused(store: ObjectStore, key: str, condition: str, attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except PreconditionFailed:
        return
    raise _ignored(store, key, condition)


def _accepted(store: ObjectStore, key: str, condition: str, attempt: Callable[[], T]) -> T:
    try:
        return attempt()
    except PreconditionFailed as error:
        raise StorageBackendError(
            f"{store.uri} refuses {condition} even when the condition is true ({error}), so "
            "Ontologia cannot write there; AWS S3, SeaweedFS and recent MinIO work",
            operation="probe",
            key=key,
        ) from error


def _ignored(store: ObjectStore, key: str, condition: str) -> StorageBackendError:
    return StorageBackendError(
        f"{store.uri} ignores the condition {condition}: concurrent writers would overwrite one "
        "another's commits, and Ontologia would lose data there. Use a server that honours "
        "conditional writes: AWS S3, SeaweedFS and recent MinIO do",
        operation="probe",
        key=key,
    )
