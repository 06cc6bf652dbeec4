"""Storages that keep themselves compact, on the simulated store: what is merged, how it is
published, and that nothing which happens meanwhile harms a commit or a read.

Merges run at once here, after the commit that finds a tail full, so that every run is the same.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
import pytest

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.commitlog.series import Series
from storage_engine.errors import CommitStateUnknownError, StorageBackendError
from storage_engine.maintenance.compaction import CompactionPolicy, compact, merge, run
from storage_engine.maintenance.compaction.background import MergedSnapshot
from storage_engine.maintenance.compaction.plan import RunPlan, TierPolicy, rows, times_rewritten
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.objectstore.memory import MemoryBackend, SimulatedCrash
from storage_engine.repository.protocol import CommitRequest
from storage_engine.testing.faults import READS, Fault, FaultKind, FaultPlan, FaultRule
from tests.commitlog.support import World, Writer, at, made_world, new_world
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of
from tests.maintenance.support import DAY_S
from tests.repository.object.costs import Cost, measure
from tests.simulation.harness import resolved_versions

pytestmark = pytest.mark.simulation

SMALL = TierPolicy(tail=4)
LONG_LANE = pytest.mark.skipif(
    not os.environ.get("ONTOLOGIA_LONG"), reason="takes minutes: set ONTOLOGIA_LONG=1"
)


def entries(writer: Writer, spec: object = CUSTOMER) -> list[tuple[int, int, int]]:
    """(first commit, last commit, rewrites) of a type's entries, by the log."""
    chain = writer.repo.chain
    truth = state.current_checkpoint(chain, chain.read_head().head).entries
    return [(e.min_commit_id, e.max_commit_id, e.rewrites) for e in truth[spec.ref]]  # type: ignore[attr-defined]


def indexed(world: World) -> list[tuple[int, int]]:
    """The same by the index, as a fresh reader finds it."""
    reader = world.open("reader")
    head = reader.repo.chain.read_head().head
    value = reader.repo.indices.read(CUSTOMER.ref, log_id=head.log_id).value
    return [(e.min_commit_id, e.max_commit_id) for e in value.entries]


def fill(writer: Writer, commits: int, *, first: int = 1) -> None:
    """Each commit changes one row and adds one."""
    for n in range(first, first + commits):
        writer.put(customer("a", age=n), customer(f"k{n}", age=n))
        writer.repo.publisher.flush()


def history(commits: int) -> list[tuple[int, str, int]]:
    """What `fill` has written."""
    return sorted((n, key, n) for n in range(1, commits + 1) for key in ("a", f"k{n}"))


def check_history(writer: Writer, commits: int) -> None:
    assert sorted(writer.history()) == history(commits)
    assert writer.ages() == {"a": commits, **{f"k{n}": n for n in range(1, commits + 1)}}


def left_over(world: World) -> list[str]:
    held = (layout.LOCK, layout.LEASES, layout.ATTEMPTS)
    return [key for key in world.stored_keys() if key.startswith(held)]


# -- the tiers ------------------------------------------------------------------------------------


def entry(commit: int, *, size: int = 1000, version: int = 1, upto: int = 0) -> Entry:
    file = CommitFile("entity", "T", f"{commit}", 1, version, "", bytes=size)
    return Entry(commit, max(commit, upto), (file,))


def merged(run: tuple[Entry, ...]) -> Entry:
    total = sum(rows(e) for e in run)
    file = CommitFile("entity", "T", f"s{run[0].min_commit_id}", total, 1, "", bytes=total * 100)
    again = 1 + max(times_rewritten(e) for e in run)
    return Entry(run[0].min_commit_id, run[-1].max_commit_id, (file,), again)


def test_a_hundred_thousand_commits_leave_few_entries_and_are_written_three_times_at_most() -> None:
    policy = TierPolicy()
    standing: list[Entry] = []
    written = most = 0
    for first in range(1, 120_001, policy.tail):
        standing += [entry(commit) for commit in range(first, first + policy.tail)]
        assert policy.full(standing)
        assert not policy.full(standing[:-1])
        run = policy.due(standing)
        assert run is not None
        start = standing.index(run[0])
        assert tuple(standing[start : start + len(run)]) == run
        standing[start : start + len(run)] = [merged(run)]
        written += sum(rows(e) for e in run)
        most = max(most, len(standing))
    assert most + policy.tail == 143  # that a query opens, and a few small objects
    assert written <= 3 * 120_000
    assert Counter(times_rewritten(e) for e in standing) == {3: 1, 2: 3}


