"""A process that is paused for minutes at any request of sending: what it promised is delivered.

An event's key carries a time, and consumers look for late arrivals only so far back. Whoever sends
an event must therefore notice that it came too late, and send it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.errors import StorageBackendError
from storage_engine.events.protocol import EventStore, Subscription
from storage_engine.events.records import Failure
from storage_engine.objectstore.memory import MemoryStore, SimulatedCrash
from storage_engine.objectstore.metering import RequestMeter
from storage_engine.repository.object import outbox
from storage_engine.repository.protocol import CommitRequest
from storage_engine.testing.faults import Fault, FaultKind, FaultPlan, FaultRule
from tests.commitlog.support import World, Writer, at, new_world
from tests.events.support import BILL, NAMESPACE, SHIP, Bus, ids, order, take_all
from tests.events.test_late import drained, slow_commit, store_of

PAUSE = 1200.0
Send = Callable[[EventStore], None]


def send_one(store: EventStore) -> None:
    store.enqueue([order("one")])


def send_three(store: EventStore) -> None:
    store.enqueue([order(n) for n in range(3)])


def fire(store: EventStore) -> None:
    """A due time of a schedule."""
    due = store.now() - timedelta(seconds=30)
    store.enqueue_once(order("due", created_at=due))


def sent_by(send: Send) -> list[str]:
    return {
        "send_one": ["order-one"],
        "send_three": ["order-0", "order-1", "order-2"],
        "fire": ["order-due"],
    }[send.__name__]


def requests_of(send: Send) -> list[tuple[str, str]]:
    world, seen = new_world(), []
    writer = world.open("sender")
    writer.store.on_request(lambda kind, key: seen.append((kind, key)))
    send(store_of(writer))
    world.close()
    return seen


def at_request(store: MemoryStore, number: int, action: Callable[[], object], when: str) -> None:
    """Do `action` at the client's request of that number, from now on."""
    seen = [0]

    def hook(kind: str, key: str) -> None:
        seen[0] += 1
        if seen[0] == number:
            action()

    store.on_request(hook, when=when)


def pause(world: World, handled: Counter[str]) -> None:
    """Others go on for long, and their watermarks move."""
    for _ in range(2):
        handled.update(drained(world))
        world.backend.clock.sleep(PAUSE / 2)
    handled.update(drained(world))


def started(world: World) -> Counter[str]:
    """A handler that has come to its place before."""
    store_of(world.open("before")).enqueue([order("before")])
    return Counter(drained(world))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("send", [send_one, send_three, fire])
def test_a_pause_at_any_request_loses_nothing_and_repeats_nothing(send: Send, when: str) -> None:
    for number in range(1, len(requests_of(send)) + 1):
        world = new_world()
        handled = started(world)
        writer = world.open("sender")
        at_request(writer.store, number, lambda w=world, h=handled: pause(w, h), when)  # type: ignore[misc]
        send(store_of(writer))
        handled.update(drained(world))
        world.backend.clock.sleep(PAUSE)
        handled.update(drained(world))
        assert handled == Counter(["order-before", *sent_by(send)]), number
        world.close()


def test_a_running_worker_gets_it_too() -> None:
    world = new_world()
    worker = store_of(world.open("worker")).consumer(NAMESPACE, (BILL,), "worker")
    sender = world.open("sender")

    def meanwhile() -> None:
        for _ in range(30):
            assert take_all(worker) == []
            world.backend.clock.sleep(60)

    at(sender.store, "PUT", "events/*", meanwhile)
    store_of(sender).enqueue([order("late")])
    claims = take_all(worker)
    assert ids(claims) == ["order-late"]
    assert worker.ack(claims) == [True]
    world.backend.clock.sleep(60)
    assert take_all(worker) == []
    assert len(world.stored_keys(layout.events(NAMESPACE) + "2026")) == 1, "the late one is gone"
    world.close()


@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
def test_a_crash_at_any_request_after_a_pause_is_mended_by_sending_again(kind: FaultKind) -> None:
    """Not promised, so it may be there or not; sent again under its id, it is handled once."""
    for number in range(1, 4):
        world = new_world()
        handled = started(world)
        writer = world.open("sender")
        at_request(writer.store, 1, lambda w=world, h=handled: pause(w, h), "before")  # type: ignore[misc]
        writer.store.faults = FaultPlan([FaultRule(Fault(kind), nth=number)])
        with suppress(SimulatedCrash):
            send_one(store_of(writer))
        assert writer.store.crashed
        handled.update(drained(world))
        world.backend.clock.sleep(PAUSE)
        send_one(store_of(world.open("again")))
        handled.update(drained(world))
        assert handled == Counter(["order-before", "order-one"]), number


