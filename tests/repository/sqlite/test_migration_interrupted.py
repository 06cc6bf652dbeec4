"""A migration that is killed, interrupted, or beside others: all of it is there, or nothing."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from storage_engine.errors import MigrationTokenError, SchemaOutdatedError
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository.protocol import CommitRequest, TypeInput
from storage_engine.repository.sqlite import migration as sqlite_migration
from storage_engine.repository.sqlite.engine import SqliteRepository
from storage_engine.schema.migration import MigrationRequest, TypeDrop
from storage_engine.schema.upgraders import Upgrader
from tests.repository.sqlite.migrations import (
    CLIENT,
    LIKES,
    LIKES2,
    PERSON,
    PERSON2,
    all_of_it,
    likes,
    migrate,
    person,
    request_for,
    values,
    write,
)
from tests.repository.sqlite.support import CUSTOMER, customer, open_at, put, rows, traced

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def forked(work: Callable[[], Any]) -> int:
    """The process that does it, and ends with 0 if it could."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - the parent sees the status
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(status)


def ended(child: int) -> int:
    return os.waitpid(child, 0)[1]


# --- killed -------------------------------------------------------------------------------------


def prepare(path: Path, engine: str) -> None:
    with closing(open_at(path, engine)) as repository:
        write(repository, PERSON, person("a"), person("b"))
        write(repository, LIKES, likes("a", "b"))
        put(repository, customer("c"))


def all_at_once(repository: SqliteRepository) -> MigrationRequest:
    """Two types change, and one is dropped and purged."""
    planned = request_for(repository, PERSON2, LIKES2)
    gone = repository.type_histories()[CUSTOMER.ref].last
    drop = TypeDrop(*CUSTOMER.ref, gone.version, gone.schema_sha256, purge=True)
    return MigrationRequest(planned.migrations, [drop])


