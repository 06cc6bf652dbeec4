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
YOUNG = 100
TURNS = sized(100, 10)


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
        report.steps.append(
            measure(f"{YOUNG} and {COMMITS:,} commits in turns", in_turns, folder, COMMITS)
        )
    young, old = (report.steps[-1].facts[name] for name in ("young", "old"))
    report.verdicts = {
        f"{what} at {COMMITS:,} commits against {YOUNG}, {unit}": _ratio(
            old[f"{what} {unit}"], young[f"{what} {unit}"]
        )
        for what in ("commit", "warm read")
        for unit in ("ms", "CPU ms")
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


class _Watch:
    """Commits and warm reads of one session with their times: milliseconds of the clock, and of
    this process's CPU, which a busy machine changes less."""

    def __init__(self, session: Session, turn: int) -> None:
        self._session = session
        self._turn = turn
        self._taken: dict[str, list[float]] = {}

    def round(self) -> None:
        """A commit, and a read of what it and the nine before it left."""
        self._session.flush()  # what goes on behind a commit is not the next one's
        self._take("commit", lambda: _commit(self._session, self._turn))
        self._turn += 1
        self._session.flush()
        query = self._session.query().entities(Reading).where(Reading.value >= self._turn - 10)
        self._take("warm read", query.to_arrow)

    def forget(self) -> None:
        self._taken.clear()

    def medians(self) -> dict[str, Any]:
        medians = {what: round(statistics.median(times), 2) for what, times in self._taken.items()}
        return {"commits": self._turn, **medians}

    def _take(self, what: str, work: Callable[[], object]) -> None:
        clock, cpu = time.perf_counter(), time.process_time()
        work()
        self._taken.setdefault(f"{what} CPU ms", []).append(1000 * (time.process_time() - cpu))
        self._taken.setdefault(f"{what} ms", []).append(1000 * (time.perf_counter() - clock))


def in_turns(folder: str, commits: int) -> dict[str, Any]:
    """A young storage and the one that `grow` left, each with a session, by turns: so whatever
    else the machine does happens to both."""
    young, old = f"{folder}/young", _uri(folder, commits, True)
    initialize_storage(young)
    outcome: dict[str, Any] = {}
    with Session(young) as first, Session(old) as second, timed(outcome):
        for turn in range(YOUNG):
            _commit(first, turn)
        watches = [_Watch(first, YOUNG), _Watch(second, commits)]
        for number in range(5 + TURNS):
            if number == 5:  # both are warm
                for watch in watches:
                    watch.forget()
            for watch in watches if number % 2 else reversed(watches):
                watch.round()
        first.flush()
        second.flush()
    return outcome | {"young": watches[0].medians(), "old": watches[1].medians()}


def _uri(folder: str, commits: int, merging: bool) -> str:
    return f"{folder}/{commits}-{merging}"


def grow(folder: str, commits: int, merging: bool) -> dict[str, Any]:
    from storage_engine.commitlog import state
    from storage_engine.model import spec_of

    uri = _uri(folder, commits, merging)
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
                watch = _Watch(session, turn)
                while turn < stop:
                    watch.round()
                    turn += 1
                watched.append(watch.medians())
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
