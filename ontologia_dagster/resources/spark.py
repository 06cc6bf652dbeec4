"""Spark for ingestion and large compactions: in this process, or on a cluster through Pipes.

One field decides, the assets are the same. In process, one JVM serves all steps of a run (it
starts when the first step asks for it). Through Pipes, `spark-submit` is started with an argument
list, never a shell, and its driver ends when the run is cancelled.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dagster_pyspark import LazyPySparkResource
from pydantic import Field, PrivateAttr

import storage_engine
from ontologia_dagster.resources.secrets import is_secret
from storage_engine.errors import ConfigurationError
from storage_engine.spark.jobs import program
from storage_engine.spark.jobs.program import SPARK_CONFIG, is_reference, revealed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IN_PROCESS: Literal["in_process"] = "in_process"
PIPES: Literal["pipes"] = "pipes"
_LAUNCHER = Path(program.__file__).with_name("__main__.py")
_ROOT = Path(storage_engine.__file__).parents[1]


class SparkResource(LazyPySparkResource):
    """Spark, started when it is first used."""

    mode: Literal["in_process", "pipes"] = Field(
        default=IN_PROCESS, description="pipes: one spark-submit for each step"
    )
    master: str | None = Field(
        default=None, description="local[2], spark://host:7077, yarn, k8s://...; Spark's own choice"
    )
    app_name: str = "ontologia"
    spark_config: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of Spark; a value env:NAME is read from the environment",
    )
    spark_submit: str | None = Field(
        default=None, description="The program; PySpark's own unless told"
    )
    submit_arguments: list[str] = Field(
        default_factory=list, description="Further arguments of spark-submit, such as --py-files"
    )
    termination_timeout_s: float = Field(
        default=20.0, description="How long a cancelled driver may take before it is killed"
    )

    _session: Any = PrivateAttr(default=None)

    @property
    def spark_session(self) -> Any:
        """With what executors need set as the engine's own sessions have it."""
        if self._session is None:
            from storage_engine.spark import spark_session

            self._session = spark_session(self.app_name, master=self.master, config=self.settings())
        return self._session

    @property
    def spark_context(self) -> Any:
        return self.spark_session.sparkContext

    def settings(self) -> dict[str, str]:
        """All settings, with what references stand for."""
        return {
            name: revealed(f"spark_config.{name}", str(value))
            for name, value in self.spark_config.items()
        }

    def session(self) -> SparkSession:
        started: SparkSession = self.spark_session
        return started

    def command(self, job: str, arguments: Sequence[str]) -> list[str]:
        """spark-submit for one of the programs of `storage_engine.spark.jobs`. Everybody on the
        machine can read it: secrets go by the environment."""
        options = ["--name", self.app_name]
        if self.master:
            options += ["--master", self.master]
        hidden = self._hidden()
        for name, value in sorted(self.spark_config.items()):
            if name not in hidden:
                options += ["--conf", f"{name}={value}"]
        for argument in self.submit_arguments:
            name, equals, _ = argument.partition("=")
            if equals and is_secret(name):
                raise ConfigurationError(
                    f"submit_arguments hold {name}, which a command line would show: give it in "
                    "spark_config, best as env:NAME"
                )
        return [
            self.spark_submit or str(_pyspark_home() / "bin" / "spark-submit"),
            *options,
            *self.submit_arguments,
            str(_LAUNCHER),
            job,
            *arguments,
        ]

    def child_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment that is inherited, so that the driver and its workers run our own
        interpreter, find our packages, and have the settings that `command` leaves out."""
        paths = [str(_ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
        settings, hidden = self.settings(), self._hidden()
        return {
            **inherited,
            "SPARK_HOME": inherited.get("SPARK_HOME") or str(_pyspark_home()),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(paths),
            SPARK_CONFIG: json.dumps({name: settings[name] for name in hidden}),
        }

    def _hidden(self) -> list[str]:
        """Settings that are secrets, by their names or as references."""
        return [
            name
            for name, value in self.spark_config.items()
            if is_secret(name) or is_reference(str(value))
        ]


def _pyspark_home() -> Path:
    """Without importing it: that costs, and starts nothing here."""
    from importlib.util import find_spec

    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
