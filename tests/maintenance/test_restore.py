"""Restore: the state of an older commit as a new one, with history kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from storage_engine.errors import (
    ConfigurationError,
    HeadMismatchError,
    SchemaMetadataError,
    SchemaOutdatedError,
    UnknownTagError,
)
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.maintenance.restore import restore
from storage_engine.repository import ReadWindow, Repository, open_repository
from tests.cli.support import onto
from tests.commitlog.support import World, at, made_world
from tests.conformance.test_rfc0009_migration import V1, V2, latest, migrate, row, write
from tests.engines import (
    CUSTOMER,
    EMPLOYMENT,
    EVERYTHING,
    KNOWS,
    PRODUCT,
    SUBSCRIPTION,
    Storage,
    commit,
    customer,
    edge,
    on_servers,
    product,
    put,
    rows_of,
    stream_of,
)
from tests.maintenance.support import Crashes, earlier, everything
from tests.maintenance.test_integrity import everything_row

SPECS = (CUSTOMER, PRODUCT, SUBSCRIPTION, EMPLOYMENT, KNOWS, EVERYTHING)


def populated(repository: Repository) -> None:
    """Two commits to go back to, three that change and add."""
    commit(
        repository,
        rows_of(CUSTOMER, customer("a", age=1), customer("b", age=None), customer("c", age=3)),
        rows_of(PRODUCT, product("p", 1.0)),
        rows_of(EVERYTHING, everything_row("e")),
    )
    commit(
        repository,
        rows_of(SUBSCRIPTION, edge("a", "p", seats=1)),
        rows_of(EMPLOYMENT, edge("a", "p", "2024", role="clerk")),
        rows_of(KNOWS, edge("a", "b")),
    )
    commit(
        repository,
        rows_of(CUSTOMER, customer("a", age=10), customer("b", age=2), customer("d", age=4)),
        rows_of(EVERYTHING, {**everything_row("e"), "tags": "[]", "raw": b"yy", "maybe": "m"}),
    )
    commit(
        repository,
        rows_of(CUSTOMER, customer("a", age=1), customer("c", age=30)),
        rows_of(SUBSCRIPTION, edge("a", "p", seats=2), edge("b", "p", seats=1)),
        rows_of(EMPLOYMENT, edge("a", "p", "2025", role="boss")),
        rows_of(KNOWS, edge("b", "c")),
    )
    commit(repository, stream_of(CUSTOMER, [customer("x", age=1)], [customer("b", age=None)]))
    repository.flush()


def values(repository: Repository, spec: Any, window: ReadWindow) -> dict[tuple[str, ...], Any]:
    rows = repository.read(spec, window).drop_columns(["commit_id"]).to_pylist()
    return {tuple(row[name] for name in spec.identity): row for row in rows}


@on_servers
def test_the_old_state_is_the_latest_and_history_stays(storage: Storage) -> None:
    repository = storage.open()
    populated(repository)
    repository.create_tag("v1", 2)
    then = {spec.name: values(repository, spec, ReadWindow(as_of=2)) for spec in SPECS}
    history = {spec.name: repository.read(spec, ReadWindow(history=True)) for spec in SPECS}

    plan = restore(repository, "v1")
    assert (plan.commit_id, plan.head_commit_id, plan.applied) == (2, 5, False)
    counts = {t.type_name: (t.restored, t.created_after) for t in plan.types}
    assert counts == {
        "Customer": (1, 2),  # c; a and b are what they were again
        "Everything": (1, 0),
        "Employment": (0, 1),
        "Knows": (0, 1),
        "Subscription": (1, 1),
    }
    later = {t.type_name: t.examples for t in plan.types}
    assert later["Customer"] == (("d",), ("x",))
    assert later["Employment"] == (("a", "p", "2025"),)
    assert repository.head_commit_id() == 5, "a plan writes nothing"

    done = restore(repository, "v1", apply=True)

    assert (done.applied, done.new_commit_id) == (True, 6)
    for spec in SPECS:
        now = values(repository, spec, ReadWindow())
        assert {key: now[key] for key in then[spec.name]} == then[spec.name]
        old = repository.read(spec, ReadWindow(history=True, as_of=5))
        assert old.equals(history[spec.name])
    record = repository.get_commit(6)
    assert record is not None
    assert record.metadata == {"restored_from": "2", "restored_ref": "v1"}
    changes = repository.list_commit_changes(6)
    assert [(c["type_name"], c["operation"]) for c in changes] == [
        ("Customer", "update"),
        ("Everything", "update"),
        ("Subscription", "update"),
    ]
    again = restore(repository, "v1", apply=True)
    assert (again.restored, again.new_commit_id) == (0, None)
    assert verify_storage(repository, deep=True).findings == []

    back = restore(repository, 5, apply=True)
    assert back.new_commit_id == 7
    assert values(repository, CUSTOMER, ReadWindow()) == values(
        repository, CUSTOMER, ReadWindow(as_of=5)
    )
    repository.close()


def test_nothing_to_restore(storage: Storage) -> None:
    repository = storage.open()
    put(repository, customer("a", age=1))
    assert restore(repository, 1, apply=True).new_commit_id is None
    put(repository, customer("b", age=1))
    done = restore(repository, 1, apply=True)
    assert (done.restored, done.created_after, done.new_commit_id) == (0, 1, None)
    repository.close()


def test_references_that_mean_no_commit(storage: Storage) -> None:
    repository = storage.open()
    with pytest.raises(ConfigurationError, match="there are none yet"):
        restore(repository, 1)
    put(repository, customer("a", age=1))
    for reference in (0, 2):
        with pytest.raises(ConfigurationError, match="1 to 1 are there"):
            restore(repository, reference, apply=True)
    with pytest.raises(UnknownTagError):
        restore(repository, "v1", apply=True)
    repository.close()


def test_an_in_memory_storage_can_be_restored() -> None:
    repository = open_repository(":memory:")
    populated(repository)
    assert restore(repository, 1, apply=True).new_commit_id == 6
    assert values(repository, CUSTOMER, ReadWindow())[("c",)]["age"] == 3
    repository.close()


def test_many_rows_stream(storage: Storage) -> None:
    repository = storage.open()
    keys = [f"k{n:06d}" for n in range(25_000)]
    commit(repository, stream_of(CUSTOMER, [customer(k, age=1) for k in keys]))
    commit(repository, stream_of(CUSTOMER, [customer(k, age=2) for k in keys[::2]]))
    done = restore(repository, 1, apply=True)
    assert (done.restored, done.new_commit_id) == (12_500, 3)
    ages = repository.read(CUSTOMER).column("age").to_pylist()
    assert set(ages) == {1}
    repository.close()


def test_across_a_change_of_schema_it_is_refused(either_world: World) -> None:
    writer = either_world.open("writer")
    write(writer.repo, V1, row("a", name="Ann", age=1))
    migrate(writer.repo, V2)
    write(writer.repo, V2, row("a", name="Anna", age=1.0, tier="gold"))
    with pytest.raises(SchemaOutdatedError, match="at commit 2"):
        restore(writer.repo, 1, apply=True)
    assert restore(writer.repo, 2, apply=True).restored == 1
    assert [r["name"] for r in latest(writer.repo, V2)] == ["Ann"]


# -- beside others, and after crashes -------------------------------------------------------------


def test_a_commit_that_comes_first_is_restored_too(either_world: World) -> None:
    """Between plan and publish another writer changes another identity."""
    world = either_world
    writer = world.open("writer")
    writer.put(customer("a", age=1), customer("b", age=1))
    writer.put(customer("a", age=2))
    operator = world.open("operator")
    other = world.open("other")

    def meanwhile() -> None:
        other.put(customer("b", age=9))
        other.repo.flush()

    at(operator.store, "PUT_IF", "meta/locks/*", meanwhile)
    done = restore(operator.repo, 1, apply=True)
    assert done.new_commit_id == 4
    assert done.restored == 2
    assert world.open("reader").ages() == {"a": 1, "b": 1}


def test_writers_that_always_come_first_are_given_way_in_words(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the soak: what was raised told to read a type again that nobody had asked for."""
    repository, other = storage.open(), storage.open()
    put(repository, customer("a", age=1))
    put(repository, customer("a", age=2))
    commit_of = type(repository).commit
    ages = iter(range(3, 1000))

    def overtaken(self: Any, request: Any) -> Any:
        if self is repository:
            put(other, customer("a", age=next(ages)))
        return commit_of(self, request)

    monkeypatch.setattr(type(repository), "commit", overtaken)
    with pytest.raises(HeadMismatchError, match="nothing was published, try again") as caught:
        restore(repository, 1, apply=True)
    assert caught.value.retryable
    monkeypatch.undo()
    assert restore(repository, 1, apply=True).restored == 1
    repository.close()
    other.close()


