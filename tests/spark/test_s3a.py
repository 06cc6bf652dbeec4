"""Spark reads files on S3 by itself when hadoop-aws is there: `make test-s3a`, a lane of its own.

PySpark does not bring hadoop-aws along, and its SDK is large; the lane downloads it once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from storage_engine import initialize_storage
from storage_engine.spark import read_type, spark_session, write_type
from storage_engine.spark.scans import has_s3a
from tests.servers import ACCESS_KEY, SECRET_KEY, S3Server
from tests.spark import read_world as world
from tests.spark.read_world import Place, Sample, expected, rows
from tests.spark_support import SETTINGS

PACKAGES = os.environ.get("ONTOLOGIA_S3A_PACKAGES", "")

pytestmark = [
    pytest.mark.spark,
    pytest.mark.s3,
    pytest.mark.skipif(not PACKAGES, reason="a lane of its own: make test-s3a"),
    pytest.mark.timeout(900),
]


@pytest.fixture
def spark_on_s3(seaweedfs_s3: S3Server, tmp_path: Path) -> Iterator[SparkSession]:
    settings = {
        "spark.jars.packages": PACKAGES,
        "spark.hadoop.fs.s3a.endpoint": seaweedfs_s3.endpoint,
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": ACCESS_KEY,
        "spark.hadoop.fs.s3a.secret.key": SECRET_KEY,
        "spark.local.dir": str(tmp_path),
    }
    session = spark_session("s3a", master="local[2]", config={**SETTINGS, **settings})
    yield session
    session.stop()


def test_native_reads_of_files_on_s3(spark_on_s3: SparkSession, seaweedfs_s3: S3Server) -> None:
    spark = spark_on_s3
    assert has_s3a(spark)
    place = Place(f"s3://{seaweedfs_s3.make_bucket()}/some/prefix", seaweedfs_s3.config())
    initialize_storage(place.uri, config=place.config)
    with place.open() as session:
        world.first_commits(session)
        frame = read_type(spark, Sample, session)
        assert "s3a://" in frame._jdf.queryExecution().executedPlan().toString()
        world.check_every_window(spark, session, Sample, partial(read_type, spark, Sample, session))
        world.compact(session)
        assert rows(read_type(spark, Sample, session)) == expected(session, Sample)
        changed = frame.selectExpr("id", "number + 1 AS number").where("id < 's0005'")
        result = write_type(changed, Sample, session)
        assert result.updated == result.rows == 5
        assert rows(read_type(spark, Sample, session)) == expected(session, Sample)
