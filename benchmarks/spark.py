"""Spark on a directory store: ingest of 10,000,000 rows of 8 columns, and again with 1 % changed.

Beside it Spark's own `df.write.parquet` of the same rows, in the same JVM on local[2], in turns.
`BENCH_SPARK_ROWS` says how many rows. Keys come in no order, so that the check for repeated
identities cannot be spared.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from benchmarks.harness import Measured, Report, _peak_mib
from storage_engine import Entity, Field, Session, initialize_storage
from storage_engine.model import spec_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = int(os.environ.get("BENCH_SPARK_ROWS", "10_000_000"))
RUNS = int(os.environ.get("BENCH_SPARK_RUNS", "3"))
FILES = 8
COLUMNS = """
    format('r{:010d}', (i * 7919 + 13) % $rows) AS id,
    format('sensor {}', i % 1000) AS sensor,
    format('note {} of {}', hash(i) % 100000, i % 77) AS note,
    (hash(i) % 1000000) / 1000.0 AS value,
    (hash(i + 1) % 1000000000)::BIGINT AS n,
    i % 3 = 0 AS ok,
    make_timestamptz(1700000000000000 + i * 1000000) AS at,
    CASE WHEN i % 5 = 0 THEN NULL ELSE (i % 365)::BIGINT END AS day
"""


class Reading(Entity):
    id: Field[str] = Field(primary_key=True)
    sensor: Field[str]
    note: Field[str]
    value: Field[float]
    n: Field[int]
    ok: Field[bool]
    at: Field[datetime]
    day: Field[int | None] = Field(default=None)


def run() -> Report:
    report = Report("spark")
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        make_data(Path(folder))
        ingest(report, Path(folder))
    return report


def make_data(folder: Path) -> None:
    """`source`, and `changed`: the same with another value in every hundredth row."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    rows = ROWS // FILES
    for name, value in (("source", "value"), ("changed", "value + (n % 100 = 0)::INT")):
        (folder / name).mkdir()
        for number in range(FILES):
            columns = COLUMNS.replace("$rows", str(rows * FILES))
            connection.execute(
                f"COPY (SELECT * REPLACE ({value} AS value) FROM (SELECT {columns} FROM "
                f"range({number * rows}, {(number + 1) * rows}) t(i))) "
                f"TO '{folder / name / f'{number}.parquet'}' (FORMAT parquet)"
            )


def session_of_spark() -> SparkSession:
    from storage_engine.spark import spark_session

    return spark_session(
        "benchmarks",
        master="local[2]",
        config={
            "spark.ui.enabled": "false",
            "spark.driver.memory": "4g",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.log.level": "ERROR",
            "spark.sql.shuffle.partitions": "8",
        },
    )


def ingest(report: Report, folder: Path) -> None:
    spark = session_of_spark()
    try:
        source = spark.read.parquet(str(folder / "source"))
        changed = spark.read.parquet(str(folder / "changed"))
        warm_up(source, folder)
        plain: list[float] = []
        first: list[float] = []
        staging: list[float] = []
        again: list[float] = []
        facts: dict[str, Any] = {}
        for number in range(RUNS):
            plain.append(spark_write(source, folder / f"plain{number}"))
            uri = str(folder / f"onto{number}")
            initialize_storage(uri, "v2")
            with Session(uri, entity_types=[Reading]) as session:
                seconds, stages, loaded = onto_write(source, session)
                first.append(seconds)
                staging.append(stages["stage"])
                seconds, stages, updated = onto_write(changed, session)
                again.append(seconds)
                facts = {"stages": stages, "updated": updated["updated"], "files": loaded["files"]}
                if number == RUNS - 1:
                    check_rows(session, changed)
            shutil.rmtree(folder / f"plain{number}")
            shutil.rmtree(uri)
    finally:
        spark.stop()
    add(report, "df.write.parquet", plain)
    add(report, "write_entities, first load", first)
    add(report, "  of which staging", staging)
    add(report, "write_entities, 1 % changed", again, **facts)
    base = statistics.median(plain)
    report.verdicts["ingest within 2x of df.write.parquet"] = (
        f"{statistics.median(first) / base:.2f}x"
    )
    report.verdicts["staging within 1.4x"] = f"{statistics.median(staging) / base:.2f}x"
    report.verdicts["1 % changed in less time than the first load"] = (
        f"{statistics.median(again) / statistics.median(first):.2f}x of it, "
        f"{facts['updated']} rows published"
    )


def add(report: Report, name: str, seconds: list[float], **facts: Any) -> None:
    median = statistics.median(seconds)
    report.steps.append(Measured(name, median, [round(s, 3) for s in seconds], _peak_mib(), facts))


def warm_up(source: DataFrame, folder: Path) -> None:
    """Code generation, Python workers and the file cache, for everybody."""
    uri = str(folder / "warm")
    initialize_storage(uri, "v2")
    few = source.limit(10_000)
    with Session(uri, entity_types=[Reading]) as session:
        onto_write(few, session)
        onto_write(few, session)
    few.write.parquet(str(folder / "warm.parquet"))
    source.selectExpr("count(id)", "sum(n)").collect()


def spark_write(source: DataFrame, path: Path) -> float:
    started = time.perf_counter()
    source.write.parquet(str(path))
    return time.perf_counter() - started


def onto_write(
    source: DataFrame, session: Session
) -> tuple[float, dict[str, float], dict[str, Any]]:
    """Seconds in all, seconds by stage, and what the write says."""
    from storage_engine.spark import WriteProgress, write_entities

    marks: dict[str, float] = {}

    def note(progress: WriteProgress) -> None:
        marks.setdefault(progress.stage, time.perf_counter())

    started = time.perf_counter()
    result = write_entities(source, Reading, session, progress=note)
    session.flush()
    ended = time.perf_counter()
    stages = {
        "reconcile": marks.get("stage", ended) - marks["reconcile"],
        "stage": marks.get("check", marks["publish"]) - marks.get("stage", ended),
        "publish": ended - marks["publish"],
    }
    stages = {name: round(seconds, 3) for name, seconds in stages.items()}
    return ended - started, stages, result.as_dict()


def check_rows(session: Session, expected: DataFrame) -> None:
    """A run that leaves other rows than these is void."""
    rows, total, values = expected.selectExpr("count(*)", "sum(n)", "sum(value)").collect()[0]
    found = session.sql("select count(*) as c, sum(n) as n, sum(value) as v from Reading").collect()
    (row,) = found
    assert (row["c"], row["n"]) == (rows, total), (row, rows, total)
    assert abs(row["v"] - values) < 1e-3 * rows, (row, values)
    assert session.repository.type_head(spec_of(Reading)) == 2
