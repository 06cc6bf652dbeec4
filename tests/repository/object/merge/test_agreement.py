"""What both sides know of each other after merges and updates, in whichever order they came."""

from __future__ import annotations

import pytest

from tests.commitlog.support import World, Writer, at
from tests.engines import customer
from tests.repository.object.merge.test_merge import fine, forked, merge, update


def put(side: Writer, age: int) -> None:
    side.put(customer("a", age=age))


def test_what_was_merged_can_be_taken_back(world: World) -> None:
    main, branch = forked(world)
    put(branch, 2)
    merge(main, "run")
    put(branch, 1)  # as it was at the fork
    assert merge(main, "run").types[0].updated == 1
    assert main.ages()["a"] == 1
    put(branch, 2)  # as it was at the first merge
    merge(main, "run")
    assert main.ages()["a"] == 2
    fine(world)


def test_what_an_update_has_brought_can_be_taken_back(world: World) -> None:
    main, branch = forked(world)
    for age in (2, 1, 2):
        put(main, age)
        update(branch)
        assert branch.ages()["a"] == age
    put(branch, 1)
    merge(main, "run")
    assert main.ages()["a"] == 1
    put(main, 2)
    update(branch)
    assert branch.ages()["a"] == 2
    fine(world)


def test_a_branch_returns_to_what_it_had_merged_after_an_update(world: World) -> None:
    main, branch = forked(world)
    put(branch, 2)
    merge(main, "run")
    put(main, 3)
    update(branch)
    put(branch, 2)
    merge(main, "run")
    assert main.ages()["a"] == 2


def test_the_parent_returns_to_what_was_merged_after_an_update(world: World) -> None:
    main, branch = forked(world)
    put(branch, 2)
    merge(main, "run")
    put(main, 3)
    update(branch)
    put(main, 2)
    update(branch)
    assert branch.ages()["a"] == 2


def test_the_parent_takes_back_what_was_merged(world: World) -> None:
    main, branch = forked(world)
    put(branch, 2)
    merge(main, "run")
    put(main, 1)
    update(branch)
    assert branch.ages()["a"] == 1


def test_what_changed_and_changed_back_says_nothing_however_others_moved_on(world: World) -> None:
    main, branch = forked(world)
    put(branch, 2)
    merge(main, "run")
    put(main, 3)
    put(branch, 4)
    put(branch, 2)
    assert merge(main, "run").empty
    assert main.ages()["a"] == 3
    update(branch)
    assert branch.ages()["a"] == 3


@pytest.mark.parametrize("direction", ["merge", "update"])
def test_a_merge_and_an_update_at_once(world: World, direction: str) -> None:
    """Neither has seen the other: each side knows what it was told."""
    main, branch = forked(world)
    put(branch, 2)
    main.put(customer("b", age=3))
    writer = world.open("beside", branch="run")
    # The update has read main's head, and writes its own after the merge.
    at(writer.store, "PUT_IF", "meta/branches/run/head.json", lambda: merge(main, "run"))
    update(writer)
    assert branch.ages() == main.ages() == {"a": 2, "b": 3}
    source, bring = (branch, lambda: merge(main, "run"))
    if direction == "update":
        source, bring = (main, lambda: update(branch))
    source.put(customer("a", age=5), customer("b", age=6))
    bring()
    assert branch.ages() == main.ages() == {"a": 5, "b": 6}
    fine(world)
