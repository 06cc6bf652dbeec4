"""Compaction on the simulated store: crashes, lost answers, rivals, stalls, planted defects.

What must hold whatever happens: every read made before is the same after, and running compaction
again finishes the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
import pytest

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.records import Entry
from storage_engine.errors import (
    IntegrityError,
    LeaseExpiredError,
    OntologiaError,
    StorageBackendError,
)
from storage_engine.maintenance.compaction import (
    CompactionPolicy,
    CompactionReport,
    compact,
    merge,
    plan_compaction,
)
from storage_engine.objectstore.memory import MemoryBackend, SimulatedCrash
from storage_engine.repository import ReadWindow
from storage_engine.testing.faults import READS, Fault, FaultKind, FaultPlan, FaultRule
from tests.commitlog.support import World, Writer, at, new_world
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of, stream_of

pytestmark = pytest.mark.simulation

EAGER = CompactionPolicy(min_entries=2)
Reads = dict[str, list[dict[str, Any]]]


def reads(world: World) -> Reads:
    """What a fresh reader sees of everything."""
    reader = world.open("reader")
    try:
        found: Reads = {}
        for spec in (CUSTOMER, PRODUCT):
            for window in (ReadWindow(), ReadWindow(as_of=2), ReadWindow(history=True)):
                found[f"{spec.name} {window}"] = reader.rows(spec, window)
        return found
    finally:
        reader.close()
        world.writers.remove(reader)


def stored(world: World) -> list[tuple[int, str, int]]:
    """All versions of customers, from the files that a query would open."""
    reader = world.open("reader")
    try:
        versions = reader.repo._versions
        found = versions.resolve(CUSTOMER, reader.repo.chain.read_head().head).entries
        rows = versions._scanner.table(CUSTOMER, found).to_pylist()
        return sorted((r["commit_id"], r["entity_key"], r["age"]) for r in rows)
    finally:
        reader.close()
        world.writers.remove(reader)


def same(world: World, stage: Stage, *, queries: bool) -> bool:
    return reads(world) == stage.reads if queries else stored(world) == stage.stored


def entries(writer: Writer, spec: Any = CUSTOMER) -> tuple[Entry, ...]:
    chain = writer.repo.chain
    return state.current_checkpoint(chain, chain.read_head().head).entries[spec.ref]


def resolved(world: World) -> list[Entry]:
    """What a reader opens, by the index."""
    reader = world.open("reader")
    try:
        head = reader.repo.chain.read_head().head
        return list(reader.repo._versions.resolve(CUSTOMER, head).entries)
    finally:
        reader.close()
        world.writers.remove(reader)


def is_compacted(world: World) -> bool:
    found = resolved(world)
    return len(found) == 1 and found[0].min_commit_id < found[0].max_commit_id


class Stage:
    """Four commits of two types, copied for every run."""

    def __init__(self, engine_version: str) -> None:
        self.engine_version = engine_version
        with closing(new_world(engine_version)) as world:
            writer = world.open("before", checkpoint_interval=3)
            for n in range(3):
                writer.put(customer("a", age=n), customer(f"k{n}", age=n))
            writer.commit(stream_of(CUSTOMER, [customer("a", age=9), customer("b", age=9)]))
            writer.commit(rows_of(PRODUCT, product("p", 1.0)))
            writer.repo.flush()
            self.reads = reads(world)
            self.stored = stored(world)
            self.objects = world.backend.objects()
        self.requests = self._requests()

    @contextmanager
    def run(self) -> Iterator[tuple[World, Writer]]:
        backend = MemoryBackend("simulation")
        for key, data in self.objects.items():
            backend.write(key, data)
        with closing(World(backend, self.engine_version)) as world:
            yield world, world.open("compactor")

    def _requests(self) -> list[tuple[str, str]]:
        seen: list[tuple[str, str]] = []
        with self.run() as (world, writer):
            writer.store.on_request(lambda kind, key: seen.append((kind, key)))
            run(writer)
            assert reads(world) == self.reads
            assert is_compacted(world)
            left = [k for k in world.stored_keys("meta/") if "compaction" in k or "attempts" in k]
            assert left == []
            assert world.stored_keys(layout.LOCK) == []
        return seen

    def writes(self) -> list[int]:
        return [n for n, (kind, _) in enumerate(self.requests, start=1) if kind not in READS]

    @property
    def cas(self) -> int:
        return self.requests.index(("PUT_IF", layout.HEAD)) + 1


@pytest.fixture(scope="module", params=["v1", "v2"])
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(str(request.param))


def run(writer: Writer) -> CompactionReport:
    return compact(writer.repo, EAGER)


def finish(world: World, stage: Stage, *, queries: bool = True) -> None:
    """A fresh process does the work after the leases of the dead, and commits go on."""
    world.pass_lease()
    fresh = world.open("fresh")
    run(fresh)
    assert plan_compaction(fresh.repo, EAGER).empty
    assert same(world, stage, queries=queries)
    assert is_compacted(world)
    assert fresh.repo.index_warnings() == []
    fresh.put(customer("a", age=1000))
    assert stored(world) == [*stage.stored, (6, "a", 1000)]


# -- crashes and lost answers -----------------------------------------------------------------


@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
def test_a_crash_at_every_durable_write_changes_no_read_and_a_rerun_finishes(
    stage: Stage, kind: FaultKind
) -> None:
    for number in stage.writes():
        with stage.run() as (world, writer):
            writer.store.faults = FaultPlan([FaultRule(Fault(kind), nth=number)])
            with pytest.raises(SimulatedCrash):
                run(writer)
            near = abs(number - stage.cas) <= 1
            assert same(world, stage, queries=near), f"after {stage.requests[number - 1]}"
            landed = number > stage.cas or (number == stage.cas and kind is FaultKind.CRASH_AFTER)
            fresh = world.open("looks")
            assert (len(entries(fresh)) == 1) == landed
            finish(world, stage, queries=near)


@pytest.mark.parametrize("kind", [FaultKind.RESPONSE_LOST, FaultKind.TIMEOUT, FaultKind.DELAYED])
def test_an_unanswered_write_changes_no_read_and_a_rerun_finishes(
    stage: Stage, kind: FaultKind
) -> None:
    for number in stage.writes():
        with stage.run() as (world, writer):
            fault = Fault(kind, seconds=3600)
            writer.store.faults = FaultPlan([FaultRule(fault, nth=number)])
            try:
                report = run(writer)
            except StorageBackendError:
                assert stage.requests[number - 1][0] == "PUT"  # an upload is not tried again
            else:
                assert [r.outcome for r in report.runs] == ["published"]
                assert len(entries(writer)) == 1
            writer.heal()
            near = abs(number - stage.cas) <= 1
            assert same(world, stage, queries=near)
            if kind is FaultKind.DELAYED:
                world.backend.land_all()
                assert same(world, stage, queries=near)
            finish(world, stage, queries=near)


def test_an_index_that_could_not_be_written_is_made_up_for(stage: Stage) -> None:
    with stage.run() as (world, writer):
        writer.fail(FaultKind.UNAVAILABLE, "PUT_IF", "meta/indices/*", times=None)
        assert [r.outcome for r in run(writer).runs] == ["published"]
        assert "Customer does not have its new snapshot yet" in str(writer.warning())
        assert reads(world) == stage.reads
        assert not is_compacted(world)  # readers open the originals, which are still there
        fresh = world.open("fresh")
        [plan, _] = plan_compaction(fresh.repo, EAGER).types
        assert (plan.index_behind, plan.runs) == (True, ())
        assert run(fresh).reindexed == ("Customer",)
        assert is_compacted(world)
        assert plan_compaction(fresh.repo, EAGER).empty


# -- rivals -----------------------------------------------------------------------------------


def test_rfc0004_17_a_commit_during_the_merge_survives(stage: Stage) -> None:
    with stage.run() as (world, writer):
        rival = world.open("rival")
        at(writer.store, "PUT_IF", layout.LOCK, lambda: rival.put(customer("r", age=1)))
        assert [r.outcome for r in run(writer).runs] == ["published"]
        found = entries(writer)
        assert [(e.min_commit_id, e.max_commit_id) for e in found] == [(1, 4), (6, 6)]
        assert writer.ages()["r"] == 1
        assert len(reads(world)["Customer " + str(ReadWindow(history=True))]) == 9


def test_rfc0004_17_head_that_moves_before_the_cas_is_read_again(stage: Stage) -> None:
    """By a writer that does not wait for the lock: the CAS refuses, the new head is built on."""
    with stage.run() as (world, writer):
        rival = world.open("rival")

        def barge_in() -> None:
            lock = world.backend.objects()[layout.LOCK]
            world.backend.remove([layout.LOCK])
            rival.put(customer("r", age=1))
            rival.repo.flush()
            world.backend.write(layout.LOCK, lock)

        at(writer.store, "PUT_IF", layout.HEAD, barge_in)
        assert [r.outcome for r in run(writer).runs] == ["published"]
        assert [e.max_commit_id for e in entries(writer)] == [4, 6]
        assert world.head().commit_id == 6
        assert writer.ages()["r"] == 1
        finish_with_rival(world)


def finish_with_rival(world: World) -> None:
    fresh = world.open("fresh")
    assert fresh.repo.index_warnings() == []
    assert fresh.ages() == {"a": 9, "b": 9, "k0": 0, "k1": 1, "k2": 2, "r": 1}


def test_rfc0004_17_an_unsafe_lease_publishes_nothing(stage: Stage) -> None:
    with stage.run() as (world, writer):
        before = world.head()
        at(writer.store, "PUT", "meta/checkpoints/*", world.pass_lease)
        with pytest.raises(LeaseExpiredError):
            run(writer)
        assert world.head() == before
        assert reads(world) == stage.reads
        finish(world, stage)


def test_a_compactor_that_wakes_late_cannot_publish_over_a_newer_state(stage: Stage) -> None:
    """It sleeps right before its CAS, past its lease, while others compact and commit."""
    with stage.run() as (world, writer):
        rival = world.open("rival")

        def overtake() -> None:
            world.pass_lease()
            assert [r.outcome for r in run(rival).runs] == ["published"]
            rival.put(customer("r", age=1))
            rival.repo.flush()

        at(writer.store, "PUT_IF", layout.HEAD, overtake)
        report = run_or_error(writer)
        assert isinstance(report, CompactionReport)
        assert [r.outcome for r in report.runs] == ["superseded"]
        assert [e.max_commit_id for e in entries(rival)] == [4, 6]
        snapshot = entries(rival)[0].files[0].path
        world.pass_lease()
        finish_with_rival(world)
        assert snapshot in {f.path for e in resolved(world) for f in e.files}


def test_a_compactor_that_wakes_late_before_the_lock_finds_its_work_done(stage: Stage) -> None:
    with stage.run() as (world, writer):
        rival = world.open("rival")

        def overtake() -> None:
            world.pass_lease()
            assert [r.outcome for r in run(rival).runs] == ["published"]

        at(writer.store, "PUT_IF", layout.LOCK, overtake)
        assert [r.outcome for r in run(writer).runs] == ["superseded"]
        assert reads(world) == stage.reads
        assert is_compacted(world)


def run_or_error(writer: Writer) -> CompactionReport | OntologiaError:
    try:
        return run(writer)
    except OntologiaError as error:
        return error


def test_two_compactors_share_the_work(stage: Stage) -> None:
    """One is at Customer when the other comes: that one does Product, and says who has the rest."""
    with stage.run() as (world, first):
        first.commit(rows_of(PRODUCT, product("p", 2.0)))
        first.repo.flush()
        second = world.open("second")
        reports: list[CompactionReport] = []
        at(
            first.store,
            "PUT_IF",
            "meta/attempts/*",
            lambda: reports.append(run(second)),
        )
        reports.append(run(first))
        assert reports[0].skipped == {"Customer": "compactor works on it"}
        outcomes = [[(r.type_name, r.outcome) for r in report.runs] for report in reports]
        assert outcomes == [
            [("Product", "published")],
            [("Customer", "published"), ("Product", "superseded")],
        ]
        assert len(entries(first)) == len(entries(first, PRODUCT)) == 1


def test_a_dead_compactors_lease_is_taken_over(stage: Stage) -> None:
    with stage.run() as (world, writer):
        writer.store.faults = FaultPlan(
            [FaultRule(Fault(FaultKind.CRASH_AFTER), "PUT_IF", "meta/compaction/*")]
        )
        with pytest.raises(SimulatedCrash):
            run(writer)
        fresh = world.open("fresh")
        assert run(fresh).skipped == {"Customer": "compactor works on it"}
        finish(world, stage)


# -- garbage collection -----------------------------------------------------------------------


def test_an_attempt_that_was_given_up_does_not_publish(stage: Stage) -> None:
    """A collector deletes the heartbeat before it deletes outputs."""
    with stage.run() as (world, writer):
        before = world.head()

        def give_up() -> None:
            world.backend.remove(world.stored_keys("meta/attempts/"))

        at(writer.store, "PUT_IF", layout.LOCK, give_up)
        with pytest.raises(LeaseExpiredError, match="given up to garbage collection"):
            run(writer)
        assert world.head() == before
        finish(world, stage)


def test_outputs_that_are_gone_are_not_published(stage: Stage) -> None:
    with stage.run() as (world, writer):
        before = world.head()

        def collect() -> None:
            world.backend.remove(world.stored_keys("snapshots/"))

        at(writer.store, "PUT_IF", layout.LOCK, collect)
        with pytest.raises(StorageBackendError, match="gone or changed"):
            run(writer)
        assert world.head() == before
        finish(world, stage)


def test_a_taken_key_of_v1_is_left_alone() -> None:
    """What a crashed attempt left under the specification's key may be anything."""
    stage = Stage("v1")
    with stage.run() as (world, writer):
        key = "snapshots/entities/Customer-1-4.parquet"
        world.backend.write(key, b"left by somebody")
        run(writer)
        assert world.backend.objects()[key] == b"left by somebody"
        [file] = entries(writer)[0].files
        assert file.path.startswith("snapshots/entities/Customer-1-4-")
        assert reads(world) == stage.reads


