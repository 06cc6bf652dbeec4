"""From a storage URI to an object store. Adapters are imported only when a URI asks for them.

Everything that Ontologia promises rests on conditional writes, and some S3-compatible servers
accept their headers and ignore them. There two writers would overwrite one another's commits
without a word, so a store is asked before the first commit whether it honours them.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError, StorageBackendError
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectNotFound,
    ObjectStore,
    OutcomeUnknown,
    PreconditionFailed,
    check_key,
)
from storage_engine.process import renew_after_fork

if TYPE_CHECKING:
    from storage_engine.objectstore.memory import MemoryBackend

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


KNOWN_URIS = (
    "s3://bucket/prefix, file:///absolute/path, a plain directory path, "
    "sqlite:///path/to/file.db, memory://name (for tests)"
)
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):(//)?")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")


class _MemoryBackends:
    """By name, of this process."""

    def __init__(self) -> None:
        self.backends: dict[str, MemoryBackend] = {}
        self.lock = threading.Lock()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self.lock = threading.Lock()


_registry = _MemoryBackends()


@dataclass(frozen=True, slots=True)
class StoreUri:
    """A parsed storage URI: `bucket` and `prefix` for s3, `path` for file, `name` for memory."""

    scheme: str
    bucket: str = ""
    prefix: str = ""
    path: Path | None = None
    name: str = ""


def parse_uri(uri: str) -> StoreUri:
    """Take a storage URI apart, or raise ConfigurationError with what is known."""
    if not uri.strip() or "\x00" in uri:
        raise ConfigurationError(f"the storage URI is empty or unreadable; known are {KNOWN_URIS}")
    match = _SCHEME.match(uri)
    if match is None:
        return StoreUri("file", path=expanded(uri))
    scheme, rest = match.group(1).lower(), uri[match.end() :]
    if match.group(2) is None:
        raise ConfigurationError(
            f"storage URI {uri!r} lacks '//' after its scheme; known are {KNOWN_URIS} "
            "(write ./ before a directory whose name holds a colon)"
        )
    if scheme == "s3":
        return _parse_s3(uri, rest)
    if scheme == "file":
        return _parse_file(uri, rest)
    if scheme == "memory":
        if not re.fullmatch(r"[A-Za-z0-9._-]+", rest):
            raise ConfigurationError(f"storage URI {uri!r} needs a plain name: memory://name")
        return StoreUri("memory", name=rest)
    if scheme == "sqlite":
        raise ConfigurationError(f"{uri!r} is a SQLite database, not an object store")
    hint = " (did you mean s3://?)" if scheme in {"s3a", "s3n"} else ""
    raise ConfigurationError(
        f"unknown scheme {scheme!r} in storage URI {uri!r}{hint}; known are {KNOWN_URIS}"
    )


def expanded(path: str | Path) -> Path:
    """A path with the home directory that `~` stands for."""
    if "\x00" in str(path):
        raise ConfigurationError(f"the path {str(path)!r} has a NUL character in it")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"the path {str(path)!r}: {error}") from None


def open_store(uri: str, config: OntologiaConfig | None = None) -> ObjectStore:
    """Open the object store behind a URI. Nothing is written; the caller closes the store."""
    parsed = parse_uri(uri)
    if parsed.scheme == "s3":
        from storage_engine.objectstore.s3 import S3Store

        return S3Store(parsed.bucket, parsed.prefix, config or OntologiaConfig())
    if parsed.scheme == "memory":
        return memory_backend(parsed.name).client()
    from storage_engine.objectstore.local import DirectoryStore

    assert parsed.path is not None
    return DirectoryStore(parsed.path)


def memory_backend(name: str) -> MemoryBackend:
    """The process-wide backend behind memory://name, made at first use."""
    from storage_engine.objectstore.memory import MemoryBackend

    with _registry.lock:
        if name not in _registry.backends:
            _registry.backends[name] = MemoryBackend(name)
        return _registry.backends[name]


def _parse_s3(uri: str, rest: str) -> StoreUri:
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigurationError(
            f"storage URI {uri!r} has no valid bucket name: expected s3://bucket or "
            "s3://bucket/prefix, with 3-63 letters, digits, dots and hyphens in the bucket"
        )
    prefix = prefix.strip("/")
    if prefix:
        try:
            check_key(prefix)
        except ValueError as error:
            raise ConfigurationError(f"storage URI {uri!r} has a bad prefix: {error}") from None
    return StoreUri("s3", bucket=bucket, prefix=prefix)


def _parse_file(uri: str, rest: str) -> StoreUri:
    host, slash, path = rest.partition("/")
    if host not in {"", "localhost"} or not slash:
        raise ConfigurationError(
            f"storage URI {uri!r} must name an absolute path with three slashes, as in "
            "file:///data/onto; for a relative one give the plain directory path"
        )
    return StoreUri("file", path=expanded(unquote("/" + path)))
