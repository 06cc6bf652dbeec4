"""Rows stream from one snapshot, and whatever ends the iteration frees what was behind it."""

from __future__ import annotations

import gc
import signal
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage_engine.errors import StorageBackendError
from storage_engine.model import TypeSpec
from storage_engine.query import count, left
from storage_engine.query.builder import Query
from storage_engine.query.compiler import Statement
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.protocol import CommitRequest, TypeInput
from storage_engine.repository.sqlite import MEMORY
from storage_engine.repository.sqlite import connection as asking
from storage_engine.repository.sqlite.connection import ask, connect
from storage_engine.repository.sqlite.engine import SqliteRepository
from tests.repository.sqlite.support import CUSTOMER, KNOWS, commit, customer, edge, open_at, put
from tests.shop import Customer, Knows

ROWS = 10


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "BATCH_ROWS", 3)


def filled(repository: SqliteRepository) -> SqliteRepository:
    put(repository, *(customer(f"c{n}") for n in range(ROWS)))
    return repository


@pytest.fixture(params=["file", "memory"])
def either(request: pytest.FixtureRequest, path: Path, engine: str) -> Iterator[SqliteRepository]:
    repository = filled(open_at(path if request.param == "file" else MEMORY, engine))
    yield repository
    repository.close()


def keys(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch.column("entity_key").to_pylist()]


def idle(repository: SqliteRepository) -> int:
    return len(repository._connections._idle)


ALL = [f"c{n}" for n in range(ROWS)]


def test_rows_come_in_batches(either: SqliteRepository) -> None:
    found = either.executor().rows(QuerySpec(CUSTOMER))
    assert [batch.num_rows for batch in found.batches] == [3, 3, 3, 1]


def test_only_one_batch_is_fetched_ahead(
    repository: SqliteRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(repository)
    fetched: list[str] = []
    original = repository.to_arrow

    def noted(spec: TypeSpec, columns: Any) -> pa.Table:
        fetched.extend(columns[1])
        return original(spec, columns)

    monkeypatch.setattr(repository, "to_arrow", noted)
    batches = repository.executor().rows(QuerySpec(CUSTOMER)).batches
    assert fetched == []
    next(batches)
    assert fetched == ALL[:3]


def test_a_commit_during_the_iteration_is_not_seen_by_it(either: SqliteRepository) -> None:
    batches = either.executor().rows(QuerySpec(CUSTOMER)).batches
    first = next(batches)
    put(either, customer("c1", name="later"), customer("c5", name="later"), customer("z"))
    rest = list(batches)
    assert keys([first, *rest]) == ALL
    assert {n for b in [first, *rest] for n in b.column("name").to_pylist()} == {"Ann"}
    assert keys(either.executor().rows(QuerySpec(CUSTOMER)).batches) == [*ALL, "z"]


def test_a_commit_before_the_first_batch_is_not_seen_either(either: SqliteRepository) -> None:
    batches = either.executor().rows(QuerySpec(CUSTOMER)).batches
    put(either, customer("a"))
    assert keys(batches) == ALL


def test_other_queries_run_during_the_iteration(either: SqliteRepository) -> None:
    commit(either, KNOWS, edge("c0", "c1"), edge("c1", "c2"))
    query = Query(either.executor())
    seen = []
    for person in query.entities(Customer).objects():
        known = query.relations(Knows).where(left(Knows).id == person.id).collect()
        paths = query.entities(Customer).where(Customer.id == person.id).via(Knows).collect()
        assert query.entities(Customer).count() == ROWS
        seen.append((person.id, [k.right.id for k in known], len(paths)))
    assert seen == [("c0", ["c1"], 1), ("c1", ["c2"], 1), *((key, [], 0) for key in ALL[2:])]


def test_two_iterations_take_turns(either: SqliteRepository) -> None:
    executor = either.executor()
    one = executor.rows(QuerySpec(CUSTOMER)).batches
    other = executor.rows(QuerySpec(CUSTOMER)).batches
    assert [keys([a]) == keys([b]) for a, b in zip(one, other, strict=True)] == [True] * 4


@pytest.mark.parametrize("begun", [False, True], ids=["not_begun", "begun"])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_ending_early_returns_the_connection(
    repository: SqliteRepository, how: str, begun: bool
) -> None:
    filled(repository)
    before = idle(repository)
    found = repository.executor().rows(QuerySpec(CUSTOMER))
    batches: Any = found.batches
    if begun:
        next(batches)
    assert idle(repository) == before - 1
    if how == "close":
        batches.close()
    del found, batches
    gc.collect()
    assert idle(repository) == before
    (lent,) = repository._connections._idle
    assert not lent.connection.in_transaction
    put(repository, customer("after"))
    assert repository.executor().aggregate(
        QuerySpec(CUSTOMER, aggregates=(("n", count()),))
    ).to_pylist() == [{"n": ROWS + 1}]


def test_reading_to_the_end_returns_the_connection(repository: SqliteRepository) -> None:
    filled(repository)
    before = idle(repository)
    assert keys(repository.executor().rows(QuerySpec(CUSTOMER)).batches) == ALL
    assert idle(repository) == before


def test_an_iteration_may_go_on_in_another_thread(either: SqliteRepository) -> None:
    batches = either.executor().rows(QuerySpec(CUSTOMER)).batches
    first = next(batches)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, batches).result()
    assert keys([first, *rest]) == ALL


