"""The types of `tests.cli.support` after a change that cannot be migrated."""

from __future__ import annotations

from storage_engine import Entity, Field


class Customer(Entity):
    number: Field[str] = Field(primary_key=True)
    id: Field[str]
    name: Field[str]
