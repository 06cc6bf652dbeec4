"""What is set aside can be put right and replayed; large CSV files in parts and in pieces."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine import ConfigurationError, ValidationError
from storage_engine.spark.jobs.ingest import DriftPolicy, Source, ingest
from storage_engine.spark.quarantine import SCHEMA
from tests.jobs.support import new_storage, order_for, rows, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ALL = "select id, name, seats from Customer order by id"
Row = dict[str, Any]


def _repaired(place: str, repair: Callable[[Row], None]) -> None:
    """The side table, each row put right."""
    for path in Path(place.removeprefix("file://")).glob("*.parquet"):
        aside = pq.read_table(path).to_pylist()
        for row in aside:
            repair(row)
        pq.write_table(pa.Table.from_pylist(aside, SCHEMA), path)


def test_rows_of_csv_are_repaired_and_replayed(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice the same replay is one; what is still bad is set aside again, with its first file."""
    (tmp_path / "a.csv").write_text('key,who,n\n1,ann,3\n2,bob,many\n3,cid,4,more\n4,"dee\n')
    uri = new_storage(tmp_path)
    source = Source(
        format="csv",
        paths=(str(tmp_path / "a.csv"),),
        row_schema="key STRING, who STRING, n INT",
    )
    order = order_for(
        uri,
        source,
        columns={"id": "concat('c', key)", "name": "upper(who)", "seats": "n"},
        on_bad_rows="quarantine",
        drift=DriftPolicy(retyped="quarantine"),
        idempotency=("crm", 1),
    )
    first = ingest(spark, order)
    assert (first.inserted, first.quarantined) == (1, 3)
    assert first.quarantine is not None
    aside = pq.read_table(first.quarantine).to_pylist()
    assert sorted((row["row"], row["line"] or "") for row in aside) == [
        ('{"key": "2", "who": "bob", "n": "many"}', ""),
        ('{"key": null, "who": null, "n": null}', "3,cid,4,more"),
        ('{"key": null, "who": null, "n": null}', '4,"dee'),
    ]
    assert {row["file"] for row in aside} == {str(tmp_path / "a.csv")}

    def repair(row: Row) -> None:
        if row["line"] == "3,cid,4,more":
            row["line"] = "3,cid,4"
        elif row["line"] is None:
            row["row"] = json.dumps({**json.loads(row["row"]), "n": 5})

    _repaired(first.quarantine, repair)
    arguments = order.to_arguments()
    code, second = run(capsys, *arguments, f"--replay-quarantine={first.quarantine}")
    assert (code, second["inserted"], second["quarantined"]) == (0, 2, 1)
    assert rows(uri, ALL) == [("c1", "ANN", 3), ("c2", "BOB", 5), ("c3", "CID", 4)]
    [left] = pq.read_table(second["quarantine"]).to_pylist()
    assert (left["line"], left["file"]) == ('4,"dee', str(tmp_path / "a.csv"))
    assert left["reasons"] == ["quote is never closed"]
    again = ingest(spark, order, replay=first.quarantine)
    assert (again.already_applied, again.commit_id) == (True, second["commit_id"])
    # A person may write the rows as JSON lines as well, one file of them.
    by_hand = tmp_path / "mine.jsonl"
    left |= {"row": {"key": 4, "who": "dee"}, "line": None}
    by_hand.write_text(json.dumps({n: left[n] for n in ("row", "columns", "line", "file")}) + "\n")
    ignoring = order.replace(drift=DriftPolicy(missing="ignore", retyped="quarantine"))
    assert ingest(spark, ignoring, replay=str(by_hand)).inserted == 1
    assert rows(uri, ALL)[3] == ("c4", "DEE", None)


