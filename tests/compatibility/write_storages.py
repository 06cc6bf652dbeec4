"""Writes the storages that every later version must be able to open, and what must be in them.

    python -m tests.compatibility.write_storages LABEL [NAME ...]

makes tests/compatibility/storages/LABEL/NAME.tar.gz and NAME.json, for all names unless some are
given. LABEL is the version that writes them. Storages are written once and never changed; when
the format changes, write new ones under the new version's label, beside the old.

Everything goes through the public API, except for what a crash leaves: a state that the protocol
allows (docs/protocol.md, docs/operations.md "What a crash leaves") and that no call can ask for
is made by putting objects back as they were a step before.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage_engine import OntologiaConfig, Schedule, Session, initialize_storage
from tests.compatibility import events
from tests.compatibility.command_line import ROOT, onto_process
from tests.compatibility.facts import (
    differences,
    exact,
    expected_reads,
    identity_of,
    read_everything,
    row_of,
)
from tests.compatibility.killed import PART_BYTES
from tests.compatibility.shop import (
    ENTITIES,
    KINDS,
    RELATIONS,
    CloseDay,
    Customer,
    Invoice,
    Kind,
    Knows,
    Namesake,
    OrderPlaced,
    Owns,
    ParcelReady,
    Product,
    Purchase,
    Staff,
    work_off,
)

STORAGES = Path(__file__).parent / "storages"

_NOON = datetime(2024, 1, 31, 12, 0, 0, 250_000, UTC)
_CONFIG = OntologiaConfig(
    runtime_id="fixtures",
    checkpoint_interval=4,
    target_part_bytes=PART_BYTES,
    event_max_attempts=2,
    event_backoff_base_ms=0,
)
_BACKOFF_MS = 1500
_SCHEMAS = {
    "Product": pa.schema(
        [
            ("sku", pa.string()),
            ("title", pa.string()),
            ("price", pa.float64()),
            ("stock", pa.int64()),
            ("released", pa.timestamp("us", "UTC")),
            ("manual", pa.string()),
        ]
    ),
    "Purchase": pa.schema(
        [
            ("left_key", pa.string()),
            ("right_key", pa.string()),
            ("receipt", pa.string()),
            ("paid", pa.float64()),
            ("at", pa.timestamp("us", "UTC")),
            ("coupons", pa.list_(pa.string())),
        ]
    ),
}


# --- a storage in the making ------------------------------------------------------------------


@dataclass
class Writing:
    """A storage, and what was stated about it so far."""

    folder: Path  # holds the storage alone
    backend: str
    engine: str
    head: int = 0
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    latest: dict[str, dict[tuple[str, ...], dict[str, Any]]] = field(default_factory=dict)
    commits: dict[int, dict[str, Any]] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    idempotency: list[dict[str, Any]] = field(default_factory=list)
    due: list[list[str]] = field(default_factory=list)  # handler, event: what is left to do
    acked: list[list[str]] = field(default_factory=list)  # what no handler may be given again
    acked_in_log: list[list[str]] = field(default_factory=list)  # the same, and no claim says so
    unprojected: list[str] = field(default_factory=list)
    lagging: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / ("shop.db" if self.backend == "sqlite" else "shop")

    def session(self, *, namespace: str = "default", **settings: Any) -> Session:
        return Session(
            self.path,
            entity_types=ENTITIES,
            relation_types=RELATIONS,
            config=_CONFIG.model_copy(update=settings),
            namespace=namespace,
            instance_metadata={"till": "3"},
        )

    def namesakes(self) -> Session:
        return Session(self.path, relation_types=[Namesake], config=_CONFIG)

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.path}" if self.backend == "sqlite" else self.path.as_uri()

    def onto(self, *args: str | Path) -> Any:
        return onto_process("--json", *args, "--storage-uri", self.uri).json

    def commit(self, *objects: Any, bulk: Sequence[Sequence[Any]] = (), **terms: Any) -> None:
        """One commit of objects, and of batches of objects by `ingest`."""
        apart = any(isinstance(item, Namesake) for item in objects)
        with self.namesakes() if apart else self.session() as session:
            session.ensure(objects)
            for kind, batches in _by_kind(bulk):
                session.ingest(kind.cls, _reader(kind, batches))
            commit_id = session.commit(**terms)
        everything = [*objects, *(item for batch in bulk for item in batch)]
        self.stated(commit_id, everything, terms.get("meta", {}))
        if "idempotency" in terms:
            app_id, version = terms["idempotency"]
            mark = {"app_id": app_id, "version": version, "commit_id": commit_id}
            self.idempotency.append(mark)

    def stated(self, commit_id: int | None, objects: Iterable[Any], meta: dict[str, str]) -> None:
        """Note what a commit brings: objects that differ from what is known of them."""
        self.head += 1
        assert commit_id == self.head, f"commit {commit_id} instead of {self.head}"
        changed: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
        for item in objects:
            kind = next(kind for kind in KINDS.values() if kind.cls is type(item))
            row = row_of(kind, item)
            changed.setdefault(kind.label, {})[identity_of(kind, row)] = row
        names = set()
        for label, rows in changed.items():
            known = self.latest.setdefault(label, {})
            for identity, row in sorted(rows.items()):
                if exact(known.get(identity)) != exact(row):
                    known[identity] = row
                    versions = self.history.setdefault(label, [])
                    versions.append({**row, "commit_id": commit_id})
                    names.add(KINDS[label].stored_name)
        self.commits[self.head] = {"metadata": meta, "types": sorted(names)}

    def tag(self, name: str, commit_id: int | None = None) -> None:
        self.onto("tag", "create", name, *([str(commit_id)] if commit_id else []))
        self.tags[name] = commit_id or self.head

    def billed(self, order_id: str, amount: int) -> None:
        """Note the commit of the handler `shop.bill`."""
        self.stated(self.head + 1, [Invoice(id=order_id, amount=amount)], {"handler": "bill"})
        self.acked.append(["shop.bill", order_id])

    def drain(self, *only: str, staff: Staff | None = None, **settings: Any) -> Any:
        with self.session(**settings) as session:
            return work_off(session, (staff or Staff()).handlers(only))

    def facts(self) -> dict[str, Any]:
        with self.session() as session:
            commits = session.list_commits(limit=1000)
        for commit in commits:
            stated = self.commits[commit["id"]]
            assert commit["parent_id"] == (commit["id"] - 1 or None), commit
            assert commit["kind"] == "data", commit
            assert commit["metadata"] == stated["metadata"], commit
            assert sorted(set(commit["types"])) == stated["types"], (commit, stated)
        assert [commit["id"] for commit in commits] == sorted(self.commits, reverse=True)
        listed = events.listed(self.onto)
        due = [
            *self.due,
            *_of_type(listed, "event.dead_letter", "shop.alarm"),
            *_of_type(listed, "CloseDay", "shop.close"),
        ]
        acked = [*self.acked, *_of_type(listed, "order.billed", "shop.thank")]
        claims = [
            [claim["handler_id"], event["id"]]
            for event in listed["default"]
            for claim in event["claims"]
            if claim["acked"]
        ]
        assert sorted(claims) == sorted(acked), (claims, acked)
        return {
            "backend": self.backend,
            "engine": self.engine,
            "head": self.head,
            "commits": commits,
            "tags": self.tags,
            "idempotency": self.idempotency,
            "lagging": self.lagging,
            "events": {
                **listed,
                "due": sorted(due),
                "acked": sorted([*acked, *self.acked_in_log]),
                "unprojected": self.unprojected,
            },
            "history": self.history,
        }


def _of_type(listed: dict[str, Any], type: str, handler_id: str) -> list[list[str]]:
    """A handler with each event of a type; the bus chose their ids."""
    found = [[handler_id, event["id"]] for event in listed["default"] if event["type"] == type]
    assert found, f"there is no event {type}"
    return found


def _by_kind(bulk: Sequence[Sequence[Any]]) -> Iterator[tuple[Kind, list[Sequence[Any]]]]:
    for kind in KINDS.values():
        batches = [batch for batch in bulk if type(batch[0]) is kind.cls]
        if batches:
            yield kind, batches


def _reader(kind: Kind, batches: Sequence[Sequence[Any]]) -> pa.RecordBatchReader:
    schema = _SCHEMAS[kind.label]
    made = [
        pa.record_batch(
            [pa.array([getattr(i, f.name) for i in batch], f.type) for f in schema], schema=schema
        )
        for batch in batches
    ]
    return pa.RecordBatchReader.from_batches(schema, made)


# --- the shop's story -------------------------------------------------------------------------


def _customers() -> list[Customer]:
    """Values that are easily lost: limits, empty ones, what is equal in Python but not in JSON."""
    return [
        Customer(
            id="ann",
            name='Ann "A", B\nC\\',
            tier="Gold",
            points=2**63 - 1,
            credit=0.1 + 0.2,
            active=False,
            joined=_NOON,
            birthday=date(1815, 12, 10),
            photo=bytes(range(256)),
            nickname="",
            age=0,
            rating=5e-324,
            verified=False,
            last_seen=datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC),
            married=date(9999, 12, 31),
            signature=b"",
            tags=["vip", "", "a,b", "vip"],
            lucky=[7, None, -(2**53) - 1],
            counts={"é": 1, "two words": -1},
            address={
                "city": "Bern",
                "since": date(2020, 2, 29),
                "seal": b"\x00\xff",
                "former": [{"city": "Zürich", "former": []}],
            },
            visits=[{"page": "home", "at": _NOON, "seconds": 1}, {"page": "a/b", "seconds": 1.0}],
            contact=41,
            remark=date(2024, 2, 29),
            extra={"list": [0, 0.0, False, None, "0", {}], "two words": {"a.b": []}},
        ),
        Customer(id="bob", name="", joined=_NOON, birthday=date(1, 1, 1)),
        Customer(
            id="Zoë/1 %2F",
            name="Zoë \U0001f600",
            points=-(2**63),
            credit=-1.7976931348623157e308,
            joined=datetime(1, 1, 1, tzinfo=UTC),
            birthday=date(1970, 1, 1),
            verified=True,
            contact="41",
            remark=["x"],
            extra="text",
        ),
        Customer(
            id="長い鍵 'quoted'", name="\x00\x7f", joined=_NOON, birthday=_NOON.date(), extra=1
        ),
        Customer(id="_eve", name="eve", joined=_NOON, birthday=_NOON.date(), extra=1.0),
        Customer(id="..", name="dots", joined=_NOON, birthday=_NOON.date(), extra=True),
    ]


def _changed(item: Any, **values: Any) -> Any:
    kind = next(kind for kind in KINDS.values() if kind.cls is type(item))
    return type(item)(**{**{name: getattr(item, name) for name in kind.columns}, **values})


def _products(numbers: Iterable[int], price: float = 1.0) -> list[Product]:
    return [
        Product(
            sku=f"p{n:03}",
            title=f"Product {n}",
            price=price * n,
            stock=n if n % 3 else None,
            released=_NOON + timedelta(days=n) if n % 2 else None,
        )
        for n in numbers
    ]


def _purchases(numbers: Iterable[int], paid: float = 1.0) -> list[Purchase]:
    return [
        Purchase(
            left_key="ann" if n % 2 else "bob",
            right_key=f"p{n % 5:03}",
            receipt=f"r-{n}",
            paid=paid * n,
            at=_NOON + timedelta(hours=n),
            coupons=["half"] * (n % 3),
        )
        for n in numbers
    ]


def open_shop(shop: Writing) -> None:
    """Eleven commits: the first of every type, updates, rows that stay as they are; orders that are
    handled, and one that ends as a dead letter."""
    people = _customers()
    ann, bob, zoe = people[:3]
    knows = [
        Knows(left_key="ann", right_key="bob"),
        Knows(left_key="bob", right_key="ann"),
        Knows(left_key=zoe.id, right_key=".."),
    ]
    shop.commit(
        *people,
        *knows,
        meta={"source": "crm", "said by": "Zoë ☃"},
        idempotency=("import", 1),
    )
    manual = "Read this first. " * (PART_BYTES // 16)
    with_manual = Product(sku="p000", title="Engine", price=0.5, manual=manual)
    shop.commit(
        bulk=[[with_manual], _products(range(1, 25))],  # so large that it goes into two files
        meta={"source": "catalogue"},
        idempotency=("import", 2),
    )
    shop.tag("opening", 1)
    shop.commit(
        Owns(left_key="ann", right_key="p001", seats=1),
        Owns(left_key="ann", right_key="p000", seats=2, note="shared"),
        Owns(left_key=zoe.id, right_key="p001", seats=0, note=""),
        *_purchases(range(4)),
    )
    shop.commit(Namesake(left_key="ann", right_key="p002"))
    shop.commit(
        _changed(ann, tier="Platinum", tags=[], address=None),
        _changed(bob, tier="Gold", nickname="Bobby"),
        zoe,  # as it is
        bulk=[_purchases(range(2, 12), paid=1.5)],
        idempotency=("nightly", "2024-05-01"),
    )
    shop.tag("spring")
    shop.commit(
        bulk=[[*_products(range(1, 21)), *_products(range(21, 28), price=1.25)]],
        meta={"source": "catalogue"},
    )
    shop.commit(
        _changed(ann, tier="Platinum", tags=["vip"]),
        event=OrderPlaced(id="order-1", order_id="order-1", amount=10, placed=_NOON),
    )
    shop.drain("shop.bill", "shop.thank")
    shop.billed("order-1", 10)
    with shop.session() as session:
        session.emit(OrderPlaced(id="order-2", order_id="order-2", amount=20, priority=7))
    shop.drain("shop.bill", "shop.thank")
    shop.billed("order-2", 20)
    with shop.session() as session:
        session.emit(OrderPlaced(id="order/3 ü", order_id="order-3", amount=-1, lines=["p001"]))
    while not shop.drain("shop.bill", "shop.thank").dead_lettered:
        time.sleep(0.1)  # for its next attempt
    shop.commit(
        Invoice(id="order-2", amount=21),
        Invoice(id="by hand", amount=0),
        idempotency=("nightly", "2024-05-02"),
    )
    shop.commit(
        Namesake(left_key="ann", right_key="p002", weight=2),
        Namesake(left_key="bob", right_key="p003", weight=3),
    )


def go_on(shop: Writing) -> None:
    """Three more commits, and a tag."""
    _, bob, zoe, far, eve, _ = _customers()
    shop.commit(
        _changed(bob, tier="Gold", nickname=None),
        _changed(zoe, photo=b"new", contact=7),
        Customer(id="new", name="New", joined=_NOON, birthday=_NOON.date(), age=18),
        Knows(left_key="new", right_key="ann"),
        meta={"source": "crm"},
    )
    shop.commit(
        _changed(far, extra=None),
        Owns(left_key="ann", right_key="p001", seats=5),
        bulk=[_purchases(range(10, 14), paid=2.0), _products(range(25, 30), price=2.0)],
        idempotency=("import", 7),
    )
    shop.tag("release-7:a+b@c")
    shop.commit(_changed(eve, name="Eve", extra=[1, 1.0, True]))


def fail_once(shop: Writing) -> None:
    """An event that waits for its next attempt."""
    with shop.session() as session:
        session.emit(OrderPlaced(id="order-4", order_id="order-4", amount=-4))
    done = shop.drain("shop.bill", event_max_attempts=10, event_backoff_base_ms=_BACKOFF_MS)
    assert done.failed >= 1, done
    assert done.dead_lettered == 0, done
    shop.due.append(["shop.bill", "order-4"])


def leave_work(shop: Writing) -> None:
    """Events that nobody has handled: of a worker that died, of the clock, by themselves, of
    another namespace, with a commit."""
    with shop.session() as session:
        session.emit(ParcelReady(id="parcel-1", seal=b"\x00\xff"))
    _kill_worker(shop)
    with shop.session() as session:
        every_minute = Schedule(event=CloseDay, cron="* * * * *")
        thank = Staff().handlers(only=["shop.thank"])
        fired = session.run(thank, schedules=[every_minute], max_iterations=1).fired
    assert fired, "a minute has passed since the last full one"
    with shop.session() as session:
        session.emit(
            OrderPlaced(
                id="order-5", order_id="order-5", amount=50, created_at=_NOON, lines=["a", "b"]
            )
        )
    with shop.session(namespace="archive") as session:
        session.emit(OrderPlaced(id="order-5", order_id="archived", amount=1))
    shop.commit(
        *_products([30]),
        event=[
            OrderPlaced(id="order-6", order_id="order-6", amount=60),
            ParcelReady(id="parcel-2"),
        ],
        meta={"till": "3"},
    )
    shop.due += [
        ["shop/send parcel", "parcel-1"],
        ["shop/send parcel", "parcel-2"],
        ["shop.bill", "order-5"],
        ["shop.bill", "order-6"],
    ]


def _kill_worker(shop: Writing) -> None:
    """Its claim stays, with a lease that has run out, and so does its session."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "worker.toml"
        config.write_text('runtime_id = "killed"\nevent_lease_ms = 100\n')
        done = onto_process(
            *("events", "run", "--drain", "--handlers", "tests.compatibility.killed"),
            *("--storage-uri", shop.uri, "--config", config),
        )
    assert done.code == -signal.SIGKILL, done


