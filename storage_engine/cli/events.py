"""`onto events`: what is on the event bus, what went wrong there, and a worker for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from storage_engine.cli.arguments import Invocation, parse_duration, with_settings
from storage_engine.cli.errors import CommandError
from storage_engine.cli.event_worker import Namespace, checked, peek, run
from storage_engine.cli.output import Output, moment, one_line
from storage_engine.commitlog.records import timestamp
from storage_engine.wording import counted

if TYPE_CHECKING:
    from storage_engine.events.protocol import (
        DeadLetter,
        EventInfo,
        EventStore,
        MalformedObject,
        NamespaceInfo,
        WorkerSession,
    )


def event_document(info: EventInfo) -> dict[str, Any]:
    claims = [{**claim.as_dict(), "state": claim.state} for claim in info.claims]
    document = {**info.envelope, "status": info.status, "claims": claims}
    if info.malformed:
        document["malformed_claims"] = [asdict(claim) for claim in info.malformed]
    return document


def session_document(session: WorkerSession) -> dict[str, Any]:
    return {
        **asdict(session),
        "started_at": timestamp(session.started_at),
        "last_heartbeat": timestamp(session.last_heartbeat),
    }


def namespace_document(namespace: NamespaceInfo) -> dict[str, Any]:
    oldest = timestamp(namespace.oldest) if namespace.oldest is not None else None
    return {**asdict(namespace), "oldest": oldest}


def show_letters(output: Output, letters: Sequence[DeadLetter]) -> None:
    output.table(
        ["event", "type", "handler", "failed", "attempts", "last error"],
        [
            (
                letter.event_id,
                letter.event_type,
                letter.handler_id,
                datetime.fromisoformat(letter.failed_at),
                letter.attempts,
                one_line(letter.last_error or ""),
            )
            for letter in letters
        ],
    )


def show_event(output: Output, info: EventInfo) -> None:
    envelope = info.envelope
    output.facts(
        [
            ("event", envelope["id"]),
            ("type", envelope["type"]),
            ("namespace", envelope.get("namespace")),
            ("created", datetime.fromisoformat(envelope["created_at"])),
            ("priority", envelope["priority"]),
            ("chain", f"number {envelope['chain_depth']} after {envelope['root_event_id']}"),
            ("only for", envelope.get("handler_id")),
            ("status", info.status),
            ("payload", json.dumps(envelope["payload"], ensure_ascii=False)),
        ]
    )
    output.line()
    if info.malformed:
        show_malformed(output, info.malformed)
        output.line()
    if not info.claims:
        if not info.malformed:
            output.line("No handler has claimed it.")
        return
    output.table(
        ["handler", "state", "attempts", "deliveries", "claimed", "lease until", "last error"],
        [
            (
                claim.handler_id,
                claim.state,
                claim.attempts,
                claim.deliveries,
                claim.claimed_at,
                claim.lease_until,
                one_line(claim.last_error or "") or None,
            )
            for claim in info.claims
        ],
    )


def show_malformed(output: Output, objects: Sequence[MalformedObject]) -> None:
    output.table(
        ["malformed", "key", "what is wrong"],
        [(malformed.kind, malformed.key, one_line(malformed.error)) for malformed in objects],
    )


LIST_LIMIT = 20
STATUSES = ("pending", "claimed", "acked", "dead_lettered")

app = typer.Typer(no_args_is_help=True)


Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many at most.")]
Apply = Annotated[
    bool, typer.Option("--apply", help="Do it; without, only say what would be done.")
]
EventId = Annotated[str, typer.Argument(metavar="ID", help="The event's id.")]
OfHandler = Annotated[
    str | None, typer.Option("--handler", metavar="ID", help="Only of this handler.")
]


class EventNotFoundError(CommandError):
    """There is no event with this id."""

    def __init__(self, event_id: str, namespace: str | None) -> None:
        self.event_id = event_id
        self.namespace = namespace
        where = f"namespace {namespace}" if namespace is not None else "any namespace"
        super().__init__(f"no event {event_id} in {where}; `onto events show` lists them")


@app.callback()
@with_settings
def events(_invocation: Invocation) -> None:
    """Look after the event bus, and run workers on it."""


@app.command("list-namespaces")
@with_settings
def list_namespaces(invocation: Invocation) -> None:
    """List namespaces with their events, live workers and dead letters."""
    with _bus(invocation) as store:
        namespaces = store.list_namespaces(invocation.config().session_ttl_ms)
    if invocation.output.json:
        invocation.output.document({"namespaces": [namespace_document(n) for n in namespaces]})
    elif not namespaces:
        invocation.output.line("No events yet.")
    else:
        invocation.output.table(
            ["namespace", "events", "oldest", "workers", "dead workers", "dead letters"],
            [
                (n.namespace, n.events, n.oldest, n.sessions, n.dead_sessions, n.dead_letters)
                for n in namespaces
            ],
        )


@app.command("sessions")
@with_settings
def sessions(invocation: Invocation, namespace: Namespace = "default") -> None:
    """List workers, and whether their heartbeat has stopped."""
    with _bus(invocation) as store:
        listed = store.list_sessions(namespace, invocation.config().session_ttl_ms)
    if invocation.output.json:
        invocation.output.document({"sessions": [session_document(s) for s in listed]})
    elif not listed:
        invocation.output.line(f"No workers in namespace {namespace}.")
    else:
        invocation.output.table(
            ["session", "started", "last heartbeat", "state", "about"],
            [
                (
                    s.session_id,
                    s.started_at,
                    s.last_heartbeat,
                    "dead" if s.is_dead else "alive",
                    one_line(s.malformed)
                    if s.malformed is not None
                    else ", ".join(
                        f"{name}={value}" for name, value in s.metadata.items() if name != "process"
                    ),
                )
                for s in listed
            ],
        )


@app.command("show")
@with_settings
def show(
    invocation: Invocation,
    namespace: Namespace = "default",
    status: Annotated[
        str | None,
        typer.Option("--status", metavar="STATUS", help=f"Only {', '.join(STATUSES)} ones."),
    ] = None,
    type: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="Only events of this type.")
    ] = None,
    malformed: Annotated[
        bool,
        typer.Option(
            "--malformed",
            help="Instead, objects of the bus that cannot be read and were set aside.",
        ),
    ] = False,
    limit: Limit = LIST_LIMIT,
) -> None:
    """List events, newest first, with what became of them."""
    if status is not None and status not in STATUSES:
        raise typer.BadParameter(
            f"{status!r} is not one of {', '.join(STATUSES)}", param_hint="--status"
        )
    if malformed:
        if status is not None or type is not None:
            raise typer.BadParameter(
                "what is malformed has no status and no type", param_hint="--malformed"
            )
        _show_all_malformed(invocation, namespace, limit)
        return
    with _bus(invocation) as store:
        events = store.list_events(namespace, limit, status=status, type=type)
    if invocation.output.json:
        invocation.output.document({"events": [event_document(info) for info in events]})
    elif not events:
        invocation.output.line(f"No such events in namespace {namespace}.")
    else:
        invocation.output.table(
            ["id", "type", "created", "priority", "status", "handlers"],
            [
                (
                    info.envelope["id"],
                    info.envelope["type"],
                    datetime.fromisoformat(info.envelope["created_at"]),
                    info.envelope["priority"],
                    info.status,
                    ", ".join(
                        [f"{c.handler_id}: {c.state}" for c in info.claims]
                        + [f"{claim.key}: malformed" for claim in info.malformed]
                    ),
                )
                for info in events
            ],
        )


@app.command("dead-letters")
@with_settings
def dead_letters(
    invocation: Invocation,
    namespace: Namespace = "default",
    handler: OfHandler = None,
    limit: Limit = LIST_LIMIT,
) -> None:
    """List events that handlers gave up on, newest first."""
    with _bus(invocation) as store:
        letters = store.list_dead_letters(namespace, limit, handler_id=handler)
    if invocation.output.json:
        invocation.output.document({"dead_letters": [letter.as_dict() for letter in letters]})
    elif not letters:
        invocation.output.line(f"No dead letters in namespace {namespace}.")
    else:
        show_letters(invocation.output, letters)


@app.command("inspect")
@with_settings
def inspect(
    invocation: Invocation,
    event_id: EventId,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="NAME",
            help="Where to look; everywhere unless told.",
            callback=checked,
        ),
    ] = None,
) -> None:
    """Show one event: its payload, its place in the chain, and every claim on it."""
    with _bus(invocation) as store:
        events = store.inspect_event(event_id, namespace)
    if not events:
        raise EventNotFoundError(event_id, namespace)
    if invocation.output.json:
        invocation.output.document({"events": [event_document(info) for info in events]})
        return
    for info in events:
        show_event(invocation.output, info)


@app.command("replay")
@with_settings
def replay(
    invocation: Invocation,
    event_id: EventId,
    namespace: Namespace = "default",
    apply: Apply = False,
) -> None:
    """Send an event again as a new one, to all its handlers."""
    with _bus(invocation) as store:
        events = store.inspect_event(event_id, namespace)
        if not events:
            raise EventNotFoundError(event_id, namespace)
        copy = store.replay_event(namespace, event_id) if apply else None
    document = {
        "applied": apply,
        "event_id": event_id,
        "namespace": namespace,
        "new_event_id": copy["id"] if copy is not None else None,
    }
    if invocation.output.json:
        invocation.output.document(document)
    elif copy is not None:
        invocation.output.line(f"Sent {event_id} again as {copy['id']}.")
    else:
        kind = events[0].envelope["type"]
        invocation.output.line(f"Would send {kind} {event_id} again. To do it, add --apply.")


@app.command("redrive")
@with_settings
def redrive(
    invocation: Invocation,
    namespace: Namespace = "default",
    handler: OfHandler = None,
    event: Annotated[
        str | None, typer.Option("--event", metavar="ID", help="Only of this event.")
    ] = None,
    limit: Limit = 1_000,
    apply: Apply = False,
) -> None:
    """Send dead letters again, each to the handler that gave up on it."""
    sent: list[tuple[DeadLetter, str]] = []
    with _bus(invocation) as store:
        letters = store.list_dead_letters(namespace, limit, handler_id=handler)
        letters = [letter for letter in letters if event in (None, letter.event_id)]
        if apply:
            for letter in letters:
                copy = store.redrive(letter)
                if copy is not None:
                    sent.append((letter, copy["id"]))
    if invocation.output.json:
        invocation.output.document(
            {
                "applied": apply,
                "dead_letters": [letter.as_dict() for letter in letters],
                "sent": [
                    {
                        "event_id": letter.event_id,
                        "handler_id": letter.handler_id,
                        "new_event_id": new_id,
                    }
                    for letter, new_id in sent
                ],
            }
        )
    elif not letters:
        invocation.output.line(f"No such dead letters in namespace {namespace}.")
    elif apply:
        invocation.output.line(f"Sent {len(sent)} of {len(letters)} dead letters again.")
    else:
        show_letters(invocation.output, letters)
        invocation.output.line(f"Would send these {len(letters)} again. To do it, add --apply.")


@app.command("cleanup")
@with_settings
def cleanup(
    invocation: Invocation,
    namespace: Namespace = "default",
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            help="How old, such as 7d, 12h or 1d12h (event_retention_ms unless told).",
        ),
    ] = None,
    apply: Apply = False,
) -> None:
    """Delete old events and their claims, handled or not; dead letters stay."""
    if older_than is not None:
        age = parse_duration(older_than)
    else:
        age = timedelta(milliseconds=invocation.config().event_retention_ms)
    with _bus(invocation) as store:
        try:
            before = store.now() - age
        except OverflowError:
            raise typer.BadParameter(
                f"{older_than} ago is before the calendar begins", param_hint="--older-than"
            ) from None
        count = store.cleanup_events(namespace, before, apply=apply)
    if invocation.output.json:
        invocation.output.document(
            {
                "applied": apply,
                "namespace": namespace,
                "before": timestamp(before),
                "events": count,
            }
        )
    elif apply:
        invocation.output.line(f"Deleted {counted(count, 'event')} from before {moment(before)}.")
    else:
        invocation.output.line(
            f"Would delete {counted(count, 'event')} from before {moment(before)}. "
            "To do it, add --apply."
        )


# -- helpers --------------------------------------------------------------------------------------


@contextmanager
def _bus(invocation: Invocation) -> Iterator[EventStore]:
    from storage_engine.events.protocol import open_event_store

    invocation.refuse_branch("events")
    with invocation.repository() as repository:
        yield open_event_store(repository, invocation.config())


def _show_all_malformed(invocation: Invocation, namespace: str, limit: int) -> None:
    with _bus(invocation) as store:
        objects = store.list_malformed(namespace, limit)
    if invocation.output.json:
        invocation.output.document({"malformed": [asdict(malformed) for malformed in objects]})
    elif not objects:
        invocation.output.line(f"Nothing is malformed in namespace {namespace}.")
    else:
        show_malformed(invocation.output, objects)


app.command("peek")(with_settings(peek))
app.command("run")(with_settings(run))