def test_entries_of_other_columns_or_of_size_are_not_merged_and_what_they_cut_off_is() -> None:
    policy = TierPolicy(tail=4, cut_off=3)
    small = [entry(n) for n in range(1, 4)]
    large = entry(4, size=policy.large_bytes)
    assert policy.due([*small, large]) == tuple(small)
    assert policy.due([*small[:2], large, entry(5)]) is None
    older = [entry(n) for n in range(1, 4)]
    newer = [entry(n, version=2) for n in range(4, 7)]
    assert policy.due([*older, *newer]) == tuple(older)
    assert policy.due([merged(tuple(older)), *newer]) is None
    assert policy.due([entry(1), entry(2), large, *[entry(n) for n in range(5, 9)]]) == tuple(
        entry(n) for n in range(5, 9)
    )


def test_a_storage_that_was_never_compacted_is_merged_a_part_at_a_time() -> None:
    policy = TierPolicy(run_entries=100)
    standing = [entry(n) for n in range(1, 1001)]
    run = policy.due(standing)
    assert run == tuple(standing[:100])
    by_bytes = TierPolicy(run_bytes=5_500)
    assert by_bytes.due(standing) == tuple(standing[:5])


def test_entries_that_do_not_tell_their_rows_are_left_alone() -> None:
    unknown = Entry(1, 1, (CommitFile("entity", "T", "u", -1, 1, "", bytes=10),))
    assert TierPolicy(tail=2).due([unknown, entry(2), entry(3)]) is None


# -- how it is published --------------------------------------------------------------------------


@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_a_full_tail_is_merged_and_the_next_commit_carries_it(engine_version: str) -> None:
    with made_world(engine_version) as world:
        writer = world.open("writer", merges=SMALL)
        fill(writer, 5)
        assert len(entries(writer)) == 5  # merged, but not yet published
        swings: list[str] = []
        at(writer.store, "PUT_IF", layout.HEAD, lambda: swings.append("head"), times=None)
        fill(writer, 1, first=6)
        assert swings == ["head"]
        assert entries(writer) == [(1, 5, 1), (6, 6, 0)]
        assert indexed(world) == [(1, 5), (6, 6)]
        assert left_over(world) == []
        fill(writer, 40, first=7)
        check_history(world.open("reader"), 46)
        assert max(rewrites for _, _, rewrites in entries(writer)) == 2
        assert verify_storage(writer.repo, deep=True).findings == []


def test_a_commit_that_carries_a_snapshot_makes_five_requests_more_and_no_hop() -> None:
    """Two of them, the ends of attempt and lease, after its acknowledgement."""
    with made_world("v2") as world:
        writer = world.open("writer", merges=SMALL)
        fill(writer, 3)
        plain = measure(writer.repo, lambda: fill(writer, 1, first=4))
        fill(writer, 1, first=5)
        carrying = measure(writer.repo, lambda: fill(writer, 1, first=6))
        assert plain == Cost({"GET": 1, "PUT_IF": 5, "DELETE_IF": 1}, hops=4)
        assert carrying == Cost({"GET": 1, "PUT_IF": 7, "LIST": 1, "DELETE_IF": 3}, hops=4)


def test_a_snapshot_of_another_type_is_carried_too_and_its_index_follows() -> None:
    with made_world("v2") as world:
        writer = world.open("writer", merges=SMALL)
        writer.commit(rows_of(PRODUCT, product("p", 1.0)))
        fill(writer, 5, first=2)
        writer.commit(rows_of(PRODUCT, product("p", 2.0)))
        writer.repo.publisher.flush()
        assert entries(writer) == [(2, 6, 1)]
        assert indexed(world) == [(2, 6)]
        reader = world.open("fresh")
        assert reader.repo.index_warnings() == []
        assert len(reader.ages()) == 6


