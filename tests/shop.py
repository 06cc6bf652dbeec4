"""A small shop: the types that tests of sessions and of SQLite repositories share."""

from __future__ import annotations

from storage_engine import Entity, Field, Relation


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    tier: Field[str] = Field(default="Standard", index=True)
    age: Field[int | None] = Field(default=None)


class Product(Entity):
    sku: Field[str] = Field(primary_key=True)
    price: Field[float]


class Subscription(Relation[Customer, Product]):
    """Unkeyed: at most one per pair."""

    seats: Field[int]


class Employment(Relation[Customer, Product]):
    """Keyed: several per pair."""

    stint: Field[str] = Field(instance_key=True)
    role: Field[str]


class Knows(Relation[Customer, Customer]):
    """No fields: the identity is the whole statement."""
