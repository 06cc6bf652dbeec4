"""Writers in line, one of which dies at any of its requests: the others go on, and soon.

Waiting, holding and handing over are looked at in one: three writers that commit at the same time,
in an order drawn from a seed, so that what the one that dies was about to do is known from a run in
which it lives.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import pytest

from storage_engine.commitlog import ahead, layout
from storage_engine.commitlog import lock as lock_module
from storage_engine.commitlog.lock_object import LockState
from storage_engine.commitlog.records import Head
from storage_engine.commitlog.waiting import Waiting
from storage_engine.errors import LeaseExpiredError
from storage_engine.testing.faults import READS, Fault, FaultKind, FaultPlan, FaultRule
from tests.campaigns import examples
from tests.commitlog.support import World, Writer, new_world
from tests.simulation.harness import InvariantViolated, Ledger, demand, recover, verify
from tests.simulation.schedule import Scheduler

pytestmark = pytest.mark.simulation

WRITERS = ("one", "two", "three")
COMMITS = 3
LEASE_MS = 6_000
ASIDE = 20  # while one waits others do so too, and time is the sum of it all
SOON_S = 3.0
SEED = 2
SEARCH = examples(1) > 1


@dataclass
class Contention:
    """What came of writers that all wanted the lock."""

    world: World
    ledger: Ledger = field(default_factory=Ledger)
    requests: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    failures: dict[str, BaseException] = field(default_factory=dict)
    locks: list[str] = field(default_factory=list)  # every lock object that stood
    held_at_death: bool = False

    def __post_init__(self) -> None:
        self.began = self.world.backend.clock.now()

    @property
    def seconds(self) -> float:
        return (self.world.backend.clock.now() - self.began).total_seconds()

    @property
    def offers(self) -> int:
        """How often the lock was handed over."""
        return sum('"offered"' in lock for lock in self.locks)


def contend(
    seed: int = SEED,
    fault: FaultRule | None = None,
    dies: str = "two",
    *,
    aside: float = ASIDE,
    lease_ms: int = LEASE_MS,
) -> Contention:
    """All writers commit, each its own customers; `dies` has a fault, and ends with it."""
    random.seed(seed)  # jitter of the engine
    scheduler = Scheduler(seed)
    found = Contention(new_world())
    writers = {
        name: found.world.open(name, s3_lease_ttl_ms=lease_ms, s3_lock_timeout_ms=10 * lease_ms)
        for name in WRITERS
    }
    for name, writer in writers.items():
        seen = found.requests.setdefault(name, [])
        if fault is not None and name == dies:
            writer.store.faults = FaultPlan([fault])
        clock = writer.store.backend.clock
        writer.store.sleep = lambda s, clock=clock: clock.sleep(s / aside)  # type: ignore[method-assign,misc]
        writer.store.on_request(partial(note, seen, scheduler, name))
        writer.store.on_request(partial(note_lock, found), when="after")
    scheduler.run({name: partial(work, found, name, w) for name, w in writers.items()})
    return found


def note(seen: list[tuple[str, str]], scheduler: Scheduler, name: str, kind: str, key: str) -> None:
    scheduler.turn(name)
    seen.append((kind, key))


def note_lock(found: Contention, kind: str, key: str) -> None:
    if (kind, key) == ("PUT_IF", layout.LOCK):
        found.locks.append(found.world.backend.objects().get(key, b"").decode())


def work(found: Contention, name: str, writer: Writer) -> None:
    for number in range(COMMITS):
        intent = {"Customer": {f"{name}-{number}": number}}
        failure = found.ledger.commit(writer, f"{name}-{number}", intent)
        if failure is not None:
            found.failures[name] = failure
            lock = found.world.backend.objects().get(layout.LOCK, b"{}").decode()
            found.held_at_death = f'"owner_id":"{name}"' in lock and '"offered"' not in lock
            return


def check(found: Contention, *, alive: Sequence[str]) -> None:
    """All that live have made their commits, soon, and left nothing."""
    verify(found.world, found.ledger)
    for name in alive:
        demand(name not in found.failures, f"{name}: {found.failures.get(name)!r}")
    expected = {f"{name}-{number}" for name in alive for number in range(COMMITS)}
    demand(expected <= {*found.ledger.acknowledged}, "somebody who lives did not commit")
    limit = SOON_S + (LEASE_MS / 1000 if found.held_at_death else 0)
    demand(found.seconds < limit, f"the others were kept for {found.seconds:.1f} s")
    left = found.world.stored_keys(layout.LINES)
    demand(len(left) <= len(WRITERS) - len(alive), f"tickets are left: {left}")


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Contention]:
    found = contend()
    with closing(found.world):
        yield found


def test_three_writers_hand_the_lock_over(undisturbed: Contention) -> None:
    check(undisturbed, alive=WRITERS)
    assert undisturbed.offers >= 3
    assert undisturbed.world.stored_keys("meta/locks/") == []


def test_who_is_next_uploads_before_it_has_the_lock() -> None:
    """In some schedules: its part is written while another still holds the lock."""
    begun_early = 0
    promise = lock_module.Lease.promise

    def count(self: lock_module.Lease, waiting: Waiting) -> None:
        nonlocal begun_early
        begun_early += 1
        promise(self, waiting)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock_module.Lease, "promise", count)
        for seed in range(3):
            with closing((found := contend(seed)).world):
                check(found, alive=WRITERS)
    assert begun_early > 0


@pytest.fixture
def missed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Offers are held without a word, as where time passes by itself; the tokens of those who have
    lost theirs, as they stood still for too long."""
    seen: list[str] = []
    hold_offer, guard = lock_module.Lease.hold_offer, lock_module.Lease.guard

    def hold(self: lock_module.Lease, state: LockState) -> bool:
        self._lock.keep_alive = True
        try:
            return hold_offer(self, state)
        finally:
            self._lock.keep_alive = False

    def guarded(self: lock_module.Lease) -> None:
        try:
            guard(self)
        except LeaseExpiredError:
            seen.append(self.token)
            raise

    monkeypatch.setattr(lock_module.Lease, "_start", lambda self, work: None)
    monkeypatch.setattr(lock_module.Lease, "hold_offer", hold)
    monkeypatch.setattr(lock_module.Lease, "guard", guarded)
    return seen


