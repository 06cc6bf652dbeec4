"""What a dry run says: what would become of the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from storage_engine.model.spec import TypeSpec
from storage_engine.spark.reconcile import Counts
from storage_engine.spark.results import WriteResult
from storage_engine.spark.staging import TaskReport


def previewed(
    spec: TypeSpec, type_commit_id: int, counts: Counts, reports: Sequence[TaskReport]
) -> WriteResult:
    """What a rehearsal has counted. Bad rows are told as quarantined, whether they would be or
    would stop the write: `reasons` says why."""
    reasons: Counter[str] = Counter()
    for report in reports:
        reasons.update(report.reasons)
    parts = [part for report in reports for part in report.parts]
    return WriteResult(
        type_name=spec.name,
        commit_id=None,
        type_commit_id=type_commit_id,
        rows=counts.rows or sum(report.rows for report in reports),
        inserted=sum(part["inserted"] for part in parts),
        updated=sum(part["updated"] for part in parts),
        unchanged=counts.unchanged,
        quarantined=sum(report.bad for report in reports),
        duplicates=counts.duplicates,
        stale=counts.stale,
        reasons=dict(reasons),
    )
