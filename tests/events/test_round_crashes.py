"""Rounds that publish together: a crash at every request, and workers in any order with faults."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from storage_engine import HandlerContext, Session, on_event
from storage_engine.commitlog import layout
from storage_engine.events.outcomes import Success
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.object.write.commit import CommitRun
from storage_engine.repository.protocol import CommitRequest
from storage_engine.runtime import worker as worker_module
from storage_engine.testing.faults import READS, Fault, FaultKind, FaultPlan, FaultRule
from tests.campaigns import examples
from tests.events.fuzz import LONG
from tests.events.life import LEASE_MS, Broken, Invoice, Ordered, Shop, copy_of, new_shop
from tests.simulation.schedule import Scheduler

pytestmark = pytest.mark.simulation

EVENTS = 3
HANDLERS = {"bill", "sum"}


class Round(Shop):
    """A shop whose events come together, so that commits of their handlers go together."""

    def handlers(self) -> list[Any]:
        @on_event(Ordered, id="bill", priority=200)
        def bill(ctx: HandlerContext[Ordered]) -> None:
            """Writes, and looks at nothing. One is refused when it is published."""
            self.note("bill", ctx.event)
            # Another row each time: a second commit for the event would be seen.
            ctx.ensure(Invoice(id=ctx.event.id, n=self.ran["bill", ctx.event.id]))
            if ctx.event.n == 1 and self.ran["bill", ctx.event.id] == 1:
                ctx.commit(expect={Invoice: 10**6})

        @on_event(Ordered, id="sum")
        def add_up(ctx: HandlerContext[Ordered]) -> None:
            """Looks at what those before it have left."""
            self.note("sum", ctx.event)
            ctx.ensure(Invoice(id="sum", n=self.total(ctx.session) + 1))

        return [bill, add_up]

    @staticmethod
    def total(session: Session) -> int:
        found = session.query().entities(Invoice).where(Invoice.id == "sum").first()
        return found.n if found is not None else 0

    def send(self) -> None:
        with self.process("sender") as session:
            session.emit([Ordered(id=f"o{n}", n=n) for n in range(EVENTS)])

    def live(self, session: Session) -> None:
        self.drain(session)

    def verify(self, *, alone: bool = True) -> None:
        """Each event is handled by one commit of each handler, or dead; and is in the sum once,
        unless workers are not `alone`: then what one has read may be old when it writes."""
        claims = self.claims()
        for event_id, handlers in self.promised.items():
            for handler_id in handlers:
                claim = claims.get((event_id, handler_id))
                if claim is None or not (claim["ack_at"] or claim["dead_lettered_at"]):
                    raise Broken(f"{event_id} was not finished for {handler_id}: {claim}")
        twice = {name: count for name, count in self.acks().items() if count > 1}
        if twice:
            raise Broken(f"handled by two commits: {twice}")
        acked = {name for name, claim in claims.items() if claim["ack_at"]}
        with self.process("reader") as session:
            rows = {row.id: row.n for row in session.query().entities(Invoice).collect()}
        for event_id, handler_id in acked - set(self.acks()):
            if handler_id == "bill" or alone:
                raise Broken(f"{event_id} is acked for {handler_id}, and no commit has done it")
        if set(rows) - {"sum"} != {event_id for event_id, by in acked if by == "bill"}:
            raise Broken(f"the rows are {rows}, and acked are {acked}")
        if alone and rows["sum"] != sum(by == "sum" for _, by in acked):
            raise Broken(f"the sum is {rows['sum']}, and acked are {acked}")


@functools.cache
def sent() -> dict[str, bytes]:
    shop = Round(new_shop().world)
    shop.send()
    return shop.world.backend.objects()


def new_round() -> Round:
    return Round(copy_of(sent()).world, {f"o{n}": HANDLERS for n in range(EVENTS)})


@functools.cache
def requests() -> list[tuple[str, str]]:
    """(kind, key) of every request of a worker's undisturbed life, which ends well."""
    shop, seen = new_round(), []
    with shop.process("first") as session:
        shop.world.writers[-1].store.on_request(lambda kind, key: seen.append((kind, key)))
        shop.live(session)
    shop.go_on(3)
    shop.verify()
    assert {shop.ran["sum", f"o{n}"] for n in range(EVENTS)} == {1}
    assert [shop.ran["bill", f"o{n}"] for n in range(EVENTS)] == [1, 2, 1]  # refused, alone
    return seen


def test_commits_of_a_round_go_together() -> None:
    """Eight of them write head less often: a reader in between ends a chain."""
    written = [key for kind, key in requests() if kind.startswith("PUT")]
    assert sum(key.endswith("manifest.json") for key in written) >= 2 * EVENTS - 1
    assert sum(key == layout.HEAD for key in written) <= EVENTS + 1


def interrupted(kind: FaultKind, number: int) -> Round:
    shop = new_round()
    plan = FaultPlan([FaultRule(Fault(kind), nth=number)])
    with shop.process("first", plan) as session:
        shop.live(session)
    return shop


