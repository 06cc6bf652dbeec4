"""Crashes, lost, late and unknown answers of both heads, and whatever goes on beside a merge."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.errors import (
    CommitStateUnknownError,
    ConfigurationError,
    OntologiaError,
    UnknownBranchError,
)
from storage_engine.maintenance.compaction import compact
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer, at
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of, stream_of
from tests.maintenance.support import Crashes, copied, everything
from tests.repository.object.merge.test_merge import ALL, fine, forked, merge, update

HEAD = layout.branch_head("run")


def collected(writer: Writer, *, purge: bool = False) -> None:
    """With no grace at all."""
    sweep(writer.repo, plan_gc(writer.repo, grace=timedelta(), purge_compacted=purge))


# -- mistakes that others shipped, as far as they are not beside the rest -------------------------


def test_a_child_stays_readable_when_its_parent_is_merged_compacted_and_purged(
    world: World,
) -> None:
    main, branch = forked(world)
    branch.put(customer("b", age=2))
    branch.repo.branches.create("run/child")
    child = world.open(branch="run/child")
    child.put(customer("c", age=3))
    branch.put(customer("d", age=4))
    expected = {"a": 1, "b": 2, "c": 3}
    for step in (
        lambda: merge(main, "run"),
        lambda: compact(main.repo, ALL),
        lambda: collected(main, purge=True),
    ):
        step()
        assert child.ages() == world.open(branch="run/child").ages() == expected
    with pytest.raises(ConfigurationError, match="has children"):
        main.repo.branches.delete("run")
    merge(branch, "run/child")
    merge(main, "run")
    main.repo.branches.delete("run/child")
    main.repo.branches.delete("run")
    collected(main, purge=True)
    assert world.open().ages() == {**expected, "d": 4}
    fine(world)


# -- crashes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bulk", [False, True])
def test_a_commit_on_a_branch_that_is_killed(world: World, bulk: bool) -> None:
    """Main is as it was, whatever happens; the commit is there as a whole or not at all."""
    main, branch = forked(world)
    main.repo.flush()
    branch.put(customer("warm"))
    branch.repo.flush()
    new = [customer("x", age=7), customer("a", age=8)]

    def operation(writer: Writer) -> object:
        with writer.repo.branches.opened("run") as repo:
            rows = stream_of(CUSTOMER, new) if bulk else rows_of(CUSTOMER, *new)
            result = Writer(writer.store, repo).commit(rows, rows_of(PRODUCT, product("p")))
            repo.flush()
            return result

    def after(later: World, before: dict[str, Any]) -> None:
        reader = later.open("reader")
        assert everything(reader) == before
        on_branch = later.open(branch="run")
        assert on_branch.ages() in (
            {"a": 1, "b": 1, "warm": 1},
            {"a": 8, "b": 1, "warm": 1, "x": 7},
        )
        operation(reader)
        on_branch = later.open(branch="run")
        assert on_branch.ages() == {"a": 8, "b": 1, "warm": 1, "x": 7}
        assert on_branch.repo.head_commit_id() == 3
        collected(reader)
        assert merge(reader, "run").commit_id == 2
        fine(later)

    assert Crashes(world.backend.objects(), "v2", operation).each(after) >= 12


# -- answers that are lost, late, or never come ---------------------------------------------------


@pytest.mark.parametrize("target", ["main", "branch"])
@pytest.mark.parametrize(
    "kind",
    [
        FaultKind.RESPONSE_LOST,
        FaultKind.TIMEOUT,
        FaultKind.DELAYED,
        FaultKind.CONFLICT,
        FaultKind.PRECONDITION,
        FaultKind.UNAVAILABLE,
    ],
)
def test_an_answer_of_either_head_that_does_not_come(
    world: World, target: str, kind: FaultKind
) -> None:
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    main.put(customer("b", age=3))
    writer, key = (main, layout.HEAD) if target == "main" else (branch, HEAD)
    options = {"seconds": 5.0} if kind is FaultKind.DELAYED else {}
    writer.fail(kind, "put_if_match", key, **options)
    report = merge(main, "run") if target == "main" else update(branch)
    assert report.commit_id == 3
    world.backend.clock.sleep(60)  # what is late has landed, or was refused
    fresh = world.open(branch="run" if target == "branch" else None)
    assert fresh.ages() == {"a": 2, "b": 3}
    kinds = [record.kind for record in fresh.repo.list_commits(3)]
    assert kinds.count("merge" if target == "main" else "update") == 1
    merge(world.open(), "run")
    assert merge(world.open(), "run").commit_id is None
    fine(world)


@pytest.mark.parametrize("recreated", [False, True])
def test_an_update_whose_branch_is_gone_when_its_answer_was_lost(
    world: World, recreated: bool
) -> None:
    """It may have been merged before it was deleted: unknown, and nothing is deleted."""
    main, branch = forked(world)
    branch.put(customer("c"))
    main.put(customer("b", age=3))
    other = world.open("other")

    def gone() -> None:
        other.repo.branches.delete("run")
        if recreated:
            other.repo.branches.create("run")

    branch.fail(FaultKind.RESPONSE_LOST, "put_if_match", HEAD)
    at(branch.store, "PUT_IF", HEAD, lambda: at(branch.store, "GET", HEAD, gone))
    with pytest.raises(CommitStateUnknownError) as told:
        update(branch)
    assert told.value.manifest_path in world.stored_keys()
    assert world.open().ages() == {"a": 1, "b": 3}
    if recreated:
        assert world.open(branch="run").ages() == {"a": 1, "b": 3}
    collected(world.open())
    fine(world)


@pytest.mark.parametrize("recreated", [False, True])
def test_a_source_deleted_at_any_request_of_its_merge(world: World, recreated: bool) -> None:
    """Merged as a whole or not at all; what main names is there, although everything that the
    branch had is collected at once."""
    main, branch = forked(world)
    branch.commit(stream_of(CUSTOMER, [customer(f"k{n}") for n in range(5)]))
    branch.repo.flush()
    main.repo.flush()
    objects = world.backend.objects()
    seen: list[tuple[str, str]] = []
    with copied(objects, "v2") as counted:
        writer = counted.open("merger")
        writer.store.on_request(lambda kind, key: seen.append((kind, key)))
        merge(writer, "run")
        writer.repo.flush()
    merged = 0
    for nth in range(len(seen)):
        with copied(objects, "v2") as later:
            writer, other = later.open("merger"), later.open("other")
            count = [0]

            def meanwhile(
                _kind: str,
                _key: str,
                other: Writer = other,
                later: World = later,
                nth: int = nth,
                count: Any = count,
            ) -> None:
                count[0] += 1
                if count[0] != nth + 1:
                    return
                other.repo.branches.delete("run")
                if recreated:
                    other.repo.branches.create("run")
                    later.open(branch="run").put(customer("other"))
                later.pass_lease()
                collected(other)

            writer.store.on_request(meanwhile)
            try:
                merge(writer, "run")
                merged += 1
            except (UnknownBranchError, OntologiaError):
                pass
            ages = later.open().ages()
            whole = len(ages) == 7 or (nth < 2 and ages == {"a": 1, "b": 1, "other": 1})
            assert whole or ages == {"a": 1, "b": 1}, nth
            assert verify_storage(later.open().repo, deep=True).findings == []
    assert merged


@pytest.mark.parametrize("what", ["create", "create older", "commit", "update", "merge", "delete"])
def test_a_collection_at_any_request(world: World, what: str) -> None:
    """With no grace, beside a fork, a commit on a branch, an update, a merge and a deletion that
    were slow: each is done as a whole, or not at all and can be done again."""
    main, branch = forked(world)
    branch.commit(stream_of(CUSTOMER, [customer("x", age=2), customer("a", age=5)]))
    main.put(customer("b", age=6))
    compact(main.repo, ALL)
    for writer in (main, branch):
        writer.repo.flush()
    objects = world.backend.objects()

    def act(later: World, writer: Writer) -> None:
        if what.startswith("create"):
            writer.repo.branches.create("new", at=1 if what == "create older" else None)
        elif what == "delete":
            writer.repo.branches.delete("run")
        elif what == "commit":
            writer.commit(stream_of(CUSTOMER, [customer("y", age=3)]))
        elif what == "update":
            update(writer)
        else:
            merge(writer, "run")

    def opened(later: World) -> Writer:
        return later.open("slow", branch="run" if what in ("commit", "update") else None)

    seen: list[str] = []
    with copied(objects, "v2") as counted:
        writer = opened(counted)
        writer.store.on_request(lambda _kind, key: seen.append(key))
        act(counted, writer)
    for nth in range(len(seen)):
        with copied(objects, "v2") as later:
            writer, collector = opened(later), later.open("collector")
            count = [0]

            def collect(
                _kind: str,
                _key: str,
                later: World = later,
                collector: Writer = collector,
                nth: int = nth,
                count: Any = count,
            ) -> None:
                count[0] += 1
                if count[0] == nth + 1:
                    later.pass_lease()
                    collected(collector, purge=True)

            writer.store.on_request(collect)
            try:
                act(later, writer)
            except OntologiaError as error:
                if not error.retryable:
                    raise
                act(later, opened(later))
            names = [branch.name for branch in later.open().repo.branches.list()]
            for name in names:
                assert verify_storage(later.open(branch=name).repo, deep=True).findings == [], nth
            if what == "delete":
                assert names == ["main"]
                assert later.open().ages() == {"a": 1, "b": 6}
            elif what.startswith("create"):
                at_fork = {"a": 1, "b": 6 if what == "create" else 1}
                assert later.open(branch="new").ages() == at_fork
            elif what == "merge":
                assert later.open().ages() == {"a": 5, "b": 6, "x": 2}
            else:
                expected = {"a": 5, "b": 1, "x": 2, "y": 3}
                if what == "update":
                    expected = {"a": 5, "b": 6, "x": 2}
                assert later.open(branch="run").ages() == expected


# -- interrupted, forked --------------------------------------------------------------------------


def test_ctrl_c_in_a_merge_leaves_no_lock(world: World) -> None:
    """Before the swap nothing has happened, after it all has."""
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    branch.repo.flush()
    main.repo.flush()
    for key, expected in ((layout.LOCK, 1), ("commits/*/manifest.json", 1), (layout.HEAD, 1)):
        writer = world.open("stopped")

        def stop() -> None:
            raise KeyboardInterrupt

        at(writer.store, "PUT_IF", key, stop)
        with pytest.raises(KeyboardInterrupt):
            merge(writer, "run")
        writer.repo.flush()
        assert world.open().ages()["a"] == expected
        assert layout.LOCK not in world.stored_keys(), key
    assert merge(world.open(), "run").commit_id == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_fork_of_the_process_is_told_or_works(tmp_path: Any) -> None:
    """A repository of the parent refuses in the child, at once; one of its own works there."""
    from storage_engine import Session, initialize_storage
    from tests.cli.support import Customer

    uri = str(tmp_path / "onto")
    initialize_storage(uri, "v2")
    with Session(uri) as main:
        main.ensure(Customer(id="a", name="Ann"))
        main.commit()
        main.create_branch("run")
        with Session(uri, branch="run") as branch:
            branch.ensure(Customer(id="a", name="Anna"))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    main.merge("run")
                    code = 0  # it works in the child
                except OntologiaError:
                    with Session(uri) as own:
                        own.merge("run")
                    code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    with Session(uri) as session:
        assert [c["kind"] for c in session.list_commits()] == ["merge", "data"]
