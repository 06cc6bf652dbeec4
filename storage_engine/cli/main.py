"""The `onto` program: its command tree and its entry point."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import typer
from typer.main import get_command

from storage_engine.cli import (
    commits,
    errors,
    events,
    maintenance,
    migrate,
    query,
    schema,
    storage,
    transfer,
)
from storage_engine.cli.arguments import Invocation, with_settings

app = typer.Typer(
    name="onto",
    help="Look after Ontologia storages: create them, query them, read their history.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
@with_settings
def _root(_invocation: Invocation, ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        raise typer.TyperException("no command given")


app.command("init")(with_settings(storage.init))
app.command("info")(with_settings(storage.info))
app.add_typer(commits.app, name="commits")
app.add_typer(events.app, name="events")
app.add_typer(maintenance.index_app, name="index")
app.add_typer(storage.lock_app, name="lock")
app.add_typer(commits.tag_app, name="tag")
app.command("compact")(with_settings(maintenance.compact))
app.command("copy")(with_settings(transfer.copy))
app.command("gc")(with_settings(maintenance.gc))
app.command("migrate")(with_settings(migrate.migrate))
app.command("migrate-engine")(with_settings(transfer.migrate_engine))
app.command("restore")(with_settings(commits.restore))
app.command("verify")(with_settings(maintenance.verify))
app.add_typer(query.app, name="query")
app.add_typer(schema.app, name="schema")


def run(args: Sequence[str]) -> int:
    """Run `onto` with these arguments and return its exit code."""
    return errors.run(cast("errors.Command", get_command(app)), args)


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