def test_restore_of_compacted_history(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    populated(writer.repo)
    before = everything(world.open("reader"))
    compact(writer.repo, CompactionPolicy(min_entries=2))
    restore(writer.repo, 2, apply=True)
    assert earlier(everything(world.open("reader")), 5) == earlier(before, 5)
    assert world.open("reader").ages()["c"] == 3


@pytest.mark.simulation
@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_a_crash_at_any_write_changes_no_earlier_read_and_a_rerun_finishes(
    engine_version: str,
) -> None:
    with made_world(engine_version) as world:
        writer = world.open("writer")
        writer.put(customer("a", age=1), customer("b", age=1))
        commit(writer.repo, rows_of(PRODUCT, product("p", 1.0)))
        writer.put(customer("a", age=2))
        commit(writer.repo, rows_of(PRODUCT, product("p", 2.0)))
        writer.repo.flush()
        objects = world.backend.objects()

    def after(world: World, before: dict[str, Any]) -> None:
        assert earlier(everything(world.open("reader")), 4) == before
        restore(world.open("again").repo, 2, apply=True)
        assert world.head().commit_id == 5, "once"
        assert earlier(everything(world.open("reader")), 4) == before
        assert world.open("reader").ages() == {"a": 1, "b": 1}
        assert world.chain()[-1].metadata["restored_from"] == "2"

    crashes = Crashes(objects, engine_version, lambda w: restore(w.repo, 2, apply=True))
    assert crashes.each(after) >= 21


# -- at the shell ---------------------------------------------------------------------------------


def test_the_command(storage: Storage) -> None:
    repository = storage.open()
    populated(repository)
    repository.create_tag("v1", 2)
    repository.close()
    place = ("--storage-uri", storage.uri)
    shown = onto("restore", "v1", *place)
    assert shown.code == 0
    assert "5 identities came after commit 2 (v1)" in shown.out
    assert "To restore 3 rows to commit 2 (v1): --apply" in shown.out
    assert onto("restore", "v1", "--json", *place).json["new_commit_id"] is None
    applied = onto("restore", "v1", "--apply", *place)
    assert "Restored 3 rows to commit 2 (v1), as commit 6." in applied.out
    assert "Nothing to restore" in onto("restore", "2", "--apply", *place).out
    unknown = onto("restore", "v9", *place)
    assert unknown.code == 4
    assert "did you mean v1" in unknown.error()
    assert onto("restore", "99", *place).code == 2


def test_the_command_shows_the_notes_of_its_commit(storage: Storage) -> None:
    repository = storage.open()
    for seats in (1, 2, 3):
        commit(repository, rows_of(SUBSCRIPTION, edge("a", "p", seats=seats)))
    repository.close()
    note = "Subscription: its relations point to Customer, of which nothing is stored yet"
    applied = onto("restore", "1", "--apply", "--storage-uri", storage.uri)
    assert applied.code == 0
    assert f"note: {note}" in applied.err
    again = onto("restore", "2", "--apply", "--json", "--storage-uri", storage.uri).json
    assert note in again["notes"]


def test_a_log_that_never_recorded_a_schema_says_so(world: World) -> None:
    """As the first implementation wrote it."""
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    writer.put(customer("a", age=2))
    head = world.head()
    assert head.manifest_path is not None
    for path in (head.manifest_path, str(world.chain()[-1].parent_manifest_path)):
        document = world.document(path)
        world.backend.write(path, json.dumps({**document, "schema": {}}).encode())
    world.rehash()
    with pytest.raises(SchemaMetadataError, match="what Customer looks like"):
        restore(world.open("operator").repo, 1, apply=True)
