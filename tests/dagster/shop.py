"""Models and handlers of the Dagster tests; programs that they start import them by name."""

from __future__ import annotations

from datetime import date

from storage_engine import Entity, Event, Field, HandlerContext, Relation, on_event


class Customer(Entity, owners=["team:sales"], tags={"domain": "crm"}):
    """Who buys."""

    id: Field[str] = Field(primary_key=True, description="number in the CRM")
    name: Field[str] = Field(sensitive=True)
    visits: Field[int] = Field(default=0)


class Order(Entity):
    id: Field[str] = Field(primary_key=True)
    day: Field[date]
    total: Field[int]


class Placed(Relation[Customer, Order]):
    channel: Field[str] = Field(default="web")


class Visit(Entity):
    """Its time is a text, as many sources have it."""

    id: Field[str] = Field(primary_key=True)
    at: Field[str]


class OrderPlaced(Event):
    order_id: Field[str]


class Invoice(Entity):
    id: Field[str] = Field(primary_key=True)


attempts: dict[str, int] = {}
failures: dict[str, int] = {}  # order id -> how often its handler fails


@on_event(OrderPlaced)
def bill(ctx: HandlerContext[OrderPlaced]) -> None:
    order_id = ctx.event.order_id
    attempts[order_id] = attempts.get(order_id, 0) + 1
    if attempts[order_id] <= failures.get(order_id, 0):
        raise RuntimeError(f"the printer is on fire ({order_id})")
    ctx.ensure(Invoice(id=order_id))