def let_time_pass(_: Writing) -> None:
    """Until what was handled so far is behind the handlers' watermarks, five minutes back."""
    time.sleep(310)


# --- maintenance ------------------------------------------------------------------------------


def compact(shop: Writing) -> None:
    done = shop.onto("compact", "--apply")
    assert done["report"]["runs"], "there was nothing to compact"


def purge(shop: Writing) -> None:
    done = shop.onto("gc", "--purge-compacted", "--older-than", "0s", "--apply")
    assert "replaced by a snapshot" in done["deleted"]["reasons"], done


# --- crashes ----------------------------------------------------------------------------------


def lose_ack(shop: Writing) -> None:
    """A worker died between the commit that handled an event and the end of its claim: the log
    alone knows that the event is done. Its position was not kept either."""
    claims = shop.path / "claims/default"
    position = shop.path / "events/default/_positions/shop.bill.json"
    before = position.read_bytes()
    held: dict[Path, bytes] = {}

    def look(event_id: str) -> None:
        held.update(
            (p, p.read_bytes()) for p in claims.rglob("*.json") if p.parent.name == event_id
        )

    with shop.session() as session:
        session.emit(OrderPlaced(id="order-7", order_id="order-7", amount=70))
    shop.drain("shop.bill", staff=Staff(on_bill=look), event_lease_ms=1000)
    shop.billed("order-7", 70)
    shop.acked_in_log.append(shop.acked.pop())
    assert len(held) == 1
    for path, data in [*held.items(), (position, before)]:
        path.write_bytes(data)
    shop.drain("shop.thank")


