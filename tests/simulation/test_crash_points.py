"""Every durable request of a commit is a point to crash at: all are tried, before and after.

Writes are also left unanswered, delayed past the next commit, and paused while a rival commits.
The planted defects at the end show that each invariant can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import pytest

from storage_engine.commitlog import layout, swap
from storage_engine.commitlog.json_object import Lost, Won, write_conditionally
from storage_engine.commitlog.lock import Lease
from storage_engine.commitlog.series import Series
from storage_engine.commitlog.swap import Swap
from storage_engine.errors import LeaseExpiredError
from storage_engine.objectstore.memory import MemoryBackend, MemoryStore
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.objectstore.protocol import PreconditionFailed as Refused
from storage_engine.testing.faults import READS, Fault, FaultKind, FaultPlan, FaultRule
from tests.commitlog.support import LEASE_TTL_MS, World, Writer, at, new_world
from tests.simulation.harness import (
    Intent,
    InvariantViolated,
    Ledger,
    go_on,
    index_problems,
    leftovers,
    recover,
    verify,
)

pytestmark = pytest.mark.simulation


@dataclass(frozen=True)
class Scenario:
    """A commit that is interrupted, on top of commits that were not."""

    name: str
    engine_version: str
    before: tuple[Intent, ...]
    intent: Intent
    bulk: bool = False
    checkpoint_interval: int = 100
    more: tuple[Intent, ...] = ()  # published together with it

    def __str__(self) -> str:
        return f"{self.name}-{self.engine_version}"


_BASE: Intent = {"Customer": {"a": 1, "b": 1}}
_CHANGE: Intent = {"Customer": {"a": 2, "b": 1, "c": 2}}
_AFTER: Intent = {"Customer": {"a": 3, "z": 3}, "Product": {"p": 3}}

SCENARIOS = [
    Scenario(name, version, **spec)  # type: ignore[arg-type]
    for version in ("v1", "v2")
    for name, spec in {
        "small": {"before": (_BASE,), "intent": _CHANGE},
        "bulk": {"before": (_BASE,), "intent": _CHANGE, "bulk": True},
        "bulk-first": {"before": (), "intent": _CHANGE, "bulk": True},
        "registering": {
            "before": (_BASE,),
            "intent": {"Customer": {"a": 2}, "Product": {"p": 1, "q": 1}},
        },
        "checkpoint": {
            "before": (_BASE, {"Product": {"p": 1}}),
            "intent": _CHANGE,
            "checkpoint_interval": 3,
        },
        "group": {
            "before": (_BASE,),
            "intent": _CHANGE,
            "more": ({"Product": {"p": 1}}, {"Customer": {"a": 1}, "Product": {"p": 1, "q": 1}}),
            "checkpoint_interval": 3,
        },
    }.items()
]


class Stage:
    """The state before the interrupted commit, made once and copied for every run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.ledger = Ledger()
        with closing(new_world(scenario.engine_version)) as world:
            writer = world.open("before", checkpoint_interval=scenario.checkpoint_interval)
            for number, intent in enumerate(scenario.before):
                assert self.ledger.commit(writer, f"before-{number}", intent) is None
            self.objects = world.backend.objects()
        self.requests = self._count()

    def _count(self) -> list[tuple[str, str]]:
        """(kind, key) of every request of an undisturbed commit."""
        seen: list[tuple[str, str]] = []
        with self.run() as (world, ledger, writer):
            writer.store.on_request(lambda kind, key: seen.append((kind, key)))
            assert self.commit(ledger, writer) is None
            verify(world, ledger)
            assert leftovers(world) == []
        return seen

    def commit(self, ledger: Ledger, writer: Writer) -> BaseException | None:
        scenario = self.scenario
        if not scenario.more:
            return ledger.commit(writer, "interrupted", scenario.intent, bulk=scenario.bulk)
        together = {"interrupted": scenario.intent}
        together |= {f"beside-{n}": intent for n, intent in enumerate(scenario.more)}
        return ledger.commit_together(writer, together)

    def run(self) -> Run:
        return Run(self)

    @property
    def cas(self) -> int:
        """The number of the head CAS (from 1)."""
        return self.requests.index(("PUT_IF", layout.HEAD)) + 1

    @property
    def acquired(self) -> int:
        """The number of the request that takes the lock."""
        return self.requests.index(("PUT_IF", layout.LOCK)) + 1


