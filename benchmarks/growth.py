"""Growth: what a small commit writes and a cold query asks for, after many commits of one type;
and how long a commit and a warm read take on the way."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Report, measure, sized, timed
from storage_engine import Entity, Field, OntologiaConfig, Session, initialize_storage

COMMITS = sized(10_000, 200, "BENCH_GROWTH_COMMITS")
KEYS = 50  # all there after the first 50 commits: from then on only history grows
KB_PER_COMMIT = 64
REQUESTS = 200
REWRITES = 3
WITHIN = 1.1  # of what a commit and a warm read take at the beginning
WATCHED = 30  # commits, and reads, whose times are taken at each size


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
    first, last = facts["history"][0], facts["history"][-1]
    report.verdicts = {
        f"{what} at {last['commits']:,} commits against {first['commits']}, CPU": _ratio(
            last[f"{what} CPU ms"], first[f"{what} CPU ms"]
        )
        for what in ("commit", "warm read")
    } | {
        "KB a commit besides its rows": _verdict(facts["KB a commit"], KB_PER_COMMIT),
        "requests of a cold query": _verdict(facts["cold requests"], REQUESTS),
        "rewrites of a row on average": _verdict(facts["rewrites"], REWRITES),
    }
    return report


def _ratio(late: float, early: float) -> str:
    return f"{late / early:.2f} of at most {WITHIN}{'' if late <= WITHIN * early else ': MISSED'}"


def _verdict(figure: float, bound: float) -> str:
    return f"{figure} of at most {bound}{'' if figure <= bound else ': MISSED'}"


_SIZES = (100, 300, 1_000, 3_000)


def _commit(session: Session, turn: int) -> None:
    session.ensure(Reading(id=f"{turn % KEYS}", value=turn))
    assert session.commit() == turn + 1


def _watched(session: Session, start: int, stop: int) -> dict[str, Any]:
    """Medians of the commits from here on, and of warm reads after each of them: milliseconds of
    the clock, and of this process's CPU, which a busy machine changes little."""
    taken: dict[str, list[float]] = {}

    def take(what: str, work: Callable[[], object]) -> None:
        clock, cpu = time.perf_counter(), time.process_time()
        work()
        taken.setdefault(f"{what} CPU ms", []).append(1000 * (time.process_time() - cpu))
        taken.setdefault(f"{what} ms", []).append(1000 * (time.perf_counter() - clock))

    query = session.query().entities(Reading).where(Reading.value >= stop - 10)
    for turn in range(start, stop):
        session.flush()  # what goes on behind a commit is not the next one's
        take("commit", lambda turn=turn: _commit(session, turn))  # type: ignore[misc]
        session.flush()
        take("warm read", query.to_arrow)
    medians = {what: round(statistics.median(found), 2) for what, found in taken.items()}
    return {"commits": stop, **medians}


def grow(folder: str, commits: int, merging: bool) -> dict[str, Any]:
    from storage_engine.commitlog import state
    from storage_engine.model import spec_of

    uri = f"{folder}/{commits}-{merging}"
    initialize_storage(uri)
    outcome: dict[str, Any] = {}
    with Session(uri, config=OntologiaConfig(auto_compact=merging)) as session:
        watched: list[dict[str, Any]] = []
        with timed(outcome):
            turn = 0
            for stop in sorted({size for size in _SIZES if size < commits} | {commits}):
                while turn < stop - WATCHED:
                    _commit(session, turn)
                    turn += 1
                watched.append(_watched(session, turn, stop))
                turn = stop
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
        "history": watched,
        "cold requests": requests,
        "rewrites": round(
            sum(e.rewrites * sum(f.row_count for f in e.files) for e in entries) / commits, 2
        ),
    }
