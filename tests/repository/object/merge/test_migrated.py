"""One side migrated a type, the other changed its rows: they are brought along, or nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from storage_engine.errors import MergeConflictError
from storage_engine.model import Field
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.schema.upgraders import Upgrader
from tests.commitlog.support import World, Writer
from tests.conformance.test_rfc0009_migration import V1, V2, V3, drop, entity, migrate, row, write
from tests.repository.object.merge.test_merge import fine, merge, update

OTHER = entity(name=Field[str], age=Field[int], city=(Field[str | None], Field(default=None)))


def full_name(given: dict[str, Any]) -> dict[str, Any]:
    made = {**given, "full_name": given["name"].upper(), "age": float(given["age"])}
    del made["name"]
    return {"tier": "basic", **made}


def kept(given: dict[str, Any]) -> dict[str, Any]:
    return given


# V1 becomes V3 by these two, as versions 1, 2 (never stored) and 3.
STEPS = {("Customer", 1): full_name, ("Customer", 2): kept}


def old(key: str, age: int = 1) -> dict[str, Any]:
    return row(key, name="Ann", age=age)


def new(key: str, age: float = 1.0, tier: str = "basic") -> dict[str, Any]:
    return row(key, name="Ann", age=age, tier=tier)


def forked(world: World) -> tuple[Writer, Writer]:
    main = world.open("main")
    write(main.repo, V1, old("a"), old("b"), old("c"))
    main.repo.branches.create("run")
    return main, world.open(branch="run")


def stored(repo: ObjectRepository, spec: Any = V2) -> dict[str, tuple[Any, ...]]:
    names = [f.name for f in spec.fields if f.name != "id"]
    return {r["entity_key"]: tuple(r[n] for n in names) for r in repo.read(spec).to_pylist()}


def test_the_target_migrated_and_the_source_changed_rows(world: World) -> None:
    main, branch = forked(world)
    write(branch.repo, V1, old("a", 5), old("new", 6))
    migrate(main.repo, V2)
    write(main.repo, V2, new("b", 2.5, "gold"))
    report = merge(main, "run")
    assert [(t.inserted, t.updated, t.schema) for t in report.types] == [(1, 1, "")]
    assert stored(main.repo) == {
        "a": ("Ann", 5.0, "basic"),
        "b": ("Ann", 2.5, "gold"),
        "c": ("Ann", 1.0, "basic"),
        "new": ("Ann", 6.0, "basic"),
    }
    assert merge(main, "run").commit_id is None
    assert main.repo.identity_counts()[V1.ref] == 4
    # The branch goes on in its own version, and comes along with an update.
    write(branch.repo, V1, old("c", 7))
    assert merge(main, "run").commit_id is not None
    assert stored(main.repo)["c"] == ("Ann", 7.0, "basic")
    assert update(branch).types[0].schema == "migrated"
    assert stored(branch.repo) == stored(main.repo)
    assert merge(main, "run").commit_id is None
    fine(world)


def test_the_source_migrated_and_the_target_changed_rows(world: World) -> None:
    main, branch = forked(world)
    migrate(branch.repo, V2)
    write(branch.repo, V2, new("a", 5.5), new("new", 6.0))
    write(main.repo, V1, old("b", 9), old("theirs", 3))
    report = merge(main, "run")
    assert [(t.inserted, t.updated, t.schema) for t in report.types] == [(1, 4, "migrated")]
    assert stored(main.repo) == {
        "a": ("Ann", 5.5, "basic"),
        "b": ("Ann", 9.0, "basic"),
        "c": ("Ann", 1.0, "basic"),
        "new": ("Ann", 6.0, "basic"),
        "theirs": ("Ann", 3.0, "basic"),
    }
    assert stored(world.open().repo) == stored(main.repo)
    assert main.repo.identity_counts()[V1.ref] == 5
    history = main.repo.type_histories()[V1.ref]
    assert [(v.version, v.activation_commit_id) for v in history.versions] == [(1, 1), (2, 3)]
    assert merge(main, "run").commit_id is None
    update(branch)
    assert stored(branch.repo) == stored(main.repo)
    fine(world)


@pytest.mark.parametrize("ahead", ["main", "run"])
def test_rows_that_both_changed_are_conflicts_in_the_new_version(world: World, ahead: str) -> None:
    main, branch = forked(world)
    first, second = (main, branch) if ahead == "main" else (branch, main)
    migrate(first.repo, V2)
    write(first.repo, V2, new("a", 5.5), new("b", 1.0, "gold"))
    write(second.repo, V1, old("a", 7), old("b", 7))
    with pytest.raises(MergeConflictError) as told:
        merge(main, "run")
    listed = [(c["conflict"], c["identity"], c["fields"]) for c in told.value.conflicts]
    assert listed == [
        ("divergent_update", ["a"], ["age"]),
        ("divergent_update", ["b"], ["age", "tier"]),
    ]
    assert {c["base"]["age"] for c in told.value.conflicts} == {1.0}
    with pytest.raises(MergeConflictError) as told:
        merge(main, "run", "fields")
    assert [c["identity"] for c in told.value.conflicts] == [["a"]]
    merge(main, "run", "ours")
    assert stored(main.repo)["a"][1] == (5.5 if ahead == "main" else 7.0)
    assert stored(main.repo)["b"][1:] == ((1.0, "gold") if ahead == "main" else (7.0, "basic"))
    assert merge(main, "run").commit_id is None
    fine(world)


@pytest.mark.parametrize("given", [STEPS, None])
@pytest.mark.parametrize("ahead", ["target", "source"])
@pytest.mark.parametrize("direction", ["merge", "update"])
def test_upgraders_bring_rows_along_or_their_lack_is_told(
    world: World, direction: str, ahead: str, given: Any
) -> None:
    main, branch = forked(world)
    target, source = (main, branch) if direction == "merge" else (branch, main)
    first, second = (target, source) if ahead == "target" else (source, target)
    migrate(first.repo, V3, upgraders=STEPS)
    write(second.repo, V1, old("b", 9), old("n", 3))

    def bring() -> Any:
        steps = {key: Upgrader(key[0], key[1], f) for key, f in given.items()} if given else {}
        return (
            merge(main, "run", upgraders=steps)
            if direction == "merge"
            else update(branch, upgraders=steps)
        )

    if given is None:
        with pytest.raises(MergeConflictError, match="no upgrader of Customer from version 1"):
            bring()
        return
    bring()
    ages = {"a": 1.0, "b": 9.0, "c": 1.0, "n": 3.0}
    rows = {r["entity_key"]: r for r in target.repo.read(V3).to_pylist()}
    assert {key: r["age"] for key, r in rows.items()} == ages
    assert {(r["full_name"], r["tier"]) for r in rows.values()} == {("ANN", "basic")}
    assert bring().commit_id is None
    fine(world)


def test_an_update_does_not_hide_what_the_branch_changed_before(world: World) -> None:
    """Its own changes are of the version before; the rows that count are of the new one."""
    main, branch = forked(world)
    write(branch.repo, V1, old("a", 5))
    migrate(main.repo, V2)
    update(branch)
    assert stored(branch.repo)["a"] == ("Ann", 5.0, "basic")
    report = merge(main, "run")
    assert [(t.inserted, t.updated) for t in report.types] == [(0, 1)]
    assert stored(main.repo) == stored(branch.repo)
    fine(world)


def test_a_branch_merged_before_it_migrates(world: World) -> None:
    main, branch = forked(world)
    write(branch.repo, V1, old("a", 5))
    merge(main, "run")
    migrate(branch.repo, V2)
    write(branch.repo, V2, new("b", 2.0, "gold"))
    write(main.repo, V1, old("c", 8))
    merge(main, "run")
    assert stored(main.repo) == {
        "a": ("Ann", 5.0, "basic"),
        "b": ("Ann", 2.0, "gold"),
        "c": ("Ann", 8.0, "basic"),
    }
    fine(world)


def test_the_same_migration_on_both_sides(world: World) -> None:
    main, branch = forked(world)
    for each in (main, branch):
        migrate(each.repo, V2)
    write(branch.repo, V2, new("a", 5.5))
    write(main.repo, V2, new("b", 7.5))
    report = merge(main, "run")
    assert [(t.inserted, t.updated, t.schema) for t in report.types] == [(0, 1, "")]
    assert {k: v[1] for k, v in stored(main.repo).items()} == {"a": 5.5, "b": 7.5, "c": 1.0}
    fine(world)


def test_a_type_without_rows_is_migrated_and_filled(world: World) -> None:
    main = world.open("main")
    migrate(main.repo, V1)
    main.repo.branches.create("run")
    branch = world.open(branch="run")
    migrate(branch.repo, V2)
    write(main.repo, V1, old("a", 4))
    merge(main, "run")
    assert stored(main.repo) == {"a": ("Ann", 4.0, "basic")}
    fine(world)


@pytest.mark.parametrize("who", ["both", "source drops", "target drops"])
def test_schemas_that_do_not_go_together(world: World, who: str) -> None:
    main, branch = forked(world)
    if who == "both":
        migrate(branch.repo, V2)
        migrate(main.repo, OTHER)
    elif who == "source drops":
        drop(branch.repo, "Customer")
        write(main.repo, V1, old("b", 5))
    else:
        drop(main.repo, "Customer")
        write(branch.repo, V1, old("b", 5))
    for bring in (lambda: merge(main, "run", "theirs"), lambda: update(branch, "theirs")):
        with pytest.raises(MergeConflictError, match="No policy decides that") as told:
            bring()
        assert [c["conflict"] for c in told.value.conflicts] == ["schema"]
