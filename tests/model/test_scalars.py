"""Enums, literals, UUIDs, times of day and decimals in declared classes."""

from __future__ import annotations

from datetime import UTC, date, time
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID

import pytest

from storage_engine import Entity, Event, Field, Precision, UnsupportedTypeError, ValidationError
from storage_engine.model import TypeSpec, fields_json, spec_of, table_from_fields_json
from storage_engine.model.arrow import objects_to_table, table_to_objects

NIL = UUID(int=0)


class Status(Enum):
    OPEN = "open"
    PAID = "paid"


class Tier(StrEnum):
    GOLD = "gold"
    LEAD = "lead"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Line(TypedDict):
    price: Annotated[Decimal, Precision(9, 3)]
    status: NotRequired[Status]
    parts: NotRequired[list[Line]]


class DeclaredOrder(Entity, name="Order"):
    id: Field[str] = Field(primary_key=True)
    total: Field[Decimal] = Field(default=Decimal("0"), precision=12, scale=2)
    status: Field[Status] = Field(default=Status.OPEN)
    tier: Field[Tier | None] = Field(default=None)
    level: Field[Level] = Field(default=Level.LOW)
    mode: Field[Literal["r", "w"]] = Field(default="r")
    digit: Field[Literal[1, 2] | None] = Field(default=None)
    at: Field[time] = Field(default=time(0))
    ref: Field[UUID] = Field(default=NIL)
    lines: Field[list[Line]] = Field(default_factory=list)
    states: Field[dict[str, Status | None]] = Field(default_factory=dict)
    either: Field[Status | list[Level] | int | None] = Field(default=None)
    shares: Field[list[Decimal]] = Field(default_factory=list, precision=5, scale=4)


Order: Any = DeclaredOrder  # tests give it what type checkers object to

FULL = Order(
    id="o",
    total="-9999999999.99",
    status="paid",
    tier="lead",
    level=2,
    mode="w",
    digit=2,
    at="23:59:59.999999",
    ref="C9BF9E57-1685-4C89-BAFB-FF5AF830BE8A",
    lines=[{"price": 1, "status": "open", "parts": [{"price": "0.125", "status": "paid"}]}],
    states={"a": "open", "b": None},
    either=[2, 1],
    shares=[Decimal("0.5"), "1"],
)


def test_values_become_what_is_declared() -> None:
    assert FULL.total == Decimal("-9999999999.99")
    assert FULL.status is Status.PAID
    assert FULL.tier is Tier.LEAD
    assert FULL.level is Level.HIGH
    assert FULL.at == time(23, 59, 59, 999999)
    assert FULL.ref == UUID("c9bf9e57-1685-4c89-bafb-ff5af830be8a")
    assert FULL.lines[0]["status"] is Status.OPEN
    assert FULL.lines[0]["parts"][0] == {"price": Decimal("0.125"), "status": Status.PAID}
    assert FULL.states == {"a": Status.OPEN, "b": None}
    assert FULL.either == [Level.HIGH, Level.LOW]
    assert Order(id="x", either=Status.PAID).either is Status.PAID
    assert Order(id="x", either=7).either == 7


def test_defaults_are_declared_values() -> None:
    order = Order(id="x")
    assert order.status is Status.OPEN
    assert str(order.total) == "0.00"
    assert (order.at, order.ref, order.level) == (time(0), NIL, Level.LOW)


def test_decimals_compare_by_value() -> None:
    assert Order(id="x", total="1.5") == Order(id="x", total=Decimal("1.50"))
    assert str(Order(id="x", total="1.5").total) == "1.50"
    assert str(Order(id="x", total="-0").total) == "0.00"


@pytest.mark.parametrize("order", [FULL, Order(id="x")], ids=["full", "defaults"])
def test_rows_and_payloads_come_back(order: DeclaredOrder) -> None:
    spec = spec_of(Order)
    table = objects_to_table(spec, [order])
    payload = fields_json(spec, table)
    assert table_to_objects(spec, table) == [order]
    assert table_from_fields_json(spec, table.select(["entity_key"]), payload).equals(table)


def test_the_payload_of_version_one() -> None:
    spec = spec_of(Order)
    (text,) = fields_json(spec, objects_to_table(spec, [FULL])).to_pylist()
    assert text == (
        '{"at":"23:59:59.999999","digit":2,"either":[2,1],"id":"o","level":2,"lines":[{"parts":'
        '[{"price":"0.125","status":"paid"}],"price":"1.000","status":"open"}],"mode":"w",'
        '"ref":"c9bf9e57-1685-4c89-bafb-ff5af830be8a","shares":["0.5000","1.0000"],"states":'
        '{"a":"open","b":null},"status":"paid","tier":"lead","total":"-9999999999.99"}'
    )


