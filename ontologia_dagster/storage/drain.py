"""The run that handles events, which is also what materialises the types that handlers write.

It claims, handles, commits and acks until nothing is due or its limit is reached. Each commit
names the run. At the end a type that was written has one materialisation, whatever the number of
events, with its last commit as data version and the latest commits with their events as a table;
handlers, event types and the storage's log have observations; the check of dead letters has a
result, so that a run that left some is not plainly green. A run that dies before tells nothing:
then the log tail does.
"""

# No `from __future__ import annotations`: Dagster reads annotations of ops and assets as objects.

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from ontologia_dagster.dagster_compat import log_evaluation, version_tags
from ontologia_dagster.declaration import EVENTS_POOL, one_process_executor
from ontologia_dagster.downstream.metadata import (
    SHOWN_ROWS,
    column_schema,
    request_metadata,
    sample_metadata,
    schema_metadata,
    table,
)
from ontologia_dagster.ingestion import provenance
from ontologia_dagster.resources.ontology import SchemaAdvice, report_failures
from ontologia_dagster.schema.differences import require_agreement, types_in
from ontologia_dagster.storage import checks, dead_letters, events
from ontologia_dagster.storage.maintenance import repair_job_name
from storage_engine.model.declarations import spec_of
from storage_engine.runtime.arguments import MOST_AT_ONCE
from storage_engine.wording import counted

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from ontologia_dagster.storage.lineage import EventLineage
    from storage_engine.events.outcomes import Totals
    from storage_engine.repository.protocol import Repository
    from storage_engine.runtime.worker import HandlerRun

_ERRORS = 20  # of a handler, shown


class DrainConfig(dg.Config):
    max_events: int = Field(default=10_000, description="End after about so many")
    max_seconds: float = Field(default=900.0, description="End after so long")
    concurrency: int = Field(
        default=1, ge=1, le=MOST_AT_ONCE, description="Run up to so many handlers at once"
    )


def drain_job_name(storage: str) -> str:
    return f"{storage}_drain_events"


@dataclass(frozen=True)
class Drain:
    """The definitions of what handles events; `asset` where handlers say what they write."""

    job: Any  # an unresolved asset job has no public name
    asset: dg.AssetsDefinition | None = None


def drain_definitions(
    lineage: "EventLineage", modules: Sequence[str], beside: Sequence[dg.AssetSpec] = ()
) -> Drain:
    """Handles what is due. Its run is the worker: it shows how much it did."""
    storage = lineage.storage

    name = f"{storage}_handle_events"
    description = "Claim events that are due, run their handlers, commit and ack."
    specs = lineage.written_specs(beside)
    if not specs:

        @dg.op(name=name, out={}, pool=EVENTS_POOL, required_resource_keys={storage})
        def handle_events(context: dg.OpExecutionContext, config: DrainConfig) -> Iterator[Any]:
            yield from _handle(context, config, lineage, modules)

        graph = dg.GraphDefinition(name=drain_job_name(storage), node_defs=[handle_events])
        job = graph.to_job(description=description, executor_def=one_process_executor)
        return Drain(job)

    @dg.multi_asset(name=name, specs=specs, pool=EVENTS_POOL, required_resource_keys={storage})
    def asset(context: dg.AssetExecutionContext, config: DrainConfig) -> Iterator[Any]:
        yield from _handle(context, config, lineage, modules)

    asset_job = dg.define_asset_job(
        drain_job_name(storage),
        # Checks of types that this run does not write would count as skipped; the others are
        # evaluated by the step itself.
        selection=dg.AssetSelection.assets(*asset.keys).without_checks(),
        description=description,
        executor_def=one_process_executor,
    )
    return Drain(asset_job, asset)


