"""Types, storages and helpers for the tests of sessions, on every engine."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from storage_engine import Entity, Event, Field, initialize_storage, open_repository
from storage_engine.model import spec_of, table_to_objects
from storage_engine.repository.protocol import ReadWindow
from tests.shop import Customer

ENGINES = ("sqlite-v1", "sqlite-v2", "object-v1", "object-v2")


class Address(TypedDict):
    city: str
    since: NotRequired[date]
    former: NotRequired[list[Address]]


class Everything(Entity):
    id: Field[str] = Field(primary_key=True)
    text: Field[str]
    number: Field[int]
    real: Field[float]
    flag: Field[bool]
    moment: Field[datetime]
    day: Field[date]
    raw: Field[bytes]
    maybe_text: Field[str | None] = Field(default=None)
    maybe_number: Field[int | None] = Field(default=None)
    maybe_real: Field[float | None] = Field(default=None)
    maybe_flag: Field[bool | None] = Field(default=None)
    maybe_moment: Field[datetime | None] = Field(default=None)
    maybe_day: Field[date | None] = Field(default=None)
    maybe_raw: Field[bytes | None] = Field(default=None)
    tags: Field[list[str]] = Field(default_factory=list)
    moments: Field[list[datetime]] = Field(default_factory=list)
    weights: Field[dict[str, float]] = Field(default_factory=dict)
    address: Field[Address | None] = Field(default=None)
    either: Field[int | str] = Field(default=0)
    anything: Field[Any] = Field(default=None)


class OrderPlaced(Event):
    order_id: Field[str]


def make_storage(folder: Path, engine: str) -> str:
    """An empty storage of that engine, by its URI."""
    backend, version = engine.split("-")
    uri = f"sqlite:///{folder}/onto.db" if backend == "sqlite" else f"file://{folder}/store"
    initialize_storage(uri, engine_version=version)
    return uri


def read(uri: str, cls: type[Any], window: ReadWindow = ReadWindow()) -> list[Any]:
    """Objects of a class, through a repository of its own."""
    repository = open_repository(uri)
    try:
        return table_to_objects(spec_of(cls), repository.read(spec_of(cls), window))
    finally:
        repository.close()


def names(uri: str) -> dict[str, str]:
    """The names of all customers, by id."""
    return {customer.id: customer.name for customer in read(uri, Customer)}


def head(uri: str) -> int:
    repository = open_repository(uri)
    try:
        return repository.head_commit_id()
    finally:
        repository.close()


def stored_events(uri: str, commit_id: int) -> list[Mapping[str, Any]]:
    """The outbox of a commit, read from what lies on disk."""
    if uri.startswith("sqlite:///"):
        connection = sqlite3.connect(uri.removeprefix("sqlite:///"))
        try:
            sql = "SELECT events FROM commits WHERE id = ?"
            (text,) = connection.execute(sql, (commit_id,)).fetchone()
        finally:
            connection.close()
        return list(json.loads(text))
    root = Path(uri.removeprefix("file://"))
    newest = json.loads((root / "meta/head.json").read_text())
    assert newest["commit_id"] == commit_id
    manifest = json.loads((root / newest["manifest_path"]).read_text())
    return list(manifest["events"])
