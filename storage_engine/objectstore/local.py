"""A directory as an object store: the embedded default, for any number of processes on a machine.

It promises what S3 does. A reader sees a whole object or none; a conditional write is judged
atomically against every other process on the machine, even when one is killed at any point; a
write that returned survives power loss (file and directories are fsynced). Objects are plain
files under the root, so other programs can open them. `.tmp` and `.locks` are its own. Failures
say what to do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.metering import RequestMeter
from storage_engine.objectstore.parallel import Parallel
from storage_engine.objectstore.protocol import (
    Caching,
    ObjectInfo,
    ObjectNotFound,
    OutcomeUnknown,
    PreconditionFailed,
    StoredObject,
    check_key,
    check_prefix,
    content_etag,
    is_key,
)
from storage_engine.process import renew_after_fork, unforked

PAGE = 1000
_STRIPES = 64
_RETRIES = 100
_SWEEP_AFTER_S = 24 * 3600
_SHOWN_PATH = 500
_ADVICE = {
    errno.EACCES: "permission denied: give this user read and write access to the directory",
    errno.EPERM: "not permitted: give this user read and write access to the directory",
    errno.EROFS: "the file system is read-only: remount it, or choose another directory",
    errno.ENOSPC: "the disk is full: free some space and try again",
    errno.EDQUOT: "the disk quota is used up: free some space and try again",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENAMETOOLONG: "the path is too long for this file system: choose a shorter root",
    errno.ELOOP: "its symbolic links lead in a circle: mend them, or choose another directory",
    errno.ENOTDIR: "a part of the path is a file: choose another directory",
    errno.EISDIR: "it is a directory, where a file is expected",
    errno.ENOENT: "a part of the path is missing",
    errno.ESTALE: "the network file system has lost it: mount it again",
    errno.EIO: "the disk reports an input/output error: check it",
}
_RETRYABLE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EBUSY})


def advice(error: OSError) -> str:
    """What went wrong and what to do about it, in words."""
    return _ADVICE.get(error.errno or 0) or error.strerror or str(error)


def is_retryable(error: OSError) -> bool:
    """Whether the same may succeed later, with nothing but time or space."""
    return error.errno in _RETRYABLE


@contextmanager
def path_errors(path: Path | str, operation: str) -> Iterator[None]:
    """What the system refuses about a path, as an error of ours that names it."""
    try:
        yield
    except OSError as error:
        raise StorageBackendError(
            f"{operation} {shortened(path)}: {advice(error)}",
            prefix=str(path),
            operation=operation,
            retryable=is_retryable(error),
        ) from error


def is_there(path: Path) -> bool:
    """Whether the path leads to anything; StorageBackendError where that cannot be found out."""
    with path_errors(path, "open"):
        return path.exists()


def shortened(path: Path | str) -> str:
    """A path for a message: one that is too long to be a path is too long to be read."""
    text = str(path)
    return text if len(text) <= _SHOWN_PATH else f"{text[:_SHOWN_PATH]}... ({len(text)} letters)"


def write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet, down to the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def copy_new(source: Path, path: Path) -> None:
    """Copy into a file that must not exist yet, down to the disk, in bounded memory."""
    with open(source, "rb") as reader, open(path, "xb") as file:
        shutil.copyfileobj(reader, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make names that were added to or removed from a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class DirectoryStore:
    """Objects as files under `root`, which the first write creates when it is missing."""

    kind = "directory"
    timers = True
    caching: Caching = "never"
    server = None

    def __init__(self, root: Path) -> None:
        # Resolved once: below it every symlink is refused, so no key can lead out of it.
        self.root = Path(os.path.realpath(root))
        self.uri = self.root.as_uri()
        self.facts: dict[str, str] = {}
        self.meter = RequestMeter()
        self.parallel = Parallel(8)
        self._durable: set[Path] = set()
        self._durable_lock = threading.Lock()
        self._lock_handles: set[int] = set()
        renew_after_fork(self)
        with path_errors(self.root, "open"):
            if self.root.exists() and not self.root.is_dir():
                raise StorageBackendError(
                    f"{self.root} is not a directory: choose a directory for the storage",
                    prefix=str(self.root),
                    operation="open",
                )
            self._seen_root = self.root.is_dir()
        self._sweep()

    def after_fork(self) -> None:
        """A copy of a lock's handle keeps the lock when the parent is killed."""
        for handle in self._lock_handles:
            with suppress(OSError):
                os.close(handle)
        self._lock_handles.clear()
        self._durable_lock = threading.Lock()

    def get(self, key: str) -> StoredObject:
        path = self._path(key, "get")
        self.meter.count("GET")
        with self._translated("get", key):
            stored = self._read(path, key)
        self.meter.add_bytes(read=len(stored.data))
        return stored

    def get_range(self, key: str, start: int, size: int) -> bytes:
        path = self._path(key, "get_range")
        self.meter.count("GET")
        with self._translated("get_range", key):
            try:
                with path.open("rb") as opened:
                    opened.seek(start)
                    data = opened.read(size)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._check_root()
                raise ObjectNotFound(key) from None
        self.meter.add_bytes(read=len(data))
        return data

    def get_if_changed(self, key: str, etag: str) -> StoredObject | None:
        stored = self.get(key)
        return None if stored.etag == etag.strip('"') else stored

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._list(prefix, start_after)

    def _list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        self.meter.count("LIST")
        folder = prefix.rpartition("/")[0]
        yielded = 0
        with self._translated("list", prefix):
            self._check_root()
            if folder and self._is_foreign(self.root / folder):
                return
            for info in self._walk(folder, prefix, start_after):
                # Counted like S3's pages, so that request figures are the same on every store.
                if yielded and yielded % PAGE == 0:
                    self.meter.count("LIST")
                yielded += 1
                yield info

    def put(self, key: str, data: bytes) -> None:
        self._put(key, "put", lambda temp: write_new(temp, data), len(data))

    def put_file(self, key: str, path: Path) -> None:
        with path_errors(path, "put_file"):
            size = path.stat().st_size
        self._put(key, "put_file", lambda temp: copy_new(path, temp), size)

    def _put(self, key: str, operation: str, fill: Callable[[Path], None], size: int) -> None:
        target = self._path(key, operation)
        self.meter.count("PUT", written=size)
        with self._translated(operation, key), self._temp(fill) as temp, self._locked(key):
            self._place(temp, target, os.replace)
            sync_directory(target.parent)

    def put_if_absent(self, key: str, data: bytes, *, write_id: str) -> str:
        target = self._path(key, "put_if_absent")
        self.meter.count("PUT_IF", written=len(data))
        with self._translated("put_if_absent", key):
            taken = target.is_file()
        if taken:  # who polls a taken lock need not write and sync a file each time
            raise PreconditionFailed(f"{key} exists")
        with (
            self._translated("put_if_absent", key),
            self._temp(lambda temp: write_new(temp, data)) as temp,
        ):
            try:
                # A link is created whole or not at all, and fails when the name is taken.
                self._place(temp, target, os.link)
            except FileExistsError:
                if target.is_dir():
                    raise IsADirectoryError(errno.EISDIR, "is a directory") from None
                raise PreconditionFailed(f"{key} exists") from None
            self._made_durable(target, key)
        return content_etag(data)

    def put_if_match(self, key: str, data: bytes, etag: str, *, write_id: str) -> str:
        target = self._path(key, "put_if_match")
        self.meter.count("PUT_IF", written=len(data))
        self._require_root(key)
        with (
            self._translated("put_if_match", key),
            self._temp(lambda temp: write_new(temp, data)) as temp,
            self._locked(key),
        ):
            self._require(target, key, etag)
            os.replace(temp, target)
            self._made_durable(target, key)
        return content_etag(data)

    def delete_if_match(self, key: str, etag: str) -> None:
        target = self._path(key, "delete_if_match")
        self.meter.count("DELETE_IF")
        self._require_root(key)
        with self._translated("delete_if_match", key), self._locked(key):
            self._require(target, key, etag)
            os.unlink(target)
            self._made_durable(target, key)
        self._prune(target.parent)

    def delete_many(self, keys: Sequence[str]) -> None:
        targets = [(key, self._path(key, "delete_many")) for key in keys]
        for start in range(0, len(targets), PAGE):
            batch = targets[start : start + PAGE]
            self.meter.count("DELETE")
            with self._translated("delete_many", batch[0][0]):
                for key, target in batch:
                    # Nothing below a file, and no directory, is an object.
                    missing = suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError)
                    with missing, self._locked(key):
                        os.unlink(target)
                # A folder that is gone takes its names along: only those that stay are synced.
                for folder in {self._prune(target.parent) for _, target in batch}:
                    with suppress(FileNotFoundError, NotADirectoryError):
                        sync_directory(folder)

    def now(self) -> datetime:
        return datetime.now(UTC)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def local_path(self, key: str) -> Path | None:
        return self._path(key, "local_path")

    def duckdb_url(self, key: str) -> str | None:
        return None

    def duckdb_secret(self) -> dict[str, str]:
        return {}

    @property
    def bulk(self) -> DirectoryStore:
        return self

    def close(self) -> None:
        self.parallel.close()

    def _path(self, key: str, operation: str) -> Path:
        path = self.root / check_key(key)
        if self._is_foreign(path):
            raise StorageBackendError(
                f"{path} goes through a symbolic link: the storage may hold none, as it could "
                "lead out of the directory; replace it by what it points to",
                prefix=str(self.root),
                operation=operation,
                key=key,
            )
        return path

    def _is_foreign(self, path: Path) -> bool:
        """Whether a symbolic link is on the way from the root to there."""
        current = str(self.root)
        for name in str(path)[len(current) :].split(os.sep):
            if not name:
                continue
            current = f"{current}{os.sep}{name}"
            try:
                if stat.S_ISLNK(os.lstat(current).st_mode):
                    return True
            except OSError:
                return False  # nothing is there, or below it
        return False

    def _check_root(self) -> None:
        """A root that vanished is not an empty one: say so, rather than that objects are gone."""
        seen = self._seen_root  # before the look: another thread's first write may come between
        if self.root.is_dir():
            self._seen_root = True
        elif seen:
            raise StorageBackendError(
                f"the storage directory {self.root} has disappeared: mount or restore it",
                prefix=str(self.root),
            )

    def _read(self, path: Path, key: str) -> StoredObject:
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._check_root()
            raise ObjectNotFound(key) from None
        return StoredObject(data, content_etag(data))

    def _require_root(self, key: str) -> None:
        with path_errors(self.root, "open"):
            self._check_root()
        if not self._seen_root:
            raise PreconditionFailed(f"{key} is gone")

    def _require(self, path: Path, key: str, etag: str) -> None:
        try:
            stored = self._read(path, key)
        except ObjectNotFound:
            raise PreconditionFailed(f"{key} is gone") from None
        if stored.etag != etag.strip('"'):
            raise PreconditionFailed(f"{key} has another ETag")

    @contextmanager
    def _temp(self, fill: Callable[[Path], None]) -> Iterator[Path]:
        self._check_root()
        folder = self.root / ".tmp"
        path = folder / uuid.uuid4().hex
        try:
            try:
                fill(path)
            except FileNotFoundError:
                self._make_folder(folder)
                fill(path)
            yield path
        finally:
            with suppress(OSError):
                path.unlink()

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Keep other writers of this key out, in this process and in others."""
        stripe = zlib.crc32(key.encode()) % _STRIPES
        path = self.root / ".locks" / f"{stripe:02d}"
        try:
            handle = self._open_lock(path)
        except FileNotFoundError:
            if not self.root.is_dir():
                self._check_root()
                raise
            self._make_folder(path.parent)
            handle = self._open_lock(path)
        try:
            # Each open file has a lock of its own, so this also excludes our own threads; the
            # kernel drops it when the process dies.
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            if handle in self._lock_handles:  # not so in a fork, which must not free it
                self._lock_handles.discard(handle)
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)

    def _open_lock(self, path: Path) -> int:
        with unforked():  # a child must know of every handle that it has a copy of
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._lock_handles.add(handle)
        return handle

    def _place(self, temp: Path, target: Path, move: Callable[[Path, Path], None]) -> None:
        """Give the finished file its name, making the folders that are missing."""
        for _ in range(_RETRIES):
            try:
                self._make_folder(target.parent)
                move(temp, target)
                return
            except FileNotFoundError:
                # A delete in another process pruned a folder that we had just made or seen.
                with self._durable_lock:
                    self._durable.clear()
        raise OSError(errno.EBUSY, "its folder keeps vanishing: try again")

    def _make_folder(self, folder: Path) -> None:
        """Make a folder with its parents, durably. Known ones cost nothing, parents neither."""
        missing: list[Path] = []
        with self._durable_lock:
            while folder not in self._durable and folder != self.root:
                missing.append(folder)
                folder = folder.parent
            rooted = folder in self._durable
        if not rooted:
            for parent in reversed(self.root.parents):
                if not parent.exists():
                    self._make_one(parent)
            missing.append(self.root)
        for made in reversed(missing):
            self._make_one(made)
            with self._durable_lock:
                self._durable.add(made)
        self._seen_root = True

    @staticmethod
    def _make_one(folder: Path) -> None:
        try:
            folder.mkdir()
        except FileExistsError:
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "is a file", str(folder)) from None
        # Also when it was there: whoever made it may not have come to syncing it yet.
        sync_directory(folder.parent)

    def _made_durable(self, target: Path, key: str) -> None:
        try:
            sync_directory(target.parent)
        except FileNotFoundError:
            return  # Another process deleted the object and pruned the folder: overtaken, not lost.
        except OSError as error:
            raise OutcomeUnknown(f"{key} was written but could not be synced: {error}") from error

    def _prune(self, folder: Path) -> Path:
        """Take away folders that became empty, so that deleted attempts leave nothing behind.
        Returns the first that stays."""
        while folder != self.root:
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                return folder
            with self._durable_lock:
                self._durable.discard(folder)
            folder = folder.parent
        return folder

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Files below `folder` in byte order of the key: a folder sorts as its name plus "/"."""
        base = f"{folder}/" if folder else ""
        try:
            with os.scandir(self.root / folder) as listing:
                # Code point order of str is the byte order of UTF-8.
                entries = sorted(
                    (base + e.name + ("/" if e.is_dir(follow_symlinks=False) else ""), e)
                    for e in listing
                    if not e.is_symlink() and is_key(e.name)
                )
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, entry in entries:
            if name.endswith("/"):
                relevant = name.startswith(prefix) or prefix.startswith(name)
                passed = name <= after and not after.startswith(name)
                if relevant and not passed:
                    yield from self._walk(name[:-1], prefix, after)
            elif name.startswith(prefix) and name > after:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # Deleted since the folder was read.
                modified = datetime.fromtimestamp(status.st_mtime, UTC)
                yield ObjectInfo(name, status.st_size, modified)

    def _sweep(self) -> None:
        """Drop what killed writers left in `.tmp`; nobody writes one object for a day."""
        with suppress(OSError), os.scandir(self.root / ".tmp") as leftovers:
            for entry in leftovers:
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _SWEEP_AFTER_S:
                        os.unlink(entry.path)

    @contextmanager
    def _translated(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except (NotADirectoryError, IsADirectoryError) as error:
            raise StorageBackendError(
                f"{operation} {key} in {self.root}: a part of this key is already a file, or the "
                "key is already a folder of other objects; a directory cannot hold both",
                prefix=str(self.root),
                operation=operation,
                key=key,
            ) from error
        except OSError as error:
            raise StorageBackendError(
                f"{operation} {key} in {shortened(self.root)}: {advice(error)}",
                prefix=str(self.root),
                operation=operation,
                key=key,
                retryable=is_retryable(error),
            ) from error
