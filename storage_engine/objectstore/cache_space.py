"""The bytes of a cache directory: who may use how many of them, and what has to go.

All processes of a machine share the directory, and one lock orders what they do to it: the lock
on the file `usage`, which holds the bytes in use. Promises:

- The files, unfinished ones included, take at most `max_bytes`: room is made before one is begun.
- A file that was marked as used (its modification time) stays for `grace_s`, whoever wants room.
- What a killed writer leaves is found and removed, by the lock that the kernel took from it.
- A crash leaves the count right or too high, never too low; it is corrected before it matters.

Layout: `usage`, `tmp/` (unfinished files), `ab/` (files whose name begins so). Nothing else in the
directory is touched. It may be deleted at any time. Failures are raised as OSError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

PAUSE_S = 60.0
_LOCK_WAIT_S = 5.0
_RECOUNT_S = 3600.0  # bounds how long the count can be wrong after a power loss
_KEEP = 0.9  # eviction goes on to this share of the bound, so that it is not due at every file

_TEMP = "tmp"
_SHARD = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"[0-9a-f]{64}")
_TEMP_NAME = re.compile(r"[0-9a-f]{32}")
_USAGE = re.compile(rb"([0-9]{20}) ([0-9]{20})\n")
_USAGE_BYTES = 42


class Identity(NamedTuple):
    """Tells whether a file is the one that was seen, and has not been written to since."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class CacheSpace:
    """Files named by 64 hexadecimal digits in a directory of bounded size."""

    def __init__(
        self, directory: Path, max_bytes: int, *, clock: Callable[[], float], grace_s: float
    ) -> None:
        self.directory = Path(os.path.abspath(os.path.expanduser(directory)))
        self.max_bytes = max_bytes
        self.bytes_held = 0  # as last seen
        self.evictions = 0
        self._clock = clock
        self._grace_s = grace_s
        self._paused_until = 0.0
        self._full_until = 0.0
        self._turn = threading.Lock()
        self._handles: set[int] = set()

    def after_fork(self) -> None:
        """Threads of the parent are not here to free its lock or to close its files."""
        for handle in self._handles:
            with suppress(OSError):
                os.close(handle)
        self._handles.clear()
        self._turn = threading.Lock()

    def path(self, name: str) -> Path:
        return self.directory / name[:2] / name

    def pause(self) -> None:
        """Change nothing for a while: the directory does not work."""
        self._paused_until = self._clock() + PAUSE_S

    @property
    def paused(self) -> bool:
        return 0 < self._paused_until - self._clock() <= PAUSE_S

    def is_safe(self, status: os.stat_result) -> bool:
        """Whether the file stays for another half of the grace period, whatever happens."""
        return 0 <= self._clock() - status.st_mtime < self._grace_s / 2

    def mark_used(self, name: str, seen: os.stat_result) -> Identity | None:
        """Put off eviction of the file that was found; None: it is not there any more."""
        path = self.path(name)
        with suppress(FileNotFoundError), self._locked():
            # Under the lock, nobody is just about to evict it.
            if os.path.samestat(seen, os.stat(path)):
                os.utime(path, ns=self._times())
                return Identity.of(os.stat(path))
        return None

    def discard(self, name: str, seen: os.stat_result) -> None:
        """Delete the file that was found, and not one that has taken its place."""
        path = self.path(name)
        with suppress(FileNotFoundError), self._locked() as ledger:
            if Identity.of(os.stat(path)) == Identity.of(seen):
                os.unlink(path)
                ledger.add(-seen.st_size)

    def keep(self, name: str, data: bytes) -> Identity | None:
        """Write a file, which then counts as used; None: there is no room for it.

        It gets its name when it is whole, but is not synced to disk: readers check content.
        """
        target = self.path(name)
        temp = self.directory / _TEMP / uuid.uuid4().hex
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        temp.parent.mkdir(exist_ok=True)
        target.parent.mkdir(exist_ok=True)
        with self._locked() as ledger:
            if not self._make_room(ledger, len(data)):
                return None
            ledger.add(len(data))  # first: dying in between leaves the count too high
            handle = self._reserve(temp, len(data))
        try:
            with open(handle, "wb", closefd=False) as file:
                file.write(data)
            with self._locked() as ledger:
                os.utime(handle, ns=self._times())
                replaced = _size(target)  # another process was faster
                os.replace(temp, target)
                ledger.add(-replaced)
            return Identity.of(os.fstat(handle))
        except BaseException:
            # What cannot be taken back now is swept with the leftovers of the dead.
            with suppress(OSError), self._locked() as ledger:
                os.unlink(temp)
                ledger.add(-len(data))
            raise
        finally:
            self._close(handle)

    def _reserve(self, temp: Path, size: int) -> int:
        """A file that counts with its final size from the start, locked while its writer lives."""
        handle = self._open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, size)
        except BaseException:
            self._close(handle)
            raise
        return handle

    def _make_room(self, ledger: _Ledger, size: int) -> bool:
        now = self._clock()
        if ledger.is_current(now):
            if ledger.total + size <= self.max_bytes:
                return True
            if now < self._full_until <= now + self._grace_s:
                return False  # a moment ago, all was in use
        files, total = self._scan()
        # A time far ahead is of a clock that was set back since: it says nothing.
        idle = sorted(f for f in files if not -self._grace_s < now - f.used < self._grace_s)
        failure: OSError | None = None
        if total + size > self.max_bytes >= total + size - sum(f.size for f in idle):
            goal = min(self.max_bytes - size, int(self.max_bytes * _KEEP))
            for file in idle:
                if total <= goal:
                    break
                error = _unlink(file.path)
                if error is None:
                    total -= file.size
                    self.evictions += 1
                failure = error or failure
        ledger.recount(total, now)
        if total + size <= self.max_bytes:
            return True
        self._full_until = now + self._grace_s / 20
        if failure is not None:
            raise failure
        return False

    def _scan(self) -> tuple[list[_CachedFile], int]:
        """All files, and the bytes of them and of the unfinished ones. Sweeps what the dead left.

        Under the lock, in which unfinished files are created and locked.
        """
        files: list[_CachedFile] = []
        with os.scandir(self.directory) as listing:
            shards = [entry.path for entry in listing if _SHARD.fullmatch(entry.name)]
        for shard in shards:
            for path, status in _regular_files(shard, _NAME):
                files.append(_CachedFile(status.st_mtime, path, status.st_size))
        total = sum(file.size for file in files)
        for path, status in _regular_files(self.directory / _TEMP, _TEMP_NAME):
            if _is_abandoned(path):
                os.unlink(path)
            else:
                total += status.st_size
        return files, total

    @contextmanager
    def _locked(self) -> Iterator[_Ledger]:
        """Keep all other threads and processes from adding, marking and deleting files."""
        with self._turn:
            if self.paused:  # since we wait for our turn: do not all run into the same trouble
                raise TimeoutError(errno.ETIMEDOUT, "paused")
            handle = self._open_ledger()
            try:
                ledger = _Ledger(handle)
                yield ledger
                self.bytes_held = ledger.total
            finally:
                # Not by closing alone: a process forked meanwhile has a copy of the handle.
                fcntl.flock(handle, fcntl.LOCK_UN)
                self._close(handle)

    def _open_ledger(self) -> int:
        path = self.directory / "usage"
        give_up = time.monotonic() + _LOCK_WAIT_S
        while True:
            handle = self._open(path, os.O_RDWR | os.O_CREAT)
            try:
                _lock(handle, give_up)
                if _is_at(path, handle):
                    return handle
            except BaseException:
                self._close(handle)
                raise
            self._close(handle)  # deleted while we waited: others lock a new one

    def _open(self, path: Path, flags: int) -> int:
        handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._handles.add(handle)
        return handle

    def _close(self, handle: int) -> None:
        self._handles.discard(handle)  # first: once closed, its number may be another file's
        os.close(handle)

    def _times(self) -> tuple[int, int]:
        now = int(self._clock() * 1e9)
        return now, now


