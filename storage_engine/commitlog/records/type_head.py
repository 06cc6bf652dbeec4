"""For each type the commit that last wrote it and its schema version, in a manifest or, where there
are many types, in buckets beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from storage_engine.commitlog import layout
from storage_engine.commitlog.parsing import (
    FieldError,
    is_name,
    optional_int,
    optional_list,
    optional_object,
    optional_text,
    require_int,
    require_list,
    require_object,
    require_path,
)
from storage_engine.commitlog.records.values import ManifestLink, TypeRef
from storage_engine.objectstore.protocol import is_key

TYPES_IN_A_BUCKET = 64  # of type heads, on average and at most


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
