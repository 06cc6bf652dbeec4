"""The log's JSON objects as immutable records: head, manifest, files, type heads, checkpoint.

Field names are the contract of the specification; what is added to it is optional on reading, so
that storages written by its first implementation (v1, without our additions) still open.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Self

import orjson

from storage_engine.commitlog.ranges import CommitRange, KeyRange
from storage_engine.errors import IntegrityError

TypeRef = tuple[str, str]  # (kind, type name)


def to_json(payload: Mapping[str, Any]) -> bytes:
    return orjson.dumps(payload)


def from_json(data: bytes, *, key: str) -> dict[str, Any]:
    try:
        payload = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise IntegrityError(f"{key} is not valid JSON: {error}", key=key) from error
    if not isinstance(payload, dict):
        raise IntegrityError(f"{key} is not a JSON object", key=key)
    return payload


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def timestamp(moment: datetime) -> str:
    if moment.tzinfo is not UTC:
        moment = moment.astimezone(UTC)
    return moment.isoformat(timespec="microseconds")


def parse_timestamp(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """Names the latest checkpoint and proves its content."""

    path: str
    sha256: str
    commit_id: int


@dataclass(frozen=True, slots=True)
class Head:
    """`meta/head.json`: the one pointer that decides what is committed."""

    commit_id: int
    manifest_path: str | None
    updated_at: str
    runtime_id: str
    log_id: str = ""
    write_id: str = ""
    commit_sha256: str | None = None
    checkpoint: CheckpointRef | None = None

    def to_bytes(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def parse(cls, data: bytes, *, key: str) -> Self:
        raw = from_json(data, key=key)
        try:
            head = cls(
                commit_id=int(raw["commit_id"]),
                manifest_path=raw["manifest_path"],
                updated_at=raw["updated_at"],
                runtime_id=raw["runtime_id"],
                log_id=raw.get("log_id", ""),
                write_id=raw.get("write_id", ""),
                commit_sha256=raw.get("commit_sha256"),
                checkpoint=_checkpoint_ref(raw.get("checkpoint")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{key} is not a head object: {error!r}", key=key) from error
        if head.commit_id >= 1 and not head.manifest_path:
            raise IntegrityError(f"{key} names commit {head.commit_id} but no manifest", key=key)
        return head


@dataclass(frozen=True, slots=True)
class TypeHead:
    """The commit that last touched a type, and the schema version that is current there."""

    commit_id: int
    manifest_path: str
    schema_version_id: int = 1
    schema_sha256: str = ""
    activation_commit_id: int = 1
    layout_sha256: str = ""  # of the schema with its field order and ids: how files are written


@dataclass(frozen=True, slots=True)
class Previous:
    """The commit before this one that touched the same type."""

    commit_id: int
    manifest_path: str


@dataclass(frozen=True, slots=True)
class CommitFile:
    """One Parquet file of a commit."""

    kind: str
    type_name: str
    path: str
    row_count: int
    schema_version_id: int
    content_sha256: str
    bytes: int = 0
    part: int | None = None
    commit_id_source: str = "column"  # "manifest": the rows carry no commit_id column
    role: str | None = None  # of a snapshot's file: "current" (one row per identity), "superseded"
    inserted: int | None = None
    updated: int | None = None
    stats: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # [min, max, null count]
    key_range: Mapping[str, Any] = field(default_factory=dict)  # column -> [min, max]
    previous: Previous | None = None

    @property
    def ref(self) -> TypeRef:
        return (self.kind, self.type_name)

    @property
    def leading_keys(self) -> KeyRange:
        """Of the first identity column."""
        return self.keys("entity_key" if self.kind == "entity" else "left_key")

    def keys(self, column: str) -> KeyRange:
        """What is known of the keys in an identity column."""
        return KeyRange.parse(self.key_range.get(column))

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        facts = {k: v for k, v in raw.items() if k in cls.__dataclass_fields__}
        if facts.get("previous"):
            facts["previous"] = Previous(**facts["previous"])
        return cls(**facts)


@dataclass(frozen=True, slots=True)
class SkipPointer:
    commit_id: int
    path: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one commit contains, and the way back to its ancestors."""

    commit_id: int
    parent_commit_id: int | None
    parent_manifest_path: str | None
    created_at: str
    runtime_id: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    files: tuple[CommitFile, ...] = ()
    format: int = 0
    log_id: str = ""
    write_id: str = ""
    kind: str = "data"
    schema: Mapping[str, Any] = field(default_factory=dict)  # {"registered": [...]}
    events: tuple[Mapping[str, Any], ...] = ()
    acks: tuple[Mapping[str, Any], ...] = ()
    idempotency: Mapping[str, Any] | None = None
    checkpoint: CheckpointRef | None = None
    skip: tuple[SkipPointer, ...] = ()
    type_heads: Mapping[TypeRef, TypeHead] | None = None  # None: written before they existed

    def to_bytes(self) -> bytes:
        payload = {f.name: getattr(self, f.name) for f in fields(self)}
        heads: dict[str, dict[str, TypeHead]] = {"entities": {}, "relations": {}}
        for (kind, name), head in (self.type_heads or {}).items():
            heads["entities" if kind == "entity" else "relations"][name] = head
        payload["type_heads"] = heads
        return to_json(payload)

    @classmethod
    def parse(cls, data: bytes, *, key: str) -> Self:
        raw = from_json(data, key=key)
        try:
            facts = {k: v for k, v in raw.items() if k in cls.__dataclass_fields__}
            facts["files"] = tuple(CommitFile.parse(f) for f in raw["files"])
            facts["events"] = tuple(raw.get("events", ()))
            facts["acks"] = tuple(raw.get("acks", ()))
            facts["skip"] = tuple(SkipPointer(**s) for s in raw.get("skip", ()))
            facts["checkpoint"] = _checkpoint_ref(raw.get("checkpoint"))
            facts["type_heads"] = _type_heads(raw.get("type_heads"))
            return cls(**facts)
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{key} is not a manifest: {error!r}", key=key) from error

    def files_of(self, ref: TypeRef) -> tuple[CommitFile, ...]:
        return tuple(f for f in self.files if f.ref == ref)

    def touched(self) -> list[TypeRef]:
        return list(dict.fromkeys(f.ref for f in self.files))


