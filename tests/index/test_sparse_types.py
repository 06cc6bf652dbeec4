"""RFC 0004 test 14: types that are seldom touched cost no walks, and lag costs no rows."""

from __future__ import annotations

import pytest

from storage_engine.commitlog import layout
from tests.commitlog.support import World, at
from tests.engines import CUSTOMER, PRODUCT, customer
from tests.index.support import (
    Watch,
    covered,
    lag_behind,
    put_product,
    watermark,
)

COMMITS = 12


def sparse_history(world: World) -> None:
    """Customers at commit 1 only, products from then on."""
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    for number in range(2, COMMITS + 1):
        put_product(writer, "p", float(number))


def test_rfc0004_14_v1_untouched_types_advance_their_watermark(either_world: World) -> None:
    """v1 moves every known type's; v2 needs no write, the manifest's type_heads say as much."""
    world = either_world
    sparse_history(world)
    v1 = world.engine_version == "v1"
    assert watermark(world, CUSTOMER) == (COMMITS if v1 else 1)
    assert covered(world, CUSTOMER) == [1]
    assert watermark(world, PRODUCT) == COMMITS
    assert covered(world, PRODUCT) == list(range(2, COMMITS + 1))
    assert world.open().repo.index_warnings() == []


def test_rfc0004_14_v2_writes_no_index_of_an_untouched_type(world: World) -> None:
    sparse_history(world)
    writer = world.open("another")
    watch = Watch(writer)
    put_product(writer, "p", 100.0)
    assert watch.puts("meta/indices/") == [layout.index(*PRODUCT.ref)]
    assert watch.gets("meta/indices/entities/Customer") == []


def test_rfc0004_14_a_fresh_index_costs_no_manifest_walk(either_world: World) -> None:
    """Head, its manifest, the index, the one file of the sparse type: nothing else is asked for."""
    world = either_world
    sparse_history(world)
    reader = world.open("reader")
    watch = Watch(reader)
    assert reader.ages() == {"a": 1}
    head = world.head()
    (file,) = world.chain()[0].files
    assert sorted(watch.seen) == sorted(
        ("GET", key)
        for key in (layout.HEAD, head.manifest_path, layout.index(*CUSTOMER.ref), file.path)
    )
    assert reader.warning() is None


@pytest.mark.parametrize("at", [0, 1, 5, COMMITS - 1])
def test_rfc0004_14_queries_are_right_when_an_index_lags(either_world: World, at: int) -> None:
    world = either_world
    sparse_history(world)
    expected = [(n, "p", float(n)) for n in range(2, COMMITS + 1)]
    lag_behind(world, at, PRODUCT)

    reader = world.open("reader")
    watch = Watch(reader)
    rows = reader.rows(PRODUCT)

    assert [(r["commit_id"], r["entity_key"], r["price"]) for r in rows] == expected[-1:]
    assert "index of Product" in str(reader.warning())
    assert len(reader.repo.index_warnings()) == 1
    walked = set(watch.gets("manifest.json"))
    reached = at if at > 1 else 0  # without an entry it proves nothing
    assert len(walked) == COMMITS - reached, "no further than the index reaches"


@pytest.mark.parametrize("at", [0, 1, 5])
def test_rfc0004_14_lag_of_the_sparse_type_itself(either_world: World, at: int) -> None:
    """v1: the watermark is behind head. v2: at 0 the only entry is gone, beyond that it is fresh,
    because the type was last touched at commit 1."""
    world = either_world
    sparse_history(world)
    lag_behind(world, at, CUSTOMER)
    reader = world.open("reader")
    assert reader.ages() == {"a": 1}
    lagging = world.engine_version == "v1" or at == 0
    assert (reader.warning() is not None) == lagging
    assert (reader.repo.index_warnings() != []) == lagging


def test_rfc0004_14_v2_rebuilds_a_sparse_types_entries_along_its_own_chain(world: World) -> None:
    """What others wrote since its last commit is not walked over."""
    sparse_history(world)
    world.backend.remove([layout.index(*CUSTOMER.ref)])
    reader = world.open("reader")
    watch = Watch(reader)
    assert reader.ages() == {"a": 1}
    assert len(watch.gets("manifest.json")) == 2  # head's, and the type's last


def test_rfc0004_14_reading_repairs_nothing(either_world: World) -> None:
    world = either_world
    sparse_history(world)
    lag_behind(world, 3, PRODUCT)
    before = world.backend.objects()
    reader = world.open("reader")
    reader.rows(PRODUCT)
    reader.repo.index_warnings()
    reader.repo.storage_info()
    assert world.backend.objects() == before


def test_an_index_ahead_of_the_head_a_reader_has_is_cut_to_it(either_world: World) -> None:
    """The head was read, then another commit came and wrote the index, then it was read."""
    world = either_world
    writer, reader = world.open("writer"), world.open("reader")
    writer.put(customer("a", age=1))
    at(reader.store, "GET", layout.index(*CUSTOMER.ref), lambda: writer.put(customer("a", age=2)))
    head = reader.repo.chain.read_head().head
    found = reader.repo._versions.resolve(CUSTOMER, head).entries
    assert [entry.max_commit_id for entry in found] == [1]
    assert watermark(world) == 2
    assert reader.history() == [(1, "a", 1), (2, "a", 2)]
