"""Committing: reconcile, idempotency, optimistic checks, schema check, all or nothing."""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage_engine.errors import (
    ConcurrentWriteError,
    ExpectedVersionMismatchError,
    SchemaOutdatedError,
    ValidationError,
)
from storage_engine.model.declarations import Entity, spec_of
from storage_engine.model.field import Field
from storage_engine.repository.protocol import (
    CommitRequest,
    Idempotency,
    Snapshot,
    TypeChange,
    TypeInput,
)
from storage_engine.repository.sqlite import engine as base
from storage_engine.repository.sqlite.engine import SqliteRepository
from tests.repository.sqlite.support import (
    CUSTOMER,
    EMPLOYMENT,
    KNOWS,
    PRODUCT,
    SUBSCRIPTION,
    commit,
    customer,
    customers,
    edge,
    open_at,
    product,
    put,
    rows,
    stream,
)


def latest(repository: SqliteRepository) -> dict[str, str]:
    table = repository.read(CUSTOMER)
    return dict(zip(table["entity_key"].to_pylist(), table["name"].to_pylist(), strict=True))


def test_insert_update_unchanged(repository: SqliteRepository) -> None:
    first = put(repository, customer("a"), customer("b"))
    assert first is not None
    assert (first.commit_id, first.attempts, first.already_applied) == (1, 1, False)
    assert list(first.changes) == [TypeChange("entity", "Customer", inserted=2, updated=0)]

    second = put(repository, customer("a"), customer("b", name="Bob"), customer("c"))
    assert second is not None
    assert second.commit_id == 2
    assert list(second.changes) == [TypeChange("entity", "Customer", inserted=1, updated=1)]

    assert put(repository, customer("a"), customer("b", name="Bob")) is None
    assert repository.head_commit_id() == 2
    assert latest(repository) == {"a": "Ann", "b": "Bob", "c": "Ann"}


@pytest.mark.parametrize(
    ("before", "after"),
    [({"age": 1}, {"age": None}), ({"age": None}, {"age": 0}), ({"name": "1"}, {"name": "01"})],
)
def test_every_difference_counts(
    repository: SqliteRepository, before: dict[str, Any], after: dict[str, Any]
) -> None:
    put(repository, customer("a", **before))
    assert put(repository, customer("a", **before)) is None
    assert put(repository, customer("a", **after)) is not None
    assert put(repository, customer("a", **after)) is None


def test_a_value_that_comes_back_is_a_new_version(repository: SqliteRepository) -> None:
    for name in ("Ann", "Bob", "Ann"):
        assert put(repository, customer("a", name=name)) is not None
    assert repository.head_commit_id() == 3


def test_several_types_in_one_commit(repository: SqliteRepository) -> None:
    result = repository.commit(
        CommitRequest(
            [
                customers(customer("a")),
                TypeInput(PRODUCT, table=rows(PRODUCT, [product("p", 1.5)])),
                TypeInput(SUBSCRIPTION, table=rows(SUBSCRIPTION, [edge("a", "p", seats=3)])),
            ]
        )
    )
    assert result is not None
    assert len(result.changes) == 3
    assert repository.read(SUBSCRIPTION).to_pylist() == [
        {"commit_id": 1, **edge("a", "p"), "seats": 3}
    ]
    record = repository.get_commit(1)
    assert record is not None
    assert record.types == ["Customer", "Product", "Subscription"]


def test_relations_keyed_unkeyed_and_without_fields(repository: SqliteRepository) -> None:
    commit(repository, SUBSCRIPTION, edge("a", "p", seats=1), edge("a", "q", seats=1))
    commit(repository, SUBSCRIPTION, edge("a", "p", seats=2))
    assert repository.read(SUBSCRIPTION)["seats"].to_pylist() == [2, 1]

    commit(repository, EMPLOYMENT, edge("a", "p", "1", role="dev"), edge("a", "p", "2", role="cto"))
    commit(repository, EMPLOYMENT, edge("a", "p", "2", role="ceo"))
    assert repository.read(EMPLOYMENT)["role"].to_pylist() == ["dev", "ceo"]

    assert commit(repository, KNOWS, edge("a", "b")) is not None
    assert commit(repository, KNOWS, edge("a", "b")) is None
    assert repository.read(KNOWS).num_rows == 1


