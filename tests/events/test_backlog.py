"""Looking at what handlers have yet to do: counted rightly, and nothing touched."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest

from storage_engine.events.protocol import Peek, Subscription, TypePeek, open_event_store
from storage_engine.events.records import Failure
from storage_engine.repository.protocol import CommitRequest
from tests.commitlog.support import new_world
from tests.events.support import BILL, NAMESPACE, SHIP, Bus, ids, order, take_all


def test_what_is_due_waits_and_is_done(bus: Bus) -> None:
    store = bus.open(event_backoff_base_ms=60_000, event_backoff_max_ms=60_000)

    def seen() -> tuple[int, int]:
        found = store.backlog(NAMESPACE, [BILL, SHIP], 100)
        return found.due, found.waiting

    assert seen() == (0, 0)
    store.enqueue([order(1), order(2)])
    assert seen() == seen() == (4, 0)  # each for two handlers
    worker = bus.worker(BILL, store=store)
    claims = take_all(worker)
    assert ids(claims) == ["order-1", "order-2"]  # looking has claimed none
    assert seen() == (2, 2)

    worker.ack(claims[:1])
    worker.release([Failure(claims[1], "no paper")])
    found = store.backlog(NAMESPACE, [BILL], 100)
    assert (found.due, found.waiting) == (0, 1)
    assert found.next_due is not None
    assert found.oldest is not None
    assert found.next_due > store.now()

    worker.save()
    worker.ack(take_all(bus.worker(SHIP, store=store)))
    assert seen() == (0, 1)


def test_a_dead_letter_is_not_left_to_do(bus: Bus) -> None:
    store = bus.open(event_max_attempts=1)
    store.enqueue([order(1)])
    worker = bus.worker(BILL, store=store)
    worker.release([Failure(claim, "never") for claim in take_all(worker)])

    assert store.backlog(NAMESPACE, [BILL], 100).due == 0
    [letter] = store.list_dead_letters(NAMESPACE, 10)
    store.redrive(letter)
    assert store.backlog(NAMESPACE, [BILL], 100).due == 1


def test_no_more_is_read_than_asked_for(bus: Bus) -> None:
    store = bus.open()
    store.enqueue([order(number) for number in range(5)])

    found = store.backlog(NAMESPACE, [BILL], 3)

    assert (found.due, found.more) == (3, True)
    assert not store.backlog(NAMESPACE, [BILL], 5).more


# -- at a glance ----------------------------------------------------------------------------------


def test_a_peek_tells_what_is_due_waits_and_is_done(bus: Bus) -> None:
    store = bus.open(event_backoff_base_ms=60_000, event_backoff_max_ms=60_000)
    assert store.peek(NAMESPACE, [BILL, SHIP]) == Peek()
    before = store.now()
    store.enqueue([order(1, created_at=before), order(2, created_at=before)])

    seen = store.peek(NAMESPACE, [BILL, SHIP])
    assert (seen.pending, seen.due, seen.waiting, seen.is_exact) == (2, 2, 0, True)
    assert seen.oldest == before
    assert seen.by_type == {"OrderPlaced": TypePeek(2, before)}
    worker = bus.worker(BILL, store=store)
    claims = take_all(worker)
    assert ids(claims) == ["order-1", "order-2"]  # a peek claims none
    assert store.peek(NAMESPACE, [BILL, SHIP]).due == 2  # for the other handler
    held = store.peek(NAMESPACE, [BILL])
    assert (held.pending, held.due, held.waiting) == (2, 0, 2)
    assert held.next_due is not None
    assert held.next_due > store.now()

    worker.ack(claims[:1])
    worker.release([Failure(claims[1], "no paper")])
    seen = store.peek(NAMESPACE, [BILL])
    assert (seen.pending, seen.due, seen.waiting, seen.is_exact) == (1, 0, 1, True)
    assert store.peek(NAMESPACE, [Subscription("other", frozenset({"Other"}))]) == Peek()


def test_a_peek_sees_what_a_commit_sent_and_nobody_brought_out() -> None:
    world = new_world()
    writer = world.open("writer")
    writer.repo.commit(CommitRequest([], events=[order(1)]))
    writer.repo.flush()
    for key in world.stored_keys("events/"):
        world.backend.remove([key])  # as if the process had died before
    store = open_event_store(writer.repo, writer.repo._config)

    assert store.peek(NAMESPACE, [BILL]).due == 1


@pytest.mark.parametrize(
    ("events", "cost"),
    [
        (0, {"GET": 2, "LIST": 1}),
        (1, {"GET": 4, "LIST": 1}),
        (900, {"GET": 18, "LIST": 2}),
        (10_000, {"GET": 18, "LIST": 2}),
    ],
)
def test_a_peek_costs_the_same_however_many_there_are(events: int, cost: dict[str, int]) -> None:
    """Position, head, a page of the oldest names and one of the newest, eight events, their
    claims."""
    world = new_world()
    writer = world.open("process")
    store = open_event_store(writer.repo, writer.repo._config)
    store.enqueue([order(number, created_at=store.now()) for number in range(events)])
    world.backend.clock.sleep(2)
    before = Counter(writer.store.meter.snapshot())

    seen = store.peek(NAMESPACE, [BILL])

    spent = Counter(writer.store.meter.snapshot()) - before
    assert {kind: spent[kind] for kind in ("GET", "LIST", "PUT", "PUT_IF") if spent[kind]} == cost
    assert (seen.due, seen.more) == (min(events, 8), events >= 900)
    if events:
        assert seen.oldest is not None
        assert (store.now() - seen.oldest).total_seconds() == 2


def test_a_peek_finds_the_one_that_is_due_among_many_that_wait() -> None:
    """The new one is at the end; one in the middle is found by and by."""
    world = new_world()
    writer = world.open("process")
    store = open_event_store(writer.repo, writer.repo._config)
    at = store.now()
    store.enqueue([order(n, created_at=at + timedelta(milliseconds=n)) for n in range(600)])
    worker = store.consumer(NAMESPACE, (BILL,), "worker")
    claims = [claim for _ in range(6) for claim in worker.claim(100)]
    assert len(claims) == 600

    before = writer.store.meter.snapshot()["total"]
    seen = store.peek(NAMESPACE, [BILL])
    assert (seen.pending, seen.due, seen.looked_at) == (600, 0, 64)
    assert writer.store.meter.snapshot()["total"] - before == 3 + 2 * 64

    worker.give_back(claims[300:301])
    assert any(store.peek(NAMESPACE, [BILL]).due for _ in range(100))
    store.enqueue([order("new")])
    assert all(store.peek(NAMESPACE, [BILL]).due in (1, 2) for _ in range(10))  # 2 by luck
