"""Every mistake in a class body is refused where it is made, naming class and field."""

from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from enum import Enum, IntFlag
from typing import Annotated, Any, ClassVar, Literal, TypedDict, TypeVar
from uuid import UUID

import pytest

from storage_engine.errors import TypeDeclarationError
from storage_engine.model import Entity, Event, Field, Relation, spec_of
from storage_engine.model.decimals import Precision


class Person(Entity):
    id: Field[str] = Field(primary_key=True)


class Base(Entity, abstract=True):
    note: Field[str] = Field(default="")


def entity(annotation: Any, value: Any = None, *, name: str = "x") -> type:
    """class T(Entity) with a key and one more field."""
    body = {
        "__annotations__": {"id": Field[str], name: annotation},
        "__module__": __name__,
        "id": Field(primary_key=True),
    }
    if value is not None:
        body[name] = value
    return type("T", (Entity,), body)


def no_primary_key():
    class T(Entity):
        name: Field[str]


def two_primary_keys():
    class T(Entity):
        a: Field[str] = Field(primary_key=True)
        b: Field[str] = Field(primary_key=True)


def primary_key_int():
    class T(Entity):
        id: Field[int] = Field(primary_key=True)


def primary_key_optional():
    class T(Entity):
        id: Field[str | None] = Field(primary_key=True)


def primary_key_default():
    class T(Entity):
        id: Field[str] = Field(primary_key=True, default="a")


def primary_key_factory():
    class T(Entity):
        id: Field[str] = Field(primary_key=True, default_factory=lambda: "a")


def primary_key_on_relation():
    class T(Relation[Person, Person]):
        id: Field[str] = Field(primary_key=True)


def instance_key_on_entity():
    class T(Entity):
        id: Field[str] = Field(primary_key=True)
        k: Field[str] = Field(instance_key=True)


def two_instance_keys():
    class T(Relation[Person, Person]):
        a: Field[str] = Field(instance_key=True)
        b: Field[str] = Field(instance_key=True)


def instance_key_int():
    class T(Relation[Person, Person]):
        k: Field[int] = Field(instance_key=True)


def instance_key_default():
    class T(Relation[Person, Person]):
        k: Field[str] = Field(instance_key=True, default="a")


def instance_key_optional():
    class T(Relation[Person, Person]):
        k: Field[str | None] = Field(instance_key=True)


def relation_without_endpoints():
    class T(Relation):
        pass


def relation_of_int():
    class T(Relation[Person, int]):
        pass


def relation_of_later_class():
    class T(Relation["Later", Person]):
        pass


def relation_of_abstract():
    class T(Relation[Person, Base]):
        pass


def relation_of_entity_itself():
    class T(Relation[Person, Entity]):
        pass


def relation_of_relation():
    class Knows(Relation[Person, Person]):
        pass

    class T(Relation[Person, Knows]):
        pass


def no_annotation():
    class T(Entity):
        id: Field[str] = Field(primary_key=True)
        x = Field()


def overrides_without_annotation():
    class T(Base):
        id: Field[str] = Field(primary_key=True)
        note = "hello"


def concrete_base():
    class T(Person):
        x: Field[str]


def stored_name():
    class T(Entity, name="1st"):
        id: Field[str] = Field(primary_key=True)


def stored_name_too_long():
    class T(Entity, name="x" * 101):
        id: Field[str] = Field(primary_key=True)


def stored_name_with_newline():
    class T(Entity, name="x\n"):
        id: Field[str] = Field(primary_key=True)


def case_only():
    class T(Entity):
        id: Field[str] = Field(primary_key=True)
        name: Field[str]
        Name: Field[str]


def case_only_inherited():
    class T(Base):
        id: Field[str] = Field(primary_key=True)
        Note: Field[str]


def event_primary_key():
    class T(Event):
        k: Field[str] = Field(primary_key=True)


def event_hides_envelope():
    class T(Event):
        created_at: Field[str]


def event_hides_method():
    class T(Event):
        envelope: Field[str]


def event_priority():
    class T(Event, priority="high"):  # type: ignore[arg-type]
        pass


def event_name():
    class T(Event, name="order placed"):
        pass


