"""The event bus in Dagster: a sensor that looks, a run that handles, a job that redrives.

The sensor claims nothing and keeps no position: a peek at the bus, which costs the same however
much there is on it, tells at every tick whether something is due. It
asks for one drain run at a time and gives it no run key, because Dagster remembers keys for ever,
and an event whose run died before claiming it would never be asked for again. The run claims,
handles, commits and acks until nothing is due or its limit is reached. What fails is tried again
by the bus's own backoff, at the limit it is a dead letter.

What a look shows is told: each tick says how much is left and how old the oldest is, and leaves
observations of the event types, not more often than they are worth reading.

Nor does the sensor wait for a run whose process is gone. Who starts runs on its own machine
(Dagster's default) learns of a process that died from the code server alone; where that, or the
machine, went down with it, the run stays "started" until `max_runtime_seconds` of the instance has
passed, if that is set at all. So its status is not trusted: a worker keeps a heartbeat on the bus,
under the id of its run, and a run that was not heard of for long is reported as failed.
"""

# No `from __future__ import annotations`: Dagster reads annotations of ops and assets as objects.

import importlib
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.dagster_compat import free_slots
from ontologia_dagster.resources.ontology import report_failures
from ontologia_dagster.storage import dead_letters
from storage_engine.errors import HandlerError
from storage_engine.wording import counted

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from ontologia_dagster.storage.lineage import EventLineage
    from storage_engine.events.protocol import Backlog, EventStore, Peek, Subscription
    from storage_engine.runtime.handlers import Handler

UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
# A step that waits for its pool says so every five minutes. A worker is seen on the bus.
PATIENCE = timedelta(minutes=15)
_INTERVAL_S = 15
_LOOKED_AT = 1_000
# An event type whose figures moved is observed so often at most; one that waits and does not move,
# so that its age is seen to grow, so often.
_OBSERVED = timedelta(minutes=1)
_AGING = timedelta(minutes=10)
_MISSED_BEATS = 3  # a session whose heartbeat is older than so many lifetimes does not come back


