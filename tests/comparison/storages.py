"""The storages that are compared, and what can happen to them between a commit and a query."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage_engine import Event, Field, OntologiaConfig, Session, initialize_storage
from storage_engine.commitlog.records import Head
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.indices import repair_indices, verify_indices
from storage_engine.model import TypeSpec
from storage_engine.model.arrow import objects_to_table
from storage_engine.model.declarations import spec_of
from storage_engine.objectstore.memory import VirtualClock
from storage_engine.objectstore.open import memory_backend, open_store
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.runtime.reads import View

# Each layout has both engine versions on both kinds of object store in turn: the other half of
# the combinations costs as much time again and shares all code with these.
LAYOUTS = (
    ("sqlite-v1", "sqlite-v2", "directory-v1", "memory-v2"),
    ("sqlite-v1", "sqlite-v2", "memory-v1", "directory-v2"),
)
OBJECT_STORES = tuple(layout[2:] for layout in LAYOUTS)
_INDICES = "meta/indices/"


class Noted(Event):
    """A commit may consist of it alone."""

    text: Field[str]


@dataclass
class Storage:
    """One opened storage, with what a disturbance needs to know of its past."""

    name: str
    uri: str
    config: OntologiaConfig
    session: Session
    views: dict[int, View] = field(default_factory=dict)  # taken when that commit was head
    created_at: list[datetime] = field(default_factory=list)  # of commits 1, 2, ...
    past: list[dict[str, bytes]] = field(default_factory=list)  # indices after each commit
    undo: list[Callable[[], None]] = field(default_factory=list)

    @property
    def is_object_store(self) -> bool:
        return not self.name.startswith("sqlite")

    @property
    def has_activations(self) -> bool:
        return self.name.endswith("v2")

    @cached_property
    def raw(self) -> ObjectStore:
        """The objects, as another client sees them."""
        return open_store(self.uri, self.config)

    def commit(self, stated: Sequence[Stated], *, event: bool, pause: int) -> int | None:
        for undo in reversed(self.undo):
            undo()
        self.undo.clear()
        if self.name.startswith("memory"):
            self._clock.sleep(pause)
        for one in stated:
            if one.bulk:
                self.session.ingest(one.cls, [_source(one.spec, part) for part in one.parts])
            else:
                self.session.ensure(one.things)
        commit_id = self.session.commit(Noted(text="") if event else None)
        self.session.flush()
        if commit_id is not None:
            made = self.session.get_commit(commit_id)
            assert made is not None
            self.created_at.append(datetime.fromisoformat(made["created_at"]))
            self.views[commit_id] = self.session.at(commit_id)
            if self.is_object_store:
                self.past.append(self.indices())
        return commit_id

    @property
    def _clock(self) -> VirtualClock:
        clock = memory_backend(self.uri.removeprefix("memory://")).clock
        assert isinstance(clock, VirtualClock)
        return clock

    def indices(self) -> dict[str, bytes]:
        return {info.key: self.raw.get(info.key).data for info in self.raw.list(_INDICES)}

    def reopen(self) -> None:
        """As another process: nothing is known but what is stored. Views go with the session."""
        self.session.close()
        self.session = Session(self.uri, config=self.config)
        self.views = {commit_id: self.session.at(commit_id) for commit_id in self.views}

    def close(self) -> None:
        self.session.close()
        if self.is_object_store:
            self.raw.close()
        if self.name.startswith("memory"):
            backend = memory_backend(self.uri.removeprefix("memory://"))
            backend.remove(list(backend.objects()))
            backend.log.clear()


@dataclass(frozen=True)
class Stated:
    """Objects of one type that a commit states; `bulk`: ingested, in up to three parts."""

    cls: Any
    things: tuple[Any, ...]
    bulk: bool = False

    @property
    def parts(self) -> list[Sequence[Any]]:
        size = -(-len(self.things) // 3)
        return [self.things[n : n + size] for n in range(0, len(self.things), size)]

    @property
    def spec(self) -> TypeSpec:
        return spec_of(self.cls)


def _source(spec: TypeSpec, things: Sequence[Any]) -> pa.Table:
    """Objects as a table that `ingest` takes."""
    table = objects_to_table(spec, things)
    if spec.kind == "entity":
        table = table.drop_columns(["entity_key"])
    elif spec.instance_key is None:
        table = table.drop_columns(["instance_key"])
    else:
        names = [spec.instance_key if n == "instance_key" else n for n in table.column_names]
        table = table.rename_columns(names)
    for one in spec.fields:
        if one.storage == "json":  # said to be JSON, or a text could be meant as itself
            place = table.column_names.index(one.name)
            texts = table.column(one.name).combine_chunks()
            typed = pa.ExtensionArray.from_storage(pa.json_(pa.string()), texts)
            table = table.set_column(place, one.name, typed)
    return table


@contextmanager
def opened(
    layout: Sequence[str], *, checkpoint_interval: int, cached: bool
) -> Iterator[list[Storage]]:
    """`cached`: the store that is not on disk has a cache there."""
    folder = Path(tempfile.mkdtemp(prefix="ontologia-comparison-"))
    # A part a batch, below the least size that users may ask for: staged commits of many files.
    config = OntologiaConfig(
        checkpoint_interval=checkpoint_interval, cache_dir=folder / "cache" if cached else None
    ).model_copy(update={"target_part_bytes": 1})
    storages: list[Storage] = []
    try:
        for name in layout:
            kind, version = name.split("-")
            uri = {
                "sqlite": f"sqlite:///{folder}/{name}.db",
                "directory": f"file://{folder}/{name}",
                "memory": f"memory://comparison-{version}",
            }[kind]
            initialize_storage(uri, version, config)
            storages.append(Storage(name, uri, config, Session(uri, config=config)))
        yield storages
    finally:
        for storage in storages:
            storage.close()
        shutil.rmtree(folder)


# --- disturbances -------------------------------------------------------------------------------

# What may happen after a commit without changing any answer. Each gets a storage and a number to
# choose by.
Disturbance = Callable[[Storage, int], None]


def reopen(storage: Storage, _: int) -> None:
    storage.reopen()


def delete_indices(storage: Storage, choice: int) -> None:
    if storage.is_object_store:
        storage.raw.delete_many(_some(storage, choice))


def lag(storage: Storage, choice: int) -> None:
    """Indices as they were after an earlier commit."""
    if storage.is_object_store and storage.past:
        earlier = storage.past[choice % len(storage.past)]
        for key in _some(storage, choice):
            if key in earlier:
                storage.raw.put(key, earlier[key])
            else:
                storage.raw.delete_many([key])


def garble(storage: Storage, choice: int) -> None:
    """Indices that cannot be read."""
    if storage.is_object_store:
        for key in _some(storage, choice):
            storage.raw.put(key, [b"{", b"[]", b'{"type_name": "x"}'][choice % 3])


def wrong_head_path(storage: Storage, choice: int) -> None:
    """Indices that name another attempt's file for the head commit. Put right before the next
    commit: later on nobody compares the path with a manifest, unless that commit touches the type
    (tests/index/test_repair.py)."""
    if not storage.is_object_store:
        return
    head = _head(storage)
    for key in _some(storage, choice):
        document = _document(storage.raw.get(key).data)
        found = [e for e in document.get("entries", ()) if e["max_commit_id"] == head]
        for entry in found:
            for file in entry.get("files", [entry]):
                file["path"] = f"commits/{head}-deadbeef/{Path(file['path']).name}"
        if found:
            before = storage.raw.get(key).data
            storage.raw.put(key, json.dumps(document).encode())
            storage.undo.append(lambda key=key, before=before: storage.raw.put(key, before))  # type: ignore[misc]


def compacted(storage: Storage, choice: int) -> None:
    if storage.is_object_store:
        compact(storage.session.repository, CompactionPolicy(min_entries=2 + choice % 3))


def repaired(storage: Storage, _: int) -> None:
    if storage.is_object_store:
        repair_indices(_engine(storage), apply=True)
        assert verify_indices(_engine(storage)).ok
        storage.undo.clear()


def purged(storage: Storage, _: int) -> None:
    """What was compacted goes, as far as nothing needs it."""
    if storage.is_object_store:
        plan = plan_gc(_engine(storage), grace=timedelta(0), purge_compacted=True)
        sweep(_engine(storage), plan)


DISTURBANCES: dict[str, Disturbance] = {
    "compacted": compacted,
    "delete_indices": delete_indices,
    "garble": garble,
    "lag": lag,
    "purged": purged,
    "reopen": reopen,
    "repaired": repaired,
    "wrong_head_path": wrong_head_path,
}


def _engine(storage: Storage) -> ObjectRepository:
    repository = storage.session.repository
    assert isinstance(repository, ObjectRepository)
    return repository


def _some(storage: Storage, choice: int) -> list[str]:
    """One of the indices, or all."""
    keys = sorted(storage.indices())
    return keys if not keys or choice % 2 else [keys[choice // 2 % len(keys)]]


def _document(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _head(storage: Storage) -> int:
    return Head.parse(storage.raw.get("meta/head.json").data, key="meta/head.json").commit_id
