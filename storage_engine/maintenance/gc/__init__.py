"""Garbage collection: plan what nothing needs any more, fence it off, delete it."""

from storage_engine.maintenance.gc.plan import GarbageObject, GcPlan, plan_gc
from storage_engine.maintenance.gc.sweep import GcReport, sweep

__all__ = ["GarbageObject", "GcPlan", "GcReport", "plan_gc", "sweep"]
