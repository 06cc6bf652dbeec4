"""A module for `--models`, and functions for `--transform`."""

from __future__ import annotations

from datetime import date
from typing import Any

from storage_engine.model import Entity, Field, Relation


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str | None] = Field(default=None)
    seats: Field[int | None] = Field(default=None)
    since: Field[date | None] = Field(default=None)


class Product(Entity):
    sku: Field[str] = Field(primary_key=True)
    title: Field[str]


class Subscription(Relation[Customer, Product]):
    seats: Field[int]


class Visit(Relation[Customer, Product]):
    day: Field[str] = Field(instance_key=True)
    minutes: Field[int]


def shout(frame: Any) -> Any:
    """A transform."""
    from pyspark.sql import functions as F

    return frame.withColumn("name", F.upper("name"))


def nothing(frame: Any) -> Any:
    """A transform that forgets to return."""


NUMBER = 1
