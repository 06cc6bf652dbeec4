"""What is said of a write's rows: that some cannot be written, or what would become of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from storage_engine.errors import ValidationError
from storage_engine.model.spec import TypeSpec
from storage_engine.spark.reconcile import Reconciled
from storage_engine.spark.results import WriteResult
from storage_engine.spark.staging import TaskReport

if TYPE_CHECKING:
    from storage_engine.spark.publishing import WriteOptions


def previewed(
    spec: TypeSpec,
    type_commit_id: int,
    found: Reconciled,
    reports: Sequence[TaskReport],
    options: WriteOptions,
) -> WriteResult:
    """What a rehearsal has counted. Bad rows are told as quarantined; `problem` says if they, or
    identities that appear twice, would stop the write."""
    reasons: Counter[str] = Counter()
    for report in reports:
        reasons.update(report.reasons)
    parts = [part for report in reports for part in report.parts]
    counts = found.counts
    bad = sum(report.bad for report in reports)
    problem = None
    if bad and options.on_bad_rows == "fail":
        problem = str(bad_rows(spec, bad, reports))
    elif found.repeated and options.order_by is None:
        problem = (
            f"{spec.name}: {found.repeated} rows have an identity that another one has; make them "
            "unique, or name the column that says which row is the latest (order_by)"
        )
    return WriteResult(
        type_name=spec.name,
        commit_id=None,
        type_commit_id=type_commit_id,
        rows=counts.rows,
        inserted=sum(part["inserted"] for part in parts),
        updated=sum(part["updated"] for part in parts),
        unchanged=counts.unchanged,
        quarantined=bad,
        duplicates=counts.duplicates,
        stale=counts.stale,
        reasons=dict(reasons),
        problem=problem,
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