@needs_fork
def test_killed_at_every_statement(engine: str, tmp_path: Path) -> None:
    start = tmp_path / "start.db"
    prepare(start, engine)
    before = all_of_it(start)

    def run(path: Path, trace: Callable[[str], None]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            armed: list[bool] = []

            def before_writes(statement: str) -> None:
                if armed and not statement.startswith("SELECT"):
                    trace(statement)

            traced(patch, before_writes)
            with closing(open_at(path, engine)) as repository:
                request = all_at_once(repository)
                armed.append(True)
                repository.migrate(request)
                armed.clear()

    statements: list[str] = []
    shutil.copy(start, tmp_path / "all.db")
    run(tmp_path / "all.db", statements.append)
    assert "COMMIT" in statements
    for number in range(len(statements)):
        path = tmp_path / f"{number}.db"
        shutil.copy(start, path)
        remaining = [number]

        def before_each(_: str, remaining: list[int] = remaining) -> None:
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            remaining[0] -= 1

        assert os.WIFSIGNALED(ended(forked(partial(run, path, before_each))))
        with closing(open_at(path, engine)) as repository:
            if repository.head_commit_id() == 3:
                assert all_of_it(path) == before
                migrate(repository, PERSON2, LIKES2)
            else:
                assert repository.type_refs() == [PERSON.ref, LIKES.ref]
            assert repository.head_commit_id() == 4
            assert len(values(repository, PERSON2)) == 2
            assert [row["note"] for row in values(repository, LIKES2)] == [None]
            assert verify_storage(repository).findings == []
        path.unlink()


# --- interrupted --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["upgrader", "progress", "publish"])
def test_interrupted_nothing_is_left(
    repository: SqliteRepository, path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository, PERSON, *(person(f"k{n}") for n in range(5)))
    before = all_of_it(path)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    options: dict[str, Any] = {}
    if where == "upgrader":
        options["upgraders"] = [Upgrader("Person", 1, interrupt)]
    elif where == "progress":
        options["progress"] = interrupt
    else:
        monkeypatch.setattr(sqlite_migration, "metadata_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        repository.migrate(request_for(repository, PERSON2, **options))
    monkeypatch.undo()
    assert all_of_it(path) == before
    assert len(values(repository, PERSON)) == 5
    write(repository, PERSON, person("later"))
    assert migrate(repository, PERSON2).rows == {PERSON.ref: 6}


# --- beside others ------------------------------------------------------------------------------


def test_what_changes_while_rows_are_rewritten_is_brought_along(
    repository: SqliteRepository, path: Path
) -> None:
    write(repository, PERSON, *(person(f"k{n}") for n in range(10)))
    other = open_at(path, repository.engine_version)
    changes = iter(range(100, 200))

    def meanwhile(_name: str, _rows: int) -> None:
        """A commit after each batch, so that the last one comes when the lock is held next."""
        number = next(changes)
        if number < 100 + 1 + sqlite_migration.CATCH_UPS:
            write(other, PERSON, person("k3", "Changed", number), person(f"new{number}"))

    with closing(other):
        outcome = repository.migrate(request_for(repository, PERSON2, progress=meanwhile))
    written = 1 + sqlite_migration.CATCH_UPS
    assert outcome.commit_id == 2 + written
    assert outcome.rows == {PERSON.ref: 10 + written}
    by_key = {row["id"]: row for row in values(repository, PERSON2)}
    assert (by_key["k3"]["full_name"], by_key["k3"]["age"]) == ("Changed", 99.0 + written)
    assert {row["commit_id"] for row in by_key.values()} == {outcome.commit_id}
    assert set(by_key) == {f"k{n}" for n in range(10)} | {f"new{100 + n}" for n in range(written)}
    assert verify_storage(repository, deep=True).findings == []


def test_another_migration_that_is_faster_wins(repository: SqliteRepository, path: Path) -> None:
    write(repository, PERSON, person("a"))
    other = open_at(path, repository.engine_version)

    def meanwhile(_name: str, _rows: int) -> None:
        migrate(other, CLIENT)

    with closing(other), pytest.raises(MigrationTokenError, match="was dropped"):
        repository.migrate(request_for(repository, PERSON2, progress=meanwhile))
    assert repository.head_commit_id() == 2
    assert len(values(repository, CLIENT)) == 1


@needs_fork
def test_migrations_beside_writers_of_old_and_new_code(path: Path, engine: str) -> None:
    """In processes: one migration wins, and each row that was committed is there."""
    with closing(open_at(path, engine)) as repository:
        write(repository, PERSON, person("first"))
        request = request_for(repository, PERSON2)
        spec = next(iter(request.migrations)).spec
    deadline = time.monotonic() + 240
    config = {"s3_lock_timeout_ms": 60_000}

    def say(name: str, what: str) -> None:
        (path.parent / f"{name}.{what}").touch()

    def old_writer() -> None:
        with closing(open_at(path, engine, **config)) as repository:
            for number in range(10_000):
                try:
                    write_exactly(repository, PERSON, person(f"old{number}"))
                except SchemaOutdatedError:
                    return say("old", str(number))
        raise AssertionError("nobody migrated")

    def new_writer(name: str) -> None:
        row = {"full_name": "New", "age": 1.5, "tier": "Gold"}
        with closing(open_at(path, engine, **config)) as repository:
            number = 0
            while number < 3 and time.monotonic() < deadline:
                key = f"{name}{number}"
                try:
                    write_exactly(repository, spec, {"entity_key": key, "id": key, **row})
                    number += 1
                except SchemaOutdatedError:
                    time.sleep(0.005)
            assert number == 3

    def migrator(name: str) -> None:
        with closing(open_at(path, engine, **config)) as repository:
            while repository.head_commit_id() < 4:  # the old writer is at work
                time.sleep(0.005)
            try:
                repository.migrate(request)
                say(name, "won")
            except MigrationTokenError:
                say(name, "lost")

    children = [
        forked(old_writer),
        forked(lambda: new_writer("new")),
        forked(lambda: migrator("m1")),
        forked(lambda: migrator("m2")),
    ]
    assert [ended(child) for child in children] == [0, 0, 0, 0]
    outcomes = sorted(p.suffix for p in path.parent.glob("m?.*"))
    assert outcomes == [".lost", ".won"]
    (last,) = path.parent.glob("old.*")
    with closing(open_at(path, engine)) as repository:
        keys = {row["id"] for row in values(repository, PERSON2)}
        old = {f"old{n}" for n in range(int(last.suffix[1:]))}
        assert keys == {"first", "new0", "new1", "new2"} | old
        assert len([c for c in repository.list_commits(20_000) if c.kind == "migration"]) == 1
        assert verify_storage(repository, deep=True).findings == []


def write_exactly(repository: SqliteRepository, spec: Any, row: Any) -> None:
    """As a program does whose classes are what they are."""

    repository.commit(CommitRequest([TypeInput(spec, table=rows(spec, [row]))]))
