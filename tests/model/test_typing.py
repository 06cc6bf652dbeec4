"""What type checkers see, and that they object where Python would."""

import pytest

from tests.typing_check import Errors, check_mistakes, mypy_errors

pytestmark = pytest.mark.timeout(600)  # may wait for another run of mypy

GOOD = """
from datetime import datetime
from typing import TypedDict, assert_type

from storage_engine.model import Entity, Event, Field, FieldRef, Relation, TypeSpec


class Address(TypedDict):
    city: str


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    age: Field[int]
    tier: Field[str] = Field(default="Standard", index=True)
    tags: Field[list[str]] = Field(default_factory=list)
    email: Field[str | None] = Field(default=None)
    address: Field[Address | None] = Field(default=None)


class Product(Entity, name="Item"):
    id: Field[str] = Field(primary_key=True)


class Subscription(Relation[Customer, Product]):
    stint: Field[str] = Field(instance_key=True)
    seats: Field[int] = Field(default=1)


class Placed(Event, name="order.placed", priority=3):
    order_id: Field[str]


ann = Customer(id="a", age=3, email=None)
assert_type(Customer.age, FieldRef[int])
assert_type(Customer.email, FieldRef[str | None])
assert_type(Customer.age.owner, TypeSpec)
assert_type(ann.age, int)
assert_type(ann.tags, list[str])
assert_type(ann.email, str | None)
assert_type(ann.replace(age=4), Customer)
assert_type(Customer.model_validate({"id": "a"}), Customer)
assert_type(ann.meta().commit_id, int)

sub = Subscription(left_key="a", right_key="b", stint="s")
assert_type(sub.left, Customer)
assert_type(sub.right, Product)
assert_type(sub.left_key, str)
assert_type(sub.instance_key, str)
assert_type(Subscription.seats, FieldRef[int])

placed = Placed(order_id="o", priority=5)
assert_type(placed.created_at, datetime)
assert_type(placed.order_id, str)
"""

BAD = {
    "ann.age = 4": "arg-type",
    'Customer(id="a", age="3")': "arg-type",
    'Customer(id="a")': "call-arg",
    'Customer(id="a", age=3, nmae=3)': "call-arg",
    'Customer("a", 3)': "call-arg",
    'Subscription(left_key="a", stint="s")': "call-arg",
    "Field(bogus=1)": "arg-type",
    "class X(Relation[int, Product]): ...": "type-var",
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    return mypy_errors(tmp_path_factory.mktemp("typing"), GOOD, BAD)


def test_declarations_and_uses_type_check(errors: Errors):
    assert errors["good.py"] == {}


def test_mistakes_are_type_errors(errors: Errors):
    check_mistakes(errors, GOOD, BAD)
