"""Compaction: many small files of a type become few large ones, and no read can tell."""

from storage_engine.maintenance.compaction.plan import (
    CompactionPlan,
    CompactionPolicy,
    RunPlan,
    TypeCompaction,
    Verdict,
    plan_compaction,
)
from storage_engine.maintenance.compaction.run import (
    CompactionProgress,
    CompactionReport,
    RunReport,
    compact,
)

__all__ = [
    "CompactionPlan",
    "CompactionPolicy",
    "CompactionProgress",
    "CompactionReport",
    "RunPlan",
    "RunReport",
    "TypeCompaction",
    "Verdict",
    "compact",
    "plan_compaction",
]
