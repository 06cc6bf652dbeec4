"""Requests and serial hops of queries, exactly.

The bound of the design: a latest query with a fresh index, warm, small files: 3 requests and one
for each file that is not cached yet, in 4 hops, however long the history is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_engine.config import OntologiaConfig
from storage_engine.index.resolve import Early, Resolution, resolve
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.model import Entity, Field, Relation, TypeSpec, objects_to_table, spec_of
from storage_engine.objectstore.memory import MemoryBackend
from storage_engine.query.builder import Query, left, right
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.open import (
    initialize_storage,
    open_object_repository,
    open_repository,
)
from storage_engine.repository.protocol import CommitRequest, TypeInput
from tests.repository.object.costs import Cost, measure


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


class Product(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


class Bought(Relation[Customer, Product]):
    n: Field[int]


CUSTOMER = spec_of(Customer)


def commit(repository: ObjectRepository, *things: Any) -> None:
    by_type: dict[TypeSpec, list[Any]] = {}
    for thing in things:
        by_type.setdefault(spec_of(type(thing)), []).append(thing)
    inputs = [TypeInput(spec, objects_to_table(spec, found)) for spec, found in by_type.items()]
    assert repository.commit(CommitRequest(inputs)) is not None


class Shop:
    """A history of customers, written by one process and read by others."""

    def __init__(self, name: str, commits: int, folder: Path) -> None:
        uri = f"memory://query-budget-{name}"
        initialize_storage(uri, "v2")
        opened = open_repository(uri, OntologiaConfig())
        assert isinstance(opened, ObjectRepository)
        self.writer = opened
        self.folder = folder
        self.commits = commits
        for n in range(commits):
            commit(self.writer, Customer(id=f"c{n % 50}", n=n))
        self.writer.flush()

    def reader(self, cache: str = "shared") -> ObjectRepository:
        """Another process: nothing in memory, files in a cache of that name."""
        backend: MemoryBackend = self.writer.store.backend  # type: ignore[attr-defined]
        config = OntologiaConfig(cache_dir=self.folder / cache)
        opened = open_object_repository(backend.client(), config)
        assert isinstance(opened, ObjectRepository)
        return opened


@pytest.fixture(scope="module", params=[10, 2_000])
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(f"{request.param}", request.param, tmp_path_factory.mktemp("cache"))


def latest(repository: ObjectRepository) -> Callable[[], object]:
    return Query(repository.executor()).entities(Customer).where(Customer.n >= 0).to_arrow


def test_a_cold_process_asks_for_head_manifest_index_and_files(shop: Shop) -> None:
    reader = shop.reader("cold")
    files = shop.writer.head_commit_id()
    assert measure(reader, latest(reader)) == Cost({"GET": 3 + files}, hops=2)


def test_another_process_finds_the_files_in_the_shared_cache(shop: Shop) -> None:
    first = shop.reader()
    latest(first)()
    second = shop.reader()
    assert measure(second, latest(second)) == Cost({"GET": 3}, hops=1)


def test_a_warm_query_asks_whether_head_and_index_have_changed(shop: Shop) -> None:
    reader = shop.reader()
    latest(reader)()
    assert measure(reader, latest(reader)) == Cost({"GET": 2}, hops=1)


def test_after_a_commit_only_what_is_new_is_fetched(shop: Shop) -> None:
    reader = shop.reader()
    latest(reader)()
    commit(shop.writer, Customer(id="new", n=shop.writer.head_commit_id()))
    shop.writer.flush()
    # Head, the new manifest, the index, the new file: 3 + 1, at most 4 in 4 hops.
    assert measure(reader, latest(reader)) == Cost({"GET": 4}, hops=3)


def test_an_index_that_was_read_before_head_moved_is_read_again(tmp_path: Path) -> None:
    """It was asked for together with head, and answered first: that is no lag of the index."""
    shop = Shop("early", 3, tmp_path)
    reader = shop.reader()
    ref = spec_of(Customer).ref
    before = reader.indices.read(ref, log_id="")
    commit(shop.writer, Customer(id="new", n=7))
    shop.writer.flush()
    head = reader.chain.read_head().head

    def resolved(*, settled: bool) -> Resolution:
        early = Early({ref: before}, settled)
        [found] = resolve(
            reader.chain, reader.indices, head, [ref], watermark_is_head=False, early=early
        )
        return found

    fresh = resolved(settled=False)
    assert (fresh.fallback, fresh.warning) == (False, None)
    assert len(fresh.entries) == 4
    late = resolved(settled=True)  # head had been there before: so the index does lag
    assert [e.commits for e in late.entries] == [e.commits for e in fresh.entries]
    assert late.fallback
    assert "needs 4" in str(late.warning)


def test_a_file_that_cannot_match_is_not_fetched(shop: Shop) -> None:
    reader = shop.reader("pruned")
    newest = shop.commits - 1

    def ask() -> None:
        found = Query(reader.executor()).entities(Customer).where(Customer.n == newest)
        assert [c.n for c in found.collect()] == [newest]

    # One file can hold the row; every commit after it may have a newer version of it.
    after = shop.writer.head_commit_id() - shop.commits
    assert measure(reader, ask).requests["GET"] <= 3 + 1 + after


def test_endpoints_and_steps_are_asked_for_by_type_not_by_row(tmp_path: Path) -> None:
    shop = Shop("relations", 1, tmp_path)
    commit(
        shop.writer,
        *(Customer(id=f"c{n}", n=n) for n in range(30)),
        *(Product(id=f"p{n}", n=n) for n in range(5)),
        *(Bought(left_key=f"c{n}", right_key=f"p{n % 5}", n=n) for n in range(30)),
    )
    shop.writer.flush()
    reader = shop.reader()
    bought = Query(reader.executor()).relations(Bought)

    def by_endpoints() -> None:
        asked = bought.where((left(Bought).n > 3) & (right(Bought).n == 2)).collect()
        assert [b.left_key for b in asked] == ["c12", "c17", "c22", "c27", "c7"]

    # Head; manifest and three indices; four files: two of customers, one of each other type.
    assert measure(reader, by_endpoints) == Cost({"GET": 1 + 4 + 4}, hops=3)
    assert measure(reader, by_endpoints) == Cost({"GET": 1 + 3}, hops=2)

    found = bought.collect()

    def hydrate() -> None:
        assert [b.left.n for b in found] == [int(b.left_key[1:]) for b in found]

    assert measure(reader, hydrate) == Cost({"GET": 2}, hops=2)  # head and one index, for all

    def traverse() -> None:
        paths = Query(reader.executor()).entities(Customer).via(Bought).collect()
        assert len(paths) == 30

    # Head for the whole, head and index (together) for the sources, an index for the step.
    assert measure(reader, traverse) == Cost({"GET": 4}, hops=3)


@pytest.mark.parametrize("commits", [10, 120])
def test_after_compaction_a_query_opens_one_file(tmp_path: Path, commits: int) -> None:
    """Latest reads need the snapshot's current rows alone, whatever the history was."""
    shop = Shop(f"compacted-{commits}", commits, tmp_path)
    before = Query(shop.reader().executor()).entities(Customer).with_history().to_arrow()
    report = compact(shop.writer, CompactionPolicy(min_entries=2))
    assert report.runs
    shop.writer.flush()
    reader = shop.reader("compacted")
    # Head, manifest, index, one file of current rows.
    assert measure(reader, latest(reader)) == Cost({"GET": 4}, hops=2)
    assert measure(reader, latest(reader)) == Cost({"GET": 2}, hops=1)
    assert {c.n for c in Query(reader.executor()).entities(Customer).collect()} == set(
        range(max(0, commits - 50), commits)
    )
    facts = Query(reader.executor()).entities(Customer).explain().facts["types"][0]
    assert facts["files_checked_for_newer_versions"] == []
    assert facts["pruned"] == ({"superseded": 1} if commits > 50 else {})
    assert Query(reader.executor()).entities(Customer).with_history().to_arrow() == before

    commit(shop.writer, Customer(id="c1", n=-7))
    shop.writer.flush()
    # What is new: head, its manifest, the index, the new file.
    assert measure(reader, latest(reader)) == Cost({"GET": 4}, hops=3)


def test_a_query_inside_a_snapshot_reads_both_of_its_files(tmp_path: Path) -> None:
    shop = Shop("inside", 120, tmp_path)
    expected = Query(shop.reader().executor()).entities(Customer).as_of(70).to_arrow()
    compact(shop.writer, CompactionPolicy(min_entries=2))
    reader = shop.reader("inside")
    query = Query(reader.executor()).entities(Customer).as_of(70)
    assert len(query.explain().facts["types"][0]["files"]) == 2
    assert query.to_arrow() == expected