class Run:
    """A copy of the stage, with a writer that is about to commit."""

    def __init__(self, stage: Stage) -> None:
        backend = MemoryBackend("simulation")
        for key, data in stage.objects.items():
            backend.write(key, data)
        self.world = World(backend, stage.scenario.engine_version)
        known = stage.ledger
        self.ledger = Ledger(dict(known.intents), dict(known.acknowledged))
        interval = stage.scenario.checkpoint_interval
        self.writer = self.world.open("writer", checkpoint_interval=interval)

    def __enter__(self) -> tuple[World, Ledger, Writer]:
        return self.world, self.ledger, self.writer

    def __exit__(self, *_: object) -> None:
        self.world.close()


@pytest.fixture(scope="module", params=SCENARIOS, ids=str)
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(request.param)


def plan(kind: FaultKind, number: int, **fault: float) -> FaultPlan:
    return FaultPlan([FaultRule(Fault(kind, **fault), nth=number)])  # type: ignore[arg-type]


def writes(stage: Stage) -> list[int]:
    """The numbers of the requests that change something."""
    return [n for n, (kind, _) in enumerate(stage.requests, start=1) if kind not in READS]


# -- crashes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
def test_rfc0004_03_failure_injection_crash_at_every_durable_request(
    stage: Stage, kind: FaultKind
) -> None:
    """A crash at a read leaves what a crash after the write before it leaves."""
    for number in writes(stage):
        with stage.run() as (world, ledger, writer):
            writer.store.faults = plan(kind, number)
            stage.commit(ledger, writer)
            assert writer.store.crashed, f"request {number} was never made"
            landed = number > stage.cas or (number == stage.cas and kind is FaultKind.CRASH_AFTER)
            assert ("interrupted" in world.marks()) == landed, f"at {stage.requests[number - 1]}"
            missing = {*ledger.intents} - {*world.marks()}
            assert landed == (not missing), "all that were published together, or none"
            recover(world, ledger, "after", _AFTER, queries=number in {stage.cas, stage.cas + 1})
            assert index_problems(world) == []


def test_rfc0004_03_failure_injection_crash_before_head_update(stage: Stage) -> None:
    """The orphans are there, nobody sees them, and the lock of the dead writer is taken over."""
    with stage.run() as (world, ledger, writer):
        head = world.head()
        writer.store.faults = plan(FaultKind.CRASH_BEFORE, stage.cas)
        stage.commit(ledger, writer)
        assert world.head() == head
        assert any(key.startswith("commits/") for key in world.orphans())
        orphans = set(world.orphans())
        recover(world, ledger, "after", _AFTER)
        assert orphans == set(world.orphans()), "nobody but garbage collection touches them"


def test_rfc0004_03_failure_injection_crash_after_head_update(stage: Stage) -> None:
    """The commit stands; its indices lag until the next commit."""
    with stage.run() as (world, ledger, writer):
        writer.store.faults = plan(FaultKind.CRASH_AFTER, stage.cas)
        stage.commit(ledger, writer)
        assert "interrupted" in world.marks()
        assert index_problems(world) != []
        recover(world, ledger, "after", _AFTER)
        assert index_problems(world) == []


def test_rfc0004_03_failure_injection_stale_lock_takeover(stage: Stage) -> None:
    """A dead writer's lock holds others off until its lease ends, and not longer."""
    with stage.run() as (world, ledger, writer):
        writer.store.faults = plan(FaultKind.CRASH_AFTER, stage.acquired)
        stage.commit(ledger, writer)
        impatient = world.open("impatient", s3_lock_timeout_ms=100)
        refused = ledger.commit(impatient, "too early", _AFTER)
        assert type(refused).__name__ == "LockContentionError"
        patient = world.open("patient", s3_lock_timeout_ms=2 * LEASE_TTL_MS)
        assert ledger.commit(patient, "later", _AFTER) is None
        verify(world, ledger)


