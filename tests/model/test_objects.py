"""Construction, validation and behaviour of objects."""

import copy
import enum
import pickle
from abc import ABC, abstractmethod
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any, NotRequired, TypedDict

import pytest

from storage_engine.errors import MetadataUnavailableError, ValidationError
from storage_engine.model import Entity, EntityMeta, Field, Relation, RelationMeta, spec_of


class Address(TypedDict):
    city: str
    zip: NotRequired[str]


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    tier: Field[str] = Field(default="Standard", index=True)
    tags: Field[list[str]] = Field(default_factory=list)
    email: Field[str | None] = None  # type: ignore[assignment]


class Everything(Entity):
    id: Field[str] = Field(primary_key=True)
    i: Field[int] = Field(default=0)
    f: Field[float] = Field(default=0.0)
    b: Field[bool] = Field(default=False)
    at: Field[datetime | None] = Field(default=None)
    on: Field[date | None] = Field(default=None)
    raw: Field[bytes] = Field(default=b"")
    address: Field[Address | None] = Field(default=None)
    scores: Field[dict[str, float]] = Field(default_factory=dict)
    mixed: Field[int | str | None] = Field(default=None)
    free: Field[Any] = Field(default=None)


class Employment(Relation[Customer, Everything]):
    stint: Field[str] = Field(instance_key=True)
    role: Field[str]


class Likes(Relation[Customer, Customer]):
    much: Field[int] = Field(default=1)


def test_defaults_and_repr():
    ann = Customer(id="c1", name="Ann")
    assert repr(ann) == "Customer(id='c1', name='Ann', tier='Standard', tags=[], email=None)"
    assert ann.tags is not Customer(id="c2", name="Bob").tags


def test_every_bad_field_is_named_with_type_and_identity():
    with pytest.raises(ValidationError) as caught:
        Customer(id="c1", nmae="x", tier=4, tags=["a", 5])  # type: ignore[call-arg, arg-type, list-item]
    said = str(caught.value)
    assert said.startswith("Customer 'c1': ")
    assert "name: is required" in said
    assert "tier: Input should be a valid string (got 4)" in said
    assert "tags[1]: Input should be a valid string (got 5)" in said
    assert "unknown field 'nmae', did you mean 'name'?" in said
    assert caught.value.type == "Customer"
    assert caught.value.identity == "c1"
    assert caught.value.field == "name, tier, tags, nmae"


def test_relation_errors_name_the_pair():
    with pytest.raises(ValidationError, match=r"^Employment 'a' -> 'b' -> 's': role: is required"):
        Employment(left_key="a", right_key="b", stint="s")  # type: ignore[call-arg]


@pytest.mark.parametrize("key", ["", None, 5, "\ud800", ["a"]])
def test_bad_keys(key: Any):
    for make in (
        lambda: Customer(id=key, name="x"),
        lambda: Likes(left_key=key, right_key="b"),
        lambda: Likes(left_key="a", right_key=key),
        lambda: Employment(left_key="a", right_key="b", stint=key, role="r"),
    ):
        with pytest.raises(ValidationError):
            make()


class Loop(list):  # type: ignore[type-arg]
    """Contains itself."""

    def __init__(self) -> None:
        super().__init__([self])


REFUSED = [
    ("i", 2**63, "beyond 64 bits"),
    ("i", -(2**63) - 1, "beyond 64 bits"),
    ("i", "x", "valid integer"),
    ("i", 1.5, "valid integer"),
    ("f", float("nan"), "finite"),
    ("f", float("-inf"), "finite"),
    ("scores", {"a": float("inf")}, "finite"),
    ("scores", {1: 2.0}, "valid string"),
    ("scores", {"\ud800": 2.0}, "surrogate"),
    ("id", "\udfff", "surrogate"),
    ("address", {"city": "x", "zap": "y"}, "Extra inputs"),
    ("address", {"zip": "y"}, "address.city: is required"),
    ("address", {"city": "\ud800"}, "surrogate"),
    ("mixed", 2**63, "beyond 64 bits"),
    ("mixed", [], "mixed"),
    ("free", (1, 2), "tuple is not a JSON value"),
    ("free", {"a": [datetime(2024, 1, 1, tzinfo=UTC)]}, "datetime is not a JSON value"),
    ("free", b"x", "bytes is not a JSON value"),
    ("free", {1}, "set is not a JSON value"),
    ("free", {1: 2}, "key of type int"),
    ("free", [2**64], "beyond 64 bits"),
    ("free", [float("nan")], "finite"),
    ("free", {"a": "\ud800"}, "surrogate"),
    ("free", Loop(), "levels deep"),
    ("at", "2024-01-01T00:00:00.1234567Z", "datetime"),
    ("at", datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), "years 1 to 9999"),
    ("b", "maybe", "boolean"),
    ("on", datetime(2024, 1, 1, 5, tzinfo=UTC), "date"),
]


