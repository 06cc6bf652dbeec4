"""Copies of a whole storage: 2,000 commits with full history, between directories and SQLite."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, measure, sized, timed
from storage_engine.repository import initialize_storage, open_repository
from storage_engine.transfer import copy_storage
from tests.engines import CUSTOMER, PRODUCT, commit, customer, product, rows_of

COMMITS = sized(2_000, 50)
LIMIT_S = 60.0
DIRECTORY = "a directory into another, v2"


def run() -> Report:
    report = Report("copy")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, version in (("source", "v2"), ("source-v1", "v1"), ("source.db", "v2")):
            _fill(place / name, version)
        steps = [
            (DIRECTORY, "source", "copy", "v2"),
            ("a directory of v1 into one of v2", "source-v1", "copy-of-v1", "v2"),
            ("a directory into SQLite", "source", "copy.db", "v2"),
            ("SQLite into a directory", "source.db", "copy-of-db", "v2"),
        ]
        for name, source, target, version in steps:
            step = measure(name, copied, str(place / source), str(place / target), version)
            report.steps.append(step)
    seconds = report.seconds(DIRECTORY)
    promised = f"{COMMITS:,} commits with full history under a minute on a directory"
    report.verdicts[promised] = f"{seconds:.1f} s{'' if seconds < LIMIT_S else ' (NO)'}"
    return report


def _fill(path: Path, engine_version: str) -> None:
    """Commits of some rows of two types, as a session makes them, without merges."""
    initialize_storage(path, engine_version)
    with closing(open_repository(path)) as repository:
        for number in range(COMMITS):
            rows = [customer(f"c{(number * 7 + n) % 500}", age=number) for n in range(10)]
            inputs = [rows_of(CUSTOMER, *rows)]
            if number % 4 == 0:
                inputs.append(rows_of(PRODUCT, product(f"p{number}", float(number))))
            commit(repository, *inputs, metadata={"number": str(number)})
        repository.flush()


def copied(source: str, target: str, engine_version: str) -> dict[str, Any]:
    """The comparison at the end included."""
    outcome: dict[str, Any] = {}
    with timed(outcome):
        report = copy_storage(source, target, apply=True, engine_version=engine_version)
    assert report.comparison is not None
    assert report.comparison.ok
    outcome["commits"] = report.commits
    outcome["rows"] = report.rows
    return outcome
