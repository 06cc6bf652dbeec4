"""The log's JSON objects as immutable records: head, manifest, files, type heads, checkpoint.

Field names are the contract of the specification; what is added to it is optional on reading, so
that storages written by its first implementation (v1, without our additions) still open. What is
there must be of the right type and range: truth that cannot be read is an IntegrityError.

Wherever a record names a manifest it has the hash of its content beside it, as far as that is
known: a manifest cannot contain its own, so those that it writes about itself lack it, and so do
those of writers before format 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

import orjson

from storage_engine.commitlog import layout
from storage_engine.commitlog.parsing import (
    FieldError,
    is_name,
    optional_bool,
    optional_int,
    optional_key_range,
    optional_list,
    optional_object,
    optional_objects,
    optional_path,
    optional_stats,
    optional_text,
    optional_time,
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
from storage_engine.commitlog.ranges import CommitRange, KeyRange
from storage_engine.errors import IntegrityError
from storage_engine.objectstore.protocol import is_key

TypeRef = tuple[str, str]  # (kind, type name)
UnitVersion = int | str  # of a unit of work

_KINDS = tuple(layout.FOLDERS)
_UNKNOWN_ROWS = -1
TYPES_IN_A_BUCKET = 64  # of type heads, on average and at most


def to_json(payload: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(payload)
    except TypeError as error:
        # Read from an object of somebody else's: orjson reads deeper than it writes.
        if "recursion" not in str(error).lower():
            raise
        raise IntegrityError(
            "what the storage has to carry on is nested too deeply to be written again; "
            "`onto verify` says which object it stands in"
        ) from error


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

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        return cls(
            require_path(raw, "path"), require_text(raw, "sha256"), require_int(raw, "commit_id")
        )


@dataclass(frozen=True, slots=True)
class ManifestLink:
    """Names a manifest and, where its hash was known, proves its content."""

    commit_id: int
    path: str
    sha256: str = ""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        return cls(
            require_int(raw, "commit_id", minimum=1),
            require_path(raw, "path"),
            optional_text(raw, "sha256", ""),
        )


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """What makes a head that of a branch. `base` is the parent's commit from which it goes on;
    None: there was none yet. `incarnation` is new each time that a branch of the name is made.
    `marks` are those of the parent's head that it began with: a merge does not bring them back.
    `deleting`: its deletion has begun, so that nothing is forked from it any more."""

    branch: str
    incarnation: str
    parent: str
    base: ManifestLink | None
    created_at: str
    parent_incarnation: str = ""  # empty: main
    owner: str = ""
    expires_at: str | None = None
    marks: Mapping[str, UnitVersion] = field(default_factory=dict)
    deleting: bool = False

    @property
    def base_commit(self) -> int:
        return self.base.commit_id if self.base is not None else 0

    def to_dict(self) -> dict[str, Any]:
        base = self.base
        return {
            "branch": self.branch,
            "incarnation": self.incarnation,
            "parent": self.parent,
            "parent_incarnation": self.parent_incarnation,
            "base": {
                "commit_id": base.commit_id,
                "manifest_path": base.path,
                "sha256": base.sha256,
            }
            if base is not None
            else None,
            "owner": self.owner,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "inherited_marks": dict(self.marks),
            "deleting": self.deleting,
        }

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self | None:
        """Of a head object; None in that of main."""
        if "incarnation" not in raw:
            return None
        base = optional_object(raw, "base")
        for name in ("incarnation", "parent_incarnation"):
            value = optional_text(raw, name, "")
            if not layout.is_incarnation(value) and (value or name == "incarnation"):
                raise FieldError(name, "32 hexadecimal digits", value)
        return cls(
            branch=require_text(raw, "branch"),
            incarnation=require_text(raw, "incarnation"),
            parent=require_text(raw, "parent"),
            base=ManifestLink(
                require_int(base, "commit_id", minimum=1),
                require_path(base, "manifest_path"),
                optional_text(base, "sha256", ""),
            )
            if base is not None
            else None,
            created_at=require_time(raw, "created_at"),
            parent_incarnation=optional_text(raw, "parent_incarnation", ""),
            owner=optional_text(raw, "owner", ""),
            expires_at=optional_time(raw, "expires_at"),
            marks=_marks(raw, "inherited_marks"),
            deleting=optional_bool(raw, "deleting", False),
        )


@dataclass(frozen=True, slots=True)
class Head:
    """`meta/head.json`, or that of a branch: the one pointer that decides what is committed.

    `marks` are the units of work since the last commit that changed nothing (app id -> version).
    `protected`: only merges and updates are committed here. `fork`: of a branch; None: of main.
    """

    commit_id: int
    manifest_path: str | None
    updated_at: str
    runtime_id: str
    log_id: str = ""
    write_id: str = ""
    commit_sha256: str | None = None
    checkpoint: CheckpointRef | None = None
    marks: Mapping[str, UnitVersion] = field(default_factory=dict)
    protected: bool = False
    fork: BranchPoint | None = None

    @property
    def link(self) -> ManifestLink | None:
        """The newest manifest."""
        if self.manifest_path is None:
            return None
        return ManifestLink(self.commit_id, self.manifest_path, self.commit_sha256 or "")

    @property
    def incarnation(self) -> str:
        """Of the branch; empty: main."""
        return self.fork.incarnation if self.fork is not None else ""

    def to_bytes(self) -> bytes:
        """That of an unprotected main says nothing of branches."""
        payload = {f.name: getattr(self, f.name) for f in fields(self)}
        del payload["fork"]
        if not self.protected:
            del payload["protected"]
        if self.fork is not None:
            payload |= self.fork.to_dict()
        return orjson.dumps(payload)

    @classmethod
    def parse(cls, data: bytes, *, key: str) -> Self:
        raw = from_json(data, key=key)
        with parsing(key, "head object"):
            head = cls(
                commit_id=require_int(raw, "commit_id"),
                manifest_path=optional_path(raw, "manifest_path"),
                updated_at=require_time(raw, "updated_at"),
                runtime_id=optional_text(raw, "runtime_id", ""),
                log_id=optional_text(raw, "log_id", ""),
                write_id=optional_text(raw, "write_id", ""),
                commit_sha256=optional_text(raw, "commit_sha256"),
                checkpoint=_checkpoint_ref(raw),
                marks=_marks(raw),
                protected=optional_bool(raw, "protected", False),
                fork=BranchPoint.parse(raw),
            )
            if head.commit_id and not head.manifest_path:
                raise ValueError(f"it names commit {head.commit_id} but no manifest")
            if head.manifest_path is not None and not head.commit_id:
                raise ValueError(f"it names {head.manifest_path} but no commit")
            if head.checkpoint is not None and head.checkpoint.commit_id > head.commit_id:
                raise ValueError("its checkpoint is of a later commit")
            if head.fork is not None:
                _check_fork(head, head.fork)
        return head


class PastVersion(NamedTuple):
    """A schema version that is current no more."""

    schema_version_id: int
    activation_commit_id: int
    superseded_at_commit_id: int


@dataclass(frozen=True, slots=True)
class TypeHead:
    """The commit that last wrote rows of a type, and the schema version that is current.

    A commit that changes the schema and writes no rows, or drops the type, leaves commit and
    manifest as they are: they are what indices are proven by. `empty`: there are no rows yet, of
    no version, and the commit is the one that made the version.
    """

    commit_id: int
    manifest_path: str
    schema_version_id: int = 1
    schema_sha256: str = ""
    activation_commit_id: int = 1
    layout_sha256: str = ""  # of the schema with its field order and ids: how files are written
    manifest_sha256: str = ""
    empty: bool = False
    dropped_commit_id: int | None = None
    renamed_to: str | None = None
    first_version_id: int = 1  # those before are of a type of this name that was dropped
    past_versions: tuple[PastVersion, ...] = ()

    @property
    def link(self) -> ManifestLink:
        return ManifestLink(self.commit_id, self.manifest_path, self.manifest_sha256)

    @property
    def is_dropped(self) -> bool:
        return self.dropped_commit_id is not None

    @property
    def changed_by(self) -> int:
        """The last commit that wrote rows of the type, or gave it a schema version."""
        return max(self.commit_id, self.activation_commit_id)

    def succeeded(self, commit_id: int) -> tuple[PastVersion, ...]:
        """The past versions once another one takes the place of the current one."""
        until = self.dropped_commit_id if self.dropped_commit_id is not None else commit_id
        ended = PastVersion(self.schema_version_id, self.activation_commit_id, until)
        return (*self.past_versions, ended)

    def to_dict(self) -> dict[str, Any]:
        """Without what most types have nothing to say of: all heads are written by all commits."""
        payload: dict[str, Any] = {
            "commit_id": self.commit_id,
            "manifest_path": self.manifest_path,
            "schema_version_id": self.schema_version_id,
            "schema_sha256": self.schema_sha256,
            "activation_commit_id": self.activation_commit_id,
            "layout_sha256": self.layout_sha256,
            "manifest_sha256": self.manifest_sha256,
        }
        if self.empty:
            payload["empty"] = True
        if self.dropped_commit_id is not None:
            payload["dropped_commit_id"] = self.dropped_commit_id
        if self.renamed_to is not None:
            payload["renamed_to"] = self.renamed_to
        if self.first_version_id != 1:
            payload["first_version_id"] = self.first_version_id
        if self.past_versions:
            payload["past_versions"] = [list(past) for past in self.past_versions]
        return payload

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        return cls(
            commit_id=require_int(raw, "commit_id", minimum=1),
            manifest_path=require_path(raw, "manifest_path"),
            schema_version_id=optional_int(raw, "schema_version_id", 1),
            schema_sha256=optional_text(raw, "schema_sha256", ""),
            activation_commit_id=optional_int(raw, "activation_commit_id", 1),
            layout_sha256=optional_text(raw, "layout_sha256", ""),
            manifest_sha256=optional_text(raw, "manifest_sha256", ""),
            empty=raw.get("empty") is True,
            dropped_commit_id=optional_int(raw, "dropped_commit_id"),
            renamed_to=optional_text(raw, "renamed_to"),
            first_version_id=optional_int(raw, "first_version_id", 1),
            past_versions=tuple(_past_version(v) for v in optional_list(raw, "past_versions")),
        )


def _past_version(item: Any) -> PastVersion:
    match item:
        case [int(), int(), int()]:
            return PastVersion(*item)
    raise FieldError("past_versions", "a list of versions with their commits", item)


@dataclass(frozen=True, slots=True)
class BucketRef:
    """An object with the heads of some types: part of the manifest whose commit wrote it."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class BucketTable:
    """Where the type heads are when there are many types; None: no type is in that bucket."""

    types: int
    buckets: tuple[BucketRef | None, ...]

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        refs: list[BucketRef | None] = []
        for item in require_list(raw, "buckets"):
            if item is None:
                refs.append(None)
                continue
            path, digest = item
            if not (isinstance(path, str) and is_key(path) and isinstance(digest, str)):
                raise FieldError("buckets", "a list of paths with hashes", item)
            refs.append(BucketRef(path, digest))
        if not refs:
            raise FieldError("buckets", "a list that is not empty", refs)
        most = len(refs) * TYPES_IN_A_BUCKET
        return cls(require_int(raw, "types", maximum=most), tuple(refs))

    def to_dict(self) -> dict[str, Any]:
        return {"types": self.types, "buckets": [b and [b.path, b.sha256] for b in self.buckets]}


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
            kind=require_choice(raw, "kind", _KINDS),
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
        return cls(acks, _link(raw, "before"))


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
                checkpoint=_checkpoint_ref(raw),
                skip=tuple(ManifestLink.parse(s) for s in optional_objects(raw, "skip")),
                type_heads=parse_type_heads(heads) if heads is not None else None,
                type_head_buckets=BucketTable.parse(buckets) if buckets is not None else None,
                parent_sha256=optional_text(raw, "parent_sha256", ""),
                marks=_marks(raw),
                events_before=_link(raw, "events_before"),
                acks_before=_link(raw, "acks_before"),
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
    manifest_sha256: str = ""

    @property
    def link(self) -> ManifestLink:
        return ManifestLink(self.commit_id, self.manifest_path, self.manifest_sha256)

    def to_list(self) -> list[Any]:
        return [self.commit_id, self.created_at, self.manifest_path, self.manifest_sha256]


