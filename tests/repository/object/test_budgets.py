"""Requests and serial hops of a commit, exactly. Any change of a figure is a change of design.

The bounds are those of the design's budget table: to acknowledgement 5 + P requests in 3 hops,
all steps done 7 + P + T in 4, whatever the length of history and the number of known types.
"""

from __future__ import annotations

import pytest

from storage_engine.config import OntologiaConfig
from storage_engine.model import Entity, Field, TypeSpec, objects_to_table, spec_of
from storage_engine.objectstore.memory import MemoryBackend
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.open import (
    initialize_storage,
    open_object_repository,
    open_repository,
)
from storage_engine.repository.protocol import CommitRequest, Idempotency, TypeInput
from tests.repository.object.costs import Cost, measure


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


class Product(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


class Store(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


CUSTOMER, PRODUCT, STORE = spec_of(Customer), spec_of(Product), spec_of(Store)


def opened(name: str, engine_version: str = "v2", **settings: int) -> ObjectRepository:
    uri = f"memory://budget-{name}"
    initialize_storage(uri, engine_version)
    repository = open_repository(uri, OntologiaConfig(**settings))
    assert isinstance(repository, ObjectRepository)
    return repository


def another(repository: ObjectRepository) -> ObjectRepository:
    """A second process, as far as the store can tell: nothing cached."""
    backend: MemoryBackend = repository.store.backend  # type: ignore[attr-defined]
    fresh = open_object_repository(backend.client(), OntologiaConfig())
    assert isinstance(fresh, ObjectRepository)
    return fresh


def write(repository: ObjectRepository, *rows: tuple[TypeSpec, str, int]) -> None:
    inputs: dict[tuple[str, str], tuple[TypeSpec, list[object]]] = {}
    for spec, key, n in rows:
        assert spec.python_class is not None
        inputs.setdefault(spec.ref, (spec, []))[1].append(spec.python_class(id=key, n=n))
    request = CommitRequest(
        [TypeInput(spec, objects_to_table(spec, objects)) for spec, objects in inputs.values()]
    )
    assert repository.commit(request) is not None


def rows_of_types(count: int) -> list[tuple[TypeSpec, str, int]]:
    """A row of each of so many types, Customer among them."""
    rows: list[tuple[TypeSpec, str, int]] = [(CUSTOMER, "c", 0)]
    for number in range(count - 1):
        declared = type(
            f"Type{number}",
            (Entity,),
            {
                "__annotations__": {"id": Field[str], "n": Field[int]},
                "__module__": __name__,
                "id": Field(primary_key=True),
            },
        )
        rows.append((spec_of(declared), "x", number))
    return rows


ACKNOWLEDGED = Cost({"GET": 1, "PUT_IF": 4}, hops=3)  # P = 1: at most 6 in 3
DONE = Cost({"GET": 1, "PUT_IF": 5, "DELETE_IF": 1}, hops=4)  # P = T = 1: 9 in 4


def check_warm_commit(repository: ObjectRepository, key: str, *, buckets: int = 0) -> None:
    """`buckets`: objects with type heads, when there are too many types for the manifest."""
    write(repository, (CUSTOMER, f"{key}-warm", 0))
    repository.flush()
    costs: list[Cost] = []

    def commit_and_flush() -> None:
        costs.append(measure(repository, lambda: write(repository, (CUSTOMER, key, 1))))
        repository.flush()

    done = measure(repository, commit_and_flush)
    # Work in the background may have begun before the acknowledgement was measured.
    background = {"PUT_IF": 1, "DELETE_IF": 1}
    expected = {"GET": 1, "PUT_IF": 4 + buckets, "DELETE_IF": 0}
    early = {k: costs[0].requests.get(k, 0) - n for k, n in expected.items()}
    assert all(0 <= early[k] <= background.get(k, 0) for k in expected)
    assert costs[0].requests.keys() <= expected.keys()
    assert costs[0].hops == ACKNOWLEDGED.hops
    assert done == Cost(DONE.requests | {"PUT_IF": 5 + buckets}, DONE.hops)


def test_warm_commit_at_the_beginning_of_history() -> None:
    check_warm_commit(opened("short"), "a")


@pytest.fixture(scope="module")
def long_history() -> ObjectRepository:
    repository = opened("long")
    write(repository, (CUSTOMER, "c", 0), (PRODUCT, "p", 0), (STORE, "s", 0))
    for n in range(2, 2_001):
        write(repository, (CUSTOMER, f"c{n % 50}", n))
    repository.flush()
    return repository


def test_warm_commit_after_2000_commits_costs_the_same(long_history: ObjectRepository) -> None:
    check_warm_commit(long_history, "b")


@pytest.mark.parametrize("count", [3, 100, 300])
def test_known_types_do_not_change_the_cost(count: int) -> None:
    repository = opened(f"types-{count}")
    write(repository, *rows_of_types(count))
    repository.flush()
    assert len(repository.storage_info()["type_layouts"]) == count
    check_warm_commit(repository, "d", buckets=count > 100)


def test_several_types_cost_one_part_and_one_index_each() -> None:
    repository = opened("several")
    rows = [(CUSTOMER, "c", 0), (PRODUCT, "p", 0), (STORE, "s", 0)]
    write(repository, *rows)
    repository.flush()

    def work() -> None:
        write(repository, *((spec, key, 1) for spec, key, _ in rows))
        repository.flush()

    # P = T = 3: at most 13 in 4
    assert measure(repository, work) == Cost({"GET": 1, "PUT_IF": 9, "DELETE_IF": 1}, hops=4)


def test_commit_with_a_checkpoint_costs_one_more() -> None:
    repository = opened("checkpoint", checkpoint_interval=5)
    for n in range(1, 5):
        write(repository, (CUSTOMER, f"c{n}", n))
    repository.flush()

    def work() -> None:
        write(repository, (CUSTOMER, "c5", 5))
        repository.flush()

    assert measure(repository, work) == Cost({"GET": 1, "PUT_IF": 6, "DELETE_IF": 1}, hops=4)
    assert repository.storage_info()["checkpoint_commit_id"] == 5


def test_commit_that_registers_a_type_costs_four_catalog_writes() -> None:
    """types.json, registry.json, the layout catalog and the type's version history: with the two
    requests that the bound leaves unused, the two more that it grants."""
    repository = opened("register")
    write(repository, (CUSTOMER, "c", 0))
    repository.flush()

    def work() -> None:
        write(repository, (PRODUCT, "p", 0))
        repository.flush()

    cost = measure(repository, work)
    assert cost == Cost({"GET": 1, "PUT_IF": 9, "DELETE_IF": 1}, hops=4)


@pytest.mark.parametrize(
    ("engine_version", "count"), [("v2", 1), ("v2", 2), ("v2", 10), ("v1", 10)]
)
def test_commits_that_are_published_together(engine_version: str, count: int) -> None:
    """To acknowledgement 4 + 2k requests at most in 3 hops; then one index write a type, whatever
    k is, and the release."""
    repository = opened(f"together-{engine_version}-{count}", engine_version)
    write(repository, (CUSTOMER, "c", 0), (PRODUCT, "p", 0))
    write(repository, (CUSTOMER, "c", 1))
    repository.flush()
    acknowledged: list[Cost] = []

    def work() -> None:
        requests = [
            CommitRequest([TypeInput(CUSTOMER, objects_to_table(CUSTOMER, [row]))])
            for row in (Customer(id=f"c{n}", n=n) for n in range(count))
        ]
        pending = [repository.submit(request) for request in requests]
        acknowledged.append(measure(repository, pending[0].result))
        assert [each.done for each in pending] == [True] * count
        repository.flush()

    done = measure(repository, work)
    early = acknowledged[0].total - (3 + 2 * count)  # of what follows in the background
    assert 0 <= early <= 4
    assert acknowledged[0].hops == 3
    expected = {"GET": 1, "PUT_IF": 2 + 2 * count + 1, "DELETE_IF": 1}
    if engine_version == "v1":  # types.json is read, and the other type's watermark moves too
        expected = {"GET": 2, "PUT_IF": 2 + 2 * count + 2, "DELETE_IF": 1}
    assert done == Cost(expected, hops=5 if engine_version == "v1" else 4)


def test_commits_together_with_types_marks_and_a_checkpoint() -> None:
    """What each adds, it adds once: four catalogs and a version history; and one checkpoint, which
    the last of them carries, so that the next writer has none of their manifests to read."""
    repository = opened("together-more", checkpoint_interval=3)
    write(repository, (CUSTOMER, "c", 0))
    repository.flush()
    rows = [(CUSTOMER, Customer(id="c", n=1)), (PRODUCT, Product(id="p", n=1))]
    rows += [(PRODUCT, Product(id="p", n=2)), (STORE, Store(id="s", n=1))]

    def work() -> None:
        for spec, row in rows:
            table = objects_to_table(spec, [row])
            repository.submit(CommitRequest([TypeInput(spec, table)]))
        unit = Idempotency("app", 1)
        repository.submit(CommitRequest([TypeInput(spec, table)], idempotency=unit))
        repository.flush()

    # Lock, head, four parts and manifests, a checkpoint; three indices; types.json, the registry,
    # the layouts and the versions of two types.
    assert measure(repository, work) == Cost(
        {"GET": 1, "PUT_IF": 2 + 8 + 1 + 3 + 5, "DELETE_IF": 1}, hops=4
    )
    assert repository.storage_info()["checkpoint_commit_id"] == 5
    assert repository.applied(Idempotency("app", 1)) is not None


def test_no_op_commit_asks_for_head_only() -> None:
    repository = opened("noop")
    write(repository, (CUSTOMER, "c", 0))
    repository.flush()
    request = CommitRequest(
        [TypeInput(CUSTOMER, objects_to_table(CUSTOMER, [Customer(id="c", n=0)]))]
    )
    results: list[object] = []
    cost = measure(repository, lambda: results.append(repository.commit(request)))
    assert results == [None]
    assert cost == Cost({"GET": 1}, hops=1)


def test_commit_after_another_writer_fetches_only_what_changed() -> None:
    repository = opened("other")
    write(repository, (CUSTOMER, "c", 0))
    repository.flush()
    other = another(repository)
    write(other, (CUSTOMER, "d", 0))
    other.flush()

    def work() -> None:
        write(repository, (CUSTOMER, "e", 0))
        repository.flush()

    cost = measure(repository, work)
    # Beyond a warm commit: the other's manifest, its one file, and the index it rewrote
    # (a conditional write that fails, its read-back, the read and the write that lands).
    assert cost.requests["GET"] <= 6
    assert repository.read(CUSTOMER).num_rows == 3


def test_v1_moves_every_watermark_in_one_hop() -> None:
    repository = opened("v1", "v1")
    write(repository, (CUSTOMER, "c", 0), (PRODUCT, "p", 0), (STORE, "s", 0))
    write(repository, (CUSTOMER, "c", 1))
    repository.flush()

    def work() -> None:
        write(repository, (CUSTOMER, "c", 2))
        repository.flush()

    # types.json is read, then the indices of all three types are written together.
    assert measure(repository, work) == Cost({"GET": 2, "PUT_IF": 7, "DELETE_IF": 1}, hops=5)


def test_planning_without_indices_is_bounded(long_history: ObjectRepository) -> None:
    """With every index gone and the checkpoint as far back as it can be: head, the index that is
    not there, the checkpoint, and the 99 manifests since."""
    while (number := long_history.head_commit_id()) % 100 != 99:
        write(long_history, (CUSTOMER, f"c{number % 50}", -number))
    long_history.flush()
    keys = [info.key for info in long_history.store.list("meta/indices/")]
    assert keys
    long_history.store.delete_many(keys)
    reader = another(long_history)
    found: list[int] = []

    def plan() -> None:
        resolution = reader._versions.resolve(CUSTOMER, reader.chain.read_head().head)
        found.append(len(resolution.entries))
        assert resolution.fallback

    cost = measure(reader, plan)
    assert found == [long_history.head_commit_id()]
    assert cost == Cost({"GET": 102}, hops=8)  # at most 103 in 9
