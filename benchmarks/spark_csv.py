"""A CSV file of 100 MB through `jobs/ingest` into a directory store, end to end, in MB/s.

A quoted value may go over line ends, and a large file is looked at for that before it is read: what
this costs where there are none, beside `multiLine=false`, which spares it; and what a file with
such values costs, as it comes and with `multiLine=true`, beside the same text read by
`session.ingest`. Each write goes to an empty storage; other rows than those of the file make the
run void.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Measured, Report, peak_mib, sized
from storage_engine import Entity, Field, Session, initialize_storage
from storage_engine.spark.ingest_spec import IngestSpec, Source

MEGABYTES = sized(100, 1, "BENCH_CSV_MB")
RUNS = sized(3, 1, "BENCH_CSV_RUNS")
_BROKEN_EVERY = 50  # rows, of which one has a line end within quotes
_STEPS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("no line ends in quotes, as it comes", "plain.csv", {}),
    ("no line ends in quotes, multiLine=false", "plain.csv", {"multiLine": "false"}),
    ("line ends in quotes, as it comes", "broken.csv", {}),
    ("line ends in quotes, multiLine=true", "broken.csv", {"multiLine": "true"}),
)
_BY_SESSION = "line ends in quotes, session.ingest"


class Remark(Entity):
    id: Field[str] = Field(primary_key=True)
    author: Field[str]
    text: Field[str]
    n: Field[int]


def run() -> Report:
    from storage_engine.spark import spark_session

    report = Report("spark_csv")
    config = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.log.level": "ERROR",
    }
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        files = {name: make_file(Path(folder) / name) for name in ("plain.csv", "broken.csv")}
        spark = spark_session("benchmarks", master="local[*]", config=config)
        try:
            for number in range(RUNS + 1):
                for name, file, options in _STEPS:
                    taken = by_spark(spark, Path(folder) / file, files[file], options)
                    if number:  # the first time is for code generation and Python workers
                        seconds.setdefault(name, []).append(taken)
        finally:
            spark.stop()
        for _ in range(RUNS):
            taken = by_session(Path(folder) / "broken.csv", files["broken.csv"])
            seconds.setdefault(_BY_SESSION, []).append(taken)
        rows = files["plain.csv"]
    for name, runs in seconds.items():
        middle = statistics.median(runs)
        facts = {"MB/s": round(MEGABYTES / middle, 1), "rows": rows}
        rounded = [round(each, 3) for each in runs]
        report.steps.append(Measured(name, middle, rounded, peak_mib(), facts))
    plain, unseen, broken, told = (report.seconds(name) for name, _, _ in _STEPS)
    report.verdicts["looking for line ends in quotes"] = f"{plain / unseen:.2f}x of the time"
    report.verdicts["a file that has some"] = f"{broken / plain:.2f}x; {told / plain:.2f}x if told"
    load = " ".join(f"{n:.1f}" for n in os.getloadavg())
    report.verdicts["load of the machine (1, 5 and 15 minutes)"] = load
    return report


def make_file(path: Path) -> int:
    """How many rows are in it. Both kinds of file have quotes in every row."""
    end = "\n" if path.stem == "broken" else " "
    count = size = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write("id,author,text,n\n")
        while size < MEGABYTES * 1_000_000:
            between = end if count % _BROKEN_EVERY == 0 else " "
            text = f'remark {count} of ""some"" length,{between}about nothing in particular'
            size += file.write(f'r{count:09},author {count % 1000},"{text}",{count}\n')
            count += 1
    return count


def by_spark(spark: Any, path: Path, rows: int, options: dict[str, str]) -> float:
    from storage_engine.spark.jobs.ingest import ingest

    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        initialize_storage(folder, "v2")
        spec = IngestSpec(
            storage_uri=folder,
            type="Remark",
            models=__name__,
            source=Source(
                format="csv",
                paths=(str(path),),
                row_schema="id STRING, author STRING, text STRING, n BIGINT",
                options=options,
            ),
        )
        began = time.perf_counter()
        result = ingest(spark, spec)
        seconds = time.perf_counter() - began
        assert result.inserted == rows, result
        check(folder, path, rows)
    return seconds


def by_session(path: Path, rows: int) -> float:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        initialize_storage(folder, "v2")
        began = time.perf_counter()
        with Session(folder, entity_types=[Remark]) as session:
            session.ingest(Remark, path)
            session.commit()
        seconds = time.perf_counter() - began
        check(folder, path, rows)
    return seconds


def check(uri: str, path: Path, rows: int) -> None:
    with Session(uri) as session:
        statement = "select count(*), count(*) filter (text like '%' || chr(10) || '%') from Remark"
        [found] = session.sql(statement).collect()
    broken = -(-rows // _BROKEN_EVERY) if path.stem == "broken" else 0
    assert tuple(found.values()) == (rows, broken), found
