"""Spark reads of a directory store beside `spark.read.parquet` on the same files, on local[2].

One load, then five overlapping changes of 1 %, then one of 25 %, then compaction.
`BENCH_SPARK_ROWS` says how many rows. Every query touches all columns, and its sums must be the
same for all readers.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Measured, Report, peak_mib
from benchmarks.spark import RUNS, Cost, Reading, make_data, session_of_spark
from storage_engine import CompactionPolicy, Session, initialize_storage
from storage_engine.model import spec_of
from storage_engine.repository.object.engine import ObjectRepository

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SUMS = (
    "count(id)",
    "sum(length(sensor))",
    "sum(length(note))",
    "sum(cast(value * 1000 as bigint))",
    "sum(n)",
    "count_if(ok)",
    "max(at)",
    "sum(day)",
)
CHANGES = 5


def run() -> Report:
    report = Report("spark_read")
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        folder = Path(name)
        make_data(folder, changed=False)
        spark = session_of_spark()
        try:
            measure(report, spark, folder)
        finally:
            spark.stop()
    return report


def measure(report: Report, spark: SparkSession, folder: Path) -> None:
    from storage_engine.spark import register, write_entities

    register(spark)
    uri = str(folder / "onto")
    initialize_storage(uri)
    source = spark.read.parquet(str(folder / "source"))
    with Session(uri, entity_types=[Reading]) as session:
        write_entities(source, Reading, session)
        plain, native = compare(report, spark, session, "one load")
        verdict(report, "native read of one load within 1.3x of spark.read.parquet", plain, native)
        for number in range(CHANGES):
            changed = source.where(f"n % 100 = {number}").selectExpr(
                "* EXCEPT (value)", f"value + {number + 1} AS value"
            )
            write_entities(changed, Reading, session)
        plain, native = compare(report, spark, session, f"{CHANGES} changes later")
        verdict(report, "native read of overlapping commits within 2x", plain, native)
        quarter = source.where("n % 4 = 0").selectExpr("* EXCEPT (value)", "value + 99 AS value")
        write_entities(quarter, Reading, session)
        plain, native = compare(report, spark, session, "a quarter changed")
        verdict(report, "native read after a quarter has changed within 2x", plain, native)
        session.compact(CompactionPolicy(min_entries=2, ratio=1000))
        session.flush()
        plain, native = compare(report, spark, session, "compacted")
        verdict(report, "native read of a compacted type within 1.3x", plain, native)


def compare(
    report: Report, spark: SparkSession, session: Session, state: str
) -> tuple[list[Cost], list[Cost]]:
    """Cost of `spark.read.parquet` on the same files, and of our reader, in turns."""
    from storage_engine.spark import read_entities

    repository = session.repository
    assert isinstance(repository, ObjectRepository)
    plan = repository.executor().plan(spec_of(Reading))
    paths = [str(repository.store.local_path(item.file.path)) for item in plan.rows]
    through_arrow = spark.read.format("ontologia").options(
        storage_uri=repository.uri, type="Reading"
    )
    plain: list[Cost] = []
    native: list[Cost] = []
    arrow: list[Cost] = []
    sums: set[Any] = set()
    for number in range(RUNS + 1):
        cost, rows_of_files = timed(spark.read.parquet(*paths))
        again, ours = timed(read_entities(spark, Reading, session))
        slow, theirs = timed(through_arrow.load())
        sums |= {ours, theirs}
        if not plan.newer:
            sums.add(rows_of_files)
        if number:  # the first one warms up
            plain.append(cost)
            native.append(again)
            arrow.append(slow)
    assert len(sums) == 1, sums
    newer = sum(item.file.row_count for item in plan.newer)
    facts = {"files": len(paths), "newer": len(plan.newer), "newer rows": newer}
    add(report, f"spark.read.parquet, {state}", plain, **facts)
    add(report, f"read_entities, {state}", native)
    add(report, f"format('ontologia'), {state}", arrow)
    return plain, native


def add(report: Report, name: str, costs: list[Cost], **facts: Any) -> None:
    rounded = [round(cost.seconds, 3) for cost in costs]
    facts["cpu"] = round(statistics.median(cost.cpu for cost in costs), 2)
    middle = statistics.median(cost.seconds for cost in costs)
    report.steps.append(Measured(name, middle, rounded, peak_mib(), facts))


def timed(frame: DataFrame) -> tuple[Cost, tuple[Any, ...]]:
    began = Cost.now()
    (row,) = frame.selectExpr(*SUMS).collect()
    return Cost.now().since(began), tuple(row)


def verdict(report: Report, name: str, plain: list[Cost], ours: list[Cost]) -> None:
    seconds, cpu = (
        statistics.median(getattr(cost, kind) for cost in ours)
        / statistics.median(getattr(cost, kind) for cost in plain)
        for kind in ("seconds", "cpu")
    )
    report.verdicts[name] = f"{seconds:.2f}x in time, {cpu:.2f}x in processor time"
