"""Bulk input in several parts: the last statement of an identity counts, however rows arrive."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from storage_engine import Entity, Field, OntologiaConfig, Session, initialize_storage
from storage_engine.model import spec_of

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
