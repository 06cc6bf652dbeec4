"""Events that handlers gave up on: a check of each event type, and the job that sends them again.

The check `no_dead_letters` is evaluated by whoever may have changed its answer: the run that
handles events, the one that sends letters again, and, for letters that others made or ended, the
sensor's look and the job of figures, which report only what is not told already. It can be run by
hand too. A failure names handler, event and error, and carries the config that sends them again.
"""

# No `from __future__ import annotations`: Dagster reads annotations of ops and assets as objects.

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dagster as dg
import yaml
from pydantic import Field

from ontologia_dagster.dagster_compat import log_evaluation
from ontologia_dagster.declaration import EVENTS_POOL, one_process_executor
from ontologia_dagster.downstream.metadata import table
from ontologia_dagster.resources.ontology import report_failures
from ontologia_dagster.storage.checks import run_check

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from ontologia_dagster.storage.lineage import EventLineage
    from storage_engine.events.protocol import DeadLetter, EventStore
    from storage_engine.runtime.handlers import Handler

NO_DEAD_LETTERS = "no_dead_letters"
READ = 100  # letters of a handler, by runs
GLANCED = 20  # by ticks
_NAMED = 5  # events in a sentence
_ERROR = 500
_NEWEST = "newest_dead_letter"
_COUNT = "dead_letters"


# -- what there is --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Letters:
    """Dead letters of event types, newest first.

    counts:   how many there are; of a type whose handlers have more letters than were read, and of
              several types, at least
    unclear:  types that may have letters among those that were not read
    total:    of all handlers, by their names
    """

    by_type: Mapping[str, Sequence["DeadLetter"]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    unclear: frozenset[str] = frozenset()
    total: int = 0

    def newest(self, event_type: str) -> str:
        """What is another one when a letter came."""
        letters = self.by_type.get(event_type, ())
        return f"{letters[0].failed_at}/{letters[0].event_id}" if letters else ""


def read_letters(
    bus: "EventStore", namespace: str, handlers: "Sequence[Handler[Any]]", limit: int
) -> Letters:
    """Of all handlers on the bus, the newest `limit` of each; counted by name where that tells."""
    subscribed = {handler.id: set(handler.event_types) for handler in handlers}
    by_type: dict[str, list[DeadLetter]] = {}
    counts: dict[str, int] = {}
    unclear: set[str] = set()
    by_handler = bus.count_dead_letters(namespace)
    for handler_id, count in sorted(by_handler.items()):
        letters = bus.list_dead_letters(namespace, limit, handler_id=handler_id)
        types = {letter.event_type for letter in letters}
        for name in types:
            of_type = [letter for letter in letters if letter.event_type == name]
            by_type.setdefault(name, []).extend(of_type)
            whole = len(types) == 1 and subscribed.get(handler_id, types) == types
            counts[name] = counts.get(name, 0) + (count if whole and letters else len(of_type))
        if count > len(letters):
            unclear |= subscribed.get(handler_id, set()) - types
    for letters in by_type.values():
        letters.sort(key=lambda letter: letter.failed_at, reverse=True)
    total = sum(by_handler.values())
    return Letters(by_type, counts, frozenset(unclear - by_type.keys()), total)


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
                (letter.last_error or "")[:_ERROR],
            )
            for letter in letters
        ],
    )


# -- in words -------------------------------------------------------------------------------------


def describe_letters(letters: "Sequence[DeadLetter]", count: int) -> str:
    """Of one handler: what it gave up on, and why."""
    newest = letters[0]
    names = ", ".join(letter.event_id for letter in letters[:_NAMED])
    more = f" and {count - _NAMED} more" if count > _NAMED else ""
    types = {letter.event_type for letter in letters}
    kind = f"{newest.event_type} events" if len(types) == 1 else "events"
    what = newest.event_type if count == 1 else f"{count} {kind}"
    error = (newest.last_error or "no error was kept").strip()[:_ERROR]
    return f"{newest.handler_id} gave up on {what} ({names}{more}): {error}"