@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_flush_publishes_what_is_merged(engine_version: str) -> None:
    with made_world(engine_version) as world:
        writer = world.open("writer", merges=SMALL)
        fill(writer, 5)
        head = world.head()
        writer.repo.flush()
        assert world.head().commit_id == head.commit_id
        assert entries(writer) == [(1, 5, 1)]
        assert indexed(world) == [(1, 5)]
        assert left_over(world) == []
        fill(writer, 1, first=6)
        check_history(world.open("reader"), 6)


def test_the_setting_turns_it_off() -> None:
    with made_world("v2") as world:
        writer = world.open("writer", merges=SMALL, auto_compact=False)
        fill(writer, 20)
        writer.repo.flush()
        assert len(entries(writer)) == 20
        assert world.stored_keys(layout.SNAPSHOTS) == []


def test_a_reader_with_an_older_head_reads_on() -> None:
    with made_world("v2") as world:
        writer, reader = world.open("writer", merges=SMALL), world.open("reader")
        fill(writer, 3)
        reader.repo.head_commit_id()
        at(reader.store, "GET", "meta/indices/*", lambda: fill(writer, 10, first=4))
        assert sorted(reader.history()) == history(3)
        check_history(reader, 13)


# -- growth ---------------------------------------------------------------------------------------


class Written:
    """Bytes that a storage's clients write, by what they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: Counter[str] = Counter()
        write = MemoryBackend.write

        def counted(backend: MemoryBackend, key: str, data: bytes) -> str:
            self.bytes[_part(key)] += len(data)
            return write(backend, key, data)

        monkeypatch.setattr(MemoryBackend, "write", counted)

    @property
    def besides_rows(self) -> int:
        return sum(size for part, size in self.bytes.items() if part not in ("rows", "snapshots"))


def _part(key: str) -> str:
    if key.startswith(layout.SNAPSHOTS):
        return "snapshots"
    if key.startswith(layout.COMMITS):
        return "manifests" if layout.is_manifest(key) else "rows"
    return "/".join(key.split("/")[:2])


def grow(writer: Writer, commits: int) -> None:
    for n in range(commits):
        writer.put(customer(f"k{n % 50}", age=n))
    writer.repo.publisher.flush()


def cold_query(world: World) -> int:
    reader = world.open("cold")
    before = reader.repo.requests()["total"]
    assert len(reader.rows()) == 50
    return reader.repo.requests()["total"] - before


@pytest.mark.parametrize(
    ("commits", "requests", "entries_left"),
    [(100, 7, 4), (1_000, 43, 40), pytest.param(10_000, 19, 16, marks=LONG_LANE)],
)
def test_growth_of_one_type(
    commits: int, requests: int, entries_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact counts. The policy alone, without a storage, is tried to 120,000 commits above."""
    with made_world("v2") as world:
        writer = world.open("writer", merges=TierPolicy())
        written = Written(monkeypatch)
        grow(writer, commits)
        assert (cold_query(world), len(entries(writer))) == (requests, entries_left)
        assert written.besides_rows / commits < 64 * 1024
        assert written.bytes["snapshots"] < 3 * written.bytes["rows"]


# -- crashes and lost answers ---------------------------------------------------------------------

COMMITS = 6  # the fifth merges, the sixth carries


def work(writer: Writer, *, flush: bool) -> None:
    """From the commit that finds the tail full on."""
    writer.put(customer("a", age=5), customer("k5", age=5))
    writer.repo.publisher.flush()
    if flush:
        writer.repo.flush()
    writer.put(customer("a", age=6), customer("k6", age=6))
    writer.repo.flush()


class Stage:
    """Four commits, copied for every run."""

    def __init__(self, engine_version: str, *, flush: bool) -> None:
        self.engine_version = engine_version
        self.flush = flush
        with closing(new_world(engine_version)) as world:
            fill(world.open("before"), 4)
            self.objects = world.backend.objects()
        self.requests: list[tuple[str, str]] = []
        with self.run() as (world, writer):
            writer.store.on_request(lambda kind, key: self.requests.append((kind, key)))
            work(writer, flush=flush)
            assert entries(writer)[0] == (1, 5, 1)
            assert left_over(world) == []

    @contextmanager
    def run(self) -> Iterator[tuple[World, Writer]]:
        backend = MemoryBackend("simulation")
        for key, data in self.objects.items():
            backend.write(key, data)
        with closing(World(backend, self.engine_version)) as world:
            writer = world.open("writer", merges=SMALL)
            writer.ages()  # it knows the index
            yield world, writer

    def writes(self) -> list[int]:
        return [n for n, (kind, _) in enumerate(self.requests, start=1) if kind not in READS]


