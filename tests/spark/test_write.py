"""Writing DataFrames: what arrives is what was given, published once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from storage_engine import Session, ValidationError, initialize_storage
from storage_engine.spark import write_entities
from tests.engines import CUSTOMER, Customer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def session(tmp_path: Path) -> Session:
    uri = str(tmp_path / "onto")
    initialize_storage(uri, "v2")
    return Session(uri)


def test_first_load_then_changes(spark: SparkSession, session: Session) -> None:
    rows = [(f"c{n:03d}", f"name {n}", n if n % 2 else None) for n in range(100)]
    df = spark.createDataFrame(rows, "id string, name string, age int").repartition(3)

    first = write_entities(df, Customer, session, idempotency=("crm", 1))
    assert (first.commit_id, first.rows, first.inserted) == (1, 100, 100)
    stored = session.repository.read(CUSTOMER)
    got = sorted(zip(*stored.select(["id", "name", "age"]).to_pydict().values(), strict=True))
    assert got == rows

    again = write_entities(df, Customer, session, idempotency=("crm", 1))
    assert again.already_applied
    same = write_entities(df, Customer, session)
    assert (same.commit_id, same.unchanged, same.type_commit_id) == (None, 100, 1)

    rows[5] = ("c005", "changed", None)
    rows.append(("c100", "new", 7))
    df = spark.createDataFrame(rows, "id string, name string, age int")
    changed = write_entities(df, Customer, session)
    assert (changed.inserted, changed.updated, changed.unchanged) == (1, 1, 99)
    assert changed.commit_id == changed.type_commit_id == 2
    stored = session.repository.read(CUSTOMER)
    got = sorted(zip(*stored.select(["id", "name", "age"]).to_pydict().values(), strict=True))
    assert got == rows

    twice = spark.createDataFrame([("a", "x", 1), ("a", "y", 2)], df.schema)
    with pytest.raises(ValidationError, match="more than once in the input, for example 'a'"):
        write_entities(twice, Customer, session)
    newest = write_entities(twice, Customer, session, order_by="age")
    assert (newest.inserted, newest.duplicates) == (1, 1)
    older = write_entities(twice.filter("age = 1"), Customer, session, order_by="age")
    assert (older.commit_id, older.stale) == (None, 1)