def test_a_folder_is_replayed_twice_with_what_the_first_replay_has_put_there(
    spark: SparkSession, tmp_path: Path
) -> None:
    """What is bad again stands in the folder twice, and is the same row. Texts for null are null
    in a replay as well."""
    (tmp_path / "a.csv").write_text("id,name,seats\n1,NA,3\n2,NA,many\n3,cid,few\n4,dee,5,x\n")
    uri, aside = new_storage(tmp_path), str(tmp_path / "aside")
    source = Source(
        format="csv",
        paths=(str(tmp_path / "a.csv"),),
        row_schema="id STRING, name STRING, seats INT",
        null_value="NA",
    )
    order = order_for(
        uri,
        source,
        on_bad_rows="quarantine",
        quarantine=aside,
        drift=DriftPolicy(retyped="quarantine"),
        idempotency=("crm", 1),
    )
    assert ingest(spark, order).quarantined == 3

    def repair(row: Row) -> None:
        row["row"] = row["row"].replace("many", "NA")
        row["line"] = row["line"] and "4,NA,5"

    _repaired(aside, repair)
    first = ingest(spark, order, replay=aside)
    assert (first.inserted, first.quarantined) == (2, 1)
    assert rows(uri, ALL) == [("1", None, 3), ("2", None, None), ("4", None, 5)]
    assert pq.read_table(aside).num_rows == 4
    again = ingest(spark, order, replay=aside)
    assert (again.already_applied, again.commit_id) == (True, first.commit_id)
    plain = ingest(spark, order.replace(idempotency=None), replay=aside, dry_run=True)
    assert (plain.unchanged, plain.quarantined, plain.problem) == (2, 1, None)


def test_a_zip_and_a_file_with_their_columns_in_another_order_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A line that is set aside tells no names: a replay would put its values into others."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.csv", "seats,id\n1,a\n2,b,x\n")
    (tmp_path / "in" / "name=x").mkdir(parents=True)
    source = Source(format="csv", paths=(str(tmp_path / "in"), str(tmp_path / "a.zip")))
    uri = new_storage(tmp_path)
    order = order_for(uri, source, columns={"seats": "int(seats)"}, on_bad_rows="quarantine")
    for file, header, columns in (
        (tmp_path / "in" / "b.csv", "id,seats", "id, seats"),
        (tmp_path / "in" / "name=x" / "b.csv", "seats,id", "seats, id, name"),
    ):
        file.write_text(f"{header}\n3,3\n")
        with pytest.raises(ConfigurationError) as caught:
            ingest(spark, order)
        assert f"{tmp_path}/a.zip and {tmp_path}/in have different columns" in str(caught.value)
        assert f"(seats, id and {columns})" in str(caught.value)
        file.unlink()
    (tmp_path / "in" / "b.csv").write_text("seats,id\n3,c\n")
    result = ingest(spark, order)
    assert (result.inserted, result.quarantined) == (2, 1)
    assert result.quarantine is not None

    def repair(row: Row) -> None:
        row["line"] = "2,b"

    _repaired(result.quarantine, repair)
    assert ingest(spark, order, replay=result.quarantine).inserted == 1
    assert rows(uri, ALL) == [("a", None, 1), ("b", None, 2), ("c", None, 3)]