@pytest.fixture(
    scope="module",
    params=[("v1", False), ("v2", False), ("v2", True)],
    ids=["v1-carried", "v2-carried", "v2-flushed"],
)
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(request.param[0], flush=request.param[1])


def finish(world: World) -> None:
    """After the leases of the dead a fresh process goes on, and merges what is left."""
    world.backend.land_all()
    world.pass_lease()
    fresh = world.open("fresh", merges=SMALL)
    committed = world.head().commit_id
    assert resolved_versions(fresh, "Customer") == history(committed)
    fill(fresh, 2, first=committed + 1)
    fresh.repo.flush()
    assert resolved_versions(world.open("looks"), "Customer") == history(committed + 2)
    assert len(entries(fresh)) <= 4
    assert fresh.repo.index_warnings() == []
    stays = (layout.ATTEMPTS, layout.LEASES)  # of the dead, until they are collected
    assert [key for key in left_over(world) if not key.startswith(stays)] == []


@pytest.mark.parametrize(
    "kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER], ids=lambda kind: kind.value
)
def test_a_crash_at_every_durable_write_loses_nothing(stage: Stage, kind: FaultKind) -> None:
    for number in stage.writes():
        with stage.run() as (world, writer):
            writer.store.faults = FaultPlan([FaultRule(Fault(kind), nth=number)])
            with pytest.raises(SimulatedCrash):
                work(writer, flush=stage.flush)
            try:
                finish(world)
            except BaseException as error:
                error.add_note(f"{kind.value} at {stage.requests[number - 1]}")
                raise


@pytest.mark.parametrize(
    "kind",
    [FaultKind.RESPONSE_LOST, FaultKind.TIMEOUT, FaultKind.DELAYED, FaultKind.UNAVAILABLE],
    ids=lambda kind: kind.value,
)
def test_an_unanswered_write_of_a_merge_fails_no_commit(stage: Stage, kind: FaultKind) -> None:
    ours = (layout.SNAPSHOTS, layout.LEASES, layout.ATTEMPTS)
    for number in stage.writes():
        if not stage.requests[number - 1][1].startswith(ours):
            continue
        with stage.run() as (world, writer):
            rule = FaultRule(Fault(kind, seconds=3600), nth=number)
            writer.store.faults = FaultPlan([rule])
            work(writer, flush=stage.flush)
            writer.heal()
            assert world.head().commit_id == COMMITS
            try:
                finish(world)
            except BaseException as error:
                error.add_note(f"{kind.value} at {stage.requests[number - 1]}")
                raise


# -- others ---------------------------------------------------------------------------------------


def barge_in(world: World, rival: Writer, key: str) -> None:
    """A writer that does not wait for the lock."""
    lock = world.backend.objects()[layout.LOCK]
    world.backend.remove([layout.LOCK])
    rival.put(customer(key, age=1))
    rival.repo.flush()
    world.backend.write(layout.LOCK, lock)


def test_after_a_lost_cas_the_next_attempt_carries_it() -> None:
    with made_world("v2") as world:
        writer, rival = world.open("writer", merges=SMALL), world.open("rival")
        fill(writer, 5)
        at(writer.store, "PUT_IF", layout.HEAD, lambda: barge_in(world, rival, "r"))
        fill(writer, 1, first=7)
        assert entries(writer) == [(1, 5, 1), (6, 6, 0), (7, 7, 0)]
        assert indexed(world) == [(1, 5), (6, 6), (7, 7)]
        assert left_over(world) == []


