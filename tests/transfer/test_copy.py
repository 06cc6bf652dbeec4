"""Copies between every pair of engines: the same commits, rows, tags, units and events, and nothing
that is there is mixed with others."""

from __future__ import annotations

import shutil
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Event, Field, Session, on_event
from storage_engine.errors import (
    ConfigurationError,
    CopyRefusedError,
    IntegrityError,
    UninitializedStorageError,
)
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository import Idempotency, ReadWindow, Repository, initialize_storage
from storage_engine.repository.history import RecordedChange, RecordedCommit
from storage_engine.transfer import compare_storages, copy_storage, runs
from tests.engines import (
    CUSTOMER,
    EMPLOYMENT,
    EVERYTHING,
    PRODUCT,
    Storage,
    commit,
    customer,
    edge,
    product,
    put,
    rows_of,
    stream_of,
)

ONE_PAIR = pytest.mark.parametrize(
    ("source", "target"),
    [
        ("directory-v2", "directory-v2"),
        ("sqlite-v1", "directory-v2"),
        ("directory-v1", "sqlite-v2"),
    ],
    indirect=True,
)
SPECS = (CUSTOMER, PRODUCT, EMPLOYMENT, EVERYTHING)


def everything(key: str, **values: Any) -> dict[str, Any]:
    return {
        "entity_key": key,
        "id": key,
        "text": "ä\n",
        "number": -(2**63),
        "real": -0.0,
        "flag": True,
        "moment": datetime(2024, 2, 29, 1, 2, 3, 456789, UTC),
        "day": date(1, 1, 1),
        "raw": b"\x00\xff",
        "maybe": None,
        "maybe_number": None,
        "tags": '["b","a"]',
        "counts": '{"k":1}',
        "mixed": '"1"',
        "anything": '{"deep":[1,null]}',
        **values,
    }


def fill(storage: Storage) -> None:
    """Types of both kinds, updates, a bulk load, a commit of an event alone, units of work."""
    with closing(storage.open(checkpoint_interval=3, runtime_id="maker")) as repo:
        put(repo, customer("a", age=1), customer("b"), metadata={"why": "first"})
        commit(repo, rows_of(EVERYTHING, everything("e"), everything("f", real=1e300)))
        put(repo, customer("a", age=2), idempotency=Idempotency("loader", 7))
        commit(repo, stream_of(PRODUCT, [product(f"p{n}", n) for n in range(50)]))
        same = rows_of(CUSTOMER, customer("a", age=2))
        assert commit(repo, same, idempotency=Idempotency("idle", "x")) is None
        commit(repo, rows_of(EMPLOYMENT, edge("a", "p1", "s", stint="s", role="boss")))
        put(repo, customer("c"), idempotency=Idempotency("other", "y"))
        assert commit(repo, same, idempotency=Idempotency("loader", 8)) is None
        repo.create_tag("early", 2)
        repo.create_tag("late", 6)
        repo.flush()


def told(repo: Repository) -> dict[str, Any]:
    """All that a reader can see of a storage."""
    head = repo.head_commit_id()
    windows = [ReadWindow(), ReadWindow(history=True), ReadWindow(history=True, since=2)]
    windows += [ReadWindow(as_of=n) for n in range(head)]
    return {
        "commits": [c.as_dict() for c in repo.list_commits(100)],
        "rows": {
            (spec.name, window): repo.read(spec, window).to_pylist()
            for spec in SPECS
            for window in windows
        },
        "changes": [repo.list_commit_changes(n) for n in range(1, head + 1)],
        "tags": [(t.name, t.commit_id, t.created_at, t.runtime_id) for t in repo.list_tags()],
        "schemas": [(spec.ref, spec.schema_sha256) for spec in repo.known_types()],
        "units": [
            repo.applied(Idempotency(app, version))
            for app, version in (("loader", 8), ("loader", 9), ("idle", "x"), ("other", "y"))
        ],
    }


def state_of(storage: Storage) -> dict[str, Any]:
    with closing(storage.open()) as repo:
        return told(repo)


