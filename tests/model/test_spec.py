"""Type specs: classification, canonical schema, stable ids."""

import json
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any, Optional, TypedDict, Union

import pytest

from storage_engine.model import (
    MISSING,
    SYSTEM_COLUMNS,
    Entity,
    Field,
    Relation,
    TypeSpec,
    build_type_spec,
    canonical_json,
    classify,
    spec_of,
)


class Node(TypedDict):
    next: "Node | None"


class Address(TypedDict, total=False):
    city: str


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    age: Field[int] = Field(default=3, index=True)
    at: Field[datetime] = Field(default=datetime(2024, 1, 1))  # noqa: DTZ001
    tags: Field[list[str]] = Field(default_factory=list)
    email: Field[str | None] = Field(default=None)
    token: Field[str] = Field(default_factory=lambda: "x")


class Likes(Relation[Customer, Customer]):
    when: Field[str] = Field(instance_key=True)
    much: Field[int]


CLASSIFIED = [
    *[(t, (t.__name__, False)) for t in (str, int, float, bool, datetime, date, bytes)],
    *[(t | None, (t.__name__, True)) for t in (str, int, float, bool, datetime, date, bytes)],
    (Optional[int], ("int", True)),  # noqa: UP045
    (Union[int, None, int], ("int", True)),  # noqa: UP007
    (int | str, ("json", False)),
    (int | str | None, ("json", True)),
    (int | float, ("json", False)),
    (list[str], ("json", False)),
    (list[str] | None, ("json", True)),
    (dict[str, int], ("json", False)),
    (Address, ("json", False)),
    (Address | None, ("json", True)),
    (Node, ("json", False)),
    (Any, ("json", True)),
    (Any | None, ("json", True)),
    (None, ("json", True)),
]


@pytest.mark.parametrize(("annotation", "expected"), CLASSIFIED, ids=str)
def test_classification(annotation: Any, expected: tuple[str, bool]):
    assert classify(build_type_spec(annotation)) == expected


def test_type_specs():
    assert build_type_spec(dict[str, list[int | None]]) == {
        "kind": "dict",
        "value": {
            "kind": "list",
            "item": {
                "kind": "union",
                "members": [
                    {"kind": "primitive", "name": "int"},
                    {"kind": "primitive", "name": "NoneType"},
                ],
            },
        },
    }
    assert build_type_spec(Node)["fields"]["next"]["type"]["members"][0] == {
        "kind": "ref",
        "name": "Node",
    }
    assert build_type_spec(Address)["fields"]["city"]["required"] is False


def test_entity_and_relation_facts():
    customer, likes = spec_of(Customer), spec_of(Likes)
    assert customer.identity == ("entity_key",)
    assert likes.identity == ("left_key", "right_key", "instance_key")
    assert (customer.type_column, customer.folder) == ("entity_type", "entities")
    assert (likes.type_column, likes.folder) == ("relation_type", "relations")
    assert (customer.ref, likes.ref) == (("entity", "Customer"), ("relation", "Likes"))
    assert [f.name for f in likes.fields] == ["much"], "the instance key is identity only"
    assert customer.primary_key == "id"
    assert customer.fields[0].name == "id"
    assert {*customer.identity, *likes.identity} < SYSTEM_COLUMNS


def test_defaults_are_kept_in_json_form():
    spec = spec_of(Customer)
    assert spec.field("name").required
    assert spec.field("name").default is MISSING
    assert spec.field("age").default == 3
    assert spec.field("at").default == "2024-01-01T00:00:00.000000+00:00"
    assert spec.field("tags").default == []
    assert spec.field("email").default is None
    assert not spec.field("token").required
    assert spec.field("token").default is MISSING, "a factory's result is not known beforehand"


@pytest.mark.parametrize("cls", [Customer, Likes])
def test_schema_dict_round_trip(cls: type):
    spec = spec_of(cls)
    stored = json.loads(canonical_json(spec.schema_dict()))
    again = TypeSpec.from_schema_dict(stored)
    assert again == spec
    assert again.python_class is None
    assert again.schema_dict() == spec.schema_dict()
    assert again.schema_sha256 == spec.schema_sha256
    assert hash(again) == hash(spec)


def test_hash_changes_with_anything_that_matters_and_nothing_else():
    class First(Entity, name="T"):
        id: Field[str] = Field(primary_key=True)
        a: Field[int]
        b: Field[int]

    class Reordered(Entity, name="T"):
        b: Field[int]
        a: Field[int]
        id: Field[str] = Field(primary_key=True)

    class Optional_(Entity, name="T"):
        id: Field[str] = Field(primary_key=True)
        a: Field[int]
        b: Field[int] = Field(default=0)

    first, reordered = spec_of(First), spec_of(Reordered)
    assert first.schema_sha256 == reordered.schema_sha256
    assert first.schema_sha256 != spec_of(Optional_).schema_sha256


def test_hash_is_part_of_the_format():
    class T(Entity):
        id: Field[str] = Field(primary_key=True)

    assert spec_of(T).schema_sha256 == GOLDEN


GOLDEN = "3d4721034765457d29a60b49c1fdde1a3858f693eb60a2c99c94d8bd2d50dd7a"


def variant(name: str = "T", **fields: Any) -> Mapping[str, Any]:
    annotations = {"id": Field[str]}
    body: dict[str, Any] = {"id": Field(primary_key=True)}
    for field, declared in fields.items():
        annotations[field], options = declared if isinstance(declared, tuple) else (declared, None)
        if options is not None:
            body[field] = options
    made = type(name, (Entity,), {**body, "__annotations__": annotations})
    return spec_of(made).schema_dict()


def test_ids_follow_declaration_and_stay_with_their_fields():
    stored = variant(a=Field[int], b=Field[int], c=Field[int])
    assert [(f["name"], f["id"]) for f in stored["fields"]] == [
        ("id", 1001),
        ("a", 1002),
        ("b", 1003),
        ("c", 1004),
    ]
    later = TypeSpec.from_schema_dict(variant(c=Field[int], new=Field[int], a=Field[int]))
    aligned = later.aligned(stored)
    assert [(f.name, f.field_id) for f in aligned.fields] == [
        ("id", 1001),
        ("a", 1002),
        ("c", 1004),
        ("new", 1005),
    ], "b's id is not given to another field"
    assert aligned.schema_sha256 == later.schema_sha256
