"""Compaction: 5,000,000 rows at once, and 2,000 small commits compacted at every 50th."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, measure, seaweedfs, sized, timed
from storage_engine import (
    CompactionPolicy,
    Entity,
    Field,
    OntologiaConfig,
    Session,
    initialize_storage,
)
from tests.servers import REGION

LOADS = 5
LOAD_ROWS = sized(1_000_000, 30_000)
ROWS = LOADS * LOAD_ROWS
KEYS = sized(2_500_000, 75_000)
COMMITS = sized(2_000, 100)
EVERY = 50
SMALL = 20
SMALL_KEYS = 10_000
MEMORY_MIB = 1024
REWRITES = 4
FILES = 4
WITHIN = 1.5  # times the time of delta-rs


class Reading(Entity):
    id: Field[str] = Field(primary_key=True)
    sensor: Field[str]
    place: Field[str]
    value: Field[float]
    count: Field[int]


def run() -> Report:
    report = Report("compaction")
    with tempfile.TemporaryDirectory() as folder, seaweedfs() as (server, bucket):
        large = [
            ("directory", f"{folder}/large", None),
            ("seaweedfs", f"s3://{bucket}/large", server.endpoint),
        ]
        for place, uri, endpoint in large:
            initialize_storage(uri, config=config(endpoint))
            measure("load", load, uri, endpoint)
            report.steps += [
                measure(f"latest count, {place}, loads", count_latest, uri, endpoint),
                measure(
                    f"compact {LOADS * LOAD_ROWS:,} rows, {place}", compact_large, uri, endpoint
                ),
                measure(f"latest count, {place}, compacted", count_latest, uri, endpoint),
            ]
        report.steps += [
            measure("delta-rs optimize (z-order by key) of the same rows", delta_large, folder),
            measure(f"{COMMITS:,} commits, compacted", small_commits, f"{folder}/small"),
            measure(f"delta-rs: {COMMITS:,} appends, optimized", delta_small, folder),
        ]
    peaks = [step.peak_mib for step in report.steps if step.name.startswith("compact ")]
    facts = next(s.facts for s in report.steps if s.name.endswith("commits, compacted"))
    against_delta = {
        "large": report.seconds(f"compact {ROWS:,} rows, directory")
        / report.seconds("delta-rs optimize (z-order by key) of the same rows"),
        "small": facts["compacting_s"] / report.steps[-1].facts["compacting_s"],
    }
    report.verdicts = {
        f"{what}: time of delta-rs's optimize": _verdict(round(ratio, 2), WITHIN)
        for what, ratio in against_delta.items()
    } | {
        f"{ROWS:,} rows in under {MEMORY_MIB} MiB": _verdict(max(peaks), MEMORY_MIB),
        "rewrites of a row on average": _verdict(facts["rewrites"], REWRITES),
        "files of a latest read": _verdict(facts["latest_files"], FILES),
    }
    return report


def _verdict(found: float, bound: float) -> str:
    return f"{found} of at most {bound}{'' if found <= bound else ': MISSED'}"


def config(endpoint: str | None) -> OntologiaConfig:
    return OntologiaConfig(s3_endpoint_url=endpoint, s3_region=REGION)


# -- five million rows --------------------------------------------------------------------------


def batches(turn: int) -> Iterator[Any]:
    """One load: keys in no order, some of them of earlier loads."""
    import numpy as np
    import pyarrow as pa

    rng = np.random.default_rng(turn)
    keys = rng.permutation(KEYS)[:LOAD_ROWS]
    for start in range(0, LOAD_ROWS, 100_000):
        chunk = keys[start : start + 100_000]
        yield pa.record_batch(
            {
                "id": [f"reading-{key:09d}" for key in chunk],
                "sensor": [f"sensor-{key % 5000}" for key in chunk],
                "place": [f"place-{key % 40}" for key in chunk],
                "value": rng.random(len(chunk)),
                "count": rng.integers(0, 1 << 40, len(chunk)),
            }
        )


def load(uri: str, endpoint: str | None) -> dict[str, Any]:
    import pyarrow as pa

    outcome: dict[str, Any] = {}
    with Session(uri, config=config(endpoint)) as session, timed(outcome):
        for turn in range(LOADS):
            session.ingest(Reading, pa.Table.from_batches(batches(turn)))
            assert session.commit() is not None
    return outcome


def compact_large(uri: str, endpoint: str | None) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    policy = CompactionPolicy(min_entries=2, ratio=100)
    with Session(uri, config=config(endpoint)) as session:
        cpu = time.process_time()
        with timed(outcome):
            report = session.compact(policy)
        outcome["cpu_s"] = round(time.process_time() - cpu, 2)
        [done] = report.runs
        assert done.rows == ROWS, done
        outcome |= {
            "MiB in": done.bytes_in >> 20,
            "MiB out": done.bytes_out >> 20,
            "files": f"{done.files_in} -> {done.files_out}",
        }
    return outcome


def count_latest(uri: str, endpoint: str | None) -> dict[str, Any]:
    from storage_engine.model import spec_of
    from storage_engine.repository import open_repository

    outcome: dict[str, Any] = {}
    repository = open_repository(uri, config(endpoint))
    try:
        with timed(outcome):
            outcome["rows"] = repository.read(spec_of(Reading)).num_rows
    finally:
        repository.close()
    return outcome


def delta_large(folder: str) -> dict[str, Any]:
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    path = f"{folder}/delta-large"
    for turn in range(LOADS):
        write_deltalake(path, pa.Table.from_batches(batches(turn)), mode="append")
    table = DeltaTable(path)
    before = len(table.file_uris())
    outcome: dict[str, Any] = {}
    cpu = time.process_time()
    with timed(outcome):
        table.optimize.z_order(["id"])
    outcome["cpu_s"] = round(time.process_time() - cpu, 2)
    return outcome | {"files": f"{before} -> {len(DeltaTable(path).file_uris())}"}


# -- two thousand commits -----------------------------------------------------------------------


def small_commits(uri: str) -> dict[str, Any]:
    import random

    from storage_engine.model import spec_of
    from storage_engine.repository import open_repository

    initialize_storage(uri)
    rng = random.Random(1)
    rewritten, compacting, compacting_cpu = 0, 0.0, 0.0
    outcome: dict[str, Any] = {}
    # What is measured is compaction on demand: nothing is merged in the background before it.
    settings = OntologiaConfig(auto_compact=False)
    with Session(uri, config=settings) as session, timed(outcome):
        for turn in range(1, COMMITS + 1):
            session.ensure(reading(key, turn) for key in rng.sample(range(SMALL_KEYS), SMALL))
            assert session.commit() == turn
            if turn % EVERY == 0:
                started, cpu = time.perf_counter(), time.process_time()
                rewritten += session.compact().rows_rewritten
                compacting += time.perf_counter() - started
                compacting_cpu += time.process_time() - cpu
    repository: Any = open_repository(uri)
    head = repository.chain.read_head().head
    entries = repository._versions.resolve(spec_of(Reading), head).entries
    started = time.perf_counter()
    found = repository.read(spec_of(Reading)).num_rows
    reading_s = time.perf_counter() - started
    repository.close()
    return outcome | {
        "rewrites": round(rewritten / (COMMITS * SMALL), 2),
        "latest_files": sum(len(e.newest_files(head.commit_id)) for e in entries),
        "compacting_s": round(compacting, 2),
        "compacting_cpu_s": round(compacting_cpu, 2),
        "latest_read_s": round(reading_s, 3),
        "identities": found,
    }


def reading(key: int, turn: int) -> Reading:
    return Reading(id=f"reading-{key:09d}", sensor="s", place="p", value=turn / 7, count=turn)


def delta_small(folder: str) -> dict[str, Any]:
    """Appends, which have no latest row per key: the rewriting is what compares."""
    import random

    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    path = str(Path(folder) / "delta-small")
    rng = random.Random(1)
    rewritten, compacting, compacting_cpu = 0, 0.0, 0.0
    outcome: dict[str, Any] = {}
    with timed(outcome):
        for turn in range(1, COMMITS + 1):
            keys = rng.sample(range(SMALL_KEYS), SMALL)
            rows = pa.table(
                {
                    "id": [f"reading-{key:09d}" for key in keys],
                    "sensor": ["s"] * SMALL,
                    "place": ["p"] * SMALL,
                    "value": [turn / 7] * SMALL,
                    "count": [turn] * SMALL,
                }
            )
            write_deltalake(path, rows, mode="append")
            if turn % EVERY == 0:
                started, cpu = time.perf_counter(), time.process_time()
                table = DeltaTable(path)
                files = len(table.file_uris())
                done = table.optimize.compact()
                compacting += time.perf_counter() - started
                compacting_cpu += time.process_time() - cpu
                # It tells files, not rows: all files, so all rows so far.
                assert done["numFilesRemoved"] == files, done
                rewritten += turn * SMALL
    return outcome | {
        "rewrites": round(rewritten / (COMMITS * SMALL), 2),
        "latest_files": len(DeltaTable(path).file_uris()),
        "compacting_s": round(compacting, 2),
        "compacting_cpu_s": round(compacting_cpu, 2),
    }
