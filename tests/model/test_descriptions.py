"""What a class says for people: description, owners, tags, what is sensitive."""

import pickle
from typing import Any

import pytest

from storage_engine.errors import TypeDeclarationError
from storage_engine.model import Entity, Event, Field, Relation, TypeSpec, spec_of


class Person(Entity, abstract=True, owners=["team:people"], tags={"domain": "crm", "pii": "yes"}):
    """A base, which describes itself."""

    id: Field[str] = Field(primary_key=True, description="number in the CRM", sensitive=True)


class Customer(Person, owners=["ann@shop.example"], tags={"pii": "no"}):
    """Who buys from us.

    Comes from the CRM.
    """

    name: Field[str] = Field(description="as on the bill")
    mail: Field[str | None] = Field(default=None, sensitive=True)


class Guest(Person):
    name: Field[str]


class Secret(Entity, sensitive=True):
    id: Field[str] = Field(primary_key=True)


class Knows(Relation[Customer, Secret]):
    since: Field[str] = Field(instance_key=True, description="the first day", sensitive=True)
    much: Field[int] = Field(description="from 1 to 5")


class Plain(Entity, name="Customer"):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    mail: Field[str | None] = Field(default=None)


def test_a_class_describes_its_type_and_fields() -> None:
    spec = spec_of(Customer)
    assert spec.description == "Who buys from us.\n\nComes from the CRM."
    assert spec.owners == ("ann@shop.example",)
    assert spec.tags == {"domain": "crm", "pii": "no"}
    assert not spec.sensitive
    assert spec.sensitive_columns == {"id", "mail"}
    assert spec.field("name").description == "as on the bill"
    assert spec.field("id").description == "number in the CRM"
    assert spec.field("mail").sensitive


def test_owners_and_tags_come_from_bases_and_docstrings_do_not() -> None:
    spec = spec_of(Guest)
    assert spec.description is None
    assert spec.owners == ("team:people",)
    assert spec.tags == {"domain": "crm", "pii": "yes"}


def test_what_derives_from_something_sensitive_is_sensitive() -> None:
    class Base(Entity, abstract=True, sensitive=True):
        id: Field[str] = Field(primary_key=True)

    class Patient(Base):
        name: Field[str]

    assert spec_of(Patient).sensitive


def test_a_relation_hides_keys_that_its_ends_hide() -> None:
    spec = spec_of(Knows)
    assert spec.sensitive_columns == {"left_key", "right_key", "since"}
    assert spec.instance_key_description == "the first day"
    assert spec.field("much").description == "from 1 to 5"


def test_events_are_described_too() -> None:
    class Placed(Event, owners=["team:sales"], sensitive=True):
        """An order came."""

        order: Field[str] = Field(description="its number")

    declaration = Placed.__declaration__
    assert (declaration.description, declaration.owners) == ("An order came.", ("team:sales",))
    assert declaration.sensitive


def test_nothing_of_it_is_schema() -> None:
    described, plain = spec_of(Customer), spec_of(Plain)
    assert described.schema_dict() == plain.schema_dict()
    assert described.schema_sha256 == plain.schema_sha256
    assert described == plain
    assert hash(described) == hash(plain)
    stored = TypeSpec.from_schema_dict(described.schema_dict())
    assert (stored.description, stored.owners, stored.sensitive_columns) == (None, (), frozenset())
    assert described.aligned(stored.schema_dict()).owners == ("ann@shop.example",)


def test_it_travels_to_other_processes() -> None:
    sent = pickle.loads(pickle.dumps(spec_of(Knows).without_class()))
    assert sent.sensitive_columns == {"left_key", "right_key", "since"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"owners": ["sales"]}, "the owner 'sales' is neither an email.*'team:sales'"),
        ({"owners": "team:sales"}, "owners takes a list"),
        ({"owners": [""]}, "the owner '' is neither"),
        ({"owners": ["team:"]}, "the owner 'team:' is neither"),
        ({"tags": ["a"]}, "tags takes names and texts"),
        ({"tags": {"two words": "a"}}, "the tag 'two words' has no name"),
        ({"tags": {"a": 1}}, "the tag 'a' cannot be 1"),
        ({"tags": {"a": "two words"}}, "the tag 'a' cannot be 'two words'"),
        ({"sensitive": "yes"}, "sensitive is True or False"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeDeclarationError, match=message):
        type("Wrong", (Entity,), {"__annotations__": {}}, **options)


@pytest.mark.parametrize("option", [{"description": 1}, {"sensitive": "yes"}])
def test_wrong_options_of_fields_are_refused(option: dict[str, Any]) -> None:
    field: Any = Field
    with pytest.raises(TypeDeclarationError, match=f"Wrong.id: {next(iter(option))}"):

        class Wrong(Entity):
            id: Field[str] = field(primary_key=True, **option)
