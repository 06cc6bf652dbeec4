"""1,000,000 rows out of a storage and into another, through JSON lines, CSV and Parquet: from
SQLite into a directory and out again. An import into an empty type, and one whose rows are there.

`BENCH_EXCHANGE_ROWS` makes it shorter.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import Report, measure, sized, timed
from storage_engine import Entity, Field, Session, initialize_storage

ROWS = sized(1_000_000, 10_000, "BENCH_EXCHANGE_ROWS")
BATCH = 100_000
MEMORY_MIB = 512
FORMATS = ("jsonl", "csv", "parquet")


class Reading(Entity):
    id: Field[str] = Field(primary_key=True)
    sensor: Field[str]
    value: Field[float]
    n: Field[int]
    ok: Field[bool]
    tags: Field[list[str]] = Field(default_factory=list)


def run() -> Report:
    report = Report("exchange")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = f"sqlite:///{folder}/source.db"
        measure("load", load, source)
        for file_format in FORMATS:
            out, again = folder / file_format, folder / f"{file_format}-again"
            target = f"file://{folder}/target-{file_format}"
            initialize_storage(target)
            report.steps += [
                measure(f"export from SQLite, {file_format}", exported, source, out, file_format),
                measure(f"import into a directory, {file_format}", imported, target, out),
                measure(f"import of the same rows, {file_format}", repeated, target, out),
                measure(f"export from it, {file_format}", exported, target, again, file_format),
            ]
            first = (out / f"Reading.{file_format}").read_bytes()
            assert first == (again / f"Reading.{file_format}").read_bytes()
        shuffled = f"file://{folder}/target-shuffled"
        initialize_storage(shuffled)
        shuffle(folder / "jsonl" / "Reading.jsonl", folder / "shuffled.jsonl")
        report.steps.append(
            measure("import in no order, jsonl", imported, shuffled, folder / "shuffled.jsonl")
        )
    peak = max(step.peak_mib for step in report.steps)
    promised = f"{ROWS:,} rows each way under {MEMORY_MIB} MB"
    report.verdicts[promised] = f"{peak} MiB{'' if peak < MEMORY_MIB else ' (NO)'}"
    return report


def load(uri: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    with timed(outcome), Session(uri) as session:
        session.ingest(Reading, pa.RecordBatchReader.from_batches(_batch(0).schema, _batches()))
    return outcome


def _batches() -> Any:
    for start in range(0, ROWS, BATCH):
        yield _batch(start)


def _batch(start: int) -> pa.RecordBatch:
    numbers = np.arange(start, min(start + BATCH, ROWS))
    return pa.RecordBatch.from_pydict(
        {
            "id": [f"reading-{n:09d}" for n in numbers],
            "sensor": [f"sensor-{n % 1000}" for n in numbers],
            "value": np.sin(numbers),
            "n": numbers,
            "ok": numbers % 3 == 0,
            "tags": [["a", f"t{n % 7}"] for n in numbers],
        }
    )


def exported(uri: str, folder: Path, file_format: Any) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    with Session(uri) as session, timed(outcome):
        report = session.export(folder, format=file_format)
    assert report.rows == ROWS
    outcome["MiB"] = sum(t.bytes for t in report.summary.types) // 2**20
    return outcome


def imported(uri: str, source: Path) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    with Session(uri, entity_types=[Reading]) as session, timed(outcome):
        report = session.import_files(source, apply=True)
    assert (report.commit_id, report.types[0].insert) == (1, ROWS)
    return outcome


def repeated(uri: str, source: Path) -> dict[str, Any]:
    """Compared row by row; nothing differs."""
    outcome: dict[str, Any] = {}
    with Session(uri, entity_types=[Reading]) as session, timed(outcome):
        report = session.import_files(source, on_conflict="upsert", apply=True)
    assert (report.commit_id, report.types[0].unchanged) == (None, ROWS)
    return outcome


def shuffle(source: Path, target: Path) -> None:
    """The same lines in no order; a child would not be measured, and this is not."""
    lines = source.read_bytes().splitlines(keepends=True)
    order = np.random.default_rng(1).permutation(len(lines))
    with target.open("wb") as file:
        file.writelines(lines[n] for n in order)