Maker = Callable[[], Any]
MISTAKES: list[tuple[Maker, str, str]] = [
    (no_primary_key, "", "has no primary key"),
    (two_primary_keys, "b", "second primary key beside 'a'"),
    (primary_key_int, "id", "primary key must be declared Field[str]"),
    (primary_key_optional, "id", "primary key must be declared Field[str]"),
    (primary_key_default, "id", "primary key cannot have a default"),
    (primary_key_factory, "id", "primary key cannot have a default"),
    (primary_key_on_relation, "id", "a relation has no primary key"),
    (instance_key_on_entity, "k", "an entity has no instance key"),
    (two_instance_keys, "b", "second instance key beside 'a'"),
    (instance_key_int, "k", "instance key must be declared Field[str]"),
    (instance_key_default, "k", "instance key cannot have a default"),
    (instance_key_optional, "k", "instance key must be declared Field[str]"),
    (relation_without_endpoints, "", "does not say what it relates"),
    (relation_of_int, "", "right endpoint int is not an Entity class"),
    (relation_of_later_class, "", "left endpoint ForwardRef('Later') is not an Entity class"),
    (relation_of_abstract, "", "right endpoint Base is abstract"),
    (relation_of_entity_itself, "", "right endpoint Entity is abstract"),
    (relation_of_relation, "", "right endpoint Knows is not an Entity class"),
    (no_annotation, "x", "has no annotation"),
    (overrides_without_annotation, "note", "has no annotation"),
    (concrete_base, "", "Person is a stored type of its own"),
    (stored_name, "", "'1st' cannot be a stored name"),
    (stored_name_too_long, "", "cannot be a stored name"),
    (stored_name_with_newline, "", "cannot be a stored name"),
    (case_only, "Name", "differs from 'name' in case only"),
    (case_only_inherited, "Note", "differs from 'note' in case only"),
    (event_primary_key, "k", "an event has no primary key"),
    (event_hides_envelope, "created_at", "would hide Event.created_at"),
    (event_hides_method, "envelope", "would hide Event.envelope"),
    (event_priority, "", "priority must be an int"),
    (event_name, "", "cannot be a stored name"),
]


@pytest.mark.parametrize(
    ("make", "field", "said"), MISTAKES, ids=lambda v: getattr(v, "__name__", "")
)
def test_mistake_in_class(make: Maker, field: str, said: str):
    with pytest.raises(TypeDeclarationError) as caught:
        make()
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"T.{field}: " if field else "T: ")
    assert caught.value.field == field


T = TypeVar("T")


class Inner(TypedDict):
    at: datetime


class Other(TypedDict):
    on: date


class WithTuple(TypedDict):
    pair: tuple[int, int]


class Mixed(Enum):
    TEXT = "a"
    NUMBER = 1


class Bits(IntFlag):
    A = 1


UNSUPPORTED = [
    (tuple[int, ...], "use list[...]"),
    (set[str], "use list[...]"),
    (list, "does not say what it holds"),
    (dict, "does not say what it holds"),
    (complex, "complex is not a type that can be stored"),
    (Literal["a", 1], "must be all str or all int"),
    (Literal[True], "must be all str or all int"),
    (Decimal, "does not say how many digits it has; write for example Field(precision=12"),
    (Annotated[Decimal, Precision(9, 2)] | int, "Decimal(9, 2) and int cannot be told apart"),
    (UUID | str, "UUID and str cannot be told apart"),
    (Literal["a"] | str, "cannot be told apart"),
    (Mixed, "the values of Mixed must be all str or all int"),
    (Bits, "Bits is a Flag"),
    (Person, "Person is not a type that can be stored"),
    (T, "is not a type that can be stored"),
    (dict[int, str], "dict keys must be str, not int"),
    (list[dict[bytes, str]], "dict keys must be str, not bytes"),
    (WithTuple, "use list[...]"),
    (str | datetime, "str and datetime cannot be told apart"),
    (str | bytes | None, "str and bytes cannot be told apart"),
    (datetime | date, "cannot be told apart"),
    (list[datetime] | list[str], "cannot be told apart"),
    (Inner | Other, "cannot be told apart"),
    (Inner | dict[str, int], "cannot be told apart"),
    (list[int | list[str | date]], "str and date cannot be told apart"),
    (Any | datetime, "cannot be told apart"),
]


@pytest.mark.parametrize(("annotation", "said"), UNSUPPORTED, ids=str)
def test_unsupported_annotation(annotation: Any, said: str):
    with pytest.raises(TypeDeclarationError, match=r"^T\.x: ") as caught:
        entity(Field[annotation])
    assert said in str(caught.value)