def test_last_intent_of_a_stream_wins(repository: SqliteRepository) -> None:
    batches = stream(
        CUSTOMER,
        [customer("a", name="1"), customer("b", name="1")],
        [customer("a", name="2")],
        [],
        [customer("b", name="3"), customer("b", name="4"), customer("c", name="5")],
    )
    result = repository.commit(CommitRequest([TypeInput(CUSTOMER, stream=batches)]))
    assert result is not None
    assert list(result.changes) == [TypeChange("entity", "Customer", inserted=3, updated=0)]
    assert latest(repository) == {"a": "2", "b": "4", "c": "5"}


def test_inputs_of_one_type_are_one_set_of_intents(repository: SqliteRepository) -> None:
    batches = stream(CUSTOMER, [customer("a", name="streamed"), customer("b")])
    repository.commit(
        CommitRequest([customers(customer("a")), TypeInput(CUSTOMER, stream=batches)])
    )
    assert latest(repository) == {"a": "streamed", "b": "Ann"}


def test_a_stream_may_use_the_repository_that_it_feeds(engine: str, tmp_path: Path) -> None:
    for where in (tmp_path / "onto.db", ":memory:"):
        repository = open_at(where, engine)
        put(repository, customer("a"))

        def batches(repository: SqliteRepository = repository) -> Any:
            yield from repository.read(CUSTOMER).drop_columns(["commit_id"]).to_batches()
            put(repository, customer("meanwhile"))
            yield from stream(CUSTOMER, [customer("b")])

        result = repository.commit(CommitRequest([TypeInput(CUSTOMER, stream=batches())]))
        assert result is not None
        assert result.commit_id == 3
        assert list(latest(repository)) == ["a", "b", "meanwhile"]


def test_a_failing_stream_leaves_nothing(repository: SqliteRepository, path: Path) -> None:
    def batches() -> Any:
        yield from stream(CUSTOMER, [customer("a")])
        raise RuntimeError("source broke")

    with pytest.raises(RuntimeError, match="source broke"):
        repository.commit(CommitRequest([TypeInput(CUSTOMER, stream=batches())]))
    assert repository.head_commit_id() == 0
    assert put(repository, customer("b")) is not None
    assert list(latest(repository)) == ["b"]


def test_events_alone_make_a_commit(repository: SqliteRepository, path: Path) -> None:
    event = {
        "id": "e1",
        "namespace": "default",
        "type": "Placed",
        "created_at": "2026-01-01T00:00:00.000000+00:00",
        "priority": 100,
        "payload": {"n": 1},
    }
    result = repository.commit(CommitRequest([], events=[event], metadata={"why": "test"}))
    assert result is not None
    assert result.commit_id == 1
    assert list(result.changes) == []
    with sqlite3.connect(path) as connection:
        (text,) = connection.execute("SELECT events FROM commits").fetchone()
    assert json.loads(text) == [event]


def test_commit_records(repository: SqliteRepository, engine: str, path: Path) -> None:
    before = datetime.now(UTC)
    put(repository, customer("a"), metadata={"job": "x"}, holder={"run": "r1"})
    put(repository, customer("b"))
    first, second = repository.get_commit(1), repository.get_commit(2)
    assert first is not None
    assert second is not None
    assert repository.get_commit(3) is None
    assert (first.parent_id, second.parent_id) == (None, 1)
    assert before - timedelta(seconds=1) <= first.created_at <= second.created_at
    assert first.created_at.tzinfo is not None
    assert (first.runtime_id, first.kind, first.metadata) == ("ontologia", "data", {"job": "x"})
    put(repository, customer("c"))
    assert [c.id for c in repository.list_commits(2)] == [3, 2]
    assert [c.id for c in repository.list_commits(since_commit_id=1)] == [3, 2]
    assert repository.list_commits(0) == []
    with sqlite3.connect(path) as connection:
        owner, holder = connection.execute("SELECT owner_id, holder FROM locks").fetchone()
    assert owner == "ontologia"
    assert {"host", "pid"} <= set(json.loads(holder))