def copied(source: Storage, target: Storage, **options: Any) -> Any:
    options = {"apply": True, "engine_version": target.engine_version, **options}
    return copy_storage(
        source.uri, target.uri, config=source.config(), target_config=target.config(), **options
    )


def test_a_copy_is_the_same_storage(source: Storage, target: Storage) -> None:
    fill(source)
    report = copied(source, target)
    assert (report.since, report.upto, report.applied, report.creates) == (0, 6, True, True)
    assert report.comparison.ok
    assert report.comparison.commits == 6
    assert state_of(target) == state_of(source)
    with closing(target.open()) as repo:
        assert verify_storage(repo, deep=True).ok
        # Work goes on: the types are known, and what is stored is compared with.
        assert commit(repo, rows_of(CUSTOMER, customer("a", age=2))) is None
        assert put(repo, customer("a", age=3)).commit_id == 7


@ONE_PAIR
def test_a_preview_writes_nothing(source: Storage, target: Storage, tmp_path: Path) -> None:
    fill(source)
    report = copied(source, target, apply=False)
    assert (report.commits, report.types, report.rows, report.tags) == (6, 4, 57, 2)
    assert report.creates
    assert not report.applied
    assert list((tmp_path / "target").iterdir()) == []


@ONE_PAIR
def test_a_second_run_brings_what_came_since(source: Storage, target: Storage) -> None:
    fill(source)
    copied(source, target)
    again = copied(source, target)
    assert (again.since, again.commits) == (6, 0)
    with closing(source.open()) as repo:
        put(repo, customer("d"))
        repo.create_tag("later")
    report = copied(source, target)
    assert (report.since, report.upto) == (6, 7)
    assert state_of(target) == state_of(source)


@ONE_PAIR
def test_units_of_work_that_changed_nothing_wait_for_the_tail(
    source: Storage, target: Storage
) -> None:
    fill(source)
    copied(source, target, upto=3)
    with closing(target.open()) as repo:
        assert repo.applied(Idempotency("loader", 7)) is not None
        assert repo.applied(Idempotency("loader", 8)) is None
    copied(source, target)
    assert state_of(target) == state_of(source)


def test_a_target_with_commits_of_its_own_is_refused(target: Storage, tmp_path: Path) -> None:
    source = Storage(f"sqlite:///{tmp_path / 'source.db'}", "sqlite", "v2")
    fill(source)
    initialize_storage(target.uri, target.engine_version, target.config())
    with closing(target.open()) as repo:
        put(repo, customer("own"))
    with pytest.raises(CopyRefusedError, match="not empty"):
        copied(source, target)
    with closing(target.open()) as repo:
        assert repo.head_commit_id() == 1


def test_a_copy_that_was_written_to_is_refused(target: Storage, tmp_path: Path) -> None:
    source = Storage(f"sqlite:///{tmp_path / 'source.db'}", "sqlite", "v2")
    fill(source)
    copied(source, target)
    with closing(target.open()) as repo:
        put(repo, customer("own"))
    with closing(source.open()) as repo:
        put(repo, customer("theirs"))
        put(repo, customer("more"))
    with pytest.raises(CopyRefusedError, match="not copied from there"):
        copied(source, target)


@ONE_PAIR
def test_a_copy_of_another_storage_is_refused(
    source: Storage, target: Storage, tmp_path: Path
) -> None:
    fill(source)
    copied(source, target)
    other = Storage(f"sqlite:///{tmp_path / 'other.db'}", "sqlite", "v2")
    fill(other)
    with pytest.raises(CopyRefusedError):
        copied(other, target)


@pytest.mark.parametrize("source", ["sqlite-v2", "directory-v2"], indirect=True)
def test_files_that_were_copied_are_no_target(source: Storage, tmp_path: Path) -> None:
    fill(source)
    twin = tmp_path / "twin.db"
    if source.backend == "sqlite":
        shutil.copy(source.path, twin)
    else:
        shutil.copytree(source.uri.removeprefix("file://"), twin)
    with pytest.raises(CopyRefusedError, match="the same log"):
        copy_storage(source.uri, twin)


