"""Small shared JSON objects, changed by read-modify-write under a condition.

A conditional write has three outcomes: won, lost, unknown. The store may apply a write and fail to
say so, or say that a condition is false because our own earlier request made it false. So whatever
is not a plain success is settled by reading back and looking for our write id, never by guessing;
and a request that may still be on its way is sent again with identical bytes, so that at most one
of the two can apply.

`rewrite` is the one loop: change, write if nobody else did, change again what somebody else left.
`JsonObjects` remembers the version last seen of each object, so that a read is short while nothing
has changed and an update needs no read at all; `Documents` are those whose value is plain JSON.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import from_json, to_json
from storage_engine.errors import IntegrityError, SchemaMetadataError, StorageBackendError
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
    """Our write landed. `other` is what stands in its place where that has our write id and is
    not what we sent: something has altered it since."""

    etag: str
    other: bytes | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Another version stands; `current` is None when the object is gone. `unanswered`: a request
    of ours got no answer, and may have landed before that version came."""

    current: StoredObject | None
    unanswered: bool = False


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
    marker: bytes | None = None,
) -> Won | Lost:
    """Create (`etag` None) or replace exactly the version `etag`. Raises StillUnknown, or another
    StorageBackendError when nothing was sent or the store refused it: then it did not land.

    The read-back recognises our write by `marker`, which `data` must contain: its `write_id`.
    """
    marker = marker or write_id.encode()
    failure: Exception | None = None
    unanswered = False
    for attempt in range(attempts):
        if attempt:
            _pause(store, attempt)
        try:
            if etag is None:
                return Won(store.put_if_absent(key, data, write_id=write_id))
            return Won(store.put_if_match(key, data, etag, write_id=write_id))
        except (PreconditionFailed, ConditionalConflict, OutcomeUnknown) as answer:
            failure = answer
            unanswered = unanswered or not isinstance(answer, PreconditionFailed)
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
            return Won(current.etag, current.data if current.data != data else None)
        if not _stands_as_expected(current, etag):
            return Lost(current, unanswered)
        # Not applied, but the request may still land: repeat the same bytes. (Also when the store
        # said 412 and yet shows the expected version, as after a lock came and went.)
    raise StillUnknown(key) from failure


def create(store: ObjectStore, key: str, data: bytes) -> bool:
    """Write an object that is never changed; False if it is there with other bytes, which then
    stay. Raises as `write_conditionally` does."""
    outcome = write_conditionally(store, key, data, write_id=key, etag=None, marker=data)
    return isinstance(outcome, Won)


def delete_conditionally(
    store: ObjectStore, key: str, etag: str, *, attempts: int = ATTEMPTS
) -> None:
    """Delete exactly the version `etag`, asking again where no answer comes. Raises
    PreconditionFailed when another version stands or none (it may have been an earlier request of
    ours), and what the store said last when the budget is used up."""
    for attempt in range(1, attempts + 1):
        try:
            store.delete_if_match(key, etag)
            return
        except (ConditionalConflict, OutcomeUnknown):
            if attempt == attempts:
                raise
        except StorageBackendError as error:
            if not error.retryable or attempt == attempts:
                raise
        _pause(store, attempt)


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


_LOSSES = 4
_REQUESTS = 3

V = TypeVar("V")
Parse = Callable[[str, bytes | None], V]  # of a key and its content; None: there is no object
Encode = Callable[[V, str], bytes]  # with the write id in it
Change = Callable[[V], V | None]  # None: leave it as it is

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JsonVersion(Generic[V]):
    """A value as it is stored; `etag` None means that there is no object yet."""

    value: V
    etag: str | None = None


def rewrite(
    store: ObjectStore,
    key: str,
    version: JsonVersion[V],
    change: Change[V],
    *,
    parse: Parse[V],
    encode: Encode[V],
    losses: int = _LOSSES,
    attempts: int = ATTEMPTS,
) -> JsonVersion[V] | None:
    """Apply `change` to `version`, or to whatever has replaced it meanwhile.

    Returns the version that stands then, None when others were faster `losses` times. Raises
    StillUnknown when `attempts` requests did not tell whether it was written.
    """
    for _ in range(losses):
        changed = change(version.value)
        if changed is None:
            return version
        write_id = layout.new_write_id()
        outcome = write_conditionally(
            store,
            key,
            encode(changed, write_id),
            write_id=write_id,
            etag=version.etag,
            attempts=attempts,
        )
        if isinstance(outcome, Won):
            # What is remembered under an ETag is what was read or sent under it, nothing else.
            stands = changed if outcome.other is None else parse(key, outcome.other)
            return JsonVersion(stands, outcome.etag)
        current = outcome.current
        if current is None:
            version = JsonVersion(parse(key, None))
        else:
            version = JsonVersion(parse(key, current.data), current.etag)
    return None


