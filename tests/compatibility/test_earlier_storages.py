"""Storages and event buses of earlier versions open, read, write and verify, for ever.

Each archive under `storages/` was written by the version that its folder names, by
`write_storages.py`, which also says what is in them; the JSON beside an archive is what must be
read from it. Nothing here depends on how long ago that was.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage_engine import (
    Entity,
    ExpectedVersionMismatchError,
    Field,
    OntologiaConfig,
    Relation,
    SchemaOutdatedError,
    Session,
)
from tests.compatibility import events
from tests.compatibility.command_line import onto
from tests.compatibility.facts import (
    Past,
    differences,
    expected_past,
    expected_reads,
    identity_of,
    read_everything,
    read_past,
    row_of,
)
from tests.compatibility.shop import (
    ENTITIES,
    KINDS,
    RELATIONS,
    Customer,
    Invoice,
    Namesake,
    OrderPlaced,
    Owns,
    Product,
    Staff,
    work_off,
)

STORAGES = Path(__file__).parent / "storages"
ARCHIVES = sorted(STORAGES.glob("*/*.tar.gz"))
NOON = datetime(2025, 6, 1, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Earlier:
    """A storage of an earlier version, unpacked."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def is_sqlite(self) -> bool:
        return bool(self.facts["backend"] == "sqlite")

    @property
    def path(self) -> Path:
        return self.folder / ("shop.db" if self.is_sqlite else "shop")

    @property
    def head(self) -> int:
        return int(self.facts["head"])

    @property
    def past(self) -> Past:
        return Past(self.facts["history"])

    def session(self, namespace: str = "default") -> Session:
        config = OntologiaConfig(runtime_id="later", s3_lock_timeout_ms=60_000)
        return Session(
            self.path,
            entity_types=ENTITIES,
            relation_types=RELATIONS,
            config=config,
            namespace=namespace,
        )

    def namesakes(self) -> Session:
        return Session(self.path, relation_types=[Namesake])

    def onto(self, *args: str) -> Any:
        """The JSON that a command prints, which must succeed."""
        return onto("--json", *args, "--storage-uri", self._uri).json

    def fails(self, *args: str) -> tuple[int, Any]:
        """The exit code of a command, and the JSON that it prints all the same."""
        done = onto("--json", *args, "--storage-uri", self._uri)
        return done.code, json.loads(done.out)

    @property
    def _uri(self) -> str:
        return f"sqlite:///{self.path}" if self.is_sqlite else self.path.as_uri()

    def wrong_reads(self) -> list[str]:
        """Where what is read differs from the facts."""
        with self.session() as session, self.namesakes() as namesakes:
            said = read_everything(session, namesakes, self.facts)
        return differences(said, expected_reads(self.facts))

    def wrong_past(self) -> list[str]:
        """The same of what no later commit and no maintenance may change."""
        with self.session() as session, self.namesakes() as namesakes:
            said = read_past(session, namesakes, self.facts)
        return differences(said, expected_past(self.facts))

    def check(self) -> None:
        """The storage contradicts itself nowhere."""
        report = self.onto("verify", "--deep")
        assert (report["ok"], report["findings"]) == (True, [])

    def check_indices(self) -> None:
        """They are what the log says."""
        if not self.is_sqlite:
            indices = self.onto("index", "verify")
            assert (indices["ok"], indices["findings"]) == (True, [])
        assert self.onto("info")["index_warnings"] == []


