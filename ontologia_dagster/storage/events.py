"""The event bus in Dagster: a sensor that looks, a run that handles, a job that redrives.

The sensor claims nothing and keeps no position: a peek at the bus, which costs the same however
much there is on it, tells at every tick whether something is due. It
asks for one drain run at a time and gives it no run key, because Dagster remembers keys for ever,
and an event whose run died before claiming it would never be asked for again. The run claims,
handles, commits and acks until nothing is due or its limit is reached. What fails is tried again
by the bus's own backoff, at the limit it is a dead letter.

Nor does the sensor wait for a run whose process is gone. Who starts runs on its own machine
(Dagster's default) learns of a process that died from the code server alone; where that, or the
machine, went down with it, the run stays "started" until `max_runtime_seconds` of the instance has
passed, if that is set at all. So its status is not trusted: a worker keeps a heartbeat on the bus,
under the id of its run, and a run that was not heard of for long is reported as failed.
"""

# No `from __future__ import annotations`: Dagster reads annotations of ops and assets as objects.

import importlib
import sys
import threading
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from ontologia_dagster.dagster_compat import free_slots
from ontologia_dagster.declaration import EVENTS_POOL
from ontologia_dagster.downstream.metadata import request_metadata, table
from ontologia_dagster.resources.ontology import SchemaAdvice, report_failures
from ontologia_dagster.schema.differences import require_agreement, types_in
from storage_engine.errors import HandlerError

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.events.dispatcher import Totals
    from storage_engine.events.protocol import (
        Backlog,
        DeadLetter,
        EventStore,
        Peek,
        Subscription,
    )
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
_MISSED_BEATS = 3  # a session whose heartbeat is older than so many lifetimes does not come back


