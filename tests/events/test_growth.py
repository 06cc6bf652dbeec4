"""What the bus reads of the log: manifests that carry something, whatever else there is.

Requests are exact, at 100 and 1,000 commits; ONTOLOGIA_LONG=1 adds 10,000. Logs are made up without
a writer: only manifests and head count here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import skip_pointers
from storage_engine.commitlog.records import (
    Head,
    Manifest,
    ManifestLink,
    sha256,
    timestamp,
    to_json,
)
from storage_engine.events.object import pending_events
from storage_engine.events.protocol import Consumer, EventStore, open_event_store
from storage_engine.repository.object.outbox import outbox_events
from tests.commitlog.support import World, Writer, new_world
from tests.engines import customer
from tests.events.fuzz import LONG
from tests.events.support import BILL, NAMESPACE, ids, order, take_all
from tests.events.test_budgets import Cost, spent

COMMITS = [100, 1_000, *([10_000] if LONG else [])]
Carried = Callable[[int], list[dict[str, Any]]]


def nothing(_: int) -> list[dict[str, Any]]:
    return []


def event(commit_id: int) -> list[dict[str, Any]]:
    return [order(f"{commit_id:05d}")]


def ack(commit_id: int) -> list[dict[str, Any]]:
    name = {"namespace": NAMESPACE, "handler_id": BILL.handler_id, "token": "t"}
    return [{**name, "event_id": f"order-{commit_id:05d}"}]


def every(distance: int, carried: Carried) -> Carried:
    return lambda commit_id: carried(commit_id) if commit_id % distance == 0 else []


def extend(
    world: World,
    count: int,
    *,
    events: Carried = nothing,
    acks: Carried = nothing,
    format: int = 2,
    project: bool = True,
) -> None:
    """More commits on the log, as writers of a format leave them."""
    objects = world.backend.objects()
    head = Head.parse(objects[layout.HEAD], key=layout.HEAD)
    link, parent = head.link, None
    if link is not None:
        parent = Manifest.parse(objects[link.path], key=link.path)
    for commit_id in range(head.commit_id + 1, head.commit_id + count + 1):
        manifest = Manifest(
            commit_id=commit_id,
            parent_commit_id=link.commit_id if link else None,
            parent_manifest_path=link.path if link else None,
            parent_sha256=link.sha256 if link else "",
            created_at=timestamp(world.backend.clock.now()),
            runtime_id="made up",
            format=format,
            log_id=head.log_id,
            events=tuple(events(commit_id)),
            acks=tuple(acks(commit_id)),
            skip=skip_pointers(parent, link) if parent and link else (),
            type_heads={},
        )
        if format >= 2 and parent is not None:
            known = parent.format >= 2
            manifest = replace(
                manifest,
                events_before=link if parent.events or not known else parent.events_before,
                acks_before=link if parent.acks or not known else parent.acks_before,
            )
        path, data = layout.manifest(commit_id, "made0up0"), manifest.to_bytes()
        world.backend.write(path, data)
        if project:
            for key, envelope in outbox_events(manifest):
                world.backend.write(key, to_json(envelope))
        link, parent = ManifestLink(commit_id, path, sha256(data)), manifest
    assert link is not None
    head = replace(
        head, commit_id=link.commit_id, manifest_path=link.path, commit_sha256=link.sha256
    )
    world.backend.write(layout.HEAD, head.to_bytes())


def opened(world: World) -> tuple[Writer, EventStore, Consumer]:
    writer = world.open("process")
    store = open_event_store(writer.repo, writer.repo._config)
    return writer, store, store.consumer(NAMESPACE, (BILL,), "worker")


def first_look(world: World) -> Cost:
    writer, _, worker = opened(world)
    return spent(writer, lambda: worker.claim(10))


@pytest.mark.parametrize("count", COMMITS)
def test_the_first_drain_of_a_namespace_in_a_log_without_events(count: int) -> None:
    world = new_world()
    extend(world, count)
    # Position, head and projection; the newest manifest, which says that no other has events.
    assert first_look(world) == ({"GET": 4, "LIST": 1, "PUT_IF": 1}, 5)
    world.close()


@pytest.mark.parametrize("count", COMMITS)
def test_events_of_few_commits_are_found_by_reading_those(count: int) -> None:
    world = new_world()
    extend(world, count, events=every(count // 5, event), project=False)
    writer, _, worker = opened(world)
    claims: list[Any] = []
    cost, _ = spent(writer, lambda: claims.extend(worker.claim(10)))
    assert ids(claims) == [f"order-{n:05d}" for n in range(count // 5, count + 1, count // 5)]
    # Position, head, projection, and the five manifests, the newest of which is one of them;
    # five events are created, five claims and the projection's mark.
    assert cost == {"GET": 3 + 5, "LIST": 1, "PUT_IF": 5 + 5 + 1}
    world.close()


@pytest.mark.parametrize(("count", "hops"), [(100, 30), (1_000, 90)])
def test_many_are_read_side_by_side(count: int, hops: int) -> None:
    """Every commit carries an event, and another worker than the committer brings all of them
    out: no more manifests than there are, and ranges of the log at once."""
    world = new_world()
    extend(world, count, events=event)
    writer = world.open("process")
    head = writer.repo.chain.read_head().head
    carriers: list[Any] = []
    cost, depth = spent(
        writer, lambda: carriers.extend(state.carriers(writer.repo.chain, head, "events", above=0))
    )
    assert [link.commit_id for link, _ in carriers] == list(range(count, 0, -1))
    assert cost == {"GET": count}
    assert depth <= hops
    world.close()


@pytest.mark.parametrize("distance", [2, 7, 50, 64])
def test_the_rest_is_hardly_read(distance: int) -> None:
    world = new_world()
    extend(world, 1_000, acks=every(distance, ack))
    writer = world.open("process")
    head = writer.repo.chain.read_head().head
    carriers: list[Any] = []
    cost, _ = spent(
        writer, lambda: carriers.extend(state.carriers(writer.repo.chain, head, "acks", above=3))
    )
    expected = [n for n in range(1_000, 3, -1) if n % distance == 0]
    assert [link.commit_id for link, _ in carriers] == expected
    assert cost["GET"] <= (1 + len(expected)) * 9 / 8
    world.close()


@pytest.mark.parametrize("above", [0, 1, 63, 64, 99, 100, 150])
def test_no_more_than_was_asked_for(above: int) -> None:
    world = new_world()
    extend(world, 100, events=every(3, event), acks=every(5, ack))
    chain = world.open("process").repo.chain
    head = chain.read_head().head
    for what, distance in (("events", 3), ("acks", 5)):
        numbers = [
            link.commit_id
            for link, _ in state.carriers(chain, head, what, above=above)  # type: ignore[arg-type]
        ]
        assert numbers == [n for n in range(100, above, -1) if n % distance == 0]
    world.close()


def test_below_manifests_without_pointers_everything_is_read() -> None:
    world = new_world()
    extend(world, 60, events=every(10, event), format=1, project=False)
    extend(world, 200, events=every(100, event), project=False)
    writer, _, worker = opened(world)
    claims: list[Any] = []
    cost, _ = spent(writer, lambda: claims.extend(worker.claim(50)))
    expected = [10, 20, 30, 40, 50, 60, 100, 200]
    assert ids(claims) == [f"order-{n:05d}" for n in expected]
    # Position, head, projection; 260, 200, 100; then all sixty.
    assert cost["GET"] == 3 + 3 + 60
    world.close()


def test_the_pointers_that_writers_leave() -> None:
    """The same with real commits."""
    world = new_world()
    producer = world.open("producer")
    for n in range(12):
        events = [order(n)] if n % 4 == 0 else []
        producer.put(customer(f"c{n}"), events=events)
    producer.repo.flush()
    writer, _, worker = opened(world)
    claims: list[Any] = []
    cost, _ = spent(writer, lambda: claims.extend(worker.claim(10)))
    assert ids(claims) == ["order-0", "order-4", "order-8"]
    # Position, head, projection; the newest manifest and three with events; three events.
    assert cost == {"GET": 3 + 4 + 3, "LIST": 1, "PUT_IF": 3 + 1}
    world.close()


# -- taking over ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COMMITS)
def test_taking_over_a_claim_reads_no_commits_that_ack_nothing(count: int) -> None:
    world = new_world()
    extend(world, 5)
    writer, _, worker = opened(world)
    store = open_event_store(writer.repo, writer.repo._config)
    store.enqueue([order("mine")])
    assert ids(worker.claim(10)) == ["order-mine"]
    extend(world, count)
    world.backend.clock.sleep(120)
    other, _, heir = opened(world)
    claims: list[Any] = []
    cost, _ = spent(other, lambda: claims.extend(heir.claim(10)))
    assert ids(claims) == ["order-mine"]
    # Position, head, projection and the newest manifest; the event. The claim is refused once and
    # read, and then replaced, after a look at head: the manifest is at hand. Beside these, the
    # manifests that lead from head to the one that the projection names.
    proof = {100: 5, 1_000: 8, 10_000: 12}[count]
    assert cost == {"GET": 5 + 1 + 1 + proof, "LIST": 2, "PUT_IF": 1 + 1 + 1}
    world.close()


@pytest.mark.parametrize("count", COMMITS)
def test_an_ack_among_many_is_found_by_the_commits_since_the_claim(count: int) -> None:
    """A worker that commits for each event: acks without end, a hundred since the claim."""
    world = new_world()
    extend(world, count, acks=ack)
    _, store, worker = opened(world)
    store.enqueue([order("mine")])
    (claim,) = worker.claim(10)
    assert claim.record.head_commit == count
    extend(
        world,
        100,
        acks=lambda n: [{**ack(n)[0], "event_id": "order-mine"}] if n == count + 9 else ack(n),
    )
    world.backend.clock.sleep(120)
    other, _, heir = opened(world)
    claims: list[Any] = []
    cost, _ = spent(other, lambda: claims.extend(heir.claim(10)))
    assert claims == [], "a commit has handled it"
    # As above, and the hundred commits since the claim, the newest of which was read before.
    assert cost == {"GET": 5 + 1 + 1 + 99, "LIST": 2, "PUT_IF": 1 + 1 + 1}
    assert world.document(layout.claim(NAMESPACE, "order-mine", BILL.handler_id))["ack_at"]
    world.close()


# -- bringing out ---------------------------------------------------------------------------------


def test_events_that_are_there_are_not_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """More events of commits than a look takes at once: a listing tells that they are there."""
    monkeypatch.setattr(pending_events, "_BACKLOG", 100)
    monkeypatch.setattr(pending_events, "_ONE_PAGE", 50)
    world = new_world()
    extend(world, 300, events=event)
    writer, _, worker = opened(world)
    cost, _ = spent(writer, lambda: worker.claim(10))
    # Position, head, projection, all manifests, ten events; two listings.
    assert cost == {"GET": 3 + 300 + 10, "LIST": 2, "PUT_IF": 10 + 1}
    assert len(take_all(worker, 100)) == 290
    world.close()


def test_missing_ones_among_many_are_created() -> None:
    world = new_world()
    extend(world, 100, events=event)
    gone = [k for k in world.stored_keys("events/") if k.endswith(("00013.json", "00099.json"))]
    world.backend.remove(gone)
    writer, store, _ = opened(world)
    cost, _ = spent(writer, lambda: store.cleanup_events(NAMESPACE, writer.store.now()))
    assert cost["PUT_IF"] == 2 + 1
    world.close()
