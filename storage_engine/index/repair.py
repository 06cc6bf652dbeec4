"""Makes the indices what the log says: under the write lock, without touching head.

Idempotent: an index without findings is left alone, so a second run writes nothing. Every write
is conditional on the version that was examined and follows a guard of the lease, so a writer that
was here meanwhile is never overwritten; after a crash the indices are a mix of old and repaired
ones, each right by itself, and the next run does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from storage_engine.commitlog.chain import HeadVersion
from storage_engine.commitlog.json_object import JsonVersion
from storage_engine.commitlog.lock import Lease, Tenure, WriteLock
from storage_engine.errors import HeadMismatchError
from storage_engine.index.record import TypeIndex
from storage_engine.index.verify import Examination, IndexReport, IndexVerifier

_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class TypeRepair:
    """What repair does to one index."""

    kind: str
    type_name: str
    reasons: tuple[str, ...]
    watermark: tuple[int, int]  # before, after
    entries: tuple[int, int]  # before, after

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "type_name": self.type_name,
            "reasons": list(self.reasons),
            "max_indexed_commit": {"before": self.watermark[0], "after": self.watermark[1]},
            "entries": {"before": self.entries[0], "after": self.entries[1]},
        }


@dataclass(frozen=True, slots=True)
class Repair:
    """The index writes that are needed at `repair_head`, or were made when `applied`."""

    repair_head: int
    types: tuple[TypeRepair, ...]
    checked: int
    applied: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "repair_head": self.repair_head,
            "applied": self.applied,
            "checked": self.checked,
            "types": [repair.as_dict() for repair in self.types],
        }


def plan_repair(verifier: IndexVerifier) -> Repair:
    """What `apply_repair` would do now. Writes nothing, takes no lock."""
    return _described(verifier.verify(), applied=False)


def apply_repair(verifier: IndexVerifier, lock: WriteLock) -> Repair:
    """Rewrite every index that has findings. Raises LockContentionError, LeaseExpiredError, and
    HeadMismatchError when head moved under the lock at every attempt."""
    for _ in range(_ATTEMPTS):
        with Tenure() as tenure, tenure:
            lease = lock.acquire(tenure)
            version = verifier.chain.read_head()
            report = verifier.examine(version.head)
            broken = [examined for examined in report.types if examined.findings]
            if not broken or write_indices(verifier, lease, version, broken):
                return _described(report, applied=True)
    raise HeadMismatchError(_ATTEMPTS)


def write_indices(
    verifier: IndexVerifier,
    lease: Lease,
    version: HeadVersion,
    examined: Sequence[Examination],
) -> bool:
    """Write what the examinations say is right; False, with nothing written, when head moved."""
    lease.guard()
    if verifier.chain.read_head().etag != version.etag:
        return False

    def write(examined_type: Examination) -> None:
        def change(index: TypeIndex) -> TypeIndex | None:
            lease.guard()
            ahead = index.max_indexed_commit > version.head.commit_id
            if ahead and verifier.chain.read_head().etag != version.etag:
                return None  # a later writer has been here, and filled its gap from the log
            if index == examined_type.version.value:
                return examined_type.correct
            # Another writer was faster: look again at what it left.
            again = verifier.examine_type(version.head, examined_type.ref, JsonVersion(index))
            return again.correct if again.findings else None

        verifier.indices.update(examined_type.ref, log_id=version.head.log_id, change=change)

    verifier.chain.parallel.map(write, examined)
    return True


def _described(report: IndexReport, *, applied: bool) -> Repair:
    repairs = [
        TypeRepair(
            *examined.ref,
            reasons=tuple(dict.fromkeys(f.reason for f in examined.findings)),
            watermark=(
                examined.version.value.max_indexed_commit,
                examined.correct.max_indexed_commit,
            ),
            entries=(len(examined.version.value.entries), len(examined.correct.entries)),
        )
        for examined in report.types
        if examined.findings
    ]
    return Repair(report.head_commit_id, tuple(repairs), len(report.types), applied)
