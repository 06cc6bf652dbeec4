"""Requests and serial hops of the bus, exactly. The bounds are those of the design's table."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import to_json
from storage_engine.errors import StorageBackendError
from storage_engine.events.protocol import Consumer, EventStore, open_event_store
from storage_engine.events.records import Claim
from storage_engine.objectstore.metering import HopTrace, tracing
from storage_engine.repository.protocol import CommitRequest
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer, new_world
from tests.engines import CUSTOMER, customer, rows_of
from tests.events.support import BILL, NAMESPACE, order, take_all

Cost = tuple[dict[str, int], int]


def spent(writer: Writer, work: Callable[[], object]) -> Cost:
    """Requests by kind, and hops."""
    before = writer.store.meter.snapshot()
    with tracing(HopTrace()) as trace:
        work()
    after = writer.store.meter.snapshot()
    kinds = [k for k in after if k not in {"total", "bytes_read", "bytes_written"}]
    found = {k: after[k] - before.get(k, 0) for k in kinds}
    return {k: n for k, n in found.items() if n}, trace.depth


def opened(world: World) -> tuple[Writer, EventStore]:
    writer = world.open("process")
    return writer, open_event_store(writer.repo, writer.repo._config)


def worker_of(world: World) -> tuple[Writer, Consumer]:
    writer, store = opened(world)
    return writer, store.consumer(NAMESPACE, (BILL,), "worker")


def test_enqueueing_is_one_put_each_in_one_hop() -> None:
    writer, store = opened(new_world())

    assert spent(writer, lambda: store.enqueue([order(1)])) == ({"PUT": 1}, 1)
    assert spent(writer, lambda: store.enqueue([order(n) for n in range(20)])) == ({"PUT": 20}, 1)


def check_claim_and_ack(world: World) -> None:
    """Cold: 3 + 2 x 50 requests in 4 hops; ack: 50 in 1; idle: 1, and 1 more in 30 s."""
    _, store = opened(world)
    store.enqueue([order(f"fifty-{n}") for n in range(50)])
    writer, worker = worker_of(world)
    claims = []

    cost = spent(writer, lambda: claims.extend(worker.claim(50)))
    assert cost == ({"GET": 52, "LIST": 1, "PUT_IF": 50}, 4)
    assert len(claims) == 50
    assert spent(writer, lambda: worker.ack(claims)) == ({"PUT_IF": 50}, 1)
    for _ in range(3):
        world.backend.clock.sleep(1)
        assert spent(writer, lambda: worker.claim(50)) == ({"LIST": 1}, 1)
    world.backend.clock.sleep(27)
    spent(writer, lambda: worker.claim(50))  # keeps its position
    world.backend.clock.sleep(30)
    idle, _ = spent(writer, lambda: worker.claim(50))
    assert {k: n for k, n in idle.items() if k != "PUT_IF"} == {"LIST": 1, "GET": 1}


def test_claim_ack_and_idle_poll() -> None:
    check_claim_and_ack(new_world())


def test_the_same_with_1500_older_events_in_history() -> None:
    world = new_world()
    _, store = opened(world)
    for start in range(0, 1_500, 100):
        store.enqueue([order(n) for n in range(start, start + 100)])
    _, worker = worker_of(world)
    worker.ack(take_all(worker, 100))
    world.backend.clock.sleep(600)
    assert worker.claim(10, whole=True) == []
    worker.save()

    check_claim_and_ack(world)


def test_a_backlog_is_claimed_in_order_at_the_same_cost() -> None:
    world = new_world()
    writer, store = opened(world)
    at = writer.store.now()
    for n in range(120):
        store.enqueue([order(f"{n:03d}", created_at=at + timedelta(milliseconds=n))])
    writer, worker = worker_of(world)

    assert spent(writer, lambda: worker.claim(50)) == ({"GET": 52, "LIST": 1, "PUT_IF": 50}, 4)
    assert spent(writer, lambda: worker.claim(50)) == ({"GET": 50, "PUT_IF": 50}, 2)
    assert spent(writer, lambda: worker.claim(50)) == ({"GET": 20, "LIST": 1, "PUT_IF": 20}, 3)


def test_claiming_ahead_reads_the_next_ones_in_the_same_hop() -> None:
    world = new_world()
    _, store = opened(world)
    store.enqueue([order(n) for n in range(90)])
    writer, worker = worker_of(world)
    worker.claim(30)

    assert spent(writer, lambda: worker.claim(30, ahead=True)) == ({"GET": 60, "PUT_IF": 30}, 2)
    assert spent(writer, lambda: worker.claim(30)) == ({"PUT_IF": 30}, 1)


def test_a_commit_with_events_costs_one_request_more_for_each_and_no_hop() -> None:
    world = new_world()
    writer = world.open("writer")

    def commit(key: str, events: int) -> Cost:
        def work() -> None:
            request = CommitRequest(
                [rows_of(CUSTOMER, customer(key))],
                events=[order(f"{key}-{n}") for n in range(events)],
            )
            writer.repo.commit(request)
            writer.repo.flush()

        return spent(writer, work)

    commit("warm", 0)
    without, hops = commit("none", 0)
    assert commit("three", 3) == ({**without, "PUT_IF": without["PUT_IF"] + 3}, hops)


def test_a_handlers_commit_asks_nothing_more_for_its_ack() -> None:
    world = new_world()
    writer = world.open("writer")
    store = open_event_store(writer.repo, writer.repo._config)
    worker = store.consumer(NAMESPACE, (BILL,), "worker")
    store.enqueue([order(1)])
    writer.put(customer("warm"))
    writer.repo.flush()
    (claim,) = worker.claim(10)

    def commit(key: str, **request: object) -> Cost:
        def work() -> None:
            writer.put(customer(key), **request)
            writer.repo.flush()

        return spent(writer, work)

    plain = commit("plain")
    assert commit("acks", acks=[claim.as_ack()]) == plain
    assert spent(writer, lambda: worker.ack([claim])) == ({"PUT_IF": 1}, 1)


def test_an_idle_poll_after_a_burst_is_one_request_and_late_arrivals_are_found() -> None:
    world = new_world()
    writer, store = opened(world)
    at = writer.store.now()
    burst = [order(n, created_at=at + timedelta(milliseconds=n)) for n in range(3_000)]
    store.enqueue(burst)
    world.backend.clock.sleep(5)
    writer, worker = worker_of(world)
    worker.ack(take_all(worker, 500))
    polls: list[Cost] = []

    def poll() -> list[Claim]:
        world.backend.clock.sleep(1)
        found: list[Claim] = []
        polls.append(spent(writer, lambda: found.extend(worker.claim(50))))
        return found

    poll()  # sees that nothing new comes
    assert not any(poll() for _ in range(60))
    looks = [cost for cost, _ in polls[1:]]
    assert [cost["LIST"] for cost in looks] == [1] * 60
    # The log, and the position: each at most every 30 s.
    assert sum(sum(cost.values()) for cost in looks) <= 60 + 2 * 3

    store.enqueue([order("new"), order("late", created_at=at)])
    writer.store.put(layout.event(NAMESPACE, at, "order-hidden"), to_json(order("hidden")))
    arrived = [claim.event_id for _ in range(20) for claim in poll()]
    assert sorted(arrived) == ["order-hidden", "order-late", "order-new"]
    assert [cost["LIST"] for cost, _ in polls].count(1) >= len(polls) - 4


def test_a_look_beside_claims_costs_no_hop_and_its_failure_no_claim() -> None:
    world = new_world()
    _, store = opened(world)
    store.enqueue([order(n) for n in range(90)])
    writer, worker = worker_of(world)
    worker.claim(20)
    world.backend.clock.sleep(2)
    claims: list[Claim] = []

    cost = spent(writer, lambda: claims.extend(worker.claim(20, ahead=True)))
    assert cost == ({"GET": 40, "LIST": 1, "PUT_IF": 20}, 2)
    world.backend.clock.sleep(2)
    writer.fail(FaultKind.UNAVAILABLE, "LIST", "events/*", times=None)
    claims += worker.claim(20, ahead=True)
    assert len(claims) == 40
    with pytest.raises(StorageBackendError):  # now it is seen to
        worker.claim(20)
    writer.heal()
    assert len(take_all(worker)) == 30