def event_sensor(
    storage: str,
    modules: Sequence[str],
    drain: dg.JobDefinition,
    *,
    status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{storage}_events",
        job=drain,
        minimum_interval_seconds=_INTERVAL_S,
        required_resource_keys={storage},
        default_status=status,
        description="Looks whether events are due, and asks for one run that handles them.",
    )
    def events_due(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        ontology: OntologyResource = getattr(context.resources, storage)
        subscriptions = [handler.subscription() for handler in load_handlers(modules)]
        with report_failures(), ontology.bus() as bus:
            seen = bus.peek(ontology.namespace, subscriptions)
            alive, dead = list_workers(ontology, bus) if seen.due else (set(), set())
        summary = describe(seen)
        context.log.info("%s", summary)
        if not seen.due:
            return dg.SensorResult(skip_reason=summary)
        origin = context.code_location_origin
        run_id = living_run(
            context.instance,
            drain.name,
            location=origin.location_name if origin is not None else None,
            alive=alive,
            dead=dead,
        )
        if run_id is not None:
            return dg.SensorResult(skip_reason=f"{summary}; run {run_id} is on it")
        tags = {"ontologia/events_due": str(due_events(seen)), "ontologia/events": summary}
        return dg.SensorResult(run_requests=[dg.RunRequest(tags=tags)])

    return events_due


def read_backlog(
    ontology: "OntologyResource", subscriptions: "Sequence[Subscription]"
) -> "Backlog":
    with ontology.bus() as bus:
        return bus.backlog(ontology.namespace, subscriptions, _LOOKED_AT)


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
        return f"{seen.due} events due, {seen.waiting} waiting{age}"
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


# -- runs that handle -----------------------------------------------------------------------------


class DrainConfig(dg.Config):
    max_events: int = Field(default=10_000, description="End after about so many")
    max_seconds: float = Field(default=900.0, description="End after so long")


def drain_job(storage: str, modules: Sequence[str]) -> dg.JobDefinition:
    """Handles what is due. Its run is the worker: it shows how much it did."""

    @dg.op(
        name=f"{storage}_handle_events",
        pool=EVENTS_POOL,
        required_resource_keys={storage},
    )
    def handle_events(context: dg.OpExecutionContext, config: DrainConfig) -> None:
        ontology: OntologyResource = getattr(context.resources, storage)
        advice = SchemaAdvice.of(ontology, storage, modules[0] if len(modules) == 1 else None)
        with report_failures(context.instance, advice):
            handlers = load_handlers(modules)
            # Before anything is claimed: events would fail one by one, and end as dead letters.
            with ontology.repository() as repository:
                require_agreement(repository, types_in(modules), advice)
            totals, requests = _drain(context, ontology, handlers, config)
            with ontology.bus() as bus:
                letters = bus.list_dead_letters(ontology.namespace, _LOOKED_AT)
        context.add_output_metadata(
            {
                **asdict(totals),
                "dead_letters": letters_table(letters),
                **request_metadata(requests),
            }
        )
        context.log.info(
            "%d handled, %d failed, %d dead letters",
            totals.handled,
            totals.failed,
            totals.dead_lettered,
        )

    @dg.job(
        name=drain_job_name(storage),
        description="Claim events that are due, run their handlers, commit and ack.",
        executor_def=dg.in_process_executor,
    )
    def drain() -> None:
        handle_events()

    return drain


def drain_job_name(storage: str) -> str:
    return f"{storage}_drain_events"


def _drain(
    context: dg.OpExecutionContext,
    ontology: "OntologyResource",
    handlers: "Sequence[Handler[Any]]",
    config: DrainConfig,
) -> "tuple[Totals, dict[str, int]]":
    """What was done, and the requests to the store that it took."""
    holder = {"run_id": context.run_id, "job": context.job_name}
    with ontology.session(holder=holder) as session:
        timer = threading.Timer(config.max_seconds, session.stop)
        timer.daemon = True
        timer.start()

        claimed_at_once = ontology.config().event_claim_limit

        def progress(totals: "Totals") -> None:
            # By rounds, as what a round did is settled, and counted, while the next one runs.
            if totals.iterations * claimed_at_once >= config.max_events:
                session.stop()

        try:
            totals = session.drain(handlers, progress=progress)
            return totals, session.storage_info().get("requests", {})
        finally:
            timer.cancel()


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


# -- dead letters ---------------------------------------------------------------------------------


class RedriveConfig(dg.Config):
    dry_run: bool = Field(default=False, description="Show the dead letters, send none")
    handler: str | None = Field(default=None, description="Only of this handler")
    event_id: str | None = Field(default=None, description="Only of this event")
    limit: int = 1_000


def redrive_job(storage: str) -> dg.JobDefinition:
    """Sends dead letters again, each to the handler that gave up on it."""

    @dg.op(
        name=f"{storage}_redrive_dead_letters",
        pool=EVENTS_POOL,
        required_resource_keys={storage},
    )
    def redrive_dead_letters(context: dg.OpExecutionContext, config: RedriveConfig) -> None:
        ontology: OntologyResource = getattr(context.resources, storage)
        with report_failures(context.instance), ontology.bus() as bus:
            listed = bus.list_dead_letters(
                ontology.namespace,
                # One event is looked for among all letters, however old.
                config.limit if config.event_id is None else sys.maxsize,
                handler_id=config.handler,
            )
            letters = [letter for letter in listed if config.event_id in (None, letter.event_id)]
            sent = [] if config.dry_run else [bus.redrive(letter) for letter in letters]
        context.add_output_metadata(
            {
                "dry_run": config.dry_run,
                "dead_letters": letters_table(letters),
                "found": len(letters),
                "sent": sum(position is not None for position in sent),
            }
        )

    @dg.job(
        name=f"{storage}_redrive",
        description="Send dead letters again, to the handlers that gave up on them.",
        executor_def=dg.in_process_executor,
    )
    def redrive() -> None:
        redrive_dead_letters()

    return redrive


def letters_table(letters: "Sequence[DeadLetter]") -> dg.MetadataValue[Any]:
    return table(
        ["event", "type", "handler", "failed_at", "attempts", "error"],
        [
            (
                letter.event_id,
                letter.event_type,
                letter.handler_id,
                letter.failed_at,
                letter.attempts,
                _e(letter),
            )
            for letter in letters
        ],
    )


def _e(letter: "DeadLetter") -> str:
    return (letter.last_error or "")[:500]
