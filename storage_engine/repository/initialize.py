"""Creating a storage, and erasing one on purpose: `onto init` and `initialize_storage()`.

Erasing needs a token that a dry run prints. The token names the state that was looked at, so a
storage that has moved on since is not erased.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    AlreadyInitializedError,
    ConfigurationError,
    MigrationTokenError,
)
from storage_engine.objectstore.open import open_store
from storage_engine.repository.open import LATEST_ENGINE, Location, target_of

if TYPE_CHECKING:
    from storage_engine.objectstore.protocol import ObjectStore

ENGINE_VERSIONS = ("v1", "v2")


@dataclass(frozen=True, slots=True)
class InitPlan:
    """What initialising writes (and, by force, erases); `applied` when it has been done."""

    uri: str
    backend: str
    engine_version: str
    objects: tuple[str, ...]
    applied: bool
    erases: Mapping[str, Any] | None = None
    token: str | None = None


def initialize_storage(
    uri: str | Path | Location,
    engine_version: str = LATEST_ENGINE,
    config: OntologiaConfig | None = None,
    *,
    dry_run: bool = False,
    force: bool = False,
    token: str | None = None,
) -> InitPlan:
    """Make an empty storage. `force` with the token of a dry run erases what is there."""
    if engine_version not in ENGINE_VERSIONS:
        raise ConfigurationError(
            f"unknown engine version {engine_version!r}: choose one of {', '.join(ENGINE_VERSIONS)}"
        )
    if token is not None and not force:
        raise ConfigurationError("a token goes with --force")
    target = uri if isinstance(uri, Location) else target_of(uri)
    config = config or OntologiaConfig()
    options = _Options(engine_version, config, dry_run, force, token)
    if target.sqlite_path is not None:
        return _init_sqlite(target, target.sqlite_path, options)
    store = open_store(target.uri, config)
    try:
        return _init_objects(store, options)
    finally:
        store.close()


@dataclass(frozen=True, slots=True)
class _Options:
    engine_version: str
    config: OntologiaConfig
    dry_run: bool
    force: bool
    token: str | None

    def confirm(self, uri: str, existing: Mapping[str, Any]) -> str:
        """The token for erasing `existing`; refuses unless this is a dry run or carries it."""
        if not self.force:
            raise AlreadyInitializedError(uri, existing["head_commit_id"])
        state = json.dumps({"uri": uri, **existing}, sort_keys=True, default=str)
        needed = hashlib.sha256(state.encode()).hexdigest()[:16]
        if not self.dry_run and self.token != needed:
            problem = (
                "needs a token" if self.token is None else "was given a token that no longer fits"
            )
            raise MigrationTokenError(
                f"erasing {uri} (head at commit {existing['head_commit_id']}) {problem}: run "
                "`onto init --force --dry-run` and pass the token that it prints with --token"
            )
        return needed


def _init_sqlite(target: Location, path: str, options: _Options) -> InitPlan:
    from storage_engine.repository import sqlite

    detected = sqlite.detect(path, options.config)
    erases, token = None, None
    if detected is not None:
        erases = sqlite.describe(path, options.config)
        token = options.confirm(target.uri, erases)
    if not options.dry_run:
        if erases is not None:
            sqlite.erase(path, options.config, expect=erases)
        sqlite.create(path, options.engine_version, options.config)
    return InitPlan(
        target.uri,
        "sqlite",
        options.engine_version,
        (path,),
        applied=not options.dry_run,
        erases=erases,
        token=token,
    )


def _init_objects(store: ObjectStore, options: _Options) -> InitPlan:
    from storage_engine.commitlog import layout
    from storage_engine.commitlog.records import Head
    from storage_engine.objectstore.probe import probe_conditional_writes
    from storage_engine.repository.object import admin

    leftovers = admin.look(store)
    erases, token = None, None
    if (stored := leftovers.head) is not None:
        head = Head.parse(stored.data, key=layout.HEAD)
        state = {"head_commit_id": head.commit_id, "head_etag": stored.etag}
        token = options.confirm(store.uri, state)
        sizes = [info.size for info in store.list("")]
        erases = {**state, "objects": len(sizes), "bytes": sum(sizes)}
    if not options.dry_run:
        probe_conditional_writes(store, layout.probe())
        if stored is not None:
            admin.erase(store, options.engine_version, options.config, head_etag=stored.etag)
        else:
            admin.create(store, options.engine_version, leftovers)
    return InitPlan(
        store.uri,
        "s3",
        options.engine_version,
        (layout.ENGINE, layout.TYPES, layout.HEAD),
        applied=not options.dry_run,
        erases=erases,
        token=token,
    )
