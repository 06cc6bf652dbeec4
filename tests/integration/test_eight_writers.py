"""Many processes write one storage at once: every commit lands once, and nobody starves.

Figures are printed (pytest -s, or -rP): CAS attempts per success, the longest wait for the lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Session
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository import ReadWindow, Repository, initialize_storage
from tests.engines import CUSTOMER, PRODUCT, Storage, new_storage
from tests.integration import writers
from tests.integration.many_types import TYPES
from tests.integration.writers import Done
from tests.shop import Customer

WRITERS = 8
COMMITS = 25
ATTEMPTS_PER_SUCCESS = 1.5
PATIENT = {"s3_lock_timeout_ms": 60_000}


@pytest.fixture(scope="module")
def eight(aws_environment: None) -> Iterator[ProcessPoolExecutor]:
    """Eight processes for all tests here: importing is what takes them longest."""
    with writers.pool_of(WRITERS) as pool:
        yield pool


@pytest.fixture(params=["directory-v2", pytest.param("seaweedfs-v2", marks=pytest.mark.s3)])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made = new_storage(str(request.param), request, tmp_path)
    initialize_storage(made.uri, made.engine_version, made.config())
    return made


def run(
    pool: ProcessPoolExecutor, storage: Storage, count: int, *tasks: Callable[..., list[Done]]
) -> list[list[Done]]:
    """One writer process per place in the pool, the tasks in turn."""
    futures = [
        pool.submit(tasks[n % len(tasks)], storage, f"w{n}", count, **PATIENT)
        for n in range(WRITERS)
    ]
    return [future.result(timeout=150) for future in futures]


def report(name: str, done: Sequence[Sequence[Done]]) -> float:
    """Print the figures; CAS attempts per success."""
    everything = [one for by_writer in done for one in by_writer]
    per_success = sum(one.attempts for one in everything) / len(everything)
    slowest = sorted(sum(one.seconds for one in by_writer) for by_writer in done)
    print(
        f"\n{name}: {len(everything)} commits, CAS attempts per success {per_success:.3f}, "
        f"longest lock wait {max(one.lock_wait_ms for one in everything):.0f} ms, "
        f"writers took {slowest[0]:.1f} to {slowest[-1]:.1f} s"
    )
    return per_success


def assert_each_landed_once(repository: Repository, done: Sequence[Sequence[Done]]) -> None:
    """Ids have no gap; each commit in the log is the one of its writer, and there are no others."""
    acknowledged = {one.commit_id: one.writer for by_writer in done for one in by_writer}
    total = sum(len(by_writer) for by_writer in done)
    assert sorted(acknowledged) == list(range(1, total + 1))
    logged = {record.id: record.runtime_id for record in repository.list_commits(total + 10)}
    assert logged == acknowledged
    assert repository.head_commit_id() == total


def test_rfc0004_02_eight_writers_commit_without_gap_or_starvation(
    eight: ProcessPoolExecutor, shared: Storage
) -> None:
    done = run(eight, shared, COMMITS, writers.insert_customers)
    per_success = report(f"eight writers on {shared.uri.split(':')[0]}", done)
    assert Counter(len(by_writer) for by_writer in done) == {COMMITS: WRITERS}, "a writer starved"
    repository = shared.open()
    try:
        assert_each_landed_once(repository, done)
        found = repository.read(CUSTOMER)
        wanted = sorted(f"w{w}-{n:03}" for w in range(WRITERS) for n in range(COMMITS))
        assert found["entity_key"].to_pylist() == wanted
        assert repository.read(CUSTOMER, ReadWindow(history=True)).num_rows == WRITERS * COMMITS
    finally:
        repository.close()
    assert per_success <= ATTEMPTS_PER_SUCCESS


def test_rfc0004_02_two_types_and_one_row_for_all(
    eight: ProcessPoolExecutor, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Writers of different types serialise too; of one contended row every version is kept."""
    shared = new_storage("directory-v2", request, tmp_path)
    initialize_storage(shared.uri, shared.engine_version, shared.config())
    done = run(eight, shared, 8, writers.update_one_customer, writers.insert_products)
    per_success = report("two types", done)
    repository = shared.open()
    try:
        assert_each_landed_once(repository, done)
        versions = repository.read(CUSTOMER, ReadWindow(history=True))
        assert sorted(versions["name"].to_pylist()) == sorted(
            f"w{w}-{n:03}" for w in range(0, WRITERS, 2) for n in range(8)
        )
        assert versions["commit_id"].to_pylist() == sorted(
            one.commit_id for by_writer in done[::2] for one in by_writer
        )
        assert repository.read(PRODUCT).num_rows == WRITERS // 2 * 8
    finally:
        repository.close()
    assert per_success <= ATTEMPTS_PER_SUCCESS


def test_rfc0004_02_writers_register_the_same_types_at_once(
    eight: ProcessPoolExecutor, shared: Storage
) -> None:
    done = run(eight, shared, len(TYPES), writers.register_types)
    report(f"registering on {shared.uri.split(':')[0]}", done)
    repository = shared.open()
    try:
        assert_each_landed_once(repository, done)
        info: dict[str, Any] = repository.storage_info()
        assert sorted(info["types"]) == sorted(cls.__name__ for cls in TYPES)
        assert all(of["current_schema_version_id"] == 1 for of in info["type_layouts"].values())
    finally:
        repository.close()
    # A type is registered by the commit that wrote it first, and by no other.
    registered = []
    for number in range(1, WRITERS * len(TYPES) + 1):
        registered += registrations(shared, number)
    assert sorted(registered) == [cls.__name__ for cls in TYPES]
    names = [cls.__name__ for cls in TYPES]
    assert shared.document("meta/schema/types.json")["entities"] == names
    layouts = shared.document("meta/type_layout_catalog.json")["layouts"]
    assert sorted(entry["type_name"] for entry in layouts) == names


def registrations(storage: Storage, commit_id: int) -> list[str]:
    """The types that a commit's manifest registers."""
    store = storage.objects()
    try:
        found = [i.key for i in store.list(f"commits/{commit_id}-") if "manifest" in i.key]
    finally:
        store.close()
    return [
        record["type_name"]
        for key in found
        for record in storage.document(key).get("schema", {}).get("registered", ())
    ]


def test_nothing_that_was_read_is_overwritten_unseen(
    eight: ProcessPoolExecutor, shared: Storage
) -> None:
    """Eight count one number up under snapshot isolation, while they merge its versions beside."""
    count = 3
    with Session(shared.uri, config=shared.config()) as session:
        session.ensure(Customer(id="all", name="counter", age=0))
        session.commit()
    done = run(eight, shared, count, writers.count_up)
    report(f"counting on {shared.uri.split(':')[0]}", done)
    ids = sorted(one.commit_id for by_writer in done for one in by_writer)
    assert ids == list(range(2, WRITERS * count + 2))
    with Session(shared.uri, config=shared.config()) as session:
        [counter] = session.query().entities(Customer).collect()
        assert counter.age == WRITERS * count
        versions = session.query().entities(Customer).history_since(0).to_arrow()
    assert versions["age"].to_pylist() == list(range(WRITERS * count + 1))
    repository = shared.open()
    try:
        assert verify_storage(repository, deep=True).ok
    finally:
        repository.close()
