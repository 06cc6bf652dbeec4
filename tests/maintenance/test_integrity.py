"""`verify` finds every contradiction that is planted, and none where there is none."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import sha256
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import IntegrityReport, verify_storage
from storage_engine.repository import initialize_storage
from tests.cli.support import onto
from tests.commitlog.support import World, Writer
from tests.engines import (
    CUSTOMER,
    EMPLOYMENT,
    EVERYTHING,
    PRODUCT,
    SUBSCRIPTION,
    Storage,
    commit,
    customer,
    edge,
    new_storage,
    on_servers,
    product,
    rows_of,
    stream_of,
)
from tests.maintenance.support import DAY_S


def populated(repository: Any) -> None:
    commit(repository, rows_of(CUSTOMER, customer("c1"), customer("c2")))
    commit(repository, rows_of(PRODUCT, product("p1")))
    commit(
        repository,
        rows_of(SUBSCRIPTION, edge("c1", "p1", seats=1)),
        rows_of(EMPLOYMENT, edge("c2", "p1", "2024", role="clerk")),
    )
    commit(repository, stream_of(CUSTOMER, [customer("c1", age=5)], [customer("c3", age=6)]))
    commit(repository, rows_of(CUSTOMER, customer("c2", age=7)))
    repository.flush()


def everything_row(key: str) -> dict[str, Any]:
    return {
        "entity_key": key,
        "id": key,
        "text": "t",
        "number": 1,
        "real": 0.5,
        "flag": True,
        "moment": datetime(2026, 1, 1, tzinfo=UTC),
        "day": date(2026, 1, 1),
        "raw": b"x",
        "maybe": None,
        "maybe_number": None,
        "tags": '["a"]',
        "counts": "{}",
        "mixed": "1",
        "anything": None,
    }


@on_servers
@pytest.mark.parametrize("deep", [False, True], ids=["plain", "deep"])
def test_a_sound_storage_has_no_findings(storage: Storage, deep: bool) -> None:
    repository = storage.open(checkpoint_interval=2)
    assert verify_storage(repository, deep=deep).ok
    populated(repository)
    commit(repository, rows_of(EVERYTHING, everything_row("e")))
    repository.create_tag("v1", 2)
    report = verify_storage(repository, deep=deep)
    assert report.findings == []
    assert report.head_commit_id == 6
    assert (report.checked["commits"], report.checked["tags"]) == (6, 1)
    if storage.backend != "sqlite":
        assert report.checked["files"] == 7
        compact(repository, CompactionPolicy(min_entries=2))
        report = verify_storage(repository, deep=deep)
        assert report.findings == []
    if deep:
        assert report.checked["rows"] == 9
    repository.close()


# -- planted in an object storage -----------------------------------------------------------------


def damaged(world: World) -> Writer:
    writer = world.open("writer", checkpoint_interval=2)
    populated(writer.repo)
    writer.repo.create_tag("v1", 4)
    writer.repo.flush()
    return writer


def edit(world: World, key: str, change: Callable[[dict[str, Any]], None]) -> None:
    document = world.document(key)
    change(document)
    world.backend.write(key, json.dumps(document).encode())


def manifest_path(world: World, commit_id: int) -> str:
    paths = [world.head().manifest_path]
    for manifest in reversed(world.chain()):
        paths.append(manifest.parent_manifest_path)
    return str(paths[len(world.chain()) - commit_id])


def data_file(world: World, commit_id: int) -> str:
    return world.chain()[commit_id - 1].files[0].path


def found(report: IntegrityReport) -> set[tuple[str, str]]:
    return {(f.area, f.reason) for f in report.findings}


def lose(key: Callable[[World], str]) -> Callable[[World], None]:
    return lambda world: world.backend.remove([key(world)])


def changed(
    key: Callable[[World], str], change: Callable[[dict[str, Any]], Any]
) -> Callable[[World], None]:
    return lambda world: edit(world, key(world), change)


def forget_hashes(world: World) -> None:
    """Manifests and head name others without their hashes, as before format 2."""

    def forget(document: dict[str, Any]) -> None:
        links = [*document["skip"], *(f["previous"] or {} for f in document["files"])]
        links += [top for tops in document["type_heads"].values() for top in tops.values()]
        links += [link for name in ("events_before", "acks_before") if (link := document[name])]
        for link in [document, *links]:
            for name in ("parent_sha256", "manifest_sha256", "sha256"):
                link.pop(name, None)

    for commit_id in range(1, world.head().commit_id + 1):
        edit(world, manifest_path(world, commit_id), forget)
    edit(world, layout.HEAD, lambda d: d.update(commit_sha256=None))


def rewritten(world: World, commit_id: int, change: Callable[[pa.Table], pa.Table]) -> None:
    """Another file in the place of a committed one, with a manifest that believes in it."""
    path = data_file(world, commit_id)
    table = change(pq.read_table(io.BytesIO(world.backend.objects()[path])))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    data = sink.getvalue()
    world.backend.write(path, data)
    own = manifest_path(world, commit_id)

    def believe(document: dict[str, Any]) -> None:
        facts = {"content_sha256": sha256(data), "bytes": len(data)}
        document["files"][0] |= {**facts, "row_count": table.num_rows}

    edit(world, own, believe)
    edit(world, layout.HEAD, lambda d: d.update(commit_sha256=None, checkpoint=None))
    edit(world, layout.tag("v1"), lambda d: d.update(checkpoint=None))
    world.backend.remove(world.stored_keys(layout.INDICES))
    forget_hashes(world)


def head_manifest(world: World) -> str:
    return manifest_path(world, world.head().commit_id)


def head_checkpoint(world: World) -> str:
    checkpoint = world.head().checkpoint
    assert checkpoint is not None
    return checkpoint.path


def loop(world: World) -> None:
    edit(
        world,
        manifest_path(world, 2),
        lambda d: d.update(parent_manifest_path=manifest_path(world, 4)),
    )


def wrong_checkpoint(world: World, change: Callable[[dict[str, Any]], Any]) -> None:
    """With a hash that fits, as if a writer had made it so."""
    key = head_checkpoint(world)
    edit(world, key, change)
    digest = sha256(world.backend.objects()[key])
    edit(world, layout.HEAD, lambda d: d["checkpoint"].update(sha256=digest))
    for commit_id in (4, 5):
        path = manifest_path(world, commit_id)
        if (world.document(path).get("checkpoint") or {}).get("path") == key:
            edit(world, path, lambda d: d["checkpoint"].update(sha256=digest))
    edit(world, layout.tag("v1"), lambda d: d["checkpoint"].update(sha256=digest))
    forget_hashes(world)


def drop_entry(document: dict[str, Any]) -> None:
    customers = next(t for t in document["types"] if t["type_name"] == "Customer")
    customers["entries"] = customers["entries"][1:]


def other_path(document: dict[str, Any]) -> None:
    customers = next(t for t in document["types"] if t["type_name"] == "Customer")
    customers["entries"][0]["files"][0]["path"] = "commits/1-x/entities/Customer.parquet"


PLANTED: dict[str, tuple[Callable[[World], object], set[tuple[str, str]]]] = {
    "head unreadable": (
        lambda w: w.backend.write(layout.HEAD, b"{"),
        {("chain", "unreadable_head")},
    ),
    "manifest lost": (lose(lambda w: manifest_path(w, 3)), {("chain", "missing_manifest")}),
    "manifest unreadable": (
        lambda w: w.backend.write(manifest_path(w, 3), b"[]"),
        {("chain", "unreadable_manifest")},
    ),
    "manifest changed": (
        changed(head_manifest, lambda d: d.update(metadata={"x": "y"})),
        {("chain", "hash_mismatch")},
    ),
    "schema changed": (
        changed(
            lambda w: manifest_path(w, 1),
            lambda d: d["schema"]["registered"][0]["schema"]["fields"][0].pop("storage"),
        ),
        {("chain", "unreadable_schema"), ("chain", "hash_mismatch")},
    ),
    "cycle": (loop, {("chain", "cycle")}),
    "wrong id": (
        changed(lambda w: manifest_path(w, 3), lambda d: d.update(commit_id=7)),
        {("chain", "wrong_commit_id")},
    ),
    "wrong parent": (
        changed(lambda w: manifest_path(w, 3), lambda d: d.update(parent_commit_id=1)),
        {("chain", "wrong_parent")},
    ),
    "chain cut": (
        changed(
            lambda w: manifest_path(w, 3),
            lambda d: d.update(parent_manifest_path=None, parent_commit_id=None),
        ),
        {("chain", "broken_chain"), ("chain", "wrong_parent")},
    ),
    "time": (
        changed(
            lambda w: manifest_path(w, 3),
            lambda d: d.update(created_at="2030-01-01T00:00:00+00:00"),
        ),
        {("chain", "time_goes_back")},
    ),
    "skip": (
        changed(lambda w: manifest_path(w, 4), lambda d: d["skip"][-1].update(path="commits/x")),
        {("chain", "wrong_skip")},
    ),
    "previous": (
        changed(
            lambda w: manifest_path(w, 4), lambda d: d["files"][0]["previous"].update(commit_id=3)
        ),
        {("chain", "wrong_previous")},
    ),
    "checkpoint lost": (lose(head_checkpoint), {("checkpoint", "missing_checkpoint")}),
    "checkpoint changed": (
        changed(head_checkpoint, lambda d: d.update(idempotency={"x": {}})),
        {("checkpoint", "hash_mismatch")},
    ),
    "checkpoint misses a commit": (
        lambda w: wrong_checkpoint(w, lambda d: d["commits"].pop()),
        {("checkpoint", "wrong_commits")},
    ),
    "checkpoint misses an entry": (
        lambda w: wrong_checkpoint(w, drop_entry),
        {("checkpoint", "missing_entry")},
    ),
    "checkpoint names another file": (
        lambda w: wrong_checkpoint(w, other_path),
        {("checkpoint", "wrong_entry"), ("file", "missing_file")},
    ),
    "tag": (
        changed(lambda w: layout.tag("v1"), lambda d: d.update(commit_id=3)),
        {("tag", "wrong_commit")},
    ),
    "tag unreadable": (
        lambda w: w.backend.write(layout.tag("v1"), b"{}"),
        {("tag", "unreadable_tag")},
    ),
    "file lost": (lose(lambda w: data_file(w, 1)), {("file", "missing_file")}),
    "file cut": (
        lambda w: w.backend.write(data_file(w, 1), w.backend.objects()[data_file(w, 1)][:-5]),
        {("file", "size_mismatch"), ("file", "hash_mismatch"), ("file", "not_parquet")},
    ),
    "bit flipped": (
        lambda w: w.backend.write(data_file(w, 1), flipped(w.backend.objects()[data_file(w, 1)])),
        {("file", "hash_mismatch")},
    ),
    "other columns": (
        lambda w: rewritten(w, 1, lambda t: t.drop_columns(["age"])),
        {("file", "schema_mismatch")},
    ),
}


def flipped(data: bytes) -> bytes:
    return data[:10] + bytes([data[10] ^ 1]) + data[11:]


@pytest.mark.parametrize("defect", PLANTED)
def test_each_planted_defect_is_found(either_world: World, defect: str) -> None:
    world = either_world
    writer = damaged(world)
    assert verify_storage(writer.repo, deep=True).ok
    plant, expected = PLANTED[defect]
    plant(world)
    report = verify_storage(writer.repo)
    assert expected <= found(report), report.findings
    # What follows from it may be reported too, but nothing in other places.
    assert {area for area, _ in found(report)} <= {area for area, _ in expected} | {"checkpoint"}


def with_rows(table: pa.Table, **columns: list[Any]) -> pa.Table:
    for name, values in columns.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, pa.array(values, table.schema.field(name).type))
    return table


DEEP: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "identity twice": (lambda t: with_rows(t, entity_key=["c1", "c1"]), "identity_twice"),
    "key differs": (lambda t: with_rows(t, id=["c1", "other"]), "identity_differs"),
    "null": (lambda t: with_rows(t, name=["Ann", None]), "schema_mismatch"),
    "another commit": (lambda t: with_rows(t, commit_id=[1, 3]), "rows_differ"),
}


@pytest.mark.parametrize("defect", DEEP)
def test_each_planted_row_is_found_when_rows_are_read(either_world: World, defect: str) -> None:
    world = either_world
    damaged(world)
    change, reason = DEEP[defect]
    rewritten(world, 1, change)
    report = verify_storage(world.open().repo)
    assert report.findings == []
    report = verify_storage(world.open().repo, deep=True)
    assert ("rows", reason) in found(report), report.findings
    assert {f.type_name for f in report.findings if f.area == "rows"} == {"Customer"}


def test_json_that_does_not_parse_is_found(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    commit(writer.repo, rows_of(EVERYTHING, everything_row("e")))
    writer.repo.create_tag("v1")
    rewritten(world, 1, lambda t: with_rows(t, tags=["[1"]))
    report = verify_storage(world.open().repo, deep=True)
    assert ("rows", "not_json") in found(report)


def test_ends_that_do_not_exist_are_found(storage: Storage) -> None:
    repository = storage.open()
    populated(repository)
    commit(
        repository, rows_of(SUBSCRIPTION, edge("nobody", "p1", seats=1), edge("c1", "p9", seats=1))
    )
    commit(
        repository, rows_of(SUBSCRIPTION, edge("nobody", "p1", seats=2), edge("c2", "p9", seats=1))
    )
    assert verify_storage(repository).ok
    report = verify_storage(repository, deep=True)
    said = sorted(f.message for f in report.findings)
    assert [f.reason for f in report.findings] == ["missing_endpoint"] * 2
    assert said == [
        "1 left key without Customer: nobody (1 relation)",
        "1 right key without Product: p9 (2 relations)",
    ]
    repository.close()


def test_purged_storages_are_sound(either_world: World) -> None:
    world = either_world
    writer = world.open("writer")
    populated(writer.repo)
    compact(writer.repo, CompactionPolicy(min_entries=2))
    world.backend.clock.sleep(8 * DAY_S)
    assert sweep(writer.repo, plan_gc(writer.repo, purge_compacted=True)).objects > 0
    assert verify_storage(world.open().repo, deep=True).findings == []


# -- SQLite ---------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite-v1", "sqlite-v2"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made = new_storage(str(request.param), request, tmp_path)
    initialize_storage(made.uri, made.engine_version, made.config())
    return made


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("DELETE FROM commits WHERE id = 3", ("chain", "broken_chain")),
        ("UPDATE commits SET parent_id = 1 WHERE id = 3", ("chain", "wrong_parent")),
        (
            "UPDATE commits SET created_at = '2000-01-01T00:00:00Z' WHERE id = 3",
            ("chain", "time_goes_back"),
        ),
        ("UPDATE tags SET commit_id = 77", ("tag", "wrong_commit")),
    ],
    ids=["gap", "parent", "time", "tag"],
)
def test_planted_in_sqlite(database: Storage, statement: str, expected: tuple[str, str]) -> None:
    repository = database.open()
    populated(repository)
    repository.create_tag("v1")
    repository.close()
    with sqlite3.connect(database.path) as connection:
        connection.execute(statement)
    connection.close()
    repository = database.open()
    assert expected in found(verify_storage(repository))
    repository.close()


def test_lost_rows_are_found_in_sqlite(database: Storage) -> None:
    repository = database.open()
    populated(repository)
    repository.close()
    with sqlite3.connect(database.path) as connection:
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
            if "entity" in name.lower()
            and "commit_id" in [c[1] for c in connection.execute(f'PRAGMA table_info("{name}")')]
        ]
        assert tables
        for name in tables:
            connection.execute(f'DELETE FROM "{name}" WHERE commit_id = 5')
    connection.close()
    repository = database.open()
    report = verify_storage(repository)
    assert [(f.reason, f.commit_id, f.type_name) for f in report.findings] == [
        ("rows_differ", 5, "Customer")
    ]
    repository.close()


# -- at the shell ---------------------------------------------------------------------------------


def test_the_command(storage: Storage) -> None:
    repository = storage.open()
    populated(repository)
    repository.close()
    place = ("--storage-uri", storage.uri)
    assert "Everything agrees" in onto("verify", *place).out
    assert onto("verify", "--deep", "--json", *place).json["ok"] is True
    repository = storage.open()
    commit(repository, rows_of(SUBSCRIPTION, edge("nobody", "p1", seats=1)))
    repository.close()
    assert onto("verify", *place).code == 0
    shown = onto("verify", "--deep", *place)
    assert shown.code == 3
    assert "missing_endpoint" in shown.out
    reported = onto("verify", "--deep", "--json", *place)
    assert (reported.code, reported.json["findings_total"]) == (3, 1)


# -- declared classes ---------------------------------------------------------------------------


MODELS = """
from storage_engine import Entity, Field

class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    age: Field[{age}] = Field(default=None)

class NeverWritten(Entity):
    id: Field[str] = Field(primary_key=True)
"""


def test_verify_compares_the_declared_classes(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = storage.open()
    commit(repository, rows_of(CUSTOMER, customer("a", age=1)))
    repository.close()
    monkeypatch.syspath_prepend(tmp_path)
    for module, age in (("same_models", "int | None"), ("other_models", "str | None")):
        (tmp_path / f"{module}.py").write_text(MODELS.format(age=age))
    where = ("verify", "--storage-uri", storage.uri)

    same = onto(*where, "--models", "same_models", "--json")
    assert (same.code, same.json["checked"]["models"]) == (0, 2)

    other = onto(*where, "--models", "other_models", "--json")
    assert other.code == 3
    (finding,) = other.json["findings"]
    assert (finding["area"], finding["reason"]) == ("models", "schema_differs")
    assert finding["type_name"] == "Customer"
    assert "'age' was int | None, is str | None" in finding["message"]
    assert onto(*where, "--models", "no_such_models").code == 2
