"""SQLite takes any value in any column: whatever stands in a row, every operation gives the right
answer or an error of ours that names table and row; files of every wrong kind likewise."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from storage_engine import (
    Event,
    Field,
    HandlerContext,
    OntologiaConfig,
    OntologiaError,
    Session,
    initialize_storage,
    on_event,
)
from storage_engine import errors as all_errors
from storage_engine.errors import IntegrityError, LockContentionError, StorageBackendError
from storage_engine.events.protocol import open_event_store
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository import ReadWindow, open_repository
from tests.campaigns import examples
from tests.repository.sqlite.support import (
    CUSTOMER,
    EMPLOYMENT,
    EVERYTHING,
    Everything,
    customer,
    open_at,
    put,
)
from tests.shop import Customer, Employment

DEEP = "[" * 100_000
VALUES: tuple[Any, ...] = (
    None, "", "{", "null", "[]", "{}", "1", '"x"', '{"a": 1}', '[1]', '[{"kind": 1}]', DEEP,
    -1, 0, 2, 2**62, 1.5, float("inf"), b"\x00\xff", "no time", "9" * 30, "NaN", "\x00",
)  # fmt: skip


BUS = OntologiaConfig(event_max_attempts=1)


class Told(Event):
    number: Field[int]


@on_event(Told, id="test.listen")
def listen(ctx: HandlerContext[Told]) -> None:
    if ctx.event.number == 2:
        raise ValueError("not this one")


@pytest.fixture(scope="module", params=["v1", "v2"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage that has something in every table."""
    path = tmp_path_factory.mktemp("sound") / "onto.db"
    initialize_storage(path, request.param)
    with Session(path, config=BUS) as session:
        session.ensure([Customer(id="a", name="Ann"), Customer(id="b", name="Bo")])
        session.ensure(Employment(left_key="a", right_key="b", stint="1", role="x"))
        session.ensure(
            Everything(
                id="e",
                text="t",
                number=1,
                real=1.5,
                flag=True,
                moment=datetime(2026, 1, 1, tzinfo=UTC),
                day=date(2026, 1, 1),
                raw=b"x",
            )
        )
        session.commit(meta={"by": "me"}, idempotency=("app", 1))
        session.ensure(Customer(id="a", name="Anna"))
        session.commit(idempotency=("app", "two"))
        session.repository.create_tag("first", 1)
        session.emit([Told(number=1), Told(number=2)])
        session.drain([listen])
        session.emit(Told(number=3))
        bus = open_event_store(session.repository, BUS)
        bus.register_session("default", "worker", {"host": "here"})
    return path


def _columns(path: Path) -> list[tuple[str, str]]:
    connection = sqlite3.connect(path)
    tables = [
        name
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        if not name.startswith("sqlite_")
    ]
    pairs = [
        (table, row[1])
        for table in tables
        for row in connection.execute(f"PRAGMA table_info({table})")
    ]
    connection.close()
    return pairs


def _operations(path: Path) -> dict[str, Callable[[], object]]:
    repository = open_repository(path, OntologiaConfig(s3_lock_timeout_ms=100))
    session = Session(path)
    people = session.query().entities(Customer)
    bus = open_event_store(repository, BUS)
    return {
        "events": lambda: bus.list_events("default", 10),
        "dead letters": lambda: bus.list_dead_letters("default", 10),
        "sessions": lambda: [bus.list_sessions("default", 1000), bus.list_namespaces(1000)],
        "drain": lambda: session.drain([listen]),
        "info": repository.storage_info,
        "commits": lambda: [r.as_dict() for r in repository.list_commits()],
        "commit": lambda: repository.get_commit(1),
        "commit changes": lambda: repository.list_commit_changes(1),
        "tags": lambda: [t.as_dict() for t in repository.list_tags()],
        "types": repository.known_types,
        "read": lambda: [
            repository.read(spec, window)
            for spec in (CUSTOMER, EMPLOYMENT, EVERYTHING)
            for window in (ReadWindow(), ReadWindow(history=True), ReadWindow(as_of=1))
        ],
        "collect": lambda: [
            people.collect(),
            people.where(Customer.name == "Ann").collect(),
            people.order_by(Customer.name).as_of("first").collect(),
            session.query().entities(Everything).where(Everything.number > 0).collect(),
            session.query().relations(Employment).collect(),
        ],
        "sql": lambda: session.sql("select count(*) from Customer").collect(),
        "at": lambda: session.at("2026-01-01").query().entities(Customer).count(),
        "changes": lambda: session.changes(),
        "diff": lambda: session.diff(1, 2),
        "verify": lambda: verify_storage(repository, deep=True).as_dict(),
        "write": lambda: put(repository, customer("a", name="new")),  # type: ignore[arg-type]
        "again": lambda: session.commit(idempotency=("app", 2)),
        "tag": lambda: repository.create_tag("second", 1),
        "close": lambda: [session.close(), repository.close()],
    }


def _mutated(path: Path, table: str, column: str, value: Any) -> bool:
    connection = sqlite3.connect(path)
    try:
        with connection:
            connection.execute(f'UPDATE "{table}" SET "{column}" = ?', (value,))
    except sqlite3.Error:
        return False  # SQLite itself does not take it
    finally:
        connection.close()
    return True


