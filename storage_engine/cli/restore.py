"""`onto restore`: a new commit with the state of an older one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from storage_engine.cli.options import Invocation
from storage_engine.cli.output import Output

if TYPE_CHECKING:
    from storage_engine.maintenance.restore import Restore

SHOWN = 20


def restore(
    invocation: Invocation,
    ref: Annotated[str, typer.Argument(metavar="REF", help="Commit id, time or tag.")],
    limit: Annotated[
        int,
        typer.Option("--limit", metavar="N", min=0, help="How many later identities to name."),
    ] = SHOWN,
    apply: Annotated[
        bool, typer.Option("--apply", help="Make the commit; without it, only say what it has.")
    ] = False,
) -> None:
    """Make the state of an older commit the latest, by a new commit; history stays."""
    from storage_engine.maintenance.references import parse_reference
    from storage_engine.maintenance.restore import restore as run

    with invocation.repository() as repository:
        done = run(repository, parse_reference(ref), apply=apply, examples=limit)
    if invocation.output.json:
        invocation.output.document(done.as_dict())
    else:
        _show(invocation.output, done, ref)


def _show(output: Output, done: Restore, ref: str) -> None:
    to = f"commit {done.commit_id}" + ("" if ref == str(done.commit_id) else f" ({ref})")
    if done.types:
        output.table(
            ["type", "kind", "rows restored", "came later, stay"],
            [(t.type_name, t.kind, t.restored, t.created_after) for t in done.types],
        )
    later = [(t.type_name, " / ".join(filter(None, one))) for t in done.types for one in t.examples]
    if later:
        output.line()
        output.line(
            f"{done.created_after} identities came after {to}. Nothing is ever deleted, so they "
            "stay as they are:"
        )
        output.table(["type", "identity"], later)
        if len(later) < done.created_after:
            output.line(f"{done.created_after - len(later)} more not shown: raise --limit.")
    if done.types:
        output.line()
    if done.new_commit_id is not None:
        output.line(f"Restored {done.restored} rows to {to}, as commit {done.new_commit_id}.")
    elif done.restored:
        output.line(f"Nothing was written. To restore {done.restored} rows to {to}: --apply")
    else:
        output.line(f"Nothing to restore: no row differs from {to}.")
