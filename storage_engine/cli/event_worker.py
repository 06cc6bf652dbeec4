"""`onto events run` and `peek`: a worker, and whether there is something to do for one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from storage_engine.cli.arguments import Invocation
from storage_engine.cli.output import Output, moment
from storage_engine.commitlog.records import timestamp
from storage_engine.wording import counted

if TYPE_CHECKING:
    from storage_engine.events.outcomes import Totals
    from storage_engine.events.protocol import Peek


def checked(namespace: str | None) -> str | None:
    from storage_engine.runtime.arguments import checked_namespace

    return checked_namespace(namespace) if namespace is not None else None


Namespace = Annotated[
    str,
    typer.Option("--namespace", metavar="NAME", help="The namespace to look at.", callback=checked),
]


Handlers = Annotated[
    list[str],
    typer.Option(
        "--handlers",
        metavar="MODULE",
        help="Python module with handlers and schedules; may be given several times.",
    ),
]


def peek(invocation: Invocation, handlers: Handlers, namespace: Namespace = "default") -> None:
    """See at a glance whether handlers have something to do."""
    from storage_engine.events.protocol import open_event_store

    subscriptions = [handler.subscription() for handler in _load(handlers)[0]]
    invocation.refuse_branch("events")
    with invocation.repository() as repository:
        store = open_event_store(repository, invocation.config())
        seen, now = store.peek(namespace, subscriptions), store.now()
    if invocation.output.json:
        invocation.output.document(
            {
                **asdict(seen),
                "oldest": _written(seen.oldest),
                "next_due": _written(seen.next_due),
                "by_type": {
                    name: {"events": of.events, "oldest": _written(of.oldest)}
                    for name, of in seen.by_type.items()
                },
            }
        )
    else:
        invocation.output.line(_glance(seen, now))


def _written(at: datetime | None) -> str | None:
    return timestamp(at) if at is not None else None


def _glance(seen: Peek, now: datetime) -> str:
    if not seen.pending:
        return "Nothing is left to handle."
    pending = f"{seen.pending:,} or more events" if seen.more else counted(seen.pending, "event")
    parts = [f"{pending} pending"]
    if seen.oldest is not None:
        parts.append(f"the oldest {max((now - seen.oldest).total_seconds(), 0):.0f} s old")
    if seen.is_exact:
        parts.append(f"{seen.due} due")
    elif seen.due:
        parts.append("some of them due")
    else:
        parts.append(f"none due of {seen.looked_at} that were looked at")
    if not seen.due and seen.next_due is not None:
        parts.append(f"the next at {moment(seen.next_due)}")
    return ", ".join(parts)


def run(
    invocation: Invocation,
    handlers: Handlers,
    namespace: Namespace = "default",
    drain: Annotated[
        bool, typer.Option("--drain", help="End when nothing is due, instead of waiting.")
    ] = False,
    max_iterations: Annotated[
        int | None,
        typer.Option("--max-iterations", metavar="N", min=1, help="End after so many rounds."),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency",
            metavar="N",
            min=1,
            help="Run up to so many handlers at once, in threads.",
        ),
    ] = 1,
) -> None:
    """Run a worker: handle events as they come, until SIGTERM or Ctrl-C."""
    from storage_engine.runtime.session import Session

    if drain and max_iterations is not None:
        raise typer.BadParameter("--drain and --max-iterations exclude each other")
    invocation.refuse_branch("events run")
    loaded, schedules = _load(handlers)
    session = Session(_session_target(invocation), config=invocation.config(), namespace=namespace)
    try:
        with _status_line() as status:
            report = status if invocation.output.json else _with_notes(invocation.output, status)
            if drain:
                totals = session.drain(loaded, concurrency=concurrency, progress=report)
            else:
                totals = session.run(
                    loaded,
                    schedules=schedules,
                    concurrency=concurrency,
                    max_iterations=max_iterations,
                    progress=report,
                )
    finally:
        session.close()
    if invocation.output.json:
        invocation.output.document(asdict(totals))
    else:
        invocation.output.line(_sentence(totals))


def _session_target(invocation: Invocation) -> str:
    """As a URI: a path alone would be a directory where it does not end like a SQLite file."""
    target = invocation.target()
    return target.uri if target.sqlite_path is None else f"sqlite:///{quote(target.sqlite_path)}"


def _load(modules: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """Handlers and schedules by the names that the modules give them."""
    from storage_engine.errors import HandlerError
    from storage_engine.events.schedules import Schedule
    from storage_engine.runtime.handlers import Handler

    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of the current folder, as with `python -m`
    handlers: list[Any] = []
    schedules: list[Any] = []
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise HandlerError(
                f"the module {name} cannot be imported ({error}); give a module name such as "
                "shop.handlers, in the current folder or installed"
            ) from error
        values = list(vars(module).values())
        handlers += [v for v in values if isinstance(v, Handler) and v not in handlers]
        schedules += [v for v in values if isinstance(v, Schedule) and v not in schedules]
    if not handlers:
        raise HandlerError(
            f"no handlers in {', '.join(modules)}: decorate functions with @on_event(EventClass)"
        )
    return handlers, schedules


@contextmanager
def _status_line() -> Iterator[Callable[[Totals], None] | None]:
    """One line on stderr that is kept up to date, where someone may be watching."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False, emoji=False)
    with console.status("waiting for events") as status:
        yield lambda totals: status.update(_sentence(totals))


def _with_notes(
    output: Output, status: Callable[[Totals], None] | None
) -> Callable[[Totals], None]:
    """Notes of handlers' commits on stderr, as they come."""
    shown = 0

    def report(totals: Totals) -> None:
        nonlocal shown
        for note in totals.notes[shown:]:
            output.note(note)
        shown = len(totals.notes)
        if status is not None:
            status(totals)

    return report


def _sentence(totals: Totals) -> str:
    parts = [f"{totals.handled} handled", f"{totals.failed} failed"]
    for count, what in (
        (totals.dead_lettered, "dead letters"),
        (totals.dropped, "lost to other workers"),
        (totals.fired, "fired by schedules"),
        (totals.malformed, "malformed"),
        (totals.held, "in hand"),
        (totals.more_notes, "notes not shown"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return ", ".join(parts)
