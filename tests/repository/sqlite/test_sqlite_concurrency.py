"""Several writers, a held lock, killed processes, and no query per row."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from storage_engine.errors import LockContentionError
from storage_engine.repository.protocol import CommitRequest, Snapshot, TypeInput
from storage_engine.repository.sqlite.engine import SqliteRepository
from tests.repository.sqlite.support import (
    CUSTOMER,
    PRODUCT,
    commit,
    commit_many,
    customer,
    customers,
    open_at,
    product,
    put,
    rows,
    traced,
)


def test_two_processes_commit_at_once(engine: str, path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        writers = [pool.submit(commit_many, str(path), engine, f"w{n}", 20) for n in range(2)]
        ids = [commit_id for writer in writers for commit_id in writer.result(timeout=120)]
    assert sorted(ids) == list(range(1, 41))
    repository = open_at(path, engine)
    assert [c.id for c in repository.list_commits(100)] == list(range(40, 0, -1))
    assert repository.read(CUSTOMER).num_rows == 40


def test_threads_share_a_repository(engine: str, tmp_path: Path) -> None:
    for where in (tmp_path / "onto.db", ":memory:"):
        repository = open_at(where, engine, s3_lock_timeout_ms=60_000)
        stop = threading.Event()

        def watch(repository: SqliteRepository = repository, stop: threading.Event = stop) -> None:
            before = 0
            while not stop.is_set():
                table = repository.read(CUSTOMER)
                heads = table["commit_id"].to_pylist()
                assert sorted(heads) == list(range(1, len(heads) + 1)), "a partial commit"
                assert len(heads) >= before
                before = len(heads)

        with ThreadPoolExecutor(6) as pool:
            watchers = [pool.submit(watch) for _ in range(2)]
            done = [pool.submit(put, repository, customer(f"{n:03}")) for n in range(40)]
            ids = sorted(result.result().commit_id for result in done)  # type: ignore[union-attr]
            stop.set()
            for watcher in watchers:
                watcher.result()
        assert ids == list(range(1, 41))
        repository.close()


@pytest.mark.timeout(60)  # waiting for ever is the defect
def test_a_held_lock_is_reported_in_time(engine: str, path: Path) -> None:
    put(open_at(path, engine, runtime_id="other"), customer("a"))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    repository = open_at(path, engine, s3_lock_timeout_ms=200)
    with pytest.raises(LockContentionError) as caught:
        put(repository, customer("b"))
    assert caught.value.retryable
    assert caught.value.waited_ms >= 200
    assert caught.value.holder["last"] == "other"
    assert repository.read(CUSTOMER).num_rows == 1, "readers are not blocked"
    other.execute("ROLLBACK")
    assert put(repository, customer("b")) is not None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("lock", ["IMMEDIATE", "EXCLUSIVE"])
def test_a_lock_held_while_the_file_is_new(engine: str, path: Path, lock: str) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute(f"BEGIN {lock}")
    repository = open_at(path, engine, s3_lock_timeout_ms=50)
    with pytest.raises(LockContentionError):
        put(repository, customer("b"))
    other.execute("ROLLBACK")
    assert put(repository, customer("b")) is not None


@pytest.mark.timeout(60)
def test_waiting_for_a_lock_on_a_new_file(engine: str, path: Path) -> None:
    """Switching a new file to the write-ahead log answers busy at once, so it must be repeated."""
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
    release.start()
    result = put(open_at(path, engine, s3_lock_timeout_ms=50_000), customer("a"))
    release.join()
    assert result is not None
    assert result.lock_wait_ms > 0


def test_no_query_per_row(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    traced(monkeypatch, statements.append)
    counts = []
    for size in (10, 10_000):
        repository = open_at(tmp_path / f"{size}.db", engine)
        keys = [f"{n:05}" for n in range(size)]
        statements.clear()
        put(repository, *(customer(key) for key in keys))
        put(repository, *(customer(key, name="Bob") for key in keys))
        put(repository, *(customer(key, name="Bob") for key in keys), snapshot=Snapshot(2))
        table = repository.read(CUSTOMER)
        keyed = repository.read(CUSTOMER, keys=table.select(["entity_key"]))
        assert table.num_rows == keyed.num_rows == size
        loads = ("INSERT INTO temp.intents_", "INSERT OR IGNORE INTO temp.keys_")
        per_row = [s for s in statements if s.startswith(loads) and " VALUES (" in s]
        assert len(per_row) == 4 * size, "intents and keys are bound one by one, nothing else is"
        counts.append(len(statements) - len(per_row))
    assert counts[0] == counts[1] < 120


def kill_points(path: Path, engine: str) -> list[str]:
    """The statements of the commit under test, in order."""
    statements: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        traced(patch, statements.append)
        repository = open_at(path, engine)
        statements.clear()
        second_commit(repository)
        repository.close()
    return statements


def second_commit(repository: SqliteRepository) -> None:
    repository.commit(
        CommitRequest(
            [
                customers(customer("a", name="Al"), customer("b")),
                TypeInput(PRODUCT, table=rows(PRODUCT, [product("p", 1.0)])),
            ]
        )
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("fresh", [True, False], ids=["first-commit", "second-commit"])
def test_killed_at_every_statement(engine: str, fresh: bool, tmp_path: Path) -> None:
    """SIGKILL before each statement of a commit: all of it is there afterwards, or nothing."""

    def prepared(name: str) -> Path:
        path = tmp_path / name
        if not fresh:
            first = open_at(path, engine)
            put(first, customer("a"))
            first.close()
        return path

    base = 0 if fresh else 1
    points = kill_points(prepared("all.db"), engine)
    assert "COMMIT" in points
    outcomes = []
    for number in range(len(points) + 1):
        path = prepared(f"{number}.db")
        if _dies_at(number, path, engine):
            outcomes.append(number)
        repository = open_at(path, engine)
        head = repository.head_commit_id()
        assert head in (base, base + 1)
        assert repository.read(PRODUCT).num_rows == head - base
        assert len(repository.list_commits()) == head
        assert repository.read(CUSTOMER).num_rows == (2 if head > base else base)
        commit(repository, PRODUCT, product("q", 1.0))
        assert repository.head_commit_id() == head + 1
        repository.close()
    assert outcomes == list(range(len(points))), "every point but the last one kills"


def _dies_at(number: int, path: Path, engine: str) -> bool:
    """Run the commit in a child that is killed before its statement `number`."""
    child = os.fork()
    if child == 0:
        try:
            remaining = [number]
            armed = [False]

            def before(_: str) -> None:
                if armed[0]:
                    if remaining[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    remaining[0] -= 1

            with pytest.MonkeyPatch.context() as patch:
                traced(patch, before)
                repository = open_at(path, engine)
                armed[0] = True
                second_commit(repository)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)
