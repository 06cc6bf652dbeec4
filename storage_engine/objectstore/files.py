"""Durable files: what is written here survives power loss, and failures say what to do."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_ADVICE = {
    errno.EACCES: "permission denied: give this user read and write access to the directory",
    errno.EPERM: "not permitted: give this user read and write access to the directory",
    errno.EROFS: "the file system is read-only: remount it, or choose another directory",
    errno.ENOSPC: "the disk is full: free some space and try again",
    errno.EDQUOT: "the disk quota is used up: free some space and try again",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENAMETOOLONG: "the path is too long for this file system: choose a shorter root",
    errno.EIO: "the disk reports an input/output error: check it",
}
_RETRYABLE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EBUSY})


def advice(error: OSError) -> str:
    """What went wrong and what to do about it, in words."""
    return _ADVICE.get(error.errno or 0) or error.strerror or str(error)


def is_retryable(error: OSError) -> bool:
    """Whether the same may succeed later, with nothing but time or space."""
    return error.errno in _RETRYABLE


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
