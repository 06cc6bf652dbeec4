"""Maintenance on histories that were published in groups: nothing tells them apart from others."""

from __future__ import annotations

import pytest

from storage_engine.commitlog import layout
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.maintenance.restore import restore
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.repository.protocol import CommitRequest
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of
from tests.maintenance.support import DAY_S, earlier, everything
from tests.maintenance.test_gc import check

pytestmark = pytest.mark.simulation


def group(writer: Writer, *ages: int) -> None:
    """A commit for each age, by one swap."""
    pending = []
    for age in ages:
        rows = [rows_of(CUSTOMER, customer("a", age=age), customer(f"k{age}", age=age))]
        if age % 2:
            rows.append(rows_of(PRODUCT, product("p", float(age))))
        pending.append(writer.repo.submit(CommitRequest(rows)))
    assert all(each.result() is not None for each in pending)
    writer.repo.flush()


def test_compaction_gc_tags_and_restore(either_world: World) -> None:
    world = either_world
    writer = world.open("ours", checkpoint_interval=4)
    group(writer, 1, 2, 3)
    group(writer, 4, 5, 6, 7, 8)
    writer.repo.create_tag("middle", 5)
    said = everything(writer)
    compact(writer.repo, CompactionPolicy(min_entries=2, ratio=10))
    assert any(key.startswith("snapshots/") for key in world.stored_keys())
    group(writer, 9, 10)
    assert earlier(everything(world.open()), 8) == said
    world.backend.clock.sleep(30 * DAY_S)
    fresh = world.open()
    sweep(fresh.repo, plan_gc(fresh.repo, purge_compacted=True))
    check(world)
    assert restore(fresh.repo, "middle", apply=True).new_commit_id == 11
    group(fresh, 20, 21)
    reader = world.open()
    assert earlier(everything(reader), 8) == said
    assert reader.ages()["a"] == 21
    assert verify_storage(reader.repo, deep=True).findings == []


def test_what_a_crash_left_of_a_group_is_collected_when_head_has_passed_it(world: World) -> None:
    """Attempts at ids beyond the next one are nobody's until then, and harm nobody."""
    writer = world.open("ours")
    group(writer, 1, 2)
    writer.fail(FaultKind.CRASH_BEFORE, "PUT_IF", layout.HEAD)
    with pytest.raises(SimulatedCrash):
        group(writer, 3, 4, 5)
    left = world.orphans()
    assert {int(key.split("/")[1].split("-")[0]) for key in left} == {3, 4, 5}
    world.backend.clock.sleep(30 * DAY_S)
    fresh = world.open("fresh")
    sweep(fresh.repo, plan_gc(fresh.repo))
    assert {int(key.split("/")[1].split("-")[0]) for key in world.orphans()} == {4, 5}
    group(fresh, 13, 14, 15, 16)
    world.backend.clock.sleep(30 * DAY_S)
    sweep(fresh.repo, plan_gc(fresh.repo))
    assert world.orphans() == []
    check(world)
    assert verify_storage(fresh.repo, deep=True).findings == []