def redrive_config(storage: str, handler_id: str, event_id: str | None = None) -> dict[str, Any]:
    """What the launchpad of the redrive job is to be given."""
    config = {"handler": handler_id, **({"event_id": event_id} if event_id is not None else {})}
    return {"ops": {f"{storage}_redrive_dead_letters": {"config": config}}}


def redrive_link(storage: str, location: str, config: Mapping[str, Any]) -> str:
    """The launchpad with its config filled in, from the root of Dagster's web pages."""
    text = yaml.safe_dump(dict(config), sort_keys=False)
    path = f"/locations/{quote(location)}/jobs/{redrive_job_name(storage)}/playground/setup"
    return f"{path}?config={quote(text)}"


def _redrive_markdown(storage: str, location: str, configs: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for config in configs:
        [step] = config["ops"].values()
        link = redrive_link(storage, location, config)
        text = yaml.safe_dump(dict(config), sort_keys=False)
        parts.append(
            f"[Send again to {step['config']['handler']}]({link}), or paste this into the "
            f"launchpad of {redrive_job_name(storage)}:\n\n```yaml\n{text}```"
        )
    return "\n\n".join(parts)


# -- the check ------------------------------------------------------------------------------------


def letters_result(
    storage: str, location: str, key: dg.AssetKey, event_type: str, letters: Letters
) -> dg.AssetCheckResult:
    listed = letters.by_type.get(event_type, ())
    count = letters.counts.get(event_type, 0)
    metadata: dict[str, Any] = {
        _COUNT: count,
        _NEWEST: letters.newest(event_type),
        "dead_letter_list": letters_table(listed),
    }
    if not listed:
        unclear = event_type in letters.unclear
        return dg.AssetCheckResult(
            asset_key=key,
            check_name=NO_DEAD_LETTERS,
            passed=True,
            description=(
                f"No {event_type} is among the letters that were read; there are more of its "
                "handlers."
                if unclear
                else f"No handler has given up on any {event_type}."
            ),
            metadata=metadata,
        )
    by_handler: dict[str, list[DeadLetter]] = {}
    for letter in listed:
        by_handler.setdefault(letter.handler_id, []).append(letter)
    configs = [
        redrive_config(storage, handler, of[0].event_id if count == 1 else None)
        for handler, of in by_handler.items()
    ]
    sentences = [
        describe_letters(of, count if len(by_handler) == 1 else len(of))
        for of in by_handler.values()
    ]
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=NO_DEAD_LETTERS,
        passed=False,
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"{'; '.join(sentences)}. When the cause is mended, send "
        f"{'it' if count == 1 else 'them'} again with {redrive_job_name(storage)}.",
        metadata={
            **metadata,
            # To whoever gave up last; all of them, and what to paste, are in the config.
            "redrive": dg.MetadataValue.url(redrive_link(storage, location, configs[0])),
            "redrive_config": dg.MetadataValue.md(_redrive_markdown(storage, location, configs)),
            "redrive_job": dg.MetadataValue.job(redrive_job_name(storage), location),
        },
    )


