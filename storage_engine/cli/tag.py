"""`onto tag`: names for commits."""

from __future__ import annotations

from typing import Annotated

import typer

from storage_engine.cli.options import Invocation, with_settings

app = typer.Typer()


@app.callback()
@with_settings
def tag(_invocation: Invocation) -> None:
    """Give commits names, to read and restore by; a tag keeps its files from being collected."""


@app.command("list")
@with_settings
def list_(invocation: Invocation) -> None:
    """List the tags, by name."""
    from storage_engine.maintenance.tags import list_tags

    with invocation.repository() as repository:
        found = list_tags(repository)
    if invocation.output.json:
        invocation.output.document({"tags": [one.as_dict() for one in found]})
    elif not found:
        invocation.output.line("No tags yet: `onto tag create NAME` names the latest commit.")
    else:
        invocation.output.table(
            ["tag", "commit", "created", "runtime"],
            [(one.name, one.commit_id, one.created_at, one.runtime_id) for one in found],
        )


@app.command("create")
@with_settings
def create(
    invocation: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name.")],
    ref: Annotated[
        str | None,
        typer.Argument(
            metavar="[REF]", help="Commit id, time or another tag; the latest commit unless told."
        ),
    ] = None,
) -> None:
    """Name a commit. A name that is taken by another commit is refused."""
    from storage_engine.maintenance.references import commit_of, parse_reference
    from storage_engine.maintenance.tags import create_tag

    with invocation.repository() as repository:
        commit_id = commit_of(repository, parse_reference(ref)) if ref is not None else None
        made = create_tag(repository, name, commit_id)
    if invocation.output.json:
        invocation.output.document(made.as_dict())
    else:
        invocation.output.line(f"Tag {made.name} names commit {made.commit_id}.")


@app.command("delete")
@with_settings
def delete(
    invocation: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name.")],
) -> None:
    """Take a name away; the commit stays, its files may be collected if nothing else needs them."""
    from storage_engine.maintenance.tags import delete_tag

    with invocation.repository() as repository:
        gone = delete_tag(repository, name)
    if invocation.output.json:
        invocation.output.document(gone.as_dict())
    else:
        invocation.output.line(f"Tag {gone.name} is gone; it named commit {gone.commit_id}.")
