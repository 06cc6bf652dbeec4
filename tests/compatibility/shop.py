"""The types, events and handlers of the stored shops.

Storages of every label hold these types as they are here, so nothing here may ever change. A new
kind of field goes into a new type, which only storages of later labels have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, NotRequired, TypedDict

from storage_engine import (
    Entity,
    Event,
    EventDeadLetter,
    Field,
    HandlerContext,
    Relation,
    Session,
    on_event,
)

# --- types ------------------------------------------------------------------------------------


class Address(TypedDict):
    city: str
    since: NotRequired[date]
    seal: NotRequired[bytes]
    former: NotRequired[list[Address]]


class Visit(TypedDict):
    page: str
    at: NotRequired[datetime]
    seconds: NotRequired[int | float]


class Customer(Entity):
    """A field of every kind."""

    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    tier: Field[str] = Field(default="Standard", index=True)
    points: Field[int] = Field(default=0)
    credit: Field[float] = Field(default=0.0)
    active: Field[bool] = Field(default=True)
    joined: Field[datetime]
    birthday: Field[date]
    photo: Field[bytes] = Field(default=b"")
    nickname: Field[str | None] = Field(default=None)
    age: Field[int | None] = Field(default=None)
    rating: Field[float | None] = Field(default=None)
    verified: Field[bool | None] = Field(default=None)
    last_seen: Field[datetime | None] = Field(default=None)
    married: Field[date | None] = Field(default=None)
    signature: Field[bytes | None] = Field(default=None)
    tags: Field[list[str]] = Field(default_factory=list)
    lucky: Field[list[int | None]] = Field(default_factory=list)
    counts: Field[dict[str, int]] = Field(default_factory=dict)
    address: Field[Address | None] = Field(default=None)
    visits: Field[list[Visit]] = Field(default_factory=list)
    contact: Field[str | int] = Field(default="")
    remark: Field[date | list[str] | None] = Field(default=None)
    extra: Field[Any] = Field(default=None)


class Product(Entity):
    """Comes by `ingest`."""

    sku: Field[str] = Field(primary_key=True)
    title: Field[str]
    price: Field[float]
    stock: Field[int | None] = Field(default=None)
    released: Field[datetime | None] = Field(default=None)
    manual: Field[str] = Field(default="")


class Invoice(Entity):
    """Comes from handlers."""

    id: Field[str] = Field(primary_key=True)
    amount: Field[int]


class Knows(Relation[Customer, Customer]):
    """No key, no fields: the identity is the whole statement."""


class Owns(Relation[Customer, Product]):
    """No key: one for each pair."""

    seats: Field[int]
    note: Field[str | None] = Field(default=None)


class Purchase(Relation[Customer, Product]):
    """With a key: many for each pair."""

    receipt: Field[str] = Field(instance_key=True)
    paid: Field[float]
    at: Field[datetime]
    coupons: Field[list[str]] = Field(default_factory=list)


class Namesake(Relation[Customer, Product], name="Invoice"):
    """Shares its stored name with an entity type, so no session can take both."""

    weight: Field[int] = Field(default=1)


class Unwritten(Entity):
    """In no storage: its first rows were being loaded when the writer was killed."""

    id: Field[str] = Field(primary_key=True)
    text: Field[str]


@dataclass(frozen=True)
class Kind:
    """A type as the tests need it; `label` names it in SQL and in what was expected."""

    label: str
    cls: Any
    identity: tuple[str, ...]
    nested: frozenset[str] = frozenset()  # fields whose values are kept as JSON

    @property
    def is_entity(self) -> bool:
        return issubclass(self.cls, Entity)

    @property
    def kind(self) -> str:
        return "entity" if self.is_entity else "relation"

    @property
    def stored_name(self) -> str:
        return "Invoice" if self.cls is Namesake else str(self.cls.__name__)

    @property
    def columns(self) -> tuple[str, ...]:
        """Everything that an object of it says."""
        ends = () if self.is_entity else ("left_key", "right_key")
        return (*ends, *self.cls.__annotations__)


_PAIR = ("left_key", "right_key")
_NESTED = frozenset({"tags", "lucky", "counts", "address", "visits", "contact", "remark", "extra"})
KINDS = {
    kind.label: kind
    for kind in (
        Kind("Customer", Customer, ("id",), _NESTED),
        Kind("Product", Product, ("sku",)),
        Kind("Invoice", Invoice, ("id",)),
        Kind("Knows", Knows, _PAIR),
        Kind("Owns", Owns, _PAIR),
        Kind("Purchase", Purchase, (*_PAIR, "receipt"), frozenset({"coupons"})),
        Kind("Namesake", Namesake, _PAIR),
    )
}
NAMESAKE = KINDS["Namesake"]
ENTITIES = [kind.cls for kind in KINDS.values() if kind.is_entity]
RELATIONS = [Knows, Owns, Purchase]


# --- events -----------------------------------------------------------------------------------


class OrderPlaced(Event):
    order_id: Field[str]
    amount: Field[int]
    placed: Field[datetime | None] = Field(default=None)
    lines: Field[list[str]] = Field(default_factory=list)


class Billed(Event, name="order.billed", priority=50):
    order_id: Field[str]


class ParcelReady(Event):
    seal: Field[bytes] = Field(default=b"")


class CloseDay(Event):
    pass


def work_off(session: Session, handlers: list[Any]) -> Any:
    """Handle what is due and what follows from it; what the first round did. Events of commits
    come out in the background, so one `drain` may end before the last of them is there."""
    done = first = session.drain(handlers)
    while done.handled:
        session.flush()
        done = session.drain(handlers)
    return first


@dataclass
class Staff:
    """The shop's handlers, and which event each of them was given. Handler ids are stored."""

    strict: bool = True  # refuses orders of a negative amount
    on_parcel: Callable[[], object] = lambda: None
    on_bill: Callable[[str], object] = lambda _: None
    given: list[tuple[str, str]] = field(default_factory=list)

    def handlers(self, only: Iterable[str] = ()) -> list[Any]:
        def note(handler_id: str, ctx: HandlerContext[Any]) -> None:
            self.given.append((handler_id, ctx.event.id))

        @on_event(OrderPlaced, id="shop.bill", priority=200)
        def bill(ctx: HandlerContext[OrderPlaced]) -> None:
            """The invoice, the next event and the ack are one commit."""
            note("shop.bill", ctx)
            self.on_bill(ctx.event.id)
            if self.strict and ctx.event.amount < 0:
                raise ValueError(f"order {ctx.event.order_id} has a negative amount")
            ctx.ensure(Invoice(id=ctx.event.order_id, amount=ctx.event.amount))
            ctx.commit(event=Billed(order_id=ctx.event.order_id), meta={"handler": "bill"})

        @on_event(Billed, id="shop.thank")
        def thank(ctx: HandlerContext[Billed]) -> None:
            note("shop.thank", ctx)

        @on_event(ParcelReady, id="shop/send parcel")
        def send(ctx: HandlerContext[ParcelReady]) -> None:
            note("shop/send parcel", ctx)
            self.on_parcel()

        @on_event(CloseDay, id="shop.close")
        def close(ctx: HandlerContext[CloseDay]) -> None:
            note("shop.close", ctx)

        @on_event(EventDeadLetter, id="shop.alarm")
        def alarm(ctx: HandlerContext[EventDeadLetter]) -> None:
            note("shop.alarm", ctx)

        known: list[Any] = [bill, thank, send, close, alarm]
        wanted = set(only)
        return [handler for handler in known if not wanted or handler.id in wanted]
