"""Bulk input in several parts: the last statement of an identity counts, however rows arrive."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from storage_engine import Entity, Field, OntologiaConfig, Session, initialize_storage
from storage_engine.config import MIB
from storage_engine.model import spec_of
from storage_engine.repository.duck import DoesNotFit, Duck

ROWS = 6_000
CONFIG = OntologiaConfig(target_part_bytes=64 * 1024)


class Item(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]
    note: Field[str]


def key(number: int) -> str:
    return f"{number:06d}"


def ascending() -> list[str]:
    return [key(n) for n in range(ROWS)]


def shuffled() -> list[str]:
    keys = ascending()
    random.Random(7).shuffle(keys)
    return keys


def repeated_at_once() -> list[str]:
    return [key(n // 2) for n in range(ROWS)]


def repeated_far_apart() -> list[str]:
    return [*ascending()[: ROWS // 2], *ascending()[: ROWS // 2]]


def last_repeats_first() -> list[str]:
    return [*ascending(), key(0)]


def long_keys() -> list[str]:
    return ["x" * 100 + key(n) for n in range(ROWS)]


@pytest.mark.parametrize("engine", ["v1", "v2"])
@pytest.mark.parametrize(
    "keys",
    [
        ascending,
        shuffled,
        repeated_at_once,
        repeated_far_apart,
        last_repeats_first,
        long_keys,
    ],
)
def test_last_statement_counts(tmp_path: Path, engine: str, keys: Callable[[], list[str]]) -> None:
    uri = str(tmp_path / "store")
    initialize_storage(uri, engine)
    stated = keys()
    table = pa.table(
        {"id": stated, "n": list(range(len(stated))), "note": ["some text"] * len(stated)}
    )
    expected = dict(zip(stated, range(len(stated)), strict=True))
    with Session(uri, config=CONFIG) as session:
        session.ingest(Item, pa.Table.from_batches(table.to_batches(max_chunksize=500)))
        assert session.commit() == 1
        assert session.last_commit is not None
        assert session.last_commit.changes[0].inserted == len(expected)
        stored = session.repository.read(spec_of(Item))
        assert dict(zip(*stored.select(["id", "n"]).to_pydict().values(), strict=True)) == expected
        assert stored.num_rows == len(expected)

        session.ingest(Item, table)
        assert session.commit() is None
        session.ingest(Item, table.slice(0, 10).set_column(2, "note", pa.array(["new"] * 10)))
        assert session.commit() == 2
        assert session.last_commit.changes[0].inserted == 0


@pytest.mark.parametrize("engine", ["v1", "v2"])
def test_a_load_that_was_applied_is_not_read_again(tmp_path: Path, engine: str) -> None:
    uri = str(tmp_path / "store")
    initialize_storage(uri, engine)
    schema = pa.schema([("id", pa.string()), ("n", pa.int64()), ("note", pa.string())])

    def unreadable() -> Iterator[pa.RecordBatch]:
        yield from [pytest.fail("the source was read")]

    with Session(uri, config=CONFIG) as session:
        session.ingest(Item, pa.table({"id": ["a"], "n": [1], "note": [""]}))
        assert session.commit(idempotency=("load", 1)) == 1
        session.ingest(Item, pa.RecordBatchReader.from_batches(schema, unreadable()))
        assert session.commit(idempotency=("load", 1)) == 1
        assert session.last_commit is not None
        assert session.last_commit.already_applied


# --- larger than memory -------------------------------------------------------------------------


def many(count: int, *, repeat: int = 0) -> pa.Table:
    numbers = list(range(count))
    random.Random(11).shuffle(numbers)
    numbers += numbers[:repeat]
    return pa.table(
        {
            "id": [key(n) for n in numbers],
            "n": numbers,
            "note": [f"{n:0200}" for n in numbers],
        }
    )


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB on a machine with many cores, or in front of a remote store."""
    real = Duck._open

    def opened(self: Duck) -> duckdb.DuckDBPyConnection:
        connection = real(self)
        connection.execute("SET GLOBAL threads = 32")
        return connection

    monkeypatch.setattr(Duck, "_open", opened)


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("repeat", [0, 100])
def test_more_rows_than_fit_into_memory_are_compared(tmp_path: Path, repeat: int) -> None:
    config = OntologiaConfig(s3_duckdb_memory_limit="64MB", target_part_bytes=8 * MIB)
    uri = str(tmp_path / "store")
    initialize_storage(uri)
    rows = 250_000
    table = many(rows, repeat=repeat)
    with Session(uri, config=config) as session:
        session.ingest(Item, table)
        assert session.commit() == 1
        session.ingest(Item, table)
        assert session.commit() is None
        session.ingest(Item, table.set_column(1, "n", pc.add(table.column("n"), 1)))
        assert session.commit() == 2
        assert session.last_commit is not None
        assert session.last_commit.changes[0].updated == rows
        assert session.query().entities(Item).sum(Item.n) == sum(range(1, rows + 1))


def test_what_does_not_fit_is_done_with_fewer_threads_and_these_come_back(tmp_path: Path) -> None:
    duck = Duck(uri="memory://", memory_limit="256MB")
    threads = []

    def now() -> int:
        (count,) = duck.cursor().execute("SELECT current_setting('threads')").fetchall()[0]
        return int(count)

    def work() -> str:
        threads.append(now())
        if len(threads) < 3:
            raise DoesNotFit("too much", operation="query")
        return "done"

    with closing(duck):
        duck.cursor().execute("SET GLOBAL threads = 8")
        assert duck.within_memory(0, work) == "done"
        assert threads == [8, 2, 1]
        assert now() == 8
        threads[:] = [0, 0]
        assert duck.within_memory(10**9, work) == "done"
        assert threads == [0, 0, 2]
        threads.clear()
        with pytest.raises(DoesNotFit):
            duck.within_memory(10**9, work)
        assert now() == 8
