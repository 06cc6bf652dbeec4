"""A module for `--models`, and a storage of its types for the tests of `onto query`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from storage_engine.model import Entity, Field, Relation
from tests.cli.support import commit, create

JOINED = datetime(2024, 1, 31, 12, 0, 0, 250_000, UTC)


class Base(Entity, abstract=True):
    """Only gives fields; not a type."""

    id: Field[str] = Field(primary_key=True)


class Client(Base):
    name: Field[str]
    tier: Field[str] = Field(default="Standard")
    age: Field[int | None] = Field(default=None)
    active: Field[bool] = Field(default=True)
    joined: Field[datetime | None] = Field(default=None)
    photo: Field[bytes | None] = Field(default=None)
    tags: Field[list[str]] = Field(default_factory=list)
    profile: Field[dict[str, Any]] = Field(default_factory=dict)


class Firm(Base):
    name: Field[str]


class Job(Relation[Client, Firm]):
    stint: Field[str] = Field(instance_key=True)
    role: Field[str]


class Knows(Relation[Client, Client]):
    since: Field[int]


class Unwritten(Base):
    """Declared, never committed."""


def fill(uri: str, engine: str) -> None:
    """Three commits: ann becomes Gold with the second, cid comes with the third."""
    create(uri, engine)
    commit(
        uri,
        Client(
            id="ann",
            name='Ann "A", B\nC',
            age=31,
            joined=JOINED,
            photo=b"\x00\xff",
            tags=["vip", "x"],
            profile={"city": "Bern"},
        ),
        Client(id="bob", name="", age=7, active=False),
        Firm(id="acme", name="Acme"),
        Job(left_key="ann", right_key="acme", stint="2023", role="clerk"),
        Job(left_key="ann", right_key="acme", stint="2024", role="boss"),
        Job(left_key="bob", right_key="acme", stint="2024", role="clerk"),
        Knows(left_key="bob", right_key="ann", since=1),
    )
    commit(
        uri,
        Client(
            id="ann",
            name='Ann "A", B\nC',
            tier="Gold",
            age=32,
            joined=JOINED,
            photo=b"\x00\xff",
            tags=["vip", "x"],
            profile={"city": "Bern"},
        ),
    )
    commit(uri, Client(id="cid", name="Zoë"))
