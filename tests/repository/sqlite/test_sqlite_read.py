"""Reading: windows, keys, order, change lists, known types, lossless values."""

from __future__ import annotations

import sqlite3
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from storage_engine.errors import ValidationError
from storage_engine.model.arrow import ARROW_TYPES, row_schema
from storage_engine.repository.protocol import CommitRequest, ReadWindow, TypeInput
from storage_engine.repository.sqlite.connection import BATCH_ROWS
from storage_engine.repository.sqlite.data_table import from_values, to_values
from storage_engine.repository.sqlite.engine import SqliteRepository
from tests.repository.sqlite.support import (
    CUSTOMER,
    EMPLOYMENT,
    EVERYTHING,
    KNOWS,
    PRODUCT,
    commit,
    customer,
    customers,
    edge,
    open_at,
    product,
    put,
    rows,
)


@pytest.fixture
def history(repository: SqliteRepository) -> SqliteRepository:
    """1: a, b   2: b changed   3: products only   4: a changed, c"""
    put(repository, customer("b", name="B1"), customer("a", name="A1"))
    put(repository, customer("b", name="B2"))
    commit(repository, PRODUCT, product("p", 1.0))
    put(repository, customer("c", name="C4"), customer("a", name="A4"))
    return repository


def seen(
    repository: SqliteRepository, window: ReadWindow, keys: Any = None
) -> list[tuple[int, str]]:
    table = repository.read(CUSTOMER, window, keys=keys)
    return list(zip(table["commit_id"].to_pylist(), table["name"].to_pylist(), strict=True))


ALL = [(1, "A1"), (1, "B1"), (2, "B2"), (4, "A4"), (4, "C4")]
LATEST = [(4, "A4"), (2, "B2"), (4, "C4")]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (ReadWindow(), LATEST),
        (ReadWindow(as_of=4), LATEST),
        (ReadWindow(as_of=99), LATEST),
        (ReadWindow(as_of=3), [(1, "A1"), (2, "B2")]),
        (ReadWindow(as_of=1), [(1, "A1"), (1, "B1")]),
        (ReadWindow(as_of=0), []),
        (ReadWindow(as_of=-5), []),
        (ReadWindow(history=True), ALL),
        (ReadWindow(history=True, since=0), ALL),
        (ReadWindow(history=True, since=1), ALL[2:]),
        (ReadWindow(history=True, since=4), []),
        (ReadWindow(history=True, as_of=2), ALL[:3]),
    ],
)
def test_windows(
    history: SqliteRepository, window: ReadWindow, expected: list[tuple[int, str]]
) -> None:
    assert seen(history, window) == expected


def test_keys_limit_a_read(history: SqliteRepository) -> None:
    keys = pa.table({"entity_key": ["c", "a", "nobody", "a"]})
    assert seen(history, ReadWindow(), keys) == [(4, "A4"), (4, "C4")]
    assert seen(history, ReadWindow(as_of=3), keys) == [(1, "A1")]
    assert seen(history, ReadWindow(history=True), keys) == [(1, "A1"), (4, "A4"), (4, "C4")]
    assert seen(history, ReadWindow(), keys.slice(0, 0)) == []
    assert seen(history, ReadWindow(), keys) == [(4, "A4"), (4, "C4")]


def test_keys_of_relations(repository: SqliteRepository) -> None:
    commit(repository, EMPLOYMENT, *(edge("a", "p", str(n), role="x") for n in range(4)))
    keys = pa.table({"left_key": ["a", "a"], "right_key": ["p", "q"], "instance_key": ["2", "2"]})
    assert repository.read(EMPLOYMENT, keys=keys)["instance_key"].to_pylist() == ["2"]


def test_schema_of_results(history: SqliteRepository) -> None:
    expected = pa.schema([pa.field("commit_id", pa.int64(), nullable=False), *row_schema(CUSTOMER)])
    for window in (ReadWindow(), ReadWindow(as_of=0), ReadWindow(history=True)):
        assert history.read(CUSTOMER, window).schema == expected
    assert history.read(KNOWS).num_rows == 0
    assert history.read(KNOWS).column_names[0] == "commit_id"


