"""Orders carried out on Spark: sources, mapping, bad rows, replays, and what the program says."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine import Session, ValidationError
from storage_engine.errors import ConfigurationError
from storage_engine.spark.jobs.ingest import DriftPolicy, Source, ingest
from tests.jobs.support import head, new_storage, order_for, rows, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

CSV = 'id,name,seats,since\n1,"Ann ""A"", B",3,2024-01-31\n2,NA,,\n3,Cid,7,2024-02-29\n'
TYPES = "id STRING, name STRING, seats BIGINT, since DATE"
ALL = "select id, name, seats, since::varchar from Customer order by id"
STORED = [
    ("1", 'Ann "A", B', 3, "2024-01-31"),
    ("2", None, None, None),
    ("3", "Cid", 7, "2024-02-29"),
]


def _csv(folder: Path) -> Source:
    (folder / "a.csv").write_text(CSV)
    return Source(format="csv", paths=(str(folder / "a.csv"),), row_schema=TYPES, null_value="NA")


def _gz(folder: Path) -> Source:
    (folder / "a.csv.gz").write_bytes(gzip.compress(CSV.replace(",", ";").encode()))
    text = CSV.replace(",", ";").replace('A""; B', 'A"", B')
    (folder / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    options = {"sep": ";"}
    return Source(
        format="csv",
        paths=(str(folder / "a.csv.gz"),),
        options=options,
        row_schema=TYPES,
        null_value="NA",
    )


def _zip(folder: Path) -> Source:
    header, *lines = CSV.splitlines(keepends=True)
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("one.csv", header + "".join(lines[:2]))
        archive.writestr("deeper/two.csv", header + lines[2])
    return Source(format="csv", paths=(str(folder / "*.zip"),), row_schema=TYPES, null_value="NA")


def _json(folder: Path) -> Source:
    (folder / "a.jsonl").write_text(
        '{"id": "1", "name": "Ann \\"A\\", B", "seats": 3, "since": "2024-01-31"}\n'
        '{"id": "2"}\n{"id": "3", "name": "Cid", "seats": 7, "since": "2024-02-29"}\n'
    )
    return Source(format="json", paths=(str(folder / "a.jsonl"),), row_schema=TYPES)


def _parquet(folder: Path) -> Source:
    table = pa.table(
        {
            "id": ["1", "2", "3"],
            "name": ['Ann "A", B', None, "Cid"],
            "seats": pa.array([3, None, 7], pa.int32()),
            "since": pa.array(["2024-01-31", None, "2024-02-29"]).cast(pa.date32()),
        }
    )
    (folder / "in").mkdir()
    pq.write_table(table.slice(0, 2), folder / "in" / "a.parquet")
    pq.write_table(table.slice(2), folder / "in" / "b.parquet")
    return Source(format="parquet", paths=(str(folder / "in"),))


@pytest.mark.parametrize("make", [_csv, _gz, _zip, _json, _parquet])
def test_each_format_arrives_and_again_changes_nothing(
    make: Any, spark: SparkSession, tmp_path: Path
) -> None:
    uri = new_storage(tmp_path)
    order = order_for(uri, make(tmp_path))
    first = ingest(spark, order)
    assert (first.commit_id, first.rows, first.inserted, first.drift) == (1, 3, 3, ())
    assert rows(uri, ALL) == STORED
    again = ingest(spark, order)
    assert (again.commit_id, again.type_commit_id, again.unchanged) == (None, 1, 3)


def test_a_database_through_jdbc(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DERBY_USER", "app")
    url = f"jdbc:derby:{tmp_path}/derby;create=true"
    frame = spark.createDataFrame(
        [("1", "Ann", 3), ("2", None, None)], "id string, n string, s int"
    )
    driver = {"driver": "org.apache.derby.jdbc.EmbeddedDriver", "user": "env:DERBY_USER"}
    frame.write.jdbc(url, "people", properties={**driver, "user": "app"})
    uri = new_storage(tmp_path)
    source = Source(format="jdbc", paths=(url,), options={**driver, "dbtable": "people"})
    order = order_for(uri, source, columns={"id": "ID", "name": "N", "seats": "S"})
    assert ingest(spark, order).inserted == 2
    query = Source(
        format="jdbc",
        paths=(url,),
        options={**driver, "query": 'select "id", "n" from people where "s" = 3'},
    )
    mapped = {"id": "id", "name": "concat(N, '!')", "seats": "3L"}
    assert ingest(spark, order_for(uri, query, columns=mapped)).updated == 1
    assert rows(uri, "select id, name, seats from Customer order by id") == [
        ("1", "Ann!", 3),
        ("2", None, None),
    ]
    broken = query.replace(options={**query.options, "query": "select nothing"})
    with pytest.raises(ConfigurationError, match="JDBC_EXTERNAL_ENGINE_SYNTAX_ERROR"):
        ingest(spark, order_for(uri, broken, columns=mapped))
    monkeypatch.delenv("DERBY_USER")
    with pytest.raises(ConfigurationError, match="environment variable DERBY_USER"):
        ingest(spark, order)


# --- mapping -------------------------------------------------------------------------------------


@pytest.fixture
def visits(tmp_path: Path) -> Source:
    (tmp_path / "visits.csv").write_text(
        "who,shop,what,day,min\n1,a,x,1,5\n1,a,x,1,5\n1,a,y,1,6\n2,b,x,2,-1\n3,b,x,2,9\n"
    )
    return Source(format="csv", paths=(str(tmp_path / "visits.csv"),))


def test_mapping_keys_condition_and_distinct(
    spark: SparkSession, tmp_path: Path, visits: Source
) -> None:
    uri = new_storage(tmp_path)
    order = order_for(
        uri,
        visits,
        "Visit",
        columns={
            "left_key": "who",
            "right_key": "concat(shop, '-', what)",
            "day": "lpad(day, 2, '0')",
            "minutes": "cast(min as bigint)",
        },
        where="cast(min as int) > 0 and who <> '3'",
    )
    with pytest.raises(ValidationError, match="appear more than once"):
        ingest(spark, order)
    assert head(uri) == 0
    result = ingest(spark, order.replace(distinct=True, meta={"from": "test"}))
    assert (result.rows, result.inserted) == (2, 2)
    assert rows(uri, "select left_key, right_key, instance_key, minutes from Visit order by 2") == [
        ("1", "a-x", "01", 5),
        ("1", "a-y", "01", 6),
    ]
    with Session(uri) as session:
        assert session.list_commits()[0]["metadata"]["from"] == "test"


def test_transform_sees_whole_rows_and_spoiled_ones_go_around_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text("id,name,seats\n1,ann,3\n2,bob,many\n3,cid,4,extra\n")
    source = Source(
        format="csv",
        paths=(str(tmp_path / "a.csv"),),
        row_schema="id STRING, name STRING, seats INT",
    )
    uri = new_storage(tmp_path)
    order = order_for(
        uri,
        source,
        transform="tests.jobs.shop:shout",
        where="seats < 4",
        on_bad_rows="quarantine",
        drift=DriftPolicy(retyped="quarantine"),
    )
    result = ingest(spark, order)
    assert (result.inserted, result.quarantined) == (1, 2)
    assert result.drift == ("source column seats is not int in 1 row",)
    assert rows(uri, "select id, name, seats from Customer") == [("1", "ANN", 3)]
    assert result.quarantine is not None
    aside = spark.read.parquet(result.quarantine).select("row", "reasons").collect()
    reasons = sorted(reason for row in aside for reason in row["reasons"])
    assert reasons == [
        "line is malformed",
        "source column seats is not int",
    ]
    for name, said in (
        ("tests.jobs.shop:none", "has no attribute 'none'"),
        ("tests.jobs.shop:NUMBER", "is not a function"),
        ("tests.jobs.shop:nothing", "returned None, not a DataFrame"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            ingest(spark, order.replace(transform=name))


# --- replays -------------------------------------------------------------------------------------


def test_an_older_extract_does_not_overwrite_newer_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    uri = new_storage(tmp_path)

    def extract(name: str, text: str) -> Any:
        (tmp_path / name).write_text(f"id,name,since\n{text}")
        schema = "id STRING, name STRING, since DATE"
        source = Source(format="csv", paths=(str(tmp_path / name),), row_schema=schema)
        return order_for(uri, source, order_by="since", idempotency=("crm", name))

    monday = extract("monday.csv", "1,old,2024-01-01\n2,same,2024-01-01\n")
    tuesday = extract("tuesday.csv", "1,new,2024-01-02\n3,twice,2024-01-01\n3,last,2024-01-02\n")
    assert ingest(spark, tuesday).duplicates == 1
    late = ingest(spark, monday)
    assert (late.inserted, late.stale) == (1, 1)
    replayed = ingest(spark, monday)
    assert (replayed.already_applied, replayed.commit_id) == (True, late.commit_id)
    assert rows(uri, "select id, name from Customer order by id") == [
        ("1", "new"),
        ("2", "same"),
        ("3", "last"),
    ]


# --- the program ---------------------------------------------------------------------------------


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    source = _csv(tmp_path)
    return order_for(
        new_storage(tmp_path), source, expectations=({"not_null": "id"},)
    ).to_arguments()


def test_the_program_previews_ingests_and_reports(
    spark: SparkSession,
    tmp_path: Path,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    uri = str(tmp_path / "store")
    code, preview = run(capsys, *arguments, "--dry-run", "--where=id > 1")
    assert (code, preview["inserted"], preview["commit_id"]) == (0, 2, None)
    assert head(uri) == 0

    code, result = run(capsys, *arguments)
    assert (code, result["commit_id"], result["inserted"]) == (0, 1, 3)

    name = "--column=name=if(id = '2', 'Bob', name)"
    code, preview = run(capsys, *arguments, name, "--dry-run")
    assert (preview["inserted"], preview["updated"], preview["unchanged"]) == (0, 1, 2)
    assert head(uri) == 1
    assert not (tmp_path / "store" / "meta" / "attempts").exists() or not list(
        (tmp_path / "store" / "meta" / "attempts").iterdir()
    )


@pytest.mark.parametrize(
    ("extra", "code", "said"),
    [
        (["--where=nonsense >"], 2, "where: 'nonsense >' cannot be evaluated"),
        (["--where=missing > 1"], 2, "where: 'missing > 1' cannot be evaluated"),
        (["--column=name=lower(nme)"], 2, "columns.name: 'lower(nme)' cannot be evaluated"),
        (["--column=nme=name"], 2, "columns: Customer has no column nme; it has id, name"),
        (["--schema=id NONSENSE"], 2, "is not a schema such as"),
        (
            ["--source=/nowhere/*.csv"],
            2,
            "[PATH_NOT_FOUND] Path does not exist: file:/nowhere/*.csv",
        ),
        (["--order-by=age"], 2, "order_by 'age' is no field of Customer"),
        (["--schema=id STRING, name STRING"], 3, "column seats (string) is added"),
        (["--column=seats=cast(name as int)"], 3, "CAST_INVALID_INPUT"),
        (["--column=id=null"], 3, "Nothing was published"),
        (['--expect={"unique": "nope"}'], 3, "there is no column nope"),
        (["--storage-uri=/nowhere"], 5, "no ontology at"),
    ],
)
def test_mistakes_have_one_line_and_an_exit_code(
    spark: SparkSession,
    tmp_path: Path,
    arguments: list[str],
    extra: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, result = run(capsys, *arguments, *extra)
    assert said in result["error"]["message"]
    assert (found, result["error"]["exit_code"]) == (code, code)
    assert head(str(tmp_path / "store")) == 0


def test_files_with_different_headers_are_refused(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("id,name\n1,x\n")
    (tmp_path / "b.csv").write_text("name,id\ny,2\n")
    uri = new_storage(tmp_path)
    source = Source(format="csv", paths=(str(tmp_path / "a.csv"), str(tmp_path / "b.csv")))
    code, result = run(capsys, *order_for(uri, source).to_arguments())
    assert code == 3
    assert "b.csv: the header is name, id, not id, name as in" in result["error"]["message"]
    assert head(uri) == 0
    for name in ("a", "b"):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.write(tmp_path / f"{name}.csv", "x.csv")
    zipped = Source(format="csv", paths=(str(tmp_path / "*.zip"),))
    with pytest.raises(ConfigurationError, match="have different columns"):
        ingest(spark, order_for(uri, zipped))


@pytest.mark.parametrize("make", [_csv, _json, _parquet])
def test_columns_that_use_no_column_of_the_source(
    make: Any, spark: SparkSession, tmp_path: Path
) -> None:
    """Every row counts, though nothing of it is kept, and values are drawn once for each."""
    uri = new_storage(tmp_path)
    columns = {"id": "uuid()", "seats": "cast(rand() * 1000 AS bigint)"}
    columns |= {"name": "cast(current_timestamp() AS string)", "since": "current_date()"}
    for number, order_by in enumerate((None, "seats", "name"), start=1):
        (folder := tmp_path / str(number)).mkdir()
        order = order_for(uri, make(folder), columns=columns, order_by=order_by)
        drawn = ingest(spark, order)
        assert (drawn.commit_id, drawn.rows, drawn.inserted) == (number, 3, 3)
    assert rows(uri, "select count(distinct id), count(distinct name) from Customer") == [(9, 3)]
