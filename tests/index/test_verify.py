"""What `index verify` finds, and that `index repair` mends exactly that."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine.commitlog import layout
from storage_engine.errors import HeadMismatchError, LeaseExpiredError, SchemaMetadataError
from storage_engine.index import repair as repair_module
from storage_engine.maintenance.indices import repair_indices, verify_indices
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer, at, made_world
from tests.engines import CUSTOMER, PRODUCT, customer
from tests.index.support import (
    index_of,
    lag_behind,
    put_product,
    resealed,
    spoil,
    unproven,
    watermark,
)
from tests.maintenance.support import Crashes, everything

Document = dict[str, Any]


def busy(world: World, **settings: Any) -> Writer:
    """Customers at 1, 2, 3 and 5, products at 4."""
    writer = world.open("writer", **settings)
    for age in (1, 2, 3):
        writer.put(customer("a", age=age), customer("b", age=1))
    put_product(writer, "p", 1.0)
    writer.put(customer("a", age=5))
    writer.repo.flush()
    return writer


def reasons(world: World) -> list[str]:
    return [f.reason for f in verify_indices(world.open("auditor").repo).findings]


def no_entry(document: Document, position: int) -> Document:
    entries = [e for n, e in enumerate(document["entries"]) if n != position]
    return {**document, "entries": entries}


def with_entry(document: Document, position: int, **changed: Any) -> Document:
    entries = list(document["entries"])
    entries[position] = {**entries[position], **changed}
    return {**document, "entries": entries}


def extra(document: Document, **entry: Any) -> Document:
    return {**document, "entries": [*document["entries"], entry]}


ABSENT = "commits/2-deadbeef/entities/Customer.parquet"

DAMAGES: dict[str, tuple[Callable[[Document], Document], set[str]]] = {
    "lag": (
        lambda d: {**d, "entries": d["entries"][:2], "max_indexed_commit": 2},
        {"lag", "missing_latest_entry"},
    ),
    "no-latest": (lambda d: no_entry(d, -1 % len(d["entries"])), {"missing_latest_entry"}),
    "no-middle": (lambda d: no_entry(d, 1), {"missing_entry"}),
    "head-path": (lambda d: with_entry(d, -1, path=ABSENT), {"path_mismatch", "absent_file"}),
    "middle-path": (lambda d: with_entry(d, 1, path=ABSENT), {"path_mismatch", "absent_file"}),
    "facts": (
        lambda d: with_entry(d, 1, key_range={"entity_key": ["x", "y"]}),
        {"wrong_facts"},
    ),
    "overlap": (
        lambda d: extra(d, min_commit_id=3, max_commit_id=5, path="snapshots/x.parquet"),
        {"overlap", "absent_file", "unproven_snapshot"},
    ),
    "uncommitted": (
        lambda d: extra(d, min_commit_id=4, max_commit_id=4, path="commits/4-x/Customer.parquet"),
        {"orphan_file", "absent_file"},
    ),
}


def test_healthy_indices_have_no_findings(either_world: World) -> None:
    busy(either_world)
    report = verify_indices(either_world.open().repo)
    assert report.ok
    assert [t.ref[1] for t in report.types] == ["Customer", "Product"]
    assert report.as_dict()["findings"] == []
    repair = repair_indices(either_world.open().repo)
    assert (repair.types, repair.checked, repair.repair_head) == ((), 2, 5)


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_named_and_repaired(either_world: World, damage: str) -> None:
    world = either_world
    busy(world)
    before = everything(world.open("reader"))
    change, expected = DAMAGES[damage]
    spoil(world, change(index_of(world)))

    assert set(reasons(world)) == expected
    planned = repair_indices(world.open().repo)
    assert [t.type_name for t in planned.types] == ["Customer"]
    assert not planned.applied
    assert set(reasons(world)) == expected, "a plan writes nothing"

    repair = repair_indices(world.open().repo, apply=True)

    assert repair.applied
    assert reasons(world) == []
    assert watermark(world) == 5
    assert [e["min_commit_id"] for e in index_of(world)["entries"]] == [1, 2, 3, 5]
    assert everything(world.open("reader")) == before


def test_missing_and_unreadable_indices_are_made_anew(either_world: World) -> None:
    world = either_world
    busy(world)
    world.backend.write(layout.index(*CUSTOMER.ref), b"{")
    world.backend.remove([layout.index(*PRODUCT.ref)])
    found = {(f.type_name, f.reason) for f in verify_indices(world.open().repo).findings}
    assert {("Customer", "unreadable"), ("Customer", "lag"), ("Product", "lag")} <= found
    repair_indices(world.open().repo, apply=True)
    assert reasons(world) == []
    assert (watermark(world, CUSTOMER), watermark(world, PRODUCT)) == (5, 5)


def test_an_index_of_an_erased_log_is_found(either_world: World) -> None:
    world = either_world
    busy(world)
    spoil(world, {**index_of(world), "log_id": "another"})
    assert "other_log" in reasons(world)
    repair_indices(world.open().repo, apply=True)
    assert reasons(world) == []


@pytest.mark.parametrize("content", [None, b"{", b'{"entities": 1}'])
@pytest.mark.parametrize("apply", [None, False, True])
def test_unreadable_types_json_fails_fast(
    either_world: World, content: bytes | None, apply: bool | None
) -> None:
    world = either_world
    busy(world)
    lag_behind(world, 1)
    if content is None:
        world.backend.remove([layout.TYPES])
    else:
        world.backend.write(layout.TYPES, content)
    before = world.backend.objects()
    repo = world.open().repo
    with pytest.raises(SchemaMetadataError, match=r"types\.json"):
        verify_indices(repo) if apply is None else repair_indices(repo, apply=apply)
    assert world.backend.objects() == before


def test_repair_writes_nothing_the_second_time(either_world: World) -> None:
    world = either_world
    busy(world)
    lag_behind(world, 1)
    repair_indices(world.open().repo, apply=True)
    before = world.backend.objects()
    assert repair_indices(world.open().repo, apply=True).types == ()
    assert world.backend.objects() == before


def test_repair_across_a_checkpoint(either_world: World) -> None:
    world = either_world
    busy(world, checkpoint_interval=2)
    world.backend.remove([layout.index(*CUSTOMER.ref)])
    repair_indices(world.open().repo, apply=True)
    assert reasons(world) == []
    assert [e["min_commit_id"] for e in index_of(world)["entries"]] == [1, 2, 3, 5]


# -- snapshots that only an index knows ---------------------------------------------------------


def snapshot_of(world: World, upto: int, *, rows: int | None = None) -> str:
    """As the first implementation compacted: a snapshot and an index entry, no checkpoint."""
    reader = world.open("compactor").repo
    entries = [e for e in index_of(world)["entries"] if e["max_commit_id"] <= upto]
    tables = [pq.read_table(io.BytesIO(reader.store.get(e["path"]).data)) for e in entries]
    merged = pa.concat_tables(tables)
    merged = merged if rows is None else merged.slice(0, rows)
    sink = io.BytesIO()
    pq.write_table(merged, sink)
    path = f"snapshots/entities/Customer-1-{upto}.parquet"
    world.backend.write(path, sink.getvalue())
    document = index_of(world)
    kept = [e for e in document["entries"] if e["max_commit_id"] > upto]
    entry = {"min_commit_id": 1, "max_commit_id": upto, "path": path}
    spoil(world, unproven({**document, "entries": [entry, *kept]}))
    return path


def test_a_snapshot_that_only_the_index_knows_is_kept(either_world: World) -> None:
    world = either_world
    busy(world)
    before = everything(world.open("reader"))
    path = snapshot_of(world, 3)
    assert reasons(world) == []
    document = index_of(world)
    lagging = {**document, "entries": document["entries"][:1], "max_indexed_commit": 3}
    spoil(world, unproven(lagging))
    assert "lag" in reasons(world)
    repair_indices(world.open().repo, apply=True)
    assert reasons(world) == []
    found = [(e["min_commit_id"], e["max_commit_id"]) for e in index_of(world)["entries"]]
    assert found == [(1, 3), (5, 5)]
    assert index_of(world)["entries"][0]["path"] == path
    assert everything(world.open("reader")) == before


def test_a_snapshot_that_lacks_rows_is_not_kept(either_world: World) -> None:
    world = either_world
    busy(world)
    before = everything(world.open())
    snapshot_of(world, 3, rows=2)
    assert reasons(world) == ["unproven_snapshot"]
    assert everything(world.open()) == before, "it proves nothing: readers go by the log"
    repair_indices(world.open().repo, apply=True)
    assert reasons(world) == []
    assert everything(world.open()) == before


# -- beside writers, and after crashes ------------------------------------------------------------


def test_repair_replans_when_head_moves_under_it(either_world: World) -> None:
    world = either_world
    writer = busy(world)
    lag_behind(world, 1)
    operator = world.open("operator")

    def commits_meanwhile() -> None:
        world.pass_lease()
        writer.put(customer("c", age=9))
        writer.repo.flush()

    reads = [0]

    def second_look() -> None:
        reads[0] += 1
        if reads[0] == 2:
            commits_meanwhile()

    at(operator.store, "GET", layout.HEAD, second_look, times=None)
    repair = repair_indices(operator.repo, apply=True)
    assert repair.repair_head == world.head().commit_id == 6
    assert reasons(world) == []


def test_repair_gives_up_when_head_keeps_moving(
    either_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = either_world
    busy(world)
    lag_behind(world, 1)
    before = world.backend.objects()
    monkeypatch.setattr(repair_module, "write_indices", lambda *a, **k: False)
    with pytest.raises(HeadMismatchError):
        repair_indices(world.open().repo, apply=True)
    assert world.backend.objects() == before


def test_a_writer_that_was_here_meanwhile_is_not_overwritten(either_world: World) -> None:
    """The index moves between examination and write: the repair looks again, and lets it be."""
    world = either_world
    busy(world)
    right = index_of(world)
    lag_behind(world, 1)
    operator = world.open("operator")
    key = layout.index(*CUSTOMER.ref)
    at(operator.store, "PUT_IF", key, lambda: world.backend.write(key, resealed(right)))
    repair_indices(operator.repo, apply=True)
    assert reasons(world) == []
    assert index_of(world)["write_id"] == right["write_id"]


def test_a_repair_whose_lease_ran_out_writes_nothing(either_world: World) -> None:
    world = either_world
    busy(world)
    lag_behind(world, 1)
    before = index_of(world)
    operator = world.open("operator")
    at(operator.store, "LIST", "commits/", world.pass_lease)
    with pytest.raises(LeaseExpiredError):
        repair_indices(operator.repo, apply=True)
    assert index_of(world) == before


@pytest.mark.simulation
@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_a_crash_at_any_write_of_repair_changes_no_read_and_a_rerun_finishes(
    engine_version: str,
) -> None:
    with made_world(engine_version) as world:
        busy(world)
        lag_behind(world, 1)
        world.backend.remove([layout.index(*PRODUCT.ref)])
        objects = world.backend.objects()

    def after(world: World, before: dict[str, Any]) -> None:
        head = world.backend.objects()[layout.HEAD]
        assert everything(world.open("reader")) == before
        repair_indices(world.open("again").repo, apply=True)
        assert reasons(world) == []
        assert world.backend.objects()[layout.HEAD] == head == objects[layout.HEAD]
        assert everything(world.open("reader")) == before

    crashes = Crashes(objects, engine_version, lambda w: repair_indices(w.repo, apply=True))
    assert crashes.each(after) == 3 * 4  # lock, two indices, release


def test_report_is_json(either_world: World) -> None:
    world = either_world
    busy(world)
    lag_behind(world, 1)
    report = json.loads(json.dumps(verify_indices(world.open().repo).as_dict()))
    assert report["ok"] is False
    assert {f["reason"] for f in report["findings"]} >= {"lag"}
    customers = next(t for t in report["types"] if t["type_name"] == "Customer")
    assert (customers["max_indexed_commit"], customers["lag"]) == (1, 4)


def test_store_faults_surface(either_world: World) -> None:
    world = either_world
    busy(world)
    lag_behind(world, 1)
    operator = world.open("operator")
    operator.fail(FaultKind.RESPONSE_LOST, "PUT_IF", layout.index(*CUSTOMER.ref))
    repair_indices(operator.repo, apply=True)
    assert reasons(world) == []
