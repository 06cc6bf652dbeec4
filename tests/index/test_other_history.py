"""Indices that belong to another history than head: a storage that was copied while it was
written (head early, indices late), or whose head was restored from an older version.

Whoever works on in it sees what head says and what was committed since, and nothing else.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from storage_engine.commitlog import layout
from storage_engine.index.resolve import resolve
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.indices import repair_indices, verify_indices
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.objectstore.open import memory_backend
from storage_engine.repository import ReadWindow, initialize_storage, open_repository
from storage_engine.testing.faults import FaultKind
from tests.cli.support import onto
from tests.commitlog.support import World, Writer, made_world
from tests.engines import CUSTOMER, PRODUCT, customer, put, rows_of
from tests.index.support import index_of, put_product, spoil, unproven
from tests.maintenance.support import Crashes, everything
from tests.maintenance.support import copied as copied_objects

PREFIX = [(1, "a", 1), (1, "b", 1), (2, "a", 2), (4, "b", 4)]


def first_half(writer: Writer) -> None:
    """Customers at 1, 2 and 4, products at 3."""
    writer.put(customer("a", age=1), customer("b", age=1))
    writer.put(customer("a", age=2))
    put_product(writer, "p", 1.0)
    writer.put(customer("b", age=4))
    writer.repo.flush()


def second_half(writer: Writer) -> None:
    """What the other history goes on with."""
    for age in (105, 106, 107):
        writer.put(customer("a", age=age), customer(f"other-{age}"))
    put_product(writer, "p", 100.0)
    writer.put(customer("b", age=109))
    writer.repo.flush()


def made_late(world: World) -> dict[str, bytes]:
    """The objects of a storage that went on after its head was read."""
    writer = world.open("origin", checkpoint_interval=3)
    first_half(writer)
    early = world.backend.objects()[layout.HEAD]
    second_half(writer)
    return {**world.backend.objects(), layout.HEAD: early}


def copied(world: World) -> World:
    """Everything late, head early: the worst order."""
    objects = made_late(world)
    backend = memory_backend(f"copy-{uuid.uuid4().hex}")
    for key, data in objects.items():
        backend.write(key, data)
    return World(backend, world.engine_version)


def restored(world: World) -> World:
    """The same storage, head replaced by its older version."""
    world.backend.write(layout.HEAD, made_late(world)[layout.HEAD])
    return World(world.backend, world.engine_version)


@pytest.fixture(params=["copied", "restored"])
def strange(request: pytest.FixtureRequest, either_world: World) -> Iterator[World]:
    made = {"copied": copied, "restored": restored}[request.param](either_world)
    yield made
    made.close()


def latest(history: list[tuple[int, str, int]], upto: int = 10**9) -> dict[str, int]:
    return {key: age for commit_id, key, age in sorted(history) if commit_id <= upto}


def check(world: World, history: list[tuple[int, str, int]], *sessions: Writer) -> None:
    """Old sessions and a new one answer the same, whatever they are asked."""
    top = max(commit_id for commit_id, _, _ in history)
    for reader in (*sessions, world.open("reader")):
        assert reader.history() == sorted(history)
        assert reader.ages() == latest(history)
        for commit_id in (1, 4, top - 1):
            rows = reader.rows(window=ReadWindow(as_of=commit_id))
            assert {r["entity_key"]: r["age"] for r in rows} == latest(history, commit_id)


def test_what_head_says_is_read(strange: World) -> None:
    check(strange, PREFIX)
    reader = strange.open("reader")
    assert [r["price"] for r in reader.rows(PRODUCT)] == [1.0]


def test_commits_are_seen_and_the_other_history_is_not(strange: World) -> None:
    """One by one past the place where the other history ended."""
    history = list(PREFIX)
    writer = strange.open("writer")
    for step in range(8):
        age = 50 + step
        result = writer.put(customer("a", age=age), customer(f"new-{step}"))
        history += [(result.commit_id, "a", age), (result.commit_id, f"new-{step}", 1)]
        writer.repo.flush()
        check(strange, history, writer)
    assert strange.head().commit_id == 12


def test_each_commit_by_a_process_of_its_own(strange: World) -> None:
    history = list(PREFIX)
    for step in range(7):
        writer = strange.open(f"writer-{step}")
        if step % 3 == 1:
            put_product(writer, "p", 50.0 + step)
        else:
            result = writer.put(customer("a", age=50 + step))
            history.append((result.commit_id, "a", 50 + step))
        writer.repo.flush()
        check(strange, history)
    prices = [r["price"] for r in strange.open("reader").rows(PRODUCT)]
    assert prices == [54.0]


def test_reconcile_does_not_believe_rows_of_the_other_history(strange: World) -> None:
    """What the other history wrote is new here; what this one has is not."""
    writer = strange.open("writer")
    assert writer.commit(rows_of(CUSTOMER, customer("a", age=2), customer("b", age=4))) is None
    result = writer.put(customer("a", age=105), customer("other-105"))
    assert [(c.inserted, c.updated) for c in result.changes] == [(1, 1)]
    writer.repo.flush()
    late = strange.open("late")
    assert late.commit(rows_of(CUSTOMER, customer("a", age=105))) is None
    result = late.put(customer("b", age=109))
    assert [(c.inserted, c.updated) for c in result.changes] == [(0, 1)]
    late.repo.flush()
    check(strange, [*PREFIX, (5, "a", 105), (5, "other-105", 1), (6, "b", 109)], writer)


def test_verify_finds_it_and_repair_mends_it(strange: World) -> None:
    repo = strange.open("auditor").repo
    report = verify_indices(repo)
    assert {(f.type_name, f.reason) for f in report.findings} == {
        ("Customer", "other_history"),
        ("Product", "other_history"),
    }
    whole = verify_storage(strange.open("auditor").repo)
    assert {f.reason for f in whole.findings} >= {"other_history"}

    repair_indices(repo, apply=True)

    assert verify_indices(strange.open("auditor").repo).ok
    assert verify_storage(strange.open("auditor").repo).ok
    check(strange, PREFIX)
    writer = strange.open("writer")
    writer.put(customer("a", age=50))
    writer.repo.flush()
    check(strange, [*PREFIX, (5, "a", 50)])


def test_the_next_writer_replaces_it(strange: World) -> None:
    writer = strange.open("writer")
    writer.put(customer("a", age=50))
    put_product(writer, "p", 51.0)
    writer.repo.flush()
    assert verify_indices(strange.open("auditor").repo).ok
    assert strange.open("reader").repo.index_warnings() == []


def test_compaction_replaces_it(strange: World) -> None:
    history = list(PREFIX)
    writer = strange.open("writer")
    for step in range(3):
        result = writer.put(customer("a", age=50 + step))
        history.append((result.commit_id, "a", 50 + step))
    put_product(writer, "p", 53.0)
    writer.repo.flush()
    policy = CompactionPolicy(min_entries=2)
    assert compact(strange.open("compactor").repo, policy).runs
    check(strange, history, writer)
    result = writer.put(customer("a", age=60))
    writer.repo.flush()
    check(strange, [*history, (result.commit_id, "a", 60)], writer)
    assert verify_storage(strange.open("auditor").repo, deep=True).ok


def test_compaction_at_once(strange: World) -> None:
    """Before anybody wrote: the index is still the other history's."""
    compact(strange.open("compactor").repo, CompactionPolicy(min_entries=2))
    check(strange, PREFIX)
    assert "other_history" not in {
        f.reason
        for f in verify_indices(strange.open("auditor").repo).findings
        if f.type_name == "Customer"
    }