def _handle(
    context: Any, config: DrainConfig, lineage: "EventLineage", modules: Sequence[str]
) -> Iterator[dg.MaterializeResult[None]]:
    storage = lineage.storage
    ontology: OntologyResource = getattr(context.resources, storage)
    advice = SchemaAdvice.of(ontology, storage, modules[0] if len(modules) == 1 else None)
    tally = Tally()
    with report_failures(context.instance, advice):
        # Before anything is claimed: events would fail one by one, and end as dead letters.
        with ontology.repository(branch=ontology.home) as repository:
            require_agreement(repository, types_in(modules), advice)
        began = time.monotonic()
        totals, requests = _drain(context, ontology, lineage, config, tally)
        seconds = time.monotonic() - began
        with ontology.bus() as bus:
            letters = dead_letters.read_letters(
                bus, ontology.namespace, lineage.handlers, dead_letters.READ
            )
            seen = bus.peek(ontology.namespace, events.subscriptions(lineage))
        results = _materialisations(context, ontology, lineage, tally) if tally.types else []
    context.log.info(
        "%d handled, %d failed, %d dead letters",
        totals.handled,
        totals.failed,
        totals.dead_lettered,
    )
    context.log_event(_of_log(storage, totals, tally, letters, requests))
    for handler_id, of_handler in sorted(tally.handlers.items()):
        context.log_event(_of_handler(lineage, handler_id, of_handler))
    for event in lineage.events.values():
        done = tally.events.get(event.name)
        if done is not None:
            figures = events.event_figures(event.name, seen, letters)
            figures |= {
                "handled": done["handled"],
                "failed": done["failed"],
                "handled_per_minute": round(60 * done["handled"] / max(seconds, 0.001), 1),
            }
            context.log_event(events.observation(event.key, figures))
    made = dead_letters.evaluations(lineage, ontology, letters)
    touched = {lineage.events[name].key for name in tally.events if name in lineage.events}
    untold = dead_letters.untold(context.instance, made)
    for evaluation in made:
        if evaluation in untold or evaluation.asset_key in touched:
            log_evaluation(context, evaluation)
            if not evaluation.passed:
                context.log.error("%s", evaluation.description)
    yield from results


# -- what was done --------------------------------------------------------------------------------


@dataclass
class TypeTally:
    """Commits that wrote one type; the latest of them are kept."""

    commits: int = 0
    last_commit: int = 0
    inserted: int = 0
    updated: int = 0
    handlers: set[str] = field(default_factory=set)
    latest: deque[tuple[Any, ...]] = field(default_factory=lambda: deque(maxlen=SHOWN_ROWS))


@dataclass
class HandlerTally:
    handled: int = 0
    failed: int = 0
    commits: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    errors: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_ERRORS))


@dataclass
class Tally:
    """Of a run, by type, handler and event type: as much as can be shown, whatever their number."""

    types: dict[str, TypeTally] = field(default_factory=dict)
    handlers: dict[str, HandlerTally] = field(default_factory=dict)
    events: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, run: "HandlerRun") -> None:
        of_handler = self.handlers.setdefault(run.handler_id, HandlerTally())
        of_event = self.events.setdefault(run.event_type, Counter())
        if run.error is not None:
            of_handler.failed += 1
            of_event["failed"] += 1
            of_handler.errors.append((run.event_id, run.error))
            return
        of_handler.handled += 1
        of_event["handled"] += 1
        of_handler.sent.update(run.emitted)
        if run.commit is None or run.commit.already_applied:
            return
        commit = run.commit.commit_id
        of_handler.commits += 1
        for change in run.commit.changes:
            of_type = self.types.setdefault(change.type_name, TypeTally())
            of_type.commits += 1
            of_type.last_commit = max(of_type.last_commit, commit)
            of_type.inserted += change.inserted
            of_type.updated += change.updated
            of_type.handlers.add(run.handler_id)
            of_type.latest.append(
                (commit, run.event_id, run.handler_id, change.inserted, change.updated)
            )


def _drain(
    context: Any,
    ontology: "OntologyResource",
    lineage: "EventLineage",
    config: DrainConfig,
    tally: Tally,
) -> "tuple[Totals, dict[str, int]]":
    """What was done, and the requests to the store that it took."""
    with ontology.session(holder=provenance.holder(context), branch=ontology.home) as session:
        timer = threading.Timer(config.max_seconds, session.stop)
        timer.daemon = True
        timer.start()

        def progress(totals: "Totals") -> None:
            # What was claimed: how it ended is known, and counted, while the next round runs.
            if totals.claimed >= config.max_events:
                session.stop()

        try:
            totals = session.drain(
                lineage.handlers,
                concurrency=config.concurrency,
                progress=progress,
                observe=tally.add,
                meta={
                    provenance.RUN_ID: context.run.run_id,
                    provenance.STEP: f"{lineage.storage}_handle_events",
                },
            )
            return totals, session.storage_info().get("requests", {})
        finally:
            timer.cancel()


# -- what is told ---------------------------------------------------------------------------------


