"""A source that is not as declared: each case, under each policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine import ValidationError
from storage_engine.spark.jobs.ingest import DriftPolicy, Source, ingest
from tests.jobs.support import head, new_storage, order_for, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

DECLARED = "id STRING, name STRING, seats BIGINT"
ALL = "select id, name, seats from Customer order by id"


def _csv(folder: Path, text: str) -> Source:
    (folder / "a.csv").write_text(text)
    return Source(format="csv", paths=(str(folder / "a.csv"),), row_schema=DECLARED)


def _parquet(folder: Path, **columns: Any) -> Source:
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return Source(format="parquet", paths=(str(folder / "a.parquet"),), row_schema=DECLARED)


def _source(kind: str, case: str, folder: Path) -> Source:
    if kind == "csv":
        text = {
            "added": "id,name,seats,extra\n1,a,1,\n2,b,2,x\n",
            "missing": "id,name\n1,a\n2,b\n",
            "retyped": "id,name,seats\n1,a,1\n2,b,many\n",
        }
        return _csv(folder, text[case])
    columns: dict[str, Any] = {"id": ["1", "2"], "name": ["a", "b"], "seats": [1, 2]}
    match case:
        case "added":
            columns["extra"] = [None, "x"]
        case "missing":
            del columns["seats"]
        case _:
            columns["seats"] = ["1", "many"]
    return _parquet(folder, **columns)


SAID = {
    ("csv", "added"): "column extra (string) is added",
    ("csv", "missing"): "column seats (bigint) is missing",
    ("csv", "retyped"): "source column seats is not bigint in 1 row",
    ("parquet", "added"): "column extra (string) is added",
    ("parquet", "missing"): "column seats (bigint) is missing",
    ("parquet", "retyped"): "column seats is string, not bigint",
}
# What is stored, by case: when ignored, and when rows concerned are set aside.
KEPT = {
    "added": ([("1", "a", 1), ("2", "b", 2)], [("1", "a", 1)]),
    "missing": ([("1", "a", None), ("2", "b", None)], []),
    "retyped": ([("1", "a", 1), ("2", "b", None)], [("1", "a", 1)]),
}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("case", ["added", "missing", "retyped"])
def test_drift_by_policy(kind: str, case: str, spark: SparkSession, tmp_path: Path) -> None:
    source = _source(kind, case, tmp_path)
    ignored, kept = KEPT[case]

    uri = new_storage(tmp_path / "fail")
    with pytest.raises(ValidationError) as caught:
        ingest(spark, order_for(uri, source))
    assert SAID[kind, case].removesuffix(" in 1 row") in str(caught.value)
    assert head(uri) == 0

    uri = new_storage(tmp_path / "ignore")
    result = ingest(spark, order_for(uri, source, drift=DriftPolicy.parse({case: "ignore"})))
    assert SAID[kind, case] in result.drift
    assert rows(uri, ALL) == ignored

    uri = new_storage(tmp_path / "quarantine")
    policy = DriftPolicy.parse({case: "quarantine"})
    order = order_for(uri, source, drift=policy, on_bad_rows="quarantine")
    result = ingest(spark, order)
    assert SAID[kind, case] in result.drift
    assert result.quarantined == 2 - len(kept)
    assert head(uri) == min(1, len(kept))
    if kept:
        assert rows(uri, ALL) == kept


def test_values_that_must_be_right_stop_what_sets_other_rows_aside(
    spark: SparkSession, tmp_path: Path
) -> None:
    uri = new_storage(tmp_path)
    source = _csv(tmp_path, "id,name,seats\n1,a,1\n2,b,many\n,c,3\n")
    with pytest.raises(ValidationError, match="seats is not bigint in 1 row"):
        ingest(spark, order_for(uri, source, on_bad_rows="quarantine"))
    assert head(uri) == 0


def test_nothing_drifts_by_widening(spark: SparkSession, tmp_path: Path) -> None:
    uri = new_storage(tmp_path)
    source = _parquet(tmp_path, id=["1"], name=["a"], seats=pa.array([1], pa.int16()))
    assert ingest(spark, order_for(uri, source)).drift == ()
    assert rows(uri, ALL) == [("1", "a", 1)]


def test_nested_values_and_broken_lines_of_json(spark: SparkSession, tmp_path: Path) -> None:
    uri = new_storage(tmp_path)
    (tmp_path / "a.jsonl").write_text(
        '{"id": "1", "tags": ["a", "b"], "numbers": [3, 4]}\n'
        '{"id": "2", "tags": ["c"], "numbers": ["x"]}\n'
        "{broken\n"
        '{"id": 4, "more": {"x": 1}}\n'
    )
    source = Source(
        format="json",
        paths=(str(tmp_path / "a.jsonl"),),
        row_schema="id STRING, tags ARRAY<STRING>, numbers ARRAY<BIGINT>",
    )
    order = order_for(
        uri,
        source,
        columns={"name": "concat_ws('-', tags)", "seats": "get(numbers, 1)"},
        drift=DriftPolicy(added="ignore"),
        on_bad_rows="quarantine",
    )
    result = ingest(spark, order)
    assert rows(uri, ALL) == [("1", "a-b", 4), ("4", "", None)]
    assert result.reasons == {"line is malformed": 2}
    assert result.drift == ("column more (struct<x:string>) is added",)
