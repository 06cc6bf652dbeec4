"""Several writers at once, one request at a time, in an order drawn from a seed.

Each writer runs in a thread of its own that stops before every request until it is chosen. So
only one of them moves, and the same seed gives the same run: order, faults, jitter and all.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from storage_engine.maintenance.compaction.plan import TierPolicy
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.testing.faults import FaultKind, FaultPlan, plan_of
from tests.commitlog.support import World, Writer, new_world
from tests.simulation.harness import Intent, Ledger

WRITERS = ("one", "two", "three")
COMMITS = 5
CHANCES: Mapping[FaultKind, float] = {
    FaultKind.CRASH_BEFORE: 0.003,
    FaultKind.CRASH_AFTER: 0.003,
    FaultKind.RESPONSE_LOST: 0.015,
    FaultKind.TIMEOUT: 0.005,
    FaultKind.DELAYED: 0.01,
    FaultKind.CONFLICT: 0.01,
    FaultKind.PRECONDITION: 0.01,
    FaultKind.SERVER_ERROR: 0.005,
    FaultKind.UNAVAILABLE: 0.002,
    FaultKind.SLOW: 0.01,
    FaultKind.SKEW: 0.003,
}
_LEASES_MS = (500, 1_000, 5_000)  # short ones run out while a writer is held
_LONGEST_S = 8.0
_HOLD_CHANCE = 0.1
_ID = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}")


class Scheduler:
    """Lets one of the waiting threads go on at a time; now and then one is held for many turns,
    as a process that is paused."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._condition = threading.Condition()
        self._waiting: set[str] = set()
        self._chosen: str | None = None
        self._live: set[str] = set()
        self._held = ""
        self._held_for = 0

    def turn(self, name: str) -> None:
        """Wait until it is this writer's turn; at the end, when all have done their work, it is."""
        with self._condition:
            if name not in self._live:
                return
            self._waiting.add(name)
            self._choose()
            self._condition.wait_for(lambda: self._chosen == name)
            self._chosen = None
            self._waiting.discard(name)

    def run(self, jobs: Mapping[str, Callable[[], None]]) -> None:
        """Run all jobs to their end; then raise what one of them raised."""
        self._live = set(jobs)

        def work(name: str, job: Callable[[], None]) -> None:
            try:
                self.turn(name)
                job()
            finally:
                with self._condition:
                    self._live.discard(name)
                    self._choose()

        in_threads([partial(work, *item) for item in jobs.items()])

    def _choose(self) -> None:
        if self._chosen is None and self._live and self._waiting == self._live:
            if self._held_for == 0 and self._random.random() < _HOLD_CHANCE:
                self._held = self._random.choice(sorted(self._waiting))
                self._held_for = self._random.randint(5, 80)
            elif self._held_for:
                self._held_for -= 1
            free = self._waiting - {self._held} if self._held_for else self._waiting
            self._chosen = self._random.choice(sorted(free or self._waiting))
            self._condition.notify_all()


@dataclass
class Outcome:
    """A run: the storage it left, what was asked of it, and the requests in their order."""

    world: World
    ledger: Ledger
    trace: list[tuple[str, str, str, str]] = field(default_factory=list)
    faults: int = 0


def simulate(
    seed: int,
    *,
    engine_version: str = "v2",
    chances: Mapping[FaultKind, float] = CHANCES,
    merges: TierPolicy | None = None,
    most_together: int = 1,
) -> Outcome:
    """Writers that change the same few rows, fail, crash and come back, and with `merges` keep
    the storage compact; so many commits at most by one swap. Close the world after."""
    random.seed(seed)  # jitter of the engine
    world, ledger, scheduler = new_world(engine_version), Ledger(), Scheduler(seed)
    script = random.Random(seed)
    lease_ms = script.choice(_LEASES_MS)
    jobs = {}
    for n, name in enumerate(WRITERS):
        start = _starter(world, scheduler, name, seed * 10 + n, lease_ms, chances, merges)
        intents = _intents(script)
        sizes = [script.randint(1, most_together) if most_together > 1 else 1 for _ in intents]
        jobs[name] = _job(ledger, name, start, intents, sizes)
    scheduler.run(jobs)
    trace = [(r.client, r.operation, _ID.sub("x", r.key), r.outcome) for r in world.backend.log]
    fired = sum(len(plan_of(writer.store).fired) for writer in world.writers)
    return Outcome(world, ledger, trace, fired)


def _intents(script: random.Random) -> list[tuple[Intent, bool]]:
    found: list[tuple[Intent, bool]] = []
    for _ in range(COMMITS):
        intent: dict[str, Mapping[str, int]] = {
            "Customer": {key: script.randint(0, 9) for key in script.sample("abcd", 2)}
        }
        if script.random() < 0.3:
            intent["Product"] = {script.choice("pq"): script.randint(0, 9)}
        found.append((intent, script.random() < 0.25))
    return found


def _starter(
    world: World,
    scheduler: Scheduler,
    name: str,
    seed: int,
    lease_ms: int,
    chances: Mapping[FaultKind, float],
    merges: TierPolicy | None,
) -> Callable[[int], Writer]:
    def start(life: int) -> Writer:
        """A process; after a crash, the next one with the same work to do."""
        writer = world.open(
            f"{name}-{life}",
            s3_lease_ttl_ms=lease_ms,
            s3_lock_timeout_ms=90_000,
            checkpoint_interval=5,
            merges=merges,
        )
        writer.store.faults = FaultPlan(
            seed=seed + 1000 * life, probabilities=chances, limit=12, max_seconds=_LONGEST_S
        )
        writer.store.on_request(lambda kind, key: scheduler.turn(name))
        return writer

    return start


def _job(
    ledger: Ledger,
    name: str,
    start: Callable[[int], Writer],
    intents: Sequence[tuple[Intent, bool]],
    sizes: Sequence[int],
) -> Callable[[], None]:
    marked = [(f"{name}-{number}", *intent) for number, intent in enumerate(intents)]

    def work() -> None:
        life = 0
        writer = start(life)
        left = list(marked)
        for size in sizes:
            group, left = left[:size], left[size:]
            if len(group) == 1:
                [(mark, intent, bulk)] = group
                ledger.commit(writer, mark, intent, bulk=bulk)
            elif group:
                ledger.commit_together(writer, {mark: intent for mark, intent, _ in group})
            if writer.store.crashed:
                life += 1
                writer = start(life)
        with suppress(SimulatedCrash):
            writer.repo.flush()  # what it has merged

    return work


def in_threads(jobs: Sequence[Callable[[], object]]) -> None:
    """Run all to their end, each in a thread; then raise what one of them raised."""
    failures: list[BaseException] = []

    def work(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
