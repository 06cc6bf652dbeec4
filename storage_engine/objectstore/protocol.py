"""The port: what the engine asks of any object store, and what each answer means.

Adapters translate their backend's answers into the exceptions below and nothing else. They never
retry a conditional write: whether an unanswered one landed is decided by the caller, who knows
the write id (see `commitlog.conditional`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from storage_engine.objectstore.metering import RequestMeter
from storage_engine.objectstore.parallel import Parallel

Caching = Literal["always", "on_request", "never"]

_SEGMENT = r"(?!\.)[^/\\\x00-\x1f\x7f\ud800-\udfff]{1,200}"
_KEY = re.compile(f"{_SEGMENT}(?:/{_SEGMENT})*")
# A file name holds 255 bytes on common file systems; an S3 key 1024, the store's prefix included.
_SEGMENT_BYTES = 255
_KEY_BYTES = 900


class ObjectStoreError(Exception):
    """Base of the port's own signals; they do not leave the engine."""


class ObjectNotFound(ObjectStoreError):
    """There is no object under the key (404)."""


class PreconditionFailed(ObjectStoreError):
    """The condition was false (412), or the object of an If-Match is gone (404)."""


class ConditionalConflict(ObjectStoreError):
    """A concurrent conditional write was in the way (409): read back, then try again."""


class OutcomeUnknown(ObjectStoreError):
    """A write was sent and not answered (timeout, reset, 5xx): it may have landed, or may yet."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's bytes with the ETag that a conditional write on it must name."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing tells of an object."""

    key: str
    size: int
    modified: datetime


class ObjectStore(Protocol):
    """What differs from store to store is a property or a method here: nobody asks which it is.

    Keys are relative to the store's root, `/`-separated, and pass `check_key`.

    Failures that say nothing about the object (no network, no permission) are raised as
    `storage_engine.errors.StorageBackendError` with `retryable` set when trying again may help.
    """

    uri: str
    kind: str  # "s3", "directory" or "memory": to be shown, never to be branched on
    meter: RequestMeter
    parallel: Parallel  # sends independent requests together; closed with the store

    @property
    def timers(self) -> bool:
        """Whether its time passes by itself, so that threads may wait for it."""

    @property
    def caching(self) -> Caching:
        """Whether local copies of its immutable objects spare anything: always, only where a
        cache is asked for by name, or never as the objects are local files anyway."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What it is called, in its backend's own words, for whoever describes a storage."""

    @property
    def server(self) -> str | None:
        """The S3 endpoint that it talks to, "" for AWS itself; None when it is no S3 server."""

    @property
    def bulk(self) -> ObjectStore:
        """The same objects, by the way that is best for many small requests at once."""

    def get(self, key: str) -> StoredObject:
        """The whole object, or ObjectNotFound."""

    def get_range(self, key: str, start: int, size: int) -> bytes:
        """So many bytes of an object from `start` on, fewer where it ends before, or
        ObjectNotFound. Of objects that never change: two ranges may be of two versions."""

    def get_if_changed(self, key: str, etag: str) -> StoredObject | None:
        """The object, or None while its ETag is still `etag`; ObjectNotFound when it is gone."""

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in byte order of the key, paged lazily."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object that nobody else writes (unique key); safe to repeat."""

    def put_file(self, key: str, path: Path) -> None:
        """Like `put`, from a local file, in bounded memory whatever its size."""

    def put_if_absent(self, key: str, data: bytes, *, write_id: str) -> str:
        """Create; returns the ETag. PreconditionFailed | ConditionalConflict | OutcomeUnknown."""

    def put_if_match(self, key: str, data: bytes, etag: str, *, write_id: str) -> str:
        """Replace exactly the version `etag`; returns the new ETag. Same signals as above."""

    def delete_if_match(self, key: str, etag: str) -> None:
        """Delete exactly the version `etag`; a missing object is PreconditionFailed."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects unconditionally, in as few requests as the backend allows."""

    def now(self) -> datetime:
        """The store's clock (UTC): leases are judged by it, not by the local clock."""

    def sleep(self, seconds: float) -> None:
        """Let time pass; a store without timers moves its clock instead of waiting."""

    def local_path(self, key: str) -> Path | None:
        """Where another program can open the object on this machine, if it can."""

    def duckdb_url(self, key: str) -> str | None:
        """Where DuckDB can read parts of the object by itself, if it can; see `duckdb_secret`."""

    def duckdb_secret(self) -> Mapping[str, str]:
        """Options of DuckDB's CREATE SECRET that open its `duckdb_url`s; none where none is needed.

        Credentials of roles expire: ask again for each connection rather than keep them.
        """

    def close(self) -> None:
        """Give back connections and threads. Idempotent."""


def check_key(key: str) -> str:
    """Refuse keys that could escape a directory root or that some backend cannot hold."""
    if _KEY.fullmatch(key) is None:
        raise ValueError(
            f"unsafe object key {key!r}: segments must be 1-200 printable characters, "
            "not start with '.', and hold no backslash"
        )
    fits = len(key) <= _KEY_BYTES if key.isascii() else _fits(key)
    if not fits:
        raise ValueError(
            f"object key too long: {key[:80]!r}...: at most {_KEY_BYTES} bytes in UTF-8, "
            f"{_SEGMENT_BYTES} in a segment"
        )
    return key


def _fits(key: str) -> bool:
    lengths = [len(segment.encode()) for segment in key.split("/")]
    return max(lengths) <= _SEGMENT_BYTES and sum(lengths) + len(lengths) - 1 <= _KEY_BYTES


def is_key(name: str) -> bool:
    """Whether `check_key` lets the name pass: listings leave out what others put in between."""
    try:
        check_key(name)
    except ValueError:
        return False
    return True


def check_prefix(prefix: str) -> str:
    """Refuse listing prefixes that no valid key could start with (the last segment may be cut)."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def content_etag(data: bytes) -> str:
    """The ETag of the stores that make their own: equal content has an equal one, as on S3."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
