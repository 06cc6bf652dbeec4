"""The index object of one type: what is in it, and reading and writing it under a condition.

An index only saves work: readers prove it by the chain and take what it lacks from there. For that
it names the manifest of its newest entry, each entry names the one before, and the object ends
with a hash of itself: so an index that a writer left is either whole or recognised. One that
cannot be parsed, that was altered, or that belongs to an erased log, proves nothing and is
replaced by the next writer. So is one that was written before indices could be proven.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import orjson

from storage_engine.commitlog import layout
from storage_engine.commitlog.json_object import JsonObjects, JsonVersion
from storage_engine.commitlog.parsing import (
    FieldError,
    optional_int,
    optional_key_range,
    optional_object,
    optional_objects,
    optional_stats,
    optional_text,
    parsing,
    require_choice,
    require_int,
    require_objects,
    require_path,
    require_text,
)
from storage_engine.commitlog.records import (
    CommitFile,
    Entry,
    Previous,
    TypeRef,
    from_json,
    sha256,
    to_json,
)
from storage_engine.errors import IntegrityError
from storage_engine.objectstore.protocol import ObjectStore

UNREADABLE = "unreadable"  # the log id of an index that could not be parsed
_FRAGMENTS_KEPT = 100_000
_UNKNOWN_ROWS = -1  # an entry of the first implementation names its file and nothing else
_SEAL = b',"sha256":"'
_SEAL_BYTES = len(_SEAL) + 64 + len(b'"}')


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
    # Of the newest entry's last commit; None: the index proves nothing.
    max_indexed_manifest: str | None = None
    problem: str = ""  # why an index that could be parsed is not believed

    def upto(self, commit_id: int) -> tuple[tuple[Entry, ...], Previous | None]:
        """The entries at or below a commit, and the commit that the newest of them is said to
        end with; None when nothing says so."""
        if self.max_indexed_manifest is None or not self.entries:
            return (), None
        if self.entries[-1].max_commit_id <= commit_id:
            newest = self.entries[-1].max_commit_id
            return self.entries, Previous(newest, self.max_indexed_manifest)
        kept = tuple(entry for entry in self.entries if entry.max_commit_id <= commit_id)
        return kept, _link(self.entries[len(kept)]) if kept else None

    def commit_at(self, position: int) -> Previous | None:
        """The commit that the entry at a position is said to end with."""
        if position + 1 < len(self.entries):
            return _link(self.entries[position + 1])
        if self.max_indexed_manifest is None:
            return None
        return Previous(self.entries[position].max_commit_id, self.max_indexed_manifest)

    def to_bytes(self, write_id: str, encoder: EntryEncoder) -> bytes:
        engine_version = encoder.engine_version
        payload: dict[str, Any] = {
            "type_name": self.type_name,
            "max_indexed_commit": self.max_indexed_commit,
            "max_indexed_manifest": self.max_indexed_manifest,
        }
        if engine_version == "v2":
            payload |= {
                "current_schema_version_id": self.current_schema_version_id,
                "activation_commit_id": self.activation_commit_id,
            }
        payload["entries"] = [encoder.encode(e) for e in self.entries]
        if engine_version == "v2":
            payload["historical_versions"] = list(self.historical_versions)
        return sealed(to_json(payload | {"log_id": self.log_id, "write_id": write_id}))

    @classmethod
    def parse(cls, data: bytes, ref: TypeRef, *, key: str) -> Self:
        raw = from_json(data, key=key)
        with parsing(key, "index"):
            if require_text(raw, "type_name") != ref[1]:
                raise FieldError("type_name", repr(ref[1]), raw["type_name"])
            entries = sorted(
                (_parse_entry(e, ref) for e in require_objects(raw, "entries")),
                key=lambda e: e.min_commit_id,
            )
            manifest = optional_text(raw, "max_indexed_manifest")
            problem = _problem(data, raw, entries)
            return cls(
                type_name=ref[1],
                max_indexed_commit=require_int(raw, "max_indexed_commit"),
                entries=tuple(entries),
                log_id=optional_text(raw, "log_id", ""),
                current_schema_version_id=optional_int(raw, "current_schema_version_id"),
                activation_commit_id=optional_int(raw, "activation_commit_id"),
                historical_versions=tuple(optional_objects(raw, "historical_versions")),
                max_indexed_manifest=manifest if "sha256" in raw and not problem else None,
                problem=problem,
            )


def sealed(data: bytes) -> bytes:
    """A JSON object with its own hash as the last field."""
    return b"".join([data[:-1], _SEAL, sha256(data).encode(), b'"}'])


def _is_sealed(data: bytes) -> bool:
    return data == sealed(data[:-_SEAL_BYTES] + b"}")


def _problem(data: bytes, raw: Mapping[str, Any], entries: Sequence[Entry]) -> str:
    """Why the content is not what a writer left, or cannot be all of it; empty when it may be."""
    if "sha256" not in raw:
        return ""  # written before indices could be proven: nobody believes it unseen
    if not _is_sealed(data):
        return "was altered after it was written: its hash is another"
    before: Entry | None = None
    for entry in entries:
        link = _link(entry)
        if before is None:
            complete = link is None
        elif link is None:  # a snapshot, or a commit, of an implementation that does not say
            complete = before.max_commit_id < entry.min_commit_id
        else:
            complete = before.contains(link.commit_id) and not before.overlaps(entry)
        if not complete:
            reached = before.max_commit_id if before is not None else 0
            return f"has not all entries between the commits {reached} and {entry.min_commit_id}"
        before = entry
    return ""


def _link(entry: Entry) -> Previous | None:
    """The commit of the type before this entry."""
    return entry.files[0].previous


def same_commit(a: Previous, b: Previous) -> bool:
    """Whether both name one commit; an index does not keep the hashes of manifests."""
    return (a.commit_id, a.manifest_path) == (b.commit_id, b.manifest_path)


class EntryEncoder:
    """Encodes each entry once: an index is rewritten by every commit, its entries never change."""

    def __init__(self, engine_version: str) -> None:
        self.engine_version = engine_version
        self._encoded: dict[tuple[int, int, str, Previous | None], orjson.Fragment] = {}

    def encode(self, entry: Entry) -> orjson.Fragment:
        key = (entry.min_commit_id, entry.max_commit_id, entry.files[0].path, _link(entry))
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
    if engine_version == "v2" or entry.schema_version_id != 1:
        payload["schema_version_id"] = entry.schema_version_id
    if (link := _link(entry)) is not None:
        payload["previous"] = {"commit_id": link.commit_id, "manifest_path": link.manifest_path}
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
    if file.upto is not None:
        facts["upto"] = file.upto
    if file.key_range:
        facts["key_range"] = file.key_range
    if file.stats:
        facts["stats"] = file.stats
    return facts


def _parse_entry(raw: Mapping[str, Any], ref: TypeRef) -> Entry:
    version = optional_int(raw, "schema_version_id", 1, minimum=1)
    lowest = require_int(raw, "min_commit_id", minimum=1)
    highest = require_int(raw, "max_commit_id", minimum=lowest)
    link = optional_object(raw, "previous")
    previous = _parse_previous(link) if link is not None else None
    files = require_objects(raw, "files") if "files" in raw else [raw]
    if not files:
        raise FieldError("files", "a list of at least one file", files)
    return Entry(lowest, highest, tuple(_parse_file(f, ref, version, previous) for f in files))


def _parse_previous(raw: Mapping[str, Any]) -> Previous:
    return Previous(require_int(raw, "commit_id", minimum=1), require_path(raw, "manifest_path"))


def _parse_file(
    raw: Mapping[str, Any], ref: TypeRef, version: int, previous: Previous | None
) -> CommitFile:
    given = raw.get("role") is not None
    upto = optional_int(raw, "upto")
    file = CommitFile(
        kind=ref[0],
        type_name=ref[1],
        path=require_path(raw, "path"),
        row_count=optional_int(raw, "row_count", _UNKNOWN_ROWS, minimum=_UNKNOWN_ROWS),
        schema_version_id=version,
        content_sha256=optional_text(raw, "content_sha256", ""),
        bytes=optional_int(raw, "bytes", 0),
        commit_id_source=require_choice(raw, "commit_id_source", ("column", "manifest"))
        if "commit_id_source" in raw
        else "column",
        role=require_choice(raw, "role", ("current", "superseded")) if given else None,
        stats=optional_stats(raw),
        key_range=_key_range(raw),
        previous=previous,
    )
    return file if upto is None else file.clipped(upto)


def _key_range(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    bounds = optional_key_range(raw)
    for name, keys in bounds.items():
        if any(key is not None and type(key) is not str for key in keys):
            raise FieldError(f"key_range.{name}", "a list of 2 keys", keys)
    return bounds


IndexVersion: TypeAlias = JsonVersion[TypeIndex]


class IndexObjects:
    """The index objects of one storage, with the version last seen of each."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        engine_version: str,
        under: str = layout.INDICES,
        inherits: tuple[IndexObjects, int] | None = None,
    ) -> None:
        """`under`: those of main, or of a branch, which `inherits` from the parent's."""
        self.under = under
        self.engine_version = engine_version
        self._inherits = inherits
        encoder = EntryEncoder(engine_version)
        self._objects: JsonObjects[TypeIndex] = JsonObjects(
            store,
            parse=_parse_index,
            encode=lambda index, write_id: index.to_bytes(write_id, encoder),
            operation="index",
        )

    def key(self, ref: TypeRef) -> str:
        return layout.index(*ref, under=self.under)

    def listed(self, store: ObjectStore) -> list[TypeRef]:
        """The types of which there is an index object."""
        folders = layout.index_folders(self.under)
        return [layout.index_type(info.key) for folder in folders for info in store.list(folder)]

    def seen(self, ref: TypeRef) -> IndexVersion | None:
        return self._objects.seen(self.key(ref))

    def read(self, ref: TypeRef, *, log_id: str) -> IndexVersion:
        """The index now: one request, short while it has not changed."""
        version = self._objects.read(self.key(ref))
        index = of_log(version.value, log_id)
        return JsonVersion(self._begun(index, ref, log_id), version.etag)

    def _begun(self, index: TypeIndex, ref: TypeRef, log_id: str) -> TypeIndex:
        """An index that is not there yet begins with what the parent's says up to the base."""
        if self._inherits is None or index != TypeIndex(ref[1]):
            return index
        parent, base = self._inherits
        inherited = parent.read(ref, log_id=log_id).value
        entries, newest = inherited.upto(base)
        if newest is None:
            return index
        return TypeIndex(
            ref[1],
            max_indexed_commit=min(inherited.max_indexed_commit, base),
            entries=entries,
            log_id=inherited.log_id,
            max_indexed_manifest=newest.manifest_path,
        )

    def update(
        self,
        ref: TypeRef,
        *,
        log_id: str,
        change: Callable[[TypeIndex], TypeIndex | None],
        is_new: bool = False,
        after: int = 0,
    ) -> None:
        """Read, change, write if nobody else did; again on the newer version if somebody did.

        `change` returns None when the version it is given needs no change. `is_new`: the type was
        just registered, so there is nothing to read. `after`: the commit before that wrote rows of
        the type; a version from before it has been replaced by now, as far as anybody can tell,
        and is not worth a try.
        """
        key = self.key(ref)
        seen = self._objects.seen(key)
        if seen is not None and seen.value.max_indexed_commit < after:
            self._objects.read(key)
        self._objects.update(
            key,
            lambda index: change(self._begun(of_log(index, log_id), ref, log_id)),
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
    except IntegrityError as error:
        return TypeIndex(ref[1], log_id=UNREADABLE, problem=str(error))


def of_log(index: TypeIndex, log_id: str) -> TypeIndex:
    """An index of an erased log counts as empty."""
    if index.log_id and log_id and index.log_id != log_id:
        return TypeIndex(index.type_name, log_id=log_id)
    return index
