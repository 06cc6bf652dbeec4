"""Rules that hold on each side and not together: conflicts, found at the cost of what changed."""

from __future__ import annotations

from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.errors import MergeConflictError, ValidationError
from storage_engine.model.expectations import parse_expectations
from tests.commitlog.support import World, Writer, at
from tests.conformance.test_rfc0009_migration import drop
from tests.engines import (
    CUSTOMER,
    PRODUCT,
    SUBSCRIPTION,
    customer,
    edge,
    product,
    rows_of,
    stream_of,
)
from tests.repository.object.merge.test_merge import forked, merge, update

Broken = list[tuple[str, Any]]


def rules(*given: Any, spec: Any = CUSTOMER) -> Any:
    return {spec.ref: parse_expectations(list(given))}


def broken(bring: Any) -> Broken:
    """What a merge or update is refused for."""
    with pytest.raises(MergeConflictError, match="nothing was done") as told:
        bring()
    listed = told.value.conflicts
    assert {c["conflict"] for c in listed} == {"broken_expectation"}
    return [(c["type_name"], tuple(c["identity"])) for c in listed]


UNIQUE = rules({"unique": "name"})


@pytest.mark.parametrize("direction", ["merge", "update"])
@pytest.mark.parametrize("bulk", [False, True])
def test_two_rows_alike_one_from_each_side(world: World, direction: str, bulk: bool) -> None:
    main, branch = forked(world)
    ann = [customer("x", "Ann")]
    branch.commit(stream_of(CUSTOMER, ann) if bulk else rows_of(CUSTOMER, *ann))
    main.put(customer("y", "Ann"))
    before = world.backend.objects()

    def bring(**given: Any) -> Any:
        return merge(main, "run", **given) if direction == "merge" else update(branch, **given)

    expected = "x" if direction == "merge" else "y"
    assert broken(lambda: bring(rules=UNIQUE)) == [("Customer", (expected,))]
    main.repo.flush()
    assert world.backend.objects() == before
    (conflict,) = bring(rules=UNIQUE, dry_run=True).conflicts
    assert conflict.fields == ("name",)
    assert "name is unique" in conflict.message
    assert "has the same" in conflict.message
    assert conflict.ours is not None
    assert conflict.theirs is not None
    assert bring().commit_id is not None  # nobody asked


def test_what_a_policy_decides_is_what_rules_are_asked_of(world: World) -> None:
    """`a` and `b` swapped their names on the branch; main's `a` stays, and so its name is there
    twice."""
    main = world.open("main")
    main.put(customer("a", "Ann"), customer("b", "Bo"))
    main.repo.branches.create("run")
    branch = world.open(branch="run")
    branch.put(customer("a", "Bo"), customer("b", "Ann"))
    assert merge(main, "run", dry_run=True, rules=UNIQUE).conflicts == []
    main.put(customer("a", "Ann", 5))
    assert broken(lambda: merge(main, "run", "ours", rules=UNIQUE)) == [("Customer", ("b",))]
    assert merge(main, "run", "theirs", rules=UNIQUE).commit_id == 3


def test_nulls_and_rows_that_nobody_changed_are_left_alone(world: World) -> None:
    main, branch = forked(world)  # whose two customers have one name already
    branch.put(customer("n1", age=None), customer("n2", age=None))
    main.put(customer("c", "Cid"))
    assert merge(main, "run", rules=rules({"unique": "age"}), dry_run=True).conflicts == []
    branch.put(customer("d", "Dan"))
    found = merge(main, "run", rules=UNIQUE, dry_run=True).conflicts
    assert [c.identity for c in found] == [("n1",), ("n2",)]  # alike among themselves


@pytest.mark.parametrize(
    ("rule", "row"),
    [
        ({"not_null": "age"}, customer("x", age=None)),
        ({"range": {"column": "age", "min": 0, "max": 9}}, customer("x", age=10)),
        ({"pattern": {"column": "name", "pattern": "[A-Z][a-z]+"}}, customer("x", "ann")),
    ],
)
def test_rules_on_single_rows(world: World, rule: Any, row: Any) -> None:
    main, branch = forked(world)
    branch.put(row, customer("fine", "Fin", 3))
    main.put(customer("m", age=100, name="m"))  # the target's own are not asked
    assert broken(lambda: merge(main, "run", rules=rules(rule))) == [("Customer", ("x",))]
    branch.put(customer("x", "Xen", 3))
    assert merge(main, "run", rules=rules(rule)).commit_id == 3


