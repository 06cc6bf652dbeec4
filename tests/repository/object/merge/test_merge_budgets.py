"""Requests and serial hops of branches, exactly. Any change of a figure is a change of design.

Promised: a fork in three requests whatever the size; a run with ten types is published in at most
five hops where its parent did not move, and no data file is touched.
"""

from __future__ import annotations

import pytest

from storage_engine.config import OntologiaConfig
from storage_engine.model import Entity, Field, TypeSpec, spec_of
from storage_engine.objectstore.memory import MemoryBackend
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.object.merge import MergeReport, MergeTerms
from storage_engine.repository.open import open_object_repository
from storage_engine.repository.protocol import CommitRequest
from tests.engines import stream_of
from tests.repository.object.costs import Cost, measure
from tests.repository.object.test_budgets import CUSTOMER, opened, write


def types(count: int) -> list[TypeSpec]:
    return [
        spec_of(
            type(
                f"Type{n}",
                (Entity,),
                {
                    "__annotations__": {"id": Field[str], "n": Field[int]},
                    "id": Field(primary_key=True),
                    "__module__": __name__,
                },
            )
        )
        for n in range(count)
    ]


def on(repository: ObjectRepository, branch: str | None) -> ObjectRepository:
    """Another process on that branch."""
    backend: MemoryBackend = repository.store.backend  # type: ignore[attr-defined]
    fresh = open_object_repository(backend.client(), OntologiaConfig(), branch=branch)
    assert isinstance(fresh, ObjectRepository)
    return fresh


def load(repository: ObjectRepository, specs: list[TypeSpec], rows: int) -> None:
    """One commit with bulk rows of all types."""
    inputs = [
        stream_of(spec, [{"entity_key": f"k{n}", "id": f"k{n}", "n": n} for n in range(rows)])
        for spec in specs
    ]
    assert repository.commit(CommitRequest(inputs)) is not None
    repository.flush()


@pytest.mark.parametrize("commits", [1, 150])
def test_publishing_a_run_with_ten_types(commits: int) -> None:
    specs = types(10)
    main = opened(f"publish-{commits}")
    load(main, specs, 5)
    for n in range(commits - 1):
        write(main, (CUSTOMER, f"c{n}", n))
    main.flush()
    main.branches.create("run")
    branch = on(main, "run")
    load(branch, specs, 20)
    published = on(main, None)
    keys: list[str] = []
    published.store.on_request(lambda _kind, key: keys.append(key))  # type: ignore[attr-defined]
    reports: list[MergeReport] = []

    def work() -> None:
        reports.append(published.branches.merge("run", MergeTerms()))

    cost = measure(published, work)
    assert [t.adopted for t in reports[0].types] == [True] * 10
    assert not [key for key in keys if key.endswith(".parquet")]
    # To acknowledgement 9: two heads; two manifests; lock, head; the manifest, and the source's
    # head once more; head. Then the indices, in the background.
    assert keys.index("meta/schema/types.json") == 9
    assert cost == Cost({"GET": 6 + 1 + 10, "PUT_IF": 3 + 10, "DELETE_IF": 1}, hops=5)


@pytest.mark.parametrize("commits", [3, 150])
def test_forking_takes_three_requests(commits: int) -> None:
    main = opened(f"fork-{commits}")
    for n in range(commits):
        write(main, (CUSTOMER, f"c{n}", n))
    main.branches.create("first")  # raises the format of the storage, once
    other = on(main, None)
    cost = measure(other, lambda: other.branches.create("run"))
    assert cost == Cost({"GET": 2, "PUT_IF": 1}, hops=3)


def moved(commits: int) -> Cost:
    """What a merge takes into a type of so many commits, where both sides have moved: of its files
    one can hold what the branch has changed."""
    main = opened(f"moved-{commits}", checkpoint_interval=10)
    for n in range(commits):
        write(main, (CUSTOMER, f"c{n:03d}", n))
    main.flush()
    main.branches.create("run")
    branch = on(main, "run")
    write(branch, (CUSTOMER, "c001", 500))
    branch.flush()
    write(main, (CUSTOMER, "c002", 600))
    main.flush()
    published = on(main, None)
    return measure(published, lambda: published.branches.merge("run", MergeTerms()))


def test_merging_where_both_have_moved_costs_the_same_after_any_history() -> None:
    few, many = moved(15), moved(65)
    assert few == many
    # The checkpoint, which has the schema; index and file of the branch, then of main.
    assert few == Cost({"GET": 6 + 1 + 4 + 1, "PUT_IF": 4, "DELETE_IF": 1}, hops=10)


def test_update_costs_what_a_merge_does() -> None:
    main = opened("update")
    write(main, (CUSTOMER, "a", 1))
    main.branches.create("run")
    write(main, (CUSTOMER, "a", 2))
    main.flush()
    branch = on(main, "run")
    cost = measure(branch, lambda: branch.branches.update(MergeTerms()))
    assert cost == Cost({"GET": 14, "PUT_IF": 5, "DELETE_IF": 1}, hops=11)