class _CachedFile(NamedTuple):
    used: float
    path: str
    size: int


class _Ledger:
    """The bytes in use, and when they were last counted, in the file that is locked."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        usage = _USAGE.fullmatch(os.pread(handle, _USAGE_BYTES, 0))
        self.total = int(usage.group(1)) if usage else 0
        self._counted = int(usage.group(2)) if usage else None

    def is_current(self, now: float) -> bool:
        return self._counted is not None and 0 <= now - self._counted < _RECOUNT_S

    def add(self, size: int) -> None:
        self.total = max(0, self.total + size)
        if self._counted is not None:  # otherwise whoever adds a file next counts first
            self._save(self._counted)

    def recount(self, total: int, now: float) -> None:
        self.total = total
        self._counted = int(now)
        self._save(self._counted)

    def _save(self, counted: int) -> None:
        os.pwrite(self._handle, b"%020d %020d\n" % (self.total, counted), 0)


def _regular_files(
    folder: str | Path, name: re.Pattern[str]
) -> Iterator[tuple[str, os.stat_result]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as listing:
        for entry in listing:
            with suppress(FileNotFoundError):
                if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    yield entry.path, entry.stat(follow_symlinks=False)


def _is_abandoned(temp: str) -> bool:
    """The kernel drops the writer's lock when it dies, wherever and as whoever it ran."""
    handle = os.open(temp, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def _lock(handle: int, give_up: float) -> None:
    """Not for ever: a process that was stopped may hold it."""
    while time.monotonic() < give_up:
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(random.uniform(0.0002, 0.004))
    raise TimeoutError(errno.ETIMEDOUT, "another process has kept the lock for too long")


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _size(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _unlink(path: str) -> OSError | None:
    """None: it is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None
