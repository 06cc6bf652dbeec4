"""`onto init`: make a storage, or erase one with the token of a preview."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from storage_engine.cli.options import Invocation
from storage_engine.cli.output import Output, size

if TYPE_CHECKING:
    from storage_engine.repository import InitPlan
    from storage_engine.repository.target import Target


def init(
    invocation: Invocation,
    engine_version: Annotated[
        Literal["v1", "v2"], typer.Option("--engine-version", help="Engine of the new storage.")
    ] = "v2",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would happen, write nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Erase what is there; needs the token of a dry run.")
    ] = False,
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="T", help="The token that --force --dry-run printed."),
    ] = None,
) -> None:
    """Create an empty storage, or erase one and start again."""
    from storage_engine.repository import initialize_storage

    target = invocation.target()
    plan = initialize_storage(
        target,
        engine_version,
        invocation.config(),
        dry_run=dry_run,
        force=force,
        token=token,
    )
    if invocation.output.json:
        invocation.output.document(_as_dict(plan))
    else:
        _show(invocation.output, plan, target, invocation.settings.db)


def _as_dict(plan: InitPlan) -> dict[str, Any]:
    return {
        "uri": plan.uri,
        "backend": plan.backend,
        "engine_version": plan.engine_version,
        "applied": plan.applied,
        "objects": list(plan.objects),
        "erases": dict(plan.erases) if plan.erases is not None else None,
        "token": plan.token,
    }


def _show(output: Output, plan: InitPlan, target: Target, db: str | None) -> None:
    if plan.erases is not None:
        output.line(f"{'Erased' if plan.applied else 'Would erase'} {_erased(plan)}")
    verb = "Created" if plan.applied else "Would create"
    output.line(f"{verb} an empty {plan.engine_version} storage at {plan.uri}:")
    for name in plan.objects:
        output.line(f"  {name}")
    storage = f"--db {shlex.quote(db)}" if db else f"--storage-uri {shlex.quote(target.uri)}"
    engine = f" --engine-version {plan.engine_version}"
    output.line()
    if plan.applied:
        output.line("Next: declare types, open the storage and commit:")
        output.line(f"  from storage_engine import Session; Session({target.uri!r})")
        output.line(f"  onto info {storage}")
    elif plan.token is not None:
        output.line(f"Nothing was changed. Token: {plan.token}")
        output.line("To erase for good (the token holds until the storage changes):")
        output.line(f"  onto init {storage}{engine} --force --token {plan.token}")
    else:
        output.line("Nothing was written. To create it:")
        output.line(f"  onto init {storage}{engine}")


def _erased(plan: InitPlan) -> str:
    assert plan.erases is not None
    head = plan.erases["head_commit_id"]
    commits = f"{plan.uri}{f' with its {head} commits' if head else ', which has no commits'}"
    tables = plan.erases.get("tables")
    if tables is None:
        objects = plan.erases["objects"]
        return f"{commits}: {objects} objects, {size(plan.erases['bytes'])}, all that is under it"
    rows = ", ".join(f"{name} ({count} rows)" for name, count in tables.items())
    return f"{commits}: {rows}"
