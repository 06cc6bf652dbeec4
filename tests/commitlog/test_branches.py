"""Branches as objects: names, what creating and deleting one writes, and what races with them."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.commitlog.branches import check_name
from storage_engine.commitlog.records import Head
from storage_engine.errors import (
    BranchExistsError,
    CommitStateUnknownError,
    ConfigurationError,
    HeadMismatchError,
    IntegrityError,
    ProtectedBranchError,
    UnknownBranchError,
    UnsupportedEngineError,
)
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.repository import ReadWindow
from storage_engine.repository.object.stamp import read_stamp
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import HISTORY, World, Writer, at
from tests.engines import customer
from tests.maintenance.support import Crashes, everything

ALL = CompactionPolicy(min_entries=2)


def head_of(world: World, name: str) -> Head:
    key = layout.branch_head(name)
    return Head.parse(world.backend.objects()[key], key=key)


def purge(writer: Writer) -> None:
    """Compact everything, and collect at once what that replaced."""
    compact(writer.repo, ALL)
    sweep(writer.repo, plan_gc(writer.repo, grace=timedelta(), purge_compacted=True))


def three(world: World) -> Writer:
    writer = world.open("main")
    for age in (1, 2, 3):
        writer.put(customer("a", age=age), customer(f"k{age}", age=age))
    return writer


@pytest.mark.parametrize(
    "name", ["a", "run/42", "pr/1.2_x-y", "2x", "0/1", "a" * 200, "v1.0", "run/2026-01-01"]
)
def test_names(name: str) -> None:
    assert check_name(name) == name
    key = layout.branch_head(name)
    assert layout.branch_of(key) == (name, "")
    assert layout.branch_of(layout.branch_lock(name, "0" * 32)) == (name, "0" * 32)


@pytest.mark.parametrize(
    "name",
    [
        *("", "main", "Run", "a//b", "/a", "a/", ".a", "a/.b", "a b", "ä", "a@1", "a:b", "42", "0"),
        *("2026-01-31", "2026-01-31t12", "a" * 201, "a\n", None),
    ],
)
def test_names_that_are_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="branch"):
        check_name(name)


def test_creating_takes_three_requests_whatever_the_size(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("first")  # raises the format
    writer.repo.flush()
    seen: list[tuple[str, str]] = []
    writer.store.on_request(lambda kind, key: seen.append((kind, key)))
    made = writer.repo.branches.create("run/42", owner="ann", expires_in=timedelta(days=1))
    assert [key for _, key in seen] == [layout.HEAD, layout.branch_head("run/42"), layout.HEAD]
    assert (made.parent, made.base_commit_id, made.commit_id, made.owner) == ("main", 3, 3, "ann")
    document = world.document(layout.branch_head("run/42"))
    head = world.head()
    assert document["base"] == {
        "commit_id": 3,
        "manifest_path": head.manifest_path,
        "sha256": head.commit_sha256,
    }
    assert len(document["incarnation"]) == 32
    assert document["parent"] == "main"
    assert document["expires_at"] > document["created_at"]
    listed = writer.repo.branches.list()
    assert [(b.name, b.parent) for b in listed] == [
        ("main", None),
        ("first", "main"),
        ("run/42", "main"),
    ]


def test_the_first_branch_raises_the_format_and_main_stays_as_it_was(world: World) -> None:
    writer = three(world)
    head = world.backend.objects()[layout.HEAD]
    stamp = read_stamp(writer.store)
    assert stamp is not None
    assert stamp.format == 3
    writer.repo.branches.create("a")
    stamp = read_stamp(writer.store)
    assert stamp is not None
    assert stamp.format == 4
    assert world.backend.objects()[layout.HEAD] == head
    writer.put(customer("z"))
    assert set(world.document(layout.HEAD)) == {*json.loads(head)}
    assert world.chain()[-1].format == 3


def test_engines_without_branches_refuse_with_a_sentence(either_world: World) -> None:
    writer = either_world.open()
    if either_world.engine_version == "v2":
        with pytest.raises(UnknownBranchError, match="no branches yet"):
            either_world.open(branch="a")
        return
    with pytest.raises(UnsupportedEngineError, match="engine v2"):
        either_world.open(branch="a")
    assert writer.repo.branch == "main"


def test_the_nearest_names_are_told(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("run/42")
    with pytest.raises(UnknownBranchError, match="did you mean run/42") as told:
        world.open(branch="run/43")
    assert told.value.nearest == ["run/42"]


def test_a_branch_that_is_there_stays(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("a")
    before = head_of(world, "a")
    with pytest.raises(BranchExistsError, match="at commit 3"):
        world.open().repo.branches.create("a")
    assert head_of(world, "a") == before


@pytest.mark.parametrize("kind", [FaultKind.RESPONSE_LOST, FaultKind.CONFLICT, FaultKind.TIMEOUT])
def test_a_lost_answer_makes_one_branch(world: World, kind: FaultKind) -> None:
    writer = three(world)
    writer.fail(kind, "put_if_absent", layout.branch_head("a"))
    made = writer.repo.branches.create("a")
    assert head_of(world, "a").incarnation == made.incarnation


@pytest.mark.parametrize("at_commit", [None, 2])
def test_a_crash_while_creating_leaves_a_branch_or_none(
    world: World, at_commit: int | None
) -> None:
    writer = three(world)
    compact(writer.repo, ALL)
    writer.repo.flush()

    def after(after_crash: World, before: dict[str, Any]) -> None:
        reader = after_crash.open("reader")
        assert everything(reader) == before
        there = [b.name for b in reader.repo.branches.list()[1:]]
        if not there:
            reader.repo.branches.create("b", at=at_commit)
        branch = after_crash.open(branch="b")
        assert branch.ages()["a"] == (at_commit or 3)
        assert branch.put(customer("b")).commit_id == (at_commit or 3) + 1
        assert verify(after_crash)

    objects = world.backend.objects()
    crashes = Crashes(objects, "v2", lambda w: w.repo.branches.create("b", at=at_commit))
    assert crashes.each(after) == (6 if at_commit is None else 9)


def verify(world: World) -> bool:
    report = verify_storage(world.open().repo)
    assert report.findings == []
    return True


# -- the base ------------------------------------------------------------------------------------


def test_a_branch_begins_with_what_its_parent_had(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("a")
    writer.put(customer("a", age=9))
    branch = world.open(branch="a")
    assert branch.ages() == {"a": 3, "k1": 1, "k2": 2, "k3": 3}
    assert branch.put(customer("a", age=7)).commit_id == 4
    assert branch.ages()["a"] == 7
    assert writer.ages()["a"] == 9
    assert branch.rows(window=ReadWindow(as_of=3)) == writer.rows(window=ReadWindow(as_of=3))
    assert [c for c, key, age in branch.history() if key == "a"] == [1, 2, 3, 4]
    assert [(r.id, r.kind) for r in branch.repo.list_commits()] == [
        (n, "data") for n in (4, 3, 2, 1)
    ]


@pytest.mark.parametrize("compacted", [False, True])
def test_forking_at_an_older_commit_counts_up_to_it(world: World, compacted: bool) -> None:
    """Also where a snapshot of the parent reaches further, and the files before it are gone."""
    writer = three(world)
    if compacted:
        purge(writer)
        assert not [k for k in world.stored_keys("commits/") if k.endswith(".parquet")]
    made = writer.repo.branches.create("a", at=2)
    assert (made.base_commit_id, made.commit_id) == (2, 2)
    branch = world.open(branch="a")
    assert branch.ages() == {"a": 2, "k1": 1, "k2": 2}
    # Its commit 3 is another than the parent's, whose rows are in the same snapshot.
    assert branch.put(customer("k1", age=5)).commit_id == 3
    assert branch.ages() == {"a": 2, "k1": 5, "k2": 2}
    assert branch.history() == [(1, "a", 1), (1, "k1", 1), (2, "a", 2), (2, "k2", 2), (3, "k1", 5)]
    branch.repo.flush()
    cold = world.open(branch="a")
    assert cold.ages() == {"a": 2, "k1": 5, "k2": 2}
    assert cold.history() == branch.history()
    assert cold.rows(window=ReadWindow(as_of=1)) == writer.rows(window=ReadWindow(as_of=1))


def test_forking_from_nothing_and_from_commit_0(world: World) -> None:
    writer = world.open()
    writer.repo.branches.create("early")
    three(world)
    writer.repo.branches.create("none", at=0)
    for name in ("early", "none"):
        branch = world.open(branch=name)
        assert branch.rows() == []
        assert branch.put(customer("x")).commit_id == 1
        assert branch.ages() == {"x": 1}
    with pytest.raises(ConfigurationError, match="no commit 9 to fork from: 1 to 3"):
        writer.repo.branches.create("late", at=9)


@pytest.mark.parametrize("committed", [False, True])
def test_a_parent_compacted_and_purged_while_it_is_forked(world: World, committed: bool) -> None:
    """Between the first look at the parent and the branch's head: nothing keeps the old files."""
    writer, other = three(world), world.open("other")

    def meanwhile() -> None:
        if committed:
            other.put(customer("a", age=4))
        purge(other)

    at(writer.store, "PUT_IF", layout.branch_head("a"), meanwhile)
    made = writer.repo.branches.create("a")
    assert made.base_commit_id == 3
    branch = world.open(branch="a")
    assert branch.ages() == {"a": 3, "k1": 1, "k2": 2, "k3": 3}
    assert [row[0] for row in branch.history()] == [1, 1, 2, 2, 3, 3]
    purge(other)
    assert world.open(branch="a").ages() == branch.ages()
    assert branch.put(customer("a", age=7)).commit_id == 4
    assert verify(world)


