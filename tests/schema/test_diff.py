"""What changed between two schemas of a type, and whether rows follow by themselves."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from storage_engine.model import Entity, Field, Relation, TypeSpec, spec_of
from storage_engine.model.spec import build_type_spec
from storage_engine.schema.diff import diff_types, evolved, widens


class A1(TypedDict):
    city: str


class A2(TypedDict):
    city: int


class A3(TypedDict):
    city: str
    zip: NotRequired[str]


A2.__name__ = A3.__name__ = "A1"  # the same TypedDict, edited


class Tree(TypedDict):
    size: int
    twigs: NotRequired[list[Tree]]


class Plant(TypedDict):
    """Another name, and a key that may be missing."""

    size: float
    twigs: NotRequired[list[Plant]]
    colour: NotRequired[str]


class Bush(TypedDict):
    size: int
    twigs: NotRequired[list[Tree]]


def variant(name: str = "T", /, **fields: Any) -> TypeSpec:
    annotations: dict[str, Any] = {"id": Field[str]}
    body: dict[str, Any] = {"id": Field(primary_key=True)}
    for field, declared in fields.items():
        annotations[field], options = declared if isinstance(declared, tuple) else (declared, None)
        if options is not None:
            body[field] = options
    return spec_of(type(name, (Entity,), {**body, "__annotations__": annotations}))


DIFFERENCES = [
    (variant(x=Field[int]), variant(x=Field[str]), ["field 'x' was int, is str"], False),
    (variant(), variant(x=Field[int | None]), ["field 'x' added (int | None)"], True),
    (variant(), variant(x=Field[int]), ["field 'x' added (int)"], False),
    (variant(), variant(x=(Field[int], Field(default=3))), ["field 'x' added (int)"], True),
    (
        variant(),
        variant(x=(Field[list[str]], Field(default_factory=list))),
        ["field 'x' added (list[str])"],
        True,
    ),
    (variant(x=Field[int]), variant(), ["field 'x' removed"], False),
    (
        variant(x=Field[int]),
        variant(x=(Field[int], Field(default=1))),
        ["field 'x' was required, is optional", "field 'x' had no default, has default 1"],
        True,
    ),
    (
        variant(x=Field[int]),
        variant(x=(Field[int], Field(index=True))),
        ["field 'x' is now indexed"],
        True,
    ),
    (
        variant(x=(Field[int], Field(index=True))),
        variant(x=Field[int]),
        ["field 'x' is no longer indexed"],
        True,
    ),
    (
        variant(x=Field[A1]),
        variant(x=Field[A2]),
        ["field 'x' of type A1 changed inside", "x.city was str, is int"],
        False,
    ),
    (
        variant(x=Field[list[A1]]),
        variant(x=Field[list[A3]]),
        ["field 'x' of type list[A1] changed inside", "x[].zip added (str)"],
        True,
    ),
    (
        variant(x=Field[A3]),
        variant(x=Field[A1]),
        ["field 'x' of type A1 changed inside", "x.zip removed"],
        False,
    ),
    (variant(x=Field[int]), variant(x=Field[float]), ["field 'x' was int, is float"], True),
    (variant(x=Field[float]), variant(x=Field[int]), ["field 'x' was float, is int"], False),
    (
        variant(x=Field[int]),
        variant(x=Field[int | None]),
        ["field 'x' was int, is int | None"],
        True,
    ),
    (
        variant(x=Field[int | None]),
        variant(x=Field[int]),
        ["field 'x' was int | None, is int"],
        False,
    ),
    (
        variant(x=Field[int]),
        variant(x=Field[int | list[bytes]]),  # Python keeps the first order that it has seen
        ["field 'x' was int, is int | list[bytes]"],
        True,
    ),
    (
        variant(x=Field[Literal["a"]]),
        variant(x=Field[Literal["a", "b"]]),
        ["field 'x' was Literal['a'], is Literal['a', 'b']"],
        True,
    ),
    (
        variant(x=Field[Literal["a", "b"]]),
        variant(x=Field[Literal["a"]]),
        ["field 'x' was Literal['a', 'b'], is Literal['a']"],
        False,
    ),
    (
        variant(x=Field[Literal["a"]]),
        variant(x=Field[str]),
        ["field 'x' was Literal['a'], is str"],
        True,
    ),
    (
        variant(x=(Field[Decimal], Field(precision=10, scale=2))),
        variant(x=(Field[Decimal], Field(precision=12, scale=4))),
        ["field 'x' was Decimal(10, 2), is Decimal(12, 4)"],
        True,
    ),
    (
        variant(x=(Field[Decimal], Field(precision=10, scale=2))),
        variant(x=(Field[Decimal], Field(precision=10, scale=4))),
        ["field 'x' was Decimal(10, 2), is Decimal(10, 4)"],
        False,
    ),
    (
        variant(x=Field[int]),
        variant(x=(Field[Decimal], Field(precision=21, scale=2))),
        ["field 'x' was int, is Decimal(21, 2)"],
        True,
    ),
    (variant(x=Field[datetime]), variant(x=Field[Any]), ["field 'x' was datetime, is Any"], False),
    (
        variant(x=Field[dict[str, int]]),
        variant(x=Field[dict[str, float]]),
        ["field 'x' was dict[str, int], is dict[str, float]", "x.* was int, is float"],
        True,
    ),
    (
        variant(x=Field[int]),
        variant(y=(Field[int], Field(renamed_from="x"))),
        ["field 'x' renamed to 'y'"],
        True,
    ),
    (
        variant(x=Field[int]),
        variant(y=Field[int]),
        ["field 'x' removed", "field 'y' added (int)"],
        False,
    ),
    # The old name is still declared, which a plan refuses.
    (
        variant(x=Field[int]),
        variant(x=Field[int], y=(Field[int | None], Field(renamed_from="x"))),
        ["field 'y' added (int | None)"],
        True,
    ),
    (
        variant(x=Field[Tree]),
        variant(x=Field[Plant | None]),
        ["field 'x' was Tree, is Plant | None"],
        True,
    ),
    (variant("T"), variant("U"), ["name was T, is U"], True),
    (variant(x=Field[int]), variant(x=Field[int]), [], True),
    (variant(x=Field[int | str]), variant(x=Field[str | int]), [], True),
    (variant(a=Field[int], b=Field[int]), variant(b=Field[int], a=Field[int]), [], True),
]


@pytest.mark.parametrize(("stored", "declared", "sentences", "additive"), DIFFERENCES)
def test_differences(
    stored: TypeSpec, declared: TypeSpec, sentences: list[str], additive: bool
) -> None:
    diff = diff_types(stored, declared)
    assert diff.sentences() == sentences
    assert diff.additive is additive
    assert diff.refusal is None
    without_class = diff_types(TypeSpec.from_schema_dict(stored.schema_dict()), declared)
    assert without_class == diff


class Person(Entity):
    id: Field[str] = Field(primary_key=True)


class Company(Entity):
    id: Field[str] = Field(primary_key=True)


class Works(Relation[Person, Company]):
    stint: Field[str] = Field(instance_key=True)


class Unkeyed(Relation[Person, Company], name="Works"):
    pass


class Backwards(Relation[Company, Person], name="Works"):
    stint: Field[str] = Field(instance_key=True)


class OtherKey(Relation[Person, Company], name="Works"):
    period: Field[str] = Field(instance_key=True)


def test_identity_cannot_change() -> None:
    diff = diff_types(spec_of(Works), spec_of(Unkeyed))
    assert diff.sentences() == ["instance key was stint, is None"]
    assert diff.refusal is not None
    assert "cannot change" in diff.refusal
    assert not diff.additive

    turned = diff_types(spec_of(Works), spec_of(Backwards))
    assert turned.sentences() == [
        "left endpoint was Person, is Company",
        "right endpoint was Company, is Person",
    ]
    assert turned.refusal is not None


def test_the_ends_of_a_relation_follow_a_rename() -> None:
    class Firm(Entity):
        id: Field[str] = Field(primary_key=True)

    class WorksAt(Relation[Person, Firm], name="Works"):
        stint: Field[str] = Field(instance_key=True)

    assert diff_types(spec_of(Works), spec_of(WorksAt)).refusal is not None
    diff = diff_types(spec_of(Works), spec_of(WorksAt), renames={"Company": "Firm"})
    assert diff.additive
    assert diff.sentences() == ["right endpoint was Company, is Firm"]


def test_a_key_may_get_another_name() -> None:
    assert diff_types(spec_of(Works), spec_of(OtherKey)).additive

    class Renamed(Entity, name="Person"):
        code: Field[str] = Field(primary_key=True, renamed_from="id")

    class Other(Entity, name="Person"):
        code: Field[str] = Field(primary_key=True)

    assert diff_types(spec_of(Person), spec_of(Renamed)).additive
    assert diff_types(spec_of(Person), spec_of(Other)).refusal is not None


def test_ids_stay_with_their_fields_and_are_never_used_again() -> None:
    stored = variant(a=Field[int], b=Field[int], c=Field[int])
    declared = variant(new=Field[int], b2=(Field[int], Field(renamed_from="b")), a=Field[int])
    made = evolved(stored, declared, highest_id=1007)
    assert [(f.name, f.field_id) for f in made.fields] == [
        ("id", 1001),
        ("a", 1002),
        ("b2", 1003),
        ("new", 1008),
    ]
    assert made.schema_sha256 == declared.schema_sha256


def test_a_diff_as_data() -> None:
    diff = diff_types(variant(x=Field[int]), variant(x=Field[float]))
    assert diff.as_dict()["changes"] == [
        {"path": "x", "change": "retyped", "before": "int", "after": "float", "additive": True}
    ]


def test_a_type_that_contains_itself_is_widened() -> None:
    tree, plant = (build_type_spec(each) for each in (Tree, Plant))
    assert widens(tree, plant)
    assert not widens(plant, tree)
    assert widens(tree, {"kind": "list", "item": plant}) is False
    assert widens({"kind": "list", "item": tree}, {"kind": "list", "item": plant})
    assert not widens(build_type_spec(Bush), tree)  # a tree inside is not known to be a bush
