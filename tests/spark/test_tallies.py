"""Rows counted by a field's values: Spark and Arrow agree on what a row is counted under."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from storage_engine.spark import tallies
from storage_engine.spark.tallies import add_rows, bucket_array, bucket_column, merged

pytestmark = pytest.mark.spark
VALUES: dict[str, list[Any]] = {
    "datetime": [
        datetime(2013, 1, 31, 23, 59, 59, 999_999, UTC),
        datetime(1969, 12, 31, 23, 59, 59, 1, UTC),
        datetime(2013, 1, 31, 0, 15, tzinfo=UTC),
        None,
    ],
    "date": [date(2013, 1, 31), date(1, 1, 1), None],
    "str": ["2013-01-31", " a", None],
    "int": [7, -1, None],
    "bool": [True, False, None],
}
ARROW = {
    "datetime": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
    "str": pa.string(),
    "int": pa.int64(),
    "bool": pa.bool_(),
}


@pytest.mark.parametrize("storage", list(VALUES))
def test_spark_and_arrow_agree(spark: SparkSession, storage: str) -> None:
    values = pa.array(VALUES[storage], ARROW[storage])
    frame = spark.createDataFrame(pa.table({"value": values}))
    rows = frame.select(bucket_column(F.col("value"), storage).alias("b")).collect()
    assert [row["b"] for row in rows] == bucket_array(values, storage).to_pylist()


def test_tallies_are_added_up_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    first: tallies.Tally = {}
    add_rows(first, pa.array(["a", "b", "a", None]), pa.array([True, False, True, True]))
    assert first == {"a": [2, 0, 0], "b": [0, 1, 0], "": [1, 0, 0]}
    second: tallies.Tally = {}
    add_rows(second, pa.array(["a"]), None)
    assert merged([first, second], {"b": 4, "c": 1}) == {
        "a": [3, 0, 0],
        "b": [0, 1, 4],
        "c": [0, 0, 1],
        "": [1, 0, 0],
    }
    monkeypatch.setattr(tallies, "LIMIT", 2)
    assert merged([first], {}) is None
