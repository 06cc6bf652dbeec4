"""Rows that vanish from a full extract: `missing: mark` beside `keep`, on a directory, local[*].

A source of 1,000,000 rows (`BENCH_MISSING_ROWS`) that loses 1,000 of them, then regains 10, in
Parquet files; each step from the same state once with `keep` and once with `mark`, in turns in one
JVM. Then what must not undo it: a replay, an older extract that comes late, a source that lost
half. A run that leaves other rows than it should is void.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from benchmarks.harness import Measured, Report, peak_mib, sized
from storage_engine import Entity, Field, MissingRowsError, Session, initialize_storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from storage_engine.spark import WriteResult

ROWS = sized(1_000_000, 20_000, "BENCH_MISSING_ROWS")
RUNS = sized(3, 1, "BENCH_MISSING_RUNS")
LOST = ROWS // 1_000
REGAINED = max(1, LOST // 100)
FILES = 4
APP = "crm"
MARK: dict[str, Any] = {"set": {"active": False, "ended_at": "now"}}
# The extracts by the number of their unit of work, as conditions on the number of a row.
EXTRACTS = {
    1: "true",
    2: f"i % {ROWS // LOST} <> 7",
    3: f"i % {ROWS // LOST} <> 7 OR i < {REGAINED * (ROWS // LOST)}",
    4: f"i < {ROWS // 2}",
}


class Account(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    city: Field[str]
    balance: Field[float]
    opened: Field[datetime]
    active: Field[bool] = Field(default=True)
    ended_at: Field[datetime | None] = Field(default=None)


def run() -> Report:
    from storage_engine.spark import spark_session

    report = Report("missing")
    config = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "2g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.log.level": "ERROR",
    }
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as text:
        folder = Path(text)
        _make_extracts(folder)
        spark = spark_session("benchmarks", master="local[*]", config=config)
        try:
            seconds, facts = _campaign(spark, folder)
        finally:
            spark.stop()
    for name, runs in seconds.items():
        rounded = [round(each, 3) for each in runs]
        median = statistics.median(runs)
        report.steps.append(Measured(name, median, rounded, peak_mib(), facts.get(name, {})))
    for step in ("lost", "regained"):
        keep, mark = (report.seconds(f"{LABELS[step]}, {how}") for how in ("keep", "mark"))
        report.verdicts[f"{step}: mark beside keep"] = f"{mark / keep:.2f}x"
    report.verdicts["load of the machine (1, 5 and 15 minutes)"] = " ".join(
        f"{n:.1f}" for n in os.getloadavg()
    )
    return report


LABELS = {"lost": f"{LOST:,} of {ROWS:,} lost", "regained": f"{REGAINED:,} regained"}


def _make_extracts(folder: Path) -> None:
    with duckdb.connect() as duck:
        for version, where in EXTRACTS.items():
            (folder / str(version)).mkdir()
            for number in range(FILES):
                duck.execute(
                    f"""COPY (
                        SELECT format('a{{:010d}}', (i * 7919 + 13) % {ROWS}) AS id,
                            format('name {{}}', hash(i) % 100000) AS name,
                            format('city {{}}', i % 77) AS city,
                            (hash(i) % 1000000) / 100.0 AS balance,
                            make_timestamptz(1700000000000000 + i * 1000000) AS opened
                        FROM range({ROWS}) t(i) WHERE i % {FILES} = {number} AND ({where})
                    ) TO '{folder / str(version) / f"{number}.parquet"}'"""
                )


def _campaign(spark: SparkSession, folder: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    from storage_engine.spark import write_entities

    def write(session: Session, version: int, how: str, **options: Any) -> WriteResult:
        rows = spark.read.parquet(str(folder / str(version)))
        options = {"idempotency": (APP, version), **options}
        return write_entities(
            rows, Account, session, missing=MARK if how == "mark" else "keep", **options
        )

    seconds: dict[str, list[float]] = {}
    facts: dict[str, dict[str, Any]] = {}
    first = folder / "first"
    initialize_storage(str(first), "v2")
    with Session(str(first)) as session:
        began = time.perf_counter()
        write(session, 1, "keep")
        seconds["first load"] = [time.perf_counter() - began]
    for number in range(RUNS + 1):
        for how in ("keep", "mark"):
            place = folder / how
            shutil.copytree(first, place)
            with Session(str(place)) as session:
                for step, version in (("lost", 2), ("regained", 3)):
                    began = time.perf_counter()
                    result = write(session, version, how)
                    taken = time.perf_counter() - began
                    if number:  # the first time is for code generation
                        seconds.setdefault(f"{LABELS[step]}, {how}", []).append(taken)
                    shown = {
                        "read": result.rows,
                        "changed": result.updated,
                        "marked": result.marked,
                        "commits": session.repository.head_commit_id(),
                    }
                    facts[f"{LABELS[step]}, {how}"] = shown
                if how == "mark" and not number:
                    _check(session, write)
            shutil.rmtree(place)
    return seconds, facts


def _check(session: Session, write: Any) -> None:
    """The right rows in one commit each, which nothing undoes."""

    def figures() -> tuple[int, int, int]:
        inactive = Account.active.is_false() & Account.ended_at.is_not_null()
        accounts = session.query().entities(Account)
        return (
            session.repository.head_commit_id(),
            accounts.where(inactive).count(),
            accounts.where(Account.active.is_true() & Account.ended_at.is_null()).count(),
        )

    left = LOST - REGAINED
    expected = (3, left, ROWS - left)
    assert figures() == expected, figures()
    assert len(session.list_commit_changes(2)) == LOST
    assert len(session.list_commit_changes(3)) == REGAINED
    for version in (3, 2, 1):
        late = write(session, version, "mark")
        assert late.already_applied
    again = write(session, 3, "mark", idempotency=(APP, 4))
    assert (again.commit_id, again.marked, again.unchanged) == (None, 0, ROWS - left)
    with suppress(MissingRowsError):
        write(session, 4, "mark", idempotency=(APP, 5))
        raise AssertionError("half of the source was lost, and nothing stopped")
    assert figures() == expected, figures()
