"""Parts that others stage: published once, without what other commits have overtaken since."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from storage_engine import CompactionPolicy, OntologiaConfig, initialize_storage
from storage_engine.commitlog import layout
from storage_engine.commitlog.heartbeat import GivenUp
from storage_engine.errors import (
    CommitStateUnknownError,
    ConcurrentWriteError,
    SchemaOutdatedError,
    StorageBackendError,
    UnsupportedEngineError,
)
from storage_engine.maintenance.compaction import compact
from storage_engine.model import TypeSpec
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.repository import CommitRequest, CommitResult, Idempotency, open_repository
from storage_engine.repository.object.write.parquet import encode_bytes, stored_table
from storage_engine.repository.object.write.staged_write import StagedWrite
from storage_engine.repository.protocol import AppliedUnit, Snapshot
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer, at, made_world
from tests.engines import (
    CUSTOMER,
    EMPLOYMENT,
    Row,
    customer,
    edge,
    rows_of,
    stream_of,
    table_of,
)


@pytest.fixture
def world() -> Iterator[World]:
    with made_world("v2") as made:
        yield made


def stage(
    store: ObjectStore,
    attempt: StagedWrite,
    rows: Sequence[Row],
    *,
    inserted: int,
    label: str = "00000-0",
    taken: bool = True,
) -> str:
    """What a task does: a part in the store. `taken`: and its description reaches the driver."""
    spec = attempt.spec
    table = stored_table(
        spec,
        table_of(spec, rows),
        engine_version="v2",
        schema_version_id=attempt.schema_version_id,
        commit_id=None,
    )
    encoded = encode_bytes(spec, table)
    key = layout.staged_part(
        attempt.attempt, spec.kind, spec.name, attempt.schema_version_id, label
    )
    assert isinstance(encoded.content, bytes)
    store.put(key, encoded.content)
    if taken:
        described = encoded.describe(
            spec,
            key,
            schema_version_id=attempt.schema_version_id,
            part=None,
            inserted=inserted,
            commit_id_source="manifest",
        )
        attempt.add([described])
    return key


def begin(writer: Writer, spec: TypeSpec = CUSTOMER, **options: Any) -> StagedWrite:
    return writer.repo.begin_staged(spec, **options)


def publish(writer: Writer, attempt: StagedWrite, **request: Any) -> CommitResult | None:
    return writer.repo.commit(CommitRequest([attempt.as_input()], **request))


def changes(result: CommitResult | None) -> tuple[int, int]:
    assert result is not None
    (change,) = result.changes
    return change.inserted, change.updated


# -- publishing -----------------------------------------------------------------------------------


def test_published_as_staged_and_orphans_removed(world: World) -> None:
    writer = world.open()
    with begin(writer, holder={"run": "7"}) as attempt:
        heartbeat = world.document(layout.attempt_heartbeat(attempt.attempt))
        assert heartbeat["holder"]["run"] == "7"
        part = stage(writer.store, attempt, [customer("a"), customer("b")], inserted=2)
        twin = stage(
            writer.store, attempt, [customer("a")], inserted=1, label="00000-9", taken=False
        )
        assert changes(publish(writer, attempt, metadata={"mark": "load"})) == (2, 0)
    assert writer.ages() == {"a": 1, "b": 1}
    assert world.marks() == ["load"]
    assert world.stored_keys("staged/") == [part]
    assert twin not in world.stored_keys()
    assert world.orphans() == []
    assert world.open().history() == [(1, "a", 1), (1, "b", 1)]


def test_a_write_that_ends_early_leaves_nothing(world: World) -> None:
    writer = world.open()
    with begin(writer) as attempt:
        stage(writer.store, attempt, [customer("a")], inserted=1)
    assert world.stored_keys("staged/") == world.stored_keys("meta/attempts/") == []
    assert world.head().commit_id == 0


def test_staging_holds_no_lock(world: World) -> None:
    writer, other = world.open(), world.open("other", s3_lock_timeout_ms=0)
    with begin(writer) as attempt:
        stage(writer.store, attempt, [customer("a")], inserted=1)
        assert layout.LOCK not in world.stored_keys()
        other.put(customer("x"))
        other.repo.flush()
        assert changes(publish(writer, attempt)) == (1, 0)
    assert writer.ages() == {"a": 1, "x": 1}


def test_idempotency_before_and_under_the_lock(world: World) -> None:
    writer, other = world.open(), world.open("other")
    mark = Idempotency("app", 3)
    with begin(writer, idempotency=mark) as attempt:
        assert attempt.applied is None
        stage(writer.store, attempt, [customer("a", "ours")], inserted=1)
        other.put(customer("z"), idempotency=mark)
        other.repo.flush()
        result = publish(writer, attempt, idempotency=mark)
        assert result is not None
        assert (result.commit_id, result.already_applied) == (1, True)
    assert begin(writer, idempotency=Idempotency("app", 2)).applied == AppliedUnit(1)
    assert begin(writer, idempotency=Idempotency("app", "3")).applied is None
    assert world.stored_keys("staged/") == []
    assert writer.ages() == {"z": 1}


# -- overtaken by other commits -------------------------------------------------------------------


def other_commit(other: Writer) -> None:
    other.put(customer("b", age=20), customer("d", age=20))
    other.repo.flush()


def and_compact(other: Writer) -> None:
    other_commit(other)
    compact(other.repo, CompactionPolicy(min_entries=2))
    other.repo.flush()
    assert any(other.store.list("snapshots/")), "nothing was compacted"


@pytest.mark.parametrize("meanwhile", [other_commit, and_compact])
@pytest.mark.parametrize("when", ["while staging", "before the lock"])
def test_what_others_wrote_meanwhile_stays(
    world: World, meanwhile: Callable[[Writer], None], when: str
) -> None:
    writer, other = world.open(), world.open("other")
    other.put(*(customer(key, age=10) for key in "abc"))
    other.put(customer("c", age=11))
    other.repo.flush()
    with begin(writer) as attempt:
        ours = [customer(key, age=30) for key in "abcde"]
        stage(writer.store, attempt, ours, inserted=2)
        apart = stage(writer.store, attempt, [customer("x")], inserted=1, label="00001-1")
        read: list[str] = []
        at(writer.store, "GET", apart, lambda: read.append(apart))
        if when == "while staging":
            meanwhile(other)
        else:
            at(writer.store, "PUT_IF", layout.LOCK, lambda: meanwhile(other))
        assert changes(publish(writer, attempt)) == (2, 2)  # e and x; a and c
        assert attempt.kept == 2
        assert [file.row_count for file in attempt.files] == [3, 1]
        assert attempt.files[1].path == apart, "a part out of reach was written again"
        assert read == [], "a part out of reach was read"
    assert writer.ages() == {"a": 30, "b": 20, "c": 30, "d": 20, "e": 30, "x": 1}
    assert world.orphans() == []


def test_only_commits_after_the_base_count(world: World) -> None:
    """A snapshot made meanwhile holds older rows as well."""
    writer, other = world.open(), world.open("other")
    for age in range(4):
        other.put(customer("a", age=age), customer("b", age=age))
    other.repo.flush()
    with begin(writer) as attempt:
        stage(writer.store, attempt, [customer("a", age=30), customer("b", age=30)], inserted=0)
        other.put(customer("b", age=9))
        compact(other.repo, CompactionPolicy(min_entries=2))
        other.repo.flush()
        assert changes(publish(writer, attempt)) == (0, 1)
        assert attempt.kept == 1
    assert writer.ages() == {"a": 30, "b": 9}


def test_nothing_left_nothing_published(world: World) -> None:
    writer, other = world.open(), world.open("other")
    with begin(writer) as attempt:
        stage(writer.store, attempt, [customer("a", age=30)], inserted=1)
        other.put(customer("a", age=5))
        other.repo.flush()
        assert publish(writer, attempt) is None
        assert attempt.kept == 1
    assert writer.ages() == {"a": 5}
    assert world.head().commit_id == 1
    assert world.orphans() == []


def test_the_order_column_decides(world: World) -> None:
    writer, other = world.open(), world.open("other")
    other.put(customer("old", age=1))
    other.repo.flush()
    with begin(writer, order_by="age") as attempt:
        ours = {"old": 5, "newer": 5, "older": 5, "same": 5, "from null": 5, "to null": None}
        stage(writer.store, attempt, [customer(k, "ours", v) for k, v in ours.items()], inserted=5)
        theirs = {"newer": 4, "older": 6, "same": 5, "from null": None, "to null": 1}
        other.put(*(customer(k, "theirs", v) for k, v in theirs.items()))
        other.repo.flush()
        # Looked at again under the lock, and nothing is counted twice.
        at(writer.store, "PUT_IF", layout.LOCK, lambda: other.put(customer("elsewhere")))
        at(writer.store, "PUT_IF", layout.LOCK, other.repo.flush)
        assert changes(publish(writer, attempt)) == (0, 3)
        assert attempt.kept == 3
    rows = {row["entity_key"]: row["name"] for row in writer.rows()}
    won = {key for key, name in rows.items() if name == "ours"}
    assert won == {"old", "newer", "from null"}


def test_relations_by_all_three_keys(world: World) -> None:
    writer, other = world.open(), world.open("other")
    with begin(writer, EMPLOYMENT) as attempt:
        ours = [edge("p", "q", str(n), role="ours") for n in range(3)]
        stage(writer.store, attempt, ours, inserted=3)
        other.commit(rows_of(EMPLOYMENT, edge("p", "q", "1", role="theirs")))
        other.repo.flush()
        assert changes(publish(writer, attempt)) == (2, 0)
    stored = {row["instance_key"]: row["role"] for row in writer.rows(EMPLOYMENT)}
    assert stored == {"0": "ours", "1": "theirs", "2": "ours"}


def test_a_bulk_load_meanwhile(world: World) -> None:
    """Its parts are staged ones too, without a commit_id column."""
    writer, other = world.open(), world.open("other")
    with begin(writer) as attempt:
        stage(writer.store, attempt, [customer("a", age=30), customer("b", age=30)], inserted=2)
        other.commit(stream_of(CUSTOMER, [customer("b", age=5), customer("c", age=5)]))
        other.repo.flush()
        assert changes(publish(writer, attempt)) == (1, 0)
    assert writer.ages() == {"a": 30, "b": 5, "c": 5}


def test_snapshot_isolation_refuses_instead(world: World) -> None:
    writer, other = world.open(), world.open("other")
    other.put(customer("a", age=1))
    with begin(writer) as attempt:
        stage(writer.store, attempt, [customer("a", age=30)], inserted=0)
        other.put(customer("a", age=2))
        other.repo.flush()
        with pytest.raises(ConcurrentWriteError, match="'a' changed after commit 1"):
            publish(writer, attempt, snapshot=Snapshot(1))
    assert writer.ages() == {"a": 2}


def test_identities_that_repeat(world: World) -> None:
    writer = world.open()
    with begin(writer) as attempt:
        stage(writer.store, attempt, [customer(key) for key in "abcdef"], inserted=6)
        assert attempt.repeated() == []
        stage(writer.store, attempt, [customer(key) for key in "fbdc"], inserted=4, label="1-1")
        assert attempt.repeated() == ["b", "c", "d"]


# -- what can go wrong ----------------------------------------------------------------------------


def test_erased_and_begun_anew_meanwhile(world: World) -> None:
    writer = world.open()
    with begin(writer) as attempt:
        stage(writer.store, attempt, [customer("a")], inserted=1)
        anew = {**world.document(layout.HEAD), "log_id": "another"}
        writer.store.put(layout.HEAD, json.dumps(anew).encode())
        with pytest.raises(SchemaOutdatedError, match="write the data again"):
            publish(writer, attempt)


def test_a_lost_part_stops_the_publish(world: World) -> None:
    writer = world.open()
    with begin(writer) as attempt:
        key = stage(writer.store, attempt, [customer("a")], inserted=1)
        writer.store.delete_many([key])
        with pytest.raises(StorageBackendError, match="is gone or changed"):
            publish(writer, attempt)
    assert world.head().commit_id == 0


def test_given_up_attempts_cannot_publish(world: World) -> None:
    writer = world.open()
    with begin(writer) as attempt:
        stage(writer.store, attempt, [customer("a")], inserted=1)
        writer.store.delete_many([layout.attempt_heartbeat(attempt.attempt)])
        with pytest.raises(GivenUp):
            publish(writer, attempt)
    assert world.head().commit_id == 0


def test_the_loss_of_the_heartbeat_is_told(tmp_path: Path) -> None:
    uri = str(tmp_path / "onto")
    initialize_storage(uri, "v2")
    repository = open_repository(uri, OntologiaConfig(s3_lease_ttl_ms=150))
    told: list[bool] = []
    with repository.begin_staged(CUSTOMER, on_lost=lambda: told.append(True)) as attempt:
        attempt.check_alive()
        (tmp_path / "onto" / layout.attempt_heartbeat(attempt.attempt)).unlink()
        deadline = time.monotonic() + 240
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        assert attempt.lost
        with pytest.raises(GivenUp):
            attempt.check_alive()
    repository.close()


@pytest.mark.parametrize("kind", [FaultKind.RESPONSE_LOST, FaultKind.TIMEOUT])
def test_an_unanswered_cas_is_found_out(world: World, kind: FaultKind) -> None:
    writer = world.open()
    with begin(writer) as attempt:
        stage(writer.store, attempt, [customer("a")], inserted=1)
        writer.fail(kind, "put_if_match", layout.HEAD)
        assert changes(publish(writer, attempt)) == (1, 0)
    assert world.open().ages() == {"a": 1}
    assert len(world.chain()) == 1


def test_after_an_unknown_outcome_nothing_is_deleted(world: World) -> None:
    writer = world.open()
    with begin(writer) as attempt:
        part = stage(writer.store, attempt, [customer("a")], inserted=1)
        writer.fail(FaultKind.RESPONSE_LOST, "put_if_match", layout.HEAD, times=None)

        def mute() -> None:
            writer.fail(FaultKind.SERVER_ERROR, "READ", layout.HEAD, times=None)

        at(writer.store, "PUT_IF", layout.HEAD, mute)
        with pytest.raises(CommitStateUnknownError):
            publish(writer, attempt)
    assert world.stored_keys("staged/") == [part]
    assert world.stored_keys("meta/attempts/") == [layout.attempt_heartbeat(attempt.attempt)]
    assert world.open().ages() == {"a": 1}, "it had landed"


@pytest.mark.simulation
@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
def test_a_crash_anywhere_publishes_once_or_not_at_all(kind: FaultKind) -> None:
    """Every request of a publish that must also give way to another commit is a crash point."""
    point, published = 0, set()
    while True:
        point += 1
        with made_world("v2") as world:
            writer, other = world.open(), world.open("other")
            other.put(customer("a", age=1))
            other.repo.flush()
            attempt = begin(writer)
            stage(writer.store, attempt, [customer(k, age=9) for k in "abc"], inserted=2)
            other.put(customer("b", age=2))
            other.repo.flush()
            world.pass_lease()
            writer.fail(kind, "*", "*", nth=point)
            try:
                with attempt:
                    publish(writer, attempt, metadata={"mark": "staged"})
                writer.repo.flush()
            except SimulatedCrash:
                pass
            crashed = writer.store.crashed
            world.pass_lease()
            reader = world.open("reader")
            marks = world.marks()[2:]
            whole = {"a": 9, "b": 2, "c": 9} if marks else {"a": 1, "b": 2}
            assert marks in ([], ["staged"]), marks
            assert reader.ages() == whole
            published.add(bool(marks))
            reader.put(customer("z"))
            assert reader.ages() == {**whole, "z": 1}
        if not crashed:
            break
    assert published == {True, False}
    assert point > 8


@pytest.mark.parametrize("engine", ["sqlite-v2", "directory-v1"])
def test_other_engines_refuse(tmp_path: Path, engine: str) -> None:
    kind, _, version = engine.partition("-")
    uri = f"sqlite:///{tmp_path / 'o.db'}" if kind == "sqlite" else str(tmp_path / "onto")
    initialize_storage(uri, version)
    repository = open_repository(uri)
    with pytest.raises(UnsupportedEngineError, match=r"use session\.ingest\(\), or an object"):
        repository.begin_staged(CUSTOMER)
    repository.close()