@pytest.mark.parametrize("kind", [FaultKind.RESPONSE_LOST, FaultKind.TIMEOUT])
def test_an_unanswered_create_of_v1_is_recognised(kind: FaultKind) -> None:
    """By the attempt's mark in the file: the key is still the specification's."""
    stage = Stage("v1")
    with stage.run() as (_, writer):
        writer.fail(kind, "PUT_IF", "snapshots/*")
        run(writer)
        assert [f.path for f in entries(writer)[0].files] == [
            "snapshots/entities/Customer-1-4.parquet"
        ]


# -- planted defects --------------------------------------------------------------------------


def _drop_one(newest: pa.Table, older: pa.Table) -> tuple[pa.Table, pa.Table]:
    return newest.slice(1), older


def _twice(newest: pa.Table, older: pa.Table) -> tuple[pa.Table, pa.Table]:
    return newest, pa.concat_tables([older, older])


def _swapped(newest: pa.Table, older: pa.Table) -> tuple[pa.Table, pa.Table]:
    return older, newest


def _other_commit(newest: pa.Table, older: pa.Table) -> tuple[pa.Table, pa.Table]:
    ids = pa.array([1] * newest.num_rows, pa.int64())
    return newest.set_column(0, newest.schema.field(0), ids), older


def _other_value(newest: pa.Table, older: pa.Table) -> tuple[pa.Table, pa.Table]:
    at_ = newest.schema.get_field_index("age")
    ages = pa.array([7] * newest.num_rows, pa.int64())
    return newest.set_column(at_, newest.schema.field(at_), ages), older


@pytest.mark.parametrize(
    "defect", [_drop_one, _twice, _swapped, _other_commit, _other_value], ids=lambda d: d.__name__
)
def test_a_wrong_merge_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    defect: Callable[[pa.Table, pa.Table], tuple[pa.Table, pa.Table]],
) -> None:
    stage = Stage("v2")
    right = merge.split
    with stage.run() as (world, writer):
        before = world.head()
        monkeypatch.setattr(merge, "split", lambda *args: (defect(*pair) for pair in right(*args)))
        with pytest.raises(IntegrityError, match="compaction is refused"):
            run(writer)
        assert world.head() == before
        assert world.stored_keys("snapshots/") == []
        assert reads(world) == stage.reads
        monkeypatch.undo()
        finish(world, stage)


def test_a_wrong_merge_of_v1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage("v1")
    with stage.run() as (world, writer):
        right = merge._counted
        monkeypatch.setattr(
            merge, "_counted", lambda *args: (t.slice(0, t.num_rows - 1) for t in right(*args))
        )
        with pytest.raises(IntegrityError, match=r"8 rows .* before and 7 rows"):
            run(writer)
        assert world.stored_keys("snapshots/") == []
        assert reads(world) == stage.reads
