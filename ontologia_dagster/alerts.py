"""Telling people: one hook, called when runs fail, checks fail, letters die or work piles up.

The hook posts JSON to a webhook. Its address is a secret (whoever has it can post), so it is a
typed variable and appears in no message. A webhook that does not answer fails the sensor's tick,
visibly, and what it was told about is told again.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from ontologia_dagster import bus
from ontologia_dagster.durations import duration
from ontologia_dagster.failures import reported_failures

if TYPE_CHECKING:
    from ontologia_dagster.resources import OntologyResource

_INTERVAL_S = 30


@dataclass(frozen=True)
class Alert:
    """One thing that somebody should know. `key` is the same as long as it is the same thing."""

    key: str
    title: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "title": self.title,
            "text": self.text,
            "facts": {name: str(value) for name, value in self.facts.items()},
        }


class Notifier(dg.ConfigurableResource):  # type: ignore[type-arg]
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
            said = f"answered {error.code}"
        except OSError as error:
            said = f"did not answer ({type(error).__name__})"
        raise RuntimeError(f"the webhook {said}; the alert {payload['title']!r} will be repeated")


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
    handlers: Sequence[str] = (),
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
        notifier: Notifier = context.resources.notifier
        with reported_failures():
            found = [
                *_failed_checks(context),
                *_bus_alerts(ontology, storage, handlers, oldest_event),
                *_lag_alerts(ontology, index_lag),
            ]
        before = set(json.loads(context.cursor)) if context.cursor else set()
        new = [alert for alert in found if alert.key not in before]
        for alert in new:
            notifier.notify(alert)
        said = f"{len(found)} conditions hold, {len(new)} of them new"
        return dg.SensorResult(
            skip_reason=said, cursor=json.dumps(sorted(alert.key for alert in found))
        )

    return conditions


def _failed_checks(context: dg.SensorEvaluationContext) -> Iterator[Alert]:
    assert context.repository_def is not None
    keys = sorted(context.repository_def.asset_graph.asset_check_keys)
    for key in keys:
        record = context.instance.get_latest_asset_check_evaluation_record(key)
        if record is None or record.evaluation is None or record.evaluation.passed:
            continue
        evaluation = record.evaluation
        asset = key.asset_key.to_user_string()
        yield Alert(
            key=f"check/{asset}/{key.name}",
            title=f"{key.name} of {asset} failed",
            text=evaluation.description or "the check failed",
            facts={"asset": asset, "check": key.name, "run_id": record.run_id},
        )


def _bus_alerts(
    ontology: "OntologyResource", storage: str, handlers: Sequence[str], oldest_event: str
) -> Iterator[Alert]:
    with ontology.bus() as store:
        letters = store.list_dead_letters(ontology.namespace, 1_000)
        seen = None
        if handlers:
            subscriptions = [handler.subscription() for handler in bus.load_handlers(handlers)]
            seen = store.backlog(ontology.namespace, subscriptions, 1_000)
    for letter in letters:
        yield Alert(
            key=f"dead_letter/{storage}/{letter.event_id}/{letter.handler_id}",
            title=f"{letter.handler_id} gave up on {letter.event_type}",
            text=letter.last_error or "no error was kept",
            facts={"event_id": letter.event_id, "attempts": letter.attempts},
        )
    if seen is not None and bus.age_s(seen.oldest) > duration(oldest_event).total_seconds():
        yield Alert(
            key=f"event_lag/{storage}",
            title="events wait too long",
            text=bus.told(seen),
            facts={"due": seen.due, "waiting": seen.waiting, "limit": oldest_event},
        )


def _lag_alerts(ontology: "OntologyResource", limit: int) -> Iterator[Alert]:
    from storage_engine.maintenance.metrics import collect

    with ontology.repository() as repository:
        types = collect(repository).types
    for one in types:
        if one.index_lag > limit:
            yield Alert(
                key=f"index_lag/{one.type_name}",
                title=f"the index of {one.type_name} is {one.index_lag} commits behind",
                text="reads stay right, but each reads more of the log; run the repair job",
                facts={"type": one.type_name, "lag": one.index_lag},
            )