def die_after_commit(shop: Writing) -> None:
    """A writer died right after its commit stood: nothing that follows a commit was done, and the
    lock is still there. Before, others had lost an index and left half an attempt behind."""
    lock = shop.path / "meta/locks/ontology_write.json"
    index = shop.path / "meta/indices/entities/Product.json"
    gone = shop.path / "meta/indices/relations/Owns.json"
    before = index.read_bytes()
    with shop.session(s3_lease_ttl_ms=3000) as session:
        products = _products([31], price=2.0)
        session.ensure(products)
        commit_id = session.commit(
            event=OrderPlaced(id="order-8", order_id="order-8", amount=80), meta={"till": "4"}
        )
        held = lock.read_bytes()  # kept for a moment, in case the session commits again
    shop.stated(commit_id, products, {"till": "4"})
    assert not lock.exists()
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_bytes(held)
    index.write_bytes(before)
    gone.unlink()
    [event] = (shop.path / "events/default").glob("*_order-8.json")
    event.unlink()
    shop.due.append(["shop.bill", "order-8"])
    shop.unprojected.append("order-8")
    shop.lagging += ["Owns", "Product"]
    commits = shop.path / "commits"
    [attempt] = commits.glob(f"{commit_id}-*")
    unfinished = commits / f"{shop.head + 1}-0dead0ad"
    shutil.copytree(attempt, unfinished, ignore=shutil.ignore_patterns("manifest.json"))