@ONE_PAIR
def test_bad_ends(source: Storage, target: Storage, tmp_path: Path) -> None:
    fill(source)
    with pytest.raises(ConfigurationError, match="into itself"):
        copy_storage(source.uri, source.uri)
    with pytest.raises(ConfigurationError, match="in memory"):
        copy_storage(source.uri, ":memory:")
    for missing in (tmp_path / "nothing", tmp_path / "nothing.db"):
        with pytest.raises(UninitializedStorageError, match="nothing to copy") as absent:
            copy_storage(missing, target.uri)
        assert "init" not in str(absent.value)
    assert not (tmp_path / "nothing.db").exists()
    copied(source, target)
    other = "v1" if target.engine_version == "v2" else "v2"
    with pytest.raises(CopyRefusedError, match="kept by engine"):
        copied(source, target, engine_version=other)


def test_an_empty_storage_is_copied(source: Storage, tmp_path: Path) -> None:
    target = Storage((tmp_path / "copy").as_uri(), "directory", "v2")
    report = copied(source, target)
    assert report.commits == 0
    assert report.comparison.ok
    assert copied(source, target).commits == 0


@pytest.mark.parametrize("source", ["directory-v1", "directory-v2"], indirect=True)
def test_history_comes_from_snapshots_when_the_files_are_gone(
    source: Storage, tmp_path: Path
) -> None:
    fill(source)
    before = state_of(source)
    folder = Path(source.uri.removeprefix("file://"))
    with closing(source.open()) as repo:
        compact(repo, CompactionPolicy(min_entries=2))
    for name in ("entities/Customer.parquet", "entities/Customer"):
        for found in folder.glob(f"commits/*/{name}"):
            found.unlink() if found.is_file() else shutil.rmtree(found)
    target = Storage(f"sqlite:///{tmp_path / 'copy.db'}", "sqlite", "v2")
    assert copied(source, target).comparison.ok
    assert state_of(target) == before


@pytest.mark.parametrize("target", ["directory-v2", "sqlite-v2"], indirect=True)
def test_a_source_that_lost_rows_is_not_copied_as_if_it_were_whole(
    target: Storage, tmp_path: Path
) -> None:
    import sqlite3

    source = Storage(f"sqlite:///{tmp_path / 'source.db'}", "sqlite", "v2")
    fill(source)
    with closing(sqlite3.connect(source.path)) as connection:
        connection.execute("DELETE FROM entity_Product_v1 WHERE entity_key = 'p7'")
        connection.commit()
    with pytest.raises(IntegrityError, match="50 rows of Product, and 49"):
        copied(source, target)


@ONE_PAIR
def test_a_difference_is_told(source: Storage, target: Storage) -> None:
    fill(source)
    copied(source, target)
    with closing(source.open()) as repo:
        put(repo, customer("d"))
        repo.create_tag("later")
    with closing(source.open()) as ours, closing(target.open()) as theirs:
        comparison = compare_storages(ours, theirs)
    assert not comparison.ok
    assert {d.what for d in comparison.differences} == {"commit", "tag"}


# -- events ---------------------------------------------------------------------------------------


class Placed(Event):
    number: Field[int]


class Shipped(Event):
    number: Field[int]


HANDLED: list[tuple[str, int]] = []


@on_event(Placed)
def first(context: Any) -> None:
    HANDLED.append(("first", context.event.number))


@on_event(Placed)
def second(context: Any) -> None:
    HANDLED.append(("second", context.event.number))
    if context.event.number == 2:
        raise ValueError("not this one")


