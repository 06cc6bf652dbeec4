"""Telling people: one hook, called when runs fail, checks fail, letters die or work piles up.

The hook posts JSON to a webhook. Its address is a secret (whoever has it can post), so it is a
typed variable and appears in no message. A webhook that does not answer fails the sensor's tick,
visibly, and what it was not told is told again; what it was told is not.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from ontologia_dagster.dagster_compat import FixedResource, latest_check_records
from ontologia_dagster.declaration import checks_of
from ontologia_dagster.resources.branches import AUDITED, diff_command
from ontologia_dagster.resources.ontology import report_failures
from ontologia_dagster.storage import dead_letters, events
from ontologia_dagster.storage.standing import standing_branches
from storage_engine.config import duration
from storage_engine.wording import counted

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.events.protocol import DeadLetter
    from storage_engine.runtime.handlers import Handler

_INTERVAL_S = 30
_TELLING_S = 20.0  # of a tick, which Dagster ends after 60; the rest is told by the next one
_NAMED = 20  # events in an alert


@dataclass(frozen=True)
class Alert:
    """One thing that somebody should know. `key` is the same as long as it is the same thing; a
    higher `mark` says that there is more of it."""

    key: str
    title: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    mark: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "title": self.title,
            "text": self.text,
            "facts": {name: str(value) for name, value in self.facts.items()},
        }


class Notifier(FixedResource, dg.ConfigurableResource):  # type: ignore[type-arg]
    """Posts alerts to a webhook. Subclass it and override `send` to reach anything else."""

    webhook_url: str | None = Field(
        default=None, description="From a variable: dg.EnvVar('ONTOLOGIA_WEBHOOK_URL')"
    )
    timeout_s: float = 10.0

    def notify(self, alert: Alert) -> bool:
        """Whether somebody was told; False when nobody is to be."""
        if not self.webhook_url:
            return False
        self.send(alert.as_dict())
        return True

    def send(self, payload: Mapping[str, Any]) -> None:
        assert self.webhook_url is not None
        scheme = self.webhook_url.partition(":")[0]
        if scheme not in {"http", "https"}:
            raise RuntimeError("the webhook's address must begin with http:// or https://")
        request = urllib.request.Request(  # noqa: S310 - the scheme was looked at
            self.webhook_url,
            data=json.dumps(payload).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s):  # noqa: S310
                return
        except urllib.error.HTTPError as error:
            problem = f"answered {error.code}"
        except OSError as error:
            problem = f"did not answer ({type(error).__name__})"
        raise RuntimeError(
            f"the webhook {problem}; the alert {payload['title']!r} will be repeated"
        )


def failed_runs_sensor(
    *, status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED
) -> dg.SensorDefinition:
    @dg.run_failure_sensor(
        name="ontologia_failed_runs",
        default_status=status,
        description="Tells the notifier of every run that fails.",
    )
    def failed_runs(context: dg.RunFailureSensorContext, notifier: Notifier) -> None:
        run = context.dagster_run
        notifier.notify(
            Alert(
                key=f"run/{run.run_id}",
                title=f"{run.job_name} failed",
                text=context.failure_event.message or "the run failed",
                facts={"run_id": run.run_id, "job": run.job_name},
            )
        )

    return failed_runs


def conditions_sensor(
    storage: str,
    *,
    handlers: "Sequence[Handler[Any]]" = (),
    oldest_event: str = "15m",
    index_lag: int = 100,
    status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """One alert when a condition begins; the next when it has ended and begins again."""

    @dg.sensor(
        name=f"{storage}_conditions",
        minimum_interval_seconds=_INTERVAL_S,
        required_resource_keys={storage, "notifier"},
        default_status=status,
        description="Tells the notifier of failed checks, dead letters and lag.",
    )
    def conditions(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        ontology: OntologyResource = getattr(context.resources, storage)
        before = _parse_cursor(context.cursor)
        unclear, failed = _failed_checks(context, storage)
        with report_failures():
            alerts = [
                *failed,
                *_bus_alerts(ontology, storage, handlers, oldest_event),
                *_lag_alerts(ontology, storage, index_lag),
                *_branch_alerts(context.instance, ontology, storage),
            ]
        new = [
            alert for alert in alerts if alert.key not in before or alert.mark > before[alert.key]
        ]
        told = _tell(context, new)
        # What has ended is forgotten; a check that runs again has not ended.
        keys = {alert.key for alert in alerts} | unclear
        now = {key: mark for key, mark in before.items() if key in keys}
        now |= {alert.key: alert.mark for alert in new[:told]}
        summary = f"{len(alerts)} conditions hold, {len(new)} of them new, {told} of these told"
        return dg.SensorResult(skip_reason=summary, cursor=json.dumps(now, sort_keys=True))

    return conditions


def _parse_cursor(cursor: str | None) -> dict[str, str]:
    """What holds and was told, with how much of it there was. A cursor that nobody can read says
    nothing: what holds is told again."""
    try:
        marks = json.loads(cursor) if cursor else {}
    except ValueError:
        return {}
    if isinstance(marks, list):  # of an earlier release
        marks = dict.fromkeys(map(str, marks), "")
    return {key: str(mark) for key, mark in marks.items()} if isinstance(marks, dict) else {}


def _tell(context: dg.SensorEvaluationContext, alerts: Sequence[Alert]) -> int:
    """How many were told. A hook that fails ends the tick only when nothing was told in it: what
    was told could not be kept otherwise."""
    notifier: Notifier = context.resources.notifier
    until = time.monotonic() + _TELLING_S
    for told, alert in enumerate(alerts):
        if told and time.monotonic() > until:
            return told
        try:
            notifier.notify(alert)
        except Exception as error:
            if not told:
                raise
            context.log.error("%s", error)
            return told
    return len(alerts)


def _failed_checks(
    context: dg.SensorEvaluationContext, storage: str
) -> tuple[set[str], list[Alert]]:
    """Keys of checks whose result is not there (again) yet, and what has failed."""
    assert context.repository_def is not None
    unclear: set[str] = set()
    failed: list[Alert] = []
    # Dead letters are told by the bus itself, which knows who gave up on what.
    keys = [
        key
        for key in checks_of(context.repository_def, storage)
        if key.name != dead_letters.NO_DEAD_LETTERS
    ]
    for key, record in latest_check_records(context.instance, keys).items():
        asset = key.asset_key.to_user_string()
        name = f"check/{asset}/{key.name}"
        evaluation = record.evaluation
        if not isinstance(evaluation, dg.AssetCheckEvaluation):  # it is planned, or runs
            unclear.add(name)
        elif not evaluation.passed:
            failed.append(
                Alert(
                    key=name,
                    title=f"{key.name} of {asset} failed",
                    text=evaluation.description or "the check failed",
                    facts={"asset": asset, "check": key.name, "run_id": record.run_id},
                )
            )
    return unclear, failed


def _bus_alerts(
    ontology: "OntologyResource",
    storage: str,
    handlers: "Sequence[Handler[Any]]",
    oldest_event: str,
) -> Iterator[Alert]:
    if ontology.branch is not None:
        return  # the bus is main's
    with ontology.bus() as store:
        counts = store.count_dead_letters(ontology.namespace)
        letters = {
            handler: store.list_dead_letters(ontology.namespace, _NAMED, handler_id=handler)
            for handler in sorted(counts)
        }
        seen = None
        if handlers:
            subscribed = [handler.subscription() for handler in handlers]
            seen = store.peek(ontology.namespace, subscribed)
    for handler, newest in letters.items():
        if newest:
            yield _letters_alert(storage, ontology.location, newest, counts[handler])
    if seen is not None and events.age_s(seen.oldest) > duration(oldest_event).total_seconds():
        yield Alert(
            key=f"event_lag/{storage}",
            title="events wait too long",
            text=events.describe(seen),
            facts={"pending": seen.pending, "due": seen.due > 0, "limit": oldest_event},
        )


def _letters_alert(
    storage: str, location: str, letters: "Sequence[DeadLetter]", count: int
) -> Alert:
    """One for all that a handler gave up on, of which these are the newest; told again when there
    is a newer one."""
    newest = letters[0]
    handler = newest.handler_id
    what = newest.event_type if count == 1 else f"{count} events"
    config = dead_letters.redrive_config(storage, handler, newest.event_id if count == 1 else None)
    return Alert(
        key=f"dead_letters/{storage}/{handler}",
        title=f"{handler} gave up on {what}",
        text=dead_letters.describe_letters(letters, count),
        facts={
            "dead_letters": count,
            "event_ids": ", ".join(letter.event_id for letter in letters),
            "attempts": newest.attempts,
            "error": newest.last_error or "none was kept",
            "redrive": dead_letters.redrive_link(storage, location, config),
        },
        mark=f"{newest.failed_at}/{newest.event_id}",
    )


def _lag_alerts(ontology: "OntologyResource", storage: str, limit: int) -> Iterator[Alert]:
    from storage_engine.maintenance.metrics import index_lags

    with ontology.repository() as repository:
        lags = index_lags(repository)
    for name, lag in lags.items():
        if lag > limit:
            yield Alert(
                key=f"index_lag/{storage}/{name}",
                title=f"the index of {name} is {counted(lag, 'commit')} behind",
                text="reads stay right, but each reads more of the log; run the repair job",
                facts={"type": name, "lag": lag},
            )


def _branch_alerts(
    instance: dg.DagsterInstance, ontology: "OntologyResource", storage: str
) -> Iterator[Alert]:
    """Branches of runs that failed: somebody has to look at each."""
    if ontology.publish != AUDITED:
        return
    for standing in standing_branches(instance, ontology, storage):
        if standing.publishable:
            continue
        name = standing.branch.name
        yield Alert(
            key=f"branch/{storage}/{name}",
            title=f"{standing.run.job_name} was not published",
            text=standing.sentence(ontology, storage),
            facts={
                "branch": name,
                "run_id": standing.run.run_id,
                "diff": diff_command(name, ontology.storage_uri),
                "findings": "; ".join(standing.findings) or "none was kept",
                "expires_at": standing.branch.expires_at or "never",
            },
            mark=f"{standing.count:06}",
        )
