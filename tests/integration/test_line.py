"""Processes in line at the write lock, killed while they wait and while they hold it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from storage_engine.commitlog import layout
from storage_engine.commitlog.lock import WriteLock
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.protocol import ObjectStore

PREFIX = layout.line_of(layout.LOCK) or ""
PATIENCE_S = 120.0
# Waits for the lock, says that it has it, holds it until it is told to go on.
WAITER = """
import sys
from storage_engine.commitlog.lock import WriteLock
from storage_engine.objectstore.open import open_store
uri, name = sys.argv[1:]
store = open_store(uri)
lock = WriteLock(store, owner_id=name, lease_ttl_ms=600_000, timeout_ms=600_000)
lease = lock.acquire()
print("held", flush=True)
sys.stdin.readline()
lease.guard()
lease.release()
store.close()
print("released", flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    with closing(open_store(f"file://{tmp_path}/store")) as store:
        yield store


@contextmanager
def waiter(uri: str, name: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", WAITER, uri, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def heard(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def go_on(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def wait_for(state: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not state():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_processes_that_are_killed_in_line_keep_nobody(store: ObjectStore) -> None:
    """Leases of ten minutes: whoever had to wait for one would be killed by the test's timeout."""
    ours = WriteLock(store, owner_id="ours", lease_ttl_ms=600_000, timeout_ms=600_000)
    held = ours.acquire()
    with ExitStack() as stack:

        def come(name: str) -> subprocess.Popen[str]:
            child = stack.enter_context(waiter(store.uri, name))
            wait_for(lambda: any(i.key.endswith(f"_{name}.json") for i in store.list(PREFIX)))
            return child

        first = come("first")
        held.release()
        assert heard(first) == "held"
        wait_for(lambda: not list(store.list(PREFIX)))  # it looks after the line now

        killed_waiting, second = come("killed-waiting"), come("second")
        killed_waiting.kill()
        killed_waiting.wait()
        go_on(first)
        assert heard(second) == "held"  # past the one that is dead
        state = ours.read()
        assert state is not None
        assert state.line is not None, "it was handed over"
        assert heard(first) == "released"

        third = come("third")
        second.kill()  # which holds the lock, for ten minutes
        second.wait()
        assert heard(third) == "held"

        paused = come("killed-as-next")
        last = come("last")
        go_on(third)
        assert heard(paused) == "held"  # offered, and accepted
        paused.kill()
        paused.wait()
        assert heard(last) == "held"
        go_on(last)
        assert heard(last) == "released"
    assert ours.read() is None
    assert list(store.list(PREFIX)) == []