def stand_still_when_it_is_their_turn(seeds: Sequence[int]) -> None:
    """Leases last for ever, and writers are paused for longer than an offer does."""
    for seed in seeds:
        with closing((found := contend(seed, aside=1, lease_ms=600_000)).world):
            verify(found.world, found.ledger)
            demand(found.failures == {}, f"seed {seed}: {found.failures}")
            demand(len(found.ledger.acknowledged) == len(WRITERS) * COMMITS, "a commit is missing")


def test_who_misses_its_turn_waits_for_another(missed: list[str]) -> None:
    stand_still_when_it_is_their_turn([9, 10, 16, *range(100, 100 + examples(4))])
    assert len(missed) >= 3


def test_planted_a_missed_turn_that_is_an_error_is_found(
    missed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module.Lease, "on_offer", False)
    with pytest.raises(InvariantViolated, match="LeaseExpiredError"):
        stand_still_when_it_is_their_turn([9, 10, 16])


def test_commits_are_drafted_on_what_another_is_about_to_publish() -> None:
    """In some schedules: and what was foreseen wrongly is drafted again."""
    seen: list[bool] = []
    matches = ahead.matches

    def compare(foreseen: Head, head: Head) -> bool:
        seen.append(matches(foreseen, head))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "matches", compare)
        for seed in range(6):
            with closing((found := contend(seed)).world):
                check(found, alive=WRITERS)
    assert any(seen)


KINDS = (FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_one_that_dies_at_any_request_keeps_nobody(
    undisturbed: Contention, kind: FaultKind
) -> None:
    """A crash at a read leaves what a crash after the write before it leaves, and one after a
    write mostly what one before the next write leaves."""
    numbers = [
        number
        for number, (what, key) in enumerate(undisturbed.requests["two"], start=1)
        if SEARCH
        or (what not in READS and (kind is FaultKind.CRASH_BEFORE or key.startswith("meta/l")))
    ]
    held = 0
    for number in numbers:
        found = contend(fault=FaultRule(Fault(kind), nth=number))
        with closing(found.world):
            assert "two" in found.failures, f"request {number} was never made"
            check(found, alive=("one", "three"))
            held += found.held_at_death
            if SEARCH or number == numbers[-1]:
                recover(found.world, found.ledger, "after", {"Customer": {"z": 1}})
    assert 0 < held < len(numbers)


@pytest.mark.parametrize("seed", range(examples(6)))
def test_one_that_is_paused_or_unheard_at_any_time(seed: int) -> None:
    """Answers get lost, writes land late, a writer stands still: nothing is lost or made twice."""
    faults = (FaultKind.RESPONSE_LOST, FaultKind.DELAYED, FaultKind.TIMEOUT, FaultKind.SLOW)
    fault = Fault(faults[seed % len(faults)], seconds=2.0)
    keys = ("meta/locks/*", f"{layout.LINES}*")
    rule = FaultRule(fault, "WRITE", keys[seed % 2], nth=1 + seed % 3, times=2)
    found = contend(seed, fault=rule)
    with closing(found.world):
        found.world.backend.land_all()
        verify(found.world, found.ledger)
        assert found.failures == {}
        recover(found.world, found.ledger, "after", {"Customer": {"z": 1}})
