"""Branches of runs that stand: their runs have ended, and nobody has published them.

One of a run that went well and could not publish by itself, as the publication was no part of it
(a backfill, an automation condition that asked for a type alone), is published by a sensor, and so
is one that was merged by somebody who was stopped before he had told of it. One of a run that
failed, or whose publication did, waits for a person, who is told what was found and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING

import dagster as dg

from ontologia_dagster.dagster_compat import retry_of, will_be_retried
from ontologia_dagster.resources.branches import diff_command
from ontologia_dagster.storage.events import PATIENCE, UNFINISHED, is_past
from ontologia_dagster.storage.unpublished import (
    RUN_BRANCHES,
    discard_job_name,
    publication_key,
    publish_job_name,
    publishing,
    runs_about,
    undone_steps,
    working,
)

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine import Branch

_FINDINGS = 10
_WELL = dg.DagsterRunStatus.SUCCESS


@dataclass(frozen=True)
class StandingBranch:
    """A branch, the last run that worked on it, and what has gone wrong there.

    `publishable`: nobody has to look at it. `last`: the last run that was about it, of so many.
    """

    branch: Branch
    run: dg.DagsterRun
    last: dg.DagsterRun
    count: int
    findings: Sequence[str]
    publishable: bool

    @property
    def key(self) -> str:
        return f"{self.branch.name}/{self.branch.incarnation}/{self.last.run_id}"

    def sentence(self, ontology: OntologyResource, storage: str) -> str:
        expiry = f" until {self.branch.expires_at}" if self.branch.expires_at else ""
        problems = f" {'; '.join(self.findings)}." if self.findings else ""
        go_on = "The job"
        if self.run.status != _WELL:
            go_on = "Re-execute the run from failure to go on with it; the job"
        return (
            f"Nothing of this run is on {ontology.home}: its branch {self.branch.name} stands"
            f"{expiry}.{problems} `{diff_command(self.branch.name, ontology.storage_uri)}` shows "
            f"what it has. {go_on} {publish_job_name(storage)} publishes it as it is, "
            f"{discard_job_name(storage)} throws it away"
        )


def standing_branches(
    instance: dg.DagsterInstance, ontology: OntologyResource, storage: str
) -> Iterator[StandingBranch]:
    """Those of this instance's runs."""
    from storage_engine.runtime.branches import branches_of

    with ontology.repository(branch=ontology.home) as repository:
        branches = branches_of(repository).list()
        merged = branches_of(repository).merge_points()
    for branch in branches:
        if branch.parent != ontology.home or not branch.name.startswith(RUN_BRANCHES):
            continue
        about = runs_about(instance, branch.name)
        runs, publishers = working(about), publishing(about)
        if not runs or any(run.status in UNFINISHED for run in (*runs, *publishers)):
            continue
        run, last, count = runs[-1], about[-1], len(about)
        if _is_to_be_retried(instance, last):
            continue
        if publishers:
            # It has tried, and somebody has to look: or it is published, and cannot be deleted.
            if last.status != _WELL:
                yield StandingBranch(
                    branch, run, last, count, list(_findings(instance, last)), False
                )
            continue
        point = merged.get(branch.incarnation)
        if point is not None and point.source == branch.commit_id:
            yield StandingBranch(branch, run, last, count, [], True)
            continue
        findings = list(_findings(instance, last)) if last.status != _WELL else []
        undone = undone_steps(instance, runs, storage)
        if undone and not findings:
            findings = [f"{', '.join(undone)} failed or was never done"]
        planned = _was_planned(instance, last, publication_key(storage))
        publishable = last.status == _WELL and not planned and not undone
        yield StandingBranch(branch, run, last, count, findings, publishable)


def _is_to_be_retried(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """By the daemon, which has not come to it; where it does not for long, it never will."""
    if not will_be_retried(run) or retry_of(run) is not None:
        return False
    record = instance.get_run_record_by_id(run.run_id)
    return record is not None and not is_past(record.update_timestamp.replace(tzinfo=UTC), PATIENCE)


def _was_planned(instance: dg.DagsterInstance, run: dg.DagsterRun, key: dg.AssetKey) -> bool:
    planned = dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED
    events = [entry.dagster_event for entry in instance.all_logs(run.run_id, planned)]
    return any(event is not None and event.asset_key == key for event in events)


def _findings(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Iterator[str]:
    """Checks that failed, and steps that did so by themselves."""
    shown = 0
    for entry in instance.all_logs(run.run_id, dg.DagsterEventType.ASSET_CHECK_EVALUATION):
        event = entry.dagster_event
        if event is None:
            continue
        check = event.asset_check_evaluation_data
        if check.passed or check.severity != dg.AssetCheckSeverity.ERROR:
            continue
        shown += 1
        if shown > _FINDINGS:
            yield "and more"
            return
        what = check.description or "it failed"
        yield f"{check.check_name} of {check.asset_key.to_user_string()}: {what}"
    if not shown:
        for entry in instance.all_logs(run.run_id, dg.DagsterEventType.STEP_FAILURE):
            yield _of_step(entry)


def _of_step(entry: dg.EventLogEntry) -> str:
    """A step that failed, with what we have said about it; other errors are in its run's log."""
    event = entry.dagster_event
    failure = event.step_failure_data.user_failure_data if event is not None else None
    what = f": {failure.description}" if failure is not None and failure.description else ""
    return f"the step {entry.step_key} failed{what}"
