"""`onto migrate`: the classes of a module become the schema of a storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from storage_engine.cli.arguments import Invocation, written_options
from storage_engine.cli.errors import MISMATCH
from storage_engine.cli.output import Output, progress
from storage_engine.cli.schema import check_apply, show_diffs

if TYPE_CHECKING:
    from storage_engine.schema.preview import MigrationPreview, MigrationResult


def migrate(
    invocation: Invocation,
    ctx: typer.Context,
    upgraders: Annotated[
        str | None,
        typer.Option(
            "--upgraders",
            metavar="MODULE",
            help="Module with functions marked @upgrader; without it, those that --models loads.",
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Migrate; without, only say what it would do.")
    ] = False,
    token: Annotated[
        str | None, typer.Option("--token", metavar="T", help="The token that the preview printed.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Migrate without a preview and its token.")
    ] = False,
) -> None:
    """Bring the storage to the classes of --models; exit code 3 if upgraders are missing."""
    from storage_engine.runtime import migration
    from storage_engine.runtime.arguments import imported_module
    from storage_engine.schema.upgraders import load_upgraders

    if force and token is not None:
        ctx.fail("--force goes without a token: use one of them")
    if not force:
        check_apply(ctx, apply=apply, token=token)
    declared = list(invocation.models().values())
    if not declared:
        ctx.fail("name the classes: --models MODULE")
    ways = load_upgraders(imported_module(upgraders, "--upgraders")) if upgraders else None
    output = invocation.output
    with invocation.repository() as repository:
        preview = migration.preview(repository, declared, ways)
        if not (apply or force):
            _tell_preview(invocation, preview, upgraders)
            if not preview.possible:
                raise typer.Exit(MISMATCH)
            return
        total, done = sum(preview.estimated_rows.values()), 0
        with progress("migrating") as advance:

            def tell(_type_name: str, rows: int) -> None:
                nonlocal done
                done += rows
                advance(done, max(total, done))

            result = migration.apply(
                repository, declared, ways, token=token, force=force, progress=tell
            )
    if output.json:
        output.document({**result.as_dict(), "applied": result.commit_id is not None})
    else:
        _show_result(output, result)


def _tell_preview(invocation: Invocation, preview: MigrationPreview, upgraders: str | None) -> None:
    output = invocation.output
    if output.json:
        output.document({**preview.as_dict(), "applied": False})
        return
    if not preview.has_changes:
        output.line("Nothing to migrate: the storage has the types as they are declared.")
        return
    show_diffs(output, preview.diffs)
    output.line()
    output.table(
        ["type", "rows to rewrite"],
        [
            (
                name,
                preview.estimated_rows.get(name, 0),
            )
            for name in dict.fromkeys([*preview.estimated_rows, *preview.types_schema_only])
        ],
    )
    output.line()
    if preview.missing_upgraders:
        output.line("Upgraders are missing. Each takes a row as a dict and returns the new one:")
        for name, version in preview.missing_upgraders:
            output.line(f"  @upgrader({name!r}, from_version={version})")
        output.line("Put them into a module and name it: --upgraders MODULE")
    if not preview.possible:
        output.line("It cannot be applied as it stands. Nothing was changed.")
        return
    given = written_options(("--upgraders", upgraders))
    output.line("Nothing was changed. To migrate (the token holds until the storage changes):")
    output.line(f"  onto migrate{invocation.repeated()}{given} --apply --token {preview.token}")


def _show_result(output: Output, result: MigrationResult) -> None:
    if result.commit_id is None:
        output.line("Nothing to migrate: the storage has the types as they are declared.")
        return
    output.table(
        ["type", "version", "rows rewritten"],
        [
            (name, result.new_schema_versions[name], result.rows_migrated.get(name, 0))
            for name in result.types_migrated
        ],
    )
    output.line()
    output.line(f"Migrated as commit {result.commit_id} in {result.duration_s:.1f} s.")
