"""A client of a Spark Connect server: run as a program by a test, in a process without Spark's JVM.

python tests/spark/connect_client.py sc://127.0.0.1:15002 URI CHECKPOINT
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from storage_engine import Session
from storage_engine.spark import batch_writer, read_type, register, start_query, write_type
from tests.spark import read_world as world
from tests.spark.read_world import Sample, expected, rows


def main(remote: str, uri: str, checkpoint: str) -> None:
    spark = SparkSession.builder.remote(remote).getOrCreate()
    with Session(uri) as session:
        world.first_commits(session)
        world.check_every_window(spark, session, Sample, partial(read_type, spark, Sample, session))
        ingest(spark, session)
        data_source(spark, session)
        stream(spark, session, Path(checkpoint))


def ingest(spark: SparkSession, session: Session) -> None:
    df = spark.range(0, 50, 1, 3).selectExpr("format_string('s%04d', id) AS id", "id AS number")
    result = write_type(df, Sample, session, idempotency=("connect", 1))
    assert (result.rows, result.inserted + result.updated + result.unchanged) == (50, 50)
    assert write_type(df, Sample, session, idempotency=("connect", 1)).already_applied
    assert rows(read_type(spark, Sample, session)) == expected(session, Sample)
    # Read twice, and not the same each time: known by the text of its plan.
    drawn = spark.range(0, 3, 1, 2).selectExpr("uuid() AS id", "id AS number")
    assert write_type(drawn, Sample, session, order_by="number").inserted == 3
    assert rows(read_type(spark, Sample, session)) == expected(session, Sample)


def data_source(spark: SparkSession, session: Session) -> None:
    register(spark)
    options = {"storage_uri": session.repository.uri, "type": "Sample"}
    found = spark.read.format("ontologia").options(**options).load()
    assert rows(found) == expected(session, Sample)
    changed = found.where("number < 5").selectExpr("id", "number + 100 AS number")
    changed.write.format("ontologia").options(**options).mode("append").save()
    assert rows(read_type(spark, Sample, session)) == expected(session, Sample)


def stream(spark: SparkSession, session: Session, checkpoint: Path) -> None:
    """The change feed into a type of the same storage: batches run on the server."""
    options = {"storage_uri": session.repository.uri, "type": "Sample", "changes": "true"}
    feed = spark.readStream.format("ontologia").options(**options).load()
    wanted = feed.where("operation = 'insert' AND id IN ('s0030', 's0040')").selectExpr(
        "concat('copy of ', id) AS id", "number"
    )
    copied = wanted.writeStream.option("checkpointLocation", str(checkpoint))
    # What Connect cannot do is said before anything runs, or by the query that fails.
    with pytest.raises(Exception, match="Cannot serialize the function") as refused:
        copied.foreachBatch(batch_writer(Sample, session)).start()
    assert "cannot be sent to a Spark Connect server" in told(refused.value)
    nameless = copied.foreachBatch(batch_writer("Sample", session.repository.uri))
    with pytest.raises(Exception, match="name the query by app_id"):
        run(nameless)
    named = batch_writer("Sample", session.repository.uri, app_id="copies")
    run(copied.foreachBatch(named))
    ids = {row["id"] for row in expected(session, Sample)}
    assert {i for i in ids if "copy" in i} == {"copy of s0030", "copy of s0040"}, ids


def told(error: BaseException | None) -> str:
    """What an error and those behind it say."""
    return f"{error} {told(error.__cause__ or error.__context__)}" if error is not None else ""


def run(writer: Any) -> None:
    start_query(writer.trigger(availableNow=True)).awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