def test_identities_are_ordered_by_bytes(repository: SqliteRepository) -> None:
    keys = ["Z", "a", "ä", "", "\U0001f600", "10", "9", "x\x00y", "x"]
    put(repository, *(customer(key) for key in keys))
    found = repository.read(CUSTOMER)["entity_key"].to_pylist()
    assert found == sorted(keys, key=str.encode)


def test_reads_across_batches(repository: SqliteRepository) -> None:
    count = 2 * BATCH_ROWS + 1
    put(repository, *(customer(f"{n:06}", age=n) for n in range(count)))
    assert repository.read(CUSTOMER)["age"].to_pylist() == list(range(count))


def test_commit_changes(repository: SqliteRepository) -> None:
    put(repository, customer("b"), customer("a"))
    repository.commit(
        CommitRequest(
            [
                TypeInput(EMPLOYMENT, table=rows(EMPLOYMENT, [edge("a", "p", "1", role="x")])),
                TypeInput(PRODUCT, table=rows(PRODUCT, [product("p", 2.0)])),
                customers(customer("b", name="Bob"), customer("c"), customer("a")),
            ]
        )
    )
    assert repository.list_commit_changes(1) == [
        {"kind": "entity", "type_name": "Customer", "key": "a", "operation": "insert"},
        {"kind": "entity", "type_name": "Customer", "key": "b", "operation": "insert"},
    ]
    assert repository.list_commit_changes(2) == [
        {"kind": "entity", "type_name": "Customer", "key": "b", "operation": "update"},
        {"kind": "entity", "type_name": "Customer", "key": "c", "operation": "insert"},
        {"kind": "entity", "type_name": "Product", "key": "p", "operation": "insert"},
        {
            "kind": "relation",
            "type_name": "Employment",
            "left_key": "a",
            "right_key": "p",
            "instance_key": "1",
            "operation": "insert",
        },
    ]
    assert repository.list_commit_changes(3) == []


def test_known_types_need_no_class(path: Path, engine: str) -> None:
    first = open_at(path, engine)
    put(first, customer("a"))
    commit(first, EMPLOYMENT, edge("a", "p", "1", role="x"))
    first.close()
    second = open_at(path, engine)
    stored = second.known_types()
    assert [spec.ref for spec in stored] == [CUSTOMER.ref, EMPLOYMENT.ref]
    assert [spec.schema_sha256 for spec in stored] == [
        CUSTOMER.schema_sha256,
        EMPLOYMENT.schema_sha256,
    ]
    assert second.read(stored[0]).to_pylist() == [{"commit_id": 1, **customer("a")}]
    assert commit(second, stored[0], customer("a")) is None


def test_v2_tables_have_typed_columns(path: Path) -> None:
    repository = open_at(path, "v2")
    put(repository, customer("a"))
    commit(repository, EVERYTHING, everything("e"))
    with sqlite3.connect(path) as connection:
        columns = {
            row[1]: (row[2], row[3])
            for row in connection.execute('PRAGMA table_info("entity_Everything_v1")')
        }
        indexes = {row[1] for row in connection.execute('PRAGMA index_list("entity_Customer_v1")')}
        catalog = connection.execute("SELECT * FROM type_layout_catalog ORDER BY 2").fetchall()
        (moment,) = connection.execute('SELECT moment FROM "entity_Everything_v1"').fetchone()
    assert columns == {
        "entity_key": ("TEXT", 1),
        "commit_id": ("INTEGER", 1),
        "schema_version_id": ("INTEGER", 1),
        "id": ("TEXT", 1),
        "text": ("TEXT", 1),
        "number": ("INTEGER", 1),
        "real": ("REAL", 1),
        "flag": ("INTEGER", 1),
        "moment": ("TEXT", 1),
        "day": ("TEXT", 1),
        "raw": ("BLOB", 1),
        "maybe": ("TEXT", 0),
        "maybe_moment": ("TEXT", 0),
        "tags": ("TEXT", 1),
    }
    assert "entity_Customer_v1:tier" in indexes
    assert "entity_Customer_v1:name" not in indexes
    assert moment == "2026-01-02T03:04:05.000006Z"
    assert [row[:6] for row in catalog] == [
        ("entity", "Customer", 1, "entity_Customer_v1", 1, 1),
        ("entity", "Everything", 1, "entity_Everything_v1", 2, 1),
    ]


