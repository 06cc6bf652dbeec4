"""Storages whose types have changed: migrated, renamed, dropped, purged and created anew.

    python -m tests.compatibility.evolved LABEL

makes tests/compatibility/storages/evolved/LABEL/NAME.tar.gz of each engine, through the public API.
They are written once and never changed; `test_evolved_storages.py` says what must be read from
them. When the format changes, write new ones under its label, beside the old.

    1  two customers, an offer, an order     5  Customer becomes Client, and Ordered follows
    2  Ann is older; a note and a scrap      6  Note is dropped
    3  version 2 of Customer                 7  Scrap is purged
    4  Bob is 40, with an event              8  Scrap is created anew
       (`spring` is the tag of commit 2)     9  a scrap, and Cy
"""

from __future__ import annotations

import argparse
import tempfile
from datetime import time
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from storage_engine import (
    Entity,
    Event,
    Field,
    OntologiaConfig,
    Relation,
    Session,
    initialize_storage,
)
from tests.compatibility.command_line import onto
from tests.compatibility.write_storages import STORAGES, pack

FOLDER = STORAGES / "evolved"
ENGINES = {
    "directory-v1": ("shop", "v1"),
    "directory-v2": ("shop", "v2"),
    "sqlite-v1": ("shop.db", "v1"),
    "sqlite-v2": ("shop.db", "v2"),
}


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Customer1(Entity, name="Customer"):
    id: Field[str] = Field(primary_key=True)
    first: Field[str]
    last: Field[str]
    age: Field[int] = Field(default=0)


class Customer2(Entity, name="Customer"):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    age: Field[float] = Field(default=0.0)


class Client(Entity, renamed_from="Customer"):
    id: Field[str] = Field(primary_key=True)
    full_name: Field[str] = Field(renamed_from="name")
    age: Field[float] = Field(default=0.0)


class Offer(Entity):
    sku: Field[str] = Field(primary_key=True)
    price: Field[Decimal] = Field(precision=12, scale=2)
    size: Field[Size]
    state: Field[Literal["new", "used"]]
    token: Field[UUID]
    opens: Field[time | None] = Field(default=None)
    discounts: Field[list[Decimal]] = Field(default_factory=list, precision=5, scale=3)


class Ordered1(Relation[Customer1, Offer], name="Ordered"):
    count: Field[int] = Field(default=1)


class Ordered2(Relation[Client, Offer], name="Ordered"):
    count: Field[int] = Field(default=1)


class Note(Entity):
    id: Field[str] = Field(primary_key=True)
    text: Field[str]


class Scrap1(Entity, name="Scrap"):
    id: Field[str] = Field(primary_key=True)
    weight: Field[int]


class Scrap2(Entity, name="Scrap"):
    id: Field[str] = Field(primary_key=True)
    colour: Field[str]


class Paid(Event):
    amount: Field[Decimal] = Field(precision=12, scale=2)


def one_name(row: dict[str, Any]) -> dict[str, Any]:
    row["name"] = f"{row.pop('first')} {row.pop('last')}"
    return row


UPGRADERS = {("Customer", 1): one_name}
OFFER: dict[str, Any] = {
    "sku": "p",
    "price": Decimal("1234567890.25"),
    "size": Size.LARGE,
    "state": "used",
    "token": UUID("00000000-0000-4000-8000-00000000000f"),
    "opens": time(9, 30, 0, 250),
    "discounts": [Decimal("0.125"), Decimal("12.000")],
}


def opened(path: Path, *types: Any) -> Session:
    return Session(
        path,
        entity_types=[t for t in types if issubclass(t, Entity)],
        relation_types=[t for t in types if not issubclass(t, Entity)],
        config=OntologiaConfig(runtime_id="fixtures", checkpoint_interval=4),
    )


def uri_of(path: Path) -> str:
    return f"sqlite:///{path}" if path.suffix == ".db" else path.as_uri()


def write(path: Path, engine: str) -> None:
    initialize_storage(path, engine)
    place = ("--storage-uri", uri_of(path))
    with opened(path) as session:
        session.ensure([Customer1(id="a", first="Ann", last="Lee", age=30)])
        session.ensure([Customer1(id="b", first="Bob", last="Ray"), Offer(**OFFER)])
        session.ensure(Ordered1(left_key="a", right_key="p", count=2))
        assert session.commit() == 1
        session.ensure(Customer1(id="a", first="Ann", last="Lee", age=31))
        session.ensure([Note(id="n", text="kept"), Scrap1(id="s", weight=7)])
        assert session.commit(meta={"by": "fixtures"}) == 2
    assert onto("tag", "create", "spring", "2", *place).code == 0
    with opened(path, Customer2) as session:
        session.migrate(dry_run=False, force=True, upgraders=UPGRADERS)
        session.ensure(Customer2(id="b", name="Bob Ray", age=40.5))
        assert session.commit(event=Paid(id="paid-1", amount=Decimal("9.50"))) == 4
    with opened(path, Client, Ordered2) as session:
        assert session.migrate(dry_run=False, force=True).commit_id == 5
    for name, *purge in (["Note"], ["Scrap", "--purge"]):
        token = onto("--json", "schema", "drop", name, *purge, *place).json["token"]
        done = onto("schema", "drop", name, *purge, "--apply", "--token", token, *place)
        assert done.code == 0, done
    with opened(path, Scrap2, Client) as session:
        assert session.migrate(dry_run=False, force=True).commit_id == 8
        session.ensure([Scrap2(id="s", colour="red"), Client(id="c", full_name="Cy Coe")])
        assert session.commit() == 9


def main() -> None:
    parser = argparse.ArgumentParser(description="Write evolved storages for later versions.")
    parser.add_argument("label", help="what writes them, such as format-3")
    target = FOLDER / parser.parse_args().label
    target.mkdir(parents=True, exist_ok=True)
    for name, (file, engine) in ENGINES.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / file, engine)
            pack(Path(folder), target / f"{name}.tar.gz")
        print(name)


if __name__ == "__main__":
    main()