def test_pauses_again_and_again() -> None:
    world = new_world()
    handled = started(world)
    writer = world.open("sender")
    at(writer.store, "PUT", "events/*", lambda: pause(world, handled), times=3)
    send_one(store_of(writer))
    handled.update(drained(world))
    assert handled == Counter(["order-before", "order-one"])
    world.close()


def test_a_process_that_is_never_in_time_is_told() -> None:
    world = new_world()
    writer = world.open("sender")
    at(writer.store, "PUT", "events/*", lambda: world.backend.clock.sleep(PAUSE), times=None)

    with pytest.raises(StorageBackendError, match=r"order-one.*in time") as raised:
        send_one(store_of(writer))
    assert raised.value.retryable
    world.close()


def test_late_objects_that_cannot_be_removed_do_no_harm() -> None:
    world = new_world()
    handled = started(world)
    writer = world.open("sender")
    writer.fail(FaultKind.UNAVAILABLE, "DELETE", "events/*", times=None)
    at(writer.store, "PUT", "events/*", lambda: pause(world, handled))
    send_one(store_of(writer))
    handled.update(drained(world))
    handled.update(drained(world, 0.0, BILL, SHIP))  # a new handler sees both of the objects
    assert handled == Counter({"order-before": 2, "order-one": 2})
    listed = [info.envelope["id"] for info in store_of(writer).list_events(NAMESPACE, 10)]
    assert listed == ["order-one", "order-before"]
    world.close()


def test_a_batch_that_takes_minutes_is_sent_once() -> None:
    world = new_world()
    handled = started(world)
    writer = world.open("sender")
    writer.fail(FaultKind.SLOW, "PUT", "events/*", times=None, seconds=10.0)
    before = writer.store.meter.snapshot()
    store_of(writer).enqueue([order(n) for n in range(60)])
    assert spent(writer.store.meter, before) == {"PUT": 60}
    handled.update(drained(world))
    assert handled == Counter(["order-before", *(f"order-{n}" for n in range(60))])
    world.close()


def spent(meter: RequestMeter, before: dict[str, int]) -> dict[str, int]:
    after = meter.snapshot()
    kinds = {k: n - before.get(k, 0) for k, n in after.items() if k.isupper()}
    return {k: n for k, n in kinds.items() if n}


def test_planted_nobody_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "is_late", lambda *_: False)
    with pytest.raises(AssertionError):
        test_a_pause_at_any_request_loses_nothing_and_repeats_nothing(send_one, "before")


# -- dead letters and redrives --------------------------------------------------------------------

TOLD = "event.dead_letter"


def dying(world: World) -> tuple[Writer, Any, Any]:
    """A worker whose next failure is the last."""
    store_of(world.open("producer")).enqueue([order("bad")])
    writer = world.open("worker")
    worker = store_of(writer).consumer(NAMESPACE, (BILL,), "worker")
    (claim,) = worker.claim(10)
    return writer, worker, claim


def told(world: World) -> list[str]:
    """What a handler of dead letters gets, in a worker's whole life."""
    listener = Subscription("listener", frozenset({TOLD}))
    return drained(world, 0.0, listener)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pause_at_any_request_of_a_burial(when: str) -> None:
    for number in range(1, 4):
        world = new_world()
        assert told(world) == []
        writer, worker, claim = dying(world)
        letters: list[str] = []

        def meanwhile(world: World = world, letters: list[str] = letters) -> None:
            for _ in range(2):
                world.backend.clock.sleep(PAUSE / 2)
                letters.extend(told(world))

        at_request(writer.store, number, meanwhile, when)
        worker.release([Failure(claim, "broken", retry=False)])
        letters += told(world)
        world.backend.clock.sleep(PAUSE)
        letters += told(world)
        assert len(letters) == 1, (number, when)
        assert len(store_of(writer).list_dead_letters(NAMESPACE, 10)) == 1
        world.close()


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
def test_a_burial_that_is_paused_and_then_dies_is_finished_by_another(
    kind: FaultKind, number: int
) -> None:
    world = new_world()
    letters = told(world)
    writer, worker, claim = dying(world)

    def meanwhile() -> None:
        for _ in range(2):
            world.backend.clock.sleep(PAUSE / 2)
            letters.extend(told(world))

    at_request(writer.store, 2, meanwhile, "before")
    writer.store.faults = FaultPlan([FaultRule(Fault(kind), nth=number)])
    with suppress(SimulatedCrash):
        worker.release([Failure(claim, "broken", retry=False)])
    for _ in range(4):
        world.backend.clock.sleep(60)
        # Whoever handles it meets the dead claim, or one that is not dead if that did not land.
        other = store_of(world.open("other")).consumer(NAMESPACE, (BILL,), "other")
        claims = take_all(other)
        assert not claims or (kind, number) == (FaultKind.CRASH_BEFORE, 1)
        other.release([Failure(claim, "broken", retry=False) for claim in claims])
        letters += told(world)
    assert len(letters) == 1
    assert len(store_of(world.open("reader")).list_dead_letters(NAMESPACE, 10)) == 1


