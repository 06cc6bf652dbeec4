"""The types that customers.yaml writes."""

from __future__ import annotations

from datetime import datetime

from storage_engine import Entity, Field


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    country: Field[str | None] = Field(default=None)
    seats: Field[int] = Field(default=1)
    updated_at: Field[datetime]