@pytest.mark.parametrize(("field", "value", "said"), REFUSED)
def test_values_that_cannot_be_stored(field: str, value: Any, said: str):
    with pytest.raises(ValidationError, match=field) as caught:
        Everything(**{"id": "x", field: value})
    assert said in str(caught.value)


TAKEN = [
    ("i", "7", 7),
    ("i", 2**63 - 1, 2**63 - 1),
    ("i", -(2**63), -(2**63)),
    ("f", 3, 3.0),
    ("b", 1, True),
    ("raw", "é", b"\xc3\xa9"),
    ("on", "2024-02-29", date(2024, 2, 29)),
    ("mixed", "5", "5"),
    ("mixed", 5, 5),
    ("free", [1, 2.5, None, {"a": True}], [1, 2.5, None, {"a": True}]),
    ("at", datetime(2024, 1, 1), datetime(2024, 1, 1, tzinfo=UTC)),  # noqa: DTZ001
    ("at", "2024-01-01T02:00:00+02:00", datetime(2024, 1, 1, tzinfo=UTC)),
]


@pytest.mark.parametrize(("field", "value", "stored"), TAKEN)
def test_values_are_taken_in_lax_mode(field: str, value: Any, stored: Any):
    got = getattr(Everything(**{"id": "x", field: value}), field)
    assert got == stored
    assert type(got) is type(stored)


def test_datetimes_are_plain_and_in_utc():
    import pandas as pd

    zone = timezone(timedelta(hours=5))
    for value in (datetime(2024, 1, 1, 5, tzinfo=zone), pd.Timestamp("2024-01-01 05:00", tz=zone)):
        at = Everything(id="x", at=value).at
        assert type(at) is datetime
        assert (at.isoformat(), at.tzinfo) == ("2024-01-01T00:00:00+00:00", UTC)
    with pytest.raises(ValidationError, match="nanoseconds"):
        Everything(id="x", at=pd.Timestamp(1, unit="ns"))


def test_any_takes_subclasses_as_their_plain_values():
    class Colour(enum.StrEnum):
        RED = "red"

    free = Everything(id="x", free=[Colour.RED, True]).free
    assert free == ["red", True]
    assert [type(v) for v in free] == [str, bool]


def test_values_are_not_shared_with_what_was_given():
    given = {"a": [1]}
    made = Everything(id="x", free=given)
    given["a"].append(2)
    assert made.free == {"a": [1]}
    made.model_dump()["free"]["a"].append(3)
    assert made.free == {"a": [1]}


def test_objects_do_not_change():
    ann = Customer(id="c1", name="Ann")
    with pytest.raises(AttributeError, match=r"replace\(name=...\)"):
        ann.name = "Bob"  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="do not change"):
        del ann.name
    changed = ann.replace(name="Bob", tags=["x"])
    assert (ann.name, changed.name, changed.tags, changed.id) == ("Ann", "Bob", ["x"], "c1")
    with pytest.raises(ValidationError, match="did you mean 'name'"):
        ann.replace(nam="x")
    with pytest.raises(ValidationError, match="valid string"):
        ann.replace(name=3)


def test_equality_is_by_value_and_type():
    class Twin(Entity, name="Customer"):
        id: Field[str] = Field(primary_key=True)

    class Twin2(Entity, name="Customer"):
        id: Field[str] = Field(primary_key=True)

    assert Customer(id="a", name="x") == Customer(id="a", name="x")
    assert Customer(id="a", name="x") != Customer(id="a", name="y")
    assert Twin(id="a") != Twin2(id="a")
    assert Customer(id="a", name="x") != "a"
    with pytest.raises(TypeError, match="unhashable"):
        hash(Customer(id="a", name="x"))


