"""What a Spark write reports, while it runs and when it is done. Knows no Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Stage = Literal["reconcile", "stage", "publish"]


@dataclass(frozen=True, slots=True)
class WriteProgress:
    """How far a write has come: tasks done of those that Spark knows of so far."""

    stage: Stage
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What became of the rows of one write."""

    type_name: str
    commit_id: int | None  # None: nothing differed, nothing published
    type_commit_id: int  # the commit that last changed the type; 0: never written
    already_applied: bool = (
        False  # the unit of work had been done, by commit_id if it changed anything
    )
    rows: int = 0  # of the input
    outside: int = 0  # rows of the source that the order asked to count
    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    marked: int = 0  # stored rows that the extract lacks, marked as the order says
    quarantined: int = 0
    duplicates: int = 0  # left out for a greater order value of the same identity
    stale: int = 0  # left out for a greater order value in the storage
    kept: int = 0  # changed by another commit while this job ran: left as that commit made them
    files: int = 0
    bytes: int = 0
    stored_bytes: int = 0  # of the files with the type's latest rows, before the write
    stored_bytes_read: int = 0  # of these, to tell what differs: all where columns are not told
    attempts: int = 0
    lock_wait_ms: float = 0.0
    requests: Mapping[str, int] = field(default_factory=dict)  # of the driver
    quarantine: str | None = None
    reasons: Mapping[str, int] = field(default_factory=dict)  # of quarantined rows
    examples: Mapping[str, Sequence[str]] = field(default_factory=dict)  # identities, by reason
    # By value of the field that the order counts by: rows inserted, updated and unchanged.
    tally: Mapping[str, Sequence[int]] | None = None
    drift: Sequence[str] = ()
    notes: Sequence[str] = ()  # what may surprise whoever wrote it, as in `last_commit.notes`
    problem: str | None = None  # of a dry run: what would stop the write

    def as_dict(self) -> dict[str, Any]:
        made = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            **made,
            "requests": dict(self.requests),
            "reasons": dict(self.reasons),
            "examples": {reason: list(some) for reason, some in self.examples.items()},
            "drift": list(self.drift),
            "notes": list(self.notes),
        }
