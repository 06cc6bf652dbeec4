"""What type checkers see, and that they object where Python would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CONFIG = """
[mypy]
strict = True
explicit_package_bases = True
[mypy-storage_engine.*]
follow_imports = silent
[mypy-pyarrow.*]
ignore_missing_imports = True
"""

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
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """Errors by file and line, from one run: starting mypy is what takes time."""
    folder = tmp_path_factory.mktemp("typing")
    (folder / "good.py").write_text(GOOD)
    (folder / "bad.py").write_text(GOOD + "\n".join(BAD) + "\n")
    (folder / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "good.py", "bad.py"]
    cache = ROOT / ".mypy_cache" / "test_typing"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    assert "checked 2 source files" in done.stdout, done.stdout
    found: dict[str, dict[int, str]] = {"good.py": {}, "bad.py": {}}
    for line in done.stdout.splitlines():
        path, _, rest = line.partition(":")
        if path in found and "error:" in rest:
            found[path][int(rest.partition(":")[0])] = rest
    return found


def test_declarations_and_uses_type_check(errors: dict[str, dict[int, str]]):
    assert errors["good.py"] == {}


def test_mistakes_are_type_errors(errors: dict[str, dict[int, str]]):
    found = dict(errors["bad.py"])
    for line, (code, kind) in enumerate(BAD.items(), start=GOOD.count("\n") + 1):
        assert f"[{kind}]" in found.pop(line, "nothing"), code
    assert found == {}
