"""The builder: what each step asks of the executor, and what it refuses."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest

from storage_engine.errors import IntegrityError, TypeDeclarationError
from storage_engine.model import Entity, Field, Relation
from storage_engine.model.declarations import spec_of
from storage_engine.query import Path, Query, avg, count, left, max, min, right, sum
from storage_engine.query.spec import When
from tests.query.memory import MemoryExecutor


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    tier: Field[str] = Field(default="Standard")
    age: Field[int | None] = Field(default=None)
    active: Field[bool] = Field(default=True)
    tags: Field[list[str]] = Field(default_factory=list)
    profile: Field[dict[str, Any]] = Field(default_factory=dict)


class Product(Entity):
    id: Field[str] = Field(primary_key=True)


class Subscription(Relation[Customer, Product]):
    seats: Field[int] = Field(default=1)


class PartOf(Relation[Product, Product]):
    """A product inside a product."""


class Employment(Relation[Customer, Product]):
    stint: Field[str] = Field(instance_key=True)
    role: Field[str] = Field(default="")


@pytest.fixture(name="storage")
def a_storage() -> MemoryExecutor:
    made = MemoryExecutor(tags={"first": 1})
    made.put(1, spec_of(Customer), Customer(id="a", tier="Gold", age=30), Customer(id="b", age=20))
    made.put(1, spec_of(Product), Product(id="p"), Product(id="q"))
    made.put(2, spec_of(Customer), Customer(id="a", tier="Silver", age=31, tags=["x", "y"]))
    made.put(2, spec_of(Customer), Customer(id="c", tier="Gold"))
    made.put(2, spec_of(Subscription), Subscription(left_key="a", right_key="p", seats=5))
    made.put(3, spec_of(Subscription), Subscription(left_key="c", right_key="p"))
    made.put(3, spec_of(Subscription), Subscription(left_key="c", right_key="gone", seats=9))
    made.put(3, spec_of(PartOf), PartOf(left_key="p", right_key="q"))
    made.put(3, spec_of(Employment), Employment(left_key="a", right_key="p", stint="s1"))
    return made


@pytest.fixture(name="query")
def a_query(storage: MemoryExecutor) -> Query:
    return Query(storage)


def ids(found: list[Customer]) -> list[str]:
    return [customer.id for customer in found]


def test_collect_and_first(query: Query) -> None:
    gold = query.entities(Customer).where(Customer.tier == "Gold")
    assert gold.collect() == [Customer(id="c", tier="Gold")]
    first = gold.first()
    assert first is not None
    assert first.meta().commit_id == 2
    assert gold.where(Customer.age > 1).first() is None
    assert gold.limit(0).first() is None


def test_where_adds_up_and_queries_do_not_change(query: Query) -> None:
    every = query.entities(Customer)
    old = every.where(Customer.age > 25)
    assert ids(old.where(Customer.tier == "Silver").collect()) == ["a"]
    assert ids(old.where(Customer.tier == "Gold").collect()) == []
    assert ids(every.collect()) == ["a", "b", "c"]
    assert old == every.where(Customer.age > 25)


def test_order_and_paging(query: Query) -> None:
    every = query.entities(Customer)
    assert ids(every.order_by(Customer.age).collect()) == ["b", "a", "c"]
    assert ids(every.order_by(Customer.age, desc=True).collect()) == ["a", "b", "c"]
    assert ids(every.order_by(Customer.tier).order_by(Customer.id, desc=True).collect()) == [
        "c", "a", "b",
    ]  # fmt: skip
    assert ids(every.order_by(Customer.age).limit(1).offset(1).collect()) == ["a"]


def test_time(query: Query, storage: MemoryExecutor) -> None:
    gold = query.entities(Customer).where(Customer.tier == "Gold")
    assert ids(gold.as_of(1).collect()) == ["a"]
    assert ids(gold.as_of("first").collect()) == ["a"]
    assert ids(gold.with_history().collect()) == ["a", "c"]
    assert ids(gold.history_since(1).collect()) == ["c"]
    moment = datetime(2020, 1, 1, tzinfo=UTC)
    assert gold.as_of(moment).spec.when == When(as_of=moment)
    assert gold.as_of(1).as_of(1).spec.when == When(as_of=1)
    assert [what for what, _ in storage.asked] == ["rows"] * 4


def test_diagnostics_come_with_the_result(query: Query) -> None:
    found = query.entities(Customer).as_of(0).collect()
    assert found == []
    assert found.diagnostics == ({"reason": "commit_before_activation", "activation_commit_id": 1},)
    assert query.entities(Customer).collect().diagnostics == ()


def test_arrow_batches_and_objects(query: Query) -> None:
    every = query.entities(Customer)
    table = every.to_arrow()
    assert table.column_names[:2] == ["commit_id", "entity_key"]
    assert table.num_rows == 3
    assert [batch.num_rows for batch in every.batches()] == [2, 1]
    assert [customer.id for customer in every.objects()] == ["a", "b", "c"]
    assert query.entities(Customer).where(Customer.age > 99).to_arrow().schema == table.schema


def test_explain(query: Query) -> None:
    plan = query.entities(Customer).where(Customer.age > 3).limit(2).explain()
    assert str(plan) == "scan Customer"
    assert plan.facts["where"]["value"] == 3
    assert plan.facts["limit"] == 2
    grouped = query.entities(Customer).group_by(Customer.tier).having(count() > 1)
    facts = grouped.explain(n=count()).facts
    assert facts["aggregates"] == {"n": {"function": "count"}}
    assert facts["having"]["op"] == ">"


def test_endpoints_are_loaded_at_once(query: Query, storage: MemoryExecutor) -> None:
    found = query.relations(Subscription).where(left(Subscription).tier == "Gold").collect()
    assert [(one.left_key, one.right_key) for one in found] == [("c", "gone"), ("c", "p")]
    assert [one.left.tier for one in found] == ["Gold", "Gold"]
    assert found[1].right.id == "p"
    with pytest.raises(IntegrityError, match="its right entity 'gone' is not in the storage"):
        _ = found[0].right
    assert [what for what, _ in storage.asked] == ["rows", "endpoints left", "endpoints right"]


def test_instance_keys_can_be_asked_for(query: Query) -> None:
    found = query.relations(Employment).where(Employment.stint == "s1").collect()
    assert [one.stint for one in found] == ["s1"]


def test_traversals(query: Query) -> None:
    every = query.entities(Customer).via(Subscription).via(PartOf)
    found = every.collect()
    assert all(isinstance(path, Path) for path in found)
    assert [(p.source.id, [r.right_key for r in p.relations]) for p in found] == [
        ("a", ["p", "q"]),
        ("c", ["p", "q"]),
    ]
    assert found[0].relations[1] is found[1].relations[1]
    assert found[0].relations[0].left.id == "a"
    only = every.where(Customer.tier == "Gold").first()
    assert only is not None
    assert only.source.id == "c"
    assert every.as_of(1).collect() == []


def test_aggregates(query: Query, storage: MemoryExecutor) -> None:
    every = query.entities(Customer)
    assert every.count() == 3
    assert every.count_where(Customer.tier == "Gold") == 1
    assert every.sum(Customer.age) == 51
    assert every.avg(Customer.age) == 25.5
    assert (every.min(Customer.age), every.max(Customer.tier)) == (20, "Standard")
    assert every.avg_len(Customer.tags) == pytest.approx(2 / 3)
    assert every.where(Customer.tier == "none").sum(Customer.age) is None
    assert {what for what, _ in storage.asked} == {"aggregate"}


def test_groups(query: Query) -> None:
    grouped = query.entities(Customer).group_by(Customer.tier, Customer.profile.path("k", str))
    made = grouped.agg(n=count(), oldest=max(Customer.age), mean=avg(Customer.age))
    assert made.to_pylist() == [
        {"tier": "Gold", "profile.k": None, "n": 1, "oldest": None, "mean": None},
        {"tier": "Silver", "profile.k": None, "n": 1, "oldest": 31, "mean": 31.0},
        {"tier": "Standard", "profile.k": None, "n": 1, "oldest": 20, "mean": 20.0},
    ]
    both = grouped.having(count() > 1).having(min(Customer.age) < 3)
    assert repr(both.spec.having) == "((count() > 1) & (min(Customer.age) < 3))"


ANY: Any = Customer
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda q: q.entities(Subscription), TypeError, "Subscription is declared as relation"),
    (lambda q: q.relations(Customer), TypeError, "Customer is declared as entity"),
    (lambda q: q.entities(int), TypeDeclarationError, "is not an Entity or Relation class"),
    (lambda q: q.entities(Customer).where(True), TypeError, "where takes a condition"),
    (lambda q: q.entities(Customer).where(ANY.active), TypeError, "Customer.active.is_true()"),
    (lambda q: q.entities(Customer).where(count() > 1), TypeError, "put it in having(...)"),
    (
        lambda q: q.entities(Customer).where(Subscription.seats > 1),
        ValueError,
        "Subscription.seats is not a field of Customer, which is queried",
    ),
    (
        lambda q: q.entities(Customer).where(left(Subscription).tier == "x"),
        ValueError,
        "about the endpoints of Subscription; Customer is queried",
    ),
    (
        lambda q: q.relations(Subscription).where(left(Employment).tier == "x"),
        ValueError,
        "about the endpoints of Employment; Subscription is queried",
    ),
    (lambda q: q.entities(Customer).order_by(), TypeError, "at least one field"),
    (lambda q: q.entities(Customer).order_by("age"), TypeError, "not 'age'"),
    (lambda q: q.entities(Customer).order_by(ANY.tags), TypeError, "have no common order"),
    (lambda q: q.entities(Customer).order_by(ANY.profile["k"]), TypeError, ".path(..., str)"),
    (lambda q: q.entities(Customer).order_by(ANY.tags.any_path("k")), ValueError, "has no keys"),
    (
        lambda q: q.relations(Subscription).order_by(left(Subscription).tier),
        ValueError,
        "fields of endpoints can be used in where() only",
    ),
    (
        lambda q: q.entities(Customer).order_by(ANY.profile["k"].any_path("x")),
        ValueError,
        "any_path can be used in where() only",
    ),
    (lambda q: q.entities(Customer).limit(-1), ValueError, "limit takes a number from 0 on"),
    (lambda q: q.entities(Customer).limit(True), TypeError, "limit takes a whole number, not True"),
    (lambda q: q.entities(Customer).offset("1"), TypeError, "offset takes a whole number"),
    (lambda q: q.entities(Customer).offset(2**64), ValueError, "offset takes a number from 0 on"),
    (lambda q: q.entities(Customer).history_since("1"), TypeError, "history_since takes a whole"),
    (lambda q: q.entities(Customer).as_of(1.5), TypeError, "as_of takes a commit id, a datetime"),
    (lambda q: q.entities(Customer).as_of(True), TypeError, "as_of takes a commit id, a datetime"),
    (lambda q: q.entities(Customer).as_of(""), ValueError, "the name of a tag is not empty"),
    (
        lambda q: q.entities(Customer).as_of(1).with_history(),
        ValueError,
        "with_history() contradicts as_of(1), given earlier",
    ),
    (
        lambda q: q.entities(Customer).history_since(3).as_of("x"),
        ValueError,
        "as_of('x') contradicts history_since(3)",
    ),
    (lambda q: q.entities(Customer).as_of(1).as_of(2), ValueError, "as_of(2) contradicts as_of(1)"),
    (lambda q: q.entities(Customer).limit(3).count(), ValueError, "count takes all rows"),
    (lambda q: q.entities(Customer).offset(3).sum(ANY.age), ValueError, "leave out offset"),
    (lambda q: q.entities(Customer).order_by(ANY.age).group_by(ANY.tier), ValueError, "order_by"),
    (lambda q: q.entities(Customer).sum(ANY.tier), TypeError, "sum needs a number"),
    (lambda q: q.entities(Customer).avg(ANY.active), TypeError, "avg needs a number"),
    (lambda q: q.entities(Customer).sum(ANY.profile["k"]), TypeError, ".path(..., float)"),
    (lambda q: q.entities(Customer).min(ANY.active), TypeError, "min needs values with an order"),
    (lambda q: q.entities(Customer).max(ANY.tags), TypeError, "have no common order"),
    (lambda q: q.entities(Customer).avg_len(ANY.tier), TypeError, "avg_len needs a list"),
    (lambda q: q.entities(Customer).sum(Subscription.seats), ValueError, "is not a field of"),
    (lambda q: q.entities(Customer).sum(5), TypeError, "sum takes a field such as"),
    (lambda q: q.entities(Customer).group_by(), TypeError, "at least one field"),
    (lambda q: q.entities(Customer).group_by(ANY.tier, ANY.tier), ValueError, "given twice"),
    (lambda q: q.entities(Customer).group_by(ANY.tags), TypeError, "have no common order"),
    (lambda q: q.entities(Customer).group_by(ANY.tier).agg(), TypeError, "at least one column"),
    (lambda q: q.entities(Customer).group_by(ANY.tier).agg(n=3), TypeError, "such as count()"),
    (lambda q: q.entities(Customer).group_by(ANY.tier).agg(tier=count()), ValueError, "group key"),
    (
        lambda q: q.entities(Customer).group_by(ANY.tier).having(ANY.age > 3),
        TypeError,
        "is about rows; put it in where(...)",
    ),
    (lambda q: q.entities(Customer).group_by(ANY.tier).having(3), TypeError, "having takes"),
    (
        lambda q: q.entities(Customer).group_by(ANY.tier).having(sum(Subscription.seats) > 1),
        ValueError,
        "is not a field of Customer",
    ),
    (lambda q: count() == None, TypeError, "count() can be compared with a value"),  # noqa: E711
    (lambda q: count() > "x", TypeError, "count() is int; it cannot be compared with 'x'"),
    (lambda q: (count() > 1) & (ANY.age > 1), TypeError, "is not a condition on groups"),
    (lambda q: (count() > 1) and (count() > 2), TypeError, "combine conditions with & | ~"),
    (lambda q: sum(right(Subscription).id), ValueError, "fields of endpoints"),
    (
        lambda q: q.entities(Customer).via(PartOf),
        ValueError,
        "via(PartOf) starts at Product, but the path has reached Customer",
    ),
    (
        lambda q: q.entities(Customer).via(Subscription, backwards=True),
        ValueError,
        "via(Subscription, backwards=True) starts at Product, but the path has reached Customer",
    ),
    (lambda q: q.entities(Customer).via(Customer), TypeError, "Customer is declared as entity"),
    (
        lambda q: q.entities(Customer).with_history().via(Subscription),
        ValueError,
        "traversals see one state; leave out with_history()",
    ),
    *(
        (
            lambda q, name=name: getattr(q.entities(Customer).via(Subscription), name)(),
            TypeError,
            f"{name} is not available on traversals",
        )
        for name in ("count", "sum", "group_by", "with_history", "to_arrow", "batches")
    ),
]


@pytest.mark.parametrize(("step", "error", "message"), REFUSED)
def test_mistakes_are_refused_by_the_step_that_makes_them(
    query: Query, storage: MemoryExecutor, step: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        step(query)
    assert storage.asked == []
