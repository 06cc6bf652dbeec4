"""The types of `tests.cli.support` after a change that is additive."""

from __future__ import annotations

from storage_engine import Entity, Field, Relation


class Customer(Entity, owners=["team:sales"], tags={"domain": "crm"}):
    """Who buys."""

    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    email: Field[str | None] = Field(default=None, description="where bills go", sensitive=True)


class Product(Entity):
    sku: Field[str] = Field(primary_key=True)


class Employment(Relation[Customer, Product]):
    stint: Field[str] = Field(instance_key=True)
    role: Field[str]
