"""Local copies of immutable objects, shared by all processes of a machine.

A file is named by a hash of its storage, its key and the SHA-256 of its content. So none is ever
stale, and objects with the same content have different paths: a path tells which object it is.
Promises:

- What is handed out is right. Content is checked when it was fetched, and a file that was found
  is checked when this process first uses it and whenever it has changed since. What a power loss
  tore, or somebody truncated, does not pass.
- A path that was handed out can be opened for half of the grace period (`cache_space`).
- The cache never fails a read. When its directory does not work, it says so once, leaves it alone
  for a minute at a time, and hands out fetched content instead of paths.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from storage_engine.config import OntologiaConfig
from storage_engine.errors import IntegrityError
from storage_engine.objectstore import local
from storage_engine.objectstore.cache_space import CacheSpace, Identity
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.process import renew_after_fork

log = logging.getLogger(__name__)

_GRACE_S = 600.0
_REMEMBERED = 100_000
_ATTEMPTS = 3
_SHA256 = re.compile(r"[0-9a-f]{64}")


def default_directory() -> Path | None:
    """The user's cache directory for Ontologia; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # others are to be ignored, says the XDG specification
        return Path(base) / "ontologia"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "ontologia" if os.path.isabs(home) else None


def open_cache(
    config: OntologiaConfig, *, warn: Callable[[str], None] = log.warning
) -> ImmutableCache:
    """The cache that `cache_dir` and `cache_bytes` describe. Nothing is created yet."""
    directory = config.cache_dir or default_directory()
    if directory is None and config.cache_bytes:
        warn("this user has no home directory, so nothing is cached: set cache_dir")
    return ImmutableCache(directory or Path(), config.cache_bytes if directory else 0, warn=warn)


def cache_for(store: ObjectStore, config: OntologiaConfig) -> ImmutableCache | None:
    """The cache of a store's immutable objects, where copies of them spare anything."""
    wanted = store.caching == "always" or (
        store.caching == "on_request" and config.cache_dir is not None
    )
    return open_cache(config) if wanted else None


