"""What object storages keep beside the log about schemas: written by whoever changes them, rebuilt
from the chain by anyone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_engine.maintenance.schema_catalogs import repair_catalogs
from storage_engine.model import Field
from storage_engine.repository import Repository, initialize_storage
from tests.conformance.test_rfc0009_migration import V1, V2, drop, entity, migrate, row, write
from tests.engines import Storage


@pytest.fixture(params=["v1", "v2"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made = Storage(f"{(tmp_path / 'onto').as_uri()}", "directory", str(request.param))
    initialize_storage(made.uri, made.engine_version, made.config())
    return made


@pytest.fixture
def repository(storage: Storage) -> Iterator[Repository]:
    opened = storage.open()
    yield opened
    opened.close()


def document(storage: Storage, key: str) -> dict[str, Any]:
    stored = storage.document(key)
    stored.pop("write_id", None)
    stored.pop("updated_at", None)
    return stored


def test_catalogs_after_migrations_a_rename_and_a_drop(
    storage: Storage, repository: Repository
) -> None:
    gone = entity("Gone", n=Field[int])
    write(repository, V1, row("a", name="Ann", age=1))
    write(repository, gone, row("g", n=1))
    migrate(repository, V2)
    drop(repository, "Gone")
    renamed = entity(
        "Client",
        renamed_from="Customer",
        name=Field[str],
        age=Field[float],
        tier=(Field[str], Field(default="basic")),
    )
    migrate(repository, renamed)
    repository.flush()
    assert document(storage, "meta/schema/types.json") == {"entities": ["Client"], "relations": []}
    registry = document(storage, "meta/schema/registry.json")
    assert {k: list(v) for k, v in registry.items()} == {"entity": ["Client"], "relation": []}
    assert registry["entity"]["Client"]["schema_version_id"] == 3
    versions = document(storage, "meta/schema/versions/entities/Customer.json")["versions"]
    boundaries = ("schema_version_id", "activation_commit_id", "superseded_at_commit_id")
    assert [tuple(v.get(name) for name in boundaries) for v in versions] == [(1, 1, 3), (2, 3, 5)]
    versions = document(storage, "meta/schema/versions/entities/Client.json")["versions"]
    assert [tuple(v.get(name) for name in boundaries) for v in versions] == [(3, 5, None)]
    dropped = document(storage, "meta/schema/dropped.json")["dropped"]
    assert dropped == [
        {
            "type_kind": "entity",
            "type_name": name,
            "schema_version_id": version,
            "dropped_commit_id": commit_id,
            "renamed_to": renamed_to,
            "purged": False,
        }
        for name, version, commit_id, renamed_to in (
            ("Customer", 2, 5, "Client"),
            ("Gone", 1, 4, None),
        )
    ]
    if storage.engine_version == "v1":
        return
    layouts = document(storage, "meta/type_layout_catalog.json")["layouts"]
    assert [
        (e["type_name"], e["schema_version_id"], e["activation_commit_id"], e["is_current"])
        for e in layouts
    ] == [
        ("Client", 3, 5, True),
        ("Customer", 1, 1, False),
        ("Customer", 2, 3, False),
        ("Gone", 1, 2, False),
    ]
    index = document(storage, "meta/indices/entities/Customer.json")
    assert index["current_schema_version_id"] is None
    assert index["historical_versions"] == [
        {"schema_version_id": 1, "activation_commit_id": 1, "superseded_at_commit_id": 3},
        {"schema_version_id": 2, "activation_commit_id": 3, "superseded_at_commit_id": 5},
    ]
    index = document(storage, "meta/indices/entities/Client.json")
    assert (index["current_schema_version_id"], index["activation_commit_id"]) == (3, 5)


def test_index_of_a_migrated_type_has_its_past(storage: Storage, repository: Repository) -> None:
    write(repository, V1, row("a", name="Ann", age=1))
    migrate(repository, V2)
    repository.flush()
    if storage.engine_version == "v2":
        index = document(storage, "meta/indices/entities/Customer.json")
        assert [e["schema_version_id"] for e in index["entries"]] == [1, 2]
        assert index["historical_versions"] == [
            {"schema_version_id": 1, "activation_commit_id": 1, "superseded_at_commit_id": 2}
        ]
    assert repository.objects is not None
    assert repository.objects.index_warnings() == []
    json.dumps(repository.storage_info())


DOCUMENTS = (
    "meta/schema/types.json",
    "meta/schema/registry.json",
    "meta/schema/dropped.json",
    "meta/schema/versions/entities/Customer.json",
    "meta/schema/versions/entities/Gone.json",
    "meta/type_layout_catalog.json",
)


@pytest.mark.parametrize("damage", ["lost", "garbage", "other"])
def test_repair_rebuilds_catalogs_from_the_chain(
    storage: Storage, repository: Repository, damage: str
) -> None:
    write(repository, V1, row("a", name="Ann", age=1))
    write(repository, entity("Gone", n=Field[int]), row("g", n=1))
    migrate(repository, V2)
    drop(repository, "Gone")
    repository.flush()
    assert repository.objects is not None
    assert repair_catalogs(repository.objects).catalogs == ()
    keys = [k for k in DOCUMENTS if storage.engine_version == "v2" or "layout" not in k]
    before = {key: document(storage, key) for key in keys}
    store = storage.objects()
    for key in keys:
        if damage == "lost":
            store.delete_many([key])
        else:
            store.put(key, b"{not json" if damage == "garbage" else b'{"entities": 5}')
    store.close()
    again = storage.open()
    try:
        assert again.objects is not None
        planned = repair_catalogs(again.objects)
        assert sorted(f.key for f in planned.catalogs) == sorted(keys)
        assert not planned.applied
        assert repair_catalogs(again.objects) == planned, "a plan has written something"
        assert repair_catalogs(again.objects, apply=True).applied
        after = {key: document(storage, key) for key in keys}
        assert after == before
        assert repair_catalogs(again.objects).catalogs == ()
    finally:
        again.close()
