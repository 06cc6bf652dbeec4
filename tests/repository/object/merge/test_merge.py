"""Merge and update: what comes, what is in conflict, what rides along, and what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import Manifest
from storage_engine.errors import (
    CommitStateUnknownError,
    ConfigurationError,
    MergeConflictError,
    OntologiaError,
    ProtectedBranchError,
    UnknownBranchError,
    ValidationError,
)
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.model import Field
from storage_engine.repository import ReadWindow
from storage_engine.repository.object.merge import MergeReport, MergeTerms
from storage_engine.repository.object.merge.rules import Rules
from storage_engine.repository.protocol import Idempotency
from storage_engine.schema.upgraders import resolve_upgraders
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer, at
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
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of, stream_of
from tests.maintenance.support import Crashes, everything

ALL = CompactionPolicy(min_entries=2)
OTHER = entity(name=Field[str], age=Field[int], city=(Field[str | None], Field(default=None)))


def terms(policy: Any = "fail", rules: Rules | None = None, upgraders: Any = None) -> MergeTerms:
    policies = policy if isinstance(policy, Mapping) else {None: policy}
    return MergeTerms(policies, rules or {}, resolve_upgraders(upgraders or {}))


def merge(
    target: Writer, source: str, policy: Any = "fail", *, dry_run: bool = False, **given: Any
) -> MergeReport:
    return target.repo.branches.merge(source, terms(policy, **given), dry_run=dry_run)


def update(
    branch: Writer, policy: Any = "fail", *, dry_run: bool = False, **given: Any
) -> MergeReport:
    return branch.repo.branches.update(terms(policy, **given), dry_run=dry_run)


def forked(world: World) -> tuple[Writer, Writer]:
    main = world.open("main")
    main.put(customer("a", age=1), customer("b", age=1))
    main.repo.branches.create("run")
    return main, world.open("branch", branch="run")


def fine(world: World) -> None:
    for name in [b.name for b in world.open().repo.branches.list()]:
        assert verify_storage(world.open(branch=name).repo, deep=True).findings == []


def manifest_of(world: World, commit_id: int) -> Manifest:
    (found,) = [m for m in world.chain() if m.commit_id == commit_id]
    return found


# -- rows ----------------------------------------------------------------------------------------


def test_a_merge_is_one_commit_with_all_types_and_copies_nothing(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("a", age=2), customer("c", age=2))
    branch.commit(rows_of(PRODUCT, product("p")), stream_of(CUSTOMER, []))
    before = {*world.stored_keys("staged/")}
    report = merge(main, "run")
    assert report.commit_id == 2
    assert [(t.type_name, t.inserted, t.updated, t.adopted, t.schema) for t in report.types] == [
        ("Customer", 1, 1, True, ""),
        ("Product", 1, 0, True, "registered"),
    ]
    assert {*world.stored_keys("staged/")} == before
    assert main.ages() == branch.ages() == {"a": 2, "b": 1, "c": 2}
    records = main.repo.list_commits()
    assert [(r.id, r.kind, r.rows) for r in records] == [
        (2, "merge", {"Customer": 2, "Product": 1}),
        (1, "data", {"Customer": 2}),
    ]
    assert records[0].metadata == {"merge": "run"}
    assert [r["commit_id"] for r in world.open().rows(PRODUCT)] == [2]
    assert world.open().ages() == main.ages()
    assert world.document(layout.TYPES)
    fine(world)


def test_no_as_of_shows_half_of_a_merge(world: World) -> None:
    main, branch = forked(world)
    for age in range(2, 6):
        branch.put(customer("a", age=age))
        branch.commit(rows_of(PRODUCT, product("p", float(age))))
    merge(main, "run")
    for commit_id in range(3):
        window = ReadWindow(as_of=commit_id)
        ages = [r["age"] for r in main.rows(window=window) if r["entity_key"] == "a"]
        prices = [r["price"] for r in main.rows(PRODUCT, window)]
        assert (ages, prices) == {0: ([], []), 1: ([1], []), 2: ([5], [5.0])}[commit_id]
    assert [r[0] for r in main.history() if r[1] == "a"] == [1, 2]


def test_publishing_an_unmoved_parent_takes_few_requests_and_reads_no_rows(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    branch.repo.flush()
    main.repo.flush()
    seen: list[tuple[str, str]] = []
    main.store.on_request(lambda kind, key: seen.append((kind, key)))
    merge(main, "run")
    assert not [key for _, key in seen if key.endswith(".parquet")]
    main.repo.flush()
    writes = [key for kind, key in seen if kind not in ("GET", "LIST")]
    assert len(writes) == 5  # lock, manifest, head, index; and the lock again
    assert len(seen) == 10


def test_a_branch_whose_changes_cancel_out_is_merged(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    branch.put(customer("a", age=1))
    main.put(customer("b", age=5))
    assert merge(main, "run").commit_id is None
    assert merge(main, "run", dry_run=True).empty
    main.put(customer("a", age=9))
    assert merge(main, "run").commit_id is None
    assert main.ages() == {"a": 9, "b": 5}
    branch.put(customer("b", age=1, name="Bea"))
    with pytest.raises(MergeConflictError):
        merge(main, "run")


def test_a_second_merge_brings_only_what_is_newer(world: World) -> None:
    """A second merge of the same branch brings old rows over newer ones: not here."""
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    merge(main, "run")
    main.put(customer("a", age=3))
    branch.put(customer("c", age=2))
    report = merge(main, "run")
    assert [(t.inserted, t.updated) for t in report.types] == [(1, 0)]
    assert main.ages() == {"a": 3, "b": 1, "c": 2}
    assert merge(main, "run").commit_id is None
    branch.put(customer("c", age=4))
    assert merge(main, "run").commit_id == 5
    assert main.ages()["c"] == 4


def test_what_the_branch_never_saw_is_not_written_over(world: World) -> None:
    """Changed on main before the first merge, and on the branch after it."""
    main, branch = forked(world)
    main.put(customer("a", age=5))
    branch.put(customer("b", age=2))
    merge(main, "run")
    branch.put(customer("a", age=2))
    with pytest.raises(MergeConflictError) as told:
        merge(main, "run")
    (conflict,) = told.value.conflicts
    assert [conflict[side]["age"] for side in ("base", "ours", "theirs")] == [1, 5, 2]
    update(branch, "ours")
    assert merge(main, "run").commit_id == 4
    assert main.ages() == {"a": 2, "b": 2}


def test_a_merge_does_not_bring_back_what_the_other_side_ended(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("b", age=2))
    branch.commit(rows_of(PRODUCT, product("p")))
    merge(main, "run")
    drop(main.repo, "Product")
    branch.put(customer("b", age=3))
    merge(main, "run")  # what was not changed since stays ended
    assert [ref for ref in main.repo.type_refs() if ref[1] == "Product"] == []
    branch.commit(rows_of(PRODUCT, product("p", 2.0)))
    with pytest.raises(MergeConflictError, match="dropped it") as told:
        merge(main, "run", "theirs")
    assert [c["conflict"] for c in told.value.conflicts] == ["schema"]


def test_updates_bring_what_the_parent_changed(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    main.put(customer("b", age=5), customer("m", age=5))
    main.commit(rows_of(PRODUCT, product("p")))
    report = update(branch)
    assert report.commit_id == 3
    assert (report.source, report.target) == ("main", "run")
    assert branch.ages() == {"a": 2, "b": 5, "m": 5}
    assert [r.kind for r in branch.repo.list_commits(2)] == ["update", "data"]
    assert branch.rows(PRODUCT)[0]["sku"] == "p"
    assert update(branch).commit_id is None
    # What an update brought is not the branch's own.
    main.put(customer("b", age=6))
    report = merge(main, "run")
    assert [(t.type_name, t.inserted, t.updated) for t in report.types] == [("Customer", 0, 1)]
    assert main.ages() == {"a": 2, "b": 6, "m": 5}
    fine(world)


def test_only_rows_in_question_are_opened_on_the_parent(world: World) -> None:
    main = world.open("main")
    for letter in "abcdefgh":
        main.put(*(customer(f"{letter}{n}") for n in range(3)))
    main.repo.branches.create("run")
    branch = world.open(branch="run")
    branch.put(customer("c1", age=2))
    main.put(customer("h1", age=5))
    main.repo.flush()
    cold = world.open("cold")
    read: list[str] = []
    cold.store.on_request(lambda kind, key: read.append(key) if key.endswith(".parquet") else None)
    merge(cold, "run")
    assert len(set(read)) <= 2  # the branch's own file, and the one with c


def test_merge_manifests_name_the_changes_that_they_brought(world: World) -> None:
    """A change keeps the name of the commit that made it, through any number of merges."""
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    branch.commit(rows_of(PRODUCT, product("p")))
    branch.repo.branches.create("run/child")
    child = world.open(branch="run/child")
    child.put(customer("c", age=3))

    def names(writer: Writer, commit_id: int) -> Any:
        record = writer.repo.get_commit(commit_id)
        assert record is not None
        return {ref: list(changes) for ref, changes in record.changes.items()}

    own = [names(branch, n) for n in (2, 3)] + [names(child, 4)]
    assert [len(each) for each in own] == [1, 1, 1]
    merge(branch, "run/child")
    assert names(branch, 4) == own[2]
    merge(main, "run")
    (a,), (p,), (c,) = (next(iter(each.values())) for each in own)
    assert names(main, 2) == {CUSTOMER.ref: [a, c], PRODUCT.ref: [p]}
    main.put(customer("b", age=9))
    update(branch)
    assert names(branch, 5) == names(main, 3)
    branch.put(customer("c", age=4))  # and since the last merge only
    merge(main, "run")
    assert names(main, 4) == names(branch, 6)


# -- conflicts -----------------------------------------------------------------------------------


def diverged(world: World) -> tuple[Writer, Writer]:
    """`a` changed on both sides in different fields, `b` in the same, `n` created on both."""
    main, branch = forked(world)
    main.put(customer("a", "Main", 1), customer("b", age=5), customer("n", age=5))
    branch.put(customer("a", "Ann", 2), customer("b", age=2), customer("n", age=2))
    return main, branch


def test_all_conflicts_are_listed_and_nothing_is_done(world: World) -> None:
    main, _ = diverged(world)
    before = world.backend.objects()
    with pytest.raises(MergeConflictError, match="3 conflicts, nothing was done") as told:
        merge(main, "run")
    main.repo.flush()
    assert world.backend.objects() == before
    listed = [(c["conflict"], c["identity"], c["fields"]) for c in told.value.conflicts]
    assert listed == [
        ("divergent_update", ["a"], ["name", "age"]),
        ("divergent_update", ["b"], ["age"]),
        ("divergent_insert", ["n"], ["age"]),
    ]
    preview = merge(main, "run", dry_run=True)
    assert [c.as_dict() for c in preview.conflicts] == told.value.conflicts
    assert world.backend.objects() == before


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("ours", {"a": 1, "b": 5, "n": 5}),
        ("theirs", {"a": 2, "b": 2, "n": 2}),
        (lambda _, ours, theirs: {**ours, "age": 20}, {"a": 20, "b": 20, "n": 20}),
    ],
)
def test_policies(world: World, policy: Any, expected: dict[str, int]) -> None:
    main, _ = diverged(world)
    report = merge(main, "run", policy)
    assert main.ages() == world.open().ages() == expected
    assert report.commit_id == 3  # that it was decided is worth a commit, also without rows
    assert (report.types[0].resolved, report.types[0].inserted) == (3, 0)
    assert merge(main, "run").commit_id is None
    fine(world)


def test_fields_combines_what_was_changed_in_different_fields(world: World) -> None:
    main, branch = forked(world)
    main.put(customer("a", "Main", 1), customer("b", age=5))
    branch.put(customer("a", "Ann", 2), customer("b", "Bea", 1))
    merge(main, "run", "fields")
    rows = {r["entity_key"]: (r["name"], r["age"]) for r in main.rows()}
    assert rows == {"a": ("Main", 2), "b": ("Bea", 5)}
    main.put(customer("a", "Other", 3))
    branch.put(customer("a", "Ann", 4))
    with pytest.raises(MergeConflictError) as told:
        merge(main, "run", "fields")
    assert [(c["identity"], c["fields"]) for c in told.value.conflicts] == [(["a"], ["age"])]


def test_policies_by_type(world: World) -> None:
    main, branch = diverged(world)
    main.commit(rows_of(PRODUCT, product("p", 1.0)))
    branch.commit(rows_of(PRODUCT, product("p", 2.0)))
    with pytest.raises(MergeConflictError) as told:
        merge(main, "run", {CUSTOMER.ref: "theirs"})
    assert [c["type_name"] for c in told.value.conflicts] == ["Product"]
    merge(main, "run", {CUSTOMER.ref: "theirs", None: "ours"})
    assert main.ages()["b"] == 2
    assert main.rows(PRODUCT)[0]["price"] == 1.0


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (None, "returned None"),
        ({"name": "x"}, "no field 'id'"),
        ({"id": "a", "name": "x", "age": 1, "more": 2}, "has not"),
        ({"id": "a", "name": 5, "age": 1}, "name"),
        ({"id": "z", "name": "x", "age": 1}, "another identity"),
    ],
)
def test_what_a_function_returns_is_checked(world: World, made: Any, problem: str) -> None:
    main, _ = diverged(world)
    with pytest.raises((ConfigurationError, ValidationError), match=problem):
        merge(main, "run", lambda base, ours, theirs: made)
    assert main.repo.head_commit_id() == 2


def test_only_a_parent_is_merged_into(world: World) -> None:
    main, branch = forked(world)
    branch.repo.branches.create("run/child")
    with pytest.raises(ConfigurationError, match="is a branch of 'run': merge it there"):
        merge(main, "run/child")
    with pytest.raises(ConfigurationError, match="cannot be merged"):
        merge(branch, "main")
    with pytest.raises(ConfigurationError, match="no parent"):
        update(main)
    with pytest.raises(UnknownBranchError):
        merge(main, "none")


def test_a_tree_is_merged_upwards(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("b", age=2))
    branch.repo.branches.create("run/child")
    child = world.open(branch="run/child")
    child.put(customer("c", age=3))
    merge(branch, "run/child")
    assert branch.repo.list_commits(1)[0].kind == "merge"
    merge(main, "run")
    assert main.ages() == {"a": 1, "b": 2, "c": 3}
    main.put(customer("a", age=9))
    update(branch)
    update(child)
    assert child.ages() == branch.ages() == main.ages() == {"a": 9, "b": 2, "c": 3}
    fine(world)


def test_protected_branches_take_merges(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("c"))
    main.repo.branches.protect("main")
    with pytest.raises(ProtectedBranchError):
        main.put(customer("d"))
    assert merge(main, "run").commit_id == 2
    assert main.repo.branches.list()[0].protected


# -- schemas -------------------------------------------------------------------------------------


def old(key: str) -> dict[str, Any]:
    return row(key, name="Ann", age=1)


def new(key: str) -> dict[str, Any]:
    return row(key, name="Ann", age=1.5, tier="gold")


def values(writer: Writer) -> list[dict[str, Any]]:
    return [{**found, "commit_id": None} for found in latest(writer.repo, V2)]


def test_a_migration_rides_along(world: World) -> None:
    main = world.open("main")
    write(main.repo, V1, old("a"), old("b"))
    main.repo.branches.create("run")
    branch = world.open(branch="run")
    migrate(branch.repo, V2)
    write(branch.repo, V2, new("c"))
    assert [r.kind for r in branch.repo.list_commits(2)] == ["data", "migration"]
    report = merge(main, "run")
    assert report.types[0].schema == "migrated"
    assert values(main) == values(branch)
    history = main.repo.type_histories()[V1.ref]
    assert [(v.version, v.activation_commit_id) for v in history.versions] == [(1, 1), (2, 2)]
    write(main.repo, V2, new("d"))
    assert latest(world.open().repo, V2) == latest(main.repo, V2)
    fine(world)


def test_a_drop_rides_along(world: World) -> None:
    main, branch = forked(world)
    main.commit(rows_of(PRODUCT, product("p")))
    update(branch)
    drop(branch.repo, "Product")
    report = merge(main, "run")
    assert [(t.type_name, t.schema) for t in report.types] == [("Product", "dropped")]
    assert main.repo.type_refs() == branch.repo.type_refs() == [CUSTOMER.ref]
    fine(world)


def test_rows_are_not_purged_on_a_branch(world: World) -> None:
    _, branch = forked(world)
    with pytest.raises(ConfigurationError, match="purge on main"):
        drop(branch.repo, "Customer", purge=True)


# -- marks ---------------------------------------------------------------------------------------


def test_units_of_work_count_beside_the_parents_own(world: World) -> None:
    main, branch = forked(world)

    def unit(writer: Writer, version: int | str, app: str = "app") -> int | None:
        result = writer.commit(
            rows_of(CUSTOMER, customer(f"{app}{version}")), idempotency=Idempotency(app, version)
        )
        return result.commit_id if result is not None else None

    unit(main, "x")
    unit(branch, "y")
    unit(branch, 7, "numbers")
    assert main.repo.applied(Idempotency("app", "y")) is None
    merged = merge(main, "run").commit_id
    for writer in (main, world.open()):
        assert writer.repo.applied(Idempotency("app", "x")).commit_id == 2  # type: ignore[union-attr]
        assert writer.repo.applied(Idempotency("app", "y")).commit_id == merged  # type: ignore[union-attr]
        assert writer.repo.applied(Idempotency("numbers", 6)).commit_id == merged  # type: ignore[union-attr]
        assert writer.repo.applied(Idempotency("numbers", 8)) is None
    # Also from a checkpoint.
    world.open(checkpoint_interval=1).put(customer("checkpoint"))
    cold = world.open()
    assert cold.repo.storage_info()["checkpoint_commit_id"] == 4
    assert cold.repo.applied(Idempotency("app", "x")).commit_id == 2  # type: ignore[union-attr]
    assert cold.repo.applied(Idempotency("app", "y")).commit_id == merged  # type: ignore[union-attr]
    unit(cold, "z")
    assert cold.repo.applied(Idempotency("app", "x")) is None
    assert cold.repo.applied(Idempotency("app", "y")) is None


def test_a_unit_that_changed_nothing_is_worth_one_commit(world: World) -> None:
    main, branch = forked(world)
    done = Idempotency("app", "nothing")
    assert branch.commit(rows_of(CUSTOMER, customer("a", age=1)), idempotency=done) is None
    assert merge(main, "run").commit_id == 2
    assert main.repo.applied(done) is not None
    assert merge(main, "run").commit_id is None
    assert update(branch).commit_id is None


# -- faults --------------------------------------------------------------------------------------


def test_a_killed_merge_leaves_both_as_they_were(world: World) -> None:
    """A failed merge blocks writers until a restart: not beyond its lease."""
    main, branch = forked(world)
    branch.put(customer("a", age=2), customer("c"))
    branch.commit(rows_of(PRODUCT, product("p")))
    branch.repo.flush()
    main.repo.flush()
    before_branch = everything(branch)
    objects = world.backend.objects()

    def after(later: World, before: dict[str, Any]) -> None:
        reader = later.open("reader")
        said = everything(reader)
        merged = reader.repo.head_commit_id() == 2
        if not merged:
            assert said == before
        assert everything(later.open(branch="run")) == before_branch
        report = merge(reader, "run")
        assert (report.commit_id is None) == merged
        assert reader.ages() == {"a": 2, "b": 1, "c": 1}
        assert [r.kind for r in reader.repo.list_commits()] == ["merge", "data"]
        reader.put(customer("after"))
        sweep(reader.repo, plan_gc(reader.repo, grace=timedelta()))
        assert verify_storage(reader.repo).findings == []
        reader.repo.branches.delete("run")
        sweep(reader.repo, plan_gc(reader.repo, grace=timedelta()))
        assert later.open().ages() == reader.ages()
        assert verify_storage(later.open().repo).findings == []

    runs = Crashes(objects, "v2", lambda writer: merge(writer, "run")).each(after)
    assert runs >= 15


def test_a_killed_update_leaves_both_as_they_were(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("c"))
    main.put(customer("a", age=2), customer("d"))
    for writer in (main, branch):
        writer.repo.flush()
    before_main = everything(main)
    objects = world.backend.objects()

    def after(later: World, before: dict[str, Any]) -> None:
        reader = later.open("reader")
        assert everything(reader) == before == before_main
        on_branch = later.open(branch="run")
        update(on_branch)
        assert on_branch.ages() == {"a": 2, "b": 1, "c": 1, "d": 1}
        assert [r.kind for r in on_branch.repo.list_commits(2)] == ["update", "data"]
        assert merge(reader, "run").commit_id == 3
        assert verify_storage(reader.repo).findings == []

    def operation(writer: Writer) -> object:
        opened = writer.repo.branches.opened("run")
        with opened as repo:
            report = repo.branches.update(terms())
            repo.flush()
            return report

    assert Crashes(objects, "v2", operation).each(after) >= 12


@pytest.mark.parametrize("kind", [FaultKind.RESPONSE_LOST, FaultKind.TIMEOUT, FaultKind.CONFLICT])
def test_a_lost_answer_merges_once(world: World, kind: FaultKind) -> None:
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    main.fail(kind, "put_if_match", layout.HEAD)
    assert merge(main, "run").commit_id == 2
    assert [r.kind for r in world.open().repo.list_commits()] == ["merge", "data"]
    assert merge(world.open(), "run").commit_id is None


def test_an_unknown_outcome_deletes_nothing_and_a_retry_merges_once(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    main.fail(FaultKind.RESPONSE_LOST, "put_if_match", layout.HEAD, times=None)
    at(
        main.store,
        "PUT_IF",
        layout.HEAD,
        lambda: main.fail(FaultKind.SERVER_ERROR, "READ", layout.HEAD, times=None),
    )
    with pytest.raises(CommitStateUnknownError):
        merge(main, "run")
    other = world.open()
    assert other.ages() == {"a": 2, "b": 1}
    assert merge(other, "run").commit_id is None
    fine(world)


@pytest.mark.parametrize("moved", ["target", "source", "both"])
def test_heads_that_move_while_merging(world: World, moved: str) -> None:
    """Looked at again, first the target's head and then the source's."""
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    other = world.open("other")

    def meanwhile() -> None:
        if moved in ("target", "both"):
            other.put(customer("b", age=5))
        if moved in ("source", "both"):
            branch.put(customer("c", age=3))

    at(main.store, "PUT_IF", layout.LOCK, meanwhile)
    report = merge(main, "run")
    expected = {"a": 2, "b": 5 if moved != "source" else 1}
    if moved != "target":
        expected["c"] = 3
    assert main.ages() == expected
    assert merge(main, "run").commit_id is None
    assert report.commit_id == (2 if moved == "source" else 3)
    fine(world)


@pytest.mark.parametrize("kind", ["merge", "update"])
@pytest.mark.parametrize("bulk", [False, True])
def test_a_source_that_never_rests_is_merged_as_it_was(world: World, kind: str, bulk: bool) -> None:
    """Others commit to it whenever it is looked at: nobody fails for that, and the rest comes with
    the next one."""
    main, branch = forked(world)
    source, target = (branch, main) if kind == "merge" else (main, branch)
    rows = [customer("a", age=2)]
    source.commit(stream_of(CUSTOMER, rows) if bulk else rows_of(CUSTOMER, *rows))
    busy = world.open("busy", branch="run" if kind == "merge" else None)
    head = source.repo.chain.head_key
    seen = [0]

    def write(_kind: str, key: str) -> None:
        if key == head:
            seen[0] += 1
            busy.put(customer("b", age=10 + seen[0]))

    def act() -> Any:
        return merge(target, "run") if kind == "merge" else update(target)

    rest = target.store.on_request(write)
    report = act()
    rest()
    assert report.commit_id is not None
    assert seen[0] > 2
    assert target.ages()["a"] == 2
    assert target.ages()["b"] < source.ages()["b"]
    act()
    assert target.ages() == source.ages()
    fine(world)


def test_a_conflict_that_comes_while_merging_is_seen(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    other = world.open("other")
    at(main.store, "PUT_IF", layout.LOCK, lambda: other.put(customer("a", age=5)))
    with pytest.raises(MergeConflictError):
        merge(main, "run")
    main.put(customer("free"))  # the lock was given back


@pytest.mark.parametrize("recreated", [False, True])
def test_a_source_deleted_while_merging(world: World, recreated: bool) -> None:
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    other = world.open("other")

    def gone() -> None:
        other.repo.branches.delete("run")
        if recreated:
            other.repo.branches.create("run")
            world.open(branch="run").put(customer("new"))

    at(main.store, "PUT_IF", layout.LOCK, gone)
    with pytest.raises(UnknownBranchError, match="was deleted"):
        merge(main, "run")
    assert main.ages() == {"a": 1, "b": 1}
    main.put(customer("free"))


def test_two_merges_into_one_target_at_once(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    main.repo.branches.create("other")
    world.open(branch="other").put(customer("b", age=3))
    second = world.open("second")
    at(main.store, "PUT_IF", layout.LOCK, lambda: merge(second, "other"))
    merge(main, "run")
    assert main.ages() == {"a": 2, "b": 3}
    assert [r.metadata.get("merge") for r in main.repo.list_commits(2)] == ["run", "other"]
    assert set(manifest_of(world, 3).merged) == {
        b.incarnation for b in main.repo.branches.list()[1:]
    }
    fine(world)


def test_deleting_the_source_afterwards_changes_nothing(world: World) -> None:
    main, branch = forked(world)
    branch.commit(stream_of(CUSTOMER, [customer(f"k{n}", age=n) for n in range(20)]))
    branch.put(customer("a", age=2))
    branch.commit(rows_of(PRODUCT, product("p")))
    branch.repo.flush()
    merge(main, "run")
    before = everything(main)
    main.repo.branches.delete("run")
    sweep(main.repo, plan_gc(main.repo, grace=timedelta()))
    assert everything(world.open()) == before
    compact(main.repo, ALL)
    sweep(main.repo, plan_gc(main.repo, grace=timedelta(), purge_compacted=True))
    assert everything(world.open()) == before
    assert not world.stored_keys("staged/") or verify_storage(world.open().repo).ok
    fine(world)


def test_a_collection_beside_a_stalled_merge_of_a_deleted_branch(world: World) -> None:
    """What it would adopt is garbage by then: its swap must fail."""
    main, branch = forked(world)
    branch.put(customer("a", age=2))
    branch.repo.flush()
    other = world.open("other")

    def meanwhile() -> None:
        world.pass_lease()
        other.repo.branches.delete("run")
        assert sweep(other.repo, plan_gc(other.repo, grace=timedelta())).objects > 0

    at(main.store, "PUT_IF", layout.HEAD, meanwhile)
    with pytest.raises(OntologiaError):
        merge(main, "run")
    assert world.open().ages() == {"a": 1, "b": 1}
    fine(world)


def test_entries_of_deleted_branches_go_once_there_are_many(world: World) -> None:
    main = world.open("main")
    main.put(customer("a"))
    for number in range(20):
        main.repo.branches.create(f"run/{number}")
        world.open(branch=f"run/{number}").put(customer(f"k{number}"))
        merge(main, f"run/{number}")
        if number % 2:
            main.repo.branches.delete(f"run/{number}")
    assert 10 <= len(world.chain()[-1].merged) <= 17
    assert len(main.ages()) == 21