# -- answers that get lost ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FaultKind.RESPONSE_LOST, FaultKind.TIMEOUT, FaultKind.DELAYED])
def test_an_unanswered_write_is_acknowledged_or_refused_truly(
    stage: Stage, kind: FaultKind
) -> None:
    for number in writes(stage):
        with stage.run() as (world, ledger, writer):
            writer.store.faults = plan(kind, number, seconds=3600)
            stage.commit(ledger, writer)
            assert ledger.unknown == set(), "the store answers in the end, so all can be settled"
            if stage.requests[number - 1][0] != "PUT":  # an upload that fails is not tried again
                assert "interrupted" in ledger.acknowledged
            go_on(world, ledger, "after", _AFTER)
            if kind is FaultKind.DELAYED:
                world.backend.land_all()  # on top of the next commit
                go_on(world, ledger, "last", {"Customer": {"a": 4}})
            verify(world, ledger)


@pytest.mark.parametrize("kind", [FaultKind.UNAVAILABLE])
def test_a_failed_read_is_acknowledged_or_refused_truly(stage: Stage, kind: FaultKind) -> None:
    for number in sorted(set(range(1, len(stage.requests) + 1)) - set(writes(stage))):
        with stage.run() as (world, ledger, writer):
            writer.store.faults = plan(kind, number)
            stage.commit(ledger, writer)
            assert ledger.unknown == set()
            recover(world, ledger, "after", _AFTER)


# -- pauses ---------------------------------------------------------------------------------------


def pause_for_rival(world: World, ledger: Ledger, rival: Writer) -> Callable[[], None]:
    def act() -> None:
        world.pass_lease()
        assert ledger.commit(rival, "rival", {"Customer": {"a": 9, "r": 9}}) is None

    return act


def test_a_writer_paused_past_its_lease_at_any_request(stage: Stage) -> None:
    """Meanwhile a rival takes over and commits the same type."""
    for number, (kind, key) in enumerate(stage.requests, start=1):
        with stage.run() as (world, ledger, writer):
            rival = world.open("rival")
            act = pause_for_rival(world, ledger, rival)
            left = [number]

            def pause(_kind: str, _key: str, left: list[int] = left, act: Callable = act) -> None:
                left[0] -= 1
                if left[0] == 0:
                    act()

            writer.store.on_request(pause)
            failure = stage.commit(ledger, writer)
            if stage.acquired <= number < stage.cas:
                assert isinstance(failure, LeaseExpiredError), f"paused at {kind} {key}"
            else:
                assert failure is None, f"paused at {kind} {key}: {failure!r}"
            go_on(world, ledger, "after", _AFTER)
            verify(world, ledger)
            assert index_problems(world) == []


# -- planted defects: each invariant can fail -----------------------------------------------------


def named(name: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if str(scenario) == name)


@pytest.fixture
def small() -> Stage:
    return Stage(named("small-v2"))


@pytest.fixture
def bulk() -> Stage:
    return Stage(named("bulk-v2"))


