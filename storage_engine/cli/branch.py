"""`onto branch`: fork, compare, merge, throw away."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from storage_engine.cli.arguments import Invocation, parse_duration, with_settings
from storage_engine.cli.output import Output, shown_time
from storage_engine.errors import MergeConflictError
from storage_engine.wording import counted

if TYPE_CHECKING:
    from storage_engine.repository.object.branches import Branches
    from storage_engine.repository.object.merge import MergeReport, MergeTerms
    from storage_engine.repository.protocol import Repository

SHOWN = 20
_NAMED = "is told which branch by its argument"
_POLICIES = ("fail", "ours", "theirs", "fields")

app = typer.Typer()

_Name = Annotated[str, typer.Argument(metavar="NAME", help="The branch, such as run/42.")]
_Apply = Annotated[bool, typer.Option("--apply", help="Do it; without it, only say what.")]
_Limit = Annotated[
    int, typer.Option("--limit", metavar="N", min=0, help="How many to show; all are counted.")
]
_OnConflict = Annotated[
    str,
    typer.Option(
        "--on-conflict",
        metavar="|".join(_POLICIES),
        autocompletion=lambda: list(_POLICIES),
        help="Of rows that both sides changed: refuse, keep the target's, take what comes, or "
        "combine changes to different fields.",
    ),
]
_Expectations = Annotated[
    str | None,
    typer.Option(
        "--expectations",
        metavar="FILE",
        help="JSON with rules by type that the result must keep, such as "
        '{"Customer": [{"unique": "email"}]}.',
    ),
]
_Upgraders = Annotated[
    str | None,
    typer.Option(
        "--upgraders",
        metavar="MODULE",
        help="Module with functions marked @upgrader, for rows of one side where the other has "
        "migrated the type; without it, those that --models loads.",
    ),
]


@app.callback()
@with_settings
def branch_group(_invocation: Invocation) -> None:
    """Work beside main: fork branches, compare them, merge them, or throw them away."""


@app.command("list")
@with_settings
def branch_list(invocation: Invocation) -> None:
    """List the branches, main first."""
    invocation.refuse_branch("branch list")
    with invocation.repository() as repository:
        branches = _branches(repository).list()
    if invocation.output.json:
        invocation.output.document({"branches": [branch.as_dict() for branch in branches]})
        return
    invocation.output.table(
        ["branch", "parent", "commits", "head", "updated", "owner", "expires", "protected"],
        [
            (
                branch.name,
                f"{branch.parent}@{branch.base_commit_id}" if branch.parent else None,
                branch.commits,
                branch.commit_id,
                shown_time(branch.updated_at),
                branch.owner or None,
                shown_time(branch.expires_at) if branch.expires_at else None,
                "yes" if branch.protected else None,
            )
            for branch in branches
        ],
    )


@app.command("create")
@with_settings
def branch_create(
    invocation: Invocation,
    name: _Name,
    at: Annotated[
        str | None,
        typer.Option(
            "--at", metavar="REF", help="Commit id, time or tag; the latest commit unless told."
        ),
    ] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="TEXT", help="Whose it is, for people.")
    ] = None,
    expires_in: Annotated[
        str | None,
        typer.Option(
            "--expires-in", metavar="SPAN", help="After which `onto gc` deletes it: 12h, 7d."
        ),
    ] = None,
) -> None:
    """Fork a branch from main, or from --branch. Nothing is copied."""
    from storage_engine.cli.commits import parse_commit
    from storage_engine.runtime.branches import create_branch

    reference = parse_commit(at, "--at") if at is not None else None
    with invocation.repository() as repository:
        made = create_branch(
            repository,
            name,
            reference,
            owner=owner,
            expires_in=parse_duration(expires_in) if expires_in is not None else None,
        )
    if invocation.output.json:
        invocation.output.document(made.as_dict())
    else:
        invocation.output.line(
            f"Branch {made.name} goes on from commit {made.base_commit_id} of {made.parent}: "
            f"onto --branch {made.name} ..."
        )


@app.command("delete")
@with_settings
def branch_delete(invocation: Invocation, name: _Name, apply: _Apply = False) -> None:
    """Delete a branch; what was merged stays. Its children go first."""
    invocation.refuse_branch("branch delete", _NAMED)
    with invocation.repository() as repository:
        gone = _branches(repository).delete(name, dry_run=not apply)
    if invocation.output.json:
        invocation.output.document({**gone.as_dict(), "applied": apply})
        return
    commits = counted(gone.commits, "commit")
    if apply:
        invocation.output.line(f"Branch {name} is gone, with {commits} of its own.")
    else:
        invocation.output.line(
            f"Nothing was deleted. To delete {name}, with {commits} of its own: --apply"
        )


@app.command("protect")
@with_settings
def branch_protect(
    invocation: Invocation,
    name: _Name,
    off: Annotated[bool, typer.Option("--off", help="Lift the protection.")] = False,
) -> None:
    """Let a branch, or main, take merges only."""
    invocation.refuse_branch("branch protect", _NAMED)
    with invocation.repository() as repository:
        branch = _branches(repository).protect(name, not off)
    if invocation.output.json:
        invocation.output.document(branch.as_dict())
    else:
        takes = "merges only" if branch.protected else "commits and merges"
        invocation.output.line(f"{branch.name} takes {takes}.")


@app.command("diff")
@with_settings
def branch_diff(
    invocation: Invocation,
    name: _Name,
    other: Annotated[
        str,
        typer.Argument(metavar="OTHER", help="What to compare it with; its parent unless told."),
    ] = "",
    limit: _Limit = SHOWN,
) -> None:
    """Show what a branch has otherwise than its parent, or another branch."""
    from storage_engine.cli.history import counted_changes, show_diff
    from storage_engine.runtime.branches import diff_branches

    with invocation.repository() as repository:
        before = other or _parent(_branches(repository), name)
        changes = diff_branches(repository, before, name)
    document = counted_changes(before, name, iter(changes), limit)
    if invocation.output.json:
        invocation.output.document(document)
    else:
        show_diff(invocation.output, document)


@app.command("merge")
@with_settings
def branch_merge(
    invocation: Invocation,
    name: _Name,
    on_conflict: _OnConflict = "fail",
    expectations: _Expectations = None,
    upgraders: _Upgraders = None,
    limit: _Limit = SHOWN,
    apply: _Apply = False,
) -> None:
    """Bring the changes of a branch into its parent, in one commit; exit code 6 on conflicts."""
    terms = _terms(invocation, on_conflict, expectations, upgraders)
    with invocation.repository() as repository:
        branches = _branches(repository)
        # Somebody who says --branch means to merge into it: refused if it is not the parent.
        parent = _parent(branches, name)
        opened = branches.opened(invocation.settings.branch or parent)
        with opened as target, _bounded(limit):
            report = target.branches.merge(name, terms(target), dry_run=not apply)
            target.flush()
    _show(invocation, report, limit)


@app.command("update")
@with_settings
def branch_update(
    invocation: Invocation,
    name: _Name,
    on_conflict: _OnConflict = "fail",
    expectations: _Expectations = None,
    upgraders: _Upgraders = None,
    limit: _Limit = SHOWN,
    apply: _Apply = False,
) -> None:
    """Bring what its parent has changed into a branch; exit code 6 on conflicts."""
    if invocation.settings.branch != name:
        invocation.refuse_branch("branch update", _NAMED)
    terms = _terms(invocation, on_conflict, expectations, upgraders)
    with (
        invocation.repository() as repository,
        _branches(repository).opened(name) as target,
        _bounded(limit),
    ):
        report = target.branches.update(terms(target), dry_run=not apply)
        target.flush()
    _show(invocation, report, limit)


def _branches(repository: Any) -> Branches:
    from storage_engine.runtime.branches import branches_of

    return branches_of(repository)


def _parent(branches: Branches, name: str) -> str:
    fork = branches.head(name).fork
    if fork is None:
        raise typer.BadParameter(f"{name} has no parent")
    return fork.parent


def _terms(
    invocation: Invocation, on_conflict: str, expectations: str | None, upgraders: str | None
) -> Callable[[Repository], MergeTerms]:
    """Of a storage; what is wrong with the options is said before one is opened."""
    from storage_engine.runtime.arguments import BoundTypes, imported_module
    from storage_engine.runtime.branches import merge_terms
    from storage_engine.schema.upgraders import load_upgraders

    if on_conflict not in _POLICIES:
        raise typer.BadParameter(f"--on-conflict takes one of {', '.join(_POLICIES)}")
    invocation.models()
    policy: Any = on_conflict
    rules = _read_expectations(expectations) if expectations is not None else None
    steps = load_upgraders(imported_module(upgraders, "--upgraders")) if upgraders else None
    return lambda repository: merge_terms(
        BoundTypes((), ()), repository, on_conflict=policy, expectations=rules, upgraders=steps
    )


def _read_expectations(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--expectations {path}: {error}") from None


@contextmanager
def _bounded(limit: int) -> Iterator[None]:
    """What is refused for its conflicts tells as many as a preview does."""
    try:
        yield
    except MergeConflictError as error:
        del error.conflicts[limit:]
        raise


def _show(invocation: Invocation, report: MergeReport, limit: int) -> None:
    from storage_engine.cli.errors import CONFLICT

    output = invocation.output
    if output.json:
        document = report.as_dict()
        document["conflicts_total"] = len(report.conflicts)
        document["conflicts"] = document["conflicts"][:limit]
        output.document(document)
    else:
        _show_report(output, report, limit)
    if report.conflicts:
        raise typer.Exit(CONFLICT)


def _show_report(output: Output, report: MergeReport, limit: int) -> None:
    if report.types:
        output.table(
            ["type", "kind", "inserted", "updated", "decided", "schema"],
            [
                (t.type_name, t.kind, t.inserted, t.updated, t.resolved, t.schema or None)
                for t in report.types
            ],
        )
    if report.conflicts:
        output.line()
        output.table(
            ["conflict", "type", "identity", "fields"],
            [
                (
                    c.kind,
                    c.type_name,
                    " / ".join(filter(None, c.identity)) or None,
                    ", ".join(c.fields) or c.message,
                )
                for c in report.conflicts[:limit]
            ],
        )
        more = len(report.conflicts) - limit
        if more > 0:
            output.line(f"{more} more not shown: raise --limit.")
    into = f"{report.source} (commit {report.source_commit_id}) into {report.target}"
    events = f", {counted(report.events, 'event')}" if report.events else ""
    if report.conflicts:
        output.line(f"Nothing was done: {counted(len(report.conflicts), 'conflict')} of {into}.")
    elif report.commit_id is not None:
        output.line(f"Brought {into} as commit {report.commit_id}{events}.")
    elif report.empty or not report.dry_run:
        output.line(f"Nothing to bring from {into}.")
    else:
        output.line(f"Nothing was written. To bring {into}{events}: --apply")
