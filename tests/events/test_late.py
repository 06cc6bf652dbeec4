"""Clocks that differ and writes that come late: nothing is skipped, nothing comes twice."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.events.object import pending_events
from storage_engine.events.protocol import EventStore, open_event_store
from storage_engine.objectstore import s3
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.repository.protocol import CommitRequest
from storage_engine.testing.faults import Fault, FaultKind, FaultPlan, FaultRule
from tests.commitlog.support import World, Writer, at, new_world
from tests.events.support import BILL, NAMESPACE, SHIP, ids, made_bus, order, take_all
from tests.servers import REGION, S3Server

TWO_MINUTES = 120.0


def store_of(writer: Writer) -> EventStore:
    return open_event_store(writer.repo, writer.repo._config)


def drained(world: World, skew: float = 0.0, *subscriptions: Any) -> list[str]:
    """A worker's whole life."""
    writer = world.open("worker", skew=skew)
    worker = store_of(writer).consumer(NAMESPACE, subscriptions or (BILL,), "worker")
    claims = take_all(worker)
    assert all(worker.ack(claims))
    worker.save()
    writer.close()
    world.writers.remove(writer)
    return ids(claims)


def run_for_an_hour(worker_skew: float) -> None:
    world = new_world()
    producers = [world.open(f"p{skew}", skew=skew) for skew in (-TWO_MINUTES, 0.0, TWO_MINUTES)]
    sent, handled = [], Counter[str]()
    for minute in range(60):
        for number, producer in enumerate(producers):
            name = f"{minute}-{number}"
            store_of(producer).enqueue([order(name, created_at=producer.store.now())])
            sent.append(f"order-{name}")
            handled.update(drained(world, worker_skew))
        world.backend.clock.sleep(60)
    handled.update(drained(world, worker_skew))
    assert handled == Counter(sent)
    (position,) = (
        v for k, v in ((k, world.document(k)) for k in world.stored_keys("events/")) if "_pos" in k
    )
    ten_ago = producers[1].store.now() - timedelta(minutes=10)
    assert position["watermark"] > layout.event(NAMESPACE, ten_ago, "")
    assert len(position["finished"]) < 60, "the watermark moves"
    world.close()


@pytest.mark.parametrize("skew", [-TWO_MINUTES, 0.0, TWO_MINUTES])
def test_producers_whose_clocks_differ_by_two_minutes_each_way(skew: float) -> None:
    run_for_an_hour(skew)


def test_planted_a_watermark_that_is_not_held_back_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_events, "HOLD_BACK", timedelta(0))
    with pytest.raises(AssertionError):
        run_for_an_hour(0.0)


def test_an_event_made_long_before_it_is_sent_is_not_skipped() -> None:
    world = new_world()
    producer = world.open("producer")
    old, odd = producer.store.now() - timedelta(days=2), producer.store.now() + timedelta(days=2)
    store_of(producer).enqueue([order("first")])
    world.backend.clock.sleep(3600)
    assert drained(world) == ["order-first"]
    store_of(producer).enqueue([order("old", created_at=old), order("odd", created_at=odd)])

    assert sorted(drained(world)) == ["order-odd", "order-old"]
    world.backend.clock.sleep(3600)
    assert drained(world) == []
    world.close()


def slow_commit(world: World, meanwhile: Any, *, crash: bool) -> None:
    """A commit that is made up long before head is swung, and whose writer may die right then."""
    writer = world.open("slow", s3_lease_ttl_ms=10_000_000)
    if crash:
        rule = FaultRule(Fault(FaultKind.CRASH_AFTER), "PUT_IF", layout.HEAD)
        writer.store.faults = FaultPlan([rule])
    at(writer.store, "PUT_IF", layout.HEAD, meanwhile)
    with suppress(SimulatedCrash):
        writer.repo.commit(CommitRequest([], events=[order("late")]))
        writer.repo.flush()
    assert writer.store.crashed == crash
    writer.close()
    world.writers.remove(writer)


@pytest.mark.parametrize("crash", [False, True])
def test_a_commit_that_took_an_hour_is_not_skipped(crash: bool) -> None:
    world = new_world()
    producer = world.open("producer")
    store_of(producer).enqueue([order("first")])

    def meanwhile() -> None:
        assert drained(world) == ["order-first"]
        world.backend.clock.sleep(3600)
        assert drained(world) == []  # its watermark is past the commit's time now

    slow_commit(world, meanwhile, crash=crash)
    late = layout.event(NAMESPACE, producer.store.now(), "x")
    assert all(key < late for key in world.stored_keys("events/") if "order-late" in key)
    assert drained(world) == ["order-late"]
    world.backend.clock.sleep(3600)
    assert drained(world) == []
    assert drained(world, 0.0, BILL, SHIP) == ["order-first", "order-late"]  # for the new handler
    world.close()


def test_a_worker_that_runs_sees_such_a_commit_within_half_a_minute() -> None:
    world = new_world()
    writer = world.open("worker")
    worker = store_of(writer).consumer(NAMESPACE, (BILL,), "worker")

    def meanwhile() -> None:
        for _ in range(30):
            assert take_all(worker) == []
            world.backend.clock.sleep(60)

    slow_commit(world, meanwhile, crash=True)
    world.backend.clock.sleep(31)
    assert ids(worker.claim(10)) == ["order-late"]
    world.close()


def test_a_late_event_of_a_commit_that_fails_is_not_forgotten_by_a_restart() -> None:
    """Its key is below the watermark: only the commit that is kept back leads to it again."""
    world = new_world()
    slow_commit(world, lambda: (world.backend.clock.sleep(3600), drained(world)), crash=False)
    first = world.open("first")
    worker = store_of(first).consumer(NAMESPACE, (BILL,), "first")
    (claim,) = take_all(worker)
    worker.save()
    worker.give_back([claim])

    assert drained(world) == ["order-late"]
    world.close()


def test_two_workers_positions_are_merged() -> None:
    world = new_world()
    store = store_of(world.open("producer"))
    workers = [
        store_of(world.open(f"w{n}")).consumer(NAMESPACE, (BILL,), f"w{n}") for n in range(2)
    ]
    for worker in workers:
        assert worker.claim(10) == []
    store.enqueue([order(1), order(2)])
    for worker in workers:
        (claim,) = worker.claim(1)
        worker.ack([claim])
    for worker in workers:
        worker.save()
    (position,) = [world.document(k) for k in world.stored_keys("events/") if "_positions" in k]

    assert sorted(position["finished"]) == ["order-1", "order-2"]
    world.close()


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_machine_whose_clock_is_hours_off_takes_no_claim_that_holds(
    hours: int, moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On S3, leases are judged by the server's clock: a handler that commits nothing, and so has
    no other guard, does not run a second time."""
    off = timedelta(hours=hours)

    class WrongTime(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + off

    uri = f"s3://{moto_s3.make_bucket()}/bus"
    with made_bus(uri, "moto", s3_endpoint_url=moto_s3.endpoint, s3_region=REGION) as bus:
        right = bus.open()
        right.enqueue([order(1)])
        worker = bus.worker(store=right)
        [claim] = worker.claim(10)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(s3, "datetime", WrongTime)
            elsewhere.setattr(s3, "time", SimpleNamespace(time=lambda: time.time() + 3600 * hours))
            other = bus.worker()
            assert other.claim(10, whole=True) == []
        assert worker.ack([claim]) == [True]