@pytest.mark.parametrize(
    "kind",
    [FaultKind.CRASH_AFTER, *([FaultKind.CRASH_BEFORE, FaultKind.RESPONSE_LOST] if LONG else [])],
)
def test_a_round_that_is_interrupted_anywhere_loses_and_repeats_nothing(kind: FaultKind) -> None:
    for number, (request, key) in enumerate(requests(), start=1):
        if request in READS and not LONG:
            continue
        shop = interrupted(kind, number)
        try:
            shop.go_on(3)
            shop.verify()
        except Broken as broken:
            raise AssertionError(f"{kind.value} at {request} {key}: {broken}") from broken
        finally:
            shop.world.close()


# -- two workers, in any order, with faults -------------------------------------------------------

CHANCES = {
    FaultKind.CRASH_BEFORE: 0.002,
    FaultKind.CRASH_AFTER: 0.002,
    FaultKind.RESPONSE_LOST: 0.01,
    FaultKind.TIMEOUT: 0.004,
    FaultKind.CONFLICT: 0.01,
    FaultKind.SERVER_ERROR: 0.004,
}


def two_workers(seed: int) -> Round:
    """Two at once; now and then one is paused for longer than its leases."""
    random.seed(seed)
    shop, scheduler, chance = new_round(), Scheduler(seed), random.Random(seed)

    def worker(name: str) -> Callable[[], None]:
        def request(kind: str, key: str) -> None:
            scheduler.turn(name)
            if chance.random() < 0.003:
                shop.world.backend.clock.sleep(LEASE_MS / 1000 + 1)

        def work() -> None:
            plan = FaultPlan(seed=seed, probabilities=CHANCES, limit=6)
            with shop.process(name, plan) as session:
                store = next(w.store for w in shop.world.writers if w.store.name == name)
                store.on_request(request)
                shop.drain(session)

        return work

    scheduler.run({name: worker(name) for name in ("one", "two")})
    return shop


def broken(seed: int) -> str | None:
    shop = two_workers(seed)
    try:
        shop.go_on(3)
        shop.verify(alone=False)
    except Broken as found:
        return str(found)
    finally:
        shop.world.close()
    return None


def test_two_workers_in_any_order_never_handle_an_acked_event_again() -> None:
    for seed in range(examples(5)):
        found = broken(seed)
        assert found is None, f"seed {seed}: {found}"


def test_planted_nobody_asks_the_log_whether_another_has_handled_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random orders find what a crash does not: two workers that both publish for one event."""
    plant(monkeypatch, CommitRun, "_check_acks", lambda *_: None)
    assert any(broken(seed) for seed in range(20, 620))  # one in fifty


# -- the invariants can fail: each defect is planted and found ------------------------------------


def found_by_a_crash() -> bool:
    for number in [n for n, (kind, _) in enumerate(requests(), start=1) if kind not in READS]:
        shop = interrupted(FaultKind.CRASH_AFTER, number)
        try:
            shop.go_on(3)
            shop.verify()
        except Broken:
            return True
        finally:
            shop.world.close()
    return False


def plant(monkeypatch: pytest.MonkeyPatch, target: object, name: str, new: Callable) -> None:
    requests()  # of the right code
    monkeypatch.setattr(target, name, new)


def test_planted_acked_before_it_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settled when the handler has ended: a crash leaves acks of commits that never were."""

    def settle(self: Any, claim: Any, publishing: Any) -> None:
        self._settle(claim, Success())  # at once
        add(self, claim, publishing)

    from storage_engine.events.publications import Publications

    add = Publications.add
    plant(monkeypatch, Publications, "add", settle)
    assert found_by_a_crash()


def test_planted_an_ack_rides_with_the_commit_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if acks were of the group rather than of each: where its own commit is refused, the ack
    stands without it."""
    submit = ObjectRepository.submit
    last: list[Any] = []

    def early(self: ObjectRepository, request: CommitRequest) -> Any:
        if request.acks and last and not last[-1].done:
            before = last[-1]
            before.request = replace(before.request, acks=(*before.request.acks, *request.acks))
            request = replace(request, acks=())
        last.append(submit(self, request))
        return last[-1]

    plant(monkeypatch, ObjectRepository, "submit", early)
    assert found_by_a_crash()


def test_planted_a_commit_loses_its_ack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published without it: who takes the event over finds nothing in the log, and handles it."""
    submit = ObjectRepository.submit

    def without(self: ObjectRepository, request: CommitRequest) -> Any:
        return submit(self, replace(request, acks=()))

    plant(monkeypatch, ObjectRepository, "submit", without)
    assert found_by_a_crash()


def test_planted_readers_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that looks too early misses what the one before it has left."""
    plant(monkeypatch, worker_module.EventWorker, "catch_up", lambda self: None)
    shop = new_round()
    with shop.process("first") as session:
        shop.live(session)
    shop.go_on(3)
    with pytest.raises(Broken):
        shop.verify()
    shop.world.close()
