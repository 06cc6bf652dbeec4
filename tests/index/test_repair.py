"""Indices heal with the next commit, and one that is wrong is never believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.maintenance.indices import verify_indices
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.repository import initialize_storage
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer, at, made_world
from tests.engines import CUSTOMER, PRODUCT, customer
from tests.index.support import (
    covered,
    index_of,
    lag_behind,
    put_product,
    resealed,
    set_back,
    spoil,
    unproven,
    watermark,
)


def crash_after_cas(world: World, age: int) -> None:
    """A commit of which nothing but the CAS was done."""
    doomed = world.open("doomed")
    doomed.fail(FaultKind.CRASH_AFTER, "PUT_IF", layout.HEAD)
    with pytest.raises(SimulatedCrash):
        doomed.put(customer("a", age=age))
    world.pass_lease()


def test_a_gap_left_by_a_crash_is_filled_by_the_next_commit(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    crash_after_cas(world, 2)
    crash_after_cas(world, 3)
    assert (watermark(world), covered(world)) == (1, [1])
    reader = world.open("reader")
    assert reader.history() == [(1, "a", 1), (2, "a", 2), (3, "a", 3)]
    assert reader.repo.index_warnings() != []

    writer.put(customer("b", age=4))

    assert (watermark(world), covered(world)) == (4, [1, 2, 3, 4])
    assert world.open().repo.index_warnings() == []
    assert world.open().history()[-1] == (4, "b", 4)


def test_a_gap_is_filled_across_a_checkpoint(either_world: World) -> None:
    world = either_world
    writer = world.open("writer", checkpoint_interval=3)
    for age in range(8):
        writer.put(customer("a", age=age))
    lag_behind(world, 1)
    world.open("cold", checkpoint_interval=3).put(customer("a", age=8))
    assert (watermark(world), covered(world)) == (9, list(range(1, 10)))


def test_v1_fills_the_gap_of_types_that_the_next_commit_does_not_touch() -> None:
    with made_world("v1") as world:
        writer = world.open("writer")
        writer.put(customer("a", age=1))
        crash_after_cas(world, 2)
        put_product(writer, "p", 1.0)
        assert (watermark(world, CUSTOMER), covered(world, CUSTOMER)) == (3, [1, 2])
        assert world.open().repo.index_warnings() == []


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"type_name": "Customer"}'])
def test_an_unreadable_index_is_read_as_empty_and_replaced(
    either_world: World, content: bytes
) -> None:
    world = either_world
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    writer.put(customer("a", age=2))
    world.backend.write(layout.index(*CUSTOMER.ref), content)
    assert world.open("reader").history() == [(1, "a", 1), (2, "a", 2)]
    world.open("another").put(customer("a", age=3))
    assert (watermark(world), covered(world)) == (3, [1, 2, 3])


def wrong_path(world: World) -> None:
    """The index names another attempt's file for the head commit."""
    document = index_of(world)
    document["entries"][-1]["path"] = "commits/2-deadbeef/entities/Customer.parquet"
    spoil(world, document)


def test_a_wrong_path_for_head_is_not_believed(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    writer.put(customer("a", age=2))
    wrong_path(world)
    reader = world.open("reader")
    assert reader.history() == [(1, "a", 1), (2, "a", 2)]
    assert "was altered" in str(reader.warning())
    assert len(reader.repo.index_warnings()) == 1


def test_a_missing_entry_for_head_is_found_although_the_watermark_is_right(
    either_world: World,
) -> None:
    world = either_world
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    writer.put(customer("a", age=2))
    document = index_of(world)
    spoil(world, unproven({**document, "entries": document["entries"][:1]}))
    reader = world.open("reader")
    assert reader.history() == [(1, "a", 1), (2, "a", 2)]
    assert "no entry" in str(reader.warning())


@pytest.mark.parametrize(
    ("engine_version", "touching"), [("v1", True), ("v1", False), ("v2", True)]
)
def test_a_wrong_path_for_head_is_put_right_by_the_next_index_write(
    engine_version: str, touching: bool
) -> None:
    """Afterwards nobody would compare it with a manifest again."""
    with made_world(engine_version) as world:
        writer = world.open("writer")
        writer.put(customer("a", age=1))
        writer.put(customer("a", age=2))
        wrong_path(world)
        another = world.open("another")
        if touching:
            another.put(customer("b", age=3))
        else:
            put_product(another, "p", 3.0)
        history = world.open("reader").history()
        assert [row for row in history if row[1] == "a"] == [(1, "a", 1), (2, "a", 2)]
        assert world.open().repo.index_warnings() == []


def without_its_middle(document: dict[str, Any]) -> dict[str, Any]:
    first, _, *rest = document["entries"]
    return {**document, "entries": [first, *rest]}


CHANGES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "an entry is missing": lambda index: json.dumps(without_its_middle(index)).encode(),
    "an entry is missing, sealed": lambda index: resealed(without_its_middle(index)),
    "an older one": lambda index: resealed(set_back(index, 2)),
    "a changed byte": lambda index: resealed(index).replace(b'"row_count": 1', b'"row_count": 7'),
}


