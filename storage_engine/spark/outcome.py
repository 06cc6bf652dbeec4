"""What is said of a write's rows: that some cannot be written, or what would become of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from storage_engine.errors import ValidationError
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


def bad_rows(spec: TypeSpec, bad: int, reports: Sequence[TaskReport]) -> ValidationError:
    """Lists each reason with its count, and three rows."""
    reasons: Counter[str] = Counter()
    examples: list[str] = []
    for report in reports:
        reasons.update(report.reasons)
        examples += report.examples
    listed = "; ".join(f"{what} in {count} rows" for what, count in reasons.most_common())
    shown = " | ".join(examples[:3])
    return ValidationError(
        f"{spec.name}: {bad} rows cannot be written: {listed}. Nothing was published. "
        f"Examples: {shown}. Put the source right, or give on_bad_rows='quarantine'",
        type=spec.name,
    )