def test_model_dump_and_validate():
    ann = Customer(id="c1", name="Ann", tags=["a"])
    dumped = ann.model_dump()
    assert dumped == {"id": "c1", "name": "Ann", "tier": "Standard", "tags": ["a"], "email": None}
    assert Customer.model_validate(dumped) == ann
    with pytest.raises(ValidationError, match="expected a mapping"):
        Customer.model_validate([("id", "c1")])  # type: ignore[arg-type]


def test_relations():
    job = Employment(left_key="a", right_key="b", stint="s1", role="r")
    assert (job.stint, job.instance_key, job.left_key, job.right_key) == ("s1", "s1", "a", "b")
    assert job.model_dump() == {"role": "r"}, "keys are identity, not fields"
    assert job.replace(stint="s2") != job
    assert Likes(left_key="a", right_key="b").instance_key == ""
    with pytest.raises(ValidationError, match="unknown field 'instance_key'"):
        Employment(left_key="a", right_key="b", instance_key="s1", role="r")  # type: ignore[call-arg]
    spec = spec_of(Employment)
    assert (spec.left, spec.right, spec.instance_key) == ("Customer", "Everything", "stint")


def test_endpoints_come_from_a_loader():
    like = Likes(left_key="a", right_key="b")
    with pytest.raises(MetadataUnavailableError, match="left entity is not known"):
        _ = like.left
    ends = {"left": Customer(id="a", name="A"), "right": Customer(id="b", name="B")}
    like._attach_endpoints(lambda relation, side: ends[side])
    assert (like.left.name, like.right.name) == ("A", "B")


def test_meta_only_on_stored_objects():
    ann = Customer(id="c1", name="Ann")
    with pytest.raises(MetadataUnavailableError, match="did not come out of a storage"):
        ann.meta()
    ann._attach_meta(7)
    assert ann.meta() == EntityMeta(commit_id=7, type_name="Customer", key="c1")
    with pytest.raises(MetadataUnavailableError):
        ann.replace(name="Bob").meta()
    job = Employment(left_key="a", right_key="b", stint="s1", role="r")
    job._attach_meta(8)
    assert job.meta() == RelationMeta(8, "Employment", "a", "b", "s1")


@pytest.mark.parametrize(
    "through", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_copies_keep_values_and_meta(through: Any):
    ann = Customer(id="c1", name="Ann", tags=["x"])
    ann._attach_meta(7)
    again = through(ann)
    assert again == ann
    assert again.meta() == ann.meta()


def test_copies_of_new_objects_have_no_meta():
    with pytest.raises(MetadataUnavailableError):
        copy.copy(Customer(id="c1", name="Ann")).meta()


def test_factories_are_called_per_object_and_checked():
    class Counted(Entity):
        id: Field[str] = Field(primary_key=True)
        n: Field[int] = Field(default_factory=iter([1, 2, "x"]).__next__)  # type: ignore[arg-type]

    assert [Counted(id="a").n, Counted(id="b").n] == [1, 2]
    with pytest.raises(ValidationError, match="n: Input should be a valid integer"):
        Counted(id="c")


def test_field_ref():
    assert (Customer.tier.name, Customer.tier.owner) == ("tier", spec_of(Customer))
    assert repr(Employment.role) == "Employment.role"


def test_a_class_suggests_the_nearest_field() -> None:
    with pytest.raises(AttributeError, match=r"unknown field 'nmae', did you mean 'name'\?"):
        _ = Customer.nmae  # type: ignore[attr-defined]
    assert not hasattr(Customer, "__nothing__")


def test_a_type_may_have_an_abstract_base() -> None:
    class Labelled(ABC):
        @abstractmethod
        def label(self) -> str: ...

    class LabelledThing(Entity, Labelled):
        id: Field[str] = Field(primary_key=True)

        def label(self) -> str:
            return self.id

    assert LabelledThing(id="x").label() == "x"