def test_planted_an_unconditional_cas_loses_a_commit(
    small: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = MemoryStore.put_if_match

    def careless(self: MemoryStore, key: str, data: bytes, etag: str, *, write_id: str) -> str:
        if key == layout.HEAD:
            self.put(key, data)
            return self.get(key).etag
        return original(self, key, data, etag, write_id=write_id)

    with small.run() as (world, ledger, writer):
        at(
            writer.store,
            "PUT_IF",
            layout.HEAD,
            pause_for_rival(world, ledger, world.open("rival")),
        )
        small.commit(ledger, writer)
        verify(world, ledger)  # as it should be

    monkeypatch.setattr(MemoryStore, "put_if_match", careless)
    with small.run() as (world, ledger, writer):
        at(writer.store, "PUT", layout.HEAD, pause_for_rival(world, ledger, world.open("rival")))
        small.commit(ledger, writer)
        with pytest.raises(InvariantViolated, match="rival was acknowledged as"):
            verify(world, ledger)


def test_planted_trusting_a_412_as_lost_denies_a_published_commit(
    small: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(
        store: ObjectStore, key: str, data: bytes, *, write_id: str, etag: str | None
    ) -> Won | Lost:
        if key != layout.HEAD or etag is None:
            return write_conditionally(store, key, data, write_id=write_id, etag=etag)
        try:
            return Won(store.put_if_match(key, data, etag, write_id=write_id))
        except Refused:
            return Lost(store.get(key))

    def our_own_412(world: World, ledger: Ledger, writer: Writer) -> None:
        writer.fail(FaultKind.PRECONDITION, "PUT_IF", layout.HEAD, applied=True)
        small.commit(ledger, writer)
        verify(world, ledger)

    with small.run() as run:
        our_own_412(*run)

    monkeypatch.setattr(swap, "write_conditionally", trusting)
    monkeypatch.setattr(Swap, "_is_ancestor", lambda *_: False)
    with small.run() as run, pytest.raises(InvariantViolated):
        our_own_412(*run)


def test_planted_taking_unknown_for_lost_deletes_what_is_reachable(
    bulk: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guessing(store: ObjectStore, key: str, data: bytes, **kwargs: str) -> Won | Lost:
        try:
            return Won(store.put_if_match(key, data, kwargs["etag"], write_id=kwargs["write_id"]))
        except Exception:  # noqa: BLE001
            return Lost(None)

    monkeypatch.setattr(swap, "write_conditionally", guessing)
    with bulk.run() as (world, ledger, writer):
        writer.fail(FaultKind.RESPONSE_LOST, "PUT_IF", layout.HEAD)
        bulk.commit(ledger, writer)
        with pytest.raises(InvariantViolated):
            verify(world, ledger)


def test_planted_head_before_data_shows_a_partial_commit(
    small: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, swing = Swap._upload, Swap._swap

    def then_upload(self: Swap) -> None:
        swing(self)
        upload(self)

    monkeypatch.setattr(Swap, "_upload", lambda self: True)
    monkeypatch.setattr(Swap, "_swap", then_upload)
    with small.run() as (world, ledger, writer):
        small.commit(ledger, writer)
        verify(world, ledger)  # without a crash nobody notices
    with small.run() as (world, ledger, writer):
        writer.fail(FaultKind.CRASH_AFTER, "PUT_IF", layout.HEAD)
        small.commit(ledger, writer)
        with pytest.raises(InvariantViolated, match="missing"):
            verify(world, ledger)


def test_planted_a_removed_guard_lets_an_expired_writer_go_on(
    small: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lease, "guard", lambda self: None)
    with pytest.raises(AssertionError, match="paused at"):
        test_a_writer_paused_past_its_lease_at_any_request(small)


def test_planted_ids_with_gaps_are_seen(small: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Series, "next_id", property(lambda self: self.head.commit_id + 2))
    with small.run() as (world, ledger, writer):
        small.commit(ledger, writer)
        with pytest.raises(InvariantViolated, match="gaps"):
            verify(world, ledger)


def test_planted_a_stale_delta_is_seen(small: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reusing the first evaluation on a head that has moved rewrites what a rival has done."""
    from storage_engine.repository.object.write.commit import CommitRun

    evaluate = CommitRun._evaluate

    def once(self: CommitRun, version: object, drafted: object) -> object:
        return self._last or evaluate(self, version, drafted)  # type: ignore[arg-type]

    monkeypatch.setattr(CommitRun, "_evaluate", once)
    with small.run() as (world, ledger, writer):
        rival = world.open("rival")
        at(
            writer.store,
            "PUT_IF",
            layout.LOCK,
            lambda: ledger.commit(rival, "rival", small.scenario.intent),
        )
        small.commit(ledger, writer)
        with pytest.raises(InvariantViolated, match="changes nothing"):
            verify(world, ledger)


def test_planted_a_forgotten_acknowledgement_is_seen(small: Stage) -> None:
    with small.run() as (world, ledger, writer):
        small.commit(ledger, writer)
        ledger.acknowledged["lost"] = 3
        with pytest.raises(InvariantViolated, match="lost was acknowledged"):
            verify(world, ledger)