def test_somebody_commits_on_a_branch_before_it_is_confirmed(world: World) -> None:
    """Only what it inherits is exchanged then."""
    writer, other = three(world), world.open("other")

    def committed() -> None:
        branch = world.open(branch="a", checkpoint_interval=1)
        assert branch.put(customer("a", age=7)).commit_id == 4
        other.put(customer("a", age=5))
        purge(other)  # it knows of the branch, and keeps what that needs

    at(writer.store, "PUT_IF", layout.branch_head("a"), committed, when="after")
    writer.repo.branches.create("a")
    branch = world.open(branch="a")
    assert branch.ages() == {"a": 7, "k1": 1, "k2": 2, "k3": 3}
    assert [row[0] for row in branch.history()] == [1, 1, 2, 2, 3, 3, 4]
    assert verify(world)


# -- deleting ------------------------------------------------------------------------------------


def test_deleting_takes_the_branch_and_nothing_of_its_parent(world: World) -> None:
    writer = three(world)
    before = {*world.stored_keys()}
    writer.repo.branches.create("a")
    branch = world.open(branch="a")
    branch.put(customer("x"))
    branch.repo.flush()
    assert world.stored_keys("meta/branches/")
    writer.repo.branches.delete("a")
    assert not world.stored_keys("meta/branches/")
    assert before <= {*world.stored_keys()}
    with pytest.raises(UnknownBranchError, match="was deleted"):
        branch.rows()
    with pytest.raises(UnknownBranchError, match="was deleted"):
        branch.put(customer("y"))
    with pytest.raises(UnknownBranchError):
        writer.repo.branches.delete("a")
    with pytest.raises(ConfigurationError, match="cannot be deleted"):
        writer.repo.branches.delete("main")


