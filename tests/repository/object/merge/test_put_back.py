"""Heads that were put back to an older version, or copied at another time: the numbers of commits
that the two sides know of each other mean others then."""

from __future__ import annotations

import pytest

from storage_engine.commitlog import layout
from storage_engine.errors import IntegrityError
from storage_engine.maintenance.integrity import verify_storage
from tests.commitlog.support import World
from tests.engines import customer
from tests.repository.object.merge.test_merge import forked, merge, update

RUN = layout.branch_head("run")


def put_back(world: World, key: str, head: bytes, *, branch: str | None, commits: int) -> None:
    """The head of then, and as many commits since."""
    world.backend.write(key, head)
    writer = world.open(branch=branch)
    for number in range(commits):
        writer.put(customer("other", age=number))


@pytest.mark.parametrize("commits", [0, 1, 2, 3])
def test_a_branch_that_was_put_back_behind_its_last_merge(world: World, commits: int) -> None:
    main, branch = forked(world)
    old = world.backend.objects()[RUN]
    branch.put(customer("a", age=2))
    branch.put(customer("a", age=3))
    merge(main, "run")
    put_back(world, RUN, old, branch="run", commits=commits)
    with pytest.raises(IntegrityError, match="not one of 'run'"):
        merge(world.open(), "run")
    with pytest.raises(IntegrityError, match="not one of 'run'"):
        update(world.open(branch="run"))


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("commits", [0, 1, 2, 3])
def test_a_parent_that_was_put_back_behind_what_a_branch_knows(
    world: World, commits: int, updated: bool
) -> None:
    main = world.open("main")
    main.put(customer("a", age=1))
    old = world.backend.objects()[layout.HEAD]
    if updated:
        main.repo.branches.create("run")
    main.put(customer("a", age=2))
    main.put(customer("b", age=2))
    if not updated:
        main.repo.branches.create("run")
    branch = world.open(branch="run")
    if updated:
        update(branch)
    branch.put(customer("a", age=7))
    put_back(world, layout.HEAD, old, branch=None, commits=commits)
    with pytest.raises(IntegrityError, match="not one of 'main'"):
        merge(world.open(), "run")
    with pytest.raises(IntegrityError, match="not one of 'main'"):
        update(world.open(branch="run"))
    assert branch.ages() == {"a": 7, "b": 2}
    if not updated:
        findings = verify_storage(world.open().repo).findings
        assert ("branch", "other_history", RUN) in [(f.area, f.reason, f.key) for f in findings]


def test_what_did_not_come_to_the_parents_lost_commits_goes_on(world: World) -> None:
    main, branch = forked(world)
    old = world.backend.objects()[layout.HEAD]
    main.put(customer("a", age=2))
    branch.put(customer("b", age=7))
    put_back(world, layout.HEAD, old, branch=None, commits=1)
    merge(world.open(), "run")
    assert world.open().ages() == {"a": 1, "b": 7, "other": 0}
