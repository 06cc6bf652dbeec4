"""Streaming queries into ontologies that are held until somebody kills them: run by a test.

python tests/spark/streams.py SOURCE FOLDER

For each way (`each`: foreachBatch, `sink`: the data source) and each point (`staged`: the parts of
the first batch lie in the store, `published`: its commit stands, and Spark has not noted it) there
is a query into FOLDER/{way}-{point}/onto. FOLDER/{way}-{point}/held appears when it is there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from storage_engine.spark import batch_writer, register, spark_session, writer
from storage_engine.spark.datasource import OntologiaDataSource
from storage_engine.spark.staged_parts import StageTask
from tests.spark.read_world import Sample
from tests.spark_support import SETTINGS

PLACES = [f"{way}-{point}" for way in ("each", "sink") for point in ("staged", "published")]
KILLED = 0  # the batch


def stream(spark: SparkSession, source: str) -> DataFrame:
    """One file of JSON lines per batch."""
    reader = spark.readStream.schema("id string, number bigint")
    return reader.option("maxFilesPerTrigger", "1").json(source)


def query(spark: SparkSession, source: str, place: Path, write: Any = None) -> Any:
    """A query into the storage of a place. Rows are large, so that tasks make parts of them."""
    uri = str(place / "onto")
    starting = stream(spark, source).selectExpr("*", "repeat('x', 10000) AS text").writeStream
    if place.name.startswith("each"):
        starting = starting.foreachBatch(write or batch_writer(Sample, uri))
    else:
        starting = starting.format(write or "ontologia").options(storage_uri=uri, type="Sample")
    starting = starting.option("checkpointLocation", str(place / "checkpoint"))
    return starting.trigger(availableNow=True)


def hold(place: str) -> None:
    Path(place, "held").touch()
    time.sleep(300)  # until SIGKILL
    raise RuntimeError("nobody killed this query")


def batch_of_task() -> int:
    context = TaskContext.get()
    return int(str(context.getLocalProperty("streaming.sql.batchId"))) if context else -1


@dataclass(frozen=True)
class HeldTask(StageTask):
    """Has staged its parts, and does not say so."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reports = list(super().__call__(batches))
        uri = self.target.uri.removeprefix("file://")
        if batch_of_task() == KILLED and "staged" in Path(uri).parent.name:
            hold(str(Path(uri).parent))
        yield from reports


class HeldSource(OntologiaDataSource):
    @classmethod
    def name(cls) -> str:
        return "held"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        made: Any = super().streamWriter(schema, overwrite)
        place = Path(self.options["storage_uri"]).parent
        stage, publish = made.write, made.commit

        def write(batches: Any) -> Any:
            staged = stage(batches)
            if place.name == "sink-staged" and batch_of_task() == KILLED:
                hold(str(place))
            return staged

        def commit(messages: Any, batch_id: int) -> None:
            publish(messages, batch_id)
            if place.name == "sink-published" and batch_id == KILLED:
                hold(str(place))

        made.write, made.commit = write, commit
        return made


def main(source: str, folder: str) -> None:
    # Held tasks keep their cores.
    spark = spark_session("killed", master="local[6]", config=SETTINGS)
    register(spark)
    spark.dataSource.register(HeldSource)
    writer.StageTask = HeldTask  # type: ignore[attr-defined,misc]

    def each(place: Path) -> Any:
        write = batch_writer(Sample, str(place / "onto"))

        def run(df: DataFrame, batch_id: int) -> None:
            write(df, batch_id)
            if batch_id == KILLED:
                hold(str(place))

        return run

    for name in PLACES:
        place = Path(folder, name)
        query(spark, source, place, each(place) if name.startswith("each") else "held").start()
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
