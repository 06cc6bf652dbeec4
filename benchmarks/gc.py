"""Garbage collection: beside four writers for a minute, and how fast a directory is swept."""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, measure, sized, timed
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.repository import initialize_storage, open_repository
from storage_engine.repository.object.engine import ObjectRepository
from tests.engines import CUSTOMER, commit, customer, rows_of
from tests.maintenance import beside

SECONDS = float(sized(60, 5))
GRACE_S = 5.0
ORPHANS = sized(20_000, 500)
PER_SECOND = 1_000


def run() -> Report:
    report = Report("gc")
    report.steps.append(measure(f"beside 4 writers for {SECONDS:.0f} s", beside_writers))
    report.steps.append(measure(f"sweep of {ORPHANS:,} orphans, directory", swept, runs=3))
    facts = report.steps[0].facts
    sound = not (facts["left"] or facts["lost"] or facts["findings"])
    report.verdicts["nothing reachable deleted, all litter gone"] = "yes" if sound else "NO"
    rate = report.steps[1].facts["deletes a second"]
    report.verdicts[f"at least {PER_SECOND:,} deletes a second"] = f"{rate:,}"
    return report


def beside_writers() -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, timed(outcome):
        found = beside.run(Path(folder), seconds=SECONDS, grace_s=GRACE_S, purge=True)
    return outcome | {
        "commits": found.commits,
        "refused": found.refused,
        "sweeps": found.sweeps,
        "reads": found.reads,
        "planted": found.planted,
        "deleted": found.deleted,
        "left": len(found.left),
        "lost": len(found.lost),
        "findings": len(found.findings),
    }


def swept() -> dict[str, Any]:
    """Two objects an attempt, as failed commits leave them."""
    outcome: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "onto"
        initialize_storage(root.as_uri())
        repository = open_repository(root.as_uri())
        assert isinstance(repository, ObjectRepository)
        commit(repository, rows_of(CUSTOMER, customer("a", age=1)))
        repository.flush()
        old = time.time() - timedelta(days=30).total_seconds()
        for number in range(ORPHANS // 2):
            attempt = root / f"commits/1-{number:08x}"
            (attempt / "entities/Customer").mkdir(parents=True)
            for name in ("manifest.json", "entities/Customer/v1.parquet"):
                (attempt / name).write_bytes(b"x" * 2000)
                os.utime(attempt / name, (old, old))
        started = time.perf_counter()
        plan = plan_gc(repository)
        outcome["plan seconds"] = round(time.perf_counter() - started, 2)
        with timed(outcome):
            report = sweep(repository, plan)
        assert report.objects == ORPHANS
        assert repository.read(CUSTOMER).num_rows == 1
        repository.close()
    outcome["deletes a second"] = round(ORPHANS / outcome["seconds"])
    return outcome
