"""Types that one side ends, or ends and makes anew, around merges and updates."""

from __future__ import annotations

from datetime import timedelta

import pytest

from storage_engine import Field
from storage_engine.errors import MergeConflictError
from storage_engine.maintenance.gc import plan_gc, sweep
from tests.commitlog.support import World, Writer
from tests.conformance.test_rfc0009_migration import (
    V1,
    V2,
    drop,
    entity,
    latest,
    migrate,
    row,
    write,
)
from tests.repository.object.merge.test_merge import fine, merge, update

RENAMED = {
    name: entity(name, renamed_from="Customer", name=Field[str], age=Field[int])
    for name in ("Client", "Guest")
}


def forked(world: World) -> tuple[Writer, Writer]:
    main = world.open("main")
    write(main.repo, V1, row("old", name="Ann", age=1))
    main.repo.branches.create("run")
    return main, world.open("branch", branch="run")


def made_anew(side: Writer, spec: object = V1, **values: object) -> None:
    drop(side.repo, "Customer")
    migrate(side.repo, spec)  # type: ignore[arg-type]
    write(side.repo, spec, row("new", **({"name": "Bo", "age": 2} | values)))  # type: ignore[arg-type]


def keys(side: Writer, spec: object = V1) -> list[str]:
    return [r["id"] for r in latest(side.repo, spec)]  # type: ignore[arg-type]


@pytest.mark.parametrize("who", ["main", "branch"])
def test_a_type_that_one_side_made_anew_is_not_the_one_that_the_other_migrated(
    world: World, who: str
) -> None:
    """Version and schema are the same, and it is another type all the same."""
    sides = dict(zip(("main", "branch"), forked(world), strict=True))
    made_anew(sides.pop(who), V2, age=2.0, tier="x")
    (other,) = sides.values()
    migrate(other.repo, V2)
    write(other.repo, V2, row("more", name="Cy", age=3.0, tier="x"))
    main = world.open("main")
    with pytest.raises(MergeConflictError) as refused:
        merge(main, "run")
    assert [c["conflict"] for c in refused.value.conflicts] == ["schema"]


def test_a_type_that_was_merged_is_dropped_afterwards(world: World) -> None:
    """What the branch itself has brought is no change of others."""
    main, branch = forked(world)
    write(branch.repo, V1, row("more", name="Cy", age=3))
    merge(main, "run")
    drop(branch.repo, "Customer")
    assert [t.schema for t in merge(main, "run").types] == ["dropped"]
    fine(world)


def test_a_type_that_was_merged_is_made_anew_afterwards(world: World) -> None:
    main, branch = forked(world)
    write(branch.repo, V1, row("more", name="Cy", age=3))
    merge(main, "run")
    made_anew(branch)
    merge(main, "run")
    assert keys(main) == keys(world.open()) == ["new"]
    fine(world)


def test_an_update_tells_of_a_purge_and_the_branch_keeps_what_it_shares(world: World) -> None:
    """Until it is deleted: as if the type had been dropped only."""
    main, branch = forked(world)
    files = {key for key in world.stored_keys() if key.endswith(".parquet")}
    drop(main.repo, "Customer", purge=True)
    assert [t.schema for t in update(branch).types] == ["dropped"]
    sweep(main.repo, plan_gc(main.repo, grace=timedelta()))
    assert keys(branch) == []
    assert files <= {*world.stored_keys()}
    fine(world)
    main.repo.branches.delete("run")
    sweep(main.repo, plan_gc(main.repo, grace=timedelta()))
    assert not files & {*world.stored_keys()}
    fine(world)


def test_both_sides_end_a_type_that_one_has_migrated(world: World) -> None:
    """They agree, although of different versions."""
    main, branch = forked(world)
    migrate(branch.repo, V2)
    drop(branch.repo, "Customer")
    drop(main.repo, "Customer")
    for bring in (lambda: merge(main, "run"), lambda: update(branch)):
        assert bring().commit_id is None
    fine(world)


@pytest.mark.parametrize("direction", ["merge", "update"])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(None, "Client"), ("Guest", "Client"), ("Guest", None)]
)
def test_a_type_that_both_sides_ended_each_in_its_own_way(
    world: World, ours: str | None, theirs: str | None, direction: str
) -> None:
    """What one has ended does not come back under the name that the other gave it, nor is it there
    under two names."""
    main, branch = forked(world)
    for side, name in ((main, ours), (branch, theirs)):
        if name is None:
            drop(side.repo, "Customer")
        else:
            migrate(side.repo, RENAMED[name])
    with pytest.raises(MergeConflictError, match="renamed it to") as refused:
        merge(main, "run") if direction == "merge" else update(branch)
    assert [c["conflict"] for c in refused.value.conflicts] == ["schema"]
    fine(world)


def test_both_sides_rename_a_type_alike(world: World) -> None:
    main, branch = forked(world)
    for side in (main, branch):
        migrate(side.repo, RENAMED["Client"])
    write(branch.repo, RENAMED["Client"], row("more", name="Cy", age=3))
    assert merge(main, "run").commit_id == 3
    assert keys(main, RENAMED["Client"]) == ["more", "old"]
    fine(world)


@pytest.mark.parametrize("when", ["before the merge", "after the merge"])
def test_what_others_have_changed_beside_a_merge_is_not_dropped(world: World, when: str) -> None:
    main, branch = forked(world)
    write(branch.repo, V1, row("more", name="Cy", age=3))
    if when == "before the merge":
        write(main.repo, V1, row("theirs", name="Di", age=3))
    merge(main, "run")
    if when == "after the merge":
        write(main.repo, V1, row("theirs", name="Di", age=3))
    drop(branch.repo, "Customer")
    with pytest.raises(MergeConflictError, match="changed it since"):
        merge(main, "run")


def test_a_type_whose_end_was_updated_is_made_anew(world: World) -> None:
    main, branch = forked(world)
    drop(main.repo, "Customer")
    update(branch)
    migrate(branch.repo, V1)
    write(branch.repo, V1, row("new", name="Bo", age=2))
    merge(main, "run")
    assert keys(main) == keys(world.open()) == keys(branch) == ["new"]
    fine(world)


def test_a_type_whose_end_was_merged_is_made_anew_on_the_parent(world: World) -> None:
    main, branch = forked(world)
    drop(branch.repo, "Customer")
    merge(main, "run")
    migrate(main.repo, V1)
    write(main.repo, V1, row("new", name="Bo", age=2))
    update(branch)
    assert keys(branch) == keys(world.open(branch="run")) == keys(main) == ["new"]
    fine(world)