def test_created_at_never_goes_back(
    repository: SqliteRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(repository, customer("a"))

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2001, 1, 1, tzinfo=UTC)

    monkeypatch.setattr(base, "datetime", Earlier)
    put(repository, customer("b"))
    first, second = repository.get_commit(1), repository.get_commit(2)
    assert first is not None
    assert second is not None
    assert second.created_at == first.created_at


def test_integer_idempotency(repository: SqliteRepository) -> None:
    for version, key in ((1, "a"), (3, "b")):
        put(repository, customer(key), idempotency=Idempotency("app", version))
    for version, by in ((1, 2), (2, 2), (3, 2), (0, 2)):
        again = put(repository, customer("z"), idempotency=Idempotency("app", version))
        assert again is not None
        assert (again.commit_id, again.already_applied, list(again.changes)) == (by, True, [])
    assert repository.head_commit_id() == 2
    other = put(repository, customer("c"), idempotency=Idempotency("other", 1))
    later = put(repository, customer("d"), idempotency=Idempotency("app", 10**30))
    assert other is not None
    assert later is not None
    assert (other.commit_id, later.commit_id, later.already_applied) == (3, 4, False)


def test_string_idempotency(repository: SqliteRepository) -> None:
    put(repository, customer("a"), idempotency=Idempotency("app", "run-1"))
    again = put(repository, customer("b"), idempotency=Idempotency("app", "run-1"))
    assert again is not None
    assert again.already_applied
    assert again.commit_id == 1
    put(repository, customer("b"), idempotency=Idempotency("app", "run-2"))
    returned = put(repository, customer("c"), idempotency=Idempotency("app", "run-1"))
    assert returned is not None
    assert not returned.already_applied
    assert returned.commit_id == 3
    as_text = put(repository, customer("d"), idempotency=Idempotency("number", 5))
    other = put(repository, customer("e"), idempotency=Idempotency("number", "5"))
    assert as_text is not None
    assert other is not None
    assert not other.already_applied


def test_an_applied_key_does_not_read_the_stream(repository: SqliteRepository) -> None:
    put(repository, customer("a"), idempotency=Idempotency("app", 1))

    batches = stream(CUSTOMER, [customer("b")])
    request = CommitRequest(
        [TypeInput(CUSTOMER, stream=batches)], idempotency=Idempotency("app", 1)
    )
    result = repository.commit(request)
    assert next(batches).num_rows == 1, "still unread"
    assert result is not None
    assert result.already_applied


def test_expect(repository: SqliteRepository) -> None:
    put(repository, customer("a"), expect={CUSTOMER.ref: 0})
    commit(repository, PRODUCT, product("p", 1.0))
    put(repository, customer("b"), expect={CUSTOMER.ref: 1, PRODUCT.ref: 2})
    with pytest.raises(ExpectedVersionMismatchError) as caught:
        put(repository, customer("c"), expect={CUSTOMER.ref: 1})
    assert (caught.value.type, caught.value.expected, caught.value.actual) == ("Customer", 1, 3)
    assert repository.head_commit_id() == 3
    assert (repository.type_head(CUSTOMER), repository.type_head(PRODUCT)) == (3, 2)
    assert repository.type_head(KNOWS) == 0
    with pytest.raises(ExpectedVersionMismatchError):
        put(repository, expect={("entity", "Nowhere"): 7})


def test_expect_on_an_absent_file(repository: SqliteRepository) -> None:
    with pytest.raises(ExpectedVersionMismatchError):
        repository.commit(CommitRequest([], expect={CUSTOMER.ref: 7}))