def contents(folder: Path) -> dict[str, str]:
    """Every file by its hash, what the store keeps for itself included."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def again(item: Any, **values: Any) -> Any:
    """A new object that says the same, apart from these values."""
    kind = next(kind for kind in KINDS.values() if kind.cls is type(item))
    return kind.cls(**{name: getattr(item, name) for name in kind.columns} | values)


def everything_in(session: Session, *classes: Any) -> list[Any]:
    found: list[Any] = []
    for cls in classes:
        query = session.query()
        asked: Any = query.entities(cls) if cls in ENTITIES else query.relations(cls)
        found += asked.collect()
    return found


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORAGE_URI", "DB", "CONFIG", "LOG_LEVEL"):
        monkeypatch.delenv(f"ONTOLOGIA_{name}", raising=False)


@pytest.fixture(params=ARCHIVES, ids=lambda path: f"{path.parent.name}-{path.name[:-7]}")
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Earlier:
    archive: Path = request.param
    facts = archive.with_name(f"{archive.name[:-7]}.json")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    return Earlier(tmp_path, json.loads(facts.read_text(encoding="utf-8")))


def test_no_storage_has_gone() -> None:
    """Without archives the other tests would be skipped, not fail."""
    first = [path.name.removesuffix(".tar.gz") for path in ARCHIVES if path.parent.name == "0.1.0"]
    assert first == [
        "directory-v1-compacted",
        "directory-v1-crashed",
        "directory-v1",
        "directory-v2-compacted",
        "directory-v2-crashed",
        "directory-v2-purged",
        "directory-v2",
        "sqlite-v1",
        "sqlite-v2",
    ]


def test_everything_reads_as_it_was_written_and_reading_changes_nothing(earlier: Earlier) -> None:
    before = contents(earlier.folder)

    assert earlier.wrong_reads() == []

    expected = {
        name: part
        for name, part in earlier.facts["events"].items()
        if name not in ("due", "acked", "unprojected")
    }
    listed = events.listed(earlier.onto)
    unprojected = earlier.facts["events"]["unprojected"]  # later versions may know of them
    listed["default"] = [event for event in listed["default"] if event["id"] not in unprojected]
    assert differences(listed, expected) == []

    tags = earlier.onto("tag", "list")["tags"]
    assert {tag["name"]: tag["commit_id"] for tag in tags} == earlier.facts["tags"]

    for preview in (
        ["compact"],
        ["restore", "spring"],
        ["events", "redrive"],
        ["events", "replay", "order-1"],
        ["events", "cleanup", "--older-than", "0s"],
        *([] if earlier.is_sqlite else [["index", "repair"], ["gc", "--purge-compacted"]]),
    ):
        assert not earlier.onto(*preview)["applied"]
    assert contents(earlier.folder) == before


def test_it_verifies(earlier: Earlier) -> None:
    before = contents(earlier.folder)
    report = earlier.onto("verify", "--deep")
    assert (report["ok"], report["findings"]) == (True, [])
    assert report["checked"]["commits"] == earlier.head
    assert report["checked"]["rows"] == sum(map(len, earlier.facts["history"].values()))

    info = earlier.onto("info")
    assert info["engine_version"] == earlier.facts["engine"]
    assert info["head_commit_id"] == earlier.head
    heads = {(t["kind"], t["type_name"]): t["last_commit_id"] for t in info["types"]}
    assert heads == {
        (kind.kind, kind.stored_name): earlier.past.last_commit(kind) for kind in KINDS.values()
    }
    assert not info["lock"] or info["lock"]["expired"]

    lagging = earlier.facts["lagging"]
    if lagging:
        assert len(info["index_warnings"]) == len(lagging)
        code, indices = earlier.fails("index", "verify")
        assert code == 3
        assert sorted({finding["type_name"] for finding in indices["findings"]}) == lagging
        assert contents(earlier.folder) == before
        repaired = earlier.onto("index", "repair", "--apply")["types"]
        assert sorted(one["type_name"] for one in repaired) == lagging
        earlier.check()
    else:
        assert contents(earlier.folder) == before
    earlier.check_indices()


def test_what_is_stored_is_known_again(earlier: Earlier) -> None:
    """Rows, units of work and schemas: stated as they are, they make no commit."""
    with earlier.session() as session:
        session.ensure([again(item) for item in everything_in(session, *ENTITIES, *RELATIONS)])
        assert session.commit() is None
        products = everything_in(session, Product)
        columns = {name: [getattr(p, name) for p in products] for name in KINDS["Product"].columns}
        session.ingest(Product, pa.table(columns))
        assert session.commit() is None

        last = {mark["app_id"]: mark for mark in earlier.facts["idempotency"]}
        assert {type(mark["version"]) for mark in last.values()} == {int, str}
        for app_id, mark in last.items():
            done = [mark["version"]]
            done += [mark["version"] - 1] if isinstance(mark["version"], int) else []
            for version in done:
                session.ensure(Invoice(id="never", amount=1))
                assert session.commit(idempotency=(app_id, version)) == mark["commit_id"]

        session.ensure(Invoice(id="never", amount=1))
        with pytest.raises(ExpectedVersionMismatchError) as refused:
            session.commit(expect={Customer: 1})
        assert refused.value.actual == earlier.past.last_commit(KINDS["Customer"])
        session.discard()

    with earlier.namesakes() as session:
        session.ensure([again(item) for item in everything_in(session, Namesake)])
        assert session.commit() is None

    class Changed(Relation[Customer, Product], name="Owns"):
        seats: Field[float]

    with Session(earlier.path) as session:
        session.ensure(Changed(left_key="ann", right_key="p001", seats=1.5))
        with pytest.raises(SchemaOutdatedError):
            session.commit()
        session.discard()
        assert [commit["id"] for commit in session.list_commits(1)] == [earlier.head]


def test_it_is_migrated(earlier: Earlier) -> None:
    """One field is widened and one added, and what was written before stays readable."""

    class Owned(Relation[Customer, Product], name="Owns"):
        seats: Field[float]
        note: Field[str | None] = Field(default=None)
        terms: Field[str] = Field(default="as before")

    with earlier.session() as session:
        before = {(r.left_key, r.right_key): r for r in session.query().relations(Owns).collect()}
    assert before
    with Session(earlier.path, relation_types=[Owned]) as session:
        preview = session.migrate()
        assert preview.estimated_rows == {"Owns": len(before)}
        session.migrate(dry_run=False, token=preview.token)
        after = {(r.left_key, r.right_key): r for r in session.query().relations(Owned).collect()}
        assert after.keys() == before.keys()
        assert all(
            (r.seats, r.note, r.terms) == (float(before[key].seats), before[key].note, "as before")
            for key, r in after.items()
        )
        old = session.query().raw("Owns", schema_version=1).collect()
        assert {(r["left_key"], r["right_key"]): r["seats"] for r in old} == {
            key: r.seats for key, r in before.items()
        }
        session.ensure(Owned(left_key="ann", right_key="p001", seats=0.5))
        assert session.commit() == earlier.head + 2
    earlier.check()


def test_it_is_written_on(earlier: Earlier) -> None:
    head = earlier.head
    heads: dict[Any, int]
    heads = {name: earlier.past.last_commit(KINDS[name]) for name in ("Customer", "Owns")}
    new = Customer(id="later", name="Later", joined=NOON, birthday=NOON.date(), extra={"a": [1]})
    with earlier.session() as session:
        ann, bob = (
            session.query().entities(Customer).where(Customer.id == id).collect()[0]
            for id in ("ann", "bob")
        )
        changed = again(bob, points=5, tags=["later"])
        session.ensure([again(ann), changed, new])
        session.ensure(Owns(left_key="later", right_key="p001", seats=9))
        made = session.commit(meta={"by": "later"}, expect=heads, idempotency=("import", 8))
        assert made == head + 1
        assert [
            (change["type_name"], change.get("key", change.get("left_key")), change["operation"])
            for change in session.list_commit_changes(made)
        ] == [
            ("Customer", "bob", "update"),
            ("Customer", "later", "insert"),
            ("Owns", "later", "insert"),
        ]
        session.ingest(
            Product,
            pa.table(
                {
                    "sku": ["p001", "p002", "p999"],
                    "title": ["Product 1", "Renamed", "New"],
                    "price": [1.0, 2.0, 3.0],
                    "stock": [1, 2, None],
                    "released": pa.array(
                        [datetime(2024, 2, 1, 12, 0, 0, 250_000, UTC), None, NOON],
                        pa.timestamp("us", "UTC"),
                    ),
                }
            ),
        )
        made = session.commit(idempotency=("nightly", "later"))
        assert made == head + 2
        assert [
            (change["key"], change["operation"]) for change in session.list_commit_changes(made)
        ] == [("p002", "update"), ("p999", "insert")]
        assert session.commit(idempotency=("nightly", "later")) == made
        with earlier.namesakes() as namesakes:
            namesakes.ensure(Namesake(left_key="ann", right_key="p002", weight=99))
            assert namesakes.commit() == head + 3

        customers = {item.id: item for item in everything_in(session, Customer)}
        assert row_of(KINDS["Customer"], customers["bob"]) == row_of(KINDS["Customer"], changed)
        assert row_of(KINDS["Customer"], customers["later"]) == row_of(KINDS["Customer"], new)
        then = session.at(head).query().entities(Customer).where(Customer.id == "bob").collect()
        assert row_of(KINDS["Customer"], then[0]) == row_of(KINDS["Customer"], bob)
        assert [c["parent_id"] for c in session.list_commits(3)] == [head + 2, head + 1, head]
        [last] = session.changes(head + 2)
        assert (last["kind"], last["type_name"], last["operation"]) == (
            "relation",
            "Invoice",
            "update",
        )
    assert earlier.wrong_past() == []
    earlier.check()
    earlier.check_indices()  # those that lagged were brought along


def test_its_events_are_handled_once(earlier: Earlier) -> None:
    facts = earlier.facts["events"]
    staff = Staff(strict=False)
    with earlier.session() as session:
        work_off(session, staff.handlers())
        thanked = [event_id for handler, event_id in staff.given if handler == "shop.thank"]
        others = [[handler, id] for handler, id in staff.given if handler != "shop.thank"]
        assert sorted(others) == facts["due"]
        assert not [pair for pair in facts["acked"] if tuple(pair) in staff.given]
        billed = [event_id for handler, event_id in others if handler == "shop.bill"]
        assert len(thanked) == len({*thanked}) == len(billed)
        invoices = {invoice.id for invoice in everything_in(session, Invoice)}
        assert {*billed} <= invoices

        staff.given.clear()
        work_off(session, staff.handlers())
        assert staff.given == []

        session.emit(OrderPlaced(id="later-1", order_id="later-1", amount=1))
        session.commit(event=OrderPlaced(id="later-2", order_id="later-2", amount=2))
        work_off(session, staff.handlers(["shop.bill"]))
        assert staff.given == [("shop.bill", "later-1"), ("shop.bill", "later-2")]
        work_off(session, staff.handlers())

        letters = earlier.onto("events", "dead-letters")["dead_letters"]
        assert [letter["event_id"] for letter in letters] == [
            letter["event_id"] for letter in facts["dead_letters"]
        ]
        for command in (["redrive"], ["replay", "order-1"]):
            staff.given.clear()
            done = earlier.onto("events", *command, "--apply")
            work_off(session, staff.handlers(["shop.bill"]))
            sent = done.get("sent", [done])
            assert staff.given == [("shop.bill", one["new_event_id"]) for one in sent]
        assert earlier.onto("events", "dead-letters")["dead_letters"] == []

    archive = Staff()
    with earlier.session("archive") as session:
        work_off(session, archive.handlers(["shop.bill"]))
    assert archive.given == [("shop.bill", "order-5")]


def test_it_is_maintained(earlier: Earlier) -> None:
    head, spring = earlier.head, earlier.facts["tags"]["spring"]
    earlier.onto("tag", "create", "later", str(head - 1))
    if not earlier.is_sqlite:
        earlier.onto("compact", "--apply")
        collect = ("gc", "--purge-compacted", "--older-than", "0s")
        earlier.onto(*collect, "--apply")
        assert earlier.onto(*collect)["doomed"] == []
        assert not any(earlier.path.glob("commits/*-0dead0ad"))
        assert not any(earlier.path.glob("staged/*/entities/Unwritten"))
    earlier.onto("tag", "delete", "later")

    restored = earlier.onto("restore", "spring", "--apply")
    assert restored["new_commit_id"] == head + 1
    with earlier.session() as session:
        for cls in (*ENTITIES, *RELATIONS):
            kind = KINDS[cls.__name__]
            now = {
                identity_of(kind, row): row
                for row in (row_of(kind, item) for item in everything_in(session, cls))
            }
            for row in earlier.past.visible(kind, spring):
                assert now[identity_of(kind, row)] | {"commit_id": row["commit_id"]} == row

    staff = Staff(strict=False)
    with earlier.session() as session:
        due = earlier.facts["events"]["due"]
        work_off(session, staff.handlers(handler for handler, _ in due))
        assert sorted(map(list, staff.given)) == due
        counted = events.counts(earlier.onto)
        assert earlier.onto("events", "cleanup", "--older-than", "0s", "--apply")["events"] > 0
        work_off(session, staff.handlers())
    assert events.counts(earlier.onto)["archive"] == counted["archive"]
    assert len(earlier.onto("events", "dead-letters")["dead_letters"]) == 1
    assert len(staff.given) == len(due)
    assert earlier.wrong_past() == []
    earlier.check()
    earlier.check_indices()


@pytest.mark.parametrize("earlier", ARCHIVES[-1:], indirect=True, ids=["newest"])
def test_differences_are_noticed(earlier: Earlier) -> None:
    """So that equal answers above mean something."""
    with earlier.session() as session, earlier.namesakes() as namesakes:
        said = read_everything(session, namesakes, earlier.facts)
    for label, rows in earlier.facts["history"].items():
        lost = {**earlier.facts, "history": {**earlier.facts["history"], label: rows[:-1]}}
        assert f"{label} history" in " ".join(differences(said, expected_reads(lost)))
    changed = {**earlier.facts["history"]["Customer"][0]}
    assert (changed["id"], changed["extra"]) == ("..", True)
    for extra in (1, 1.0, None, "true"):
        rows = [{**changed, "extra": extra}, *earlier.facts["history"]["Customer"][1:]]
        facts = {**earlier.facts, "history": {**earlier.facts["history"], "Customer": rows}}
        found = " ".join(differences(said, expected_reads(facts)))
        for part in ("latest", "history", "in SQL"):
            assert f"Customer {part}: [0].extra is true" in found


def test_its_types_migrate(earlier: Earlier) -> None:
    """Rows that an earlier version wrote become rows of new schema versions, in one commit."""

    class WiderProduct(Entity, name="Product"):
        sku: Field[str] = Field(primary_key=True)
        name: Field[str] = Field(renamed_from="title")
        price: Field[float]
        stock: Field[float | None] = Field(default=None)
        released: Field[datetime | None] = Field(default=None)
        manual: Field[str] = Field(default="")
        origin: Field[str] = Field(default="here")

    class WiderOwns(Relation[Customer, Product], name="Owns"):
        seats: Field[float]
        note: Field[str | None] = Field(default=None)
        places: Field[list[str]] = Field(default_factory=list)

    with earlier.session() as session:
        products = {p.sku: p for p in session.query().entities(Product).collect()}
        owned = {(o.left_key, o.right_key): o for o in session.query().relations(Owns).collect()}
        assert products
        assert owned
    with Session(earlier.path, entity_types=[WiderProduct], relation_types=[WiderOwns]) as session:
        done = session.migrate(dry_run=False, force=True)
        assert done.commit_id == session.repository.head_commit_id() > earlier.head
        now = session.query().entities(WiderProduct).collect()
        assert {p.sku: (p.name, p.price, p.stock, p.released, p.origin) for p in now} == {
            sku: (p.title, p.price, p.stock, p.released, "here") for sku, p in products.items()
        }
        relations = session.query().relations(WiderOwns).collect()
        assert {(o.left_key, o.right_key): (o.seats, o.note, o.places) for o in relations} == {
            ends: (o.seats, o.note, []) for ends, o in owned.items()
        }
        (raw, *_) = session.query().raw("Product", schema_version=1).collect()
        assert raw["title"] == products[raw["sku"]].title
        session.ensure(now[0].replace(origin="there"))
        session.commit()
    earlier.check()
    earlier.check_indices()
