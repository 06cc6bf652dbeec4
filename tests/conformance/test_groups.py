"""Commits that are submitted together: each is a commit of its own, on every engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from storage_engine.errors import (
    ConcurrentWriteError,
    ConfigurationError,
    ExpectedVersionMismatchError,
    OntologiaError,
    SchemaOutdatedError,
)
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.model import Entity, Field, spec_of
from storage_engine.repository import CommitRequest, CommitResult, ReadWindow, Repository, TypeInput
from storage_engine.repository.commit_queue import PendingCommit
from storage_engine.repository.protocol import Idempotency, Snapshot
from tests.engines import (
    CUSTOMER,
    PRODUCT,
    SUBSCRIPTION,
    Storage,
    commit,
    customer,
    edge,
    product,
    put,
    rows_of,
    stream_of,
)


@pytest.fixture
def repository(storage: Storage) -> Iterator[Repository]:
    opened = storage.open()
    yield opened
    opened.close()


def submit(repository: Repository, *inputs: TypeInput, **request: Any) -> PendingCommit:
    return repository.submit(CommitRequest(inputs, **request))


def state(key: str, age: int) -> TypeInput:
    return rows_of(CUSTOMER, customer(key, age=age))


def history(repository: Repository) -> list[tuple[int, str, int]]:
    rows = repository.read(CUSTOMER, ReadWindow(history=True)).to_pylist()
    return [(row["commit_id"], row["entity_key"], row["age"]) for row in rows]


def ids(*pending: PendingCommit) -> list[int | None]:
    results = [each.result() for each in pending]
    return [result.commit_id if result is not None else None for result in results]


def answer(pending: PendingCommit) -> CommitResult:
    result = pending.result()
    assert result is not None
    return result


def test_they_become_commits_in_the_order_of_submission(repository: Repository) -> None:
    put(repository, customer("a", age=1))
    pending = [submit(repository, state("a", age), metadata={"n": str(age)}) for age in (2, 3, 4)]
    assert repository.head_commit_id() == 1, "nobody waits yet"
    assert ids(*reversed(pending)) == [4, 3, 2]
    assert history(repository) == [(1, "a", 1), (2, "a", 2), (3, "a", 3), (4, "a", 4)]
    commits = repository.list_commits()
    assert [c.metadata.get("n") for c in commits] == ["4", "3", "2", None]
    assert [c.parent_id for c in commits] == [3, 2, 1, None]
    assert [c.created_at for c in commits] == sorted((c.created_at for c in commits), reverse=True)
    for age in (1, 2, 3, 4):
        (row,) = repository.read(CUSTOMER, ReadWindow(as_of=age)).to_pylist()
        assert row["age"] == age


def test_what_one_wrote_counts_for_those_after_it(repository: Repository) -> None:
    """Nothing to do, back to what is stored, an insert that has become an update."""
    put(repository, customer("a", age=1))
    first = submit(repository, state("a", 2), state_of_b := rows_of(PRODUCT, product("p", 1.0)))
    same = submit(repository, state("a", 2))
    back = submit(repository, state("a", 1))
    again = submit(repository, rows_of(CUSTOMER, customer("b"), customer("c")), state_of_b)
    more = submit(repository, rows_of(CUSTOMER, customer("c", age=5), customer("d")))
    assert ids(first, same, back, again, more) == [2, None, 3, 4, 5]
    changes = {c.type_name: (c.inserted, c.updated) for c in answer(more).changes}
    assert changes == {"Customer": (1, 1)}
    changed = repository.list_commit_changes(5)
    assert [(c["key"], c["operation"]) for c in changed] == [("c", "update"), ("d", "insert")]
    assert repository.identity_counts() == {CUSTOMER.ref: 4, PRODUCT.ref: 1}


def test_flush_waits_for_all_and_leaves_the_errors_to_who_asks(repository: Repository) -> None:
    put(repository, customer("a", age=1))
    good = submit(repository, state("a", 2))
    bad = submit(repository, state("a", 3), expect={CUSTOMER.ref: 1})
    repository.flush()
    assert (good.done, bad.done) == (True, True)
    assert repository.head_commit_id() == 2
    with pytest.raises(ExpectedVersionMismatchError) as caught:
        bad.result()
    assert (caught.value.expected, caught.value.actual) == (1, 2)
    with pytest.raises(ExpectedVersionMismatchError):
        bad.result()


def test_one_that_fails_leaves_the_others_alone(repository: Repository) -> None:
    class Other(Entity, name="Customer"):
        id: Field[str] = Field(primary_key=True)
        size: Field[int]

    put(repository, customer("a", age=1))
    other = rows_of(spec_of(Other), {"entity_key": "x", "id": "x", "size": 1})
    pending = [
        submit(repository, state("a", 2), expect={CUSTOMER.ref: 1}),
        submit(repository, state("a", 3), expect={CUSTOMER.ref: 1}),
        submit(repository, other),
        submit(repository, state("a", 4), expect={CUSTOMER.ref: 2}),
        submit(repository, state("a", 5), snapshot=Snapshot(1)),
        submit(repository, state("b", 1), snapshot=Snapshot(1)),
    ]
    repository.flush()
    errors = (ExpectedVersionMismatchError, SchemaOutdatedError, ConcurrentWriteError)
    outcomes: list[Any] = []
    for each in pending:
        try:
            outcomes += ids(each)
        except errors as error:
            outcomes.append(type(error))
    assert outcomes == [2, errors[0], errors[1], 3, errors[2], 4]
    assert history(repository) == [(1, "a", 1), (2, "a", 2), (3, "a", 4), (4, "b", 1)]


def test_a_type_that_one_registers_is_known_to_the_next(repository: Repository) -> None:
    class Other(Entity, name="Product"):
        sku: Field[str] = Field(primary_key=True)
        weight: Field[float]

    made = submit(repository, rows_of(PRODUCT, product("p")), rows_of(CUSTOMER, customer("a")))
    joined = submit(
        repository,
        rows_of(SUBSCRIPTION, edge("a", "p", seats=3)),
        rows_of(PRODUCT, product("q")),
    )
    other = rows_of(spec_of(Other), {"entity_key": "x", "sku": "x", "weight": 1.0})
    refused = submit(repository, other)
    assert ids(made, joined) == [1, 2]
    with pytest.raises(SchemaOutdatedError):
        refused.result()
    versions = repository.type_histories()
    assert {ref: h.versions[0].activation_commit_id for ref, h in versions.items()} == {
        CUSTOMER.ref: 1,
        PRODUCT.ref: 1,
        SUBSCRIPTION.ref: 2,
    }
    assert answer(joined).notes == []


def test_a_unit_of_work_is_applied_once(repository: Repository) -> None:
    """By a commit of the same group, or by a mark of it."""
    unit = {"idempotency": Idempotency("loader", 7)}
    first = submit(repository, state("a", 1), **unit)
    again = submit(repository, state("a", 2), **unit)
    lower = submit(repository, state("a", 3), idempotency=Idempotency("loader", 6))
    void = submit(repository, state("a", 1), idempotency=Idempotency("empty", "x"))
    void_again = submit(repository, state("a", 9), idempotency=Idempotency("empty", "x"))
    following = submit(repository, state("a", 4), idempotency=Idempotency("loader", 8))
    assert ids(first, again, lower, void, void_again, following) == [1, 1, 1, None, None, 2]
    results = [answer(each).already_applied for each in (first, again, lower)]
    assert results == [False, True, True]
    assert history(repository) == [(1, "a", 1), (2, "a", 4)]
    units = [Idempotency("loader", 8), Idempotency("loader", 7), Idempotency("empty", "x")]
    applied = [repository.applied(unit) for unit in units]
    assert [each and each.commit_id for each in applied] == [2, 2, None]
    assert None not in applied
    assert commit(repository, state("a", 9), idempotency=Idempotency("empty", "x")) is None


def test_marks_alone_are_kept(repository: Repository) -> None:
    put(repository, customer("a", age=1))
    marks = [Idempotency(f"app-{n}", n) for n in range(5)]
    pending = [submit(repository, state("a", 1), idempotency=mark) for mark in marks]
    assert ids(*pending) == [None] * 5
    assert repository.head_commit_id() == 1
    assert all(repository.applied(mark) is not None for mark in marks)


def test_streams_go_alone_and_keep_their_place(repository: Repository) -> None:
    put(repository, customer("a", age=1))
    pending = [
        submit(repository, state("a", 2)),
        submit(repository, stream_of(CUSTOMER, [customer("a", age=3), customer("s", age=1)])),
        submit(repository, state("s", 2)),
    ]
    assert ids(*pending) == [2, 3, 4]
    assert history(repository)[1:] == [(2, "a", 2), (3, "a", 3), (3, "s", 1), (4, "s", 2)]


def test_what_is_taken_back_is_not_published(repository: Repository) -> None:
    kept, gone = submit(repository, state("a", 1)), submit(repository, state("b", 1))
    assert gone.withdraw()
    repository.flush()
    assert not kept.withdraw()
    with pytest.raises(OntologiaError, match="taken back"):
        gone.result()
    assert history(repository) == [(1, "a", 1)]


def test_a_stream_that_commits_to_its_own_storage_is_refused_or_works(
    repository: Repository,
) -> None:
    """It must not wait for itself."""

    def rows() -> Iterator[pa.RecordBatch]:
        assert commit(repository, state("inner", 1)) is not None
        table = rows_of(CUSTOMER, customer("outer")).table
        assert table is not None
        yield from table.to_batches()

    request = CommitRequest([TypeInput(CUSTOMER, stream=rows())])
    if repository.backend == "sqlite":
        assert repository.commit(request) is not None
        assert [row[1] for row in history(repository)] == ["inner", "outer"]
    else:
        with pytest.raises(ConfigurationError, match="wait for itself"):
            repository.commit(request)
    assert commit(repository, state("later", 1)) is not None


def test_many_threads(storage: Storage) -> None:
    """Each with its own counter and all with one: nobody's is lost, ids have no gaps."""
    repository = storage.open()
    put(repository, customer("shared", age=-1))
    threads, each = 8, 6
    found: dict[int, list[int]] = {n: [] for n in range(threads)}
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(each):
                rows = customer(f"t{number}", age=step), customer("shared", age=number * 100 + step)
                found[number].append(put(repository, *rows).commit_id)
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            failures.append(error)

    running = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(120)
    assert failures == []
    commits = [commit_id for series in found.values() for commit_id in series]
    assert sorted(commits) == list(range(2, threads * each + 2))
    assert all(series == sorted(series) for series in found.values())
    shared = [(c, age) for c, key, age in history(repository) if key == "shared"][1:]
    assert shared == sorted(
        (commit_id, number * 100 + step)
        for number, series in found.items()
        for step, commit_id in enumerate(series)
    )
    repository.flush()
    assert verify_storage(repository, deep=True).ok
    repository.close()
