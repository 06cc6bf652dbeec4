"""`onto commits`, `onto tag` and `onto restore`: the history, names in it, and the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from storage_engine.cli.arguments import Invocation, with_settings
from storage_engine.cli.errors import CommandError
from storage_engine.cli.output import Output, shown_time
from storage_engine.wording import counted

if TYPE_CHECKING:
    from storage_engine.maintenance.restore import Restore
    from storage_engine.query.reference import Reference
    from storage_engine.repository import CommitRecord

LIST_LIMIT = 10
EXAMINE_LIMIT = 50
_OF_SCHEMA_COMMITS = ("kind", "migrated_types", "dropped_types")

app = typer.Typer(invoke_without_command=True)


class CommitNotFoundError(CommandError):
    """There is no commit with this number."""

    def __init__(self, uri: str, commit_id: int, head_commit_id: int) -> None:
        self.uri = uri
        self.commit_id = commit_id
        self.head_commit_id = head_commit_id
        there = f"1 to {head_commit_id} are there" if head_commit_id else "there are none yet"
        super().__init__(f"no commit {commit_id} in {uri}: {there}; `onto commits` lists them")


@app.callback()
@with_settings
def commits(
    invocation: Invocation,
    ctx: typer.Context,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help=f"How many at most ({LIST_LIMIT} unless told)."
        ),
    ] = None,
    since: Annotated[
        int | None,
        typer.Option("--since", metavar="ID", min=0, help="Only commits after this one."),
    ] = None,
) -> None:
    """List commits, newest first, or examine one."""
    if ctx.invoked_subcommand is not None:
        if limit is not None or since is not None:
            raise typer.TyperException(
                f"--limit and --since before {ctx.invoked_subcommand!r} belong to the list; "
                "write the command's own options after its name"
            )
        return
    from storage_engine.model.validation import INT64_MAX

    with invocation.repository() as repository:
        records = repository.list_commits(
            min(limit or LIST_LIMIT, INT64_MAX), min(since or 0, INT64_MAX)
        )
    older = records[-1].id - 1 - (since or 0) if records else 0  # ids have no gaps
    if invocation.output.json:
        document = {"commits": [record.as_dict() for record in records], "more": older}
        invocation.output.document(document)
    else:
        _show_list(invocation.output, records, older, since)


@app.command("examine")
@with_settings
def examine(
    invocation: Invocation,
    commit_id: Annotated[int, typer.Argument(metavar="ID", help="The commit's number.")],
    limit: Annotated[
        int,
        typer.Option("--limit", metavar="N", min=0, help="How many changed identities to show."),
    ] = EXAMINE_LIMIT,
) -> None:
    """Show one commit: its metadata, and what it inserted and updated."""
    from storage_engine.model.validation import INT64_MAX

    with invocation.repository() as repository:
        record = repository.get_commit(min(commit_id, INT64_MAX))
        if record is None:
            raise CommitNotFoundError(repository.uri, commit_id, repository.head_commit_id())
        changes = repository.list_commit_changes(commit_id)
    document = record.as_dict() | {
        "changes": _counts(changes),
        "identities": changes[:limit],
        "identities_total": len(changes),
    }
    if invocation.output.json:
        invocation.output.document(document)
    else:
        _show_commit(invocation.output, record, document)


def _counts(changes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows per type; `changes` come grouped by type."""
    counts = Counter((c["kind"], c["type_name"], c["operation"]) for c in changes)
    types = dict.fromkeys((kind, name) for kind, name, _ in counts)
    return [
        {
            "kind": kind,
            "type_name": name,
            "inserted": counts[kind, name, "insert"],
            "updated": counts[kind, name, "update"],
        }
        for kind, name in types
    ]


def _show_list(
    output: Output, records: Sequence[CommitRecord], older: int, since: int | None
) -> None:
    if not records:
        output.line(f"No commits after {since}." if since else "No commits yet.")
        return
    output.table(
        ["id", "created", "kind", "runtime", "types", "metadata"],
        [
            (r.id, r.created_at, r.kind, r.runtime_id, ", ".join(r.types), _metadata(r))
            for r in records
        ],
    )
    if older:
        output.line(f"{older} older not shown: raise --limit.")


def _show_commit(output: Output, record: CommitRecord, document: dict[str, Any]) -> None:
    output.facts(
        [
            ("commit", record.id),
            ("parent", record.parent_id),
            ("created", record.created_at),
            ("runtime", record.runtime_id),
            ("kind", record.kind),
            *((f"meta {name}", value) for name, value in record.metadata.items()),
        ]
    )
    output.line()
    if not document["changes"]:
        output.line("No rows: this commit carries events or metadata only.")
        return
    output.table(
        ["type", "kind", "inserted", "updated"],
        [(c["type_name"], c["kind"], c["inserted"], c["updated"]) for c in document["changes"]],
    )
    shown, total = document["identities"], document["identities_total"]
    if shown:
        output.line()
        output.table(
            ["operation", "type", "identity"],
            [(c["operation"], c["type_name"], shown_identity(c)) for c in shown],
        )
    if len(shown) < total:
        output.line(f"{total - len(shown)} more not shown: raise --limit.")


