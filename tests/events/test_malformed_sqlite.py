"""Rows of a bus in SQLite that are not what they should be: set aside, listed; others go on."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Session
from storage_engine.config import OntologiaConfig
from storage_engine.events.protocol import open_event_store
from storage_engine.repository import initialize_storage, open_repository
from tests.events.fuzz import LONG
from tests.events.test_malformed import HANDLER, NAMESPACE, Ordered, handler, operations, refusals

CONFIG = OntologiaConfig(
    event_lease_ms=100, event_max_attempts=2, event_backoff_base_ms=1, event_claim_limit=3
)
# As SQL: SQLite keeps any type in any column.
SOME = ("-1", "CAST(x'FFFE' AS TEXT)")
MORE = (
    "5",
    "''",
    "'[]'",
    "1.5",
    "9223372036854775807",
    "x'FFFE'",
    "'no time'",
    "'{\"id\": 5}'",
    "'{'",
    "'null'",
)
VALUES = (*SOME, *MORE) if LONG else SOME
TABLES = {
    "event": ("events", "id = 'pending'"),
    "claim": ("event_claims", "event_id = 'failed'"),
    "dead letter": ("event_dead_letters", "event_id = 'dead'"),
    "session": ("event_sessions", "session_id = 'worker'"),
    "position": ("event_positions", f"handler_id = '{HANDLER}'"),
}


@pytest.fixture(scope="module")
def populated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bus") / "shop.db"
    initialize_storage(f"sqlite:///{path}")
    ran: Counter[str] = Counter()
    with Session(f"sqlite:///{path}", config=CONFIG) as session:
        session.emit([Ordered(id="good", n=1), Ordered(id="dead", n=-1)])
        session.commit(event=Ordered(id="committed", n=2))
        while ran["dead"] < 2:
            session.drain([handler(ran)])
        session.emit(Ordered(id="failed", n=-2))
        session.run([handler(ran)], max_iterations=1)
        session.emit(Ordered(id="pending", n=3))
    repository = open_repository(f"sqlite:///{path}", CONFIG)
    open_event_store(repository, CONFIG).register_session(NAMESPACE, "worker", {"host": "here"})
    repository.close()
    return path


def changed(populated: Path, tmp_path: Path, sql: str) -> Path | None:
    """A copy after `sql`; None where SQLite itself refuses that."""
    path = tmp_path / "copy.db"
    shutil.copy(populated, path)
    connection = sqlite3.connect(path)
    try:
        connection.execute(sql)
        connection.commit()
    except sqlite3.IntegrityError:
        return None
    finally:
        connection.close()
    return path


def columns(populated: Path, table: str) -> list[str]:
    connection = sqlite3.connect(populated)
    names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    connection.close()
    return [name for name in names if name not in {"seq", "namespace"} or table.endswith("ons")]


def check(path: Path, kind: str, what: str) -> None:
    repository = open_repository(f"sqlite:///{path}", CONFIG)
    store = open_event_store(repository, CONFIG)
    for name, operation in operations(store, "").items():
        try:
            operation()
        except Exception as error:
            raise AssertionError(f"{what}: {name} raised {error!r}") from error
    named = refusals(store)
    assert kind == "event" or not named, what
    assert all("pending" in key for key in named), what
    repository.close()
    ran: Counter[str] = Counter()
    with Session(f"sqlite:///{path}", config=CONFIG) as session:
        session.emit(Ordered(id="after", n=9))
        try:
            session.drain([handler(ran)])
        except Exception as error:
            raise AssertionError(f"{what}: drain raised {error!r}") from error
    assert ran["after"] == 1, what
    assert ran["pending"] == 1 or kind == "event", what
    assert ran["good"] == ran["committed"] == 0, (what, "ran again")


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kind", TABLES)
def test_every_column_in_every_way(
    populated: Path, tmp_path: Path, kind: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    table, where = TABLES[kind]
    for column in columns(populated, table):
        sql = f"UPDATE {table} SET {column} = {value} WHERE {where}"
        path = changed(populated, tmp_path, sql)
        if path is not None:
            check(path, kind, sql)


MALFORMED = {
    "event": "envelope = '{'",
    "claim": "attempts = 'many'",
    "dead letter": "event = '[]'",
    "session": "last_heartbeat = 'now'",
    "position": "seq = 10000",
}


@pytest.mark.parametrize("kind", TABLES)
def test_it_is_listed(populated: Path, tmp_path: Path, kind: str) -> None:
    table, where = TABLES[kind]
    path = changed(populated, tmp_path, f"UPDATE {table} SET {MALFORMED[kind]} WHERE {where}")
    repository = open_repository(f"sqlite:///{path}", CONFIG)
    (listed,) = open_event_store(repository, CONFIG).list_malformed(NAMESPACE, 10)
    repository.close()
    assert listed.kind == kind
    assert listed.key.startswith(f"{table} ({NAMESPACE}")
    assert listed.key in listed.error


def test_malformed_events_do_not_take_the_places_of_others(populated: Path, tmp_path: Path) -> None:
    """Ten of them of the highest priority, and a claim takes three at a time."""
    path = tmp_path / "copy.db"
    shutil.copy(populated, path)
    ran: Counter[str] = Counter()
    with Session(f"sqlite:///{path}", config=CONFIG) as session:
        session.emit([Ordered(id=f"broken-{n}", n=1, priority=900) for n in range(10)])
        connection = sqlite3.connect(path)
        connection.execute("UPDATE events SET envelope = '{' WHERE id LIKE 'broken-%'")
        connection.commit()
        connection.close()
        totals = session.drain([handler(ran)])
        assert totals.malformed == 10
        assert ran["pending"] == 1
        session.emit(Ordered(id="later", n=1))
        session.drain([handler(ran)])
        assert ran["later"] == 1
        assert session.drain([handler(ran)]).malformed == 0, "the position is past them"


def test_a_malformed_claim_is_not_run_again(populated: Path, tmp_path: Path) -> None:
    sql = "UPDATE event_claims SET attempts = 'many' WHERE event_id = 'failed'"
    path = changed(populated, tmp_path, sql)
    ran: Counter[str] = Counter()
    with Session(f"sqlite:///{path}", config=CONFIG) as session:
        assert session.drain([handler(ran)]).malformed == 1
    assert ran["failed"] == 0


def test_old_events_that_are_malformed_are_cleaned_up(populated: Path, tmp_path: Path) -> None:
    path = changed(populated, tmp_path, "UPDATE events SET envelope = x'FF' WHERE id = 'pending'")
    repository = open_repository(f"sqlite:///{path}", CONFIG)
    store: Any = open_event_store(repository, CONFIG)
    store.cleanup_events(NAMESPACE, store.now() + timedelta(days=1))
    assert store.list_malformed(NAMESPACE, 10) == []
    repository.close()