def test_who_fails_in_a_group_does_not_take_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the group was to carry it, and leaves: the next one does."""
    with made_world("v2") as world:
        writer = world.open("writer", merges=SMALL)
        fill(writer, 5)
        add, failures = Series.add, [StorageBackendError("a manifest that cannot be read")]

        def fails_once(self: Series, *args: Any, **kwargs: Any) -> Any:
            if failures:
                raise failures.pop()
            return add(self, *args, **kwargs)

        monkeypatch.setattr(Series, "add", fails_once)
        inputs = [rows_of(CUSTOMER, customer(key)) for key in ("fails", "stands")]
        fails, stands = [writer.repo.submit(CommitRequest([each])) for each in inputs]
        with pytest.raises(StorageBackendError):
            fails.result()
        assert stands.result() is not None
        writer.repo.flush()
        assert entries(writer) == [(1, 5, 1), (6, 6, 0)]
        assert left_over(world) == []


def test_an_unknown_outcome_leaves_it_for_the_next_commit_whether_it_landed_or_not() -> None:
    for kind in (FaultKind.RESPONSE_LOST, FaultKind.TIMEOUT):
        with made_world("v2") as world:
            writer = world.open("writer", merges=SMALL)
            fill(writer, 5)

            def silence(writer: Writer = writer, kind: FaultKind = kind) -> None:
                writer.fail(kind, "PUT_IF", layout.HEAD)
                writer.fail(FaultKind.UNAVAILABLE, "*", layout.HEAD, times=None)

            at(writer.store, "PUT_IF", layout.HEAD, silence)
            with pytest.raises(CommitStateUnknownError):
                writer.put(customer("a", age=6), customer("k6", age=6))
            writer.heal()
            world.pass_lease()
            fill(writer, 1, first=world.head().commit_id + 1)
            assert entries(writer)[0] == (1, 5, 1)
            check_history(world.open("reader"), world.head().commit_id)
            assert left_over(world) == []


def test_who_finds_the_type_leased_does_not_merge_and_does_not_ask_at_every_commit() -> None:
    with made_world("v2") as world:
        first, second = world.open("first", merges=SMALL), world.open("second", merges=SMALL)
        fill(first, 5)  # merged, not yet published: the lease stands
        asked: list[str] = []
        at(second.store, "PUT_IF", "meta/compaction/*", lambda: asked.append("lease"), times=None)
        fill(second, 10, first=6)
        assert asked == ["lease"] * 5  # every other: the pause is a quarter of the tail
        assert len(entries(second)) == 15
        fill(first, 1, first=16)
        assert entries(first)[0] == (1, 5, 1)
        check_history(world.open("reader"), 16)


def test_a_dead_writers_lease_is_taken_over() -> None:
    with made_world("v2") as world:
        first = world.open("first", merges=SMALL)
        fill(first, 5)
        world.pass_lease()  # it never came back
        second = world.open("second", merges=SMALL)
        second.ages()
        fill(second, 2, first=6)
        assert entries(second) == [(1, 6, 1), (7, 7, 0)]
        fill(first, 1, first=8)  # it wakes: what it merged is superseded
        assert entries(first) == [(1, 6, 1), (7, 7, 0), (8, 8, 0)]
        check_history(world.open("reader"), 8)


def test_a_compaction_at_the_same_time_supersedes_the_merge() -> None:
    with made_world("v2") as world:
        writer, other = world.open("writer", merges=SMALL), world.open("other")
        fill(writer, 5)
        report = compact(other.repo, CompactionPolicy(min_entries=2))
        assert list(report.skipped) == ["Customer"]  # the lease is ours
        world.pass_lease()
        assert [r.outcome for r in compact(other.repo, CompactionPolicy(min_entries=2)).runs] == [
            "published"
        ]
        standing = entries(other)
        fill(writer, 1, first=6)
        assert entries(writer) == [*standing, (6, 6, 0)]
        check_history(world.open("reader"), 6)
        # Our own compaction is not held up by our own merge.
        fill(writer, 6, first=7)
        assert compact(writer.repo, CompactionPolicy(min_entries=2)).skipped == {}


def a_newer_merge_stands() -> None:
    """What waits is of commits 1 to 5; another has merged 1 to 7 and published that."""
    with made_world("v2") as world:
        writer, other = world.open("writer", merges=SMALL), world.open("other")
        fill(writer, 5)
        world.pass_lease()
        fill(other, 2, first=6)
        compact(other.repo, CompactionPolicy(min_entries=2))
        assert [entry[:2] for entry in entries(other)] == [(1, 7)]
        fill(writer, 1, first=8)
        assert entries(writer) == [(1, 7, 1), (8, 8, 0)]
        check_history(world.open("reader"), 8)


def test_a_merge_is_not_published_over_a_newer_one() -> None:
    a_newer_merge_stands()


def test_planted_a_merge_published_over_a_newer_one_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the place of whatever has commits of its range, as if nobody else merged; and nobody
    looks whether its attempt still stands."""

    def careless(
        entries: tuple[Entry, ...], _plan: RunPlan, snapshot: Entry
    ) -> tuple[Entry, ...] | None:
        later = (one for one in entries if one.min_commit_id > snapshot.max_commit_id)
        return (snapshot, *later)

    monkeypatch.setattr(run, "placed", careless)
    monkeypatch.setattr(MergedSnapshot, "checks", ())
    with pytest.raises(AssertionError):
        a_newer_merge_stands()


