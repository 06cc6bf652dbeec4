"""What an ingestion tells in its run's log: one line of rows, one of time and what was waited for.

Waiting is told by its cause, so that a slow run says by itself whether Spark was slow, or others
were before it: in the queue of runs, in the pool, with the write lock, or on the head of the log.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import dagster as dg

from ontologia_dagster.dagster_compat import seconds_blocked_by_pool

if TYPE_CHECKING:
    from storage_engine.spark.results import WriteResult

_TOLD_S = 0.05  # less is not waiting


class RunClock:
    """Begun with the step: by then the run has waited for its turn."""

    def __init__(self, context: dg.AssetExecutionContext, pool: str | None) -> None:
        self._began = time.monotonic()
        self._pool = pool
        self._blocked = seconds_blocked_by_pool(context)
        record = context.instance.get_run_record_by_id(context.run.run_id)
        started = record.start_time if record is not None else None
        self._queued = 0.0
        if record is not None and started is not None:
            self._queued = started - record.create_timestamp.timestamp()

    def line(self, result: WriteResult) -> str:
        waits = {
            "in the queue of runs": self._queued,
            f"for a slot of pool {self._pool}": self._blocked,
            "for the write lock": result.lock_wait_ms / 1000,
        }
        told = [f"{s:,.1f} s {where}" for where, s in waits.items() if s >= _TOLD_S]
        if result.attempts > 1:
            told.append(f"and {result.attempts - 1} times for other commits, which came first")
        took = f"took {time.monotonic() - self._began:,.1f} s"
        return f"{took}; waited {', '.join(told)}" if told else f"{took}; waited for nothing"


def row_line(result: WriteResult, keys: Sequence[str] = ()) -> str:
    """Rows by what became of them; the first four always, the others where there are some."""
    counts = (
        ("read", result.rows),
        ("new", result.inserted),
        ("changed", result.updated),
        ("unchanged", result.unchanged),
        ("marked as missing", result.marked),
        ("set aside", result.quarantined),
        ("repeated", result.duplicates),
        ("older than stored", result.stale),
        ("left to another commit", result.kept),
        ("in no partition", result.outside),
    )
    told = [f"{count:,} {name}" for place, (name, count) in enumerate(counts) if count or place < 4]
    if result.already_applied:
        outcome = f"applied before, by {_commit(result)}"
    elif result.commit_id is None:
        outcome = "nothing to write"
    else:
        outcome = _commit(result)
    rows = "" if result.already_applied else f"; rows: {', '.join(told)}"
    return f"{result.type_name}{_extent(keys)}: {outcome}{rows}"


def _commit(result: WriteResult) -> str:
    return f"commit {result.commit_id}" if result.commit_id is not None else "a run without changes"


def _extent(keys: Sequence[str]) -> str:
    if not keys:
        return ""
    if len(keys) == 1:
        return f", partition {keys[0]}"
    return f", {len(keys)} partitions {keys[0]} to {keys[-1]}"
