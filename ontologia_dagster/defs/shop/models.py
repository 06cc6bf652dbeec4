"""The types of the shop."""

from __future__ import annotations

from datetime import date

from storage_engine import Entity, Event, Field, Relation


class Customer(Entity, owners=["team:sales"]):
    """Somebody who buys, or once did."""

    id: Field[str] = Field(primary_key=True, description="c and a number, for ever")
    name: Field[str]
    city: Field[str | None] = Field(default=None, description="where parcels go")
    since: Field[date] = Field(description="the day of the first order")


class Product(Entity, owners=["team:sales"]):
    """What the shop sells."""

    sku: Field[str] = Field(primary_key=True, description="as on the label")
    title: Field[str]
    category: Field[str] = Field(index=True)
    price: Field[float] = Field(description="in euros, with tax")


class OrderLine(Relation[Customer, Product], owners=["team:sales"]):
    """A customer ordered so many of a product: one line of an order."""

    line: Field[str] = Field(instance_key=True, description="order and line, o1001/1")
    order: Field[str] = Field(index=True)
    day: Field[date]
    quantity: Field[int]


class Recommended(Relation[Customer, Customer], owners=["team:sales"]):
    """The left customer brought the right one."""


class Voucher(Entity, owners=["team:sales"]):
    """Thanks for a large order. No file has these: a handler writes them."""

    order: Field[str] = Field(primary_key=True)
    customer: Field[str]
    percent: Field[int]


class LargeOrder(Event):
    """An order came to more than the shop is used to."""

    order: Field[str]
    customer: Field[str]
    amount: Field[float] = Field(description="in euros")
