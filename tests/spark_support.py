"""One Spark session for all tests of a process: `spark`, on two local threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.sql.shuffle.partitions": "4",
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.log.level": "ERROR",
    "spark.task.maxFailures": "3",
    # On a machine that is busy with other tests a Python worker may take its time to come up.
    "spark.python.authenticate.socketTimeout": "120s",
}


@pytest.fixture(scope="session")
def spark(
    aws_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """Asks for the credentials of the S3 servers first: Python workers inherit them from the JVM.

    A task may fail twice: `local[2, 3]`.
    """
    from storage_engine.spark import spark_session

    folder = tmp_path_factory.mktemp("spark")
    places = {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    session = spark_session("ontologia-tests", master="local[2,3]", config={**SETTINGS, **places})
    yield session
    session.stop()
