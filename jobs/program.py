"""What the programs share: a Spark session as the command line asks, a session on the storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jobs.arguments import RunOptions
from jobs.environment import spark_config, storage_config

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from storage_engine.runtime.session import Session


def start_spark(name: str, run: RunOptions) -> SparkSession:
    """As the command line asks: a Connect server, a master, or what spark-submit says."""
    from storage_engine.spark.context import spark_session

    config = {**spark_config(), **run.conf}
    if run.remote is not None:
        config["spark.remote"] = run.remote
    return spark_session(name, master=run.master, config=config)


@contextmanager
def opened(uri: str, session: Session | None) -> Iterator[Session]:
    if session is not None:
        yield session
        return
    from storage_engine.runtime.session import Session as Opened

    with Opened(uri, config=storage_config()) as own:
        yield own
