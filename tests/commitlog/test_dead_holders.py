"""Locks whose holder has ended, whose expiry lies far ahead, or that are no lock objects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from storage_engine import process
from storage_engine.commitlog import layout
from storage_engine.commitlog.lock import WriteLock, break_lock
from storage_engine.errors import (
    PROCESS_FACTS,
    IntegrityError,
    LeaseExpiredError,
    LockBreakError,
    LockContentionError,
)
from storage_engine.objectstore.memory import MemoryBackend
from storage_engine.objectstore.protocol import ObjectNotFound
from tests.commitlog.support import at

TTL_MS = 600_000
linux = pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="needs /proc")


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend("holders")


def lock_of(backend: MemoryBackend, **options: Any) -> WriteLock:
    settings: dict[str, Any] = {"lease_ttl_ms": TTL_MS, "timeout_ms": 1000, "keep_alive": False}
    return WriteLock(backend.client(), owner_id="test", **{**settings, **options})


def held_by(backend: MemoryBackend, holder: dict[str, Any]) -> WriteLock:
    lock = lock_of(backend)
    lock.holder = holder
    lock.acquire()
    return lock


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A process that lives until it is told to end."""
    program = (
        "import json; from storage_engine.process import identity; "
        "print(json.dumps(identity()), flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield child
    child.kill()
    child.communicate()


def identity_of(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    return dict(json.loads(child.stdout.readline()))


@linux
def test_the_holder_tells_host_boot_namespace_pid_and_start(backend: MemoryBackend) -> None:
    lock_of(backend, holder={"run": "r-1"}).acquire()
    holder = json.loads(backend.objects()[layout.LOCK])["holder"]
    assert {"host", "pid", *PROCESS_FACTS, "run"} == set(holder)
    assert holder["pid"] == os.getpid()
    assert not process.is_gone(holder)


@linux
def test_a_holder_that_was_killed_is_followed_at_once(
    backend: MemoryBackend, other: subprocess.Popen[str]
) -> None:
    held_by(backend, identity_of(other))
    before = backend.clock.now()
    with pytest.raises(LockContentionError):
        lock_of(backend).acquire()  # it lives

    other.kill()
    deadline = time.monotonic() + 240
    while not process.is_gone(json.loads(backend.objects()[layout.LOCK])["holder"]):
        assert time.monotonic() < deadline  # ended, though not collected by us
        time.sleep(0.01)
    lease = lock_of(backend).acquire()

    assert lease.safe()
    assert backend.clock.now() - before < timedelta(milliseconds=TTL_MS / 10)


@linux
@pytest.mark.parametrize(
    "change",
    [
        {"host": "elsewhere"},
        {"boot_id": "another"},
        {"pid_namespace": 1},
        {"pid_started": None},
        {"pid_started": "7"},
        {"pid": "x"},
        {"pid": -1},
        {"pid": True},
        {"pid": 2**40},
        {"pid": None},
    ],
)
def test_a_holder_of_which_nothing_is_certain_is_waited_for(
    backend: MemoryBackend, other: subprocess.Popen[str], change: dict[str, Any]
) -> None:
    holder = {**identity_of(other), **change}
    other.kill()
    other.wait()
    held_by(backend, holder)
    with pytest.raises(LockContentionError) as caught:
        lock_of(backend).acquire()
    assert caught.value.expires_at in str(caught.value)
    assert "boot_id" not in str(caught.value)


@linux
def test_a_pid_that_is_another_process_now(backend: MemoryBackend) -> None:
    ours = process.identity()
    held_by(backend, {**ours, "pid_started": ours["pid_started"] - 1})
    assert lock_of(backend).acquire().safe()


def test_without_proc_the_lease_decides(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "_PROC", tmp_path)
    lock_of(backend).acquire()
    holder = json.loads(backend.objects()[layout.LOCK])["holder"]
    assert set(holder) == {"host", "pid"}
    assert not process.is_gone({**holder, "pid": 2**22 + 1})


# -- breaking -----------------------------------------------------------------------------------


def test_a_lock_whose_expiry_lies_far_ahead_is_broken_by_its_token(backend: MemoryBackend) -> None:
    ahead = WriteLock(
        backend.client(skew=10 * 365 * 86_400.0),
        owner_id="ahead",
        lease_ttl_ms=TTL_MS,
        timeout_ms=0,
        keep_alive=False,
    )
    lease = ahead.acquire()
    store = backend.client()
    with pytest.raises(LockContentionError):
        lock_of(backend).acquire()
    for wrong in (None, "", "other"):
        with pytest.raises(LockBreakError, match="another token"):
            break_lock(store, wrong)

    assert break_lock(store, lease.token).state is not None

    assert lock_of(backend).acquire().safe()
    assert not lease.renew()
    with pytest.raises(LeaseExpiredError):
        lease.guard()


def test_a_lock_that_is_renewed_meanwhile_is_not_broken(backend: MemoryBackend) -> None:
    lease = lock_of(backend).acquire()
    store = backend.client()
    at(store, "DELETE_IF", layout.LOCK, lease.renew)
    with pytest.raises(LockBreakError, match="its holder lives"):
        break_lock(store, lease.token)
    lease.guard()
    with pytest.raises(LockBreakError, match="nobody"):
        break_lock(MemoryBackend("free").client(), "any")


GOOD = {
    "owner_id": "x",
    "acquired_at": "2026-01-01T00:00:00+00:00",
    "expires_at": "2026-01-01T00:00:30+00:00",
    "lease_ttl_ms": 30_000,
    "token": "t",
    "holder": {},
}
BAD: list[Any] = [None, True, -1, 10**40, 1.5, float("nan"), "", "x", [], [1], {"a": 1}]
FINE = {"owner_id": str, "acquired_at": str, "token": str, "holder": dict}


@pytest.mark.parametrize("name", GOOD)
def test_fuzzed_lock_objects_are_named_and_can_be_broken(backend: MemoryBackend, name: str) -> None:
    optional = name in ("token", "holder")
    bodies = [] if optional else [{k: v for k, v in GOOD.items() if k != name}]
    bodies += [
        {**GOOD, name: value} for value in BAD if not isinstance(value, FINE.get(name, type(None)))
    ]
    if name == "expires_at":
        bodies.append({**GOOD, name: "9999-12-31T23:59:59.999999-23:59"})
    for body in bodies:
        backend.write(layout.LOCK, json.dumps(body).encode())
        with pytest.raises(IntegrityError, match="onto lock break") as caught:
            lock_of(backend).acquire()
        assert layout.LOCK in str(caught.value)
        assert break_lock(backend.client(), None).state is None
        with pytest.raises(ObjectNotFound):
            backend.client().get(layout.LOCK)


@pytest.mark.parametrize("data", [b"", b"not json", b"[]", b"{}", b"\xff", b"null", b"[" * 2000])
def test_what_is_no_json_object_can_be_broken(backend: MemoryBackend, data: bytes) -> None:
    backend.write(layout.LOCK, data)
    with pytest.raises(IntegrityError, match="onto lock break"):
        lock_of(backend).acquire()
    break_lock(backend.client(), None)
    assert lock_of(backend).acquire().safe()


@linux
def test_a_proc_of_another_pid_namespace_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `unshare --pid --fork`: what it says of our pid is about somebody else."""
    ours = process.identity()
    for name in ("sys", str(os.getpid())):
        (tmp_path / name).symlink_to(f"/proc/{name}")
    (tmp_path / "self").symlink_to(str(os.getpid() + 1))
    (tmp_path / str(os.getpid() + 1)).symlink_to(f"/proc/{os.getpid()}")
    monkeypatch.setattr(process, "_PROC", tmp_path)
    assert not process.identity().keys() & set(PROCESS_FACTS)
    assert not process.is_gone({**ours, "pid_started": 1})
