"""The state of the log as of a commit: the entries of each type, schemas, marks, commit points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from storage_engine.commitlog.parsing import (
    FieldError,
    optional_int,
    optional_list,
    optional_objects,
    optional_text,
    parsing,
    require_choice,
    require_int,
    require_list,
    require_name,
    require_object,
    require_objects,
)
from storage_engine.commitlog.ranges import CommitRange
from storage_engine.commitlog.records.manifest import CommitFile, Manifest, check_registration
from storage_engine.commitlog.records.values import (
    KINDS,
    ManifestLink,
    TypeRef,
    from_json,
    parse_version,
    to_json,
)
from storage_engine.objectstore.protocol import is_key


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
                ref = require_choice(item, "kind", KINDS), require_name(item, "type_name")
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


def _page_ref(item: Any) -> PageRef:
    match item:
        case [int(low), int(high), str(), str(digest)] if 1 <= low <= high and is_key(digest):
            return PageRef(*item)
    raise FieldError("pages", "a list of pages with commits, time and hash", item)


def _applied(marks: Mapping[str, Any], app_id: str) -> dict[str, Any]:
    mark = require_object(marks, app_id)
    applied = {
        "version": parse_version(mark, "version"),
        "commit_id": optional_int(mark, "commit_id"),
    }
    merged = optional_objects(mark, "merged")
    if not merged:
        return applied
    brought = [
        {"version": parse_version(each, "version"), "commit_id": optional_int(each, "commit_id")}
        for each in merged
    ]
    return {**applied, "merged": brought}


def _registration(versions: Mapping[str, Any], version: str) -> dict[str, Any]:
    record = require_object(versions, version)
    check_registration(record)
    return record