@dataclass(frozen=True, slots=True)
class PageRef(CommitRange):
    """Names a page of commit points and proves its content."""

    created_at: str  # of its first commit
    sha256: str

    def to_list(self) -> list[Any]:
        return [self.min_commit_id, self.max_commit_id, self.created_at, self.sha256]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of the log as of a commit, so that a walk over the chain can stop there.

    `commits` are the points of the newest commits; those before are in `pages`, which one
    checkpoint shares with the next.
    """

    commit_id: int
    log_id: str
    entries: Mapping[TypeRef, tuple[Entry, ...]]
    schemas: Mapping[TypeRef, Mapping[int, Mapping[str, Any]]]  # version -> schema record
    idempotency: Mapping[str, Mapping[str, Any]]  # app id -> {version, commit_id or null}
    commits: tuple[CommitPoint, ...]
    pages: tuple[PageRef, ...] = ()

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
                "commits": [point.to_list() for point in self.commits],
                "pages": [page.to_list() for page in self.pages],
            }
        )

    @classmethod
    def parse(cls, data: bytes, *, key: str) -> Self:
        raw = from_json(data, key=key)
        with parsing(key, "checkpoint"):
            entries: dict[TypeRef, tuple[Entry, ...]] = {}
            schemas: dict[TypeRef, dict[int, Mapping[str, Any]]] = {}
            for item in require_objects(raw, "types"):
                ref = require_choice(item, "kind", _KINDS), require_name(item, "type_name")
                entries[ref] = tuple(parse_entry(e) for e in require_objects(item, "entries"))
                versions = require_object(item, "schemas")
                schemas[ref] = {int(v): _registration(versions, v) for v in versions}
            marks = require_object(raw, "idempotency")
            return cls(
                commit_id=require_int(raw, "commit_id"),
                log_id=optional_text(raw, "log_id", ""),
                entries=entries,
                schemas=schemas,
                idempotency={app_id: _applied(marks, app_id) for app_id in marks},
                commits=parse_points(require_list(raw, "commits")),
                pages=tuple(_page_ref(item) for item in optional_list(raw, "pages")),
            )


def parse_entry(raw: Mapping[str, Any]) -> Entry:
    low = require_int(raw, "min_commit_id", minimum=1)
    files = tuple(CommitFile.parse(f) for f in require_objects(raw, "files"))
    if not files:
        raise FieldError("files", "a list that is not empty", [])
    rewrites = optional_int(raw, "rewrites", 0)
    return Entry(low, require_int(raw, "max_commit_id", minimum=low), files, rewrites)


def parse_points(raw: Sequence[Any]) -> tuple[CommitPoint, ...]:
    points = []
    for item in raw:
        match item:
            case [int(), str(), str(path), *rest] if is_key(path) and _are_hashes(rest):
                points.append(CommitPoint(*item))
            case _:
                raise FieldError("commits", "a list of commits with time and manifest", item)
    return tuple(points)


def _are_hashes(rest: Sequence[Any]) -> bool:
    """One, or none where none was known."""
    return len(rest) < 2 and all(isinstance(item, str) for item in rest)


def type_heads_json(heads: Mapping[TypeRef, TypeHead]) -> dict[str, dict[str, Any]]:
    payload: dict[str, dict[str, Any]] = {folder: {} for folder in layout.FOLDERS.values()}
    for (kind, name), head in heads.items():
        payload[layout.FOLDERS[kind]][name] = head.to_dict()
    return payload


def parse_type_heads(raw: Mapping[str, Any]) -> dict[TypeRef, TypeHead]:
    heads: dict[TypeRef, TypeHead] = {}
    for kind, folder in layout.FOLDERS.items():
        by_name = optional_object(raw, folder) or {}
        for name in by_name:
            if not is_name(name):
                raise FieldError(folder, "heads by the names of types", name)
            heads[kind, name] = TypeHead.parse(require_object(by_name, name))
    return heads


def _check_fork(head: Head, fork: BranchPoint) -> None:
    """A branch that is taken for one of another log, or of other commits, would be garbage."""
    if not head.log_id:
        raise ValueError(f"it is of branch {fork.branch!r} and names no log")
    if fork.base_commit > head.commit_id:
        raise ValueError(f"it is at commit {head.commit_id}, before its base {fork.base_commit}")
    if (fork.parent == layout.MAIN) != (not fork.parent_incarnation):
        raise ValueError(f"its parent {fork.parent!r} and its parent_incarnation do not fit")


def _page_ref(item: Any) -> PageRef:
    match item:
        case [int(low), int(high), str(), str(digest)] if 1 <= low <= high and is_key(digest):
            return PageRef(*item)
    raise FieldError("pages", "a list of pages with commits, time and hash", item)


def _checkpoint_ref(raw: Mapping[str, Any]) -> CheckpointRef | None:
    ref = optional_object(raw, "checkpoint")
    return CheckpointRef.parse(ref) if ref else None


def _link(raw: Mapping[str, Any], name: str) -> ManifestLink | None:
    link = optional_object(raw, name)
    return ManifestLink.parse(link) if link else None


def _marks(raw: Mapping[str, Any], name: str = "marks") -> dict[str, UnitVersion]:
    marks = optional_object(raw, name) or {}
    return {app_id: _version(marks, app_id) for app_id in marks}


def _merged(raw: Mapping[str, Any]) -> dict[str, MergePoint]:
    merged = optional_object(raw, "merged") or {}
    return {name: MergePoint.parse(require_object(merged, name)) for name in merged}


def _merged_marks(raw: Mapping[str, Any]) -> dict[str, tuple[UnitVersion, ...]]:
    marks = optional_object(raw, "merged_marks") or {}
    return {
        app_id: tuple(_version({"version": v}, "version") for v in require_list(marks, app_id))
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
    return {"app_id": require_text(raw, "app_id"), "version": _version(raw, "version")}


def _applied(marks: Mapping[str, Any], app_id: str) -> dict[str, Any]:
    mark = require_object(marks, app_id)
    applied = {"version": _version(mark, "version"), "commit_id": optional_int(mark, "commit_id")}
    merged = optional_objects(mark, "merged")
    if not merged:
        return applied
    brought = [
        {"version": _version(each, "version"), "commit_id": optional_int(each, "commit_id")}
        for each in merged
    ]
    return {**applied, "merged": brought}


def _version(raw: Mapping[str, Any], name: str) -> UnitVersion:
    version = raw.get(name)
    if type(version) not in (int, str):
        raise FieldError(name, "an integer or a text", version)
    return version  # type: ignore[return-value]


def _acks(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    acks = optional_objects(raw, "acks")
    for ack in acks:
        for name in ("namespace", "event_id", "handler_id"):
            require_text(ack, name)
    return tuple(acks)


def _schema_changes(raw: Mapping[str, Any]) -> dict[str, Any]:
    registered = optional_objects(raw, "registered")
    for record in registered:
        _check_registration(record)
    dropped = optional_objects(raw, "dropped")
    for record in dropped:
        require_choice(record, "kind", _KINDS)
        require_name(record, "type_name")
        optional_text(record, "renamed_to")
    changes = dict(raw)
    if registered:
        changes["registered"] = registered
    if dropped:
        changes["dropped"] = dropped
    return changes


def _registration(versions: Mapping[str, Any], version: str) -> dict[str, Any]:
    record = require_object(versions, version)
    _check_registration(record)
    return record


def _check_registration(record: Mapping[str, Any]) -> None:
    require_choice(record, "kind", _KINDS)
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
