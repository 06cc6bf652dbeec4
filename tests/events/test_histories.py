"""A head that was put back to an older commit, and went on from there: what handlers and the outbox
are said to have reached belongs to a history that is no more."""

from __future__ import annotations

import pytest

from storage_engine.commitlog import layout
from storage_engine.events.protocol import EventStore, Subscription, open_event_store
from storage_engine.repository.protocol import CommitRequest
from tests.commitlog.support import World, Writer, new_world
from tests.engines import customer
from tests.events.support import BILL, NAMESPACE, SHIP, ids, order, take_all


def commit(world: World, name: str, *events: str, projected: bool = True) -> None:
    """One more commit, by a process that may die before its events are brought out."""
    writer = world.open(f"writer-{name}")
    before = set(world.stored_keys("events/"))
    if events:
        writer.repo.commit(CommitRequest([], events=[order(event) for event in events]))
    else:
        writer.put(customer(name))
    writer.repo.flush()
    if not projected:
        world.backend.remove(sorted(set(world.stored_keys("events/")) - before))


def bus(world: World) -> tuple[Writer, EventStore]:
    writer = world.open("worker")
    return writer, open_event_store(writer.repo, writer.repo._config)


def handled(store: EventStore, *subscriptions: Subscription) -> list[str]:
    """What a worker gets that starts now, and ends."""
    worker = store.consumer(NAMESPACE, subscriptions or (BILL,), "worker")
    claims = take_all(worker)
    worker.ack(claims)
    worker.save()
    return ids(claims)


@pytest.fixture
def world() -> World:
    """Five commits whose events are handled; then head goes back to the second, and four others
    come, the second of which is brought out by nobody."""
    world = new_world()
    commit(world, "a", "a")
    commit(world, "b")
    head = world.backend.objects()[layout.HEAD]
    for name in ("c", "d", "e"):
        commit(world, name, name)
    _, store = bus(world)
    assert sorted(handled(store)) == ["order-a", "order-c", "order-d", "order-e"]
    world.backend.clock.sleep(600)
    assert handled(store) == []  # its watermark is beyond all of these now
    world.backend.write(layout.HEAD, head)
    return world


def go_on(world: World) -> None:
    commit(world, "v", "v")
    commit(world, "w", "w", projected=False)
    for name in ("x", "y"):
        commit(world, name)


def test_a_worker_that_starts_believes_no_position_of_another_history(world: World) -> None:
    go_on(world)

    assert sorted(handled(bus(world)[1])) == ["order-v", "order-w"]


def test_a_handler_without_a_position_believes_no_mark_of_another_history(world: World) -> None:
    go_on(world)

    assert {"order-v", "order-w"} <= set(handled(bus(world)[1], SHIP))


def test_a_peek_sees_it_too(world: World) -> None:
    commit(world, "w", "w", projected=False)
    for name in ("x", "y", "z"):
        commit(world, name)

    seen = bus(world)[1].peek(NAMESPACE, [BILL])
    assert (seen.pending, seen.due) == (1, 1)


def test_a_worker_that_runs_meanwhile(world: World) -> None:
    _, store = bus(world)
    objects = world.backend.objects()
    restored, newest = objects[layout.HEAD], max(world.stored_keys("commits/5-"))
    assert newest.endswith("manifest.json")
    worker = store.consumer(NAMESPACE, (BILL,), "worker")
    go_on(world)
    assert restored != world.backend.objects()[layout.HEAD]
    assert sorted(ids(take_all(worker))) == ["order-v", "order-w"]
    worker.save()

    # Again, under the worker's feet: back to the second, and further than it has seen.
    world.backend.write(layout.HEAD, restored)
    commit(world, "l", "l", projected=False)
    for number in range(6):
        commit(world, f"m{number}")
    world.backend.clock.sleep(31)
    assert ids(take_all(worker)) == ["order-l"]


def test_a_history_that_only_went_on_is_believed() -> None:
    """However far: nothing is looked at again."""
    world = new_world()
    for number in range(3):
        commit(world, f"a{number}", f"a{number}")
    _, store = bus(world)
    assert len(handled(store)) == 3
    world.backend.clock.sleep(600)
    handled(store)
    writer = world.open("writer")
    for number in range(130):  # past a checkpoint
        writer.put(customer(f"b{number}"))
    writer.repo.flush()
    writer, store = bus(world)
    before = writer.store.meter.snapshot()

    assert handled(store) == []
    spent = {k: n - before.get(k, 0) for k, n in writer.store.meter.snapshot().items()}
    assert spent["GET"] <= 2 + 1 + 2 + 1  # position, head, the mark; how it goes on from there
    assert spent["LIST"] == 1