def test_what_a_function_decides_breaks_a_rule(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("a", age=4))
    main.put(customer("a", age=5))
    limit = rules({"range": {"column": "age", "max": 8}})

    def added(_base: Any, ours: Any, theirs: Any) -> Any:
        return {**ours, "age": ours["age"] + theirs["age"]}

    assert broken(lambda: merge(main, "run", added, rules=limit)) == [("Customer", ("a",))]
    assert merge(main, "run", "theirs", rules=limit).commit_id == 3


REFERS = rules({"referential": {"column": "left_key", "type": "Customer"}}, spec=SUBSCRIPTION)


def subscribed(world: World) -> tuple[Writer, Writer]:
    main, branch = forked(world)
    main.commit(rows_of(PRODUCT, product("p")), rows_of(SUBSCRIPTION, edge("a", "p", seats=1)))
    update(branch)
    return main, branch


def test_references_to_what_comes_with_them_or_is_there(world: World) -> None:
    main, branch = subscribed(world)
    branch.commit(
        rows_of(CUSTOMER, customer("new")),
        rows_of(SUBSCRIPTION, edge("new", "p", seats=1), edge("b", "p", seats=1)),
    )
    main.put(customer("b", age=9))
    assert merge(main, "run", rules=REFERS).commit_id == 4


def test_a_reference_to_what_the_target_ended(world: World) -> None:
    main, branch = subscribed(world)
    branch.commit(rows_of(SUBSCRIPTION, edge("b", "p", seats=1)))
    drop(main.repo, "Customer")
    told = broken(lambda: merge(main, "run", rules=REFERS))
    assert [name for name, _ in told] == ["Subscription"]
    assert merge(main, "run").commit_id is not None


def test_a_merge_that_ends_what_the_target_refers_to(world: World) -> None:
    main, branch = subscribed(world)
    drop(branch.repo, "Customer")
    main.commit(rows_of(SUBSCRIPTION, edge("b", "p", seats=1)))
    told = broken(lambda: merge(main, "run", rules=REFERS))
    assert told == [("Subscription", ("b", "p", ""))]


def test_a_rule_that_breaks_while_merging(world: World) -> None:
    """Looked at again under the lock, and before head is swung."""
    main, branch = forked(world)
    branch.put(customer("x", "Ann"))
    other = world.open("other")
    at(main.store, "PUT_IF", layout.LOCK, lambda: other.put(customer("y", "Ann")))
    assert broken(lambda: merge(main, "run", rules=UNIQUE)) == [("Customer", ("x",))]
    main.put(customer("free", "Fri"))


def test_only_changes_are_read(world: World) -> None:
    main = world.open("main")
    for letter in "abcdefgh":
        main.put(*(customer(f"{letter}{n}", f"{letter}{n}") for n in range(3)))
    main.repo.branches.create("run")
    branch = world.open(branch="run")
    branch.put(customer("c1", "new"))
    main.put(customer("h1", "other"))
    main.repo.flush()
    cold = world.open("cold")
    read: list[str] = []
    cold.store.on_request(lambda kind, key: read.append(key) if key.endswith(".parquet") else None)
    merge(cold, "run", rules=UNIQUE)
    assert len(set(read)) <= 3  # what the branch changed, what main did, and what was there of c


def test_rules_that_do_not_fit(world: World) -> None:
    main, branch = forked(world)
    branch.put(customer("x"))
    wrong = rules(
        {"unique": "email"},
        {"range": {"column": "age", "min": "a"}},
        {"pattern": {"column": "age", "pattern": "x"}},
    )
    with pytest.raises(ValidationError, match=r"no column email.*age is int64.*not a text"):
        merge(main, "run", rules=wrong)