def test_children_first(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("a")
    parent = world.open(branch="a")
    parent.put(customer("x"))
    parent.repo.branches.create("a/b")
    with pytest.raises(ConfigurationError, match=r"children.*a/b"):
        writer.repo.branches.delete("a")
    assert not head_of(world, "a").fork.deleting  # type: ignore[union-attr]
    parent.put(customer("y"))
    child = world.open(branch="a/b")
    assert child.ages().keys() - writer.ages().keys() == {"x"}
    writer.repo.branches.delete("a/b")
    writer.repo.branches.delete("a")


def test_a_branch_that_was_written_to_since_is_not_deleted(world: World) -> None:
    """Also where that happens between the look and the deletion."""
    writer = world.open("writer")
    writer.put(customer("x"))
    writer.repo.branches.create("a")
    branch = world.open("branch", branch="a")
    seen = branch.put(customer("y")).commit_id
    at(
        writer.store,
        "PUT_IF",
        layout.branch_head("a"),
        lambda: branch.put(customer("z")),
    )
    with pytest.raises(HeadMismatchError):
        writer.repo.branches.delete("a", expect=seen)
    assert set(world.open(branch="a").ages()) == {"x", "y", "z"}
    with pytest.raises(HeadMismatchError):
        writer.repo.branches.delete("a", expect=seen)
    branch.put(customer("y", age=9))  # nothing says that it is being deleted
    writer.repo.branches.delete("a", expect=seen + 2)
    assert [b.name for b in writer.repo.branches.list()] == ["main"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_child_forked_while_its_parent_is_deleted(world: World, when: str) -> None:
    """It is either listed, or goes by itself: there is no child without a parent."""
    writer = three(world)
    writer.repo.branches.create("a")
    parent = world.open(branch="a")
    key = layout.branch_head("a")
    outcome: list[str] = []

    def fork() -> None:
        try:
            parent.repo.branches.create("a/b")
            outcome.append("made")
        except UnknownBranchError:
            outcome.append("refused")

    at(writer.store, "PUT_IF", key, fork, when=when)  # the mark
    try:
        writer.repo.branches.delete("a")
    except ConfigurationError:
        assert outcome == ["made"]
    there = [b.name for b in writer.repo.branches.list()]
    assert there == (["main", "a", "a/b"] if outcome == ["made"] else ["main"])


def test_a_parent_deleted_while_a_child_is_forked(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("a")
    parent = world.open(branch="a")
    at(
        parent.store,
        "PUT_IF",
        layout.branch_head("a/b"),
        lambda: writer.repo.branches.delete("a"),
    )
    with pytest.raises(UnknownBranchError):
        parent.repo.branches.create("a/b")
    assert [b.name for b in writer.repo.branches.list()] == ["main"]


@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_crash_while_deleting_can_be_gone_on_with(
    world: World, kind: FaultKind, nth: int
) -> None:
    writer = three(world)
    writer.repo.branches.create("a")
    branch = world.open(branch="a")
    branch.put(customer("x"))
    branch.repo.flush()
    doomed = world.open("doomed")
    doomed.fail(kind, "WRITE", "*", nth=nth)
    with pytest.raises(SimulatedCrash):
        doomed.repo.branches.delete("a")
    if "a" in [b.name for b in writer.repo.branches.list()]:
        assert branch.ages()["x"] == 1
        assert branch.put(customer("y")).commit_id == 5
        writer.repo.branches.delete("a")
    assert [b.name for b in writer.repo.branches.list()] == ["main"]
    writer.repo.branches.create("a")
    assert world.open(branch="a").ages() == writer.ages()


@pytest.mark.parametrize("operation", ["put_if_match", "delete_if_match"])
@pytest.mark.parametrize("kind", [FaultKind.RESPONSE_LOST, FaultKind.CONFLICT, FaultKind.TIMEOUT])
def test_a_lost_answer_deletes_one_branch(world: World, kind: FaultKind, operation: str) -> None:
    """Of the mark, and of the deletion itself."""
    writer = three(world)
    writer.repo.branches.create("a")
    writer.fail(kind, operation, layout.branch_head("a"))
    assert writer.repo.branches.delete("a").name == "a"
    assert [b.name for b in writer.repo.branches.list()] == ["main"]


def test_a_branch_made_anew_is_not_deleted_by_whoever_lost_an_answer(world: World) -> None:
    writer, other = three(world), world.open("other")
    writer.repo.branches.create("a")
    head = layout.branch_head("a")
    writer.fail(FaultKind.RESPONSE_LOST, "delete_if_match", head)
    anew = partial(other.repo.branches.create, "a")
    at(writer.store, "DELETE_IF", head, lambda: at(writer.store, "GET", head, anew))
    old = writer.repo.branches.delete("a")
    [_, new] = writer.repo.branches.list()
    assert (new.name, new.incarnation == old.incarnation) == ("a", False)


def test_a_recreated_branch_is_not_taken_for_the_old_one(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("a")
    old = world.open(branch="a")
    old.put(customer("old"))
    old.repo.flush()
    writer.repo.branches.delete("a")
    writer.repo.branches.create("a")
    new = world.open(branch="a")
    assert "old" not in new.ages()
    assert new.put(customer("new")).commit_id == 4
    for attempt in (lambda: old.put(customer("more")), old.rows, old.repo.head_commit_id):
        with pytest.raises(UnknownBranchError, match="made anew"):
            attempt()
    assert world.open(branch="a").ages() == new.ages()
    assert new.ages().keys() - writer.ages().keys() == {"new"}


# -- committing on one ---------------------------------------------------------------------------


def test_a_commit_writes_head_lock_and_indices_of_its_own(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("a")
    branch = world.open(branch="a")
    branch.put(customer("w"))
    branch.repo.flush()
    written: list[str] = []
    branch.store.on_request(lambda kind, key: written.append(f"{kind} {key}"))
    before = world.backend.objects()
    branch.put(customer("x"))
    branch.repo.flush()
    after = world.backend.objects()
    fork = head_of(world, "a").fork
    assert fork is not None
    changed = sorted(k for k in after if before.get(k) != after[k])
    folder = layout.branch_folder("a", fork.incarnation)
    attempt = layout.manifest_prefix(head_of(world, "a").manifest_path or "")
    assert attempt.endswith(f".{fork.incarnation}")
    assert changed == sorted(
        [
            layout.branch_head("a"),
            layout.index("entity", "Customer", layout.branch_indices("a", fork.incarnation)),
            f"{attempt}/manifest.json",
            *(file["path"] for file in world.document(f"{attempt}/manifest.json")["files"]),
        ]
    )
    (file,) = world.document(f"{attempt}/manifest.json")["files"]
    assert layout.attempt_incarnation(layout.staged_attempt(file["path"])) == fork.incarnation
    assert any(f"PUT_IF {folder}lock.json" in entry for entry in written)
    assert file["commit_id_source"] == "manifest"


@pytest.mark.parametrize("recreated", [False, True])
def test_a_head_that_is_gone_after_a_lost_answer_means_unknown(
    world: World, recreated: bool
) -> None:
    """The commit may have been merged before: nothing of it is deleted."""
    writer = three(world)
    writer.repo.branches.create("a")
    branch = world.open(branch="a")
    key = layout.branch_head("a")

    def gone() -> None:
        writer.repo.branches.delete("a")
        if recreated:
            writer.repo.branches.create("a")

    branch.fail(FaultKind.RESPONSE_LOST, "put_if_match", key)
    at(branch.store, "PUT_IF", key, lambda: at(branch.store, "GET", key, gone))
    with pytest.raises(CommitStateUnknownError) as told:
        branch.put(customer("x"))
    assert told.value.manifest_path in world.stored_keys()


def test_a_branch_deleted_before_the_swap_leaves_nothing(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("a")
    branch = world.open(branch="a")
    before = {*world.stored_keys("commits/"), *world.stored_keys("staged/")}
    key = layout.branch_head("a")
    at(branch.store, "PUT_IF", key, lambda: writer.repo.branches.delete("a"))
    with pytest.raises(UnknownBranchError, match="was deleted"):
        branch.put(customer("x"))
    assert {*world.stored_keys("commits/"), *world.stored_keys("staged/")} == before


def test_what_is_protected_takes_no_commits(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("a")
    branch = world.open(branch="a")
    writer.repo.branches.protect("main")
    writer.repo.branches.protect("a")
    for each, name in ((writer, "main"), (branch, "a")):
        with pytest.raises(ProtectedBranchError, match=f"'{name}' is protected and takes merges"):
            each.put(customer("x"))
    with pytest.raises(ProtectedBranchError, match="delete_branch"):
        writer.repo.branches.delete("a")
    assert [b.protected for b in writer.repo.branches.list()] == [True, True]
    assert writer.repo.branches.protect("a", False).protected is False
    assert branch.put(customer("x")).commit_id == 4
    writer.repo.branches.protect("main", False)
    assert writer.put(customer("x")).commit_id == 4
    assert "protected" not in world.document(layout.HEAD)


def test_a_branch_of_a_branch_reads_through_both(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("a")
    parent = world.open(branch="a")
    parent.put(customer("x", age=5))
    parent.repo.branches.create("a/b")
    parent.put(customer("x", age=6))
    writer.put(customer("m"))
    child = world.open(branch="a/b")
    child.put(customer("k1", age=8))
    child.repo.flush()
    cold = world.open(branch="a/b")
    assert cold.ages() == {"a": 3, "k1": 8, "k2": 2, "k3": 3, "x": 5}
    assert [row[0] for row in cold.history()] == [1, 1, 2, 2, 3, 3, 4, 5]
    assert cold.rows(window=HISTORY)
    assert cold.warning() is None


def test_a_damaged_head_of_a_branch_is_told(world: World) -> None:
    writer = three(world)
    writer.repo.branches.create("a")
    key = layout.branch_head("a")
    document = world.document(key)
    world.backend.write(key, json.dumps({**document, "branch": "other"}).encode())
    with pytest.raises(IntegrityError, match="not the head of that branch"):
        world.open(branch="a")
    mistakes: list[dict[str, object]]
    mistakes = [{"incarnation": "../../x"}, {"parent_incarnation": 5}, {"base": {}}]
    for wrong in mistakes:
        world.backend.write(key, json.dumps({**document, **wrong}).encode())
        with pytest.raises(IntegrityError):
            world.open(branch="a")
    world.backend.write(key, b"{}")
    with pytest.raises(IntegrityError):
        plan_gc(writer.repo)
