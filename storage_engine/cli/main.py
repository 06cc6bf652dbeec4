"""The `onto` program: its command tree and its entry point."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import cast

import typer
from typer.main import get_command

from storage_engine.cli import errors
from storage_engine.cli.arguments import Invocation, with_settings
from storage_engine.cli.tree import Program, bare_flags

_STDERR = 2  # the last of the standard streams

app = typer.Typer(
    name="onto",
    help="Look after Ontologia storages: create them, query them, read their history.",
    cls=Program,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
@with_settings
def _root(_invocation: Invocation, ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        raise typer.TyperException("no command given")


def run(args: Sequence[str]) -> int:
    """Run `onto` with these arguments and return its exit code."""
    return errors.run(_program(), args)


@cache
def _program() -> errors.Command:
    """Once a process, however often it is run: building options takes longer than most commands."""
    return cast("errors.Command", bare_flags(get_command(app)))


def _fill_closed_streams() -> None:
    """Where standard streams were closed, the next files that are opened, a database perhaps, would
    take their place and get what is meant for them."""
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while os.open(os.devnull, os.O_RDWR) <= _STDERR:
        pass
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _write_any_character() -> None:
    """Programs are given UTF-8 whatever the locale, as files are; on a terminal, what its locale
    has no character for is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = stream.encoding if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def main() -> None:
    """The console script."""
    _fill_closed_streams()
    _write_any_character()
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command had begun
        code = errors.INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
