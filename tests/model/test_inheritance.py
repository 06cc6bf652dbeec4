"""Abstract bases, generic relation bases, and forward references."""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Generic, NotRequired, TypedDict, TypeVar

import pytest

from storage_engine.errors import TypeDeclarationError
from storage_engine.model import Entity, Event, Field, Relation, spec_of
from storage_engine.model.declarations import L, R

E = TypeVar("E", bound=Entity)


class Person(Entity):
    id: Field[str] = Field(primary_key=True)


class Company(Entity, name="Firm"):
    id: Field[str] = Field(primary_key=True)


def names(cls: type) -> list[str]:
    return [f.name for f in spec_of(cls).fields]


def test_fields_of_abstract_bases_come_first():
    class Keyed(Entity, abstract=True):
        id: Field[str] = Field(primary_key=True)
        note: Field[str] = Field(default="")

    class Dated(Entity, abstract=True):
        at: Field[datetime]

    class Order(Keyed, Dated):
        total: Field[int]
        note: Field[str | None] = Field(default=None)

    assert names(Order) == ["at", "id", "note", "total"]
    assert [f.field_id for f in spec_of(Order).fields] == [1001, 1002, 1003, 1004]
    assert spec_of(Order).field("note").nullable, "the redeclared field counts"
    assert repr(Order.note) == "Order.note"
    assert Order(id="o", at=datetime(2024, 1, 1), total=3).note is None  # noqa: DTZ001


def test_primary_key_inherited_twice_is_still_one():
    class Keyed(Entity, abstract=True):
        id: Field[str] = Field(primary_key=True)

    class T(Keyed):
        id: Field[str] = Field(primary_key=True)

    assert spec_of(T).primary_key == "id"


def test_generic_relation_bases():
    class Timed(Relation[L, R], abstract=True):
        since: Field[int]

    class AtCompany(Timed[E, Company], Generic[E], abstract=True):
        pass

    class Employment(AtCompany[Person]):
        role: Field[str]

    class Ownership(Timed[Company, Person]):
        pass

    spec = spec_of(Employment)
    assert (spec.left, spec.right) == ("Person", "Firm"), "stored names, not class names"
    assert names(Employment) == ["since", "role"]
    assert (spec_of(Ownership).left, spec_of(Ownership).right) == ("Firm", "Person")


def test_endpoints_of_a_fixed_base():
    class Work(Relation[Person, Company], abstract=True):
        since: Field[int]

    class Employment(Work):
        pass

    assert (spec_of(Employment).left, spec_of(Employment).right) == ("Person", "Firm")


def test_event_bases():
    class Traced(Event, abstract=True, priority=7):
        trace: Field[str]

    class Happened(Traced):
        what: Field[str]

    event = Happened(trace="t", what="w")
    assert (event.event_type, event.priority) == ("Happened", 7)
    assert event.model_dump() == {"trace": "t", "what": "w"}


class Early(Entity):
    id: Field[str] = Field(primary_key=True)
    tree: Field[Tree | None] = Field(default=None)
    unknown: Field[int] = Field(default=0)


class Tree(TypedDict):
    label: str
    children: NotRequired[list[Tree]]


def test_forward_reference_is_resolved_at_first_use():
    tree: Tree = {"label": "a", "children": [{"label": "b", "children": [{"label": "c"}]}]}
    assert Early(id="x", tree=tree).tree == tree
    described = spec_of(Early).field("tree").type_spec["members"][0]
    assert described["fields"]["children"] == {
        "type": {"kind": "list", "item": {"kind": "ref", "name": "Tree"}},
        "required": False,
    }


def test_local_types_are_found():
    class Leaf(TypedDict):
        at: datetime
        next: NotRequired[Leaf]

    class T(Entity):
        id: Field[str] = Field(primary_key=True)
        leaf: Field[Leaf]

    assert T(id="x", leaf={"at": "2024-01-01T00:00:00Z"}).leaf["at"].year == 2024


def test_reference_that_never_resolves():
    class T(Entity):
        id: Field[str] = Field(primary_key=True)
        x: Field[Nowhere]  # type: ignore[name-defined]  # noqa: F821

    for use in (lambda: spec_of(T), lambda: T(id="a"), lambda: T.x):
        with pytest.raises(TypeDeclarationError, match="'Nowhere' is still unknown"):
            use()


def test_mistakes_behind_a_forward_reference_are_found_at_first_use():
    class T(Entity):
        id: Field[str] = Field(primary_key=True)
        x: Field[LateTuple]  # type: ignore[name-defined]  # noqa: F821

    globals()["LateTuple"] = tuple[int, int]
    with pytest.raises(TypeDeclarationError, match=r"T\.x: .*use list"):
        spec_of(T)


def test_two_typed_dicts_of_one_name_inside_each_other():
    inner = TypedDict("Same", {"x": int})  # type: ignore[misc]  # noqa: UP013
    outer = TypedDict("Same", {"x": inner})  # type: ignore[misc, valid-type]  # noqa: UP013

    with pytest.raises(TypeDeclarationError, match="two different TypedDicts named Same"):

        class T(Entity):
            id: Field[str] = Field(primary_key=True)
            x: Field[outer]  # type: ignore[valid-type]


def test_names_of_the_function_around_are_known():
    class Colour(Enum):
        RED = "red"

    class Meta(type(Entity)):
        def __new__(cls, *given, **options):
            return super().__new__(cls, *given, **options)

    class Local(Entity):
        id: Field[str] = Field(primary_key=True)
        colour: Field[Colour]

    class Made(Entity, metaclass=Meta):
        id: Field[str] = Field(primary_key=True)
        colour: Field[Colour]

    for declared in (Local, Made):
        assert declared(id="a", colour="red").colour is Colour.RED