def letters_check(lineage: "EventLineage") -> dg.AssetChecksDefinition | None:
    """One check for each event type that somebody handles; None where there is none."""
    storage = lineage.storage
    keys = {event.key: event.name for event in lineage.events.values() if event.handlers}
    if not keys:
        return None

    @dg.multi_asset_check(
        name=f"{storage}_dead_letters",
        specs=[
            dg.AssetCheckSpec(
                NO_DEAD_LETTERS,
                asset=key,
                description=f"No handler has given up on any {name}.",
            )
            for key, name in keys.items()
        ],
        required_resource_keys={storage},
        can_subset=True,  # otherwise the UI's Execute buttons are off
    )
    def dead_letters(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        ontology: OntologyResource = getattr(context.resources, storage)

        def look(key: dg.AssetKey) -> dg.AssetCheckResult:
            with ontology.bus() as bus:
                letters = read_letters(bus, ontology.namespace, lineage.handlers, READ)
            return letters_result(storage, ontology.location, key, keys[key], letters)

        for check in sorted(context.selected_asset_check_keys):
            result = run_check(lambda key=check.asset_key: look(key))  # type: ignore[misc]
            yield dg.AssetCheckResult(
                asset_key=check.asset_key,
                check_name=check.name,
                passed=result.passed,
                severity=result.severity,
                description=result.description,
                metadata=dict(result.metadata),
            )

    return dead_letters


def evaluations(
    lineage: "EventLineage", ontology: "OntologyResource", letters: Letters
) -> list[dg.AssetCheckEvaluation]:
    """The check of every event type, as events. Types of which nothing can be said stay as they
    were."""
    made = []
    for event in lineage.events.values():
        if event.handlers and event.name not in letters.unclear:
            storage, location = lineage.storage, ontology.location
            result = letters_result(storage, location, event.key, event.name, letters)
            made.append(as_evaluation(result, event.key, NO_DEAD_LETTERS))
    return made


def as_evaluation(
    result: dg.AssetCheckResult, key: dg.AssetKey, name: str
) -> dg.AssetCheckEvaluation:
    """For who has no step of the check's own to give its result to."""
    return dg.AssetCheckEvaluation(
        asset_key=key,
        check_name=name,
        passed=result.passed,
        metadata=dict(result.metadata),
        severity=result.severity,
        description=result.description,
    )


def untold(
    instance: dg.DagsterInstance, made: Sequence[dg.AssetCheckEvaluation]
) -> list[dg.AssetCheckEvaluation]:
    """Those that say something else than was told last, or the first of their check. A check that
    runs just now is left to its run, as long as that goes on."""
    new = []
    for evaluation in made:
        record = instance.get_latest_asset_check_evaluation_record(evaluation.asset_check_key)
        last = record.evaluation if record is not None else None
        if isinstance(last, dg.AssetCheckEvaluation):
            if _facts(last) != _facts(evaluation):
                new.append(evaluation)
            continue
        run = instance.get_run_by_id(record.run_id) if record is not None else None
        if run is None or run.is_finished:
            new.append(evaluation)
    return new


def _facts(evaluation: dg.AssetCheckEvaluation) -> tuple[Any, ...]:
    metadata = evaluation.metadata
    values = [metadata[name].value if name in metadata else None for name in (_COUNT, _NEWEST)]
    return (evaluation.passed, *values)


# -- sent again -----------------------------------------------------------------------------------


class RedriveConfig(dg.Config):
    dry_run: bool = Field(default=False, description="Show the dead letters, send none")
    handler: str | None = Field(default=None, description="Only of this handler")
    event_id: str | None = Field(default=None, description="Only of this event")
    limit: int = Field(default=1_000, description="At most so many")


def redrive_job_name(storage: str) -> str:
    return f"{storage}_redrive"


def redrive_job(lineage: "EventLineage") -> dg.JobDefinition:
    """Sends dead letters again, each to the handler that gave up on it."""
    storage = lineage.storage

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
            left = read_letters(bus, ontology.namespace, lineage.handlers, READ)
        for evaluation in untold(context.instance, evaluations(lineage, ontology, left)):
            log_evaluation(context, evaluation)
        context.add_output_metadata(
            {
                "dry_run": config.dry_run,
                "dead_letters": letters_table(letters),
                "found": len(letters),
                "sent": sum(position is not None for position in sent),
                "left": left.total,
            }
        )

    @dg.job(
        name=redrive_job_name(storage),
        description="Send dead letters again, to the handlers that gave up on them.",
        executor_def=one_process_executor,
    )
    def redrive() -> None:
        redrive_dead_letters()

    return redrive
