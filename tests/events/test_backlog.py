"""Looking at what handlers have yet to do: counted rightly, and nothing touched."""

from __future__ import annotations

from storage_engine.events.records import Failure
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