@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_the_other_history_was_compacted(engine_version: str) -> None:
    """Its index has a snapshot that reaches over head."""
    with made_world(engine_version) as world:
        writer = world.open("origin")
        first_half(writer)
        early = world.backend.objects()[layout.HEAD]
        second_half(writer)
        compact(world.open("compactor").repo, CompactionPolicy(min_entries=2))
        world.backend.write(layout.HEAD, early)

        check(world, PREFIX)
        assert not verify_indices(world.open("auditor").repo).ok
        history = list(PREFIX)
        for step in range(6):
            writer = world.open("writer")
            result = writer.put(customer("a", age=50 + step))
            history.append((result.commit_id, "a", 50 + step))
            writer.repo.flush()
            check(world, history)
        assert verify_indices(world.open("auditor").repo).types[0].findings == ()


def test_a_head_that_is_read_a_little_earlier_costs_nothing(either_world: World) -> None:
    """Head, then the index of later commits: no more requests than when they agree."""
    world = either_world
    writer = world.open("writer")
    first_half(writer)
    reader = world.open("reader")
    head = reader.repo.chain.read_head().head
    second_half(writer)
    counted = world.open("counted")
    counted.repo.chain.read_head()
    seen: list[str] = []
    counted.store.on_request(lambda kind, key: seen.append(key))
    (resolution,) = resolve(
        counted.repo.chain,
        counted.repo.indices,
        head,
        [CUSTOMER.ref],
        watermark_is_head=world.engine_version == "v1",
    )
    assert [e.max_commit_id for e in resolution.entries] == [1, 2, 4]
    assert not resolution.fallback
    assert seen == [head.manifest_path, layout.index(*CUSTOMER.ref)]


