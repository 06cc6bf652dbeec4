"""Garbage collection, verification and indices of a storage with branches."""

from __future__ import annotations

from datetime import timedelta

import pytest

from storage_engine.commitlog import layout
from storage_engine.errors import ConfigurationError, UnknownBranchError
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import GcPlan, GcReport, plan_gc, sweep
from storage_engine.maintenance.indices import repair_indices, verify_indices
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer, at
from tests.engines import CUSTOMER, customer, stream_of
from tests.maintenance.support import DAY_S

ALL = CompactionPolicy(min_entries=2)


def collect(writer: Writer, **options: object) -> GcReport:
    """With zero grace."""
    plan = plan_gc(writer.repo, grace=timedelta(), **options)  # type: ignore[arg-type]
    return sweep(writer.repo, plan)


def forked(world: World) -> tuple[Writer, Writer]:
    """Main with five commits, and a branch of the third with two of its own."""
    main = world.open("main")
    for age in (1, 2, 3):
        main.put(customer("a", age=age))
    main.repo.branches.create("run/1")
    branch = world.open("branch", branch="run/1")
    branch.put(customer("a", age=10), customer("b", age=10))
    branch.put(customer("b", age=11))
    main.put(customer("a", age=4))
    main.put(customer("a", age=5))
    for writer in (main, branch):
        writer.repo.flush()
    return main, branch


def lost_attempt(world: World, branch: str | None) -> set[str]:
    """What a writer leaves that dies before its swap."""
    before = {*world.stored_keys()}
    doomed = world.open("doomed", branch=branch)
    doomed.fail(FaultKind.CRASH_BEFORE, "put_if_match", doomed.repo.chain.head_key)
    with pytest.raises(SimulatedCrash):
        doomed.put(customer("lost"))
    world.pass_lease()
    left = {*world.stored_keys()} - before
    left = {key for key in left if key.startswith(("commits/", "staged/"))}
    assert len(left) == 2
    return left


def rows_and_manifests(world: World, branch: Writer) -> set[str]:
    keys = [*world.stored_keys("commits/"), *world.stored_keys("staged/")]
    return {key for key in keys if branch.repo.chain.incarnation in key}


def fine(world: World) -> None:
    main = world.open("verifier")
    assert verify_storage(main.repo, deep=True).findings == []
    for listed in main.repo.branches.list()[1:]:
        branch = world.open(branch=listed.name).repo
        assert verify_storage(branch, deep=True).findings == []
        assert verify_indices(branch).findings == []


def test_nothing_of_a_branch_goes_although_mains_ids_are_higher(world: World) -> None:
    main, branch = forked(world)
    before = {*world.stored_keys()}
    assert collect(main, purge_compacted=True).objects == 0
    assert {*world.stored_keys()} == before
    for _ in range(3):
        main.put(customer("m", age=main.repo.head_commit_id()))
    assert collect(main).objects == 0
    assert world.open(branch="run/1").ages() == branch.ages() == {"a": 10, "b": 11}
    fine(world)


@pytest.mark.parametrize("on", [None, "run/1"])
def test_a_lost_attempt_is_judged_by_its_own_head(world: World, on: str | None) -> None:
    """GC deletes a branch's attempt because main's ids are higher: not here, unless it is lost."""
    main, branch = forked(world)
    left = lost_attempt(world, on)
    assert any(key.startswith("commits/6-") for key in left)
    heads = {w.repo.branch: w.repo.chain.read_head().etag for w in (main, branch)}
    plan = plan_gc(main.repo, grace=timedelta())
    assert {item.key for item in plan.doomed} == left
    assert sweep(main.repo, plan).objects == 2
    assert not left & {*world.stored_keys()}
    # The head that it was meant for has been rewritten: a swap that was on its way must fail.
    assert branch.repo.chain.read_head().etag != heads["run/1"] or on is None
    fine(world)