def test_rows_of_json_and_parquet(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1", "seats": 1.5}\n{"id": "2", "seats": 2\n')
    json_lines = Source(
        format="json", paths=(str(tmp_path / "a.jsonl"),), row_schema="id STRING, seats BIGINT"
    )
    pq.write_table(pa.table({"id": [None, "4"], "seats": [3, 4]}), tmp_path / "b.parquet")
    parquet = Source(format="parquet", paths=(str(tmp_path / "b.parquet"),))
    uri = new_storage(tmp_path)
    policy = DriftPolicy(retyped="quarantine")
    of_json = order_for(uri, json_lines, on_bad_rows="quarantine", drift=policy)
    of_parquet = order_for(uri, parquet, on_bad_rows="quarantine")

    def whole(row: Row) -> None:
        if row["line"] is not None:
            row["line"] += "}"
            return
        row["row"] = row["row"].replace("1.5", "1").replace('"id": null', '"id": "3"')

    for order, bad, columns in ((of_json, 2, "source"), (of_parquet, 1, "source")):
        result = ingest(spark, order)
        assert result.quarantined == bad
        assert result.quarantine is not None
        assert set(pq.read_table(result.quarantine)["columns"].to_pylist()) == {columns}
        _repaired(result.quarantine, whole)
        replayed = ingest(spark, order, replay=result.quarantine)
        assert (replayed.inserted, replayed.quarantined) == (bad, 0)
    assert rows(uri, ALL) == [(str(n), None, n) for n in range(1, 5)]


def test_rows_that_a_transform_has_made_are_replayed_as_rows_of_the_type(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = {"id": ["1", None], "name": ["ann", "bob"], "since": pa.array([0, 1], pa.date32())}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    source = Source(format="parquet", paths=(str(tmp_path / "a.parquet"),))
    uri = new_storage(tmp_path)
    order = order_for(
        uri, source, on_bad_rows="quarantine", transform="tests.jobs.shop:shout", distinct=True
    )
    result = ingest(spark, order)
    assert result.quarantine is not None
    [aside] = pq.read_table(result.quarantine).to_pylist()
    assert (aside["columns"], json.loads(aside["row"])) == (
        "type",
        {"id": None, "name": "BOB", "since": "1970-01-02"},
    )

    def named(row: Row) -> None:
        row["row"] = row["row"].replace("null", '"2"')

    _repaired(result.quarantine, named)
    assert ingest(spark, order, replay=result.quarantine).inserted == 1
    found = rows(uri, "select id, name, cast(since as varchar) from Customer order by id")
    assert found == [("1", "ANN", "1970-01-01"), ("2", "BOB", "1970-01-02")]


def test_what_is_no_side_table_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    uri = new_storage(tmp_path)
    (tmp_path / "a.csv").write_text("id\n1\n")
    order = order_for(uri, Source(format="csv", paths=(str(tmp_path / "a.csv"),)))
    for missing in (tmp_path / "aside", tmp_path / "aside" / "a.jsonl"):
        with pytest.raises(ConfigurationError, match="there is no such folder or file"):
            ingest(spark, order, replay=str(missing))
    (tmp_path / "aside").mkdir()
    with pytest.raises(ConfigurationError, match="no rows of Customer that were set aside"):
        ingest(spark, order, replay=str(tmp_path / "aside"))
    pq.write_table(pa.table({"id": ["1"]}), tmp_path / "aside" / "a.parquet")
    with pytest.raises(ValidationError, match=r"a\.parquet: this is no side table"):
        ingest(spark, order, replay=str(tmp_path / "aside"))
    (tmp_path / "aside" / "a.parquet").write_text("x")
    with pytest.raises(ValidationError, match=r"a\.parquet: cannot be read"):
        ingest(spark, order, replay=str(tmp_path / "aside"))


# --- large files ----------------------------------------------------------------------------------


@pytest.fixture
def small_parts(spark: SparkSession) -> Iterator[None]:
    """Spark reads files in parts of 512 bytes."""
    before = {
        n: spark.conf.get(f"spark.sql.files.{n}") for n in ("maxPartitionBytes", "openCostInBytes")
    }
    for name in before:
        spark.conf.set(f"spark.sql.files.{name}", "512")
    yield
    for name, value in before.items():
        spark.conf.set(f"spark.sql.files.{name}", str(value))


def _large(*, broken: bool) -> tuple[str, list[tuple[Any, ...]]]:
    text, expected = "id,name,seats\n", []
    for number in range(200):
        name = f"n{number}\nx,y" if broken and number % 3 == 0 else f"n{number}"
        text += f'{number:03d},"{name}",{number}\n'
        expected.append((f"{number:03d}", name, number))
    return text, expected


@pytest.mark.parametrize(
    ("broken", "options"),
    [(False, {}), (True, {}), (True, {"multiLine": "true"}), (False, {"multiLine": "false"})],
    ids=["in-parts", "in-pieces", "said-so", "one-line-each"],
)
def test_files_larger_than_a_part(
    broken: bool,
    options: dict[str, str],
    small_parts: None,
    spark: SparkSession,
    tmp_path: Path,
) -> None:
    text, expected = _large(broken=broken)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(text)
    (tmp_path / "in" / "b.csv").write_text("id,name,seats\nx,small,1\n")
    schema = "id STRING, name STRING, seats BIGINT"
    source = Source(format="csv", paths=(str(tmp_path / "in"),), row_schema=schema, options=options)
    uri = new_storage(tmp_path)
    result = ingest(spark, order_for(uri, source))
    assert result.inserted == len(expected) + 1
    assert rows(uri, ALL) == [*expected, ("x", "small", 1)]
