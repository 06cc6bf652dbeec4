"""What type checkers see of queries, and that they object where Python would."""

import pytest

from tests.typing_check import Errors, check_mistakes, mypy_errors

pytestmark = pytest.mark.timeout(600)  # may wait for another run of mypy

GOOD = """
from collections.abc import Iterator
from datetime import datetime, time
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, assert_type
from uuid import UUID

from storage_engine import Precision
from storage_engine.model import Entity, Field, FieldRef, Relation
from storage_engine.query import (
    Aggregate, Filter, Having, Path, Query, Result, count, left, max, right, sum,
)


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    age: Field[int]
    score: Field[float]
    email: Field[str | None] = Field(default=None)
    active: Field[bool] = Field(default=True)
    since: Field[datetime | None] = Field(default=None)
    profile: Field[dict[str, Any]] = Field(default_factory=dict)
    tags: Field[list[str]] = Field(default_factory=list)


class Status(Enum):
    OPEN = "open"


class Product(Entity):
    id: Field[str] = Field(primary_key=True)
    price: Field[float]
    cost: Field[Decimal] = Field(precision=12, scale=2)
    opens: Field[time | None] = Field(default=None)
    ref: Field[UUID | None] = Field(default=None)
    status: Field[Status] = Field(default=Status.OPEN)
    mode: Field[Literal["r", "w"]] = Field(default="r")
    share: Field[Annotated[Decimal, Precision(5, 4)] | None] = Field(default=None)


class Subscription(Relation[Customer, Product]):
    seats: Field[int]


query: Query
assert_type(Customer.age > 30, Filter)
assert_type(Customer.age == 30, Filter)
assert_type(Customer.email != "x", Filter)
assert_type(Customer.score >= 1, Filter)
assert_type(Customer.age.in_([1, 2]), Filter)
assert_type(Customer.email.in_(["a"]), Filter)
assert_type(Customer.email.startswith("a") & ~Customer.active.is_true(), Filter)
assert_type(Customer.tags.contains("x") | Customer.email.is_null(), Filter)
assert_type(Customer.profile["a"]["b"], FieldRef[Any])
assert_type(Customer.profile.path("a.b"), FieldRef[Any])
assert_type(Customer.profile.path("a.b", int), FieldRef[int])
assert_type(Customer.profile.path("a.b", str) == "x", Filter)
assert_type(Customer.tags.any_path("kind") == 1, Filter)
assert_type(left(Subscription).age, FieldRef[int])
assert_type(right(Subscription).price > 1.5, Filter)
assert_type(Product.cost > Decimal("1.5"), Filter)
assert_type(Product.status == Status.OPEN, Filter)
assert_type(Product.mode.in_(["r"]), Filter)
assert_type(Product.ref == UUID(int=0), Filter)
assert_type(Product.opens < time(9), Filter)
assert_type(Product.share, FieldRef[Decimal | None])
assert_type(Product(id="p", price=1, cost=Decimal(1)).status, Status)
assert_type(count() > 1, Having)
assert_type((sum(Customer.age) > 10) & (max(Customer.email) == "x"), Having)
assert_type(sum(Customer.age), Aggregate)

customers = query.entities(Customer).where(Customer.age > 1).order_by(Customer.age, desc=True)
found: list[Customer] = customers.limit(3).offset(1).as_of(42).collect()
assert_type(customers.collect(), Result[Customer])
assert_type(customers.first(), Customer | None)
assert_type(customers.objects(), Iterator[Customer])
assert_type(customers.with_history().collect()[0].age, int)
assert_type(customers.count(), int)
assert_type(customers.avg(Customer.age), float | None)
assert_type(query.relations(Subscription).collect()[0].left, Customer)
paths = customers.via(Subscription).collect()
assert_type(paths, Result[Path[Customer]])
assert_type(paths[0].source, Customer)
customers.group_by(Customer.email).having(count() > 1).agg(n=count(), top=max(Customer.age))
"""

BAD = {
    "Product.cost > 1.5": "operator",
    'query.entities(Product).where(Product.status == "open")': "arg-type",
    'query.entities(Product).where(Product.mode == "x")': "arg-type",
    'Product.ref.in_(["x"])': "list-item",
    'Product.opens > "09:00"': "operator",
    'Product(id="p", price=1.0, cost=1.5)': "arg-type",
    'customers.where(Customer.age == "x")': "arg-type",
    'Customer.age > "x"': "operator",
    "customers.where(Customer.email != 5)": "arg-type",
    'Customer.age.in_(["x"])': "list-item",
    "Customer.email.startswith(1)": "arg-type",
    "Customer.nmae == 1": "attr-defined",
    "left(Subscription).price": "attr-defined",
    "left(Customer)": "arg-type",
    "query.entities(Subscription)": "type-var",
    "query.relations(Customer)": "type-var",
    "customers.where(True)": "arg-type",
    "customers.where(count() > 1)": "arg-type",
    'customers.order_by("age")': "arg-type",
    "customers.group_by(Customer.id).having(Customer.age > 1)": "arg-type",
    'customers.limit("3")': "arg-type",
    "(Customer.age > 1) & (count() > 1)": "operator",
    "customers.via(Customer)": "arg-type",
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    return mypy_errors(tmp_path_factory.mktemp("typing"), GOOD, BAD)


def test_queries_type_check(errors: Errors):
    assert errors["good.py"] == {}


def test_mistakes_are_type_errors(errors: Errors):
    check_mistakes(errors, GOOD, BAD)
