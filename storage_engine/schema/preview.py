"""What a migration or a drop would do, and what it did: the values that people and programs see.

A token ties what was looked at to what is done: the head, and a hash of the plan. Whoever applies
it gets what the preview showed, or is told what moved since.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from storage_engine.errors import MigrationTokenError
from storage_engine.model.canonical import canonical_json
from storage_engine.schema.diff import SchemaDiff
from storage_engine.schema.history import TypeRef
from storage_engine.schema.migration import MigrationPlan, TypeDrop
from storage_engine.schema.upgraders import UpgraderKey

_TOKEN = re.compile(r"(\d+)-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class MigrationPreview:
    """What `migrate` would do. Nothing was written.

    estimated_rows:            latest rows that would be rewritten, by type
    types_requiring_upgraders: types whose rows do not become the new class by themselves
    types_schema_only:         types without rows to rewrite: new, created anew, or empty
    missing_upgraders:         (type, from version) of those that nobody has written yet
    """

    has_changes: bool
    token: str
    diffs: tuple[SchemaDiff, ...] = ()
    estimated_rows: Mapping[str, int] = field(default_factory=dict)
    types_requiring_upgraders: tuple[str, ...] = ()
    types_schema_only: tuple[str, ...] = ()
    missing_upgraders: tuple[UpgraderKey, ...] = ()

    @property
    def possible(self) -> bool:
        """Whether it could be applied as it stands."""
        return not self.missing_upgraders and all(diff.refusal is None for diff in self.diffs)

    def as_dict(self) -> dict[str, Any]:
        return {
            "has_changes": self.has_changes,
            "possible": self.possible,
            "token": self.token,
            "diffs": [diff.as_dict() for diff in self.diffs],
            "estimated_rows": dict(self.estimated_rows),
            "types_requiring_upgraders": list(self.types_requiring_upgraders),
            "types_schema_only": list(self.types_schema_only),
            "missing_upgraders": [
                {"type_name": name, "from_version": version}
                for name, version in self.missing_upgraders
            ],
        }


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """What a migration did. `commit_id` is None when there was nothing to do."""

    success: bool
    types_migrated: tuple[str, ...] = ()
    rows_migrated: Mapping[str, int] = field(default_factory=dict)
    new_schema_versions: Mapping[str, int] = field(default_factory=dict)
    duration_s: float = 0.0
    commit_id: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "success": self.success,
            "types_migrated": list(self.types_migrated),
            "rows_migrated": dict(self.rows_migrated),
            "new_schema_versions": dict(self.new_schema_versions),
            "duration_s": round(self.duration_s, 3),
            "commit_id": self.commit_id,
        }


@dataclass(frozen=True, slots=True)
class DropPreview:
    """What a drop would end. `rows` are the latest ones of each type, `dependents` those relation
    types that go with it. `past_of`: the type has another name by now, under which its rows are
    read as history."""

    drops: tuple[TypeDrop, ...]
    token: str
    rows: Mapping[TypeRef, int] = field(default_factory=dict)
    dependents: tuple[str, ...] = ()
    past_of: str | None = None

    def as_dict(self) -> dict[str, Any]:
        past = {"past_of": self.past_of} if self.past_of is not None else {}
        return past | {
            "token": self.token,
            "types": [
                {
                    "type_kind": drop.kind,
                    "type_name": drop.type_name,
                    "schema_version_id": drop.version,
                    "rows": self.rows.get(drop.ref, 0),
                    "purge": drop.purge,
                }
                for drop in self.drops
            ],
            "dependents": list(self.dependents),
        }


def migration_token(head: int, plan: MigrationPlan) -> str:
    return f"{head}-{plan.sha256[:16]}"


def drop_token(head: int, drops: Sequence[TypeDrop]) -> str:
    plan = [[*drop.ref, drop.version, drop.schema_sha256, drop.purge] for drop in drops]
    return f"{head}-{hashlib.sha256(canonical_json(plan).encode()).hexdigest()[:16]}"


def check_token(given: str, expected: str, *, moved: str, command: str) -> None:
    """MigrationTokenError says what is different. `moved` tells what commits since the preview
    have written, `command` how to get a new one."""
    if given == expected:
        return
    parts = _TOKEN.fullmatch(given)
    if parts is None:
        raise MigrationTokenError(
            f"{given!r} is not a token: take the one that the preview shows ({command})"
        )
    head = expected.partition("-")[0]
    if parts[1] != head:
        what = f"head moved from commit {parts[1]} to {head} since the preview{moved}"
    else:
        what = (
            "the plan is another one than in the preview, though the storage is the same: the "
            "declared classes or the upgraders differ"
        )
    raise MigrationTokenError(
        f"{what}; nothing was published. Look at a new preview ({command}) and apply its token"
    )
