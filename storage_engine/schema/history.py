"""The schema versions that a type has had, as a storage's log tells them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from storage_engine.model.spec import TypeSpec

TypeRef = tuple[str, str]  # kind, name


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """One version: rows of it were written from its activation until another took its place, or
    the type was dropped.

    A name can be given to several types, one after the other, so these are facts of versions:
    `renamed_from` is the type whose rows it took over; `purged_upto` the commit that ended the type
    whose rows were purged, these among them, and None while they are there.
    """

    version: int
    spec: TypeSpec
    schema_sha256: str
    activation_commit_id: int
    superseded_at_commit_id: int | None = None
    created_at: str | None = None
    renamed_from: str | None = None
    purged_upto: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema_version_id": self.version,
            "schema_sha256": self.schema_sha256,
            "activation_commit_id": self.activation_commit_id,
            "superseded_at_commit_id": self.superseded_at_commit_id,
            "created_at": self.created_at,
            "schema": self.spec.schema_dict(),
        }


@dataclass(frozen=True, slots=True)
class TypeHistory:
    """All versions of a type, oldest first.

    A dropped type keeps them, and has none that is current.
    """

    kind: str
    name: str
    versions: tuple[SchemaVersion, ...]
    dropped_commit_id: int | None = None
    renamed_to: str | None = None

    @property
    def ref(self) -> TypeRef:
        return self.kind, self.name

    @property
    def last(self) -> SchemaVersion:
        return self.versions[-1]

    @property
    def current(self) -> SchemaVersion | None:
        return self.last if self.dropped_commit_id is None else None

    @property
    def unbroken(self) -> bool:
        """Whether all rows that were ever written under this name are of one type, which took over
        no rows of another: it was not renamed, and none of this name was dropped before."""
        renamed = any(version.renamed_from is not None for version in self.versions)
        joined = all(
            before.superseded_at_commit_id == after.activation_commit_id
            for before, after in pairwise(self.versions)
        )
        return joined and not renamed

    @property
    def purged(self) -> bool:
        """Whether it has ended, and its rows are gone."""
        return self.current is None and self.last.purged_upto is not None

    @property
    def renamed_from(self) -> str | None:
        """The type whose rows it took over when it began: another one of the name, before it was
        dropped, may have taken over others."""
        first = self.last
        for earlier in reversed(self.versions[:-1]):
            if earlier.superseded_at_commit_id != first.activation_commit_id:
                break
            first = earlier
        return first.renamed_from

    @property
    def highest_field_id(self) -> int:
        """Of all versions: ids are never used again."""
        return max((f.field_id for v in self.versions for f in v.spec.fields), default=0)

    def version(self, number: int) -> SchemaVersion | None:
        return next((v for v in self.versions if v.version == number), None)

    def active_at(self, commit_id: int) -> SchemaVersion | None:
        """The version that was current at a commit."""
        for version in reversed(self.versions):
            if version.activation_commit_id <= commit_id:
                until = version.superseded_at_commit_id
                return version if until is None or commit_id < until else None
        return None

    def as_dict(self) -> dict[str, Any]:
        return {
            "type_kind": self.kind,
            "type_name": self.name,
            "current_schema_version_id": self.current.version if self.current else None,
            "dropped_commit_id": self.dropped_commit_id,
            "purged": self.purged,
            "renamed_to": self.renamed_to,
            "renamed_from": self.renamed_from,
            "versions": [version.as_dict() for version in self.versions],
        }