def _metadata(record: CommitRecord) -> str:
    """Without what a commit that is no data says about itself, which `examine` shows."""
    shown = (
        f"{name}={value}"
        for name, value in record.metadata.items()
        if record.kind == "data" or name not in _OF_SCHEMA_COMMITS
    )
    return ", ".join(shown)


def shown_identity(change: dict[str, Any]) -> str:
    if change["kind"] == "entity":
        return str(change["key"])
    instance = f" [{change['instance_key']}]" if change["instance_key"] else ""
    return f"{change['left_key']} -> {change['right_key']}{instance}"


tag_app = typer.Typer()


@tag_app.callback()
@with_settings
def tag_group(_invocation: Invocation) -> None:
    """Give commits names, to read and restore by; a tag keeps its files from being collected."""


@tag_app.command("list")
@with_settings
def tag_list(invocation: Invocation) -> None:
    """List the tags, by name."""

    with invocation.repository() as repository:
        tags = repository.list_tags()
    if invocation.output.json:
        invocation.output.document({"tags": [tag.as_dict() for tag in tags]})
    elif not tags:
        invocation.output.line("No tags yet: `onto tag create NAME` names the latest commit.")
    else:
        invocation.output.table(
            ["tag", "commit", "created", "runtime"],
            [
                (
                    tag.name,
                    f"{tag.branch}@{tag.commit_id}" if tag.incarnation else tag.commit_id,
                    shown_time(tag.created_at),
                    tag.runtime_id,
                )
                for tag in tags
            ],
        )


@tag_app.command("create")
@with_settings
def tag_create(
    invocation: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name.")],
    ref: Annotated[
        str | None,
        typer.Argument(
            metavar="REF", help="Commit id, time or another tag; the latest commit unless told."
        ),
    ] = None,
) -> None:
    """Name a commit. A name that is taken by another commit is refused."""
    reference = parse_commit(ref, "REF") if ref is not None else None
    with invocation.repository() as repository:
        commit_id = repository.require_commit(reference) if reference is not None else None
        made = repository.create_tag(name, commit_id)
    if invocation.output.json:
        invocation.output.document(made.as_dict())
    else:
        invocation.output.line(f"Tag {made.name} names commit {made.commit_id}.")


@tag_app.command("delete")
@with_settings
def tag_delete(
    invocation: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name.")],
) -> None:
    """Take a name away; the commit stays, its files may be collected if nothing else needs them."""

    with invocation.repository() as repository:
        gone = repository.delete_tag(name)
    if invocation.output.json:
        invocation.output.document(gone.as_dict())
    else:
        invocation.output.line(f"Tag {gone.name} is gone; it named commit {gone.commit_id}.")


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
    from storage_engine.maintenance.restore import restore as run

    reference = parse_commit(ref, "REF")
    with invocation.repository() as repository:
        done = run(repository, reference, apply=apply, examples=limit)
    if invocation.output.json:
        invocation.output.document(done.as_dict())
    else:
        _show_restore(invocation.output, done, ref)


def parse_commit(text: str, argument: str) -> Reference:
    from storage_engine.query.reference import parse_reference

    try:
        return parse_reference(text, argument)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _show_restore(output: Output, done: Restore, ref: str) -> None:
    to = f"commit {done.commit_id}" + ("" if ref == str(done.commit_id) else f" ({ref})")
    if done.types:
        output.table(
            ["type", "kind", "rows restored", "came later, stay"],
            [(t.type_name, t.kind, t.restored, t.created_after) for t in done.types],
        )
    later = [
        (t.type_name, " / ".join(filter(None, identity)))
        for t in done.types
        for identity in t.examples
    ]
    if later:
        output.line()
        output.line(
            f"{counted(done.created_after, 'identity')} came after {to}. Nothing is "
            "ever deleted, so they stay as they are:"
        )
        output.table(["type", "identity"], later)
        if len(later) < done.created_after:
            output.line(f"{done.created_after - len(later)} more not shown: raise --limit.")
    if done.types:
        output.line()
    if done.new_commit_id is not None:
        output.line(
            f"Restored {counted(done.restored, 'row')} to {to}, as commit {done.new_commit_id}."
        )
        for note in done.notes:
            output.note(note)
    elif done.restored:
        output.line(
            f"Nothing was written. To restore {counted(done.restored, 'row')} to {to}: --apply"
        )
    else:
        output.line(f"Nothing to restore: no row differs from {to}.")