class JsonObjects(Generic[V]):
    """Objects of one kind, with the version last seen of each."""

    def __init__(
        self, store: ObjectStore, *, parse: Parse[V], encode: Encode[V], operation: str
    ) -> None:
        """`operation` is what errors name."""
        self._store = store
        self._parse = parse
        self._encode = encode
        self._operation = operation
        self._seen: dict[str, JsonVersion[V]] = {}

    def seen(self, key: str) -> JsonVersion[V] | None:
        return self._seen.get(key)

    def forget(self, key: str) -> None:
        self._seen.pop(key, None)

    def read(self, key: str) -> JsonVersion[V]:
        """The object now: one request, short while it has not changed."""
        seen = self._seen.get(key)
        try:
            if seen is not None and seen.etag is not None:
                stored = self._store.get_if_changed(key, seen.etag)
                if stored is None:
                    return seen
            else:
                stored = self._store.bulk.get(key)
        except ObjectNotFound:
            version = JsonVersion(self._parse(key, None))
        else:
            version = JsonVersion(self._parse(key, stored.data), stored.etag)
        self._seen[key] = version
        return version

    def update(
        self,
        key: str,
        change: Change[V],
        *,
        name: str | None = None,
        expect_absent: bool = False,
        advice: str = "",
    ) -> None:
        """Apply `change` to the current version; `expect_absent` saves the read of a new one.

        `name` and `advice` are for the errors: what the object is, and what to do.
        """
        version = self._seen.get(key)
        if version is None:
            version = JsonVersion(self._parse(key, None)) if expect_absent else self.read(key)
        try:
            written = rewrite(
                self._store,
                key,
                version,
                change,
                parse=self._parse,
                encode=self._encode,
                attempts=_REQUESTS,
            )
        except StillUnknown:
            self.forget(key)
            raise StorageBackendError(
                f"{name or key} may not have been written", operation=self._operation, key=key
            ) from None
        if written is None:
            self.forget(key)
            raise StorageBackendError(
                f"{name or key} is being changed by other writers{advice}",
                operation=self._operation,
                key=key,
                retryable=True,
            )
        self._seen[key] = written


class Documents:
    """Catalog documents of a storage."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._objects: JsonObjects[Document | None] = JsonObjects(
            store, parse=_parse_document, encode=_encode_document, operation="catalog"
        )

    def read(self, key: str) -> Document | None:
        """The document now, None when there is none; SchemaMetadataError when malformed."""
        version = self._objects.read(key)
        if version.etag is None:
            self._objects.forget(key)  # another writer may create it any time
        return version.value

    def update(
        self, key: str, change: Change[Document | None], *, expect_absent: bool = False
    ) -> None:
        """Apply `change` to the current version; `expect_absent` saves a read."""
        self._objects.update(key, change, expect_absent=expect_absent)

    def replace_broken(
        self, key: str, document: Document, is_good: Callable[[Document | None], bool]
    ) -> None:
        """Write a document in place of what stands there, unless that is good. Whoever writes it
        at the same time may win: then it is theirs."""
        self._objects.forget(key)
        store, etag = self._store, None
        with suppress(ObjectNotFound, SchemaMetadataError):  # that is what is to be mended
            stored = store.get(key)
            etag = stored.etag
            if is_good(_parse_document(key, stored.data)):
                return
        write_id = layout.new_write_id()
        data = _encode_document(document, write_id)
        write_conditionally(store, key, data, write_id=write_id, etag=etag)


def _parse_document(key: str, data: bytes | None) -> Document | None:
    if data is None:
        return None
    try:
        document = from_json(data, key=key)
        to_json(document)
    except IntegrityError as error:
        raise SchemaMetadataError(str(error), key=key) from error
    except TypeError as error:  # more can be read than written
        raise SchemaMetadataError(f"{key} is nested too deeply: {error}", key=key) from error
    return document


def _encode_document(document: Document | None, write_id: str) -> bytes:
    return to_json({**(document or {}), "write_id": write_id})