def _materialisations(
    context: Any, ontology: "OntologyResource", lineage: "EventLineage", tally: Tally
) -> list[dg.MaterializeResult[None]]:
    """Of the types that are this step's own. Others are materialised here too where they have an
    asset that is not cut; those that are cut are left to the log tail."""
    results: list[dg.MaterializeResult[None]] = []
    with ontology.repository(branch=ontology.home) as repository:
        specs = {spec.name: spec for spec in repository.known_types()}
        rows = _row_counts(repository)
        for name, of_type in sorted(tally.types.items()):
            written, other = lineage.written.get(name), lineage.ingested.get(name)
            if other is not None and other.partition_by is not None:
                context.log.info("%s was written; its partitions are told by the log tail", name)
                continue
            key = written.key if written is not None else other.key if other is not None else None
            if key is None:
                _warn_of_type(context, name, of_type)
                continue
            metadata = {
                **_type_metadata(ontology, of_type, specs[name], rows.get(name)),
                **schema_metadata(repository, specs[name], context.instance, key),
            }
            if written is not None:
                declared = spec_of(written.cls)
                metadata |= sample_metadata(repository, declared, of_type.last_commit)
            if written is None:
                tags = version_tags(of_type.last_commit)
                context.log_event(dg.AssetMaterialization(key, metadata=metadata, tags=tags))
                continue
            version = dg.DataVersion(str(of_type.last_commit))
            results.append(
                dg.MaterializeResult(asset_key=key, metadata=metadata, data_version=version)
            )
            index = checks.index_result(ontology, name, repair_job_name(lineage.storage))
            log_evaluation(context, dead_letters.as_evaluation(index, key, checks.INDEX_VERIFY))
    return results


def _warn_of_type(context: Any, name: str, of_type: TypeTally) -> None:
    for handler in sorted(of_type.handlers):
        context.log.warning(
            "%s wrote %s, for which there is no asset: name it in @on_event(..., writes=[%s])",
            handler,
            name,
            name,
        )


def _row_counts(repository: "Repository") -> dict[str, int]:
    """Identities of the types of which the log tells how many there are."""
    from storage_engine.maintenance.metrics import collect

    return {
        figures.type_name: figures.identities
        for figures in collect(repository).types
        if figures.identities is not None
    }


def _type_metadata(
    ontology: "OntologyResource", of_type: TypeTally, spec: Any, rows: int | None
) -> dict[str, Any]:
    return {
        **({"dagster/row_count": rows} if rows is not None else {}),
        "dagster/table_name": spec.name,
        "dagster/uri": ontology.storage_uri,
        "dagster/column_schema": column_schema(spec),
        "commit": of_type.last_commit,
        "commits": of_type.commits,
        "rows_inserted": of_type.inserted,
        "rows_changed": of_type.updated,
        "handlers": ", ".join(sorted(of_type.handlers)),
        "commit_list": table(
            ["commit", "event", "handler", "inserted", "changed"], reversed(of_type.latest)
        ),
    }


def _of_handler(
    lineage: "EventLineage", handler_id: str, of_handler: HandlerTally
) -> dg.AssetObservation:
    return dg.AssetObservation(
        lineage.handler_keys[handler_id],
        description=f"{of_handler.handled} handled, {of_handler.failed} failed",
        metadata={
            "handled": of_handler.handled,
            "failed": of_handler.failed,
            "commits": of_handler.commits,
            "events_sent": sum(of_handler.sent.values()),
            **({"sent": dict(of_handler.sent)} if of_handler.sent else {}),
            **(
                {"errors": table(["event", "error"], reversed(of_handler.errors))}
                if of_handler.errors
                else {}
            ),
        },
    )


def _of_log(
    storage: str,
    totals: "Totals",
    tally: Tally,
    letters: dead_letters.Letters,
    requests: dict[str, int],
) -> dg.AssetObservation:
    """The whole run, beside those of maintenance."""
    figures = asdict(totals)
    notes = figures.pop("notes")
    newest = sorted(
        (letter for of_type in letters.by_type.values() for letter in of_type),
        key=lambda letter: letter.failed_at,
        reverse=True,
    )
    lines = [
        (handler_id, of.handled, of.failed, of.commits, sum(of.sent.values()))
        for handler_id, of in sorted(tally.handlers.items())
    ]
    return dg.AssetObservation(
        dg.AssetKey([storage, "log"]),
        description=f"{counted(totals.handled, 'event')} handled, {totals.failed} failed, "
        f"{totals.dead_lettered} given up",
        metadata={
            "operation": "handle events",
            **figures,
            "handlers": table(["handler", "handled", "failed", "commits", "sent"], lines),
            "dead_letters": dead_letters.letters_table(newest),
            **({"notes": dg.MetadataValue.md("\n".join(f"- {n}" for n in notes))} if notes else {}),
            **request_metadata(requests),
        },
    )
