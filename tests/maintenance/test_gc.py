"""Garbage collection: what goes, what stays, and that no writer who wakes late loses anything."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from storage_engine.cli.arguments import parse_duration
from storage_engine.commitlog import layout
from storage_engine.commitlog.records import Checkpoint, Head, Manifest
from storage_engine.config import show_duration
from storage_engine.errors import IntegrityError, OntologiaError, SchemaMetadataError
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import GcPlan, GcReport, plan_gc, sweep
from storage_engine.maintenance.gc import plan as plan_module
from storage_engine.maintenance.gc.sweep import _Sweeper
from storage_engine.maintenance.indices import repair_indices, verify_indices
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.model import Field
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.repository.protocol import CommitRequest
from storage_engine.testing.faults import FaultKind
from tests.cli.support import onto
from tests.commitlog.support import HISTORY, World, Writer, at, made_world
from tests.conformance.test_rfc0009_migration import (
    V1,
    V2,
    ask,
    drop,
    entity,
    latest,
    migrate,
    row,
    write,
)
from tests.engines import (
    CUSTOMER,
    Storage,
    customer,
    on_servers,
    put,
    rows_of,
    stream_of,
    table_of,
)
from tests.index.support import put_product
from tests.maintenance.support import DAY_S, Crashes, everything

ALL = CompactionPolicy(min_entries=2)


def days(world: World, count: float) -> None:
    world.backend.clock.sleep(count * DAY_S)


def collect(world: World, **options: Any) -> tuple[GcPlan, GcReport]:
    repo = world.open("collector").repo
    plan = plan_gc(repo, **options)
    return plan, sweep(repo, plan)


def crashed(world: World, age: int, kind: str = "PUT_IF", key: str = layout.HEAD) -> None:
    """A commit whose writer died just before its CAS: it leaves its files and the lock."""
    doomed = world.open("doomed")
    doomed.fail(FaultKind.CRASH_BEFORE, kind, key)
    with pytest.raises(SimulatedCrash):
        doomed.put(customer("a", age=age))
    world.pass_lease()


def crashed_bulk(world: World, age: int) -> None:
    doomed = world.open("doomed")
    doomed.fail(FaultKind.CRASH_BEFORE, "PUT_IF", layout.HEAD)
    with pytest.raises(SimulatedCrash):
        doomed.commit(stream_of(CUSTOMER, [customer("a", age=age)]))
    world.pass_lease()


def reachable(world: World) -> set[str]:
    """What must be there, worked out from the objects alone."""
    objects = world.backend.objects()
    head = Head.parse(objects[layout.HEAD], key=layout.HEAD)
    found = _state(objects, head.manifest_path, head.checkpoint)
    path = head.manifest_path
    while path is not None:
        found.add(path)
        path = Manifest.parse(_there(objects, path), key=path).parent_manifest_path
    for key in world.stored_keys(layout.TAGS):
        tag = json.loads(objects[key])
        ref = tag["checkpoint"]
        upto = tag["commit_id"]
        found |= _state(objects, tag["manifest_path"], ref and _Ref(**ref), upto)
    return found


class _Ref:
    def __init__(self, path: str, commit_id: int, **_: Any) -> None:
        self.path, self.commit_id = path, commit_id


def _there(objects: dict[str, bytes], key: str) -> bytes:
    assert key in objects, f"reachable and gone: {key}"
    return objects[key]


def _state(
    objects: dict[str, bytes], path: str | None, ref: Any, upto: int | None = None
) -> set[str]:
    found: set[str] = set()
    floor = 0
    if ref is not None:
        found.add(ref.path)
        floor = ref.commit_id
        checkpoint = Checkpoint.parse(_there(objects, ref.path), key=ref.path)
        for entries in checkpoint.entries.values():
            for entry in entries:
                if upto is None or entry.min_commit_id <= upto:
                    found |= {file.path for file in entry.files}
    while path is not None:
        manifest = Manifest.parse(_there(objects, path), key=path)
        if manifest.commit_id <= floor:
            break
        found |= {file.path for file in manifest.files}
        path = manifest.parent_manifest_path
    return found


def check(world: World) -> None:
    missing = reachable(world) - set(world.backend.objects())
    assert not missing, f"reachable and gone: {sorted(missing)}"


# -- orphans --------------------------------------------------------------------------------------


def test_a_healthy_storage_has_no_garbage(either_world: World) -> None:
    world = either_world
    writer = world.open("writer", checkpoint_interval=2)
    for age in range(3):
        writer.put(customer("a", age=age))
    days(world, 8)
    plan, report = collect(world, purge_compacted=True)
    assert (plan.doomed, report.objects) == ((), 0)
    assert world.orphans() == []


def test_orphans_of_failed_commits_go_after_the_grace(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    crashed(world, 2)
    assert len(world.orphans()) == 2
    plan, _ = collect(world)
    assert plan.doomed == ()
    assert plan.kept["younger than the grace"] == 2
    writer.put(customer("a", age=3))
    days(world, 8)
    before = everything(world.open("reader"))
    objects = world.backend.objects()
    plan = plan_gc(world.open().repo)
    assert {one.key for one in plan.doomed} == set(world.orphans())
    assert plan.bytes == sum(len(objects[key]) for key in world.orphans())
    assert world.backend.objects() == objects, "planning writes nothing"
    head = world.head()
    report = sweep(world.open().repo, plan)
    assert report.objects == 2
    assert world.orphans() == []
    assert world.head() == head, "ids at or below head need no fence"
    assert everything(world.open("reader")) == before


def test_the_attempt_for_the_next_commit_goes_behind_a_fence(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    crashed(world, 2)
    days(world, 8)
    before, head = everything(world.open("reader")), world.head()
    _, report = collect(world)
    assert report.objects == 2
    assert world.orphans() == []
    assert world.head().write_id != head.write_id
    assert (world.head().commit_id, world.head().updated_at) == (1, head.updated_at)
    assert everything(world.open("reader")) == before
    writer.put(customer("a", age=4))
    check(world)


def sleeper(world: World, act: Callable[[], object], *, bulk: bool = False) -> object:
    """A writer that stops just before its CAS, for eight days, while `act` is done."""
    slow = world.open("slow")

    def sleeps() -> None:
        days(world, 8)
        act()

    at(slow.store, "PUT_IF", layout.HEAD, sleeps)
    try:
        if bulk:
            return slow.commit(stream_of(CUSTOMER, [customer("a", age=7)]))
        return slow.put(customer("a", age=7))
    except OntologiaError as error:
        return error


def test_a_writer_that_wakes_after_the_sweep_loses_nothing(either_world: World) -> None:
    """Its CAS was on the way: the fence refuses it, and its retry writes new files."""
    world = either_world
    world.open("writer").put(customer("a", age=1))
    outcome = sleeper(world, lambda: collect(world))
    assert not isinstance(outcome, Exception)
    check(world)
    assert world.open("reader").history() == [(1, "a", 1), (2, "a", 7)]


def test_planted_without_the_fence_a_late_writer_publishes_what_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.open("writer").put(customer("a", age=1))
    monkeypatch.setattr(_Sweeper, "_rewrite_head", lambda self: self._chain.read_head())
    sleeper(world, lambda: collect(world))
    with pytest.raises(AssertionError, match="reachable and gone"):
        check(world)


def test_a_bulk_load_that_was_given_up_publishes_nothing(world: World) -> None:
    world.open("writer").put(customer("a", age=1))
    outcome = sleeper(world, lambda: collect(world), bulk=True)
    assert isinstance(outcome, OntologiaError)
    assert outcome.retryable
    assert "given up to garbage" in str(outcome)
    check(world)
    assert world.open("reader").history() == [(1, "a", 1)]
    days(world, 8)
    collect(world)
    assert world.orphans() == []


def test_planted_a_heartbeat_that_is_not_given_up_lets_a_late_bulk_load_through(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry on the fenced head finds its parts there, and they go right after."""
    world.open("writer").put(customer("a", age=1))
    monkeypatch.setattr(_Sweeper, "_take_name", lambda self, attempt: True)
    collector = world.open("collector")
    plan: list[GcPlan] = []

    def paused_sweep() -> None:
        plan.append(plan_gc(collector.repo))
        staged = [one for one in plan[0].doomed if one.key.startswith("staged/")]
        left, _ = _Sweeper(collector.repo, plan[0], None)._fence(staged, [])
        at(  # the deletes go out once the writer has published
            slow.store,
            "DELETE",
            "meta/attempts/*",
            lambda: collector.store.delete_many([one.key for one in left]),
        )

    slow = world.open("slow")

    def sleeps() -> None:
        days(world, 8)
        paused_sweep()

    at(slow.store, "PUT_IF", layout.HEAD, sleeps)
    slow.commit(stream_of(CUSTOMER, [customer("a", age=7)]))
    slow.repo.flush()
    with pytest.raises(AssertionError, match="reachable and gone"):
        check(world)


