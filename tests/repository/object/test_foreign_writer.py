"""Storages of engine v1 that another implementation wrote, with what the specification asks for
and no more: their types are known without classes, and rows are what their payloads say."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine import Entity, Field, Relation, Session, initialize_storage
from storage_engine.commitlog import layout
from storage_engine.errors import IntegrityError
from storage_engine.maintenance.restore import restore
from storage_engine.model import spec_of
from tests.cli.support import onto

MOMENT = "2026-02-10T12:34:56.789012+00:00"
SEEN = datetime(2026, 2, 10, 12, tzinfo=UTC)


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    age: Field[int | None] = Field(default=None)
    seen: Field[datetime | None] = Field(default=None)
    tags: Field[list[str]] = Field(default_factory=list)
    extra: Field[Any] = Field(default=None)


class Knows(Relation[Customer, Customer]):
    since: Field[int]


ANN: dict[str, Any] = {"id": "a", "age": 31, "seen": MOMENT, "tags": ["x", "y"], "extra": "plain"}
BEN: dict[str, Any] = {"id": "b", "age": None, "seen": None, "tags": [], "extra": {"k": [1]}}


def _customers(rows: list[dict[str, Any]], commit_id: int) -> pa.Table:
    """Columns as that implementation has them: a native list, texts for times."""
    return pa.table(
        {
            "commit_id": pa.array([commit_id] * len(rows), pa.int64()),
            "entity_type": ["Customer"] * len(rows),
            "entity_key": [row["id"] for row in rows],
            "schema_version_id": pa.array([1] * len(rows), pa.int64()),
            "id": [row["id"] for row in rows],
            "age": pa.array([row["age"] for row in rows], pa.int32()),
            "seen": pa.array([row["seen"] for row in rows], pa.string()),
            "tags": pa.array([row["tags"] for row in rows], pa.list_(pa.string())),
            "extra": pa.array([str(row["extra"]) for row in rows], pa.string()),
            "fields_json": [json.dumps(row) for row in rows],
        }
    )


def _friends(commit_id: int) -> pa.Table:
    return pa.table(
        {
            "commit_id": pa.array([commit_id], pa.int64()),
            "relation_type": ["Knows"],
            "left_key": ["a"],
            "right_key": ["b"],
            "instance_key": [""],
            "schema_version_id": pa.array([1], pa.int64()),
            "since": pa.array([7], pa.int64()),
            "fields_json": ['{"since": 7}'],
        }
    )


@pytest.fixture(params=["columns", "registry", "unknown words"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    root = tmp_path / "store"
    commits = [
        {("entity", "Customer"): _customers([{**ANN, "age": 30}, BEN], 1)},
        {("entity", "Customer"): _customers([ANN], 2), ("relation", "Knows"): _friends(2)},
    ]
    parent: str | None = None
    for commit_id, tables in enumerate(commits, start=1):
        folder = f"commits/{commit_id}-a1b2c3d{commit_id}"
        files = []
        for (kind, name), table in tables.items():
            path = f"{folder}/{layout.FOLDERS[kind]}/{name}.parquet"
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, root / path)
            files.append(
                {
                    "kind": kind,
                    "type_name": name,
                    "path": path,
                    "row_count": table.num_rows,
                    "schema_version_id": 1,
                    "content_sha256": hashlib.sha256((root / path).read_bytes()).hexdigest(),
                }
            )
        manifest: dict[str, Any] = {
            "commit_id": commit_id,
            "parent_commit_id": commit_id - 1 or None,
            "parent_manifest_path": parent,
            "created_at": MOMENT,
            "runtime_id": "writer-a",
            "metadata": {},
            "files": files,
        }
        parent = f"{folder}/manifest.json"
        (root / parent).write_text(json.dumps(manifest))
    head = {
        "commit_id": 2,
        "manifest_path": parent,
        "updated_at": MOMENT,
        "runtime_id": "writer-a",
    }
    names = {"entities": ["Customer"], "relations": ["Knows"], "updated_at": MOMENT}
    documents: dict[str, Any] = {layout.HEAD: head, layout.TYPES: names}
    if request.param != "columns":
        documents[layout.REGISTRY] = {
            spec.kind: {spec.name: {"schema_version_id": 1, "schema": spec.schema_dict()}}
            for spec in (spec_of(Customer), spec_of(Knows))
        }
    if request.param == "unknown words":
        documents[layout.REGISTRY] = {"entity": {"Customer": {"schema": {"fields": "id, age"}}}}
        documents[layout.schema_versions("entity", "Customer")] = {"versions": 7}
    for key, document in documents.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_text(json.dumps(document))
    return root


def test_a_class_reads_what_the_payloads_say(store: Path) -> None:
    with Session(str(store)) as session:
        ann, ben = session.query().entities(Customer).collect()
        assert (ann.age, ann.tags, ann.extra) == (31, ["x", "y"], "plain")
        assert ann.seen == datetime.fromisoformat(MOMENT)
        assert (ben.age, ben.tags, ben.extra) == (None, [], {"k": [1]})
        tagged = session.query().entities(Customer).where(Customer.tags.contains("y"))
        assert [customer.id for customer in tagged.collect()] == ["a"]
        assert session.query().entities(Customer).where(Customer.seen >= SEEN).count() == 1
        old = session.query().entities(Customer).as_of(1).where(Customer.id == "a").first()
        assert old is not None
        assert old.age == 30
        path = session.query().entities(Customer).via(Knows).collect()[0]
        assert (path.source.id, path.target.id) == ("a", "b")


def test_what_is_written_after_goes_with_it(store: Path) -> None:
    with Session(str(store)) as session:
        session.ensure(Customer(**{**BEN, "age": 5}))
        session.ensure(Customer(**{**ANN, "seen": datetime.fromisoformat(MOMENT)}))  # as it is
        session.commit()
        assert session.last_commit is not None
        rows = session.sql("select id, age, tags from Customer order by id").collect()
    assert [(row["id"], row["age"]) for row in rows] == [("a", 31), ("b", 5)]
    assert rows[0]["tags"] == '["x","y"]'


def test_types_are_seen_without_classes(store: Path) -> None:
    with Session(str(store)) as session:
        assert session.sql("show tables").collect() == [{"name": "Customer"}, {"name": "Knows"}]
        rows = session.sql(
            "select c.id, c.age, k.since from Customer c left join Knows k on k.left_key = c.id "
            "order by 1"
        )
        assert rows.collect() == [
            {"id": "a", "age": 31, "since": 7},
            {"id": "b", "age": None, "since": None},
        ]
        tags = session.sql("select json_extract_string(tags, '$[1]') t from Customer order by id")
        assert tags.collect() == [{"t": "y"}, {"t": None}]
    done = onto("query", "entities", "Customer", "--storage-uri", str(store), "--json")
    assert [row["age"] for row in done.json["rows"]] == [31, None]
    assert done.json["rows"][0]["tags"] == ["x", "y"]
    old = onto(
        "query",
        "entities",
        "Customer",
        "--as-of",
        "1",
        "--filter",
        "id",
        "==",
        '"a"',
        "--storage-uri",
        str(store),
        "--json",
    )
    assert [row["age"] for row in old.json["rows"]] == [30]


def test_types_of_another_session_are_seen_at_once(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/onto.db"
    with Session(uri) as reader, Session(uri) as writer:
        assert reader.sql("show tables").collect() == []
        writer.ensure(Customer(id="a"))
        writer.commit()
        assert reader.sql("select id from Customer").collect() == [{"id": "a"}]


@pytest.mark.parametrize("schema", [{}, {"kind": "entity"}, [], None, {"fields": [{}]}])
def test_a_recorded_schema_that_says_nothing_is_named(tmp_path: Path, schema: Any) -> None:
    """Where no hash is kept beside a manifest's name, as before format 2, nobody has noticed."""
    root = tmp_path / "store"
    initialize_storage(f"file://{root}")
    with Session(f"file://{root}") as session:
        session.ensure(Customer(id="a"))
        session.commit()
    head = json.loads((root / layout.HEAD).read_text())
    path = root / head["manifest_path"]
    manifest = json.loads(path.read_text())
    manifest["schema"]["registered"][0]["schema"] = schema
    manifest["type_heads"]["entities"]["Customer"]["schema_sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    del head["commit_sha256"]
    (root / layout.HEAD).write_text(json.dumps(head))
    with Session(f"file://{root}") as session:
        for use in (
            lambda: session.sql("select * from Customer").collect(),
            lambda: session.query().entities(Customer).collect(),
            lambda: restore(session.repository, 1),
        ):
            with pytest.raises(IntegrityError, match=r"Customer|manifest"):
                use()


@pytest.mark.parametrize("store", ["registry"], indirect=True)
def test_it_is_migrated_and_its_past_stays_readable(store: Path) -> None:
    """The log never recorded what its rows were: the migration does."""

    class Later(Entity, name="Customer"):
        id: Field[str] = Field(primary_key=True)
        age: Field[float | None] = Field(default=None)
        tags: Field[list[str]] = Field(default_factory=list)
        extra: Field[Any] = Field(default=None)
        seen: Field[datetime | None] = Field(default=None)
        tier: Field[str] = Field(default="basic")

    with Session(str(store), entity_types=[Later]) as session:
        preview = session.migrate()
        assert preview.possible, preview
        session.migrate(dry_run=False, token=preview.token)
        ann, ben = session.query().entities(Later).collect()
        assert (ann.age, ann.tags, ann.tier, ben.extra) == (31.0, ["x", "y"], "basic", {"k": [1]})
        past = session.query().entities(Later).with_history().collect()
        assert [(later.meta().commit_id, later.id, later.age) for later in past] == [
            (1, "a", 30.0),
            (1, "b", None),
            (2, "a", 31.0),
            (3, "a", 31.0),
            (3, "b", None),
        ]
        raw = session.query().raw("Customer", schema_version=1).collect()
        assert [(r["id"], r["age"]) for r in raw] == [("a", 31), ("b", None)]
