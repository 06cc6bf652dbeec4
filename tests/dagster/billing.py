"""Handlers that say what they write and send, for the tests of lineage: an order is billed, the
bill is sent out, and one that comes back is billed again."""

from __future__ import annotations

from storage_engine import Entity, Event, Field, HandlerContext, on_event
from tests.dagster.shop import Customer, OrderPlaced


class Billed(Event):
    """A bill was written."""

    order_id: Field[str]


class Bill(Entity):
    """What a customer owes."""

    id: Field[str] = Field(primary_key=True)


class Delivery(Entity):
    id: Field[str] = Field(primary_key=True)


class Secret(Entity):
    id: Field[str] = Field(primary_key=True)


broken: set[str] = set()  # orders that cannot be billed


@on_event(OrderPlaced, id="shop.write_bill", writes=[Bill], emits=[Billed])
def write_bill(ctx: HandlerContext[OrderPlaced]) -> None:
    """Bills an order."""
    order = ctx.event.order_id
    if order in broken:
        raise LookupError(f"order {order} is not in the ontology")
    ctx.ensure(Bill(id=order))
    ctx.emit(Billed(order_id=order))


@on_event(Billed, id="shop.deliver", writes=[Delivery, Customer], emits=[OrderPlaced])
def deliver(ctx: HandlerContext[Billed]) -> None:
    """Beyond what it says, it keeps a secret of order x."""
    order = ctx.event.order_id
    ctx.ensure([Delivery(id=order), Customer(id=order, name="Ada")])
    if order == "x":
        ctx.ensure(Secret(id=order))
