"""A streaming query into an ontology that is killed with SIGKILL: run as a program by a test.

python tests/spark/streams.py URI SOURCE CHECKPOINT
"""

from __future__ import annotations

import os
import signal
import sys

from pyspark.sql import DataFrame, SparkSession

from storage_engine.spark import batch_writer, spark_session
from tests.spark.read_world import Sample
from tests.spark_support import SETTINGS


def stream(spark: SparkSession, source: str) -> DataFrame:
    """One file of JSON lines per batch."""
    reader = spark.readStream.schema("id string, number bigint")
    return reader.option("maxFilesPerTrigger", "1").json(source)


def main(uri: str, source: str, checkpoint: str) -> None:
    spark = spark_session("killed", master="local[2]", config=SETTINGS)
    write = batch_writer(Sample, uri)

    def run(df: DataFrame, batch_id: int) -> None:
        write(df, batch_id)
        if batch_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    query = stream(spark, source).writeStream.foreachBatch(run)
    query.option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