@pytest.mark.parametrize("slow", ["main", "run/1"])
def test_a_stalled_writer_of_either_head_wakes_after_the_collection(
    world: World, slow: str
) -> None:
    main, _ = forked(world)
    stalled = world.open("stalled", branch=slow)
    collected: list[int] = []

    def meanwhile() -> None:
        world.pass_lease()
        collected.append(collect(main).objects)

    at(stalled.store, "PUT_IF", stalled.repo.chain.head_key, meanwhile)
    stalled.put(customer("late", age=9))
    assert collected == [2]
    assert world.open(branch=slow).ages()["late"] == 9
    fine(world)


def test_an_attempt_of_a_branch_is_not_judged_by_mains_ids(world: World) -> None:
    """It has no rows, and main has used its id: yet it may be published."""
    main, _ = forked(world)
    for age in range(3):
        main.put(customer("m", age=age))
    stalled = world.open("stalled", branch="run/1")
    event = {"id": "e", "namespace": "default", "type": "T", "created_at": "2026-01-01T00:00:00Z"}

    def meanwhile() -> None:
        world.pass_lease()
        collect(main)

    at(stalled.store, "PUT_IF", stalled.repo.chain.head_key, meanwhile)
    result = stalled.commit(events=[event])
    assert result is not None
    assert result.commit_id == 6
    assert world.open(branch="run/1").repo.sent_events(6) == (event,)
    fine(world)


def test_a_child_stays_readable_when_its_parent_is_compacted_and_purged(world: World) -> None:
    main, branch = forked(world)
    branch.repo.branches.create("run/1/child")
    child = world.open(branch="run/1/child")
    child.put(customer("c"))
    before = (branch.history(), child.history())
    compact(main.repo, ALL)
    report = collect(main, purge_compacted=True)
    assert report.objects > 0  # what was written after the fork is in a snapshot, and goes
    cold = world.open(branch="run/1"), world.open(branch="run/1/child")
    assert tuple(each.history() for each in cold) == before
    assert cold[0].put(customer("d")).commit_id == 6
    fine(world)


def test_what_only_a_deleted_branch_had_is_garbage_after_the_grace(world: World) -> None:
    main, branch = forked(world)
    branch.commit(stream_of(CUSTOMER, [customer("bulk")]))
    branch.repo.flush()
    own = {k for k in world.stored_keys() if branch.repo.chain.incarnation in k}
    assert any(key.startswith("staged/") for key in own)
    main.repo.branches.delete("run/1")
    left = {k for k in own if k in world.stored_keys()}
    assert not plan_gc(main.repo, grace=timedelta(days=1)).doomed
    world.backend.clock.sleep(2 * DAY_S)
    plan = plan_gc(main.repo, grace=timedelta(days=1))
    assert {item.key for item in plan.doomed} == left
    assert sweep(main.repo, plan).objects == len(left)
    assert not [k for k in world.stored_keys() if branch.repo.chain.incarnation in k]
    fine(world)


def test_a_tag_keeps_what_a_deleted_branch_had(world: World) -> None:
    main, branch = forked(world)
    branch.repo.create_tag("kept")
    tag = branch.repo.resolve_tag("kept")
    assert (tag.commit_id, tag.branch) == (5, "run/1")
    with pytest.raises(ConfigurationError, match="of branch 'run/1'"):
        main.repo.resolve_tag("kept")
    own = rows_and_manifests(world, branch)
    branch.put(customer("later"))
    branch.repo.flush()
    main.repo.branches.delete("run/1")
    collect(main, purge_compacted=True)
    assert rows_and_manifests(world, branch) == own
    main.repo.delete_tag("kept")
    collect(main)
    assert not [k for k in world.stored_keys() if branch.repo.chain.incarnation in k]


def test_a_tag_of_the_parent_is_one_of_the_branch(world: World) -> None:
    main, branch = forked(world)
    main.repo.create_tag("shared", 2)
    main.repo.create_tag("later", 4)
    assert branch.repo.resolve_tag("shared").commit_id == 2
    assert branch.repo.commit_at("shared") == 2
    assert branch.repo.commit_at("run/1@4") == 4
    with pytest.raises(ConfigurationError, match="of branch 'main'"):
        branch.repo.resolve_tag("later")


