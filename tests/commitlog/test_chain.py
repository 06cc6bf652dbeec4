"""Reading the log: skip pointers, checkpoints, damage, and logs of the first implementation."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain, skip_pointers
from storage_engine.commitlog.records import (
    Checkpoint,
    CommitPoint,
    Head,
    Manifest,
    ManifestLink,
    entry_of,
    sha256,
)
from storage_engine.errors import IntegrityError, StorageBackendError
from storage_engine.objectstore.memory import MemoryBackend, SimulatedCrash
from storage_engine.objectstore.metering import HopTrace, tracing
from storage_engine.repository import Idempotency, ReadWindow
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer, at
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of

# -- skip pointers ----------------------------------------------------------------------------


def long_chain(length: int) -> tuple[MemoryBackend, Head]:
    """Bare manifests, linked as the publisher links them."""
    backend = MemoryBackend("chain")
    parent: Manifest | None = None
    link: ManifestLink | None = None
    for commit_id in range(1, length + 1):
        manifest = Manifest(
            commit_id=commit_id,
            parent_commit_id=parent.commit_id if parent else None,
            parent_manifest_path=link.path if link else None,
            parent_sha256=link.sha256 if link else "",
            created_at="2026-01-01T00:00:00+00:00",
            runtime_id="test",
            skip=skip_pointers(parent, link) if parent and link else (),
            type_heads={},
        )
        path, data = layout.manifest(commit_id, "cafe0000"), manifest.to_bytes()
        backend.write(path, data)
        parent, link = manifest, ManifestLink(commit_id, path, sha256(data))
    assert link is not None
    return backend, Head(length, link.path, "", "test", commit_sha256=link.sha256)


def fresh_chain(backend: MemoryBackend) -> Chain:
    store = backend.client()
    return Chain(store, store.parallel)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 100, 127, 128, 129])
def test_any_commit_is_located_in_logarithmic_hops(length: int) -> None:
    backend, head = long_chain(length)
    bound = math.floor(math.log2(length)) + 1  # and one for the head's own manifest
    for commit_id in range(1, length + 1):
        chain = fresh_chain(backend)
        with tracing(HopTrace()) as trace:
            link = chain.locate(head, commit_id)
        assert link is not None
        assert link.path == layout.manifest(commit_id, "cafe0000")
        assert trace.depth <= bound + 1, f"commit {commit_id} took {trace.depth} hops"


def test_a_stretch_of_a_hundred_is_fetched_in_seven_hops() -> None:
    for length in (100, 128, 163, 199, 200, 228, 255):
        backend, head = long_chain(length)
        chain = fresh_chain(backend)
        chain.head_manifest(head)  # at hand for whoever asks for what is below it
        with tracing(HopTrace()) as trace:
            found = chain.stretch(head.link, above=length - 100)
        assert [m.commit_id for _, m in found] == list(range(length, length - 100, -1))
        assert trace.depth <= 7
        assert chain.store.meter.requests["GET"] == 100, "none twice, and none beyond"


def test_skip_pointers_name_the_nearest_multiples() -> None:
    backend, head = long_chain(101)
    manifest = fresh_chain(backend).head_manifest(head)
    assert manifest is not None
    assert [p.commit_id for p in manifest.skip] == [100, 96, 64]
    assert all(p.path == layout.manifest(p.commit_id, "cafe0000") for p in manifest.skip)


@pytest.mark.parametrize("commit_id", [-1, 0, 11])
def test_there_is_no_commit_outside_the_chain(commit_id: int) -> None:
    backend, head = long_chain(10)
    assert fresh_chain(backend).locate(head, commit_id) is None


def test_a_manifest_is_read_once() -> None:
    backend, head = long_chain(10)
    chain = fresh_chain(backend)
    chain.stretch(head.link, above=0)
    before = chain.store.meter.requests["GET"]
    chain.stretch(head.link, above=0)
    assert chain.locate(head, 3) is not None
    assert chain.store.meter.requests["GET"] == before


# -- checkpoints ------------------------------------------------------------------------------


def busy(writer: Writer, commits: int) -> None:
    """Two types, idempotency keys of two applications, some commits with neither."""
    for number in range(1, commits + 1):
        intent = [rows_of(CUSTOMER, customer(f"c{number % 3}", age=number))]
        if number % 4 == 2:
            intent.append(rows_of(PRODUCT, product("p", float(number))))
        app = f"app-{number % 2}"
        key = Idempotency(app, number if app == "app-0" else f"v{number}")
        result = writer.commit(*intent, idempotency=key if number % 3 else None)
        assert result is not None
        assert result.commit_id == number


def full_walk(world: World) -> Checkpoint:
    """What a checkpoint at head must say, from parent links alone."""
    manifests = world.chain()
    head = world.head()
    paths = [m.parent_manifest_path for m in manifests[1:]] + [head.manifest_path]
    # A checkpoint is written with its commit, whose manifest names it: that one has no hash yet.
    hashes = [sha256(world.backend.objects()[path or ""]) for path in paths[:-1]]
    entries: dict[tuple[str, str], list[Any]] = {}
    schemas: dict[tuple[str, str], dict[int, Any]] = {}
    marks: dict[str, dict[str, Any]] = {}
    for manifest in manifests:
        for ref in manifest.touched():
            entries.setdefault(ref, []).append(entry_of(manifest, ref))
        for record in manifest.schema.get("registered", ()):
            ref = (record["kind"], record["type_name"])
            schemas.setdefault(ref, {})[record["schema_version_id"]] = {
                **record,
                "activation_commit_id": manifest.commit_id,
                "created_at": manifest.created_at,
            }
        if manifest.idempotency is not None:
            mark = manifest.idempotency
            marks[mark["app_id"]] = {"version": mark["version"], "commit_id": manifest.commit_id}
    return Checkpoint(
        commit_id=head.commit_id,
        log_id=head.log_id,
        entries={ref: tuple(known) for ref, known in entries.items()},
        schemas=schemas,
        idempotency=marks,
        commits=tuple(
            CommitPoint(m.commit_id, m.created_at, p or "", digest)
            for m, p, digest in zip(manifests, paths, [*hashes, ""], strict=True)
        ),
    )


@pytest.mark.parametrize("cold", [True, False])
def test_checkpoints_agree_with_a_full_walk(either_world: World, cold: bool) -> None:
    """Also when each is written by a process that has not seen the log before."""
    world = either_world
    writer = world.open("writer", checkpoint_interval=4)
    checked = []

    def compare() -> None:
        head = world.head()
        if head.commit_id % 4 == 0 and head.commit_id not in checked:
            assert head.checkpoint is not None
            assert head.checkpoint.commit_id == head.commit_id
            stored = world.backend.objects()[head.checkpoint.path]
            assert hashlib.sha256(stored).hexdigest() == head.checkpoint.sha256
            found = Checkpoint.parse(stored, key=head.checkpoint.path)
            assert found == Checkpoint.parse(full_walk(world).to_bytes(), key="walk")
            assert world.chain()[-1].checkpoint == head.checkpoint
            checked.append(head.commit_id)

    for number in range(1, 14):
        if cold and number % 4 == 0:
            writer = world.open("cold", checkpoint_interval=4)
        at(writer.store, "PUT_IF", layout.HEAD, compare, when="after")
        intent = [rows_of(CUSTOMER, customer(f"c{number % 3}", age=number))]
        if number % 4 == 2:
            intent.append(rows_of(PRODUCT, product("p", float(number))))
        key = Idempotency(f"app-{number % 2}", f"v{number}") if number % 3 else None
        assert writer.commit(*intent, idempotency=key) is not None
    assert checked == [4, 8, 12]
    # and manifests in between name the latest one
    assert [m.checkpoint.commit_id if m.checkpoint else 0 for m in world.chain()] == [
        0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12,
    ]  # fmt: skip


def test_a_walk_stops_at_the_checkpoint(either_world: World) -> None:
    """With every index missing, one checkpoint and the manifests since are all that is read."""
    world = either_world
    busy(world.open("writer", checkpoint_interval=10), 23)
    world.backend.remove(world.stored_keys("meta/indices/"))
    reader = world.open("reader")
    seen: list[str] = []
    reader.store.on_request(lambda kind, key: seen.append(key))
    ages = reader.ages()
    assert ages == {"c0": 21, "c1": 22, "c2": 23}
    manifests = [key for key in seen if key.endswith("manifest.json")]
    assert {int(m.split("/")[1].split("-")[0]) for m in manifests} == {21, 22, 23}
    assert len([key for key in seen if "checkpoints" in key]) == 1


def test_planning_without_indices_keeps_its_budget(world: World) -> None:
    """Just before the next checkpoint, where the walk is longest."""
    writer = world.open("writer")
    for number in range(1, 200):
        writer.put(customer("a", age=number))
    world.backend.remove(world.stored_keys("meta/indices/"))
    reader = world.open("reader")
    opened = reader.store.meter.snapshot()["total"]
    with tracing(HopTrace()) as trace:
        head = reader.repo.chain.read_head().head
        found = reader.repo._versions.resolve(CUSTOMER, head).entries
    assert [entry.max_commit_id for entry in found] == list(range(1, 200))
    assert trace.depth == 9
    # head, index, checkpoint, and the 99 manifests since
    assert reader.store.meter.snapshot()["total"] - opened == 3 + 99


def test_everything_is_found_across_checkpoints(either_world: World) -> None:
    world = either_world
    busy(world.open("writer", checkpoint_interval=5), 17)
    reader = world.open("reader")
    assert [r.id for r in reader.repo.list_commits(limit=100)] == list(range(17, 0, -1))
    assert [r.id for r in reader.repo.list_commits(limit=3)] == [17, 16, 15]
    assert [r.id for r in reader.repo.list_commits(limit=100, since_commit_id=9)] == list(
        range(17, 9, -1)
    )
    for commit_id in range(1, 18):
        record = reader.repo.get_commit(commit_id)
        assert record is not None
        assert record.id == commit_id
    assert reader.rows(window=ReadWindow(as_of=4))[0]["age"] == 3
    heads = reader.repo.chain.type_heads_at(world.head())
    record_of = state.schema_record(
        reader.repo.chain, world.head(), CUSTOMER.ref, heads[CUSTOMER.ref]
    )
    assert record_of is not None
    assert record_of["schema_sha256"] == CUSTOMER.schema_sha256


def test_a_checkpoint_of_a_lost_attempt_is_not_built_on(world: World) -> None:
    """Its content is remembered by hash, so a retry starts from what head names."""
    ours, rival = (world.open(name, checkpoint_interval=2) for name in ("ours", "rival"))
    ours.put(customer("a", age=1))

    def rival_commits() -> None:
        world.pass_lease()
        rival.put(customer("r", age=2))
        rival.put(customer("r", age=3))

    at(ours.store, "PUT_IF", layout.HEAD, rival_commits)
    assert ours.put(customer("a", age=4)).commit_id == 4
    head = world.head()
    assert head.checkpoint is not None
    stored = Checkpoint.parse(world.backend.objects()[head.checkpoint.path], key="")
    assert stored == Checkpoint.parse(full_walk(world).to_bytes(), key="walk")


def test_a_checkpoint_is_published_by_the_cas_and_not_before(world: World) -> None:
    doomed = world.open("doomed", checkpoint_interval=1)
    doomed.fail(FaultKind.CRASH_BEFORE, "PUT_IF", layout.HEAD)
    with pytest.raises(SimulatedCrash):
        doomed.put(customer("a", age=1))
    assert len(world.stored_keys("meta/checkpoints/")) == 1
    assert world.head().checkpoint is None
    world.pass_lease()
    fresh = world.open("fresh", checkpoint_interval=1)
    fresh.put(customer("a", age=2))
    assert fresh.history() == world.open().history() == [(1, "a", 2)]


# -- damage -----------------------------------------------------------------------------------


def damage_checkpoint(world: World) -> str:
    ref = world.head().checkpoint
    assert ref is not None
    world.backend.write(ref.path, world.backend.objects()[ref.path] + b" ")
    return ref.path


def lose_checkpoint(world: World) -> str:
    ref = world.head().checkpoint
    assert ref is not None
    world.backend.remove([ref.path])
    return ref.path


def lose_manifest(world: World) -> str:
    path = world.chain()[-2].parent_manifest_path
    assert path is not None
    world.backend.remove([path])
    return path


def garble_manifest(world: World) -> str:
    path = world.head().manifest_path
    assert path is not None
    world.backend.write(path, b'{"commit_id": 1}')
    return path


def garble_head(world: World) -> str:
    world.backend.write(layout.HEAD, b'{"commit_id": 7, "manifest_path": null}')
    return layout.HEAD


@pytest.mark.parametrize(
    ("harm", "interval"),
    [
        (damage_checkpoint, 3),
        (lose_checkpoint, 3),
        (lose_manifest, 100),
        (garble_manifest, 100),
        (garble_head, 100),
    ],
)
def test_damage_is_named_and_never_read_around(
    world: World, harm: Callable[[World], str], interval: int
) -> None:
    busy(world.open("writer", checkpoint_interval=interval), 5)
    world.backend.remove(world.stored_keys("meta/indices/"))
    key = harm(world)
    before = world.backend.objects()
    reader = world.open("reader", checkpoint_interval=interval)
    with pytest.raises(IntegrityError) as caught:
        reader.rows()
    assert caught.value.key == key
    assert key in str(caught.value)
    with pytest.raises(IntegrityError):
        reader.put(customer("c0", age=99))
    assert world.backend.objects() == before, "nothing was published on top of damage"


# -- a log of the first implementation --------------------------------------------------------


def legacy_file(commit_id: int, rows: list[dict[str, Any]]) -> bytes:
    """Parquet as in section 4.1 of the specification."""
    columns = {
        "commit_id": pa.array([commit_id] * len(rows), pa.int64()),
        "entity_type": pa.array(["Customer"] * len(rows), pa.string()),
        "entity_key": pa.array([row["id"] for row in rows], pa.string()),
        "schema_version_id": pa.array([1] * len(rows), pa.int64()),
        "fields_json": pa.array([json.dumps(row, sort_keys=True) for row in rows], pa.string()),
        "id": pa.array([row["id"] for row in rows], pa.string()),
        "name": pa.array([row["name"] for row in rows], pa.string()),
        "age": pa.array([row["age"] for row in rows], pa.int64()),
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def legacy_log(world: World, *, indexed_to: int = 3) -> None:
    """Three commits exactly as sections 3 and 4 of the specification show them: no engine.json,
    no log id, no write ids, no type heads, no skip pointers."""
    world.backend.remove(world.stored_keys())
    moment = "2026-02-10T12:34:56.789012+00:00"
    history = [
        [{"id": "a", "name": "Ann", "age": 1}, {"id": "b", "name": "Bob", "age": 1}],
        [{"id": "a", "name": "Ann", "age": 2}],
        [{"id": "c", "name": "Cid", "age": 3}],
    ]
    parent: str | None = None
    entries = []
    for commit_id, rows in enumerate(history, start=1):
        folder = f"commits/{commit_id}-a1b2c3d{commit_id}"
        path, data = f"{folder}/entities/Customer.parquet", legacy_file(commit_id, rows)
        world.backend.write(path, data)
        manifest = {
            "commit_id": commit_id,
            "parent_commit_id": commit_id - 1 or None,
            "parent_manifest_path": parent,
            "created_at": moment,
            "runtime_id": "writer-a",
            "metadata": {"mark": f"legacy-{commit_id}"},
            "files": [
                {
                    "kind": "entity",
                    "type_name": "Customer",
                    "path": path,
                    "row_count": len(rows),
                    "schema_version_id": 1,
                    "content_sha256": hashlib.sha256(data).hexdigest(),
                }
            ],
        }
        parent = f"{folder}/manifest.json"
        world.backend.write(parent, json.dumps(manifest).encode())
        if commit_id <= indexed_to:
            entries.append({"min_commit_id": commit_id, "max_commit_id": commit_id, "path": path})
    documents: dict[str, dict[str, Any]] = {
        layout.HEAD: {
            "commit_id": len(history),
            "manifest_path": parent,
            "updated_at": moment,
            "runtime_id": "writer-a",
        },
        layout.TYPES: {"entities": ["Customer"], "relations": [], "updated_at": moment},
        layout.index("entity", "Customer"): {
            "type_name": "Customer",
            "max_indexed_commit": indexed_to,
            "entries": entries,
        },
    }
    for key, document in documents.items():
        world.backend.write(key, json.dumps(document).encode())


LEGACY_HISTORY = [(1, "a", 1), (1, "b", 1), (2, "a", 2), (3, "c", 3)]


@pytest.mark.parametrize("indexed_to", [3, 1, 0])
def test_a_log_of_the_first_implementation_is_read_and_not_written(
    world: World, indexed_to: int
) -> None:
    legacy_log(world, indexed_to=indexed_to)
    before = world.backend.objects()
    reader = world.open("reader")
    assert reader.repo.engine_version == "v1"
    assert reader.history() == LEGACY_HISTORY
    assert reader.ages() == {"a": 2, "b": 1, "c": 3}
    assert len(reader.rows(window=ReadWindow(as_of=1))) == 2
    assert [r.id for r in reader.repo.list_commits()] == [3, 2, 1]
    assert reader.repo.type_head(CUSTOMER) == 3
    assert (reader.repo.index_warnings() == []) == (indexed_to == 3)
    reader.repo.storage_info()
    reader.repo.list_commit_changes(2)
    assert world.backend.objects() == before


@pytest.mark.parametrize("indexed_to", [3, 1])
def test_a_log_of_the_first_implementation_takes_commits(world: World, indexed_to: int) -> None:
    legacy_log(world, indexed_to=indexed_to)
    writer = world.open("writer", checkpoint_interval=5)
    assert layout.ENGINE not in world.stored_keys()

    assert writer.commit(rows_of(CUSTOMER, customer("b", "Bob", 1))) is None  # nothing changes
    result = writer.put(customer("a", "Ann", 2), customer("b", "Bob", 9), customer("d", "Dan", 4))

    assert result.commit_id == 4
    assert [(c.inserted, c.updated) for c in result.changes] == [(1, 1)]
    assert world.document(layout.ENGINE)["engine_version"] == "v1"
    expected = [*LEGACY_HISTORY, (4, "b", 9), (4, "d", 4)]
    assert world.open().history() == expected
    assert world.open().repo.index_warnings() == []
    assert world.chain()[-1].parent_commit_id == 3

    other = world.open("other", checkpoint_interval=5)
    other.put(customer("a", "Ann", 5))  # writes a checkpoint over the legacy part
    world.backend.remove(world.stored_keys("meta/indices/"))
    assert world.open().history() == [*expected, (5, "a", 5)]
    assert [r.id for r in world.open().repo.list_commits()] == [5, 4, 3, 2, 1]
    assert world.marks()[:3] == ["legacy-1", "legacy-2", "legacy-3"]


def test_the_stamp_is_written_once_and_by_whoever_is_first(world: World) -> None:
    legacy_log(world)
    one, two = world.open("one"), world.open("two")
    one.put(customer("x", age=1))
    stamp = world.document(layout.ENGINE)
    two.put(customer("y", age=1))
    one.put(customer("z", age=1))
    assert world.document(layout.ENGINE) == stamp
    assert world.open().repo.engine_version == "v1"


def test_a_step_that_another_took_meanwhile_is_not_undone(world: World) -> None:
    """A newer release may have brought the storage further than ours would."""
    legacy_log(world)
    writer = world.open("writer")
    newer = {"backend": "s3", "engine_version": "v1", "format": 7}
    world.backend.write(layout.ENGINE, json.dumps(newer).encode())
    writer.put(customer("x", age=1))
    assert world.document(layout.ENGINE) == newer


def test_a_stamp_without_a_format_gets_one(world: World) -> None:
    legacy_log(world)
    stamp = {"backend": "s3", "engine_version": "v1", "created_at": "2026-02-10T12:00:00+00:00"}
    world.backend.write(layout.ENGINE, json.dumps(stamp).encode())
    world.open("writer").put(customer("x", age=1))
    assert world.document(layout.ENGINE) == stamp | {
        "format": 3,
        "write_id": world.document(layout.ENGINE)["write_id"],
    }


def test_a_stamp_that_cannot_be_written_is_an_error_of_ours(world: World) -> None:
    """Nothing of the port's signals may reach the caller."""
    legacy_log(world)
    writer = world.open("writer")
    writer.fail(FaultKind.TIMEOUT, "PUT_IF", layout.ENGINE, times=None)
    with pytest.raises(StorageBackendError) as caught:
        writer.put(customer("x", age=1))
    assert caught.value.retryable
    assert world.head().commit_id == 3
    writer.heal()
    assert writer.put(customer("x", age=1)).commit_id == 4


def test_heads_of_equal_fields_are_unlike_because_of_their_write_id() -> None:
    head = Head(1, "commits/1-a/manifest.json", "now", "me", write_id="1")
    assert head.to_bytes() != replace(head, write_id="2").to_bytes()
