"""Compaction: many small files of a type become few large ones, and no read can tell.

What carries it out is loaded at first use: sessions load this package to see what is due.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from storage_engine.maintenance.compaction.plan import (
    CompactionPlan,
    CompactionPolicy,
    RunPlan,
    TypeCompaction,
    Verdict,
    plan_compaction,
)

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("storage_engine.maintenance.compaction.run"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
