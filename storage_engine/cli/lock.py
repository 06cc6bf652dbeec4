"""`onto lock`: who holds the write lock, and how to take it away."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from storage_engine.cli.arguments import Invocation, with_settings
from storage_engine.cli.errors import CommandError
from storage_engine.errors import ConfigurationError, IntegrityError

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository

app = typer.Typer()


class NoLockObject(CommandError):
    """The storage has no write lock of this kind."""


@app.callback()
@with_settings
def lock_group(_invocation: Invocation) -> None:
    """See who holds the write lock, and take it from a holder that will not give it back."""


@app.command("show")
@with_settings
def lock_show(invocation: Invocation) -> None:
    """Show who holds the write lock, since when, until when, and by which token."""
    with _objects(invocation) as objects:
        lock, problem = _read(objects)
    if invocation.output.json:
        invocation.output.document({"lock": lock, "problem": problem})
    elif problem is not None:
        invocation.output.line(problem)
    elif lock is None:
        invocation.output.line("Nobody holds the write lock.")
    else:
        invocation.output.facts(
            [
                ("owner", lock["owner_id"]),
                ("holder", ", ".join(f"{name} {value}" for name, value in lock["holder"].items())),
                ("since", lock["acquired_at"]),
                ("lease until", f"{lock['expires_at']} ({_state(lock)})"),
                ("token", lock["token"]),
            ]
        )


@app.command("break")
@with_settings
def lock_break(
    invocation: Invocation,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TOKEN",
            help="The token that `onto lock show` prints; a lock that is unreadable has none.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it, without asking first.")] = False,
) -> None:
    """Take the write lock away from its holder."""
    with _objects(invocation) as objects:
        lock, problem = _read(objects)
        if problem is None and lock is not None and token is None:
            raise ConfigurationError("name the lock that is meant: --token, from `onto lock show`")
        if not yes:
            _ask(f"the write lock of {lock['owner_id']}" if lock else "the write lock")
        broken = objects.break_lock(token)
    if invocation.output.json:
        invocation.output.document({"broken": True, "lock": broken})
    else:
        whose = f"of {broken['owner_id']}" if broken is not None else "that nobody could read"
        invocation.output.line(f"Broke the write lock {whose}: the next writer takes it.")


def _ask(what: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigurationError("nobody is there to be asked: say --yes")
    typer.confirm(f"Break {what}? A holder that lives loses its work", abort=True)


@contextmanager
def _objects(invocation: Invocation) -> Iterator[ObjectRepository]:
    with invocation.repository() as repository:
        if repository.objects is None:
            raise NoLockObject(
                "a SQLite storage has no lock of ours: SQLite itself locks the file, for as long "
                "as a transaction lasts, and frees it when the process ends"
            )
        yield repository.objects


def _read(objects: ObjectRepository) -> tuple[dict[str, Any] | None, str | None]:
    """The lock, and what is wrong with it when it cannot be read."""
    try:
        return objects.lock_info(), None
    except IntegrityError as error:
        return None, str(error)


def _state(lock: dict[str, Any]) -> str:
    if lock["expired"]:
        return "expired: the next writer takes it over"
    if lock["gone"]:
        return "its process has ended: the next writer of this machine takes it over"
    return "held"
