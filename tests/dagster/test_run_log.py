"""The two lines of an ingestion in its run's log: rows, and what was waited for."""

# No `from __future__ import annotations`: Dagster reads the annotations of assets here.

import time

import dagster as dg

from ontologia_dagster.ingestion.run_log import RunClock, row_line
from storage_engine.spark.results import WriteResult

WROTE = WriteResult("Plant", 7, 7, rows=1_200, inserted=3, updated=2, unchanged=1_190, marked=4)


def test_rows_by_what_became_of_them() -> None:
    rows = "1,200 read, 3 new, 2 changed, 1,190 unchanged, 4 marked as missing"
    assert row_line(WROTE) == f"Plant: commit 7; rows: {rows}"
    assert row_line(WROTE, ["a", "b"]).startswith("Plant, 2 partitions a to b: commit 7; ")
    nothing = WriteResult("Plant", None, 6, rows=5, unchanged=3, quarantined=2)
    counts = "5 read, 0 new, 0 changed, 3 unchanged, 2 set aside"
    assert row_line(nothing, ["a"]) == f"Plant, partition a: nothing to write; rows: {counts}"
    again = WriteResult("Plant", 7, 7, already_applied=True)
    assert row_line(again) == "Plant: applied before, by commit 7"


def test_what_was_waited_for() -> None:
    """The lock, other commits, and a pool: Dagster's event log tells when a step was blocked."""
    told: list[str] = []
    waited = WriteResult("Plant", 7, 7, lock_wait_ms=1_500.0, attempts=3)

    @dg.asset(pool="narrow")
    def narrow(context: dg.AssetExecutionContext) -> None:
        told.append(RunClock(context, "narrow").line(waited))
        blocked = "Step blocked by limit for pool narrow"
        context.instance.report_engine_event(blocked, context.run, step_key="narrow")
        time.sleep(0.1)
        told.append(RunClock(context, "narrow").line(WROTE))

    with dg.DagsterInstance.ephemeral() as instance:
        dg.materialize([narrow], instance=instance)
    assert "1.5 s for the write lock, and 2 times for other commits, which came first" in told[0]
    assert "pool" not in told[0]
    assert " s for a slot of pool narrow" in told[1]