def test_an_index_that_an_older_program_mixed_of_both_is_not_believed(either_world: World) -> None:
    """As programs before format 2 left it: the other history's entries below one of this."""
    world = either_world
    objects = made_late(world)
    foreign = index_of(world)["entries"]
    world.backend.write(layout.HEAD, objects[layout.HEAD])
    writer = world.open("writer")
    history = list(PREFIX)
    for step in range(6):
        result = writer.put(customer("a", age=50 + step))
        history.append((result.commit_id, "a", 50 + step))
    writer.repo.flush()
    document = index_of(world)
    ours = [e for e in document["entries"] if e["min_commit_id"] == 10]
    assert ours
    spoil(world, unproven({**document, "entries": [*foreign, *ours]}))
    check(world, history)
    assert {f.reason for f in verify_indices(world.open("auditor").repo).findings} >= {
        "path_mismatch"
    }
    late = world.open("late")
    result = late.put(customer("b", age=60))
    late.repo.flush()
    check(world, [*history, (result.commit_id, "b", 60)])
    assert verify_indices(world.open("auditor").repo).types[0].findings == ()


@pytest.mark.simulation
@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_a_crash_at_any_write_in_the_copy_loses_and_invents_nothing(engine_version: str) -> None:
    with made_world(engine_version) as world:
        objects = made_late(world)

    def after(world: World, before: object) -> None:
        check_by_log(world)
        writer = world.open("writer")
        writer.put(customer("a", age=70), customer("b", age=71))
        writer.repo.flush()
        check_by_log(world)
        assert writer.ages()["a"] == 70

    def operation(writer: Writer) -> None:
        writer.put(customer("a", age=50))
        put_product(writer, "p", 51.0)

    assert Crashes(objects, engine_version, operation).each(after) > 10


def check_by_log(world: World) -> None:
    """What is read is what is read without any index."""
    objects = world.backend.objects()
    bare = {key: data for key, data in objects.items() if not key.startswith(layout.INDICES)}
    with copied_objects(bare, world.engine_version) as without:
        assert everything(world.open("reader")) == everything(without.open("reader"))


