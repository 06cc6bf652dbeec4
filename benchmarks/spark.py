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
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from benchmarks.harness import Measured, Report, peak_mib, sized
from storage_engine import Entity, Field, Session, initialize_storage
from storage_engine.model import spec_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = sized(10_000_000, 50_000, "BENCH_SPARK_ROWS")
RUNS = sized(3, 1, "BENCH_SPARK_RUNS")
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


def make_data(folder: Path, *, changed: bool = True) -> None:
    """`source`, and `changed`: the same with another value in every hundredth row."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    rows = ROWS // FILES
    values = {"source": "value", "changed": "value + (n % 100 = 0)::INT"}
    for name, value in values.items() if changed else [("source", "value")]:
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
    costs: dict[str, list[Cost]] = {}
    facts: dict[str, Any] = {}
    try:
        source = spark.read.parquet(str(folder / "source"))
        changed = spark.read.parquet(str(folder / "changed"))
        warm_up(spark, folder)
        for number in range(RUNS):
            plain = folder / f"plain{number}"
            uri = str(folder / f"onto{number}")
            initialize_storage(uri, "v2")
            began = Cost.now()
            source.write.parquet(str(plain))
            note(costs, "df.write.parquet", began)
            with Session(uri, entity_types=[Reading]) as session:
                loaded = onto_write(source, session, costs, "first load")
                updated = onto_write(changed, session, costs, "1 % changed")
                facts = {"files": loaded["files"], "published": updated["updated"]}
                if number == RUNS - 1:
                    check_rows(session, changed)
            shutil.rmtree(plain)
            shutil.rmtree(uri)
    finally:
        spark.stop()
    for name, runs in costs.items():
        seconds = [cost.seconds for cost in runs]
        cpu = round(statistics.median(cost.cpu for cost in runs), 2)
        middle = statistics.median(seconds)
        rounded = [round(s, 3) for s in seconds]
        report.steps.append(Measured(name, middle, rounded, peak_mib(), {"cpu": cpu}))
    report.steps[-1].facts.update(facts)
    compare(report, "ingest within 2x of df.write.parquet", "first load", "df.write.parquet")
    compare(report, "staging within 1.4x", "first load: stage", "df.write.parquet")
    compare(report, "1 % changed in less time than the first load", "1 % changed", "first load")


@dataclass(frozen=True)
class Cost:
    """Time passed, and processor time of this process with all that it started: on a machine that
    others use too, the second is what tells steps apart."""

    seconds: float
    cpu: float

    @classmethod
    def now(cls) -> Cost:
        return cls(time.perf_counter(), _cpu_seconds())

    def since(self, began: Cost) -> Cost:
        return Cost(self.seconds - began.seconds, self.cpu - began.cpu)


def note(costs: dict[str, list[Cost]], name: str, began: Cost, ended: Cost | None = None) -> None:
    costs.setdefault(name, []).append((ended or Cost.now()).since(began))


def compare(report: Report, promise: str, ours: str, theirs: str) -> None:
    steps = {step.name: step for step in report.steps}
    wall = steps[ours].seconds / steps[theirs].seconds
    cpu = steps[ours].facts["cpu"] / steps[theirs].facts["cpu"]
    report.verdicts[promise] = f"{wall:.2f}x in time, {cpu:.2f}x in processor time"


def _cpu_seconds() -> float:
    """Of this process, its JVM and Python workers, dead ones included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text(encoding="utf-8")
            except OSError:
                continue
            fields = text.rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(int(fields[n]) for n in (11, 12, 13, 14))
    ours = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= grown
    return sum(ticks.get(pid, 0) for pid in ours) / os.sysconf("SC_CLK_TCK")


def warm_up(spark: SparkSession, folder: Path) -> None:
    """Code generation, Python workers and the file cache, for everybody."""
    uri = str(folder / "warm")
    initialize_storage(uri, "v2")
    few = spark.read.parquet(str(folder / "source" / "0.parquet"))
    few_changed = spark.read.parquet(str(folder / "changed" / "0.parquet"))
    with Session(uri, entity_types=[Reading]) as session:
        onto_write(few, session)
        onto_write(few_changed, session)
    few.write.parquet(str(folder / "warm.parquet"))


def onto_write(
    source: DataFrame,
    session: Session,
    costs: dict[str, list[Cost]] | None = None,
    name: str = "",
) -> dict[str, Any]:
    """Write, and note the cost in all and of each stage."""
    from storage_engine.spark import WriteProgress, write_entities

    marks: dict[str, Cost] = {}

    def mark(progress: WriteProgress) -> None:
        if progress.stage not in marks:
            marks[progress.stage] = Cost.now()

    began = Cost.now()
    result = write_entities(source, Reading, session, progress=mark)
    session.flush()
    if costs is not None:
        ended = Cost.now()
        note(costs, name, began, ended)
        bounds = [*marks.items(), ("", ended)]
        for (stage, start), (_, end) in pairwise(bounds):
            note(costs, f"{name}: {stage}", start, end)
    return result.as_dict()


def check_rows(session: Session, expected: DataFrame) -> None:
    """A run that leaves other rows than these is void."""
    thousandths = "sum(cast(round(value * 1000) as bigint))"
    theirs = tuple(expected.selectExpr("count(*)", "sum(n)", thousandths).collect()[0])
    found = session.sql(f"select count(*) as c, sum(n) as n, {thousandths} as v from Reading")
    (row,) = found.collect()
    assert (row["c"], row["n"], row["v"]) == theirs, (row, theirs)
    assert session.repository.type_head(spec_of(Reading)) == 2
