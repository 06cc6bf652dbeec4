"""RFC 0004 tests 12 to 15 by the command line, on a directory and on a real S3 server."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine.commitlog import layout
from storage_engine.repository import initialize_storage
from tests.cli.support import Done, onto
from tests.engines import (
    CUSTOMER,
    PRODUCT,
    Storage,
    commit,
    customer,
    new_storage,
    product,
    put,
    rows_of,
)

PLACES = ["directory-v1", "directory-v2", "seaweedfs-v1", "seaweedfs-v2"]


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.s3 if name.startswith("sea") else ())
        for name in PLACES
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Customers at 1 and 3, products at 2."""
    made = new_storage(str(request.param), request, tmp_path)
    initialize_storage(made.uri, made.engine_version, made.config())
    repository = made.open()
    put(repository, customer("a", age=1))
    commit(repository, rows_of(PRODUCT, product("p", 1.0)))
    put(repository, customer("a", age=2))
    repository.close()
    return made


def run(place: Storage, folder: Path, *args: str) -> Done:
    config = folder / "onto.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in place.settings.items()]
    config.write_text("\n".join(lines))
    return onto(*args, "--json", "--storage-uri", place.uri, "--config", config)


def damage(place: Storage, **changed: Any) -> None:
    """As another implementation would leave it, whose indices prove nothing."""
    store = place.objects()
    key = layout.index(*CUSTOMER.ref)
    document = json.loads(store.get(key).data)
    document.pop("sha256", None)
    document.pop("max_indexed_manifest", None)
    store.put(key, json.dumps({**document, **changed}).encode())
    store.close()


def entries(place: Storage) -> list[dict[str, Any]]:
    return list(place.document(layout.index(*CUSTOMER.ref))["entries"])


def ages(place: Storage) -> list[tuple[int, int]]:
    repository = place.open()
    try:
        rows = repository.read(CUSTOMER).to_pylist()
        return [(row["commit_id"], row["age"]) for row in rows]
    finally:
        repository.close()


def found(done: Done) -> set[str]:
    return {finding["reason"] for finding in done.json["findings"]}


def test_rfc0004_12_lag_missing_latest_and_wrong_head_path_are_warned_of(
    place: Storage, tmp_path: Path
) -> None:
    assert run(place, tmp_path, "index", "verify").code == 0
    first, last = entries(place)
    absent = "commits/3-deadbeef/entities/Customer.parquet"
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"max_indexed_commit": 1, "entries": [first]}, {"lag", "missing_latest_entry"}),
        ({"entries": [first]}, {"missing_latest_entry"}),
        ({"entries": [first, {**last, "path": absent}]}, {"path_mismatch", "absent_file"}),
    ]
    for changed, expected in cases:
        damage(place, **{"max_indexed_commit": 3, "entries": [first, last], **changed})
        verified = run(place, tmp_path, "index", "verify")
        assert verified.code == 3
        assert found(verified) == expected
        assert ages(place) == [(3, 2)], "the chain is the fallback"
        assert run(place, tmp_path, "info").json["index_warnings"] != []


def test_rfc0004_12_a_snapshot_that_covers_head_is_no_missing_entry(
    place: Storage, tmp_path: Path
) -> None:
    """As the first implementation left it after compaction: known to the index alone."""
    store = place.objects()
    tables = [pq.read_table(io.BytesIO(store.get(e["path"]).data)) for e in entries(place)]
    sink = io.BytesIO()
    pq.write_table(pa.concat_tables(tables), sink)
    path = "snapshots/entities/Customer-1-3.parquet"
    store.put(path, sink.getvalue())
    store.close()
    entry = {"min_commit_id": 1, "max_commit_id": 3, "path": path, "schema_version_id": 1}
    damage(place, entries=[entry])
    verified = run(place, tmp_path, "index", "verify")
    assert (verified.code, found(verified)) == (0, set())
    assert ages(place) == [(3, 2)]


