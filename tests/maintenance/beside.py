"""A collector beside processes that commit, load in bulk and leave garbage, on a directory.

Used by a short test and by the benchmark: the same run, longer.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from storage_engine.config import OntologiaConfig
from storage_engine.errors import OntologiaError
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository import ReadWindow, initialize_storage, open_repository
from storage_engine.repository.object.engine import ObjectRepository
from tests.engines import CUSTOMER, commit, customer, rows_of, stream_of

LEASE_MS = 3_000


def config(name: str) -> OntologiaConfig:
    return OntologiaConfig(
        runtime_id=name,
        s3_lease_ttl_ms=LEASE_MS,
        s3_lock_timeout_ms=60_000,
        checkpoint_interval=10,
    )


@dataclass
class Outcome:
    """What happened, and what was left."""

    commits: int = 0
    refused: int = 0
    planted: int = 0
    sweeps: int = 0
    deleted: int = 0
    reads: int = 0
    left: list[str] = field(default_factory=list)  # planted garbage that is still there
    lost: list[int] = field(default_factory=list)  # acknowledged commits that are not in the log
    findings: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


def write(
    number: int, uri: str, seconds: float, commits: int | None, start: Any, results: Any
) -> None:
    """One writer: small commits, every fifth a bulk load, every third followed by litter."""
    repository = open_repository(uri, config(f"writer-{number}"))
    acknowledged: list[int] = []
    planted: list[str] = []
    refused = turn = 0
    start.wait()  # for the others: processes take a while to begin
    until = time.time() + seconds
    while time.time() < until and (commits is None or len(acknowledged) < commits):
        turn += 1
        rows = [customer(f"w{number}-{turn % 7}", age=turn), customer(f"n{number}-{turn}", age=1)]
        source = stream_of(CUSTOMER, rows) if turn % 5 == 0 else rows_of(CUSTOMER, *rows)
        try:
            result = commit(repository, source)
        except OntologiaError as error:
            if not error.retryable:
                raise
            refused += 1
            continue
        assert result is not None
        acknowledged.append(result.commit_id)
        if turn % 3 == 0:
            planted += litter(repository, result.commit_id)
    repository.close()
    results.put((acknowledged, planted, refused))


def litter(repository: Any, commit_id: int) -> list[str]:
    """What writers leave that die before their CAS."""
    mark = secrets.token_hex(4)
    keys = [
        f"commits/{commit_id}-{mark}/manifest.json",
        f"commits/{commit_id + 1}-{mark}/entities/Customer/v1.parquet",
        f"staged/{mark}/entities/Customer/v1/part-00000.parquet",
        f"snapshots/entities/Customer-1-{commit_id}-{mark}/current.parquet",
    ]
    for key in keys:
        repository.store.put(key, b"litter")
    return keys


def run(
    folder: Path,
    *,
    writers: int = 4,
    seconds: float,
    commits: int | None = None,
    grace_s: float,
    purge: bool = False,
) -> Outcome:
    """For `seconds`, or until each writer has made so many `commits`."""
    uri = (folder / "onto").as_uri()
    initialize_storage(uri, "v2")
    collector = open_repository(uri, config("collector"))
    assert isinstance(collector, ObjectRepository)
    commit(collector, rows_of(CUSTOMER, customer("first", age=1)))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    start = context.Barrier(writers + 1)
    processes = [
        context.Process(target=write, args=(n, uri, seconds, commits, start, results))
        for n in range(writers)
    ]
    for process in processes:
        process.start()
    start.wait(timeout=120)
    until = time.time() + seconds
    outcome = Outcome()
    grace = timedelta(seconds=grace_s)
    while time.time() < until and any(process.is_alive() for process in processes):
        _collect(collector, grace, purge, outcome)
        if outcome.sweeps % 4 == 0:
            compact(collector, CompactionPolicy(min_entries=8))
        outcome.reads += _read(collector)
    said = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()  # after the queue was emptied: a process waits for that
        assert process.exitcode == 0
    # What was left in the last moments ages, and goes too.
    time.sleep(grace_s + LEASE_MS / 1000 + 0.5)
    _collect(collector, grace, purge, outcome)
    planted = [key for _, keys, _ in said for key in keys]
    acknowledged = [c for commits, _, _ in said for c in commits]
    outcome.commits = len(acknowledged)
    outcome.refused = sum(refused for _, _, refused in said)
    outcome.planted = len(planted)
    outcome.left = [key for key in planted if os.path.exists(folder / "onto" / key)]
    head = collector.head_commit_id()
    known = {record.id for record in collector.list_commits(head)}
    outcome.lost = sorted(set(acknowledged) - known)
    report = verify_storage(collector, deep=True)
    outcome.findings = [f"{f.reason} {f.key}: {f.message}" for f in report.findings]
    assert len(acknowledged) == len(set(acknowledged)) == head - 1
    collector.close()
    return outcome


def _collect(repository: ObjectRepository, grace: timedelta, purge: bool, outcome: Outcome) -> None:
    plan = plan_gc(repository, grace=grace, purge_compacted=purge)
    report = sweep(repository, plan)
    outcome.sweeps += 1
    outcome.deleted += report.objects
    outcome.reasons.update(report.reasons)


def _read(repository: ObjectRepository) -> int:
    """All versions as of a head, and the latest ones: each row is there."""
    head = repository.head_commit_id()
    history = repository.read(CUSTOMER, ReadWindow(history=True, as_of=head))
    keys = set(history.column("entity_key").to_pylist())
    latest = repository.read(CUSTOMER, ReadWindow(as_of=head))
    assert set(latest.column("entity_key").to_pylist()) == keys
    return 1
