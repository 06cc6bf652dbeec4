"""From a storage URI or path to its engine; creating a storage, and erasing one on purpose.

Opening never writes. Erasing needs a token that a dry run prints. The token names the state that
was looked at, so a storage that has moved on since is not erased.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from storage_engine.commitlog.layout import MAIN
from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    AlreadyInitializedError,
    ConfigurationError,
    IntegrityError,
    MigrationTokenError,
    StorageBackendError,
    UninitializedStorageError,
)
from storage_engine.objectstore.local import path_errors
from storage_engine.objectstore.open import expanded, open_store
from storage_engine.repository.protocol import Repository, no_branches

if TYPE_CHECKING:
    from storage_engine.objectstore.protocol import ObjectStore

log = logging.getLogger(__name__)

STORAGE_URI_VARIABLE = "ONTOLOGIA_STORAGE_URI"
DB_VARIABLE = "ONTOLOGIA_DB"
DEFAULT_PATH = "onto.db"
DEFAULT_FOLDER = ".ontologia/store"  # where Dagster makes one: Spark writes to no SQLite file
LATEST_ENGINE = "v2"
MEMORY = ":memory:"
_INIT_TRIES = 50  # of several processes at once, one gets through each time
_SQLITE_SUFFIXES = {".db", ".sqlite", ".sqlite3"}


@dataclass(frozen=True, slots=True)
class Location:
    """`sqlite_path` is set for SQLite; otherwise `uri` names an object store."""

    uri: str
    sqlite_path: str | None = None


def target_of(uri_or_path: str | Path | None) -> Location:
    """`onto.db`, `:memory:`, `sqlite:///path`, `file:///path`, a directory, `s3://bucket/prefix`.

    A plain path is a SQLite file when it is one, or ends like one; otherwise a directory. None is
    the default storage.
    """
    if uri_or_path is None:
        return default_storage()
    text = str(uri_or_path)
    if text == MEMORY:
        return Location("sqlite:///:memory:", MEMORY)
    if text.lower().startswith("sqlite:"):
        return _sqlite(text)
    if "://" in text:
        return Location(text)
    path = expanded(text)
    with path_errors(path, "open"):
        is_file, is_folder = path.is_file(), path.is_dir()
    if is_file or (not is_folder and path.suffix.lower() in _SQLITE_SUFFIXES):
        return Location(f"sqlite:///{path}", str(path))
    return Location(text)


def default_storage(environ: Mapping[str, str] = os.environ) -> Location:
    """Where nobody names a storage: what the environment names, or what this folder has."""
    stated = stated_storage(environ)
    if stated is not None:
        return stated
    has_file, has_folder = Path(DEFAULT_PATH).exists(), Path(DEFAULT_FOLDER).is_dir()
    if has_file and has_folder:
        _tell_of_two(Path.cwd())
    return target_of(DEFAULT_FOLDER if has_folder and not has_file else DEFAULT_PATH)


@functools.cache  # once a process
def _tell_of_two(folder: Path) -> None:
    log.warning(
        "%s has two storages, %s and %s, and the first was taken; name the one that you mean "
        "(--storage-uri, %s, Session(...)), or move the other away",
        folder,
        DEFAULT_PATH,
        DEFAULT_FOLDER,
        STORAGE_URI_VARIABLE,
    )


def stated_storage(environ: Mapping[str, str]) -> Location | None:
    """What the environment names, by the rule of `bind`; None where it names nothing."""
    db, uri = environ.get(DB_VARIABLE) or None, environ.get(STORAGE_URI_VARIABLE) or None
    for name, value in ((DB_VARIABLE, db), (STORAGE_URI_VARIABLE, uri)):
        if value is not None and not value.strip():
            raise ConfigurationError(f"{name} is empty: name a storage or unset it")
    return bind(db, uri) if db or uri else None


def bind(db_path: str | Path | None, storage_uri: str | None) -> Location:
    """RFC 0004 1.1: `db_path` means SQLite; both are allowed only if they mean the same file."""
    if db_path is None:
        return target_of(storage_uri)
    stated = _sqlite_file(db_path)
    if storage_uri is None:
        return stated
    target = target_of(storage_uri)
    if target.sqlite_path is None or not _same_file(stated.sqlite_path, target.sqlite_path):
        raise ConfigurationError(
            f"db path {str(db_path)!r} and storage URI {storage_uri!r} name different storages; "
            "give one"
        )
    return target


def _sqlite_file(db_path: str | Path) -> Location:
    """A SQLite file, whatever it is called (RFC 0004 7)."""
    text = str(db_path)
    if text.lower().startswith("sqlite:") or text == MEMORY:
        return target_of(text)
    if "://" in text:
        raise ConfigurationError(
            f"db path {text!r} is no SQLite file: give other storages as storage URI "
            "(`--storage-uri`, `Ontology(storage_uri=...)`)"
        )
    path = Path(text).expanduser()
    return Location(f"sqlite:///{path}", str(path))


def _sqlite(uri: str) -> Location:
    rest = uri[len("sqlite:") :]
    if not rest.startswith("///"):
        raise ConfigurationError(
            f"storage URI {uri!r} must have three slashes: sqlite:///relative/path.db, "
            "or four for an absolute path: sqlite:////data/onto.db"
        )
    path = unquote(rest[len("///") :])
    if "\x00" in path:
        raise ConfigurationError(f"storage URI {uri!r} has a NUL character in its path")
    if not path:
        raise ConfigurationError(f"storage URI {uri!r} names no file")
    return Location(uri, path)


def _same_file(a: str | None, b: str) -> bool:
    if a is None:
        return False
    if MEMORY in (a, b):
        return a == b
    return expanded(a).resolve() == expanded(b).resolve()


def open_repository(
    storage: str | Path | Location | None,
    config: OntologiaConfig | None = None,
    *,
    branch: str | None = None,
) -> Repository:
    """Open a storage with the engine version it was made with, on main or on another branch.

    A SQLite storage is created by its first commit; an object storage must be initialised.
    """
    target = storage if isinstance(storage, Location) else target_of(storage)
    config = config or OntologiaConfig()
    if target.sqlite_path is not None:
        opened = _open_sqlite(target.uri, target.sqlite_path, config)
        if branch not in (None, MAIN):
            opened.close()
            raise no_branches(opened)
        return opened
    store = open_store(target.uri, config)
    try:
        return open_object_repository(store, config, branch=branch)
    except BaseException:
        store.close()
        raise


def open_object_repository(
    store: ObjectStore, config: OntologiaConfig, *, branch: str | None = None
) -> Repository:
    """Dispatch on what head and `meta/engine.json` say; a head without a stamp that no program of
    ours has made is v1."""
    from storage_engine.commitlog import branches, layout
    from storage_engine.commitlog.records import Head
    from storage_engine.objectstore.protocol import ObjectNotFound
    from storage_engine.repository.object.engine import S3RepositoryV1, S3RepositoryV2
    from storage_engine.repository.object.stamp import Stamp, read_stamp, stamp_for

    def read_head() -> bytes | None:
        try:
            return store.get(layout.HEAD).data
        except ObjectNotFound:
            return None

    stamp, data = store.parallel.both(lambda: read_stamp(store), read_head)
    if data is None:
        raise UninitializedStorageError(store.uri)
    head: Head | None = None
    try:
        head = Head.parse(data, key=layout.HEAD)
    except IntegrityError:  # said by whoever reads it; verification wants to open all the same
        stamp, log_id = stamp or Stamp("v1", 0), None
    else:
        stamp, log_id = stamp_for(store, stamp, head), head.log_id
    engine = S3RepositoryV1 if stamp.engine_version == "v1" else S3RepositoryV2
    if branch in (None, MAIN):
        return engine(store, config, stamp, log_id, head)
    if engine is S3RepositoryV1:
        raise no_branches(engine(store, config, stamp, log_id))
    version = branches.require_branch(store, branch, log_id=log_id or "")
    return engine(store, config, stamp, log_id, version.head, version.head)


def _open_sqlite(uri: str, path: str, config: OntologiaConfig) -> Repository:
    from storage_engine.repository import sqlite

    detected = sqlite.detect(path, config)
    version = detected[0] if detected is not None else LATEST_ENGINE
    return sqlite.ENGINES[version](path, config, uri=uri)


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
    exist_ok: bool = False,
) -> InitPlan:
    """Make an empty storage. `force` with the token of a dry run erases what is there; with
    `exist_ok` a storage that is there stays as it is (`applied` is False then)."""
    if engine_version not in ENGINE_VERSIONS:
        raise ConfigurationError(
            f"unknown engine version {engine_version!r}: choose one of {', '.join(ENGINE_VERSIONS)}"
        )
    if token is not None and not force:
        raise ConfigurationError("a token goes with --force")
    if exist_ok and force:
        raise ConfigurationError("exist_ok keeps what is there and force erases it: choose one")
    target = uri if isinstance(uri, Location) else target_of(uri)
    config = config or OntologiaConfig()
    options = _Options(engine_version, config, dry_run, force, token)
    if not exist_ok:
        return _initialize(target, options)
    for remaining in reversed(range(_INIT_TRIES)):
        try:
            return _initialize(target, options)
        except AlreadyInitializedError:
            return _existing(target, config)
        except StorageBackendError as error:
            # Somebody else is at it: who comes back finds it made, or makes it.
            if not (remaining and error.retryable and error.operation == "init"):
                raise
        time.sleep(random.uniform(0.01, 0.5))
    raise AssertionError("the last try returns or raises")


def _initialize(target: Location, options: _Options) -> InitPlan:
    if target.sqlite_path is not None:
        return _init_sqlite(target, target.sqlite_path, options)
    store = open_store(target.uri, options.config)
    try:
        return _init_objects(store, options)
    finally:
        store.close()


def _existing(target: Location, config: OntologiaConfig) -> InitPlan:
    """Of a storage that is there and can be opened; what is wrong with it is raised."""
    opened = open_repository(target, config)
    try:
        return InitPlan(opened.uri, opened.backend, opened.engine_version, (), applied=False)
    finally:
        opened.close()


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
            head = existing["head_commit_id"]
            where = "head cannot be read" if head is None else f"head at commit {head}"
            raise MigrationTokenError(
                f"erasing {uri} ({where}) {problem}: run "
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
    from storage_engine.objectstore.open import probe_conditional_writes
    from storage_engine.repository.object import admin

    leftovers = admin.look(store)
    erases, token = None, None
    if (stored := leftovers.head) is not None:
        state: dict[str, Any] = {"head_commit_id": None, "head_etag": stored.etag}
        try:
            state["head_commit_id"] = Head.parse(stored.data, key=layout.HEAD).commit_id
        except IntegrityError:  # to erase it needs none that can be read
            if not options.force:
                raise
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
        store.kind,
        options.engine_version,
        (layout.ENGINE, layout.TYPES, layout.HEAD),
        applied=not options.dry_run,
        erases=erases,
        token=token,
    )