def test_staged_parts_of_a_silent_writer_go_with_its_heartbeat(world: World) -> None:
    world.open("writer").put(customer("a", age=1))
    crashed_bulk(world, 2)
    staged = world.stored_keys("staged/")
    assert staged
    assert world.stored_keys("meta/attempts/")
    plan, _ = collect(world)
    assert plan.doomed == ()
    days(world, 8)
    _, report = collect(world)
    assert report.reasons[plan_module.ORPHAN_STAGED] == len(staged)
    assert report.reasons[plan_module.SILENT_ATTEMPT] == 1
    assert world.orphans() == []
    check(world)


def staged_before_they_are_announced(world: World) -> Callable[[], Any]:
    """As by Spark's data source, whose tasks stage parts before anyone beats for them. Returns
    what publishes them."""
    part = world.open("task").repo.begin_staged(CUSTOMER, attempt="late")
    part.stage(table_of(CUSTOMER, [customer("b", age=1)]), inserted=1)
    driver = world.open("driver")

    def publish() -> Any:
        try:
            with driver.repo.begin_staged(CUSTOMER, attempt="late") as attempt:
                attempt.add(part.files)
                return driver.repo.commit(CommitRequest([attempt.as_input()]))
        except OntologiaError as error:
            return error

    return publish


@pytest.mark.parametrize("moment", ["planned", "fenced"])
def test_parts_that_are_announced_while_they_are_collected(
    world: World, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.open("writer").put(customer("a", age=1))
    publish = staged_before_they_are_announced(world)
    days(world, 8)
    collector = world.open("collector")
    plan = plan_gc(collector.repo)
    assert [one.key.split("/")[1] for one in plan.doomed] == ["late"]
    outcomes = []
    if moment == "planned":
        outcomes.append(publish())
    else:
        right = _Sweeper._delete

        def delete(self: Any, doomed: Any) -> None:
            outcomes.append(publish())
            right(self, doomed)

        monkeypatch.setattr(_Sweeper, "_delete", delete)
    report = sweep(collector.repo, plan)
    [outcome] = outcomes
    check(world)
    if moment == "planned":
        assert (outcome.commit_id, report.objects, report.spared) == (2, 0, 1)
        assert world.open("reader").history() == [(1, "a", 1), (2, "b", 1)]
    else:
        assert "given up to garbage" in str(outcome)
        assert report.objects == 1
    assert world.stored_keys("meta/attempts/") == []


def test_staged_parts_of_a_writer_that_lives_stay(world: World) -> None:
    """It has been loading for ten days, and its heart beats."""
    world.open("writer").put(customer("a", age=1))
    slow = world.open("slow")
    seen: list[GcReport] = []

    def long_load() -> None:
        days(world, 10)
        heartbeat = world.stored_keys("meta/attempts/")[0]
        document = world.document(heartbeat)
        document["heartbeat_at"] = world.backend.clock.now().isoformat()
        world.backend.write(heartbeat, json.dumps(document).encode())
        seen.append(collect(world)[1])

    at(slow.store, "LIST", "staged/*", long_load)
    # The document was rewritten behind the writer's back, so its own next beat fails: what counts
    # here is that the collector left the parts alone.
    with pytest.raises(OntologiaError):
        slow.commit(stream_of(CUSTOMER, [customer("a", age=7)]))
    assert seen[0].objects == 0


def died_compacting(world: World) -> str:
    """The key of the lease that it left."""
    writer = world.open("writer")
    for age in (1, 2):
        writer.put(customer("a", age=age))
    doomed = world.open("doomed")
    doomed.fail(FaultKind.CRASH_BEFORE, "PUT_IF", layout.HEAD)
    with pytest.raises(SimulatedCrash):
        compact(doomed.repo, ALL)
    (lease,) = world.stored_keys(layout.LEASES)
    return lease


def test_the_lease_of_a_compactor_that_died_goes(world: World) -> None:
    died_compacting(world)
    assert plan_module.EXPIRED_LEASE not in collect(world)[0].by_reason()
    days(world, 8)
    _, report = collect(world)
    assert report.reasons[plan_module.EXPIRED_LEASE] == 1
    assert world.stored_keys(layout.LEASES) == []
    assert compact(world.open("another").repo, ALL).runs
    check(world)


def test_the_ticket_of_a_writer_that_died_in_line_goes(world: World) -> None:
    held = world.open("holder").repo.lock.acquire()
    waiting = world.open("waiting")
    waiting.fail(FaultKind.CRASH_AFTER, "PUT_IF", f"{layout.LINES}*")
    with pytest.raises(SimulatedCrash):
        waiting.put(customer("a"))
    held.release()
    assert plan_module.EXPIRED_TICKET not in collect(world)[0].by_reason()
    days(world, 8)
    _, report = collect(world)
    assert report.reasons[plan_module.EXPIRED_TICKET] == 1
    assert world.stored_keys(layout.LINES) == []
    check(world)


def test_all_that_is_collected_by_silence_is_known_here() -> None:
    silent = {prefix.path for prefix in layout.PREFIXES if prefix.collected == "silence"}
    assert silent == {layout.ATTEMPTS, *plan_module.EXPIRING}


def test_a_lease_that_is_taken_between_plan_and_sweep_stays(world: World) -> None:
    lease = died_compacting(world)
    days(world, 8)
    collector, compactor = world.open("collector"), world.open("another")
    plan = plan_gc(collector.repo)
    assert plan.by_reason()[plan_module.EXPIRED_LEASE][0] == 1
    seen: list[GcReport] = []
    # The other holds the lease, and is about to publish.
    at(compactor.store, "PUT_IF", layout.HEAD, lambda: seen.append(sweep_leases(collector, plan)))
    compact(compactor.repo, ALL)
    assert [(report.objects, report.spared) for report in seen] == [(0, 1)]
    assert world.stored_keys(lease) == []  # released by its holder
    check(world)


def sweep_leases(collector: Writer, plan: GcPlan) -> GcReport:
    """That part of a sweep which needs no write lock."""
    leases = tuple(one for one in plan.doomed if one.reason == plan_module.EXPIRED_LEASE)
    return sweep(collector.repo, replace(plan, doomed=leases))


def test_a_heartbeat_that_beats_between_plan_and_sweep_saves_the_parts(world: World) -> None:
    world.open("writer").put(customer("a", age=1))
    crashed_bulk(world, 2)
    days(world, 8)
    repo = world.open("collector").repo
    plan = plan_gc(repo)
    heartbeat = world.stored_keys("meta/attempts/")[0]
    document = world.document(heartbeat)
    now = {"heartbeat_at": world.backend.clock.now().isoformat()}
    world.backend.write(heartbeat, json.dumps({**document, **now}).encode())
    staged = world.stored_keys("staged/")
    report = sweep(repo, plan)
    assert world.stored_keys("staged/") == staged
    assert report.spared == len(staged) + 1


def test_what_is_published_between_plan_and_sweep_stays(either_world: World) -> None:
    """A delayed CAS lands after the plan was made."""
    world = either_world
    world.open("writer").put(customer("a", age=1))
    doomed = world.open("doomed")
    doomed.fail(FaultKind.DELAYED, "PUT_IF", layout.HEAD, seconds=9 * DAY_S, times=None)
    with pytest.raises(OntologiaError):
        doomed.put(customer("a", age=2))
    world.pass_lease()
    days(world, 8)
    repo = world.open("collector").repo
    plan = plan_gc(repo)
    assert len(plan.doomed) == 2
    world.backend.land_all()
    assert world.head().commit_id == 2
    report = sweep(repo, plan)
    assert (report.objects, report.spared) == (0, 2)
    check(world)
    assert world.open("reader").history() == [(1, "a", 1), (2, "a", 2)]


def test_objects_beyond_head_and_strangers_are_left_alone(either_world: World) -> None:
    world = either_world
    world.open("writer").put(customer("a", age=1))
    strange = ["commits/9-abc/manifest.json", "commits/notes.txt", "snapshots/readme.txt", "x/y"]
    for key in strange:
        world.backend.write(key, b"?")
    days(world, 8)
    plan, _ = collect(world)
    assert plan.doomed == ()
    assert plan.kept["of a commit beyond head"] == 1
    assert plan.kept["not ours"] == 2
    assert set(strange) <= set(world.backend.objects())


# -- compacted files, snapshots, checkpoints ------------------------------------------------------


def compacted(world: World, commits: int = 4) -> Writer:
    writer = world.open("writer", checkpoint_interval=1000)
    for age in range(commits):
        writer.put(customer("a", age=age), customer(f"k{age}", age=age))
    put_product(writer, "p", 1.0)
    writer.repo.flush()
    report = compact(writer.repo, ALL)
    assert report.rows_rewritten == 2 * commits
    return writer


def test_replaced_files_stay_without_the_option(either_world: World) -> None:
    world = either_world
    compacted(world)
    days(world, 8)
    plan, _ = collect(world)
    assert plan.doomed == ()
    assert plan.kept["replaced by a snapshot (--purge-compacted)"] == 4


def test_replaced_files_go_after_the_readers_grace(either_world: World) -> None:
    world = either_world
    writer = compacted(world)
    days(world, 6)
    plan, _ = collect(world, purge_compacted=True)
    assert plan.doomed == ()
    days(world, 2)
    before = everything(world.open("reader"))
    _, report = collect(world, purge_compacted=True)
    assert report.reasons == {plan_module.COMPACTED: 4}
    check(world)
    assert everything(world.open("reader")) == before
    assert verify_indices(world.open().repo).ok
    assert [r.id for r in world.open().repo.list_commits()] == [5, 4, 3, 2, 1]
    writer.put(customer("z", age=1))
    assert collect(world, purge_compacted=True)[1].objects == 0


def test_the_grace_counts_from_the_first_checkpoint_without_the_file(world: World) -> None:
    """Later checkpoints, written every few commits, do not start it again."""
    writer = compacted(world)
    busy = world.open("busy", checkpoint_interval=2)
    for age in range(10):
        days(world, 1.1)
        busy.put(customer("busy", age=age))
    busy.repo.flush()
    before = everything(world.open("reader"))
    _, report = collect(world, purge_compacted=True)
    assert report.reasons[plan_module.COMPACTED] == 4
    check(world)
    assert everything(world.open("reader")) == before
    assert writer.repo.head_commit_id() == 15


def test_old_checkpoints_go_and_those_within_the_grace_stay(either_world: World) -> None:
    world = either_world
    writer = world.open("writer", checkpoint_interval=1)
    for age in range(12):
        writer.put(customer("a", age=age))
        days(world, 1)
    writer.repo.flush()
    before = everything(world.open("reader"))
    kept = world.stored_keys("meta/checkpoints/")
    _, report = collect(world)
    left = world.stored_keys("meta/checkpoints/")
    # 12 checkpoints of the last 12 days: the newest that is a week old, and all since.
    assert (len(kept), len(left)) == (12, 12 - report.reasons[plan_module.OLD_CHECKPOINT])
    assert 7 <= len(left) <= 9
    check(world)
    assert everything(world.open("reader")) == before


def test_a_tag_keeps_the_files_it_was_made_on(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    for age in range(4):
        writer.put(customer("a", age=age))
    writer.repo.create_tag("v1", 2)
    compact(writer.repo, ALL)
    days(world, 8)
    before = everything(world.open("reader"))
    _, report = collect(world, purge_compacted=True)
    assert report.reasons == {plan_module.COMPACTED: 2}, "commits 3 and 4 are not the tag's"
    check(world)
    writer.repo.delete_tag("v1")
    _, report = collect(world, purge_compacted=True)
    assert report.reasons == {plan_module.COMPACTED: 2}
    check(world)
    assert everything(world.open("reader")) == before


def test_planted_pins_that_are_forgotten_are_seen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = world.open("writer")
    for age in range(4):
        writer.put(customer("a", age=age))
    writer.repo.create_tag("v1", 2)
    compact(writer.repo, ALL)
    days(world, 8)
    monkeypatch.setattr("storage_engine.maintenance.gc.reach._pinned", lambda chain, head: {})
    collect(world, purge_compacted=True)
    with pytest.raises(AssertionError, match="reachable and gone"):
        check(world)


def test_a_tag_that_cannot_be_followed_stops_everything(world: World) -> None:
    writer = world.open("writer", checkpoint_interval=2)
    for age in range(2):
        writer.put(customer("a", age=age))
    writer.repo.create_tag("v1")
    crashed(world, 9)
    days(world, 8)
    document = world.document(layout.tag("v1"))
    document["checkpoint"] |= {"path": "meta/checkpoints/2-gone.json", "sha256": "0" * 64}
    world.backend.write(layout.tag("v1"), json.dumps(document).encode())
    with pytest.raises(IntegrityError, match="tag 'v1' cannot be followed"):
        plan_gc(world.open("collector").repo)


def test_files_that_an_index_still_names_stay(either_world: World) -> None:
    """The compactor died between its CAS and the index."""
    world = either_world
    writer = world.open("writer")
    for age in range(4):
        writer.put(customer("a", age=age))
    writer.repo.flush()
    index = world.backend.objects()[layout.index(*CUSTOMER.ref)]
    compact(writer.repo, ALL)
    world.backend.write(layout.index(*CUSTOMER.ref), index)
    days(world, 8)
    assert collect(world, purge_compacted=True)[1].objects == 0
    assert world.open("reader").history()[0] == (1, "a", 0)
    repair_indices(world.open().repo, apply=True)
    assert collect(world, purge_compacted=True)[1].reasons == {plan_module.COMPACTED: 4}
    check(world)
    assert world.open("reader").history()[0] == (1, "a", 0)


def test_snapshots_of_a_compaction_that_died_go(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    for age in range(4):
        writer.put(customer("a", age=age))
    doomed = world.open("doomed")
    doomed.fail(FaultKind.CRASH_BEFORE, "PUT_IF", layout.HEAD)
    with pytest.raises(SimulatedCrash):
        compact(doomed.repo, ALL)
    world.pass_lease()
    loose = world.stored_keys("snapshots/")
    assert loose
    days(world, 8)
    before = everything(world.open("reader"))
    _, report = collect(world)
    assert report.reasons[plan_module.ORPHAN_SNAPSHOT] == len(loose)
    assert world.stored_keys("snapshots/") == []
    assert world.stored_keys("meta/attempts/") == []
    assert everything(world.open("reader")) == before
    compact(writer.repo, ALL)
    assert everything(world.open("reader")) == before
    check(world)


def test_a_compactor_that_wakes_after_the_sweep_publishes_nothing(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    for age in range(4):
        writer.put(customer("a", age=age))
    slow = world.open("slow")

    def sleeps() -> None:
        days(world, 8)
        collect(world)

    at(slow.store, "PUT_IF", layout.HEAD, sleeps)
    with pytest.raises(OntologiaError):
        compact(slow.repo, ALL)
    check(world)
    assert len(world.open("reader").history()) == 4


def test_snapshots_merged_into_a_larger_one_go(either_world: World) -> None:
    world = either_world
    writer = compacted(world)
    first = set(world.stored_keys("snapshots/"))
    days(world, 8)
    for age in range(10, 14):
        writer.put(customer("a", age=age), customer(f"k{age}", age=age))
    writer.repo.flush()
    compact(writer.repo, CompactionPolicy(min_entries=2, ratio=100))
    second = set(world.stored_keys("snapshots/")) - first
    assert second
    assert collect(world)[1].objects == 0, "readers may still have the older checkpoint"
    days(world, 8)
    before = everything(world.open("reader"))
    _, report = collect(world)
    assert report.reasons[plan_module.ORPHAN_SNAPSHOT] == len(first)
    assert set(world.stored_keys("snapshots/")) == second
    assert everything(world.open("reader")) == before
    check(world)


def test_index_fences_need_types_json(world: World) -> None:
    compacted(world)
    days(world, 8)
    world.backend.write(layout.TYPES, b"{")
    objects = [key for key in world.backend.objects() if key.startswith("commits/")]
    with pytest.raises(SchemaMetadataError):
        collect(world, purge_compacted=True)
    assert [k for k in world.backend.objects() if k.startswith("commits/")] == objects


# -- crashes --------------------------------------------------------------------------------------


@pytest.mark.simulation
@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_a_crash_at_any_write_of_the_sweep_changes_no_read_and_a_rerun_finishes(
    engine_version: str,
) -> None:
    with made_world(engine_version) as world:
        writer = compacted(world, commits=3)
        doomed = world.open("doomed")
        doomed.fail(FaultKind.CRASH_BEFORE, "PUT_IF", layout.HEAD)
        with pytest.raises(SimulatedCrash):
            doomed.put(customer("a", age=50))
        world.pass_lease()
        writer.put(customer("a", age=60))
        crashed(world, 70)
        if engine_version == "v2":
            crashed_bulk(world, 80)
        objects = world.backend.objects()
        assert len(world.orphans()) >= 4

    def act(writer: Writer) -> None:
        sweep(writer.repo, plan_gc(writer.repo, purge_compacted=True))

    def after(world: World, before: dict[str, Any]) -> None:
        check(world)
        assert everything(world.open("reader")) == before
        act(world.open("again"))
        check(world)
        assert everything(world.open("reader")) == before
        assert plan_gc(world.open().repo, purge_compacted=True).doomed == ()
        left = [key for key in world.orphans() if not key.startswith("meta/checkpoints/")]
        assert left == []
        world.open("next").commit(rows_of(CUSTOMER, customer("a", age=99)))
        check(world)

    assert Crashes(objects, engine_version, act, days=8).each(after) >= 15


# -- on every store, at the shell -----------------------------------------------------------------


@on_servers
def test_the_command(storage: Storage, tmp_path: Path) -> None:
    repository = storage.open(checkpoint_interval=1)
    for age in (1, 2, 3):
        put(repository, customer("a", age=age))
    repository.close()
    config = tmp_path / "onto.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in storage.settings.items()]
    config.write_text("\n".join(lines))
    place = ("--storage-uri", storage.uri, "--config", config)
    if storage.backend == "sqlite":
        failed = onto("gc", "--apply", *place)
        assert failed.code == 4
        assert "SQLite" in failed.error()
        return
    litter = [
        "commits/2-deadbeef/manifest.json",
        "commits/4-deadbeef/entities/Customer/v1.parquet",
        "staged/deadbeef/entities/Customer/v1/part-00000.parquet",
        "snapshots/entities/Customer-1-3-deadbeef/current.parquet",
    ]
    store = storage.objects()
    for key in litter:
        store.put(key, b"litter")
    assert "younger than the grace" in onto("gc", *place).out
    time.sleep(1.1)  # servers tell the time of a write in whole seconds
    looked = onto("gc", "--older-than", "0s", "--json", *place).json
    assert looked["applied"] is False
    assert {one["key"] for one in looked["doomed"]} >= set(litter)
    assert all(store.get(key).data for key in litter)
    shown = onto("gc", "--older-than", "0s", "--limit", "1", *place)
    assert "more not shown: raise --limit" in shown.out
    assert "would go with --apply" in shown.out
    done = onto("gc", "--older-than", "0s", "--purge-compacted", "--apply", "--json", *place)
    assert done.code == 0
    assert done.json["deleted"]["objects"] == done.json["objects"] >= len(litter)
    left = {
        info.key for prefix in ("commits/", "staged/", "snapshots/") for info in store.list(prefix)
    }
    assert not left & set(litter)
    store.close()
    assert onto("verify", "--deep", "--json", *place).json["ok"] is True
    assert "Nothing to delete" in onto("gc", "--older-than", "0s", *place).out
    repository = storage.open()
    put(repository, customer("a", age=4))
    assert repository.read(CUSTOMER, HISTORY).num_rows == 4
    repository.close()


@pytest.mark.parametrize("span", ["", "7", "7x", "d7", "-7d", "7d 1h"])
def test_spans_that_are_none_are_refused(span: str) -> None:
    failed = onto("gc", "--older-than", span)
    assert failed.code == 2
    assert "is no duration" in failed.error()


def test_spans_of_time() -> None:
    assert parse_duration("1d12h") == timedelta(days=1, hours=12)
    assert parse_duration("2w") == timedelta(weeks=2)
    assert parse_duration("90s") == timedelta(seconds=90)
    assert [show_duration(parse_duration(t)) for t in ("90s", "36h", "0s")] == [
        "1m30s",
        "1d12h",
        "0s",
    ]


# -- the lock -------------------------------------------------------------------------------------


def garbage_of_all_kinds(world: World) -> None:
    """Of every kind that has to be fenced off."""
    writer = world.open("writer")
    for age in range(4):
        writer.put(customer("a", age=age))
    compact(writer.repo, ALL)
    dying = world.open("dying")
    dying.fail(FaultKind.CRASH_BEFORE, "PUT_IF", layout.LOCK)
    writer.put(customer("a", age=4))
    writer.put(customer("a", age=5))
    with pytest.raises(SimulatedCrash):
        compact(dying.repo, ALL)
    crashed(world, age=90)
    if world.engine_version == "v2":
        crashed_bulk(world, age=91)
    days(world, 8)
    writer.put(customer("a", age=6))
    writer.repo.flush()
    compact(writer.repo, ALL)
    days(world, 8)


def test_nothing_is_listed_while_the_lock_is_held(either_world: World) -> None:
    world = either_world
    garbage_of_all_kinds(world)
    repo = world.open("collector").repo
    plan = plan_gc(repo, purge_compacted=True)
    fences = {item.fence.value for item in plan.doomed}
    assert fences >= {"attempt", "index"}
    requests: list[tuple[str, str]] = []
    repo.store.on_request(lambda kind, key: requests.append((kind, key)))  # type: ignore[attr-defined]
    report = sweep(repo, plan)
    assert report.objects == len(plan.doomed)
    held, under = False, []
    for kind, key in requests:
        if (kind, key) == ("PUT_IF", layout.LOCK):
            held = True
        elif (kind, key) == ("DELETE_IF", layout.LOCK):
            held = False
        elif held:
            under.append(kind)
    assert under
    assert "LIST" not in under
    assert world.open("reader").ages() == {"a": 6}


@pytest.mark.parametrize("moment", ["examined", "fenced"])
def test_commits_and_compactions_beside_a_sweep_lose_nothing(
    either_world: World, moment: str
) -> None:
    """Before the lock is taken (the indices have been looked at), and when it is given back (the
    second look is still to come)."""
    world = either_world
    garbage_of_all_kinds(world)
    rival = world.open("rival")
    repo = world.open("collector").repo
    plan = plan_gc(repo, purge_compacted=True)

    def meanwhile() -> None:
        rival.put(customer("b", age=1))
        rival.put(customer("b", age=2))
        compact(rival.repo, ALL)
        rival.put(customer("b", age=3))
        rival.repo.flush()

    if moment == "examined":
        at(repo.store, "PUT_IF", layout.LOCK, meanwhile)  # type: ignore[arg-type]
    else:
        at(repo.store, "DELETE_IF", layout.LOCK, meanwhile, when="after")  # type: ignore[arg-type]
    report = sweep(repo, plan)
    assert report.objects > 0
    reader = world.open("reader")
    assert reader.ages() == {"a": 6, "b": 3}
    assert len(reader.rows(window=HISTORY)) == 10
    reachable(world)
    assert verify_indices(repo).ok
    rival.put(customer("a", age=7))
    assert world.open("again").ages() == {"a": 7, "b": 3}


def test_files_of_a_purged_type_go_and_those_of_old_versions_stay(either_world: World) -> None:
    world = either_world
    repository = world.open("writer").repo
    thing = entity("Thing", n=Field[int])
    write(repository, V1, row("a", name="Ann", age=1))
    write(repository, thing, row("t", n=1))
    write(repository, thing, row("t", n=2))
    migrate(repository, V2)
    changed = entity("Thing", n=Field[float])
    migrate(repository, changed)
    drop(repository, "Thing", purge=True)
    migrate(repository, thing)
    write(repository, thing, row("t", n=3))  # of the same name, and not of the same type
    repository.flush()
    days(world, 6)
    assert collect(world)[0].doomed == ()
    days(world, 2)
    kept = [k for k in world.stored_keys() if "Customer" in k]
    doomed = [
        k
        for k in world.stored_keys()
        if "/Thing" in k
        and k.startswith(("commits/", "staged/"))
        and not k.startswith("commits/8-")
    ]
    plan, report = collect(world)
    assert report.objects == len(doomed) == 3
    assert report.reasons == {plan_module.PURGED: 3}
    assert sum(plan.kept.values()) == 0
    assert [k for k in world.stored_keys() if "Customer" in k] == kept
    fresh = world.open("fresh").repo
    assert [r["id"] for r in ask(fresh, V1, schema_version=1)[0]] == ["a"]
    assert [r["id"] for r in latest(fresh, V2)] == ["a"]
    assert verify_storage(fresh, deep=True).findings == []
    assert [r["n"] for r in ask(fresh, thing, history=True)[0]] == [3]
    write(fresh, thing, row("t", n=1))
    assert verify_storage(fresh, deep=True).findings == []