REFUSED = [
    ("total", 1.5, "is a float, which is not exact; write a Decimal, an int or a str"),
    ("total", True, "is not a decimal number"),
    ("total", "0.001", "more than 2 digits after the point"),
    ("total", 10**10, "more than 10 digits before the point"),
    ("status", "payed", "is none of 'open', 'paid'"),
    ("status", Tier.GOLD, "is none of 'open', 'paid'"),
    ("tier", Status.OPEN, "is none of 'gold', 'lead'"),
    ("level", True, "is none of 1, 2"),
    ("level", 1.0, "is none of 1, 2"),
    ("level", "1", "is none of 1, 2"),
    ("digit", True, "is none of 1, 2"),
    ("at", time(1, tzinfo=UTC), "has a time zone"),
    ("at", "01:00:00Z", "is not a time of day"),
    ("at", "24:00:00", "is not a time of day"),
    ("at", "01:00:00.1234567", "at most microseconds"),
    ("at", 3600, "is not a time of day"),
    ("ref", "x", "is not a UUID"),
    ("ref", "c9bf9e5716854c89bafbff5af830be8a", "is not a UUID"),
    ("ref", 5, "is not a UUID"),
    ("lines", [{"price": "0.0001"}], "more than 3 digits after the point"),
    ("lines", [{"price": 1, "status": "x"}], "is none of 'open', 'paid'"),
]


@pytest.mark.parametrize(("field", "value", "why"), REFUSED, ids=str)
def test_other_values_are_refused_by_name(field: str, value: Any, why: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Order(**{"id": "o1", field: value})
    assert "Order 'o1'" in str(caught.value)
    assert field in str(caught.value)
    assert why in str(caught.value)
    assert caught.value.field == field


def test_a_stored_schema_reads_without_the_class() -> None:
    spec = spec_of(Order)
    stored = TypeSpec.from_schema_dict(spec.schema_dict())
    assert stored.schema_sha256 == spec.schema_sha256
    described = {f.name: (f.storage, f.column_type) for f in stored.fields}
    assert described["total"] == ("decimal(12,2)", "decimal(12,2)")
    assert described["status"] == ("str", "Literal['open', 'paid']")
    assert described["level"] == ("int", "Literal[1, 2]")
    assert described["ref"] == ("str", "UUID")
    assert described["at"] == ("time", "time")
    assert stored.field("status").restored("paid") == "paid"
    assert spec.field("status").restored("paid") is Status.PAID


def test_an_enum_and_a_literal_of_the_same_values_are_one_type() -> None:
    def declare(annotation: Any) -> str:
        body = {"__annotations__": {"id": Field[str], "x": Field[annotation]}}
        cls = type("T", (Entity,), {**body, "id": Field(primary_key=True), "__module__": __name__})
        return spec_of(cls).schema_sha256

    class Renamed(Enum):
        B = "paid"
        A = "open"

    assert declare(Status) == declare(Literal["paid", "open"]) == declare(Renamed)
    assert declare(Status) != declare(Literal["paid", "open", "late"])


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"storage": "interval"}, "interval"),
        ({"type_spec": {"kind": "primitive", "name": "interval"}}, "interval"),
        ({"type_spec": {"kind": "list", "item": {"kind": "set", "item": {}}}}, "set"),
    ],
)
def test_a_kind_of_a_later_program_is_named(change: dict[str, Any], kind: str) -> None:
    schema = spec_of(Order).schema_dict()
    schema["fields"][1].update(change)
    with pytest.raises(UnsupportedTypeError, match="newer ontologia, upgrade") as caught:
        TypeSpec.from_schema_dict(schema)
    assert (caught.value.field, caught.value.kind) == ("total", kind)


class DeclaredShipped(Event, name="order.shipped"):
    status: Field[Status]
    total: Field[Decimal] = Field(precision=5, scale=2)
    at: Field[time | None] = Field(default=None)
    ref: Field[UUID] = Field(default=NIL)
    days: Field[list[date]] = Field(default_factory=list)
    tiers: Field[list[Tier]] = Field(default_factory=list)


def test_events_carry_them() -> None:
    Shipped: Any = DeclaredShipped
    event = Shipped(status=Status.PAID, total=1, at=time(9, 5), tiers=["gold"])
    envelope = event.envelope("default")
    assert envelope["payload"] == {
        "status": "paid",
        "total": "1.00",
        "at": "09:05:00.000000",
        "ref": str(NIL),
        "days": [],
        "tiers": ["gold"],
    }
    assert Shipped.from_envelope(envelope) == event