BAD_FIELDS = [
    (Field[int], Field(precision=3, scale=1), "precision and scale are for a Decimal"),
    (Field[Decimal], Field(precision=3), "has one of precision and scale"),
    (Field[Decimal], Field(precision=39, scale=0), "the precision of a Decimal is 1 to 38 digits"),
    (Field[Decimal], Field(precision=3, scale=4), "the scale of a Decimal is 0 to its precision"),
    (Field[Decimal], Field(precision=3, scale=1, default=0.5), "is a float, which is not exact"),
    (Field[Literal["a"]], "b", "the default does not fit its type: is none of 'a'"),
    (int, None, "is annotated as int; write Field[int]"),
    (Field, None, "Field does not say what it holds"),
    (Field[int], Field(bogus=1), "Field has no option bogus"),  # type: ignore[arg-type]
    (Field[int], Field(default=1, default_factory=int), "both default and default_factory"),
    (Field[int], Field(default="x"), "the default does not fit its type"),
    (Field[int], 2**63, "the default does not fit its type: is beyond 64 bits"),
    (Field[str], Field(default_factory=list), "the default does not fit its type"),
    (Field[list[int]], [], "would be shared by all objects; use default_factory=list"),
    (Field[list[int]], (1, 2), "would be shared by all objects"),
    (Field[Any], {"a": 1}, "would be shared by all objects"),
    (Field[int], Field(default_factory=3), "default_factory must be callable"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("annotation", "value", "said"), BAD_FIELDS)
def test_bad_field(annotation: Any, value: Any, said: str):
    with pytest.raises(TypeDeclarationError, match=r"^T\.x: ") as caught:
        entity(annotation, value)
    assert said in str(caught.value)


RESERVED = [
    *["commit_id", "entity_key", "left_key", "right_key", "instance_key", "schema_version_id"],
    *["fields_json", "entity_type", "relation_type", "Commit_ID"],
]


@pytest.mark.parametrize("name", RESERVED)
def test_system_columns_are_reserved(name: str):
    with pytest.raises(TypeDeclarationError, match=rf"^T\.{name}: .*reserved for a system column"):
        entity(Field[str], name=name)


@pytest.mark.parametrize("name", ["meta", "replace", "model_dump", "model_validate"])
def test_methods_are_not_hidden(name: str):
    with pytest.raises(TypeDeclarationError, match=rf"^T\.{name}: would hide Entity\.{name}"):
        entity(Field[str], name=name)


@pytest.mark.parametrize("name", ["left", "right"])
def test_endpoint_names_are_free_on_entities_only(name: str):
    assert name in {f.name for f in spec_of(entity(Field[str], name=name)).fields}
    with pytest.raises(TypeDeclarationError, match=f"would hide Relation.{name}"):
        type("T", (Relation[Person, Person].__origin__,), {"__annotations__": {name: Field[str]}})


@pytest.mark.parametrize("name", ["_x", "__x", "naïve", "x" * 101])
def test_field_names_that_cannot_be_stored(name: str):
    with pytest.raises(TypeDeclarationError, match=rf"^T\.{name}: stored names"):
        entity(Field[str], name=name)


def test_abstract_base_is_checked_too():
    with pytest.raises(TypeDeclarationError, match=r"^B\.x: set\[int\]"):

        class B(Entity, abstract=True):
            x: Field[set[int]]


def test_abstract_classes_have_no_objects():
    for cls in (Base, Entity, Relation, Event):
        with pytest.raises(TypeDeclarationError, match="is abstract"):
            cls()
    with pytest.raises(TypeDeclarationError, match="Base is abstract"):
        spec_of(Base)


def test_spec_of_something_else():
    with pytest.raises(TypeDeclarationError, match="not an Entity or Relation class"):
        spec_of(int)
    with pytest.raises(TypeDeclarationError, match="not an Entity or Relation class"):
        spec_of("Person")  # type: ignore[arg-type]


def test_what_is_not_data_is_left_alone():
    class T(Entity):
        limit: ClassVar[int] = 3
        plain = 4
        id: Field[str] = Field(primary_key=True)

        def shout(self) -> str:
            return self.id.upper()

    assert [f.name for f in spec_of(T).fields] == ["id"]
    assert (T.limit, T.plain, T(id="a").shout()) == (3, 4, "A")


def test_members_that_look_alike_without_encoded_leaves_are_fine():
    spec = spec_of(entity(Field[list[int] | list[str] | int | float | bool]))
    assert spec.field("x").storage == "json"