def test_expired_branches_are_deleted_children_first_and_said(world: World) -> None:
    main, branch = forked(world)
    hour = timedelta(hours=1)
    branches = main.repo.branches
    branches.create("old", expires_in=hour)
    world.open(branch="old").repo.branches.create("old/child", expires_in=hour)
    branches.create("held", expires_in=hour)
    world.open(branch="held").repo.branches.create("held/child")
    branches.create("young", expires_in=2 * hour)
    branches.create("safe", expires_in=hour)
    branches.protect("safe")
    assert plan_gc(main.repo).expired == ()
    world.backend.clock.sleep(1.5 * 3600)
    plan = plan_gc(main.repo)
    assert plan.expired == ("old/child", "old")
    assert plan.as_dict()["expired_branches"] == ["old/child", "old"]
    report = sweep(main.repo, plan)
    assert report.branches == ["old/child", "old"]
    there = [b.name for b in branches.list()]
    assert there == ["main", "held", "held/child", "run/1", "safe", "young"]
    assert branch.ages()["b"] == 11


def test_collection_is_of_the_whole_storage(world: World) -> None:
    _, branch = forked(world)
    with pytest.raises(ConfigurationError, match="on main"):
        plan_gc(branch.repo)
    with pytest.raises(ConfigurationError, match="is not compacted"):
        compact(branch.repo, ALL)


def test_a_branch_forked_between_two_looks_of_a_collection(world: World) -> None:
    """Planned without it, swept with it: what it needs is spared."""
    main, _ = forked(world)
    compact(main.repo, ALL)
    plan: GcPlan = plan_gc(main.repo, grace=timedelta(), purge_compacted=True)
    assert plan.doomed
    main.repo.branches.create("late", at=4)
    late = world.open(branch="late")
    expected = late.history()
    sweep(main.repo, plan)
    assert world.open(branch="late").history() == expected
    fine(world)


@pytest.mark.parametrize("commits", [0, 1])
def test_a_branch_forked_below_a_snapshot_while_garbage_is_collected(
    world: World, commits: int
) -> None:
    """Its own checkpoint is nobody's until its head names it."""
    main, _ = forked(world)
    compact(main.repo, ALL)
    other = world.open("other")

    def meanwhile() -> None:
        collect(other, purge_compacted=True)
        for age in range(commits):
            other.put(customer("meanwhile", age=age))

    at(main.store, "PUT_IF", layout.branch_head("late"), meanwhile)
    main.repo.branches.create("late", at=2)
    assert world.open(branch="late").history() == [(1, "a", 1), (2, "a", 2)]
    fine(world)


def test_indices_of_a_branch_are_verified_and_repaired(world: World) -> None:
    main, branch = forked(world)
    key = branch.repo.indices.key(CUSTOMER.ref)
    assert verify_indices(branch.repo).ok
    world.backend.write(key, b"{}")
    assert [f.reason for f in verify_indices(branch.repo).findings][:1] == ["lag"]
    assert verify_indices(main.repo).ok
    assert repair_indices(branch.repo, apply=True).applied
    assert verify_indices(world.open(branch="run/1").repo).ok
    assert world.open(branch="run/1").ages() == {"a": 10, "b": 11}
    fine(world)


def test_verification_looks_at_branches_too(world: World) -> None:
    main, branch = forked(world)
    report = verify_storage(main.repo)
    assert report.ok
    assert report.checked["branches"] == 1
    manifest = branch.repo.chain.read_head().head.manifest_path
    (path,) = [f["path"] for f in world.document(manifest or "")["files"]]
    world.backend.write(path, b"PAR1")
    findings = verify_storage(main.repo).findings
    assert {f.key for f in findings} == {path}
    assert all(f.message.startswith("branch run/1: ") for f in findings)
    main.repo.branches.delete("run/1")
    with pytest.raises(UnknownBranchError):
        branch.rows()
    assert verify_storage(main.repo).ok
