"""Imports into the simulated store: a fault at each write. Whatever happens, the whole import is
there or nothing of it, and running it again makes it so, once."""

from __future__ import annotations

import io
import json
from contextlib import closing

import pytest

from storage_engine.errors import OntologiaError
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.runtime.exchange import ImportReport, import_types, load, spool
from storage_engine.testing.faults import READS, FaultKind
from tests.commitlog.support import World, Writer, new_world
from tests.engines import CUSTOMER, PRODUCT, customer, rows_of

pytestmark = pytest.mark.simulation

DECLARED = {CUSTOMER.ref: CUSTOMER, PRODUCT.ref: PRODUCT}
RECORDS = [
    {"type": "Customer", "key": "a", "fields": {"name": "Ann", "age": 2}},
    {"type": "Customer", "key": "b", "fields": {"name": "Bob", "age": 3}},
    {"type": "Product", "key": "p", "fields": {"price": 1.5}},
]


def imported(writer: Writer) -> ImportReport:
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
    report = import_types(
        writer.repo,
        io.BytesIO(lines),
        declared=DECLARED,
        apply=True,
        on_conflict="upsert",
        file_format="jsonl",
    )
    report.require()
    return report


def begun(engine_version: str) -> tuple[World, Writer]:
    """A storage with one customer that the import changes."""
    world = new_world(engine_version)
    world.open("before").commit(rows_of(CUSTOMER, customer("a", age=1)))
    return world, world.open("import")


def check(world: World, *, done: bool) -> None:
    """All types, or none; and in one commit."""
    reader = world.open("reader")
    whole = reader.repo.head_commit_id() == 2
    assert reader.repo.head_commit_id() in (1, 2)
    assert whole or not done
    assert reader.ages() == ({"a": 2, "b": 3} if whole else {"a": 1})
    assert len(reader.rows(PRODUCT)) == (1 if whole else 0)
    reader.close()
    world.writers.remove(reader)


@pytest.mark.parametrize(
    ("engine_version", "kind", "bulk"),
    [
        ("v1", FaultKind.CRASH_AFTER, False),
        ("v2", FaultKind.CRASH_AFTER, True),
        ("v2", FaultKind.RESPONSE_LOST, False),
        ("v2", FaultKind.RESPONSE_LOST, True),
    ],
)
def test_an_import_is_whole_or_nothing_after_a_fault_at_each_write(
    engine_version: str, kind: FaultKind, bulk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bulk:
        monkeypatch.setattr(load, "AT_HAND", 0)
        monkeypatch.setattr(spool, "AT_HAND", 0)
    seen: list[str] = []
    world, writer = begun(engine_version)
    with closing(world):
        writer.store.on_request(lambda request, _key: seen.append(request))
        assert imported(writer).commit_id == 2
        check(world, done=True)
    writes = [number for number, request in enumerate(seen, start=1) if request not in READS]
    assert len(writes) >= 6
    failed = 0
    for number in writes:
        world, writer = begun(engine_version)
        with closing(world):
            writer.fail(kind, "*", "*", nth=number)
            try:
                imported(writer)
            except (SimulatedCrash, OntologiaError):
                failed += 1
            check(world, done=False)
            world.pass_lease()
            imported(world.open("again"))
            check(world, done=True)
    if kind is FaultKind.CRASH_AFTER:
        assert failed >= 3  # the others are projections, after the commit