def test_what_was_given_up_to_garbage_collection_is_not_published_and_the_commit_is_made() -> None:
    with made_world("v2") as world:
        writer = world.open("writer", merges=SMALL)
        fill(writer, 5)
        world.backend.remove(world.stored_keys(layout.ATTEMPTS))
        fill(writer, 1, first=6)
        assert [rewrites for _, _, rewrites in entries(writer)] == [0] * 6
        check_history(world.open("reader"), 6)
        fill(writer, 1, first=7)  # and merged again, later
        assert entries(writer)[0] == (1, 6, 1)


def test_files_that_are_gone_are_not_published_and_the_commit_is_made() -> None:
    with made_world("v2") as world:
        writer = world.open("writer", merges=SMALL)
        fill(writer, 5)
        world.backend.remove(world.stored_keys(layout.SNAPSHOTS))
        fill(writer, 1, first=6)
        assert [rewrites for _, _, rewrites in entries(writer)] == [0] * 6
        check_history(world.open("reader"), 6)


@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_a_collector_spares_what_waits_and_collects_what_was_left(engine_version: str) -> None:
    with made_world(engine_version) as world:
        writer, collector = world.open("writer", merges=SMALL), world.open("collector")
        fill(writer, 5)
        world.backend.clock.sleep(8 * DAY_S)
        # It lives: it says so before it publishes, though it was silent for a week.
        fill(writer, 1, first=6)
        assert entries(writer)[0] == (1, 5, 1)
        fill(writer, 4, first=7)
        assert len(world.stored_keys(layout.ATTEMPTS)) == 1
        world.backend.clock.sleep(8 * DAY_S)
        sweep(collector.repo, plan_gc(collector.repo))
        assert world.stored_keys(layout.ATTEMPTS) == []  # a week of silence: it was given up
        fill(writer, 1, first=11)
        check_history(world.open("reader"), 11)
        fill(writer, 8, first=12)
        check_history(world.open("again"), 19)
        assert verify_storage(writer.repo, deep=True).findings == []


def test_a_wrong_merge_is_refused_with_a_warning_and_the_commits_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = merge.split

    def lossy(*given: object) -> Iterator[tuple[pa.Table, pa.Table]]:
        return ((newest.slice(1), older) for newest, older in right(*given))  # type: ignore[arg-type]

    monkeypatch.setattr(merge, "split", lossy)
    with made_world("v2") as world:
        writer = world.open("writer", merges=SMALL)
        fill(writer, 8)
        assert "Customer cannot be merged: compaction is refused" in str(writer.warning())
        assert world.stored_keys(layout.SNAPSHOTS) == []
        assert left_over(world) == []
        check_history(world.open("reader"), 8)


def test_a_snapshot_that_is_gone_costs_a_commit_none_of_its_attempts(world: World) -> None:
    writer = world.open("writer", merges=SMALL, commit_max_attempts=1)
    fill(writer, 5)
    snapshots = world.stored_keys(layout.SNAPSHOTS)
    assert snapshots
    world.backend.remove(snapshots)
    fill(writer, 3, first=6)
    check_history(writer, 8)