def test_snapshot_isolation(repository: SqliteRepository) -> None:
    put(repository, customer("a"), customer("b"), customer("c"))
    put(repository, customer("b", name="Bob"), customer("a", name="Al"))
    with pytest.raises(ConcurrentWriteError) as caught:
        put(repository, customer("a"), customer("b"), customer("c", name="C"), snapshot=Snapshot(1))
    assert caught.value.identities == ["a", "b"]
    assert caught.value.snapshot == 1
    assert repository.head_commit_id() == 2
    assert put(repository, customer("c", name="C"), snapshot=Snapshot(1)) is not None
    assert put(repository, customer("d"), snapshot=Snapshot(1)) is not None

    commit(repository, EMPLOYMENT, edge("a", "p", "1", role="dev"))
    with pytest.raises(ConcurrentWriteError) as caught:
        commit(repository, EMPLOYMENT, edge("a", "p", "1", role="cto"), snapshot=Snapshot(2))
    assert caught.value.identities == [("a", "p", "1")]


def test_a_class_that_differs_is_refused(repository: SqliteRepository) -> None:
    put(repository, customer("a"))

    class Changed(Entity, name="Customer"):
        id: Field[str] = Field(primary_key=True)
        name: Field[str]
        tier: Field[str] = Field(default="Standard", index=True)
        age: Field[int | None] = Field(default=None)
        email: Field[str | None] = Field(default=None)

    spec = spec_of(Changed)
    value = {**customer("b"), "email": None}
    with pytest.raises(SchemaOutdatedError, match="differs from schema version 1") as caught:
        commit(repository, spec, customer("ok"), value)
    assert caught.value.type == "Customer"
    assert caught.value.stored_version == 1
    assert any("email" in difference for difference in caught.value.differences)
    assert "email" in str(caught.value)
    with pytest.raises(SchemaOutdatedError):
        repository.read(spec)
    assert repository.head_commit_id() == 1


def test_field_order_is_not_a_difference(repository: SqliteRepository) -> None:
    put(repository, customer("a"))

    class Moved(Entity, name="Customer"):
        age: Field[int | None] = Field(default=None)
        tier: Field[str] = Field(default="Standard", index=True)
        name: Field[str]
        id: Field[str] = Field(primary_key=True)

    spec = spec_of(Moved)
    assert commit(repository, spec, customer("a")) is None
    assert commit(repository, spec, customer("a", age=7)) is not None
    assert repository.read(spec).to_pylist() == [{"commit_id": 2, **customer("a", age=7)}]
    assert repository.read(CUSTOMER).to_pylist() == [{"commit_id": 2, **customer("a", age=7)}]


def test_rows_that_do_not_fit(repository: SqliteRepository) -> None:
    lacking = pa.table({"entity_key": ["a"], "id": ["a"]})
    with pytest.raises(ValidationError, match="rows lack name, tier, age"):
        repository.commit(CommitRequest([TypeInput(CUSTOMER, table=lacking)]))
    fitting = rows(CUSTOMER, [customer("a")])
    for number, name, wrong, said in (
        (2, "name", pa.array([None], pa.string()), "null"),
        (4, "age", pa.array(["x"]), "expected int64, got string"),
    ):
        table = fitting.set_column(number, name, wrong)
        with pytest.raises(ValidationError, match=f"Customer.{name}: {said}"):
            repository.commit(CommitRequest([TypeInput(CUSTOMER, table=table)]))
    assert repository.head_commit_id() == 0


def test_an_empty_input_registers_nothing(repository: SqliteRepository) -> None:
    put(repository, customer("a"))
    empty = TypeInput(PRODUCT, table=rows(PRODUCT, []))
    repository.commit(CommitRequest([empty, customers(customer("b"))]))
    assert [spec.name for spec in repository.known_types()] == ["Customer"]


def test_a_failure_in_the_last_step_rolls_everything_back(
    repository: SqliteRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storage_engine.repository.sqlite import control_tables

    def broken(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(control_tables, "record_lock", broken)
        with pytest.raises(Exception, match="disk I/O error"):
            put(repository, customer("a"))
    assert repository.head_commit_id() == 0
    assert repository.known_types() == []
    result = put(repository, customer("a"))
    assert result is not None
    assert result.commit_id == 1
