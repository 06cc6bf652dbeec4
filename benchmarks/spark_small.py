"""Writes of one row through Spark on a directory store: what a small write costs at the least.

By the settings of a new `spark_session()` and, beside them in the same JVM, by Spark's own defaults
for shuffles, in turns: the difference is tasks that have nothing to do.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

from benchmarks.harness import Measured, Report, peak_mib, sized
from storage_engine import Entity, Field, Session, initialize_storage

RUNS = sized(7, 1, "BENCH_SPARK_SMALL_RUNS")
_SHUFFLES = (
    "spark.sql.shuffle.partitions",
    "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning",
)
_SPARKS_OWN = dict(zip(_SHUFFLES, ("200", "false"), strict=True))


class Gauge(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


def run() -> Report:
    from storage_engine.spark import spark_session

    report = Report("spark_small")
    config = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.log.level": "ERROR",
    }
    spark = spark_session("benchmarks", master="local[*]", config=config)
    fitting = {name: str(spark.conf.get(name)) for name in _SHUFFLES}
    seconds: dict[str, list[float]] = {}
    try:
        for number in range(RUNS + 1):
            for name, settings in (("as it comes", fitting), ("by default", _SPARKS_OWN)):
                for key, value in settings.items():
                    spark.conf.set(key, value)
                for step, taken in _writes(spark).items():
                    if number:  # the first time is for code generation and Python workers
                        seconds.setdefault(f"{step}, {name}", []).append(taken)
    finally:
        spark.stop()
    for name, runs in seconds.items():
        rounded = [round(each, 3) for each in runs]
        report.steps.append(Measured(name, statistics.median(runs), rounded, peak_mib()))
    ours, theirs = (
        report.seconds(f"changed with order_by, {name}") for name in ("as it comes", "by default")
    )
    report.verdicts["a changed row with order_by in about 1 s"] = f"{ours:.2f}, not {theirs:.2f} s"
    return report


def _writes(spark: Any) -> dict[str, float]:
    from storage_engine.spark import write_entities

    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        initialize_storage(folder, "v2")
        with Session(folder, entity_types=[Gauge]) as session:
            for number, (name, order_by) in enumerate(
                (("new with order_by", "n"), ("changed with order_by", "n"), ("changed", None))
            ):
                began = time.perf_counter()
                df = spark.createDataFrame([("a", number)], "id string, n int")
                result = write_entities(df, Gauge, session, order_by=order_by)
                seconds[name] = time.perf_counter() - began
                assert result.commit_id == number + 1
    return seconds
