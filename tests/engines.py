"""Every storage engine behind one fixture: `storage` is an empty one, made for the test.

Also the types and rows that the tests of repositories share. A conftest imports the fixture and
calls `parametrize_storage`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from storage_engine.config import OntologiaConfig
from storage_engine.model import Entity, Field, Relation, TypeSpec, row_schema, spec_of
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.repository import (
    CommitRequest,
    CommitResult,
    Repository,
    TypeInput,
    initialize_storage,
    open_repository,
)


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    age: Field[int | None] = Field(default=None)


class Product(Entity):
    sku: Field[str] = Field(primary_key=True)
    price: Field[float]


class Subscription(Relation[Customer, Product]):
    """Unkeyed: at most one per pair."""

    seats: Field[int]


class Employment(Relation[Customer, Product]):
    """Keyed: several per pair."""

    stint: Field[str] = Field(instance_key=True)
    role: Field[str]


class Knows(Relation[Customer, Customer]):
    """No fields: the identity is the whole statement."""


class Everything(Entity):
    """One field of every storage class of RFC 0009, 5.1."""

    id: Field[str] = Field(primary_key=True)
    text: Field[str]
    number: Field[int]
    real: Field[float]
    flag: Field[bool]
    moment: Field[datetime]
    day: Field[date]
    raw: Field[bytes]
    maybe: Field[str | None] = Field(default=None)
    maybe_number: Field[int | None] = Field(default=None)
    tags: Field[list[str]] = Field(default_factory=list)
    counts: Field[dict[str, int]] = Field(default_factory=dict)
    mixed: Field[str | int] = Field(default=0)
    anything: Field[Any] = Field(default=None)


CUSTOMER = spec_of(Customer)
PRODUCT = spec_of(Product)
SUBSCRIPTION = spec_of(Subscription)
EMPLOYMENT = spec_of(Employment)
KNOWS = spec_of(Knows)
EVERYTHING = spec_of(Everything)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Storage:
    """An initialised, empty storage of one engine."""

    uri: str
    backend: str  # "sqlite", "directory" or "s3", as in `storage_info`
    engine_version: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, **settings: Any) -> OntologiaConfig:
        return OntologiaConfig(**{**self.settings, **settings})

    def open(self, **settings: Any) -> Repository:
        return open_repository(self.uri, self.config(**settings))

    def objects(self) -> ObjectStore:
        """The object store underneath, for looking at what was written."""
        assert self.backend != "sqlite"
        return open_store(self.uri, self.config())

    def document(self, key: str) -> dict[str, Any]:
        """A stored JSON object."""
        store = self.objects()
        try:
            return dict(json.loads(store.get(key).data))
        finally:
            store.close()

    @property
    def path(self) -> Path:
        """The file of a SQLite storage."""
        assert self.backend == "sqlite"
        return Path(self.uri.removeprefix("sqlite:///"))


LOCAL = ("sqlite-v1", "sqlite-v2", "directory-v1", "directory-v2")
ON_SERVERS = ("seaweedfs-v2", "moto-v2")
_buckets: dict[str, str] = {}  # by endpoint

Test = TypeVar("Test", bound=Callable[..., None])


def on_servers(test: Test) -> Test:
    """Run a test that takes `storage` on S3 servers too; the others run on this machine alone."""
    test.on_servers = True  # type: ignore[attr-defined]
    return test


def parametrize_storage(metafunc: pytest.Metafunc) -> None:
    """Call it from `pytest_generate_tests` where the fixture `storage` is imported."""
    if "storage" not in metafunc.fixturenames:
        return
    servers = ON_SERVERS if hasattr(metafunc.function, "on_servers") else ()
    marked = [pytest.param(name, marks=pytest.mark.s3) for name in servers]
    metafunc.parametrize("storage", [*LOCAL, *marked], indirect=True)


@pytest.fixture
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty storage of each engine in turn."""
    made = new_storage(str(request.param), request, tmp_path)
    initialize_storage(made.uri, made.engine_version, made.config())
    return made


def new_storage(name: str, request: pytest.FixtureRequest, folder: Path) -> Storage:
    """A place for a storage of the engine `name`; nothing is written there yet."""
    kind, _, version = name.partition("-")
    if kind == "sqlite":
        return Storage(f"sqlite:///{folder / 'onto.db'}", "sqlite", version)
    if kind == "directory":
        return Storage((folder / "onto").as_uri(), "directory", version)
    server = request.getfixturevalue(f"{kind}_s3")
    config = server.config()
    settings = {"s3_endpoint_url": config.s3_endpoint_url, "s3_region": config.s3_region}
    # One bucket for all: SeaweedFS sets volumes aside for each, and has only so many.
    if server.endpoint not in _buckets:
        _buckets[server.endpoint] = server.make_bucket()
    uri = f"s3://{_buckets[server.endpoint]}/{uuid.uuid4().hex[:8]}"
    return Storage(uri, "s3", version, settings)


# -- rows -----------------------------------------------------------------------------------------


def customer(key: str, name: str = "Ann", age: int | None = 1) -> dict[str, Any]:
    return {"entity_key": key, "id": key, "name": name, "age": age}


def product(key: str, price: float = 1.0) -> dict[str, Any]:
    return {"entity_key": key, "sku": key, "price": price}


def edge(left: str, right: str, instance: str = "", **values: Any) -> dict[str, Any]:
    return {"left_key": left, "right_key": right, "instance_key": instance, **values}


def table_of(spec: TypeSpec, rows: Iterable[Row]) -> pa.Table:
    return pa.Table.from_pylist([dict(row) for row in rows], schema=row_schema(spec))


def keys_of(spec: TypeSpec, *keys: Any) -> pa.Table:
    """Identities for a read by keys; a relation's are tuples."""
    tuples = [key if isinstance(key, tuple) else (key,) for key in keys]
    columns = [[t[n] for t in tuples] for n in range(len(spec.identity))]
    return pa.table([pa.array(c, pa.string()) for c in columns], names=list(spec.identity))


def rows_of(spec: TypeSpec, *rows: Row) -> TypeInput:
    return TypeInput(spec, table=table_of(spec, rows))


def stream_of(spec: TypeSpec, *batches: Iterable[Row]) -> TypeInput:
    """A bulk input of one Arrow batch per argument."""

    def batches_of() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from table_of(spec, batch).to_batches()

    return TypeInput(spec, stream=batches_of())


def commit(repository: Repository, *inputs: TypeInput, **request: Any) -> CommitResult | None:
    return repository.commit(CommitRequest(inputs, **request))


def put(repository: Repository, *customers: Row, **request: Any) -> CommitResult:
    """Commit customers that change something."""
    result = commit(repository, rows_of(CUSTOMER, *customers), **request)
    assert result is not None, "nothing changed"
    return result
