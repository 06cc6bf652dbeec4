"""What every engine promises: the same requests get the same answers (RFC 0004, RFC 0009).

Everything here goes through the `Repository` protocol alone; what the engines write is looked at
in test_repository_layout.py. All tests run on the four engines of this machine, those marked
`on_servers` also on SeaweedFS and moto.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from storage_engine.errors import (
    ConcurrentWriteError,
    ExpectedVersionMismatchError,
    SchemaOutdatedError,
)
from storage_engine.maintenance.compaction import CompactionPolicy, compact, plan_compaction
from storage_engine.model import Entity, Field, TypeSpec, row_schema, spec_of
from storage_engine.repository import Idempotency, ReadWindow, Repository, TypeChange, TypeInput
from storage_engine.repository.protocol import AppliedUnit, Snapshot
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
    keys_of,
    on_servers,
    product,
    put,
    rows_of,
    stream_of,
    table_of,
)

HISTORY = ReadWindow(history=True)


@pytest.fixture
def repository(storage: Storage) -> Iterator[Repository]:
    opened = storage.open(runtime_id="tester")
    yield opened
    opened.close()


def versions(repository: Repository, window: ReadWindow = HISTORY) -> list[tuple[int, str, str]]:
    """Customers as (commit, key, name), in the order they come."""
    table = repository.read(CUSTOMER, window)
    columns = (table["commit_id"], table["entity_key"], table["name"])
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def changes(*counts: tuple[str, int, int]) -> list[TypeChange]:
    """Of entity types."""
    return [TypeChange("entity", name, inserted, updated) for name, inserted, updated in counts]


# --- commit -------------------------------------------------------------------------------------


@on_servers
def test_an_empty_storage_has_nothing(repository: Repository) -> None:
    assert repository.head_commit_id() == 0
    assert repository.type_head(CUSTOMER) == 0
    assert repository.list_commits() == []
    assert repository.get_commit(1) is None
    assert repository.list_commit_changes(1) == []
    for window in (ReadWindow(), HISTORY, ReadWindow(as_of=0), ReadWindow(as_of=9)):
        assert repository.read(CUSTOMER, window).num_rows == 0


@on_servers
def test_insert_update_and_unchanged(repository: Repository) -> None:
    first = put(repository, customer("a"), customer("b"))
    assert (first.commit_id, list(first.changes)) == (1, changes(("Customer", 2, 0)))
    second = put(repository, customer("a"), customer("b", "Bea"), customer("c"))
    assert (second.commit_id, list(second.changes)) == (2, changes(("Customer", 1, 1)))
    assert (first.attempts, first.already_applied) == (1, False)
    assert versions(repository) == [
        (1, "a", "Ann"),
        (1, "b", "Ann"),
        (2, "b", "Bea"),
        (2, "c", "Ann"),
    ]


def test_nothing_changed_is_no_commit(repository: Repository) -> None:
    put(repository, customer("a"), customer("b", age=None))
    assert commit(repository, rows_of(CUSTOMER, customer("a"), customer("b", age=None))) is None
    assert commit(repository, rows_of(CUSTOMER)) is None
    assert commit(repository) is None
    assert repository.head_commit_id() == 1


def test_null_is_a_value_like_others(repository: Repository) -> None:
    put(repository, customer("a", age=None))
    assert list(put(repository, customer("a", age=0)).changes) == changes(("Customer", 0, 1))
    assert list(put(repository, customer("a", age=None)).changes) == changes(("Customer", 0, 1))
    assert repository.read(CUSTOMER)["age"].to_pylist() == [None]


def test_a_value_may_come_back(repository: Repository) -> None:
    """Against the latest version, not against any."""
    for name in ("one", "two", "one"):
        put(repository, customer("a", name))
    assert [name for _, _, name in versions(repository)] == ["one", "two", "one"]


@on_servers
def test_several_types_in_one_commit(repository: Repository) -> None:
    result = commit(
        repository,
        rows_of(CUSTOMER, customer("a")),
        rows_of(PRODUCT, product("p")),
        rows_of(SUBSCRIPTION, edge("a", "p", seats=1)),
    )
    assert result is not None
    assert {(c.kind, c.type_name, c.inserted, c.updated) for c in result.changes} == {
        ("entity", "Customer", 1, 0),
        ("entity", "Product", 1, 0),
        ("relation", "Subscription", 1, 0),
    }
    # Of the types stated, only those that changed are in the next one.
    again = commit(
        repository, rows_of(CUSTOMER, customer("a")), rows_of(PRODUCT, product("p", 2.0))
    )
    assert again is not None
    assert list(again.changes) == changes(("Product", 0, 1))
    assert (repository.type_head(CUSTOMER), repository.type_head(PRODUCT)) == (1, 2)


@on_servers
def test_keys_are_any_text(repository: Repository) -> None:
    keys = ["", " ", "a/b", "A", "a", "ä", "'\"--", "\U0001f600", "x" * 300, "../../etc", "\n"]
    put(repository, *(customer(key) for key in keys))
    found = repository.read(CUSTOMER)["entity_key"].to_pylist()
    assert found == sorted(keys)  # code point order, which is the byte order of UTF-8
    assert commit(repository, rows_of(CUSTOMER, *(customer(key) for key in keys))) is None


@on_servers
def test_every_field_type_comes_back(repository: Repository) -> None:
    row = {
        "entity_key": "e",
        "id": "e",
        "text": "tëxt\n\x00",
        "number": -(2**63),
        "real": 1e-300,
        "flag": True,
        "moment": datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC),
        "day": date(1, 1, 1),
        "raw": bytes(range(256)),
        "maybe": None,
        "maybe_number": 2**63 - 1,
        "tags": '["a","b"]',
        "counts": '{"n":1}',
        "mixed": '"text"',
        "anything": None,
    }
    assert commit(repository, rows_of(EVERYTHING, row)) is not None
    found = repository.read(EVERYTHING)
    assert found.schema.names == ["commit_id", *row_schema(EVERYTHING).names]
    assert found.drop_columns(["commit_id"]).schema.types == row_schema(EVERYTHING).types
    assert found.to_pylist() == [{"commit_id": 1, **row}]
    assert commit(repository, rows_of(EVERYTHING, row)) is None
    assert commit(repository, stream_of(EVERYTHING, [row])) is None


# --- relations ----------------------------------------------------------------------------------


def test_unkeyed_relations_have_one_row_per_pair(repository: Repository) -> None:
    rows = [edge("a", "p", seats=1), edge("a", "q", seats=1), edge("b", "p", seats=1)]
    commit(repository, rows_of(SUBSCRIPTION, *rows))
    commit(repository, rows_of(SUBSCRIPTION, edge("a", "p", seats=5)))
    found = repository.read(SUBSCRIPTION).to_pylist()
    assert [(r["left_key"], r["right_key"], r["instance_key"], r["seats"]) for r in found] == [
        ("a", "p", "", 5),
        ("a", "q", "", 1),
        ("b", "p", "", 1),
    ]
    assert repository.read(SUBSCRIPTION, HISTORY).num_rows == 4


@on_servers
def test_keyed_relations_have_several_rows_per_pair(repository: Repository) -> None:
    rows = [edge("a", "p", "2024", role="dev"), edge("a", "p", "2020", role="dev")]
    commit(repository, rows_of(EMPLOYMENT, *rows))
    result = commit(repository, rows_of(EMPLOYMENT, edge("a", "p", "2024", role="boss")))
    assert result is not None
    assert [(c.inserted, c.updated) for c in result.changes] == [(0, 1)]
    found = repository.read(EMPLOYMENT).to_pylist()
    assert [(r["commit_id"], r["instance_key"], r["role"]) for r in found] == [
        (1, "2020", "dev"),
        (2, "2024", "boss"),
    ]


def test_a_relation_without_fields(repository: Repository) -> None:
    assert commit(repository, rows_of(KNOWS, edge("a", "b"))) is not None
    assert commit(repository, rows_of(KNOWS, edge("a", "b"))) is None
    assert commit(repository, rows_of(KNOWS, edge("b", "a"))) is not None
    assert repository.read(KNOWS).num_rows == 2


# --- bulk ---------------------------------------------------------------------------------------


def test_a_stream_is_one_commit(repository: Repository) -> None:
    batches = [[customer(f"{n:04}-{part}") for n in range(500)] for part in range(3)]
    result = commit(repository, stream_of(CUSTOMER, *batches))
    assert result is not None
    assert (result.commit_id, list(result.changes)) == (1, changes(("Customer", 1500, 0)))
    keys = [row["entity_key"] for batch in batches for row in batch]
    assert repository.read(CUSTOMER)["entity_key"].to_pylist() == sorted(keys)


def test_ingesting_again_makes_no_commit(repository: Repository) -> None:
    rows = [customer(f"{n:04}") for n in range(200)]
    commit(repository, stream_of(CUSTOMER, rows))
    assert commit(repository, stream_of(CUSTOMER, rows)) is None
    assert commit(repository, stream_of(CUSTOMER, rows[:50], rows[50:])) is None
    assert repository.head_commit_id() == 1


@on_servers
def test_a_stream_writes_what_is_new_or_changed(repository: Repository) -> None:
    put(repository, customer("a"), customer("b"))
    rows = [customer("a"), customer("b", "Bea"), customer("c")]
    result = commit(repository, stream_of(CUSTOMER, rows))
    assert result is not None
    assert list(result.changes) == changes(("Customer", 1, 1))
    assert versions(repository, ReadWindow(history=True, since=1)) == [
        (2, "b", "Bea"),
        (2, "c", "Ann"),
    ]


@on_servers
@pytest.mark.parametrize("known", [False, True], ids=["new type", "known type"])
def test_the_last_of_repeated_identities_counts(repository: Repository, known: bool) -> None:
    if known:
        put(repository, customer("a", "stored"))
    rows = [customer("a", "first"), customer("b"), customer("a", "second")]
    result = commit(repository, stream_of(CUSTOMER, rows, [customer("a", "last")]))
    assert result is not None
    assert list(result.changes) == changes(("Customer", 1 if known else 2, 1 if known else 0))
    assert [(key, name) for _, key, name in versions(repository, ReadWindow())] == [
        ("a", "last"),
        ("b", "Ann"),
    ]
    assert (
        repository.read(CUSTOMER, ReadWindow(history=True, since=result.commit_id - 1)).num_rows
        == 2
    )


def test_a_repeated_identity_that_ends_as_stored_is_no_change(repository: Repository) -> None:
    put(repository, customer("a"))
    rows = [customer("a", "other"), customer("a")]
    assert commit(repository, stream_of(CUSTOMER, rows)) is None


def test_an_empty_stream_is_no_commit(repository: Repository) -> None:
    assert commit(repository, stream_of(CUSTOMER)) is None
    assert commit(repository, stream_of(CUSTOMER, [])) is None
    assert repository.head_commit_id() == 0
    assert repository.read(CUSTOMER).num_rows == 0


def test_streams_and_tables_in_one_commit(repository: Repository) -> None:
    result = commit(
        repository,
        stream_of(CUSTOMER, [customer("a")]),
        rows_of(PRODUCT, product("p")),
        stream_of(SUBSCRIPTION, [edge("a", "p", seats=1)]),
    )
    assert result is not None
    assert result.commit_id == 1
    assert repository.read(SUBSCRIPTION).num_rows == 1
    assert [(c["kind"], c["type_name"]) for c in repository.list_commit_changes(1)] == [
        ("entity", "Customer"),
        ("entity", "Product"),
        ("relation", "Subscription"),
    ]


def test_a_stream_that_fails_leaves_nothing(repository: Repository) -> None:
    def breaking() -> Iterator[pa.RecordBatch]:
        yield from table_of(CUSTOMER, [customer("a")]).to_batches()
        raise RuntimeError("the source broke off")

    with pytest.raises(RuntimeError, match="broke off"):
        commit(repository, TypeInput(CUSTOMER, stream=breaking()))
    assert repository.head_commit_id() == 0
    assert put(repository, customer("b")).commit_id == 1


# --- windows (RFC 0004, 4.3) --------------------------------------------------------------------


@pytest.fixture
def timeline(repository: Repository) -> Repository:
    """1: a and c; 2: another type; 3: b and a again; 4: c again."""
    put(repository, customer("c", "c1"), customer("a", "a1"))
    commit(repository, rows_of(PRODUCT, product("p")))
    put(repository, customer("b", "b3"), customer("a", "a3"))
    put(repository, customer("c", "c4"))
    return repository


ALL_VERSIONS = [(1, "a", "a1"), (1, "c", "c1"), (3, "a", "a3"), (3, "b", "b3"), (4, "c", "c4")]


def test_rfc0004_04_temporal_latest(timeline: Repository) -> None:
    assert versions(timeline, ReadWindow()) == [(3, "a", "a3"), (3, "b", "b3"), (4, "c", "c4")]


AS_OF: dict[int, list[tuple[int, str, str]]] = {
    -7: [],
    -1: [],
    0: [],
    1: [(1, "a", "a1"), (1, "c", "c1")],
    2: [(1, "a", "a1"), (1, "c", "c1")],
    3: [(3, "a", "a3"), (3, "b", "b3"), (1, "c", "c1")],
    4: [(3, "a", "a3"), (3, "b", "b3"), (4, "c", "c4")],
    5: [(3, "a", "a3"), (3, "b", "b3"), (4, "c", "c4")],
    10**12: [(3, "a", "a3"), (3, "b", "b3"), (4, "c", "c4")],
}


@on_servers
def test_rfc0004_04_temporal_as_of_clamps_at_both_ends(timeline: Repository) -> None:
    assert {as_of: versions(timeline, ReadWindow(as_of=as_of)) for as_of in AS_OF} == AS_OF


def test_rfc0004_04_temporal_history_is_ordered_by_commit_and_identity(
    timeline: Repository,
) -> None:
    assert versions(timeline) == ALL_VERSIONS


@on_servers
def test_rfc0004_04_temporal_history_since(timeline: Repository) -> None:
    for since in (-7, -1, 0, 1, 2, 3, 4, 5, 10**12):
        wanted = [version for version in ALL_VERSIONS if version[0] > since]
        assert versions(timeline, ReadWindow(history=True, since=since)) == wanted, since


def test_rfc0004_04_temporal_history_of_a_stretch(timeline: Repository) -> None:
    window = ReadWindow(history=True, since=1, as_of=3)
    assert versions(timeline, window) == [(3, "a", "a3"), (3, "b", "b3")]


def test_rfc0004_04_temporal_relations_are_ordered_by_their_whole_identity(
    repository: Repository,
) -> None:
    identities = [("b", "p", "1"), ("a", "q", "1"), ("a", "p", "2"), ("a", "p", "1")]
    for role in ("dev", "boss"):
        rows = [edge(*identity, role=role) for identity in identities]
        commit(repository, rows_of(EMPLOYMENT, *rows))
    found = repository.read(EMPLOYMENT, HISTORY).select(["commit_id", *EMPLOYMENT.identity])
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        (commit_id, *identity) for commit_id in (1, 2) for identity in sorted(identities)
    ]


def test_rfc0004_04_temporal_same_answers_after_reopening(
    storage: Storage, timeline: Repository
) -> None:
    timeline.flush()
    again = storage.open()
    for window in (ReadWindow(), HISTORY, ReadWindow(as_of=3), ReadWindow(history=True, since=2)):
        assert versions(again, window) == versions(timeline, window)
    again.close()


@on_servers
def test_reads_by_keys(timeline: Repository) -> None:
    keys = keys_of(CUSTOMER, "c", "a", "absent")
    assert timeline.read(CUSTOMER, keys=keys)["name"].to_pylist() == ["a3", "c4"]
    past = timeline.read(CUSTOMER, ReadWindow(as_of=1), keys=keys)
    assert past["name"].to_pylist() == ["a1", "c1"]
    history = timeline.read(CUSTOMER, HISTORY, keys=keys)
    assert history["name"].to_pylist() == ["a1", "c1", "a3", "c4"]
    assert timeline.read(CUSTOMER, keys=keys_of(CUSTOMER)).num_rows == 0
    assert timeline.read(CUSTOMER, keys=keys_of(CUSTOMER, "a", "a")).num_rows == 1


def test_reads_by_keys_of_relations(repository: Repository) -> None:
    rows = [edge("a", "p", "1", role="x"), edge("a", "p", "2", role="y"), edge("b", "p", role="z")]
    commit(repository, rows_of(EMPLOYMENT, *rows))
    keys = keys_of(EMPLOYMENT, ("a", "p", "2"), ("b", "p", ""), ("p", "a", "1"))
    assert repository.read(EMPLOYMENT, keys=keys)["role"].to_pylist() == ["y", "z"]


def test_type_head(timeline: Repository) -> None:
    assert timeline.type_head(CUSTOMER) == 4
    assert timeline.type_head(PRODUCT) == 2
    assert timeline.type_head(SUBSCRIPTION) == 0


# --- commits ------------------------------------------------------------------------------------


def test_commits_are_listed_newest_first(timeline: Repository) -> None:
    def ids(**options: Any) -> list[int]:
        return [record.id for record in timeline.list_commits(**options)]

    assert ids() == [4, 3, 2, 1]
    assert ids(limit=2) == [4, 3]
    assert ids(limit=0) == []
    assert ids(since_commit_id=2) == [4, 3]
    assert ids(since_commit_id=4) == []
    assert ids(limit=1, since_commit_id=1) == [4]


def test_a_span_of_commits_is_listed_oldest_first(timeline: Repository) -> None:
    def ids(since: int, upto: int) -> list[int]:
        return [record.id for record in timeline.commits_between(since, upto)]

    assert ids(0, 4) == [1, 2, 3, 4]
    assert ids(1, 3) == [2, 3]
    assert ids(-1, 2**60) == [1, 2, 3, 4]
    assert ids(4, 4) == ids(3, 2) == ids(0, 0) == []
    assert timeline.commits_between(1, 2)[0] == timeline.get_commit(2)


@on_servers
def test_values_that_commits_wrote(repository: Repository) -> None:
    """By commit; of values that are alike one, which may stand in the file or not."""
    moment = datetime(2013, 1, 31, 23, 30, tzinfo=UTC)

    def write(*keys: str, **values: Any) -> None:
        row = {"text": "t", "number": 1, "real": 0.5, "flag": True, "moment": moment}
        row |= {"day": date(2013, 1, 31), "raw": b"", "tags": "[]", "counts": "{}", "mixed": "0"}
        rows = [{**row, "entity_key": key, "id": key, **values} for key in keys]
        assert commit(repository, rows_of(EVERYTHING, *rows)) is not None

    write("a", "b", maybe="x")
    put(repository, customer("c"))
    write("a", day=date(2013, 2, 1), maybe=None)
    write("a", day=date(2013, 2, 2), text="u" * 100)
    write("b", day=date(2013, 2, 1), moment=moment + timedelta(hours=1), maybe="y")

    def values(field: str, since: int = 0, upto: int = 5, **alike: Any) -> set[Any]:
        return {*repository.written_values(EVERYTHING, field, since=since, upto=upto, **alike)}

    days = {(1, date(2013, 1, 31)), (3, date(2013, 2, 1)), (4, date(2013, 2, 2))}
    for _ in ("as committed", "merged"):
        assert values("day") == {*days, (5, date(2013, 2, 1))}
        assert values("day", 1, 4) == {day for day in days if day[0] > 1}
        assert values("day", 5) == values("day", 3, 2) == set()
        assert values("moment") == {(n, moment) for n in (1, 3, 4)} | {
            (5, moment + timedelta(hours=1))
        }
        assert values("maybe") == {(1, "x"), (5, "y")}
        assert values("text") == {(n, "t") for n in (1, 3, 5)} | {(4, "u" * 100)}
        assert values("number", upto=9) == {(n, 1) for n in (1, 3, 4, 5)}
        assert {n for n, _ in values("real")} == {1, 3, 4, 5}
        compact(repository, plan_compaction(repository, CompactionPolicy(min_entries=2)))
    write("a", "b", "c", day=date(2013, 3, 1))
    rows = [{"entity_key": key, "id": key} for key in "abc"]
    stored = {row["id"]: row for row in repository.read(EVERYTHING).to_pylist()}
    changed = [
        {**stored[row["id"]], **row, "day": date(2013, month, 9)}
        for month, row in zip((3, 3, 5), rows, strict=True)
    ]
    commit(repository, rows_of(EVERYTHING, *changed))
    month: dict[str, Any] = {"alike": lambda low, high: low.month == high.month}
    assert {(n, day.month) for n, day in values("day", upto=9, **month)} == {
        *((n, day.month) for n, day in days),
        *((5, 2), (6, 3), (7, 3), (7, 5)),
    }
    assert len(values("day", 5, 9, **month)) == 3


@on_servers
def test_a_commit_says_what_it_is(repository: Repository) -> None:
    started = datetime.now(UTC) - timedelta(seconds=30)
    put(repository, customer("a"), metadata={"why": "tëst", "empty": ""})
    commit(repository, rows_of(PRODUCT, product("p")), rows_of(CUSTOMER, customer("b")))
    first, second = repository.get_commit(1), repository.get_commit(2)
    assert first is not None
    assert second is not None
    assert (first.id, first.parent_id, first.kind, first.runtime_id) == (1, None, "data", "tester")
    assert first.metadata == {"why": "tëst", "empty": ""}
    assert (second.id, second.parent_id, second.metadata) == (2, 1, {})
    assert (list(first.types), sorted(second.types)) == (["Customer"], ["Customer", "Product"])
    assert started < first.created_at <= second.created_at < started + timedelta(minutes=10)
    assert repository.list_commits() == [second, first]
    for absent in (-1, 0, 3):
        assert repository.get_commit(absent) is None
    assert first.as_dict()["created_at"] == first.created_at.isoformat()


@on_servers
def test_a_commit_says_what_it_changed(repository: Repository) -> None:
    put(repository, customer("b"), customer("a"))
    commit(
        repository,
        rows_of(CUSTOMER, customer("c"), customer("b", "Bea"), customer("a")),
        rows_of(EMPLOYMENT, edge("a", "p", "1", role="dev")),
    )
    assert repository.list_commit_changes(1) == [
        {"kind": "entity", "type_name": "Customer", "key": key, "operation": "insert"}
        for key in ("a", "b")
    ]
    assert repository.list_commit_changes(2) == [
        {"kind": "entity", "type_name": "Customer", "key": "b", "operation": "update"},
        {"kind": "entity", "type_name": "Customer", "key": "c", "operation": "insert"},
        {
            "kind": "relation",
            "type_name": "Employment",
            "left_key": "a",
            "right_key": "p",
            "instance_key": "1",
            "operation": "insert",
        },
    ]
    for absent in (-1, 0, 3):
        assert repository.list_commit_changes(absent) == []


def renamed(event_id: str) -> dict[str, Any]:
    """An envelope, as the runtime makes them."""
    return {
        "id": event_id,
        "type": "Renamed",
        "namespace": "default",
        "created_at": "2026-01-01T00:00:00.000000+00:00",
        "priority": 100,
        "payload": {"to": "Bea"},
    }


def test_events_make_a_commit_without_data(repository: Repository) -> None:
    result = commit(repository, events=[renamed("e1")])
    assert result is not None
    assert (result.commit_id, list(result.changes)) == (1, [])
    with_unchanged = commit(repository, rows_of(CUSTOMER), events=[renamed("e2")])
    assert with_unchanged is not None
    assert repository.head_commit_id() == 2
    assert repository.list_commit_changes(1) == []
    record = repository.get_commit(1)
    assert record is not None
    assert list(record.types) == []
    assert put(repository, customer("a"), events=[renamed("e3")]).commit_id == 3


# --- idempotency, expectations, isolation -------------------------------------------------------


def test_a_unit_of_work_is_done_once(repository: Repository) -> None:
    def run(name: str, app: str, version: int | str) -> tuple[int, bool]:
        result = put(repository, customer("a", name), idempotency=Idempotency(app, version))
        return result.commit_id, result.already_applied

    assert run("one", "loader", 1) == (1, False)
    assert run("ignored", "loader", 1) == (1, True)
    assert run("three", "loader", 3) == (2, False)
    assert run("ignored", "loader", 3) == (2, True)
    assert run("ignored", "loader", 2)[1], "a lower number has been applied"
    assert run("four", "other", 1) == (3, False)
    assert [name for _, _, name in versions(repository)] == ["one", "three", "four"]


def test_named_units_of_work_equal_the_last_one(repository: Repository) -> None:
    def run(name: str, version: str) -> tuple[int, bool]:
        result = put(repository, customer("a", name), idempotency=Idempotency("files", version))
        return result.commit_id, result.already_applied

    assert run("one", "b.csv") == (1, False)
    assert run("ignored", "b.csv") == (1, True)
    assert run("two", "a.csv") == (2, False)
    assert run("three", "b.csv") == (3, False), "only the last one of its name counts"


@on_servers
def test_idempotency_holds_across_sessions_and_streams(
    storage: Storage, repository: Repository
) -> None:
    unit = Idempotency("loader", 7)
    commit(repository, stream_of(CUSTOMER, [customer("a")]), idempotency=unit)
    other = storage.open()
    result = commit(other, stream_of(CUSTOMER, [customer("b")]), idempotency=unit)
    other.close()
    assert result is not None
    assert (result.commit_id, result.already_applied, list(result.changes)) == (1, True, [])
    assert repository.read(CUSTOMER)["entity_key"].to_pylist() == ["a"]


def test_a_unit_of_work_that_changed_nothing_is_done_too(repository: Repository) -> None:
    put(repository, customer("a"))
    unit = Idempotency("loader", 2)
    assert repository.applied(unit) is None
    assert commit(repository, rows_of(CUSTOMER, customer("a")), idempotency=unit) is None
    assert repository.applied(unit) == AppliedUnit(None)
    put(repository, customer("a", "Bea"))
    for late in (unit, Idempotency("loader", 1)):
        again = commit(repository, rows_of(CUSTOMER, customer("a")), idempotency=late)
        assert again is None, "it would write an old value over a new one"
    assert repository.head_commit_id() == 2
    assert put(repository, customer("b"), idempotency=Idempotency("loader", 3)).commit_id == 3
    assert repository.applied(unit) == AppliedUnit(3), "the newest record of the application"


def test_expectations(repository: Repository) -> None:
    put(repository, customer("a"), expect={CUSTOMER.ref: 0})
    commit(repository, rows_of(PRODUCT, product("p")), expect={CUSTOMER.ref: 1, PRODUCT.ref: 0})
    put(repository, customer("a", "Bea"), expect={CUSTOMER.ref: 1})
    with pytest.raises(ExpectedVersionMismatchError) as caught:
        put(repository, customer("a", "Cleo"), expect={CUSTOMER.ref: 1})
    error = caught.value
    assert (error.type, error.expected, error.actual) == ("Customer", 1, 3)
    with pytest.raises(ExpectedVersionMismatchError):  # also where nothing would change
        put(repository, customer("a", "Bea"), expect={CUSTOMER.ref: 2})
    assert repository.head_commit_id() == 3


def test_expectations_see_other_sessions(storage: Storage, repository: Repository) -> None:
    put(repository, customer("a"))
    other = storage.open()
    put(other, customer("b"))
    other.close()
    with pytest.raises(ExpectedVersionMismatchError):
        put(repository, customer("a", "Bea"), expect={CUSTOMER.ref: 1})
    assert put(repository, customer("a", "Bea"), expect={CUSTOMER.ref: 2}).commit_id == 3


@on_servers
@pytest.mark.parametrize("bulk", [False, True], ids=["table", "stream"])
def test_snapshot_isolation(storage: Storage, repository: Repository, bulk: bool) -> None:
    make = stream_rows if bulk else rows_of
    put(repository, customer("a"), customer("b"), customer("c"))
    other = storage.open()
    put(other, customer("b", "theirs"), customer("c", "theirs"))
    other.close()
    # Identities that nobody changed since are free, new ones too.
    rows = [customer("a", "ours"), customer("d")]
    assert commit(repository, make(CUSTOMER, *rows), snapshot=Snapshot(1)) is not None
    rows = [customer("a", "more"), customer("b", "ours"), customer("c", "theirs")]
    with pytest.raises(ConcurrentWriteError) as caught:
        commit(repository, make(CUSTOMER, *rows), snapshot=Snapshot(1))
    assert (caught.value.type, caught.value.snapshot) == ("Customer", 1)
    assert caught.value.identities == ["a", "b", "c"]
    assert repository.head_commit_id() == 3
    assert commit(repository, make(CUSTOMER, *rows), snapshot=Snapshot(3)) is not None


def stream_rows(spec: Any, *rows: Any) -> TypeInput:
    return stream_of(spec, rows)


def test_snapshot_isolation_names_relations_by_their_identity(repository: Repository) -> None:
    rows = rows_of(SUBSCRIPTION, edge("a", "p", seats=1))
    commit(repository, rows)
    with pytest.raises(ConcurrentWriteError) as caught:
        commit(repository, rows_of(SUBSCRIPTION, edge("a", "p", seats=2)), snapshot=Snapshot(0))
    assert [tuple(identity) for identity in caught.value.identities] == [("a", "p", "")]


# --- schema -------------------------------------------------------------------------------------


def other_customer() -> Any:
    class Customer(Entity):
        id: Field[str] = Field(primary_key=True)
        name: Field[str]
        age: Field[int | None] = Field(default=None)
        email: Field[str | None] = Field(default=None)

    return spec_of(Customer)


def test_a_class_that_differs_is_refused(repository: Repository) -> None:
    put(repository, customer("a"))
    changed = other_customer()
    row = {**customer("a"), "email": None}
    for item in (rows_of(changed, row), stream_of(changed, [row])):
        with pytest.raises(SchemaOutdatedError) as caught:
            commit(repository, item)
        assert (caught.value.type, caught.value.stored_version) == ("Customer", 1)
        assert any("email" in difference for difference in caught.value.differences)
        assert "email" in str(caught.value)
    with pytest.raises(SchemaOutdatedError):
        repository.read(changed)
    assert repository.head_commit_id() == 1


def test_the_order_of_fields_is_no_difference(repository: Repository) -> None:
    put(repository, customer("a", "Ann", 30))

    class Customer(Entity):
        age: Field[int | None] = Field(default=None)
        name: Field[str]
        id: Field[str] = Field(primary_key=True)

    moved = spec_of(Customer)
    row = {"entity_key": "b", "age": 40, "name": "Ben", "id": "b"}
    assert commit(repository, rows_of(moved, row)) is not None
    assert commit(repository, rows_of(moved, row)) is None
    found = repository.read(CUSTOMER).to_pylist()
    assert [(r["id"], r["name"], r["age"]) for r in found] == [("a", "Ann", 30), ("b", "Ben", 40)]


def test_the_order_of_a_union_is_no_difference(repository: Repository) -> None:
    """Python gives one object for `Field[int | str]` and `Field[str | int]`, that which came
    first: what is stored would depend on what else was imported."""

    class Parcel(Entity):
        id: Field[str] = Field(primary_key=True)
        code: Field[int | str]
        codes: Field[list[bool | str]]

    first = spec_of(Parcel)
    turned = TypeSpec.from_schema_dict(_turned(first.schema_dict()))
    assert turned.schema_sha256 != first.schema_sha256
    row = {"entity_key": "a", "id": "a", "code": "1", "codes": "[true]"}
    commit(repository, rows_of(first, row))
    assert commit(repository, rows_of(turned, row)) is None
    assert commit(repository, rows_of(turned, {**row, "code": '"x"'})) is not None
    assert commit(repository, rows_of(first, {**row, "code": '"x"'})) is None
    assert [r["code"] for r in repository.read(turned).to_pylist()] == ['"x"']


def _turned(schema: Any) -> Any:
    if isinstance(schema, dict):
        members = schema.get("members", [])
        return {name: _turned(value) for name, value in schema.items()} | (
            {"members": members[::-1]} if members else {}
        )
    return [_turned(item) for item in schema] if isinstance(schema, list) else schema


# --- information, lifetime, threads -------------------------------------------------------------


@on_servers
def test_storage_info(storage: Storage, timeline: Repository) -> None:
    timeline.flush()
    info = timeline.storage_info()
    assert info["backend"] == timeline.backend == storage.backend
    assert info["engine_version"] == timeline.engine_version == storage.engine_version
    assert info["head_commit_id"] == 4
    assert info["format"] == 3
    assert info["uri"] == timeline.uri
    if storage.backend == "sqlite":
        assert info["db_path"] == str(storage.path)
    else:
        assert info["last_index_warning"] is None
        assert info["requests"]["total"] > 0
    if storage.engine_version == "v1":
        assert "type_layouts" not in info
        return
    assert info["type_layouts"] == {
        name: {
            "type_kind": "entity",
            "current_schema_version_id": 1,
            "activation_commit_id": activation,
            "historical_versions": [],
        }
        for name, activation in (("Customer", 1), ("Product", 2))
    }


def test_another_session_sees_a_commit_at_once(storage: Storage, repository: Repository) -> None:
    other = storage.open()
    try:
        for number in range(1, 4):
            put(repository, customer("a", str(number)))
            assert other.head_commit_id() == number
            assert versions(other, ReadWindow()) == [(number, "a", str(number))]
            assert commit(other, rows_of(CUSTOMER, customer("a", str(number)))) is None
    finally:
        other.close()


@on_servers
def test_sessions_take_turns(storage: Storage, repository: Repository) -> None:
    """Each builds on what the other wrote, though it did not read it."""
    other = storage.open()
    try:
        for number in range(3):
            put(repository, customer("a", f"ours {number}"))
            put(other, customer("a", f"theirs {number}"))
    finally:
        other.close()
    assert [commit_id for commit_id, _, _ in versions(repository)] == [1, 2, 3, 4, 5, 6]


@on_servers
def test_threads_share_a_repository(repository: Repository) -> None:
    stop = threading.Event()

    def watch() -> None:
        before = 0
        while not stop.is_set():
            heads = repository.read(CUSTOMER)["commit_id"].to_pylist()
            assert sorted(heads) == list(range(1, len(heads) + 1)), "a partial commit"
            assert len(heads) >= before, "time went back"
            before = len(heads)

    with ThreadPoolExecutor(4) as pool:
        watchers = [pool.submit(watch) for _ in range(2)]
        try:
            done = list(pool.map(lambda n: put(repository, customer(f"{n:02}")), range(10)))
        finally:
            stop.set()
        for watcher in watchers:
            watcher.result()
    assert sorted(result.commit_id for result in done) == list(range(1, 11))


def test_flush_and_close_may_be_repeated(storage: Storage) -> None:
    opened = storage.open()
    put(opened, customer("a"))
    opened.flush()
    opened.flush()
    opened.close()
    opened.close()
    with closing(storage.open()) as again:
        assert again.head_commit_id() == 1