def kill_bulk_load(shop: Writing) -> None:
    """It leaves parts that nobody will publish, and its heartbeat."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.compatibility.killed", shop.path],
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": folder},
        )
    assert done.returncode == -signal.SIGKILL, done


# --- all of them ------------------------------------------------------------------------------

Step = Callable[[Writing], None]

_PLAIN: list[Step] = [open_shop, go_on, fail_once, leave_work]
_COMPACTED: list[Step] = [open_shop, compact, go_on, fail_once, leave_work]
_PURGED: list[Step] = [open_shop, compact, go_on, compact, purge, fail_once, leave_work]
_CRASHED: list[Step] = [open_shop, go_on, fail_once, lose_ack, leave_work, die_after_commit]

STORIES: dict[str, tuple[str, str, list[Step]]] = {
    "directory-v1": ("directory", "v1", _PLAIN),
    "directory-v2": ("directory", "v2", [open_shop, let_time_pass, *_PLAIN[1:]]),
    "directory-v1-compacted": ("directory", "v1", _COMPACTED),
    "directory-v2-compacted": ("directory", "v2", _COMPACTED),
    "directory-v2-purged": ("directory", "v2", _PURGED),
    "directory-v1-crashed": ("directory", "v1", _CRASHED),
    "directory-v2-crashed": ("directory", "v2", [*_CRASHED[:3], kill_bulk_load, *_CRASHED[3:]]),
    "sqlite-v1": ("sqlite", "v1", _PLAIN),
    "sqlite-v2": ("sqlite", "v2", _PLAIN),
}


def write(name: str, target: Path) -> None:
    """Make one storage and its facts, and see that it says them."""
    backend, engine, story = STORIES[name]
    with tempfile.TemporaryDirectory() as folder:
        shop = Writing(Path(folder), backend, engine)
        initialize_storage(shop.path, engine)
        for step in story:
            step(shop)
        time.sleep(2 * _BACKOFF_MS / 1000 + 1)  # until all leases and pauses are over
        facts = shop.facts()
        with shop.session() as session, shop.namesakes() as namesakes:
            said = read_everything(session, namesakes, facts)
        wrong = differences(said, expected_reads(facts))
        assert not wrong, "\n".join([f"{name} does not say what was stated", *wrong])
        target.mkdir(parents=True, exist_ok=True)
        pack(shop.folder, target / f"{name}.tar.gz")
        written = json.dumps(facts, indent=1, ensure_ascii=False, sort_keys=True)
        (target / f"{name}.json").write_text(f"{written}\n", encoding="utf-8")


def pack(folder: Path, archive: Path) -> None:
    """With the times of files: what is old when it is packed must be so when it is unpacked."""
    with (
        archive.open("xb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            info = tar.gettarinfo(path, arcname=path.relative_to(folder).as_posix())
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            with path.open("rb") as file:
                tar.addfile(info, file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write storages for later versions to open.")
    parser.add_argument("label", help="the version that writes them, such as 0.1.0")
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(STORIES))
    given = parser.parse_args()
    for name in given.names or STORIES:
        write(name, STORAGES / given.label)
        print(name)


if __name__ == "__main__":
    main()
