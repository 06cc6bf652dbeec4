"""RFC 0004 test 15: a writer that cannot read types.json commits, warns, and leaves the indices."""

from __future__ import annotations

import json

import pytest

from storage_engine.commitlog import layout
from storage_engine.maintenance.indices import verify_indices
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, made_world
from tests.engines import CUSTOMER, PRODUCT, customer
from tests.index.support import Watch, covered, put_product, watermark

BROKEN = {
    "missing": None,
    "not json": b"{",
    "a list": b"[]",
    "without relations": b'{"entities": ["Customer"]}',
    "names that are none": b'{"entities": [1], "relations": []}',
}


def break_types(world: World, content: bytes | None) -> bytes:
    good = world.backend.objects()[layout.TYPES]
    if content is None:
        world.backend.remove([layout.TYPES])
    else:
        world.backend.write(layout.TYPES, content)
    return good


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_rfc0004_15_types_json_broken(content: bytes | None) -> None:
    with made_world("v1") as world:
        writer = world.open("writer")
        writer.put(customer("a", age=1))
        put_product(writer, "p", 1.0)
        good = break_types(world, content)
        before = {k: v for k, v in world.backend.objects().items() if "indices" in k}

        assert writer.put(customer("a", age=2)).commit_id == 3

        assert layout.TYPES in str(writer.warning())
        after = {k: v for k, v in world.backend.objects().items() if "indices" in k}
        assert after == before
        reader = world.open("reader")
        assert reader.ages() == {"a": 2}
        assert len(reader.repo.index_warnings()) == 2

        world.backend.write(layout.TYPES, good)
        assert put_product(writer, "p", 2.0) == 4

        assert (watermark(world, CUSTOMER), covered(world, CUSTOMER)) == (4, [1, 3])
        assert (watermark(world, PRODUCT), covered(world, PRODUCT)) == (4, [2, 4])
        assert world.open().repo.index_warnings() == []


@pytest.mark.parametrize("kind", [FaultKind.UNAVAILABLE, FaultKind.TIMEOUT])
def test_rfc0004_15_types_json_unreadable(kind: FaultKind) -> None:
    """The catalogs of the types that the commit registers are written all the same."""
    with made_world("v1") as world:
        writer = world.open("writer")
        writer.put(customer("a", age=1))
        writer.fail(kind, "READ", layout.TYPES)

        assert put_product(writer, "p", 1.0) == 2

        assert "indices left unchanged by commit 2" in str(writer.warning())
        assert watermark(world, CUSTOMER) == 1
        assert layout.index(*PRODUCT.ref) not in world.stored_keys()
        assert world.document(layout.TYPES)["entities"] == ["Customer", "Product"]
        put_product(writer, "p", 2.0)
        assert world.open().repo.index_warnings() == []


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_rfc0004_15_types_json_broken_v2(world: World, content: bytes | None) -> None:
    """v2 needs it for nothing, so the first commit of a session looks at it: that one leaves the
    indices as they are, and writes it anew from the log. A warm commit makes no request for it."""
    world.open("before").put(customer("a", age=1))
    good = json.loads(break_types(world, content))
    before = {k: v for k, v in world.backend.objects().items() if "indices" in k}
    writer = world.open("writer")
    assert writer.put(customer("a", age=2)).commit_id == 2
    assert layout.TYPES in str(writer.warning())
    assert "indices left unchanged by commit 2" in str(writer.warning())
    after = {k: v for k, v in world.backend.objects().items() if "indices" in k}
    assert after == before
    assert world.open("reader").ages() == {"a": 2}
    healed = world.document(layout.TYPES)
    assert (healed["entities"], healed["relations"]) == (good["entities"], good["relations"])

    writer.put(customer("a", age=3))
    assert (watermark(world), covered(world)) == (3, [1, 2, 3])
    assert world.open().repo.index_warnings() == []
    assert world.open("another").put(customer("a", age=4)).commit_id == 4


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_types_json_that_breaks_under_a_warm_v2_session(
    world: World, content: bytes | None
) -> None:
    """It reads, commits and indexes without it, and asks nobody. Its next commit that registers a
    type finds it broken, says so and writes it anew."""
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    break_types(world, content)
    watch = Watch(writer)
    writer.put(customer("a", age=2))
    assert watch.gets(layout.TYPES) == []
    assert (writer.ages(), watermark(world)) == ({"a": 2}, 2)
    assert world.open("reader").ages() == {"a": 2}
    assert world.open().repo.index_warnings() == []
    put_product(writer, "p", 1.0)
    writer.repo.flush()
    assert world.document(layout.TYPES)["entities"] == ["Customer", "Product"]
    assert [r["price"] for r in world.open("reader").rows(PRODUCT)] == [1.0]
    writer.put(customer("a", age=3))
    writer.repo.flush()
    assert verify_indices(world.open("verifier").repo).ok


def test_a_types_json_that_another_writer_has_put_right_stays(world: World) -> None:
    world.open("before").put(customer("a", age=1))
    good = break_types(world, b"{")
    writer = world.open("writer")

    def put_right(kind: str, key: str) -> None:
        if key == layout.TYPES and kind == "PUT_IF":
            world.backend.write(layout.TYPES, good)

    writer.store.on_request(put_right)
    writer.put(customer("a", age=2))
    assert world.backend.objects()[layout.TYPES] == good


def test_a_commit_that_registers_a_type_mends_types_json_too(world: World) -> None:
    world.open("before").put(customer("a", age=1))
    break_types(world, b'{"entities": 1}')
    put_product(world.open("writer"), "p", 1.0)
    assert world.document(layout.TYPES)["entities"] == ["Customer", "Product"]


def test_a_lost_types_json_is_complete_again_after_the_next_registration(
    either_world: World,
) -> None:
    world = either_world
    writer = world.open("writer")
    writer.put(customer("a", age=1))
    break_types(world, None)
    put_product(world.open("another"), "p", 1.0)
    assert world.document(layout.TYPES)["entities"] == ["Customer", "Product"]


def test_a_malformed_types_json_is_left_for_its_owner_to_look_at() -> None:
    """In v1, where it is what lists the types."""
    with made_world("v1") as world:
        writer = world.open("writer")
        broken = b'{"entities": "Customer"}'
        break_types(world, broken)
        writer.put(customer("a", age=1))
        assert world.backend.objects()[layout.TYPES] == broken
        assert layout.TYPES in str(writer.warning())
        assert world.open().ages() == {"a": 1}


def test_a_type_left_out_of_types_json_by_a_crash_is_indexed_by_the_next_commit() -> None:
    with made_world("v1") as world:
        writer = world.open("writer")
        writer.put(customer("a", age=1))
        put_product(writer, "p", 1.0)
        types = json.loads(world.backend.objects()[layout.TYPES])
        types["entities"].remove("Product")
        world.backend.write(layout.TYPES, json.dumps(types).encode())
        world.backend.remove([layout.index(*PRODUCT.ref)])

        world.open("another").put(customer("a", age=2))

        assert (watermark(world, PRODUCT), covered(world, PRODUCT)) == (3, [2])
        assert world.open().repo.index_warnings() == []
