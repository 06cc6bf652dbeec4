"""What one commit contains: its files, what rides along, and the way back to its ancestors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import orjson

from storage_engine.commitlog import layout
from storage_engine.commitlog.parsing import (
    FieldError,
    is_name,
    optional_int,
    optional_key_range,
    optional_object,
    optional_objects,
    optional_path,
    optional_stats,
    optional_text,
    parsing,
    require_choice,
    require_int,
    require_list,
    require_name,
    require_object,
    require_objects,
    require_path,
    require_text,
    require_time,
)
from storage_engine.commitlog.ranges import KeyRange
from storage_engine.commitlog.records.type_head import (
    BucketTable,
    TypeHead,
    parse_type_heads,
    type_heads_json,
)
from storage_engine.commitlog.records.values import (
    KINDS,
    CheckpointRef,
    ManifestLink,
    TypeRef,
    UnitVersion,
    from_json,
    optional_checkpoint_ref,
    optional_link,
    parse_marks,
    parse_version,
    to_json,
)

_UNKNOWN_ROWS = -1


@dataclass(frozen=True, slots=True)
class Previous:
    """The commit before this one that touched the same type."""

    commit_id: int
    manifest_path: str
    manifest_sha256: str = ""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        return cls(
            require_int(raw, "commit_id", minimum=1),
            require_path(raw, "manifest_path"),
            optional_text(raw, "manifest_sha256", ""),
        )


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
    def upto(self) -> int | None:
        """Rows of later commits in the file do not count; None: all do."""
        return None

    def clipped(self, upto: int) -> CommitFile:
        """The file as a branch has it that was forked at a commit inside of it. Its role says what
        is superseded as of another commit; counts and bounds are upper ones from here on."""
        facts = {f.name: getattr(self, f.name) for f in fields(CommitFile)}
        return ClippedFile(**(facts | {"role": None}), upto=upto)

    @property
    def leading_keys(self) -> KeyRange:
        """Of the first identity column."""
        return self.keys("entity_key" if self.kind == "entity" else "left_key")

    def keys(self, column: str) -> KeyRange:
        """What is known of the keys in an identity column."""
        return KeyRange.parse(self.key_range.get(column))

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> CommitFile:
        previous = optional_object(raw, "previous")
        upto = optional_int(raw, "upto")
        file = CommitFile(
            kind=require_choice(raw, "kind", KINDS),
            type_name=require_name(raw, "type_name"),
            path=require_path(raw, "path"),
            row_count=require_int(raw, "row_count", minimum=_UNKNOWN_ROWS),
            schema_version_id=require_int(raw, "schema_version_id"),
            content_sha256=optional_text(raw, "content_sha256", ""),
            bytes=optional_int(raw, "bytes", 0),
            part=optional_int(raw, "part"),
            commit_id_source=optional_text(raw, "commit_id_source", "column"),
            role=optional_text(raw, "role"),
            inserted=optional_int(raw, "inserted"),
            updated=optional_int(raw, "updated"),
            stats=optional_stats(raw),
            key_range=optional_key_range(raw),
            previous=Previous.parse(previous) if previous else None,
        )
        return file if upto is None else file.clipped(upto)


@dataclass(frozen=True, slots=True)
class ClippedFile(CommitFile):
    """A file of which only the rows up to a commit count: see `CommitFile.clipped`."""

    upto: int = 0


@dataclass(frozen=True, slots=True)
class MergePoint:
    """How far a branch has been merged into its parent: its commit (and the manifest of that), and
    the parent's that did."""

    source: int
    commit_id: int
    manifest: str = ""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        return cls(
            require_int(raw, "source"),
            require_int(raw, "commit_id", minimum=1),
            optional_text(raw, "manifest", ""),
        )


@dataclass(frozen=True, slots=True)
class UpdatePoint:
    """The parent's commit up to which a branch was last updated, and the manifest of that."""

    incarnation: str
    commit_id: int
    manifest: str = ""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        return cls(
            require_text(raw, "incarnation"),
            require_int(raw, "commit_id"),
            optional_text(raw, "manifest", ""),
        )