@dataclass(frozen=True, slots=True)
class Entry(CommitRange):
    """A run of commits of one type and the files that hold their rows: a single commit, or a
    snapshot (made by compaction) of several."""

    files: tuple[CommitFile, ...]
    rewrites: int = 0  # how often compaction has written its rows anew, at most

    @property
    def is_snapshot(self) -> bool:
        return not self.is_single

    @property
    def schema_version_id(self) -> int:
        return self.files[0].schema_version_id

    def newest_files(self, upto: int) -> tuple[CommitFile, ...]:
        """The files in which the newest row of each identity as of `upto` is."""
        if self.max_commit_id > upto:
            return self.files
        return tuple(f for f in self.files if f.role != "superseded")

    def unique(self, upto: int) -> bool:
        """Whether no identity can be twice in `newest_files`: a reconciled commit has each once,
        and so have the current rows of a snapshot."""
        if self.is_single:
            return True
        return all(f.role == "current" for f in self.newest_files(upto))


def entry_of(manifest: Manifest, ref: TypeRef) -> Entry | None:
    files = manifest.files_of(ref)
    return Entry(manifest.commit_id, manifest.commit_id, files) if files else None


@dataclass(frozen=True, slots=True)
class CommitPoint:
    """A commit's place in time and in the store, as checkpoints keep it."""

    commit_id: int
    created_at: str
    manifest_path: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of the log as of a commit, so that a walk over the chain can stop there."""

    commit_id: int
    log_id: str
    entries: Mapping[TypeRef, tuple[Entry, ...]]
    schemas: Mapping[TypeRef, Mapping[int, Mapping[str, Any]]]  # version -> schema record
    idempotency: Mapping[str, Mapping[str, Any]]  # app id -> {version, commit_id}
    commits: tuple[CommitPoint, ...]

    def to_bytes(self) -> bytes:
        types = []
        for ref in dict.fromkeys([*self.entries, *self.schemas]):
            types.append(
                {
                    "kind": ref[0],
                    "type_name": ref[1],
                    "entries": list(self.entries.get(ref, ())),
                    "schemas": {str(v): dict(s) for v, s in self.schemas.get(ref, {}).items()},
                }
            )
        return to_json(
            {
                "commit_id": self.commit_id,
                "log_id": self.log_id,
                "types": types,
                "idempotency": dict(self.idempotency),
                "commits": [[c.commit_id, c.created_at, c.manifest_path] for c in self.commits],
            }
        )

    @classmethod
    def parse(cls, data: bytes, *, key: str) -> Self:
        raw = from_json(data, key=key)
        try:
            refs = [(t["kind"], t["type_name"]) for t in raw["types"]]
            return cls(
                commit_id=raw["commit_id"],
                log_id=raw["log_id"],
                entries={
                    ref: tuple(parse_entry(e) for e in t["entries"])
                    for ref, t in zip(refs, raw["types"], strict=True)
                },
                schemas={
                    ref: {int(v): s for v, s in t["schemas"].items()}
                    for ref, t in zip(refs, raw["types"], strict=True)
                },
                idempotency=raw["idempotency"],
                commits=tuple(CommitPoint(*c) for c in raw["commits"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{key} is not a checkpoint: {error!r}", key=key) from error


def parse_entry(raw: Mapping[str, Any]) -> Entry:
    return Entry(
        raw["min_commit_id"],
        raw["max_commit_id"],
        tuple(CommitFile.parse(f) for f in raw["files"]),
        raw.get("rewrites", 0),
    )


def _checkpoint_ref(raw: Mapping[str, Any] | None) -> CheckpointRef | None:
    return CheckpointRef(**raw) if raw else None


def _type_heads(raw: Mapping[str, Any] | None) -> dict[TypeRef, TypeHead] | None:
    if raw is None:
        return None
    return {
        (kind, name): TypeHead(**head)
        for kind, folder in (("entity", "entities"), ("relation", "relations"))
        for name, head in raw.get(folder, {}).items()
    }
