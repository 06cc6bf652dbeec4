"""A streaming query into an ontology that is killed with SIGKILL: run as a program by a test.

python tests/spark/streams.py URI SOURCE CHECKPOINT POINT
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from storage_engine.spark import batch_writer
from tests.spark.read_world import Sample
from tests.spark_support import SETTINGS

SCHEMA = "id string, number bigint"


def stream(spark: SparkSession, source: str) -> DataFrame:
    """One file of JSON lines per batch."""
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", "1")
    return reader.json(source)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(uri: str, source: str, checkpoint: str, point: str) -> None:
    from storage_engine.spark import spark_session

    spark = spark_session("killed", master="local[2]", config=SETTINGS)
    write = batch_writer(Sample, uri)

    def run(df: DataFrame, batch_id: int) -> None:
        if batch_id == 1 and point == "before":
            kill()
        write(df, batch_id)
        if batch_id == 1:
            kill()

    query: Any = stream(spark, source).writeStream.foreachBatch(run)
    query.option("checkpointLocation", checkpoint).trigger(
        availableNow=True
    ).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