@dataclass(frozen=True, slots=True)
class AckedTogether:
    """The acks of commits that were published by one swap of head, the last one's left out, each
    with its `commit_id`; and `before`, the newest manifest before all of them that carries some.
    The last one tells it, so that nobody need read the others to find their acks."""

    acks: tuple[Mapping[str, Any], ...]
    before: ManifestLink | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        acks = _acks(raw)
        for ack in acks:
            require_int(ack, "commit_id", minimum=1)
        return cls(acks, optional_link(raw, "before"))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one commit contains, and the way back to its ancestors.

    `marks` are the units of work between the parent and this commit that changed nothing.
    `events_before` and `acks_before` name the newest ancestor that carries some, or that was
    written before these pointers existed (format 1) and does not know of those before it.
    `origin` is the log that a copied commit comes from; one that was made here has none.

    Where there are branches: `merged` has the last merge of each into this chain, by incarnation,
    and `updated` the last update of this one; both are carried along. `merged_marks` are the units
    of work that a merge has brought: they count beside the chain's own. `changes` names, for each
    type that a merge or an update wrote, the changes that it brought, oldest first: the write ids
    of the commits that made them. So a change keeps its name wherever it is merged to.
    """

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
    # {"registered": [...new versions...], "dropped": [...types that end...]}
    schema: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Mapping[str, Any], ...] = ()
    acks: tuple[Mapping[str, Any], ...] = ()
    idempotency: Mapping[str, Any] | None = None
    checkpoint: CheckpointRef | None = None
    skip: tuple[ManifestLink, ...] = ()
    type_heads: Mapping[TypeRef, TypeHead] | None = None  # None: in buckets, or not written
    type_head_buckets: BucketTable | None = None
    parent_sha256: str = ""
    marks: Mapping[str, UnitVersion] = field(default_factory=dict)
    events_before: ManifestLink | None = None
    acks_before: ManifestLink | None = None
    acked_together: AckedTogether | None = None
    origin: str = ""
    merged: Mapping[str, MergePoint] = field(default_factory=dict)
    updated: UpdatePoint | None = None
    merged_marks: Mapping[str, Sequence[UnitVersion]] = field(default_factory=dict)
    changes: Mapping[TypeRef, Sequence[str]] = field(default_factory=dict)

    @property
    def parent(self) -> ManifestLink | None:
        if self.parent_manifest_path is None or self.parent_commit_id is None:
            return None
        return ManifestLink(self.parent_commit_id, self.parent_manifest_path, self.parent_sha256)

    def to_bytes(self) -> bytes:
        payload = {f.name: getattr(self, f.name) for f in fields(self)}
        payload["changes"] = _changes_json(self.changes)
        for name in (
            "acked_together",
            "origin",
            "merged",
            "updated",
            "merged_marks",
            "changes",
        ):
            if not payload[name]:
                del payload[name]
        if self.type_heads is not None:
            payload["type_heads"] = type_heads_json(self.type_heads)
        if self.type_head_buckets is not None:
            payload["type_head_buckets"] = self.type_head_buckets.to_dict()
        return to_json(payload)

    @classmethod
    def parse(cls, data: bytes, *, key: str) -> Self:
        raw = from_json(data, key=key)
        with parsing(key, "manifest"):
            heads = optional_object(raw, "type_heads")
            buckets = optional_object(raw, "type_head_buckets")
            update = optional_object(raw, "updated")
            together = optional_object(raw, "acked_together")
            manifest = cls(
                commit_id=require_int(raw, "commit_id", minimum=1),
                parent_commit_id=optional_int(raw, "parent_commit_id"),
                parent_manifest_path=optional_path(raw, "parent_manifest_path"),
                created_at=require_time(raw, "created_at"),
                runtime_id=optional_text(raw, "runtime_id", ""),
                metadata=_texts(optional_object(raw, "metadata") or {}),
                files=tuple(CommitFile.parse(f) for f in require_objects(raw, "files")),
                format=optional_int(raw, "format", 0),
                log_id=optional_text(raw, "log_id", ""),
                write_id=optional_text(raw, "write_id", ""),
                kind=optional_text(raw, "kind", "data"),
                schema=_schema_changes(optional_object(raw, "schema") or {}),
                events=tuple(optional_objects(raw, "events")),
                acks=_acks(raw),
                idempotency=_idempotency(optional_object(raw, "idempotency")),
                checkpoint=optional_checkpoint_ref(raw),
                skip=tuple(ManifestLink.parse(s) for s in optional_objects(raw, "skip")),
                type_heads=parse_type_heads(heads) if heads is not None else None,
                type_head_buckets=BucketTable.parse(buckets) if buckets is not None else None,
                parent_sha256=optional_text(raw, "parent_sha256", ""),
                marks=parse_marks(raw),
                events_before=optional_link(raw, "events_before"),
                acks_before=optional_link(raw, "acks_before"),
                acked_together=AckedTogether.parse(together) if together else None,
                origin=optional_text(raw, "origin", ""),
                merged=_merged(raw),
                updated=UpdatePoint.parse(update) if update else None,
                merged_marks=_merged_marks(raw),
                changes=_changes(raw),
            )
            older = [manifest.parent, *manifest.skip, manifest.events_before, manifest.acks_before]
            older += [manifest.acked_together.before] if manifest.acked_together else []
            if any(link is not None and link.commit_id >= manifest.commit_id for link in older):
                raise ValueError("it names a commit as its ancestor that is not older")
        return manifest

    def files_of(self, ref: TypeRef) -> tuple[CommitFile, ...]:
        return tuple(f for f in self.files if f.ref == ref)

    def touched(self) -> list[TypeRef]:
        return list(dict.fromkeys(f.ref for f in self.files))

    def changes_of(self, ref: TypeRef) -> tuple[str, ...]:
        """The names of the changes to a type that this commit brought, or made itself."""
        return tuple(self.changes.get(ref, ())) or ((self.write_id,) if self.write_id else ())

    def schema_changed(self) -> list[TypeRef]:
        """The types that got another version, or ended."""
        records = [*self.schema.get("registered", ()), *self.schema.get("dropped", ())]
        return list(dict.fromkeys((r["kind"], r["type_name"]) for r in records))


def _merged(raw: Mapping[str, Any]) -> dict[str, MergePoint]:
    merged = optional_object(raw, "merged") or {}
    return {name: MergePoint.parse(require_object(merged, name)) for name in merged}


def _merged_marks(raw: Mapping[str, Any]) -> dict[str, tuple[UnitVersion, ...]]:
    marks = optional_object(raw, "merged_marks") or {}
    return {
        app_id: tuple(parse_version({"version": v}, "version") for v in require_list(marks, app_id))
        for app_id in marks
    }


def _changes_json(changes: Mapping[TypeRef, Sequence[str]]) -> dict[str, dict[str, list[str]]]:
    payload: dict[str, dict[str, list[str]]] = {}
    for (kind, name), write_ids in changes.items():
        payload.setdefault(layout.FOLDERS[kind], {})[name] = list(write_ids)
    return payload


def _changes(raw: Mapping[str, Any]) -> dict[TypeRef, tuple[str, ...]]:
    changes = optional_object(raw, "changes") or {}
    parsed: dict[TypeRef, tuple[str, ...]] = {}
    for kind, folder in layout.FOLDERS.items():
        by_name = optional_object(changes, folder) or {}
        for name in by_name:
            write_ids = require_list(by_name, name)
            if not is_name(name) or not all(isinstance(each, str) for each in write_ids):
                raise FieldError("changes", "write ids by the names of types", by_name[name])
            parsed[kind, name] = tuple(write_ids)
    return parsed


def _idempotency(raw: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if raw is None:
        return None
    return {"app_id": require_text(raw, "app_id"), "version": parse_version(raw, "version")}


def _acks(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    acks = optional_objects(raw, "acks")
    for ack in acks:
        for name in ("namespace", "event_id", "handler_id"):
            require_text(ack, name)
    return tuple(acks)


def _schema_changes(raw: Mapping[str, Any]) -> dict[str, Any]:
    registered = optional_objects(raw, "registered")
    for record in registered:
        check_registration(record)
    dropped = optional_objects(raw, "dropped")
    for record in dropped:
        require_choice(record, "kind", KINDS)
        require_name(record, "type_name")
        optional_text(record, "renamed_to")
    changes = dict(raw)
    if registered:
        changes["registered"] = registered
    if dropped:
        changes["dropped"] = dropped
    return changes


def check_registration(record: Mapping[str, Any]) -> None:
    require_choice(record, "kind", KINDS)
    require_name(record, "type_name")
    require_int(record, "schema_version_id")
    require_object(record, "schema")
    for name in ("activation_commit_id", "superseded_at_commit_id", "dropped_commit_id"):
        optional_int(record, name)
    for name in ("created_at", "renamed_to", "renamed_from"):
        optional_text(record, name)


def _texts(raw: Mapping[str, Any]) -> dict[str, str]:
    """Others may have written numbers."""
    return {k: v if isinstance(v, str) else orjson.dumps(v).decode() for k, v in raw.items()}
