"""Three versions of a shop's types, for tests of migrations, and upgraders between them."""

from __future__ import annotations

from typing import Any

from storage_engine import Entity, Field, Relation


class Customer1(Entity, name="Customer"):
    id: Field[str] = Field(primary_key=True)
    first: Field[str]
    last: Field[str]
    age: Field[int] = Field(default=0)


class Product1(Entity, name="Product"):
    sku: Field[str] = Field(primary_key=True)
    price: Field[int] = Field(default=0)


class Bought1(Relation[Customer1, Product1], name="Bought"):
    count: Field[int] = Field(default=1)


class Customer2(Entity, name="Customer"):
    """Additive: a field with a default, a wider type."""

    id: Field[str] = Field(primary_key=True)
    first: Field[str]
    last: Field[str]
    age: Field[float] = Field(default=0.0)
    tags: Field[list[str]] = Field(default_factory=list)


class Bought2(Relation[Customer2, Product1], name="Bought"):
    count: Field[int] = Field(default=1)


class Customer3(Entity, name="Customer"):
    """One name instead of two: takes an upgrader."""

    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    age: Field[float] = Field(default=0.0)
    tags: Field[list[str]] = Field(default_factory=list)


class Bought3(Relation[Customer3, Product1], name="Bought"):
    count: Field[int] = Field(default=1)


class Client(Entity, renamed_from="Customer"):
    """`Customer3` under another name, and one of its fields."""

    id: Field[str] = Field(primary_key=True)
    full_name: Field[str] = Field(renamed_from="name")
    age: Field[float] = Field(default=0.0)
    tags: Field[list[str]] = Field(default_factory=list)


class ClientBought(Relation[Client, Product1], name="Bought"):
    count: Field[int] = Field(default=1)


def one_name(row: dict[str, Any]) -> dict[str, Any]:
    """From version 2 to 3."""
    row["name"] = f"{row.pop('first')} {row.pop('last')}"
    return row


UPGRADERS = {("Customer", 2): one_name}