def event_sensor(
    lineage: "EventLineage",
    drain: Any,  # a job, or an unresolved one, which has no public name
    *,
    status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    storage = lineage.storage

    @dg.sensor(
        name=f"{storage}_events",
        # By its name: Dagster copies a sensor to bind its job, and warns of its own copy.
        job_name=drain.name,
        minimum_interval_seconds=_INTERVAL_S,
        required_resource_keys={storage},
        default_status=status,
        description="Looks whether events are due, and asks for one run that handles them.",
    )
    def events_due(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        ontology: OntologyResource = getattr(context.resources, storage)
        with report_failures(), ontology.bus() as bus:
            seen = bus.peek(ontology.namespace, subscriptions(lineage))
            letters = dead_letters.read_letters(
                bus, ontology.namespace, lineage.handlers, dead_letters.GLANCED
            )
            alive, dead = list_workers(ontology, bus) if seen.due else (set(), set())
        summary = describe(seen)
        if letters.total:
            summary += f"; {letters.total} dead letters"
        context.log.info("%s", summary)
        told: list[Any] = [
            *observations_due(context.instance, lineage, seen, letters),
            *dead_letters.untold(
                context.instance, dead_letters.evaluations(lineage, ontology, letters)
            ),
        ]
        if not seen.due:
            return dg.SensorResult(skip_reason=summary, asset_events=told)
        origin = context.code_location_origin
        run_id = living_run(
            context.instance,
            drain.name,
            location=origin.location_name if origin is not None else None,
            alive=alive,
            dead=dead,
        )
        if run_id is not None:
            reason = f"{summary}; run {run_id} is on it"
            return dg.SensorResult(skip_reason=reason, asset_events=told)
        tags = {"ontologia/events_due": str(due_events(seen)), "ontologia/events": summary}
        return dg.SensorResult(run_requests=[dg.RunRequest(tags=tags)], asset_events=told)

    return events_due


def subscriptions(lineage: "EventLineage") -> "list[Subscription]":
    return [handler.subscription() for handler in lineage.handlers]


def read_backlog(ontology: "OntologyResource", handlers: "Sequence[Handler[Any]]") -> "Backlog":
    with ontology.bus() as bus:
        subscribed = [handler.subscription() for handler in handlers]
        return bus.backlog(ontology.namespace, subscribed, _LOOKED_AT)


def due_events(seen: "Peek") -> int:
    """How many could be handled now. Where not all were looked at and some are due, it is all that
    are left."""
    return seen.due if seen.is_exact or not seen.due else seen.pending


def describe(seen: "Peek") -> str:
    """Depth and age, in a sentence."""
    if not seen.pending:
        return "no events are left to handle"
    age = f", the oldest {age_s(seen.oldest):.0f} s old" if seen.oldest is not None else ""
    if seen.is_exact:
        return f"{counted(seen.due, 'event')} due, {seen.waiting} waiting{age}"
    plus = " or more" if seen.more else ""
    due = "some are due" if seen.due else f"none of the {seen.looked_at} looked at is due"
    return f"{seen.pending}{plus} events left to handle{age}; {due}"


def age_s(moment: datetime | None) -> float:
    return max(0.0, (datetime.now(UTC) - moment).total_seconds()) if moment is not None else 0.0


def load_handlers(modules: Sequence[str]) -> "list[Handler[Any]]":
    """The handlers that modules declare or import, each once."""
    from storage_engine.runtime.handlers import Handler

    handlers: list[Handler[Any]] = []
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise HandlerError(f"the module {name} cannot be imported: {error}") from error
        handlers += [
            v for v in vars(module).values() if isinstance(v, Handler) and v not in handlers
        ]
    if not handlers:
        raise HandlerError(
            f"no handlers in {', '.join(modules)}: decorate functions with @on_event(EventClass)"
        )
    return handlers


# -- what is told of event types ------------------------------------------------------------------


def event_figures(event_type: str, seen: "Peek", letters: dead_letters.Letters) -> dict[str, Any]:
    """Of one event type, as numbers that plot. Of many events the look has read some: then
    `pending` is all that are left, times the share of this type among those."""
    of_type = seen.by_type.get(event_type)
    count, oldest = (of_type.events, of_type.oldest) if of_type is not None else (0, None)
    if not seen.is_exact and seen.looked_at:
        count = round(seen.pending * count / seen.looked_at)
    return {
        "pending": count,
        "pending_is_exact": seen.is_exact,
        "oldest_age_s": round(age_s(oldest), 1),
        "dead_letters": letters.counts.get(event_type, 0),
    }


def observation(key: dg.AssetKey, figures: dict[str, Any]) -> dg.AssetObservation:
    count, dead = figures["pending"], figures["dead_letters"]
    about = "" if figures["pending_is_exact"] else "about "
    age = f", the oldest {figures['oldest_age_s']:.0f} s old" if count else ""
    gone = f"; {dead} dead letters" if dead else ""
    return dg.AssetObservation(
        key, description=f"{about}{count} left to handle{age}{gone}", metadata=figures
    )


def observations_due(
    instance: dg.DagsterInstance, lineage: "EventLineage", seen: "Peek", letters: Any
) -> list[dg.AssetObservation]:
    """Of the event types whose figures are not what was told last, but for those that were told of
    a moment ago, and of those that wait since long."""
    due = []
    for event in lineage.events.values():
        if not event.handlers:
            continue
        figures = event_figures(event.name, seen, letters)
        last, told_at = _last_figures(instance, event.key)
        moved = any(last.get(name) != figures[name] for name in ("pending", "dead_letters"))
        patience = _OBSERVED if moved else _AGING
        if last.get("dead_letters") != figures["dead_letters"]:
            patience = timedelta(0)
        if (moved or figures["pending"]) and is_past(told_at, patience):
            due.append(observation(event.key, figures))
    return due


def _last_figures(
    instance: dg.DagsterInstance, key: dg.AssetKey
) -> tuple[dict[str, Any], datetime]:
    for record in instance.fetch_observations(key, limit=1).records:
        last = record.asset_observation
        if last is not None:
            values = {name: value.value for name, value in last.metadata.items()}
            return values, datetime.fromtimestamp(record.timestamp, UTC)
    return {}, datetime.min.replace(tzinfo=UTC)


# -- runs that Dagster has not seen end -----------------------------------------------------------


def list_workers(ontology: "OntologyResource", bus: "EventStore") -> tuple[set[str], set[str]]:
    """The runs that work on the bus, and those that did and died."""
    ttl_ms = _MISSED_BEATS * ontology.config().session_ttl_ms
    alive: set[str] = set()
    dead: set[str] = set()
    for session in bus.list_sessions(ontology.namespace, ttl_ms):
        run_id = session.metadata.get("run_id")
        if run_id:
            (dead if session.is_dead else alive).add(run_id)
    return alive, dead - alive


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
    living = None
    for record in instance.get_run_records(dg.RunsFilter(job_name=job_name, statuses=UNFINISHED)):
        run = record.dagster_run
        origin = run.remote_job_origin
        if location is not None and origin is not None and origin.location_name != location:
            continue
        if run.status is dg.DagsterRunStatus.QUEUED or run.run_id in alive:
            living = living or run.run_id
        elif run.run_id in dead or is_past(_last_sign(instance, record), PATIENCE):
            _give_up(instance, run)
        else:
            living = living or run.run_id
    return living


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
    free_slots(instance, run.run_id)
