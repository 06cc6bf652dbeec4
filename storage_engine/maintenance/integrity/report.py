"""What an integrity check found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Progress = Callable[[str, int, int | None], None]  # what, done, of all

_KEPT = 1000  # findings; beyond, they are counted only


@dataclass(frozen=True, slots=True)
class MissingEnds:
    """Relations that name entities which are not there."""

    side: str  # left or right
    type_name: str  # of the entities
    missing: int  # of them
    concerned: int  # relations that name one
    examples: tuple[tuple[str, int], ...] = ()  # keys, and the relations that name each
    keyed: bool = False  # the relations have a key beside their ends


@dataclass(frozen=True, slots=True)
class Finding:
    """One contradiction. `ends` says of `missing_endpoint` what the message does, as data."""

    area: str  # chain, checkpoint, branch, tag, index, file, rows, endpoints, database, models
    reason: str
    message: str
    key: str | None = None
    commit_id: int | None = None
    type_name: str | None = None
    ends: MissingEnds | None = None

    def as_dict(self) -> dict[str, Any]:
        names = (name for name in self.__dataclass_fields__ if name != "ends")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class IntegrityReport:
    """`checked` counts what was looked at: commits, checkpoints, tags, indices, files, bytes, rows.
    `by_type` counts all findings, those that are not kept too."""

    uri: str
    head_commit_id: int = 0
    deep: bool = False
    checked: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    total: int = 0
    by_type: Counter[str | None] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        return self.total == 0

    def note(
        self,
        area: str,
        reason: str,
        message: str,
        *,
        key: str | None = None,
        commit_id: int | None = None,
        type_name: str | None = None,
        ends: MissingEnds | None = None,
    ) -> None:
        self.total += 1
        self.by_type[type_name] += 1
        if len(self.findings) < _KEPT:
            self.findings.append(Finding(area, reason, message, key, commit_id, type_name, ends))

    def as_dict(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "head_commit_id": self.head_commit_id,
            "deep": self.deep,
            "ok": self.ok,
            "checked": dict(self.checked),
            "findings_total": self.total,
            "findings": [finding.as_dict() for finding in self.findings],
        }
