"""Migrations beside readers and writers of old and new code, in threads with sessions of their own.

A reader sees all of the old or all of the new, for each type and for both together; a writer gets
its row in, or is told; nothing that was acknowledged is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage_engine.errors import LockContentionError, MigrationTokenError, SchemaOutdatedError
from storage_engine.model import Field
from storage_engine.repository import Repository, initialize_storage
from tests.conformance.test_rfc0009_migration import (
    V1,
    V2,
    entity,
    latest,
    migrate,
    planned,
    row,
    write,
)
from tests.engines import Storage, new_storage

ROWS = 300
V4 = entity(
    name=Field[str],
    age=Field[float],
    tier=(Field[str], Field(default="basic")),
    note=Field[str | None],
)
PLACES = [
    pytest.param("directory-v1"),
    pytest.param("directory-v2"),
    pytest.param("seaweedfs-v2", marks=pytest.mark.s3),
]


@pytest.fixture(params=PLACES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made = new_storage(str(request.param), request, tmp_path)
    initialize_storage(made.uri, made.engine_version, made.config())
    return made


def opened(storage: Storage, name: str) -> Repository:
    return storage.open(runtime_id=name, s3_lock_timeout_ms=60_000)


def load(repository: Repository) -> None:
    write(repository, V1, *(row(f"k{n:04d}", name="n", age=n) for n in range(ROWS)))


def test_readers_that_loop_during_a_migration_never_see_a_mix(storage: Storage) -> None:
    operator = opened(storage, "operator")
    load(operator)
    stop, began = threading.Event(), threading.Barrier(3)
    seen: dict[str, int] = {"old": 0, "new": 0}

    def read(name: str) -> None:
        repository = opened(storage, name)
        try:
            began.wait(timeout=240)
            last = "old"
            while True:
                ended = stop.is_set()
                try:
                    rows = latest(repository, V1)
                    state = "old"
                    assert [r["age"] for r in rows] == list(range(ROWS))
                except SchemaOutdatedError:
                    rows = latest(repository, V2)
                    state = "new"
                    assert [(r["age"], r["tier"]) for r in rows] == [
                        (float(n), "basic") for n in range(ROWS)
                    ]
                assert len({r["commit_id"] for r in rows}) == 1
                assert (last, state) != ("new", "old"), "it went back"
                last = state
                seen[state] += 1
                if ended:
                    assert state == "new"
                    return
        finally:
            repository.close()

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read, f"reader-{n}") for n in range(2)]
        try:
            began.wait(timeout=240)
            migrate(operator, V2)
        finally:
            stop.set()
        for reader in readers:
            reader.result()
    assert seen["new"] >= 2
    operator.close()


def test_writers_of_old_and_new_code_beside_a_migration(storage: Storage) -> None:
    operator = opened(storage, "operator")
    load(operator)
    stop, began = threading.Event(), threading.Barrier(3)
    stored: dict[str, str] = {}

    def keep_writing(name: str, attempt: Callable[[Repository, str], bool]) -> None:
        repository = opened(storage, name)
        try:
            began.wait(timeout=240)
            number = 0
            while not stop.is_set() or number == 0:
                key = f"{name}-{number:04d}"
                try:
                    if attempt(repository, key):
                        stored[key] = name
                except LockContentionError:
                    pass
                number += 1
        finally:
            repository.close()

    def old(repository: Repository, key: str) -> bool:
        try:
            write(repository, V1, row(key, name="old", age=1), row("k0000", name=key, age=0))
        except SchemaOutdatedError:
            stop.wait(0.01)
            return False
        return True

    def new(repository: Repository, key: str) -> bool:
        try:
            write(repository, V2, row(key, name="new", age=1.5, tier="x"))
        except SchemaOutdatedError:
            stop.wait(0.01)
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(keep_writing, "old", old), pool.submit(keep_writing, "new", new)]
        try:
            began.wait(timeout=240)
            outcome = migrate(operator, V2)
        finally:
            stop.set()
        for writer in writers:
            writer.result()
    rows = {r["id"]: r for r in latest(operator, V2)}
    assert set(rows) == {f"k{n:04d}" for n in range(ROWS)} | set(stored)
    kept = [key for key, who in stored.items() if who == "old"]
    if kept:
        assert rows["k0000"]["name"] == max(kept), "the last statement of old code was lost"
    assert all(rows[key]["commit_id"] == outcome.commit_id for key in kept)
    operator.close()


def test_of_several_migrations_at_once_one_wins(storage: Storage) -> None:
    first = opened(storage, "operator")
    load(first)
    migrate(first, V2)
    plans = [planned(first, V4) for _ in range(3)]
    began = threading.Barrier(3)

    def apply(number: int) -> bool:
        repository = opened(storage, f"rival-{number}")
        try:
            began.wait(timeout=240)
            migrate(repository, plan=plans[number])
        except MigrationTokenError:
            return False
        finally:
            repository.close()
        return True

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(apply, range(3))) == [False, False, True]
    assert first.head_commit_id() == 3
    assert [r["note"] for r in latest(first, V4)] == [None] * ROWS
    first.close()
