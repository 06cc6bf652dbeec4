"""Small writes through Spark on a directory store: what one costs at the least, and what a small
increment into a large type costs beside the type's first load.

One row by the settings of a new `spark_session()` and, beside them in the same JVM, by Spark's own
defaults for shuffles, in turns: the difference is tasks that have nothing to do.

The increment is `BENCH_SPARK_CHANGED` rows of `BENCH_SPARK_ROWS`, by keys that are spread evenly
over the type and by keys that follow one another, with files as the load made them (keys in no
order) and compacted. Times of a busy machine are told by processor time, too.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from benchmarks.harness import Measured, Report, peak_mib, sized
from benchmarks.spark import (
    FILES,
    ROWS,
    Cost,
    Reading,
    compare,
    make_data,
    note,
    onto_write,
    session_of_spark,
)
from storage_engine import CompactionPolicy, Entity, Field, Session, initialize_storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUNS = sized(7, 1, "BENCH_SPARK_SMALL_RUNS")
CHANGED = int(os.environ.get("BENCH_SPARK_CHANGED", "1000"))
INCREMENTS = sized(3, 1, "BENCH_SPARK_INCREMENTS")
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
    increments(report)
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


def increments(report: Report) -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        folder = Path(name)
        make_data(folder, changed=False)
        spark = session_of_spark()
        costs: dict[str, list[Cost]] = {}
        read: dict[str, str] = {}
        try:
            _warm_up(spark, folder)
            _increments(spark, folder, costs, read)
        finally:
            spark.stop()
    for name, runs in costs.items():
        seconds = [cost.seconds for cost in runs]
        facts: dict[str, Any] = {"cpu": round(statistics.median(cost.cpu for cost in runs), 2)}
        if name in read:
            facts["read"] = read[name]
        rounded = [round(s, 3) for s in seconds]
        middle = statistics.median(seconds)
        report.steps.append(Measured(name, middle, rounded, peak_mib(), facts))
    for name in read:
        compare(report, f"{name} in under 0.1x of the first load", name, "first load")


def _warm_up(spark: SparkSession, folder: Path) -> None:
    """Code generation and Python workers, for everybody."""
    uri = str(folder / "warm")
    initialize_storage(uri, "v2")
    with Session(uri, entity_types=[Reading]) as session:
        onto_write(spark.read.parquet(str(folder / "source" / "0.parquet")), session)
        onto_write(spark.read.parquet(_changes(folder, "spread evenly", 0)), session)


def _increments(
    spark: SparkSession, folder: Path, costs: dict[str, list[Cost]], read: dict[str, str]
) -> None:
    uri = str(folder / "onto")
    initialize_storage(uri, "v2")
    with Session(uri, entity_types=[Reading]) as session:
        began = Cost.now()
        onto_write(spark.read.parquet(str(folder / "source")), session)
        note(costs, "first load", began)
        round_number = 0
        for state in ("as loaded", "compacted"):
            if state == "compacted":
                session.compact(CompactionPolicy(min_entries=2, ratio=1_000_000))
                session.flush()
            for keys in ("spread evenly", "in a range"):
                name = f"{CHANGED} changed of {ROWS}, {keys}, {state}"
                for number in range(INCREMENTS + 1):
                    round_number += 1
                    path = _changes(folder, keys, round_number)
                    began = Cost.now()
                    made = onto_write(spark.read.parquet(path), session)
                    assert made["updated"] == CHANGED, made
                    if number:  # the first time is for code generation and file caches
                        note(costs, name, began)
                    share = made["stored_bytes_read"] / made["stored_bytes"]
                    read[name] = f"{made['stored_bytes_read']} bytes, {share:.1%} of the files"


def _changes(folder: Path, keys: str, round_number: int) -> str:
    """Rows that are stored already, with another value."""
    rows = ROWS // FILES * FILES
    step = rows // CHANGED
    chosen = f"id % {step} = 0" if keys == "spread evenly" else f"id // {CHANGED} = {step // 2}"
    path = folder / f"changes{round_number}.parquet"
    duckdb.connect().execute(
        f"COPY (SELECT * REPLACE (value + {round_number} AS value) FROM "
        f"read_parquet('{folder}/source/*.parquet') WHERE "
        f"{chosen.replace('id', 'substr(id, 2)::BIGINT')} LIMIT {CHANGED}) "
        f"TO '{path}' (FORMAT parquet)"
    )
    return str(path)


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