def test_rfc0004_13_repair_is_idempotent_and_leaves_head_alone(
    place: Storage, tmp_path: Path
) -> None:
    damage(place, max_indexed_commit=1, entries=entries(place)[:1])
    head = place.document(layout.HEAD)

    planned = run(place, tmp_path, "index", "repair")
    assert planned.code == 0
    assert planned.json["applied"] is False
    assert [t["type_name"] for t in planned.json["types"]] == ["Customer"]
    assert run(place, tmp_path, "index", "verify").code == 3, "a dry run writes nothing"

    done = run(place, tmp_path, "index", "repair", "--apply")
    assert done.code == 0
    assert done.json["repair_head"] == 3
    assert run(place, tmp_path, "index", "verify").code == 0
    assert run(place, tmp_path, "info").json["index_warnings"] == []
    repaired = place.document(layout.index(*CUSTOMER.ref))
    assert repaired["max_indexed_commit"] == 3

    again = run(place, tmp_path, "index", "repair", "--apply")
    assert again.json["types"] == []
    assert place.document(layout.index(*CUSTOMER.ref)) == repaired
    assert place.document(layout.HEAD) == head
    assert len(run(place, tmp_path, "commits").json["commits"]) == 3


def test_rfc0004_13_unreadable_types_json_fails_fast(place: Storage, tmp_path: Path) -> None:
    store = place.objects()
    store.put(layout.TYPES, b"{")
    store.close()
    for args in (("index", "verify"), ("index", "repair"), ("index", "repair", "--apply")):
        failed = run(place, tmp_path, *args)
        assert failed.code == 3
        assert failed.json["error"]["type"] == "SchemaMetadataError"


def test_a_sqlite_storage_has_no_indices(tmp_path: Path) -> None:
    for args in (("index", "verify"), ("index", "repair", "--apply")):
        failed = onto(*args, "--db", tmp_path / "onto.db", "--json")
        assert failed.code == 4
        assert "SQLite" in failed.json["error"]["message"]


@pytest.mark.parametrize("place", ["directory-v1", "directory-v2"], indirect=True)
def test_tables_for_people(place: Storage) -> None:
    damage(place, max_indexed_commit=1, entries=entries(place)[:1])
    shown = onto("index", "verify", "--storage-uri", place.uri)
    assert shown.code == 3
    assert "missing_latest_entry" in shown.out
    planned = onto("index", "repair", "--storage-uri", place.uri)
    assert "onto index repair --apply" in planned.out
    applied = onto("index", "repair", "--apply", "--storage-uri", place.uri)
    assert "1 index written, at commit 3." in applied.out
    assert "Nothing to repair" in onto("index", "repair", "--storage-uri", place.uri).out


def test_rfc0004_14_types_that_are_seldom_touched_are_not_behind(
    place: Storage, tmp_path: Path
) -> None:
    """Products were touched by commit 2 only."""
    index = place.document(layout.index(*PRODUCT.ref))
    assert index["max_indexed_commit"] == (3 if place.engine_version == "v1" else 2)
    assert [e["min_commit_id"] for e in index["entries"]] == [2]
    assert run(place, tmp_path, "index", "verify").code == 0
    store = place.objects()
    key = layout.index(*PRODUCT.ref)
    store.put(key, json.dumps({**index, "max_indexed_commit": 0, "entries": []}).encode())
    store.close()
    repository = place.open()
    assert repository.read(PRODUCT).num_rows == 1, "lag costs no rows"
    repository.close()
    verified = run(place, tmp_path, "index", "verify")
    assert [f["type_name"] for f in verified.json["findings"]] == ["Product"] * 2
    run(place, tmp_path, "index", "repair", "--apply")
    assert place.document(key)["max_indexed_commit"] == 3


@pytest.mark.parametrize("content", [None, b"{"], ids=["missing", "malformed"])
def test_rfc0004_15_a_commit_stands_when_types_json_cannot_be_read(
    place: Storage, tmp_path: Path, content: bytes | None
) -> None:
    store = place.objects()
    if content is None:
        store.delete_many([layout.TYPES])
    else:
        store.put(layout.TYPES, content)
    store.close()
    before = place.document(layout.index(*CUSTOMER.ref))
    repository = place.open()
    assert put(repository, customer("a", age=3)).commit_id == 4
    repository.flush()
    warning = repository.storage_info()["last_index_warning"]
    repository.close()
    assert ages(place) == [(4, 3)]
    after = place.document(layout.index(*CUSTOMER.ref))
    assert "types.json" in warning
    assert after == before, "indices are left unchanged by this attempt"
    assert run(place, tmp_path, "index", "verify").code == 3