def test_a_pause_at_any_request_of_a_redrive() -> None:
    for number in range(1, 7):
        world = new_world()
        handled = started(world)
        _, worker, claim = dying(world)
        worker.release([Failure(claim, "broken", retry=False)])
        admin = world.open("admin")
        store = store_of(admin)
        (letter,) = store.list_dead_letters(NAMESPACE, 10)
        at_request(admin.store, number, lambda w=world, h=handled: pause(w, h), "before")  # type: ignore[misc]
        copy = store.redrive(letter)
        assert copy is not None
        handled.update(drained(world))
        world.backend.clock.sleep(PAUSE)
        handled.update(drained(world))
        assert handled == Counter(["order-before", copy["id"]]), number
        world.close()


# -- events of commits ----------------------------------------------------------------------------


def test_a_late_commit_reaches_a_handler_that_starts_beside_a_new_one() -> None:
    """The new handler has no position, and others have projected the commit meanwhile: the walk
    must still begin where the old handler has come to."""
    world = new_world()
    producer = world.open("producer")
    store_of(producer).enqueue([order("first")])

    def meanwhile() -> None:
        assert drained(world) == ["order-first"]
        world.backend.clock.sleep(3600)
        assert drained(world) == []

    slow_commit(world, meanwhile, crash=False)
    drained(world, 0.0, SHIP)  # knows the commit, and says that it is projected
    new = Subscription("new", frozenset({"OrderPlaced"}))
    worker = store_of(world.open("both")).consumer(NAMESPACE, (BILL, new), "both")
    claims = take_all(worker)
    assert Counter((c.event_id, c.handler_id) for c in claims) == Counter(
        [("order-late", BILL.handler_id), ("order-late", "new"), ("order-first", "new")]
    )
    world.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pause_at_any_request_of_a_commit_with_an_event(when: str) -> None:
    """The committer is paused at each of its requests, and the projection is late."""

    def commit(writer: Writer) -> None:
        writer.repo.commit(CommitRequest([], events=[order("committed")]))
        writer.repo.flush()

    world, seen = new_world(), []
    counted = world.open("counted", s3_lease_ttl_ms=10_000_000)
    counted.store.on_request(lambda kind, key: seen.append(key))
    commit(counted)
    world.close()
    for number in range(1, len(seen) + 1):
        world = new_world()
        handled = started(world)
        writer = world.open("writer", s3_lease_ttl_ms=10_000_000)
        at_request(writer.store, number, lambda w=world, h=handled: pause(w, h), when)  # type: ignore[misc]
        commit(writer)
        handled.update(drained(world))
        world.backend.clock.sleep(PAUSE)
        handled.update(drained(world, 0.0, BILL, SHIP))
        assert handled == Counter({"order-before": 2, "order-committed": 2}), (number, seen)
        world.close()


# -- SQLite ---------------------------------------------------------------------------------------


def test_what_is_sent_long_after_it_was_made_is_not_skipped(bus: Bus) -> None:
    """In every store: the time of an event decides nothing about whether it is seen."""
    store = bus.open()
    store.enqueue([order("first")])
    worker = bus.worker(store=store)
    assert worker.ack(take_all(worker)) == [True]
    worker.save()
    long_ago = datetime.now(UTC) - timedelta(days=1)
    made_long_ago = order("late", created_at=long_ago)
    bus.open().enqueue([made_long_ago])

    assert ids(take_all(bus.worker())) == ["order-late"]