@pytest.mark.parametrize("moment", ["after its write", "before its answer was read back"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_index_that_was_changed_under_a_warm_writer_is_proven_as_any_other(
    either_world: World, change: str, moment: str
) -> None:
    world = either_world
    writer = world.open("writer")
    key = layout.index(*CUSTOMER.ref)

    def put(age: int) -> None:
        writer.put(customer("a", age=age))
        writer.repo.flush()

    def alter() -> None:
        altered = CHANGES[change](index_of(world))
        assert altered != world.backend.objects()[key]
        world.backend.write(key, altered)

    for age in (1, 2):
        put(age)
    if moment == "after its write":
        put(3)
        alter()
    else:
        asked: list[str] = []

        def between(kind: str, asked_key: str) -> None:
            if asked_key == key:
                asked.append(kind)
                if asked[-2:] == ["PUT_IF", "GET"]:
                    alter()

        unhook = writer.store.on_request(between)
        writer.fail(FaultKind.RESPONSE_LOST, "PUT_IF", key, times=1)
        put(3)
        unhook()
        assert asked[-2:] == ["PUT_IF", "GET"]
    history = [(1, "a", 1), (2, "a", 2), (3, "a", 3)]
    assert writer.history() == history
    assert writer.warning() is not None  # it did not go by what it remembers
    assert not verify_indices(writer.repo).ok
    put(4)
    assert world.open("reader").history() == writer.history() == [*history, (4, "a", 4)]
    assert verify_indices(writer.repo).ok
    assert verify_indices(world.open("cold").repo).ok


def test_a_paused_writer_cannot_put_an_old_index_over_a_newer_one(either_world: World) -> None:
    """It stops just before its index write; others commit twice and write theirs."""
    world = either_world
    slow, fast = world.open("slow"), world.open("fast")
    slow.put(customer("a", age=1))

    def overtaken() -> None:
        world.pass_lease()
        fast.put(customer("a", age=3))
        fast.put(customer("a", age=4))

    at(slow.store, "PUT_IF", layout.index(*CUSTOMER.ref), overtaken)
    assert slow.put(customer("a", age=2)).commit_id == 2

    assert (watermark(world), covered(world)) == (4, [1, 2, 3, 4])
    assert world.open().repo.index_warnings() == []


def test_two_first_index_writes_at_once_lose_nothing(either_world: World) -> None:
    world = either_world
    slow, fast = world.open("slow"), world.open("fast")

    def overtaken() -> None:
        world.pass_lease()
        fast.put(customer("b", age=2))

    at(slow.store, "PUT_IF", layout.index(*CUSTOMER.ref), overtaken)
    slow.put(customer("a", age=1))
    assert (watermark(world), covered(world)) == (2, [1, 2])


# -- the index of an erased log ---------------------------------------------------------------


def erase(world: World) -> None:
    """`onto init --force`, by another process."""
    uri = f"memory://{world.backend.name}"
    token = initialize_storage(uri, world.engine_version, force=True, dry_run=True).token
    initialize_storage(uri, world.engine_version, force=True, token=token)


def busy_then_erased(world: World, *, keep_index: bool) -> Writer:
    """A process that knows the old log well, on a storage that was begun anew."""
    old = world.open("old")
    for age in range(1, 5):
        old.put(customer("a", age=age))
    assert old.history()[-1] == (4, "a", 4)
    left = world.backend.objects()[layout.index(*CUSTOMER.ref)]
    erase(world)
    if keep_index:  # as when the erasing process died before it had deleted everything
        world.backend.write(layout.index(*CUSTOMER.ref), left)
    return old


@pytest.mark.parametrize("keep_index", [True, False])
@pytest.mark.parametrize("who", ["old", "fresh"])
def test_an_index_of_an_erased_log_is_not_believed(
    either_world: World, keep_index: bool, who: str
) -> None:
    world = either_world
    old = busy_then_erased(world, keep_index=keep_index)
    writer = old if who == "old" else world.open("fresh")
    assert writer.history() == []

    writer.put(customer("a", age=4))  # what the old log had: new in this one

    assert (watermark(world), covered(world)) == (1, [1])
    assert index_of(world)["log_id"] == world.head().log_id
    assert writer.history() == world.open().history() == [(1, "a", 4)]
    assert world.open().repo.index_warnings() == []


@pytest.mark.parametrize("keep_index", [True, False])
def test_a_writer_that_slept_through_an_erasure_reconciles_with_the_new_log(
    either_world: World, keep_index: bool
) -> None:
    """It must not think that its rows are stored because the old log had them."""
    world = either_world
    old = busy_then_erased(world, keep_index=keep_index)
    other = world.open("other")
    other.put(customer("b", age=1))
    other.put(customer("b", age=2))

    result = old.put(customer("a", age=4), customer("b", age=2))

    assert result.commit_id == 3
    assert [(c.inserted, c.updated) for c in result.changes] == [(1, 0)]
    history = [(1, "b", 1), (2, "b", 2), (3, "a", 4)]
    assert old.history() == world.open().history() == history
    assert (watermark(world), covered(world)) == (3, [1, 2, 3])


def test_unreadable_log_ids_do_not_matter_in_a_log_without_one(either_world: World) -> None:
    """A log begun by the first implementation has no log id; its indices are believed."""
    world = either_world
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    head = json.loads(world.backend.objects()[layout.HEAD])
    head["log_id"] = ""
    world.backend.write(layout.HEAD, json.dumps(head).encode())
    reader = world.open("reader")
    assert reader.ages() == {"a": 1}
    assert reader.warning() is None


def test_products_and_customers_have_indices_of_their_own(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    put_product(writer, "p", 1.0)
    assert covered(world, CUSTOMER) == [1]
    assert covered(world, PRODUCT) == [2]