def everything(key: str, **values: Any) -> dict[str, Any]:
    return {
        "entity_key": key,
        "id": key,
        "text": "t",
        "number": -(2**63),
        "real": 0.1,
        "flag": True,
        "moment": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        "day": date(1, 1, 1),
        "raw": b"\x00\xff",
        "maybe": None,
        "maybe_moment": None,
        "tags": "[]",
        **values,
    }


EAST = timezone(timedelta(hours=5))
MOMENTS = st.datetimes(timezones=st.just(UTC)) | st.datetimes(timezones=st.just(EAST)).filter(
    lambda moment: moment.year > 1
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": TEXT,
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "datetime": MOMENTS,
    "date": st.dates(),
    "bytes": st.binary(),
    "json": st.just('{"a":[1,null]}'),
}


@pytest.mark.parametrize("storage", list(VALUES))
@settings(deadline=None)
@given(data=st.data())
def test_codec_round_trip(storage: str, data: st.DataObject) -> None:
    given_values = data.draw(st.lists(st.none() | VALUES[storage]))
    column = pa.array(given_values, ARROW_TYPES[storage])  # type: ignore[index]
    values = to_values(column, storage)
    with sqlite3.connect(":memory:") as connection:
        stored = [connection.execute("SELECT ?", (value,)).fetchone()[0] for value in values]
    connection.close()
    assert from_values(stored, storage, column.type).equals(column)


@settings(deadline=None)
@given(st.lists(st.datetimes(timezones=st.just(UTC)), min_size=2))
@example([datetime(999, 12, 31, tzinfo=UTC), datetime(1000, 1, 1, tzinfo=UTC)])
def test_moments_sort_as_text(moments: list[datetime]) -> None:
    texts = to_values(pa.array(moments, ARROW_TYPES["datetime"]), "datetime")
    assert {len(text) for text in texts} == {27}
    assert sorted(texts) == to_values(
        pa.array(sorted(moments), ARROW_TYPES["datetime"]), "datetime"
    )


EVERYTHING_ROWS = st.lists(
    st.builds(
        everything,
        TEXT,
        text=TEXT,
        number=VALUES["int"],
        real=VALUES["float"],
        flag=VALUES["bool"],
        moment=MOMENTS,
        day=VALUES["date"],
        raw=VALUES["bytes"],
        maybe=st.none() | TEXT,
        maybe_moment=st.none() | MOMENTS,
    ),
    unique_by=lambda row: row["entity_key"],
    min_size=1,
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(values=EVERYTHING_ROWS)
def test_rows_come_back_as_they_went_in(engine: str, values: list[dict[str, Any]]) -> None:
    repository = open_at(":memory:", engine)
    commit(repository, EVERYTHING, *values)
    expected = rows(EVERYTHING, sorted(values, key=lambda row: row["entity_key"].encode()))
    found = repository.read(EVERYTHING).drop_columns(["commit_id"])
    assert found.equals(expected)
    assert commit(repository, EVERYTHING, *values) is None
    repository.close()


def test_a_moment_beyond_the_year_9999_is_refused(repository: SqliteRepository) -> None:
    table = rows(EVERYTHING, [everything("a")])
    far = pa.array([2**62], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    table = table.set_column(table.column_names.index("moment"), "moment", far)
    with pytest.raises(ValidationError, match=r"Everything\.moment: a date outside"):
        repository.commit(CommitRequest([TypeInput(EVERYTHING, table=table)]))
