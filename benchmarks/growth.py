"""Growth: what a small commit writes and a cold query asks for, after many commits of one type."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from benchmarks.harness import Report, measure, timed
from storage_engine import Entity, Field, OntologiaConfig, Session, initialize_storage

COMMITS = int(os.environ.get("BENCH_GROWTH_COMMITS", "10000"))
KEYS = 500
KB_PER_COMMIT = 64
REQUESTS = 200
REWRITES = 3


class Reading(Entity):
    id: Field[str] = Field(primary_key=True)
    value: Field[int]


def run() -> Report:
    report = Report("growth")
    sizes = sorted({min(1_000, COMMITS), COMMITS})
    with tempfile.TemporaryDirectory() as folder:
        # Without merges every commit writes an index of all before: 10,000 of them are 17 GB.
        report.steps.append(
            measure(f"{sizes[0]:,} commits, auto_compact off", grow, folder, sizes[0], False)
        )
        report.steps += [measure(f"{n:,} commits", grow, folder, n, True) for n in sizes]
    facts = report.steps[-1].facts
    report.verdicts = {
        "KB a commit besides its rows": _verdict(facts["KB a commit"], KB_PER_COMMIT),
        "requests of a cold query": _verdict(facts["cold requests"], REQUESTS),
        "rewrites of a row on average": _verdict(facts["rewrites"], REWRITES),
    }
    return report


def _verdict(figure: float, bound: float) -> str:
    return f"{figure} of at most {bound}{'' if figure <= bound else ': MISSED'}"


def grow(folder: str, commits: int, merging: bool) -> dict[str, Any]:
    from storage_engine.commitlog import state
    from storage_engine.model import spec_of

    uri = f"{folder}/{commits}-{merging}"
    initialize_storage(uri)
    outcome: dict[str, Any] = {}
    with Session(uri, config=OntologiaConfig(auto_compact=merging)) as session:
        with timed(outcome):
            for turn in range(commits):
                session.ensure(Reading(id=f"{turn % KEYS}", value=turn))
                assert session.commit() == turn + 1
            session.flush()
        repository: Any = session.repository.objects
        head = repository.chain.read_head().head
        entries = state.current_checkpoint(repository.chain, head).entries[spec_of(Reading).ref]
        written = repository.requests()["bytes_written"]
        rows = sum(
            info.size
            for prefix in ("commits/", "snapshots/")
            for info in repository.store.list(prefix)
            if info.key.endswith(".parquet")
        )
    with Session(uri, entity_types=[Reading]) as cold:
        before = cold.repository.requests()["total"]
        answer = cold.query().entities(Reading).collect()
        requests = cold.repository.requests()["total"] - before
    assert len(answer) == min(KEYS, commits)
    return outcome | {
        "KB a commit": round((written - rows) / commits / 1024, 1),
        "entries": len(entries),
        "cold requests": requests,
        "rewrites": round(
            sum(e.rewrites * sum(f.row_count for f in e.files) for e in entries) / commits, 2
        ),
    }
