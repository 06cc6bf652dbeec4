"""A write with a task so slow that Spark starts a second copy of it, and believes the copy.

spark-submit tests/spark/speculating.py URI FOLDER   (executors know the folder as SLOW_FOLDER)

The first copy outlives its task, and stages its part when the write has been published: a part
that is there before is deleted by the write itself. Files in the folder tell which copies ran.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pyspark import TaskContext

from storage_engine import Entity, Field, Session

FOLDER = "SLOW_FOLDER"
SLOW = 1  # the partition
CONF = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.0",
    # Workers of tasks that were killed are asked to end, by SIGTERM; a daemon would use SIGKILL.
    "spark.python.use.daemon": "false",
}


def held() -> list[str]:
    """A default, made by executors where they check rows: before a part is staged."""
    task = TaskContext.get()
    if task is not None:
        folder, partition, copy = Path(os.environ[FOLDER]), task.partitionId(), task.attemptNumber()
        (folder / f"task-{partition}-{copy}").touch()
        if (partition, copy) == (SLOW, 0):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _await(lambda: (folder / "published").exists(), "the write was not published")
    return []


class Row(Entity):
    id: Field[str] = Field(primary_key=True)
    notes: Field[list[str]] = Field(default_factory=held)


def main(uri: str, folder: str) -> None:
    # The class of this module, not of __main__, which executors do not have.
    from storage_engine.spark import spark_session, write_entities
    from tests.spark.speculating import Row as Shared

    spark = spark_session("speculating", config=CONF)
    df = spark.range(0, 6, 1, 3).selectExpr("concat('r', id) AS id")
    with Session(uri) as session:
        written = write_entities(df, Shared, session, target_part_bytes=1)
    print(written.commit_id, written.inserted, written.files)
    Path(folder, "published").touch()
    parts = Path(uri, "staged")
    _await(
        lambda: len(list(parts.rglob("*.parquet"))) > written.files,
        "the first copy did not stage its part",
    )


def _await(done: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 240
    while not done():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