def test_any_value_in_any_column(sound: Path, tmp_path: Path) -> None:
    """A part of all of them each time, all with ONTOLOGIA_LONG."""
    everything = list(itertools.product(_columns(sound), VALUES))
    random.Random(8).shuffle(everything)
    for (table, column), value in everything[: examples(40)]:
        path = tmp_path / "onto.db"
        shutil.copy(sound, path)
        if not _mutated(path, table, column, value):
            continue
        where = f"{table}.{column} = {str(value)[:40]!r}"
        try:
            operations = _operations(path)
        except OntologiaError:
            continue  # refused when it was opened
        for name, operation in operations.items():
            try:
                operation()
            except OntologiaError:
                pass
            except Exception as error:  # noqa: BLE001 - what is looked for
                pytest.fail(f"{name} of a storage with {where}: {type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("UPDATE commits SET metadata = '[]' WHERE id = 1", "table commits, row 1: metadata"),
        ("UPDATE commits SET types = '[1]' WHERE id = 2", "table commits, row 2: types"),
        ("UPDATE commits SET created_at = 'x' WHERE id = 1", "table commits, row 1: created_at"),
        ("UPDATE tags SET commit_id = 'x'", "table tags, row 'first': commit_id"),
        ("UPDATE schema_versions SET schema_json = '{}' WHERE type_name = 'Customer'",
         "table schema_versions, row ('entity', 'Customer', 1)"),
    ],
)  # fmt: skip
def test_the_error_names_table_and_row(
    sound: Path, tmp_path: Path, change: str, named: str
) -> None:
    path = tmp_path / "onto.db"
    shutil.copy(sound, path)
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(change)
    connection.close()
    messages = []
    for operation in _operations(path).values():
        with suppress(OntologiaError):
            try:
                operation()
            except IntegrityError as error:
                messages.append(str(error))
                raise
    assert any(named in message for message in messages), messages
    with closing(open_repository(path)) as repository:
        report = verify_storage(repository, deep=True)
    assert any(named in finding.message for finding in report.findings), report.findings


def test_a_row_that_cannot_be_read_is_named(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "onto.db"
    shutil.copy(sound, path)
    connection = sqlite3.connect(path)
    with connection:
        if "entity_history" in {t for t, _ in _columns(path)}:
            connection.execute(
                "UPDATE entity_history SET fields_json = '{\"id\": \"b\"}' WHERE entity_key = 'b'"
            )
        else:
            connection.execute("UPDATE entity_Customer_v1 SET age = 'old' WHERE entity_key = 'b'")
    connection.close()
    with closing(open_repository(path)) as repository:
        with pytest.raises(IntegrityError, match=r"of entity Customer, row \('b', 1\)"):
            repository.read(CUSTOMER)
        report = verify_storage(repository, deep=True)
    assert any("('b', 1)" in finding.message for finding in report.findings)


# --- files of the wrong kind --------------------------------------------------------------------


def _attempts(path: Path, engine: str) -> Iterator[Callable[[], object]]:
    yield lambda: open_at(path, engine).read(CUSTOMER)
    yield lambda: put(open_at(path, engine, s3_lock_timeout_ms=100), customer("z"))
    yield lambda: Session(path).query().entities(Customer).collect()


@pytest.mark.parametrize("size", [1, 15, 16, 100, 1000, 4096, 5000, 8192])
def test_a_file_that_was_cut_short(engine: str, path: Path, size: int) -> None:
    put(open_at(path, engine), *(customer(f"{n:04}") for n in range(500)))
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    for beside in path.parent.glob("onto.db-*"):
        beside.unlink()
    with open(path, "r+b") as file:
        file.truncate(size)
    for attempt in _attempts(path, engine):
        with pytest.raises((IntegrityError, StorageBackendError), match=r"onto\.db"):
            attempt()


def test_a_directory_is_no_file(engine: str, path: Path) -> None:
    path.mkdir()
    for attempt in _attempts(path, engine):
        with pytest.raises((StorageBackendError, all_errors.UninitializedStorageError)):
            attempt()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_not_be_written(engine: str, path: Path) -> None:
    put(open_at(path, engine), customer("a"))
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        with pytest.raises(StorageBackendError, match=r"write protected|cannot be opened"):
            put(open_at(path, engine), customer("z"))
    finally:
        path.parent.chmod(0o755)


HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA locking_mode=" + sys.argv[2])
connection.execute("BEGIN EXCLUSIVE")
connection.execute("UPDATE storage_meta SET value = value")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("mode", ["NORMAL", "EXCLUSIVE"])
def test_a_file_that_another_process_has_locked(engine: str, path: Path, mode: str) -> None:
    with closing(open_at(path, engine)) as repository:
        put(repository, customer("a"))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LockContentionError):
            put(open_at(path, engine, s3_lock_timeout_ms=50), customer("z"))
    finally:
        holder.communicate(b"")
    assert put(open_at(path, engine), customer("z")) is not None
