"""One simulated storage with several writers on it, and hooks to make them meet.

Time is virtual: it moves when somebody waits, or when a test says so (`World.pass_lease`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any
from unittest import mock

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import Head, Manifest, sha256
from storage_engine.config import OntologiaConfig
from storage_engine.maintenance.compaction.background import keep_compact
from storage_engine.maintenance.compaction.plan import TierPolicy
from storage_engine.model import TypeSpec
from storage_engine.objectstore.memory import MemoryBackend, MemoryStore
from storage_engine.objectstore.open import memory_backend
from storage_engine.repository import CommitResult, ReadWindow, TypeInput, initialize_storage
from storage_engine.repository.duck import Duck
from storage_engine.repository.object import engine
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.open import open_object_repository
from storage_engine.testing.faults import Fault, FaultKind, FaultPlan, FaultRule, plan_of
from tests.engines import CUSTOMER, Row, commit, rows_of

LEASE_TTL_MS = 30_000
HISTORY = ReadWindow(history=True)


@cache
def shared_duck() -> Duck:
    """One for all: opening DuckDB costs more than the rest of a simulated process's life, and what
    it is used for leaves nothing behind in it. One thread: a few rows are not worth waking more,
    which takes a third of the time."""
    duck = Duck(uri="memory://", memory_limit="256MB")
    with duck.cursor() as cursor:
        cursor.execute("SET GLOBAL threads = 1")
    return duck


@dataclass
class Writer:
    """A process: one client of the store and one repository opened on it."""

    store: MemoryStore
    repo: ObjectRepository

    def commit(self, *inputs: TypeInput, **request: Any) -> CommitResult | None:
        return commit(self.repo, *inputs, **request)

    def put(self, *customers: Row, **request: Any) -> CommitResult:
        """Commit customers that change something."""
        result = self.commit(rows_of(CUSTOMER, *customers), **request)
        assert result is not None, "nothing changed"
        return result

    def rows(
        self, spec: TypeSpec = CUSTOMER, window: ReadWindow | None = None
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.repo.read(spec, window or ReadWindow()).to_pylist()
        return found

    def ages(self) -> dict[str, int]:
        """Customers as key -> age: enough to tell versions apart."""
        return {row["entity_key"]: row["age"] for row in self.rows()}

    def history(self) -> list[tuple[int, str, int]]:
        """(commit, key, age) of every stored version."""
        return [(r["commit_id"], r["entity_key"], r["age"]) for r in self.rows(window=HISTORY)]

    def warning(self) -> str | None:
        warning: str | None = self.repo.storage_info()["last_index_warning"]
        return warning

    def fail(self, kind: FaultKind, request: str, key: str, **fault: Any) -> None:
        """Let requests to `key` fail from now on; `times` and `nth` as in FaultRule."""
        rule = {name: fault.pop(name) for name in ("times", "nth") if name in fault}
        plan_of(self.store).rules.append(FaultRule(Fault(kind, **fault), request, key, **rule))

    def heal(self) -> None:
        plan_of(self.store).rules.clear()

    def close(self) -> None:
        if not self.store.crashed:
            self.repo.flush()
        self.store.close()


@dataclass
class World:
    """One storage and everything that happens to it."""

    backend: MemoryBackend
    engine_version: str
    writers: list[Writer] = field(default_factory=list)

    def open(
        self,
        name: str = "",
        *,
        skew: float = 0.0,
        faults: FaultPlan | None = None,
        merges: TierPolicy | None = None,
        branch: str | None = None,
        **settings: Any,
    ) -> Writer:
        """`merges`: it keeps the storage compact, as a session does; only then does it."""
        store = self.backend.client(name, skew=skew, faults=faults)
        config = OntologiaConfig(
            **{"runtime_id": name or "writer", "s3_lease_ttl_ms": LEASE_TTL_MS, **settings}
        )
        with mock.patch.object(engine, "Duck", return_value=shared_duck()):
            repo = open_object_repository(store, config, branch=branch)
        assert isinstance(repo, ObjectRepository)
        if merges is not None:
            keep_compact(repo, merges)
        writer = Writer(store, repo)
        self.writers.append(writer)
        return writer

    def pass_lease(self) -> None:
        """Let every lease that is held now run out."""
        self.backend.clock.sleep(LEASE_TTL_MS / 1000 + 1)

    # -- what is stored, seen from outside --------------------------------------------------------

    def stored_keys(self, prefix: str = "") -> list[str]:
        return [key for key in self.backend.objects() if key.startswith(prefix)]

    def document(self, key: str) -> dict[str, Any]:
        return dict(json.loads(self.backend.objects()[key]))

    def head(self) -> Head:
        return Head.parse(self.backend.objects()[layout.HEAD], key=layout.HEAD)

    def chain(self) -> list[Manifest]:
        """The committed manifests, oldest first, by parent links alone."""
        objects = self.backend.objects()
        head = Head.parse(objects[layout.HEAD], key=layout.HEAD)
        path, found = head.manifest_path, []
        while path is not None:
            found.append(Manifest.parse(objects[path], key=path))
            path = found[-1].parent_manifest_path
        found.reverse()
        assert [m.commit_id for m in found] == list(range(1, head.commit_id + 1)), "ids have gaps"
        return found

    def rehash(self) -> None:
        """Make every hash of a manifest fit what is stored now: a test has changed one and means
        what it says, not that it changed."""
        hashes: dict[str, str] = {}
        paths = [m.parent_manifest_path for m in self.chain()[1:]] + [self.head().manifest_path]
        for path in filter(None, paths):
            document = self.document(path)
            document["parent_sha256"] = hashes.get(document["parent_manifest_path"], "")
            for link in document.get("skip", []):
                link["sha256"] = hashes.get(link["path"], "")
            named = [f["previous"] for f in document["files"] if f.get("previous")]
            for folder in (document.get("type_heads") or {}).values():
                named += folder.values()
            for link in named:
                link["manifest_sha256"] = hashes.get(link["manifest_path"], "")
            self.backend.write(path, json.dumps(document).encode())
            hashes[path] = sha256(self.backend.objects()[path])
        head = self.document(layout.HEAD)
        head["commit_sha256"] = hashes.get(head["manifest_path"])
        self.backend.write(layout.HEAD, json.dumps(head).encode())

    def marks(self) -> list[str]:
        """The "mark" that each commit's metadata carries, oldest first."""
        return [m.metadata.get("mark", "") for m in self.chain()]

    def orphans(self) -> list[str]:
        """Data and manifests that no committed manifest names."""
        chain = self.chain()
        head = self.head()
        named = {head.manifest_path} | {m.parent_manifest_path for m in chain}
        named |= {file.path for manifest in chain for file in manifest.files}
        named |= {m.checkpoint.path for m in chain if m.checkpoint is not None}
        kept = ("commits/", "staged/", "meta/checkpoints/", "meta/attempts/")
        return [k for k in self.backend.objects() if k.startswith(kept) and k not in named]

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
        self.writers.clear()


def new_world(engine_version: str = "v2") -> World:
    name = f"world-{uuid.uuid4().hex}"
    initialize_storage(f"memory://{name}", engine_version)
    return World(memory_backend(name), engine_version)


@contextmanager
def made_world(engine_version: str) -> Iterator[World]:
    world = new_world(engine_version)
    try:
        yield world
    finally:
        world.close()


def at(
    store: MemoryStore,
    kind: str,
    key: str,
    action: Callable[[], object],
    *,
    when: str = "before",
    times: int | None = 1,
) -> None:
    """Do `action` at the next `times` (None: all) fitting requests of this client."""
    left = [times]
    busy = [False]

    def hook(seen_kind: str, seen_key: str) -> None:
        if busy[0] or left[0] == 0 or seen_kind != kind or not fnmatchcase(seen_key, key):
            return
        if left[0] is not None:
            left[0] -= 1
        busy[0] = True
        try:
            action()
        finally:
            busy[0] = False

    store.on_request(hook, when=when)