def test_threads_share_an_executor(either: SqliteRepository) -> None:
    executor = either.executor()
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(lambda: keys(executor.rows(QuerySpec(CUSTOMER)).batches)) for _ in ALL]
        put(either, customer("z"))
        assert all(w.result() in (ALL, [*ALL, "z"]) for w in work)


def test_closing_the_repository_lets_a_file_iteration_finish(repository: SqliteRepository) -> None:
    filled(repository)
    batches = repository.executor().rows(QuerySpec(CUSTOMER)).batches
    next(batches)
    repository.close()
    assert keys(batches) == ALL[3:]
    assert idle(repository) == 0
    with pytest.raises(StorageBackendError, match="was closed"):
        repository.executor().rows(QuerySpec(CUSTOMER))


def test_a_query_may_feed_a_commit(either: SqliteRepository) -> None:
    """Rows read from a storage, changed, and streamed back into it."""

    def older() -> Iterator[pa.RecordBatch]:
        for batch in either.executor().rows(QuerySpec(CUSTOMER)).batches:
            rows = batch.drop_columns(["commit_id"]).to_pylist()
            changed = [row | {"age": (row["age"] or 0) + 1} for row in rows]
            schema = pa.schema(list(batch.schema)[1:])
            yield pa.RecordBatch.from_pylist(changed, schema=schema)

    result = either.commit(CommitRequest([TypeInput(CUSTOMER, stream=older())]))
    assert result is not None
    assert [(c.inserted, c.updated) for c in result.changes] == [(0, ROWS)]
    assert Query(either.executor()).entities(Customer).sum(Customer.age) == 2 * ROWS


# --- an absent storage ------------------------------------------------------------------------


def test_queries_do_not_create_a_storage(repository: SqliteRepository, path: Path) -> None:
    query = Query(repository.executor())
    people = query.entities(Customer)
    assert people.collect() == []
    assert people.with_history().collect() == []
    assert people.as_of(5).to_arrow().num_rows == 0
    assert people.count() == 0
    assert people.max(Customer.age) is None
    assert people.group_by(Customer.tier).agg(n=count()).num_rows == 0
    assert people.via(Knows).collect() == []
    assert query.relations(Knows).where(left(Knows).tier == "Gold").collect() == []
    assert "nothing to read" in people.explain().text
    found = repository.executor().endpoints(QuerySpec(KNOWS), "left", pa.array(["a"]))
    assert found.num_rows == 0
    assert repository.commit_at(7) == 0
    assert not path.exists()


# --- signals ----------------------------------------------------------------------------------

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


def test_ctrl_c_ends_a_statement() -> None:
    connection = connect(MEMORY, 1000, create=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    press = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    rescued = threading.Event()

    def end() -> None:  # so that a defect fails and does not hang
        rescued.set()
        connection.interrupt()

    rescue = threading.Timer(20, end)
    try:
        press.start()
        rescue.start()
        with pytest.raises(KeyboardInterrupt):
            ask(connection, Statement(ENDLESS, {}))
    finally:
        rescue.cancel()
        signal.signal(signal.SIGINT, before)
    assert not rescued.is_set()
    assert connection.execute("SELECT 1").fetchone() == (1,)
    connection.close()


def test_another_thread_can_end_a_statement() -> None:
    connection = connect(MEMORY, 1000, create=True)
    stop = threading.Timer(0.05, connection.interrupt)
    stop.start()
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        ask(connection, Statement(ENDLESS, {}))
    connection.close()


def test_ctrl_c_during_a_query_leaves_the_repository_usable(
    repository: SqliteRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(repository)
    monkeypatch.setattr(asking, "INSTRUCTIONS", 1)
    original = asking._signals

    def pressed(raised: list[BaseException]) -> Iterator[int]:
        signals = original(raised)
        yield next(signals)
        raised.append(KeyboardInterrupt())
        yield 1

    monkeypatch.setattr(asking, "_signals", pressed)
    spec = QuerySpec(CUSTOMER, when=When(history=True))
    with pytest.raises(KeyboardInterrupt):
        keys(repository.executor().rows(spec).batches)
    monkeypatch.setattr(asking, "_signals", original)
    assert keys(repository.executor().rows(spec).batches) == ALL
    put(repository, customer("after"))
