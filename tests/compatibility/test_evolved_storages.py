"""Storages with a past open, read, migrate on and verify, for ever: those under `storages/evolved`,
which `evolved.py` has written. Each is of the format that its folder names.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from datetime import time
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest

from storage_engine import Entity, Field, Relation, TypeDroppedError, on_event
from tests.compatibility.command_line import onto
from tests.compatibility.evolved import (
    ENGINES,
    FOLDER,
    OFFER,
    UPGRADERS,
    Client,
    Customer2,
    Note,
    Offer,
    Ordered2,
    Paid,
    Scrap2,
    opened,
    uri_of,
)
from tests.compatibility.test_earlier_storages import contents

ARCHIVES = sorted(FOLDER.glob("*/*.tar.gz"))


@dataclass(frozen=True)
class Evolved:
    folder: Path
    name: str

    @property
    def path(self) -> Path:
        return self.folder / ENGINES[self.name][0]

    @property
    def is_v1(self) -> bool:
        return ENGINES[self.name][1] == "v1"

    def onto(self, *args: str) -> Any:
        return onto("--json", *args, "--storage-uri", uri_of(self.path)).json

    def check(self) -> None:
        report = self.onto("verify", "--deep")
        assert (report["ok"], report["findings"]) == (True, [])


@pytest.fixture(params=ARCHIVES, ids=lambda path: f"{path.parent.name}-{path.name[:-7]}")
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Evolved:
    with tarfile.open(request.param) as tar:
        tar.extractall(tmp_path, filter="data")
    return Evolved(tmp_path, request.param.name.removesuffix(".tar.gz"))


def test_no_storage_has_gone() -> None:
    first = [
        path.name.removesuffix(".tar.gz") for path in ARCHIVES if path.parent.name == "format-3"
    ]
    assert first == list(ENGINES)


def test_its_present_and_past_are_read_and_reading_changes_nothing(shop: Evolved) -> None:
    before = contents(shop.folder)
    with opened(shop.path, Client, Offer, Ordered2, Scrap2) as session:
        session.validate()
        clients = session.query().entities(Client)
        assert [(c.id, c.full_name, c.age) for c in clients.collect()] == [
            ("a", "Ann Lee", 31.0),
            ("b", "Bob Ray", 40.5),
            ("c", "Cy Coe", 0.0),
        ]
        offers = session.query().entities(Offer)
        assert offers.collect() == [Offer(**OFFER)]
        conditions: list[Any] = [
            Offer.price == OFFER["price"],
            Offer.size == OFFER["size"],
            Offer.state == OFFER["state"],
            Offer.token == OFFER["token"],
            Offer.opens < time(9, 31),
        ]
        for condition in conditions:
            assert offers.where(condition).count() == 1
        assert offers.sum(Offer.price) == OFFER["price"]
        assert [(o.left_key, o.count) for o in session.query().relations(Ordered2).collect()] == [
            ("a", 2)
        ]
        # as it was
        raw = session.query().raw("Customer", schema_version=1)
        assert raw.as_of("spring").collect() == [
            {"id": "a", "first": "Ann", "last": "Lee", "age": 31},
            {"id": "b", "first": "Bob", "last": "Ray", "age": 0},
        ]
        upgraded = clients.upgraded(UPGRADERS)
        assert [(c.full_name, c.age) for c in upgraded.as_of("spring").collect()] == [
            ("Ann Lee", 31.0),
            ("Bob Ray", 0.0),
        ]
        assert upgraded.with_history().count() == 3 + 2 + 1 + 2 + 1
        assert session.query().raw("Note").collect() == [{"id": "n", "text": "kept"}]
        scraps = session.query().entities(Scrap2).upgraded().with_history().collect()
        assert [s.colour for s in scraps] == ["red"]
        assert scraps.diagnostics == ({"reason": "type_purged", "dropped_commit_id": 7},)
        told = [
            (c["commit_id"], c["type_name"], c.get("key", c.get("left_key")), c["operation"])
            for c in session.changes(0, upgraders=UPGRADERS)
        ]
        assert told == [
            (1, "Client", "a", "insert"),
            (1, "Client", "b", "insert"),
            (1, "Offer", "p", "insert"),
            (1, "Ordered", "a", "insert"),
            (2, "Client", "a", "update"),
            (2, "Note", "n", "insert"),
            (4, "Client", "b", "update"),
            (6, "Note", None, "drop"),
            (7, "Scrap", None, "drop"),
            (9, "Client", "c", "insert"),
            (9, "Scrap", "s", "insert"),
        ]
        kinds = [c["kind"] for c in session.list_commits(9)]
        assert (
            kinds
            == ["data", "migration", "drop", "drop", "migration", "data", "migration"]
            + ["data"] * 2
        )
    with opened(shop.path) as session:
        notes = session.query().entities(Note).collect()
        assert (notes, notes.diagnostics[0]["reason"]) == ([], "type_dropped")
    versions = {t["type_name"]: t for t in shop.onto("schema", "list")["types"]}
    assert sorted(versions) == ["Client", "Customer", "Note", "Offer", "Ordered", "Scrap"]
    shop.check()
    assert contents(shop.folder) == before


def test_it_is_written_and_migrated_on(shop: Evolved) -> None:
    class Grade(Enum):
        SMALL = "small"
        LARGE = "large"
        HUGE = "huge"

    class WiderOffer(Entity, name="Offer"):
        sku: Field[str] = Field(primary_key=True)
        price: Field[Decimal] = Field(precision=18, scale=4)
        size: Field[Grade]
        state: Field[Literal["new", "used", "broken"]]
        token: Field[UUID | None]
        opens: Field[time | None] = Field(default=None)
        discounts: Field[list[Decimal]] = Field(default_factory=list, precision=5, scale=3)

    class Buyer(Entity, renamed_from="Client"):
        id: Field[str] = Field(primary_key=True)
        full_name: Field[str]
        age: Field[float] = Field(default=0.0)
        tier: Field[str] = Field(default="new")

    class Ordered3(Relation[Buyer, WiderOffer], name="Ordered"):
        count: Field[int] = Field(default=1)

    with opened(shop.path) as session:
        session.ensure(Customer2(id="x", name="X"))
        with pytest.raises(TypeDroppedError, match="renamed to Client by commit 5"):
            session.commit()
        session.discard()
        session.ensure(Note(id="x", text="X"))
        with pytest.raises(TypeDroppedError, match="dropped by commit 6"):
            session.commit()
        session.discard()
    with opened(shop.path, Buyer, WiderOffer, Ordered3) as session:
        assert session.migrate(dry_run=False, force=True).commit_id == 10
        session.ensure(Buyer(id="d", full_name="Di Doe", tier="gold"))
        assert session.commit() == 11
        buyers = session.query().entities(Buyer)
        assert [(b.id, b.tier) for b in buyers.collect()] == [
            ("a", "new"),
            ("b", "new"),
            ("c", "new"),
            ("d", "gold"),
        ]
        then = buyers.upgraded(UPGRADERS).as_of("spring").collect()
        assert [b.full_name for b in then] == ["Ann Lee", "Bob Ray"]
        (offer,) = session.query().entities(WiderOffer).collect()
        assert (offer.price, offer.size, offer.opens) == (
            OFFER["price"],
            Grade.LARGE,
            OFFER["opens"],
        )
    shop.check()
    if shop.path.suffix != ".db":
        assert shop.onto("schema", "repair")["catalogs"] == []
        shop.onto("compact", "--apply")
        shop.onto("gc", "--older-than", "0s", "--purge-compacted", "--apply")
        shop.check()


def test_its_event_is_handled_once(shop: Evolved) -> None:
    given = []

    @on_event(Paid, id="shop.book")
    def book(ctx: Any) -> None:
        given.append((ctx.event.id, ctx.event.amount))

    for _ in range(2):
        with opened(shop.path) as session:
            session.drain([book])
    assert given == [("paid-1", Decimal("9.50"))]
