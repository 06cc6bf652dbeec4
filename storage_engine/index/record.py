"""The index object of one type: what is in it, and reading and writing it under a condition.

An index only saves work: readers check it against the head and take what it lacks from the chain.
So one that cannot be parsed, or that belongs to an erased log, is read as empty and replaced by
the next writer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

import orjson

from storage_engine.commitlog import layout
from storage_engine.commitlog.json_object import JsonObjects, JsonVersion
from storage_engine.commitlog.records import (
    CommitFile,
    Entry,
    TypeRef,
    from_json,
    to_json,
)
from storage_engine.errors import IntegrityError
from storage_engine.objectstore.protocol import ObjectStore

UNREADABLE = "unreadable"  # the log id of an index that could not be parsed
_FRAGMENTS_KEPT = 100_000
_UNKNOWN_ROWS = -1  # an entry of the first implementation names its file and nothing else


@dataclass(frozen=True, slots=True)
class TypeIndex:
    """Entries never overlap and are kept in commit order."""

    type_name: str
    max_indexed_commit: int = 0
    entries: tuple[Entry, ...] = ()
    log_id: str = ""
    current_schema_version_id: int | None = None
    activation_commit_id: int | None = None
    historical_versions: tuple[Mapping[str, int], ...] = field(default_factory=tuple)

    def covers(self, commit_id: int) -> bool:
        after = bisect_right(self.entries, commit_id, key=lambda e: e.min_commit_id)
        return after > 0 and commit_id <= self.entries[after - 1].max_commit_id

    def with_missing(self, entries: Iterable[Entry]) -> Self:
        """Add the entries that reach beyond what is covered, in the place of those they span."""
        missing = [entry for entry in entries if not self.covers(entry.max_commit_id)]
        spans = [e for e in missing if e.is_snapshot]
        kept = [e for e in self.entries if not any(s.contains(e.min_commit_id) for s in spans)]
        merged = sorted([*kept, *missing], key=lambda e: e.min_commit_id)
        return replace(self, entries=tuple(merged))

    def with_entry(self, entry: Entry) -> Self:
        """Add an entry, in the place of a per-commit entry for the same commit."""
        others = [e for e in self.entries if e.commits != entry.commits]
        merged = sorted([*others, entry], key=lambda e: e.min_commit_id)
        return replace(self, entries=tuple(merged))

    def to_bytes(self, write_id: str, encoder: EntryEncoder) -> bytes:
        engine_version = encoder.engine_version
        payload: dict[str, Any] = {
            "type_name": self.type_name,
            "max_indexed_commit": self.max_indexed_commit,
        }
        if engine_version == "v2":
            payload |= {
                "current_schema_version_id": self.current_schema_version_id,
                "activation_commit_id": self.activation_commit_id,
            }
        payload["entries"] = [encoder.encode(e) for e in self.entries]
        if engine_version == "v2":
            payload["historical_versions"] = list(self.historical_versions)
        return to_json(payload | {"log_id": self.log_id, "write_id": write_id})

    @classmethod
    def parse(cls, data: bytes, ref: TypeRef, *, key: str) -> Self:
        raw = from_json(data, key=key)
        try:
            entries = sorted(
                (_parse_entry(e, ref) for e in raw["entries"]), key=lambda e: e.min_commit_id
            )
            return cls(
                type_name=raw["type_name"],
                max_indexed_commit=int(raw["max_indexed_commit"]),
                entries=tuple(entries),
                log_id=raw.get("log_id", ""),
                current_schema_version_id=raw.get("current_schema_version_id"),
                activation_commit_id=raw.get("activation_commit_id"),
                historical_versions=tuple(raw.get("historical_versions", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{key} is not an index object: {error!r}", key=key) from error


class EntryEncoder:
    """Encodes each entry once: an index is rewritten by every commit, its entries never change."""

    def __init__(self, engine_version: str) -> None:
        self.engine_version = engine_version
        self._encoded: dict[tuple[int, int, str], orjson.Fragment] = {}

    def encode(self, entry: Entry) -> orjson.Fragment:
        key = (entry.min_commit_id, entry.max_commit_id, entry.files[0].path)
        fragment = self._encoded.get(key)
        if fragment is None:
            if len(self._encoded) >= _FRAGMENTS_KEPT:
                self._encoded.clear()
            fragment = orjson.Fragment(orjson.dumps(_entry_dict(entry, self.engine_version)))
            self._encoded[key] = fragment
        return fragment


def _entry_dict(entry: Entry, engine_version: str) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "min_commit_id": entry.min_commit_id,
        "max_commit_id": entry.max_commit_id,
    }
    if engine_version == "v2":
        payload["schema_version_id"] = entry.schema_version_id
    if len(entry.files) == 1:
        return payload | {"path": entry.files[0].path, **_file_facts(entry.files[0])}
    return payload | {"files": [{"path": f.path, **_file_facts(f)} for f in entry.files]}


def _file_facts(file: CommitFile) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "row_count": file.row_count,
        "bytes": file.bytes,
        "content_sha256": file.content_sha256,
    }
    if file.commit_id_source != "column":
        facts["commit_id_source"] = file.commit_id_source
    if file.role is not None:
        facts["role"] = file.role
    if file.key_range:
        facts["key_range"] = file.key_range
    if file.stats:
        facts["stats"] = file.stats
    return facts


def _parse_entry(raw: Mapping[str, Any], ref: TypeRef) -> Entry:
    version = int(raw.get("schema_version_id", 1))
    files = raw.get("files", [raw])
    return Entry(
        int(raw["min_commit_id"]),
        int(raw["max_commit_id"]),
        tuple(
            CommitFile(
                kind=ref[0],
                type_name=ref[1],
                path=f["path"],
                row_count=f.get("row_count", _UNKNOWN_ROWS),
                schema_version_id=version,
                content_sha256=f.get("content_sha256", ""),
                bytes=f.get("bytes", 0),
                commit_id_source=f.get("commit_id_source", "column"),
                role=f.get("role"),
                stats=f.get("stats", {}),
                key_range=f.get("key_range", {}),
            )
            for f in files
        ),
    )


IndexVersion: TypeAlias = JsonVersion[TypeIndex]


class IndexObjects:
    """The index objects of one storage, with the version last seen of each."""

    def __init__(self, store: ObjectStore, *, engine_version: str) -> None:
        encoder = EntryEncoder(engine_version)
        self._objects: JsonObjects[TypeIndex] = JsonObjects(
            store,
            parse=_parse_index,
            encode=lambda index, write_id: index.to_bytes(write_id, encoder),
            operation="index",
        )

    def seen(self, ref: TypeRef) -> IndexVersion | None:
        return self._objects.seen(layout.index(*ref))

    def read(self, ref: TypeRef, *, log_id: str) -> IndexVersion:
        """The index now: one request, short while it has not changed."""
        version = self._objects.read(layout.index(*ref))
        return JsonVersion(_of_log(version.value, log_id), version.etag)

    def update(
        self,
        ref: TypeRef,
        *,
        log_id: str,
        change: Callable[[TypeIndex], TypeIndex | None],
        is_new: bool = False,
    ) -> None:
        """Read, change, write if nobody else did; again on the newer version if somebody did.

        `change` returns None when the version it is given needs no change. `is_new`: the type was
        just registered, so there is nothing to read.
        """
        self._objects.update(
            layout.index(*ref),
            lambda index: change(_of_log(index, log_id)),
            name=f"index of {ref[1]}",
            expect_absent=is_new,
            advice="; the next commit repairs it",
        )


def _parse_index(key: str, data: bytes | None) -> TypeIndex:
    ref = layout.index_type(key)
    if data is None:
        return TypeIndex(ref[1])
    try:
        return TypeIndex.parse(data, ref, key=key)
    except IntegrityError:
        return TypeIndex(ref[1], log_id=UNREADABLE)


def _of_log(index: TypeIndex, log_id: str) -> TypeIndex:
    """An index of an erased log counts as empty."""
    if index.log_id and log_id and index.log_id != log_id:
        return TypeIndex(index.type_name, log_id=log_id)
    return index
