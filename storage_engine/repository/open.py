"""From a storage URI to the engine that wrote it. Opening never writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from storage_engine.config import OntologiaConfig
from storage_engine.errors import UninitializedStorageError
from storage_engine.objectstore.open import open_store
from storage_engine.repository.protocol import Repository
from storage_engine.repository.target import Target, target_of

if TYPE_CHECKING:
    from storage_engine.objectstore.port import ObjectStore

LATEST_ENGINE = "v2"


def open_repository(
    storage: str | Path | Target | None, config: OntologiaConfig | None = None
) -> Repository:
    """Open a storage with the engine version it was made with.

    A SQLite storage is created by its first commit; an object storage must be initialised.
    """
    target = storage if isinstance(storage, Target) else target_of(storage)
    config = config or OntologiaConfig()
    if target.sqlite_path is not None:
        return _open_sqlite(target.uri, target.sqlite_path, config)
    store = open_store(target.uri, config)
    try:
        return open_object_repository(store, config)
    except BaseException:
        store.close()
        raise


def open_object_repository(store: ObjectStore, config: OntologiaConfig) -> Repository:
    """Dispatch on `meta/engine.json`; a storage without it, but with a head, is v1."""
    from storage_engine.commitlog import layout
    from storage_engine.objectstore.port import ObjectNotFound
    from storage_engine.repository.object.engine import S3RepositoryV1, S3RepositoryV2
    from storage_engine.repository.object.stamp import read_stamp

    def is_initialised() -> bool:
        try:
            store.get(layout.HEAD)
        except ObjectNotFound:
            return False
        return True

    stamp, initialised = store.parallel.both(lambda: read_stamp(store), is_initialised)
    if not initialised:
        raise UninitializedStorageError(store.uri)
    engine = S3RepositoryV1 if stamp.engine_version == "v1" else S3RepositoryV2
    return engine(store, config, stamp)


def _open_sqlite(uri: str, path: str, config: OntologiaConfig) -> Repository:
    from storage_engine.repository import sqlite

    detected = sqlite.detect(path, config)
    version = detected[0] if detected is not None else LATEST_ENGINE
    return sqlite.ENGINES[version](path, config, uri=uri)
