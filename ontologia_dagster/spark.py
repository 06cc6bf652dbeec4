"""Spark for ingestion and large compactions: in this process, or on a cluster through Pipes.

One field decides, the assets are the same. In process, one JVM serves all steps of a run (it
starts when the first step asks for it). Through Pipes, `spark-submit` is started with an argument
list, never a shell, and its driver ends when the run is cancelled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dagster_pyspark import LazyPySparkResource
from pydantic import Field

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IN_PROCESS: Literal["in_process"] = "in_process"
PIPES: Literal["pipes"] = "pipes"
JOBS = Path(__file__).parents[1] / "jobs"


class SparkResource(LazyPySparkResource):
    """Spark, started when it is first used."""

    mode: Literal["in_process", "pipes"] = Field(
        default=IN_PROCESS, description="pipes: one spark-submit for each step"
    )
    master: str | None = Field(
        default=None, description="local[2], spark://host:7077, yarn, k8s://...; Spark's own choice"
    )
    app_name: str = "ontologia"
    spark_config: dict[str, Any] = Field(default_factory=dict)
    spark_submit: str | None = Field(
        default=None, description="The program; PySpark's own unless told"
    )
    submit_arguments: list[str] = Field(
        default_factory=list, description="Further arguments of spark-submit, such as --py-files"
    )
    termination_timeout_s: float = Field(
        default=20.0, description="How long a cancelled driver may take before it is killed"
    )

    def _init_session(self) -> None:
        """With what executors need set as the engine's own sessions have it."""
        if self._spark_session is None:
            from storage_engine.spark import spark_session

            self._spark_session = spark_session(
                self.app_name,
                master=self.master,
                config={name: str(value) for name, value in self.spark_config.items()},
            )

    def session(self) -> SparkSession:
        found: SparkSession = self.spark_session
        return found

    def command(self, program: str, arguments: Sequence[str]) -> list[str]:
        """spark-submit for one of the programs in `jobs/`. No secret belongs in it."""
        options = ["--name", self.app_name]
        if self.master:
            options += ["--master", self.master]
        for name, value in sorted(self.spark_config.items()):
            options += ["--conf", f"{name}={value}"]
        return [
            self.spark_submit or str(_pyspark_home() / "bin" / "spark-submit"),
            *options,
            *self.submit_arguments,
            str(JOBS / program),
            *arguments,
        ]

    def child_environment(self) -> dict[str, str]:
        """So that the driver and its workers run our own interpreter and find our packages."""
        paths = [str(JOBS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "SPARK_HOME": os.environ.get("SPARK_HOME") or str(_pyspark_home()),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(paths),
        }


def _pyspark_home() -> Path:
    """Without importing it: that costs, and starts nothing here."""
    from importlib.util import find_spec

    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
