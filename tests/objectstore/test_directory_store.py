"""The directory store's own promises: nothing torn, nothing outside its root, clear errors."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from storage_engine.errors import StorageBackendError
from storage_engine.objectstore import local
from storage_engine.objectstore.local import DirectoryStore
from storage_engine.objectstore.protocol import ObjectNotFound, OutcomeUnknown, PreconditionFailed
from tests.objectstore import workers


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> Iterator[DirectoryStore]:
    opened = DirectoryStore(root)
    yield opened
    opened.close()


def test_no_torn_object_is_ever_visible(root: Path) -> None:
    """Writers are killed at random moments; what can be read is always one whole body."""
    store = DirectoryStore(root)
    bodies = workers.torn_bodies()
    store.put("put", bodies[0])
    store.put("cas", bodies[0])
    chance = random.Random(5)
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.objectstore.workers", str(root)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        until = time.monotonic() + chance.uniform(0.0, 0.2)
        while time.monotonic() < until:
            assert store.get("put").data in bodies
        writer.kill()
        writer.wait()
        writer.stdout.close()
        assert store.get("put").data in bodies
        assert store.get("cas").data in bodies
        with suppress(ObjectNotFound):
            assert store.get("created").data in bodies
        # The dead writer's lock is gone with it, and its leftovers are in nobody's way.
        store.put_if_match("cas", bodies[1], store.get("cas").etag, write_id="w")
        assert {info.key for info in store.list("")} <= {"put", "cas", "created"}
    store.close()


def test_leftovers_of_killed_writers_are_swept_after_a_day(root: Path) -> None:
    DirectoryStore(root).put("k", b"")
    old, young = root / ".tmp" / "old", root / ".tmp" / "young"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 90_000, time.time() - 90_000))
    DirectoryStore(root)
    assert not old.exists()
    assert young.exists()


def test_writes_reach_the_disk_before_they_return(
    store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def watch(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", watch)
    etag = store.put_if_absent("new/deep/k", b"1", write_id="w")
    assert any(path.startswith(str(root / ".tmp") + "/") for path in synced)
    assert {str(root.parent), str(root), str(root / "new"), str(root / "new/deep")} <= set(synced)
    etag = store.put_if_match("new/deep/k", b"2", etag, write_id="w")
    synced.clear()
    store.put_if_match("new/deep/k", b"3", etag, write_id="w")
    assert len(synced) == 2  # The file, then its folder: known folders cost nothing.
    assert synced[-1] == str(root / "new/deep")
    synced.clear()
    store.put("new/other/k", b"1")
    # The file, the folder that has a new folder in it, and that one: not all above them again.
    assert synced[1:] == [str(root / "new"), str(root / "new/other")]


def test_a_write_that_cannot_be_synced_is_of_unknown_outcome(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", b"1")
    etag = store.get("k").etag

    def broken(path: Path) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(local, "sync_directory", broken)
    with pytest.raises(OutcomeUnknown):
        store.put_if_match("k", b"2", etag, write_id="w")


def test_symlinks_lead_nowhere(store: DirectoryStore, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store.put("inside/k", b"")
    (root / "link").symlink_to(outside)
    (root / "inside" / "file").symlink_to(outside / "secret")
    (root / "inside" / "dangling").symlink_to(tmp_path / "created")
    for key in ("link/secret", "link/new", "inside/file", "inside/dangling"):
        attempts: list[Callable[[], object]] = [
            lambda key=key: store.get(key),  # type: ignore[misc]
            lambda key=key: store.put(key, b"x"),  # type: ignore[misc]
            lambda key=key: store.put_if_absent(key, b"x", write_id="w"),  # type: ignore[misc]
            lambda key=key: store.put_if_match(key, b"x", "e", write_id="w"),  # type: ignore[misc]
            lambda key=key: store.delete_if_match(key, "e"),  # type: ignore[misc]
            lambda key=key: store.delete_many([key]),  # type: ignore[misc]
            lambda key=key: store.local_path(key),  # type: ignore[misc]
        ]
        for attempt in attempts:
            with pytest.raises(StorageBackendError, match="symbolic link"):
                attempt()
    assert [info.key for info in store.list("")] == ["inside/k"]
    assert list(store.list("link/")) == []
    assert {p.name for p in outside.iterdir()} == {"secret"}
    assert not (tmp_path / "created").exists()


def test_the_root_itself_may_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = DirectoryStore(tmp_path / "link")
    store.put("k", b"1")
    assert (tmp_path / "real" / "k").read_bytes() == b"1"
    assert store.local_path("k") == tmp_path / "real" / "k"


def test_foreign_files_are_not_listed(store: DirectoryStore, root: Path) -> None:
    store.put("k", b"")
    (root / ".hidden").write_bytes(b"")
    (root / "back\\slash").write_bytes(b"")
    (root / "empty folder").mkdir()
    (root / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"")
    assert [info.key for info in store.list("")] == ["k"]


def test_a_key_cannot_be_both_file_and_folder(store: DirectoryStore, tmp_path: Path) -> None:
    store.put("a/b", b"1")
    source = tmp_path / "source"
    source.write_bytes(b"x")
    attempts: list[Callable[[], object]] = [
        lambda: store.put("a/b/c", b""),
        lambda: store.put_if_absent("a/b/c", b"", write_id="w"),
        lambda: store.put_file("a/b/c", source),
        lambda: store.put("a", b""),
        lambda: store.put_if_absent("a", b"", write_id="w"),
    ]
    for attempt in attempts:
        with pytest.raises(StorageBackendError, match="cannot hold both") as caught:
            attempt()
        assert not caught.value.retryable
    for key in ("a", "a/b/c"):
        with pytest.raises(PreconditionFailed):
            store.put_if_match(key, b"", "e", write_id="w")
        store.delete_many([key])
    assert store.get("a/b").data == b"1"


def test_a_missing_root_is_empty_until_the_first_write(store: DirectoryStore, root: Path) -> None:
    with pytest.raises(ObjectNotFound):
        store.get("k")
    assert list(store.list("")) == []
    store.delete_many(["k"])
    with pytest.raises(PreconditionFailed):
        store.put_if_match("k", b"", "e", write_id="w")
    assert not root.exists()  # Reads, and writes that fail, leave nothing behind.
    store.put("k", b"")
    assert root.is_dir()


def test_a_root_that_vanished_is_not_taken_for_empty(store: DirectoryStore, root: Path) -> None:
    store.put("k", b"")
    root.rename(root.with_name("elsewhere"))
    attempts: list[Callable[[], object]] = [
        lambda: store.get("k"),
        lambda: list(store.list("")),
        lambda: store.put("k", b""),
        lambda: store.put_if_absent("k", b"", write_id="w"),
        lambda: store.put_if_match("k", b"", "e", write_id="w"),
        lambda: store.delete_if_match("k", "e"),
        lambda: store.delete_many(["k"]),
    ]
    for attempt in attempts:
        with pytest.raises(StorageBackendError, match="has disappeared"):
            attempt()
    assert not root.exists()


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageBackendError, match="not a directory"):
        DirectoryStore(tmp_path / "file")
    below = DirectoryStore(tmp_path / "file" / "below")
    with pytest.raises(StorageBackendError):
        below.put("k", b"")


@pytest.mark.parametrize(
    ("number", "words", "retryable"),
    [
        (errno.ENOSPC, "the disk is full", True),
        (errno.EACCES, "permission denied", False),
        (errno.EROFS, "read-only", False),
        (errno.EXDEV, "cross-device", False),
    ],
)
def test_failing_disks_are_named(
    store: DirectoryStore,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    words: str,
    retryable: bool,
) -> None:
    store.put("there", b"")

    def broken(path: Path, data: bytes) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local, "write_new", broken)
    with pytest.raises(StorageBackendError, match=f"(?i){words}") as caught:
        store.put_if_absent("k", b"", write_id="w")
    assert caught.value.retryable is retryable
    assert caught.value.operation == "put_if_absent"
    assert caught.value.key == "k"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permission_denied(store: DirectoryStore, root: Path) -> None:
    store.put("a/k", b"")
    (root / "a").chmod(0)
    try:
        with pytest.raises(StorageBackendError, match="permission denied"):
            store.get("a/k")
        with pytest.raises(StorageBackendError, match="permission denied"):
            store.put("a/k", b"")
    finally:
        (root / "a").chmod(0o755)


def test_deleting_leaves_no_empty_folders(store: DirectoryStore, root: Path) -> None:
    etag = store.put_if_absent("a/b/c/1", b"", write_id="w")
    store.put("a/2", b"")
    store.delete_if_match("a/b/c/1", etag)
    assert not (root / "a" / "b").exists()
    assert (root / "a").exists()
    store.delete_many(["a/2"])
    assert not (root / "a").exists()
    store.put("a/b/c/3", b"")
    assert store.get("a/b/c/3").data == b""


def test_uri_and_local_path(store: DirectoryStore, root: Path) -> None:
    assert store.uri == root.as_uri()
    store.put("a/b c.parquet", b"1")
    path = store.local_path("a/b c.parquet")
    assert path is not None
    assert path.read_bytes() == b"1"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_during_a_write_does_not_keep_its_lock(store: DirectoryStore) -> None:
    """The child has the open file too: to close it here alone would leave the lock to the child."""
    store.put("a", b"1")
    with store._locked("a"):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        path = next((store.root / ".locks").iterdir())
        with path.open("r+") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
