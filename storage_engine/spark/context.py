"""A Spark session with the settings that Ontologia relies on."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from storage_engine.errors import ConfigurationError

_SQL_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
_SETTINGS = {
    # A second copy of a task would stage its parts twice, for nothing.
    "spark.speculation": "false",
    "spark.ui.showConsoleProgress": "false",
}


def spark_session(
    app_name: str = "ontologia",
    *,
    master: str | None = None,
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """The running Spark session, or a new one.

    Left out, `master` is what spark-submit or SPARK_REMOTE (Spark Connect) says, else `local[*]`.
    Executors run the driver's own Python unless `PYSPARK_PYTHON` names another one.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    given = dict(config or {})
    builder = SparkSession.builder.appName(app_name)
    remote = master is None and ("spark.remote" in given or bool(os.environ.get("SPARK_REMOTE")))
    settings = {**_SQL_SETTINGS, **given} if remote else {**_SQL_SETTINGS, **_SETTINGS, **given}
    if not remote:
        submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, which has its own
        if master is not None:
            settings["spark.master"] = master
        elif not submitted:
            settings.setdefault("spark.master", "local[*]")
        if not submitted and SparkSession.getActiveSession() is None:
            _check_java()
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _check_java() -> None:
    """Spark's own message for a missing Java is a line of shell; say what to do instead."""
    home = os.environ.get("JAVA_HOME")
    if home:
        if not (Path(home) / "bin" / "java").exists():
            raise ConfigurationError(
                f"JAVA_HOME is {home}, where there is no bin/java: let it name a Java 17 or later"
            )
    elif shutil.which("java") is None:
        raise ConfigurationError(
            "Spark needs Java 17 or later, and there is none: install one (on Debian "
            "`apt install openjdk-17-jre-headless`) and let JAVA_HOME name it"
        )
