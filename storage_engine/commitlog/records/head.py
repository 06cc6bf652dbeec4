"""`meta/head.json` and the heads of branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import orjson

from storage_engine.commitlog import layout
from storage_engine.commitlog.parsing import (
    FieldError,
    optional_bool,
    optional_object,
    optional_path,
    optional_text,
    optional_time,
    parsing,
    require_int,
    require_path,
    require_text,
    require_time,
)
from storage_engine.commitlog.records.values import (
    CheckpointRef,
    ManifestLink,
    UnitVersion,
    from_json,
    optional_checkpoint_ref,
    parse_marks,
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
            marks=parse_marks(raw, "inherited_marks"),
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
                checkpoint=optional_checkpoint_ref(raw),
                marks=parse_marks(raw),
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


def _check_fork(head: Head, fork: BranchPoint) -> None:
    """A branch that is taken for one of another log, or of other commits, would be garbage."""
    if not head.log_id:
        raise ValueError(f"it is of branch {fork.branch!r} and names no log")
    if fork.base_commit > head.commit_id:
        raise ValueError(f"it is at commit {head.commit_id}, before its base {fork.base_commit}")
    if (fork.parent == layout.MAIN) != (not fork.parent_incarnation):
        raise ValueError(f"its parent {fork.parent!r} and its parent_incarnation do not fit")
