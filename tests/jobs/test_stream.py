"""`jobs/stream.py`: what arrives is published once, whatever happens in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine.errors import ConfigurationError
from storage_engine.spark import publish
from storage_engine.spark.ingest_spec import Format
from storage_engine.spark.jobs import stream as program
from storage_engine.spark.jobs.ingest import DriftPolicy, Source
from storage_engine.spark.jobs.stream import stream
from tests.jobs.support import head, new_storage, order_for, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SCHEMA = "id STRING, name STRING, seats BIGINT"
ALL = "select id, name, seats from Customer order by id"


def test_each_batch_takes_effect_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, folder = new_storage(tmp_path), tmp_path / "in"
    folder.mkdir()
    checkpoint = str(tmp_path / "checkpoint")
    order = order_for(
        uri,
        Source(format="csv", paths=(str(folder),), row_schema=SCHEMA, null_value="NA"),
        columns={"name": "upper(name)"},
        where="id <> 'skip'",
        on_bad_rows="quarantine",
        drift=DriftPolicy(retyped="quarantine"),
    )
    (folder / "1.csv").write_text("id,name,seats\na,ann,1\nb,NA,x\nskip,me,1\n")
    stream(spark, order, checkpoint).awaitTermination()
    assert rows(uri, ALL) == [("a", "ANN", 1)]

    (folder / "2.csv").write_text("id,name,seats\na,ann,2\nc,cid,3\n")
    right = publish.publish

    def killed(*arguments: Any, **options: Any) -> Any:
        right(*arguments, **options)
        raise RuntimeError("killed after the commit")

    from storage_engine.spark import writer

    with monkeypatch.context() as patch:
        patch.setattr(writer, "publish", killed)
        with pytest.raises(Exception, match="killed after the commit"):
            stream(spark, order, checkpoint).awaitTermination()
    assert head(uri) == 2
    code = program.main(
        [*order.to_arguments(), f"--checkpoint={checkpoint}", "--trigger=available-now"]
    )
    assert (code, head(uri)) == (0, 2)
    assert rows(uri, ALL) == [("a", "ANN", 2), ("c", "CID", 3)]


@pytest.mark.parametrize("format", ["csv", "json", "parquet"])
def test_what_drifts_is_dealt_with_as_ordered(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], format: Format
) -> None:
    """A column that is gone never becomes nulls unasked, and one more harms nobody if ignored."""
    uri, folder = new_storage(tmp_path), tmp_path / "in"
    folder.mkdir()

    def deliver(file: str, **row: Any) -> None:
        path = folder / f"{file}.{format}"
        match format:
            case "csv":
                path.write_text(f"{','.join(row)}\n{','.join(map(str, row.values()))}\n")
            case "json":
                path.write_text(json.dumps(row) + "\n")
            case _:
                pq.write_table(pa.Table.from_pylist([row]), path)

    order = order_for(uri, Source(format=format, paths=(str(folder),), row_schema=SCHEMA))
    arguments = [f"--checkpoint={tmp_path / 'checkpoint'}", "--max-files=1", "--json"]
    deliver("1", id="a", name="ann", seats=1)
    assert program.main([*order.to_arguments(), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["batches"] == 1
    deliver("2", id="a", name="ann")
    assert program.main([*order.to_arguments(), *arguments]) == 3
    said = json.loads(capsys.readouterr().out)["error"]
    assert (said["type"], said["exit_code"]) == ("ValidationError", 3)
    assert "column seats (bigint) is missing" in said["message"]
    assert rows(uri, ALL) == [("a", "ann", 1)]

    deliver("3", id="b", name="bob", seats=2, more="x")
    lenient = order.replace(drift=DriftPolicy(missing="ignore", added="ignore"))
    assert program.main([*lenient.to_arguments(), *arguments, "--app-id=shop"]) == 0
    assert json.loads(capsys.readouterr().out)["batches"] == 2
    assert rows(uri, ALL) == [("a", "ann", None), ("b", "bob", 2)]


def test_what_cannot_be_followed_is_said(spark: SparkSession, tmp_path: Path) -> None:
    uri = new_storage(tmp_path)
    source = Source(format="csv", paths=("in",), row_schema=SCHEMA)
    order = order_for(uri, source)
    for wrong, said in (
        (source.replace(row_schema=None), "a stream infers nothing"),
        (source.replace(paths=("a", "b")), "follows one folder"),
        (source.replace(paths=("a.zip",)), "zipped files cannot be followed"),
        (
            Source(format="jdbc", paths=("jdbc:x",), options={"dbtable": "t"}),
            "a database cannot be followed",
        ),
    ):
        with pytest.raises(ConfigurationError, match=said):
            stream(spark, order.replace(source=wrong), str(tmp_path / "c"))
    versioned = order.replace(idempotency=("shop", 1)).to_arguments()
    assert program.main([*versioned, "--checkpoint=c"]) == 2
