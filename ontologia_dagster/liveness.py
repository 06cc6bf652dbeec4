"""Whether a run that Dagster has not seen end still lives.

Who starts runs on its own machine (Dagster's default) learns of a process that died from the code
server alone. Where that, or the machine, went down with it, the run stays "started" until
`max_runtime_seconds` of the instance has passed, if that is set at all. What waits for such a run
looks here instead of trusting its status.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta

import dagster as dg

UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
# A step that waits for its pool says so every five minutes. A worker is seen on the bus.
PATIENCE = timedelta(minutes=15)


def living_run(
    instance: dg.DagsterInstance,
    job_name: str,
    *,
    location: str | None = None,
    alive: Collection[str] = (),
    dead: Collection[str] = (),
) -> str | None:
    """The id of an unfinished run of a job, of this location where that is known.

    `alive` and `dead` are runs of which others know that they are. One that is dead, or was not
    heard of for long, is reported as failed and gives its pools' slots back: the next run could
    not begin before.
    """
    found = None
    for record in instance.get_run_records(dg.RunsFilter(job_name=job_name, statuses=UNFINISHED)):
        run = record.dagster_run
        origin = run.remote_job_origin
        if location is not None and origin is not None and origin.location_name != location:
            continue
        if run.status is dg.DagsterRunStatus.QUEUED or run.run_id in alive:
            found = found or run.run_id
        elif run.run_id in dead or is_past(_last_sign(instance, record), PATIENCE):
            _give_up(instance, run)
        else:
            found = found or run.run_id
    return found


def is_past(moment: datetime, patience: timedelta) -> bool:
    return datetime.now(UTC) - moment > patience


def _last_sign(instance: dg.DagsterInstance, record: dg.RunRecord) -> datetime:
    """When the run was last heard of: its latest event, or the last change of its status."""
    seen = record.update_timestamp.replace(tzinfo=UTC)
    latest = instance.get_records_for_run(record.dagster_run.run_id, limit=1, ascending=False)
    for event in latest.records:
        seen = max(seen, datetime.fromtimestamp(event.timestamp, UTC))
    return seen


def _give_up(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    instance.report_run_failed(run, "The process of this run is gone: nothing is heard of it.")
    slots = instance.event_log_storage
    if slots.supports_global_concurrency_limits:
        slots.free_concurrency_slots_for_run(run.run_id)