def test_a_directory_copied_while_it_was_written(tmp_path: Path) -> None:
    origin, copy = tmp_path / "origin", tmp_path / "copy"
    initialize_storage(str(origin), "v2")
    with closing(open_repository(str(origin))) as repository:
        put(repository, customer("a", age=1))
        repository.flush()
        early = (origin / layout.HEAD).read_bytes()
        for age in (2, 3):
            put(repository, customer("a", age=age))
        repository.create_tag("late")
    shutil.copytree(origin, copy)
    (copy / layout.HEAD).write_bytes(early)
    reasons = {
        f["reason"] for f in onto("verify", "--json", "--storage-uri", copy).json["findings"]
    }
    assert reasons == {"other_history", "wrong_commit"}
    for age in (52, 53, 54):
        with closing(open_repository(str(copy))) as repository:
            put(repository, customer("a", age=age))
    with closing(open_repository(str(copy))) as repository:
        rows = repository.read(CUSTOMER, ReadWindow(history=True)).to_pylist()
        assert [row["age"] for row in rows] == [1, 52, 53, 54]
    assert onto("index", "verify", "--storage-uri", copy).code == 0


def test_snapshots_of_the_other_history_beside_those_of_the_log(either_world: World) -> None:
    """Head was put back to before a compaction, whose snapshot the index has. It is right; the
    log then compacts the same commits within other bounds, and a commit that brings the index
    to that (its checkpoint is at hand) leaves no commit out."""
    world, policy = either_world, CompactionPolicy(min_entries=2)
    writer = world.open("origin")
    writer.put(*(customer(f"k{n}", age=0) for n in range(100)))
    writer.put(customer("a", age=2))
    compact(world.open("compactor").repo, CompactionPolicy(min_entries=2, ratio=1000.0))
    writer.put(customer("a", age=3))
    writer.repo.flush()
    early = world.backend.objects()[layout.HEAD]
    compact(world.open("compactor").repo, CompactionPolicy(min_entries=2, ratio=1000.0))
    world.backend.write(layout.HEAD, early)
    writer = world.open("writer")
    writer.put(customer("a", age=4), customer("b", age=4))
    writer.put(customer("a", age=5))
    writer.repo.flush()
    compactor = world.open("compactor")
    compactor.fail(FaultKind.SERVER_ERROR, "PUT_IF", layout.index(*CUSTOMER.ref), times=None)
    compact(compactor.repo, policy)
    spans = {(e["min_commit_id"], e["max_commit_id"]) for e in index_of(world)["entries"]}
    assert spans >= {(1, 3), (5, 5)}, "the index has not heard of the log's snapshots"

    last = world.open("last", checkpoint_interval=1)
    last.put(customer("c", age=6))
    last.repo.flush()

    for reader in (last, world.open("reader")):
        assert [(c, k, n) for c, k, n in reader.history() if n] == [
            (2, "a", 2),
            (3, "a", 3),
            (4, "a", 4),
            (4, "b", 4),
            (5, "a", 5),
            (6, "c", 6),
        ]
        assert {k: n for k, n in reader.ages().items() if n} == {"a": 5, "b": 4, "c": 6}
    assert not verify_storage(world.open("verifier").repo, deep=True).findings


def test_a_session_that_was_open_when_head_was_put_back(either_world: World) -> None:
    """What it keeps in memory is of commits that are not there any more."""
    world = either_world
    writer = world.open("writer")
    first_half(writer)
    early = world.backend.objects()[layout.HEAD]
    second_half(writer)
    world.backend.write(layout.HEAD, early)

    writer.put(customer("b", age=109))  # as the lost commits had it
    writer.repo.flush()
    check(world, [*PREFIX, (5, "b", 109)], writer)

    other = world.open("other")
    for age in range(6, 12):  # past what was lost
        other.put(customer("a", age=age))
    other.repo.flush()
    writer.put(customer("a", age=107), customer("other-107"))
    history = [*PREFIX, (5, "b", 109), *((age, "a", age) for age in range(6, 12)), (12, "a", 107)]
    assert writer.ages() == {**latest(history), "other-107": customer("other-107")["age"]}