class ImmutableCache:
    """Keeps fetched objects as local files. Safe to use from many threads and processes.

    Holds nothing open between calls, so there is nothing to close.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        *,
        warn: Callable[[str], None] = log.warning,
        clock: Callable[[], float] = time.time,
        grace_s: float = _GRACE_S,
    ) -> None:
        """`max_bytes` 0 turns it off. Processes that share a directory share clock and grace."""
        self._space = CacheSpace(directory, max_bytes, clock=clock, grace_s=grace_s)
        self._warn = warn
        self._warned: set[object] = set()
        self._checked: dict[str, Identity] = {}  # files whose content this process knows is right
        self._counts: Counter[str] = Counter()
        self._flights: dict[str, Future[Path | bytes]] = {}
        self._lock = threading.Lock()
        renew_after_fork(self)

    @property
    def directory(self) -> Path:
        return self._space.directory

    def obtain(
        self,
        namespace: str,
        key: str,
        *,
        size: int | None,
        sha256: str,
        fetch: Callable[[], bytes],
    ) -> Path | bytes:
        """A local file with this content, to be opened soon; or the content, if there is no file.

        `namespace`: the storage. `size` None: not known. An object whose hash is not known is not
        kept. `fetch` is called once at most, what it raises goes to the caller, and content other
        than the log says raises `IntegrityError`.
        """
        wanted = _CacheRequest(_name(namespace, key, sha256), key, size, sha256, fetch)
        if not self._space.max_bytes or not _SHA256.fullmatch(sha256):
            return self._fetched(wanted)
        with self._lock:
            flight = self._flights.get(wanted.name)
            if flight is None:
                own = self._flights[wanted.name] = Future()
        if flight is not None:
            if flight.exception() is None:
                self._count(hits=1)
                return flight.result()
            # Perhaps only that caller's bad luck: all who waited try for themselves, at once.
            return self._obtain(wanted)
        try:
            result = self._obtain(wanted)
            own.set_result(result)
            return result
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._lock:
                self._flights.pop(wanted.name, None)

    def get(
        self,
        namespace: str,
        key: str,
        *,
        size: int | None,
        sha256: str,
        fetch: Callable[[], bytes],
    ) -> bytes:
        """The content, from the local file if there is one."""
        copy = self.obtain(namespace, key, size=size, sha256=sha256, fetch=fetch)
        if isinstance(copy, bytes):
            return copy
        try:
            return copy.read_bytes()
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # then somebody deleted the directory
                self._trouble(error)
            return self._fetched(_CacheRequest(copy.name, key, size, sha256, fetch))

    def stats(self) -> dict[str, int]:
        """What this object has done; `bytes_held` is what all processes keep, as last seen."""
        with self._lock:
            names = ("hits", "misses", "bytes_hit", "bytes_missed", "not_kept", "damaged")
            counts = {name: self._counts[name] for name in names}
        space = self._space
        return {**counts, "evictions": space.evictions, "bytes_held": space.bytes_held}

    def _obtain(self, wanted: _CacheRequest) -> Path | bytes:
        try:
            copy = self._find(wanted)
        except FileNotFoundError:
            copy = None
        except OSError as error:
            self._trouble(error)
            copy = None
        if copy is not None:
            return copy
        data = self._fetched(wanted)
        if self._keep(wanted.name, data):
            return self._space.path(wanted.name)
        self._count(not_kept=1)
        return data

    def _find(self, wanted: _CacheRequest) -> Path | bytes | None:
        name, path = wanted.name, self._space.path(wanted.name)
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            right = stat.S_ISREG(status.st_mode) and wanted.size in {None, status.st_size}
            if right and not self._is_checked(name, status):
                right = hashlib.file_digest(file, "sha256").hexdigest() == wanted.sha256
            if not right:
                self._count(damaged=1)
                self._warn_once(name, f"the cached file {path} is damaged: it is fetched again")
                self._space.discard(name, status)
                return None
            self._remember(name, Identity.of(status))
            self._count(hits=1, bytes_hit=status.st_size)
            if self._space.is_safe(status) or self._mark_used(name, status):
                return path
            file.seek(0)
            return file.read()  # the path may lead nowhere by the time the caller opens it

    def _mark_used(self, name: str, status: os.stat_result) -> bool:
        if self._space.paused:
            return False
        try:
            marked = self._space.mark_used(name, status)
        except OSError as error:
            self._trouble(error)
            return False
        if marked is not None:
            self._remember(name, marked)
        return marked is not None

    def _keep(self, name: str, data: bytes) -> bool:
        """Whether the content is now in a file."""
        if len(data) > self._space.max_bytes:
            return False
        for attempt in range(1, _ATTEMPTS + 1):
            if self._space.paused:
                return False
            try:
                kept = self._space.keep(name, data)
            except OSError as error:
                # While somebody deletes the directory, it is worth trying again.
                if isinstance(error, FileNotFoundError) and attempt < _ATTEMPTS:
                    continue
                self._trouble(error)
                return False
            if kept is not None:
                self._remember(name, kept)
            return kept is not None
        return False

    def _fetched(self, wanted: _CacheRequest) -> bytes:
        data = wanted.fetch()
        self._count(misses=1, bytes_missed=len(data))
        if wanted.size not in {None, len(data)}:
            raise damaged(wanted.key, f"{len(data)} bytes", str(wanted.size))
        if _SHA256.fullmatch(wanted.sha256):
            actual = hashlib.sha256(data).hexdigest()
            if actual != wanted.sha256:
                raise damaged(wanted.key, f"sha256 {actual}", wanted.sha256)
        return data

    def _is_checked(self, name: str, status: os.stat_result) -> bool:
        with self._lock:
            return self._checked.get(name) == Identity.of(status)

    def _remember(self, name: str, identity: Identity) -> None:
        with self._lock:
            self._checked[name] = identity
            if len(self._checked) > _REMEMBERED:
                del self._checked[next(iter(self._checked))]

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _trouble(self, error: OSError) -> None:
        if self._space.paused:
            return
        self._space.pause()
        self._warn_once(
            error.errno,
            f"the cache in {self.directory} does not work, so objects are fetched each time: "
            f"{local.advice(error)}; or set cache_dir (cache_bytes = 0 turns the cache off)",
        )

    def _warn_once(self, what: object, message: str) -> None:
        with self._lock:
            if what in self._warned:
                return
            self._warned.add(what)
        self._warn(message)

    def after_fork(self) -> None:
        """Threads of the parent are not here to end what they were doing."""
        self._lock = threading.Lock()
        self._flights = {}
        self._space.after_fork()


class _CacheRequest(NamedTuple):
    name: str
    key: str
    size: int | None
    sha256: str
    fetch: Callable[[], bytes]


def _name(namespace: str, key: str, sha256: str) -> str:
    return hashlib.sha256("\0".join([namespace, key, sha256]).encode()).hexdigest()


def damaged(key: str, what: str, expected: str) -> IntegrityError:
    """An object has other content than the log says."""
    return IntegrityError(
        f"{key} has {what} where the log says {expected}: the object is damaged; "
        "restore it from a copy of the storage",
        key=key,
    )