def numbers(handled: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(handled)


def test_events_that_are_not_done_go_along(source: Storage, target: Storage) -> None:
    config = source.config(event_max_attempts=1)
    HANDLED.clear()
    with Session(source.uri, config=config) as session:
        session.emit(Placed(number=1))
        session.commit(Placed(number=2))
        session.drain([first])
        session.drain([second])
        session.emit(Placed(number=3))
        session.drain([first])
        session.commit([Shipped(number=9), Placed(number=4)])
    assert numbers(HANDLED) == [
        ("first", 1),
        ("first", 2),
        ("first", 3),
        ("second", 1),
        ("second", 2),
    ]
    report = copied(source, target)
    assert report.letters == 1
    HANDLED.clear()
    with Session(target.uri, config=target.config()) as session:
        letters = _bus(session).list_dead_letters("default", 10)
        assert [letter.event["payload"]["number"] for letter in letters] == [2]
        session.drain([first, second])
    assert numbers(HANDLED) == [("first", 4), ("second", 3), ("second", 4)]


@ONE_PAIR
def test_what_the_source_finished_since_is_not_run_again(source: Storage, target: Storage) -> None:
    with Session(source.uri, config=source.config()) as session:
        session.emit(Placed(number=5))
    copied(source, target)
    with Session(source.uri, config=source.config()) as session:
        session.drain([first])
    copied(source, target)
    HANDLED.clear()
    with Session(target.uri, config=target.config()) as session:
        session.drain([first])
    assert HANDLED == []


def _bus(session: Session) -> Any:
    from storage_engine.config import OntologiaConfig
    from storage_engine.events.protocol import open_event_store

    return open_event_store(session.repository, OntologiaConfig())


# -- sizes ----------------------------------------------------------------------------------------


@ONE_PAIR
def test_a_large_commit_is_streamed_in_parts(
    source: Storage, target: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of its own, more than one file on an object store, and the same rows."""
    monkeypatch.setattr(runs, "_RUN_ROWS", 10)
    with closing(source.open()) as repo:
        put(repo, customer("a"), customer("b"))
        commit(repo, stream_of(CUSTOMER, [customer(f"c{n:04}", age=n) for n in range(3000)]))
        put(repo, customer("a", age=5))
    config = source.config().model_copy(update={"target_part_bytes": 20_000})
    report = copy_storage(
        source.uri,
        target.uri,
        apply=True,
        engine_version=target.engine_version,
        target_config=config,
    )
    assert report.comparison is not None
    assert report.comparison.ok
    with closing(source.open()) as ours, closing(target.open()) as theirs:
        for window in (ReadWindow(), ReadWindow(history=True), ReadWindow(as_of=2)):
            assert theirs.read(CUSTOMER, window).equals(ours.read(CUSTOMER, window))
        changes = theirs.list_commit_changes(2)
        assert {change["operation"] for change in changes} == {"insert"}
        if (objects := theirs.objects) is not None:
            link = objects.chain.locate(objects.chain.read_head().head, 2)
            assert link is not None
            assert len(objects.chain.manifest(link).files) > 2


def test_runs_are_cut_by_rows_bytes_and_commits() -> None:
    class History:
        def commits(self, since: int, upto: int) -> list[RecordedCommit]:
            return [_recorded(n) for n in range(since + 1, upto + 1)]

    def _recorded(number: int) -> RecordedCommit:
        rows = 150_000 if number == 5 else 1
        size = 40 << 20 if number == 9 else 10
        change = RecordedChange("entity", "Customer", 1, rows=rows, bytes=size)
        return RecordedCommit(number, datetime.now(UTC), "", "data", {}, (change,))

    cut = [[c.id for c in run] for run in runs.runs(History(), 0, 600)]  # type: ignore[arg-type]
    assert [len(run) for run in cut] == [4, 1, 3, 1, 256, 256, 79]
    assert [n for run in cut for n in run] == list(range(1, 601))


@pytest.mark.s3
@pytest.mark.parametrize(
    ("source", "target"),
    [("sqlite-v2", "seaweedfs-v2"), ("seaweedfs-v2", "directory-v1")],
    indirect=True,
)
def test_copies_from_and_to_s3(source: Storage, target: Storage) -> None:
    fill(source)
    report = copied(source, target)
    assert report.comparison.ok
    assert state_of(target) == state_of(source)
    assert copied(source, target).commits == 0
