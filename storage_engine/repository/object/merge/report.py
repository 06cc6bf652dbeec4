"""What a merge or an update did, or would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from storage_engine.errors import MergeConflictError

ConflictKind = Literal["divergent_insert", "divergent_update", "broken_expectation", "schema"]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conflict:
    """What both sides changed, each in its own way.

    Rows are by field name, `ours` of the branch that is merged into; None: there is none. `fields`
    are those in which the two differ, or that a broken rule is about. A conflict of schemas
    concerns the type as a whole.
    """

    kind: ConflictKind
    type_kind: str
    type_name: str
    message: str
    identity: tuple[str, ...] = ()
    base: Row | None = None
    ours: Row | None = None
    theirs: Row | None = None
    fields: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "conflict": self.kind,
            "kind": self.type_kind,
            "type_name": self.type_name,
            "identity": list(self.identity),
            "fields": list(self.fields),
            "base": dict(self.base) if self.base is not None else None,
            "ours": dict(self.ours) if self.ours is not None else None,
            "theirs": dict(self.theirs) if self.theirs is not None else None,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class TypeMerge:
    """What comes of one type. `adopted`: its files are taken as they are, without a copy."""

    kind: str
    type_name: str
    inserted: int = 0
    updated: int = 0
    resolved: int = 0  # conflicts that a policy decided
    adopted: bool = False
    schema: str = ""  # registered, migrated or dropped with it

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "type_name": self.type_name,
            "inserted": self.inserted,
            "updated": self.updated,
            "resolved": self.resolved,
            "adopted": self.adopted,
            "schema": self.schema or None,
        }


@dataclass(frozen=True, slots=True)
class MergeReport:
    """`commit_id` is None when nothing was committed: there was nothing to bring, or only a look
    was asked for (`dry_run`)."""

    source: str
    target: str
    source_commit_id: int
    commit_id: int | None
    types: Sequence[TypeMerge] = ()
    conflicts: Sequence[Conflict] = ()
    events: int = 0
    dry_run: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to bring."""
        return not (self.types or self.conflicts or self.events)

    def require(self) -> None:
        """MergeConflictError if there are conflicts."""
        if self.conflicts:
            conflicts = [conflict.as_dict() for conflict in self.conflicts]
            raise MergeConflictError(self.source, self.target, conflicts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "source_commit_id": self.source_commit_id,
            "commit_id": self.commit_id,
            "dry_run": self.dry_run,
            "types": [merged.as_dict() for merged in self.types],
            "conflicts": [conflict.as_dict() for conflict in self.conflicts],
            "events": self.events,
        }
