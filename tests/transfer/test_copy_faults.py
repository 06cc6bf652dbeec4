"""Copies into the simulated store: a fault at each write, rivals, a source that moves on.

Whatever happens, the target is a whole prefix of the source, and running the copy again makes it
the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from storage_engine.commitlog import layout
from storage_engine.config import OntologiaConfig
from storage_engine.errors import CopyRefusedError, OntologiaError
from storage_engine.events.protocol import open_event_store
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.repository import Idempotency, ReadWindow
from storage_engine.testing.faults import READS, FaultKind
from storage_engine.transfer import CopyReport, copy_repository, runs
from storage_engine.transfer.compare import compare_storages
from tests.commitlog.support import World, Writer, new_world
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of

pytestmark = pytest.mark.simulation

HISTORY = ReadWindow(history=True)
ENVELOPE = {
    "id": "e1",
    "type": "Placed",
    "namespace": "default",
    "payload": {"number": 1},
    "created_at": "2024-01-01T00:00:00.000000+00:00",
    "priority": 100,
    "root_event_id": "e1",
    "chain_depth": 0,
}


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several swaps of head for a few commits."""
    monkeypatch.setattr(runs, "RUN_COMMITS", 2)


@pytest.fixture(scope="module")
def origin() -> Iterator[Writer]:
    """A source of three commits, with a tag, an event and units of work."""
    with closing(new_world("v2")) as world:
        writer = world.open("origin", checkpoint_interval=2)
        writer.put(customer("a", age=1), customer("b"))
        writer.commit(rows_of(PRODUCT, product("p")), events=[ENVELOPE])
        writer.put(customer("a", age=3), idempotency=Idempotency("loader", 1))
        same = rows_of(CUSTOMER, customer("a", age=3))
        assert writer.commit(same, idempotency=Idempotency("loader", 2)) is None
        writer.repo.create_tag("early", 2)
        writer.repo.flush()
        yield writer


@contextmanager
def empty_target(engine_version: str = "v2") -> Iterator[tuple[World, Writer]]:
    with closing(new_world(engine_version)) as world:
        yield world, world.open("copy", checkpoint_interval=2)


def copied(origin: Writer, target: Writer) -> CopyReport:
    return copy_repository(origin.repo, target.repo, verify=False)


def check_prefix(origin: Writer, world: World) -> None:
    """What is committed is what the source has, as far as it goes."""
    reader = world.open("reader")
    head = reader.repo.head_commit_id()
    ours, theirs = (each.repo.history.commits(0, head) for each in (origin, reader))
    assert [commit.facts() for commit in theirs] == [commit.facts() for commit in ours]
    assert stored(reader) == [row for row in stored(origin) if row[0] <= head]
    _closed(world, reader)


def stored(reader: Writer) -> list[tuple[int, str, int]]:
    """All versions of customers, from the files that a query would open."""
    versions = reader.repo.versions
    entries = versions.resolve(CUSTOMER, reader.repo.chain.read_head().head).entries
    rows = versions._scanner.table(CUSTOMER, entries).to_pylist()
    return sorted((r["commit_id"], r["entity_key"], r["age"]) for r in rows)


def check_whole(origin: Writer, world: World, *, queries: bool = False) -> None:
    check_prefix(origin, world)
    reader = world.open("reader")
    assert reader.repo.head_commit_id() == origin.repo.head_commit_id()
    assert [tag.name for tag in reader.repo.list_tags()] == ["early"]
    assert reader.repo.applied(Idempotency("loader", 2)) is not None
    bus = open_event_store(reader.repo, OntologiaConfig())
    assert [event.name for event in bus.carried()] == [("default", "e1")]
    assert reader.repo.index_warnings() == []
    if queries:
        assert compare_storages(origin.repo, reader.repo).differences == ()
        assert reader.rows(CUSTOMER, HISTORY) == origin.rows(CUSTOMER, HISTORY)
    _closed(world, reader)


def _closed(world: World, reader: Writer) -> None:
    reader.close()
    world.writers.remove(reader)


@pytest.mark.parametrize("engine_version", ["v1", "v2"])
@pytest.mark.parametrize("kind", [FaultKind.CRASH_AFTER, FaultKind.RESPONSE_LOST])
def test_a_copy_goes_on_after_a_fault_at_each_write(
    origin: Writer, engine_version: str, kind: FaultKind
) -> None:
    seen: list[str] = []
    with empty_target(engine_version) as (world, target):
        target.store.on_request(lambda kind, _key: seen.append(kind))
        copied(origin, target)
        check_whole(origin, world, queries=True)
    writes = [number for number, kind in enumerate(seen, start=1) if kind not in READS]
    assert len(writes) > 15
    failed = 0
    for number in writes:
        with empty_target(engine_version) as (world, target):
            target.fail(kind, "*", "*", nth=number)
            try:
                copied(origin, target)
            except (SimulatedCrash, OntologiaError):
                failed += 1
                check_prefix(origin, world)
                world.pass_lease()
                copied(origin, world.open("again", checkpoint_interval=2))
            check_whole(origin, world)
    if kind is FaultKind.CRASH_AFTER:
        assert failed == len(writes)


def test_two_copies_into_one_target(origin: Writer) -> None:
    """The second one comes between two runs of the first: it wins, and the first says so."""
    with empty_target() as (world, first):
        second = world.open("second")
        begun = False

        def cut_in(kind: str, key: str) -> None:
            nonlocal begun
            if not begun and kind == "PUT_IF" and key == layout.HEAD:
                begun = True
                world.pass_lease()
                copied(origin, second)

        first.store.on_request(cut_in)
        with pytest.raises((CopyRefusedError, OntologiaError)) as refused:
            copied(origin, first)
        assert "again" in str(refused.value)
        check_whole(origin, world)


def test_a_source_that_moves_on_is_copied_up_to_where_it_was() -> None:
    with closing(new_world("v2")) as elsewhere:
        source = elsewhere.open("source")
        source.put(customer("a"))
        source.repo.flush()
        with empty_target() as (_, target):
            moved = False

            def move(kind: str, key: str) -> None:
                nonlocal moved
                if not moved and kind == "PUT_IF" and key == layout.HEAD:
                    moved = True
                    source.put(customer("b"))
                    source.repo.flush()

            target.store.on_request(move)
            report = copied(source, target)
            assert (report.upto, report.behind) == (1, 1)
            assert target.repo.head_commit_id() == 1
            assert copied(source, target).commits == 1
            assert target.history() == source.history()


def test_orphans_of_a_crash_are_garbage(origin: Writer) -> None:
    """Nothing names them, and collection takes them."""
    from datetime import timedelta

    from storage_engine.maintenance.gc import plan_gc, sweep

    with empty_target() as (world, target):
        target.fail(FaultKind.CRASH_BEFORE, "PUT_IF", layout.HEAD)
        with pytest.raises(SimulatedCrash):
            copied(origin, target)
        assert world.orphans() != []
        world.pass_lease()
        again = world.open("again")
        copied(origin, again)
        sweep(again.repo, plan_gc(again.repo, grace=timedelta(0)))
        assert world.orphans() == []
        check_whole(origin, world)
