"""`onto schema`: what is stored of types and in which versions, compared, exported, dropped."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from storage_engine.cli.arguments import Invocation, with_settings
from storage_engine.cli.errors import MISMATCH
from storage_engine.cli.output import Output, shown_time
from storage_engine.errors import ConfigurationError
from storage_engine.model.spec import MISSING
from storage_engine.wording import counted

if TYPE_CHECKING:
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository import Repository
    from storage_engine.schema.diff import SchemaDiff
    from storage_engine.schema.history import SchemaVersion, TypeHistory
    from storage_engine.schema.preview import DropPreview

app = typer.Typer()

TypeName = Annotated[str, typer.Argument(metavar="NAME", help="The type's stored name.")]
KindOption = Annotated[
    Literal["entity", "relation"] | None,
    typer.Option("--kind", help="Which is meant, where an entity and a relation share a name."),
]


@app.callback()
@with_settings
def schema_group(_invocation: Invocation) -> None:
    """Look at stored types and their schema versions, compare them with classes, drop them."""


# --- looking ------------------------------------------------------------------------------------


@app.command("list")
@with_settings
def list_types(invocation: Invocation) -> None:
    """List all types that are or were stored, with their current schema versions."""
    with invocation.repository() as repository:
        histories = repository.type_histories()
        uri = repository.uri
    output = invocation.output
    ordered = [histories[ref] for ref in sorted(histories)]
    if output.json:
        output.document({"uri": uri, "types": [_summary(history) for history in ordered]})
    elif not ordered:
        output.line("No types yet: the first commit of a type registers it.")
    else:
        output.table(
            ["type", "kind", "version", "since commit", "versions", "fields", "state"],
            [
                (
                    history.name,
                    history.kind,
                    history.last.version,
                    history.last.activation_commit_id,
                    len(history.versions),
                    len(history.last.spec.fields),
                    _state(history),
                )
                for history in ordered
            ],
        )


@app.command("show")
@with_settings
def show(
    invocation: Invocation,
    name: TypeName,
    schema_version: Annotated[
        int | None,
        typer.Option(
            "--schema-version", metavar="N", min=1, help="This version; without it, the newest."
        ),
    ] = None,
    kind: KindOption = None,
) -> None:
    """Show the fields of a type in a schema version; with --models, what the class says of them."""
    with invocation.repository() as repository:
        history = _history(repository, name, kind)
        shown = _version(repository, name, schema_version, kind)
    declared = invocation.models().get(history.ref)
    output = invocation.output
    if output.json:
        notes = {} if declared is None else {"declared": _class_notes(declared)}
        output.document(
            {"type_kind": history.kind, "type_name": history.name, **shown.as_dict(), **notes}
        )
        return
    spec = shown.spec
    output.facts(
        [
            ("type", f"{history.name} ({history.kind})"),
            ("version", shown.version),
            ("current", _lifetime(shown)),
            ("primary key", spec.primary_key),
            ("instance key", spec.instance_key),
            ("left", spec.left),
            ("right", spec.right),
            ("state", _state(history)),
            ("sha256", shown.schema_sha256),
            *_told_by_class(declared),
        ]
    )
    output.line()
    _show_fields(output, shown, declared)


@app.command("history")
@with_settings
def history_command(invocation: Invocation, name: TypeName, kind: KindOption = None) -> None:
    """Show the schema versions of a type, oldest first, and what changed in each."""
    from storage_engine.schema.lineage import diff_versions

    with invocation.repository() as repository:
        history = _history(repository, name, kind)
    pairs = zip(history.versions, history.versions[1:], strict=False)
    diffs = {after.version: diff_versions(before, after) for before, after in pairs}
    output = invocation.output
    if output.json:
        changes = {str(number): diff.as_dict()["changes"] for number, diff in diffs.items()}
        output.document({**history.as_dict(), "changes": changes})
        return
    output.table(
        ["version", "commits", "made", "what changed"],
        [
            (
                version.version,
                _lifetime(version),
                shown_time(version.created_at),
                "; ".join(diffs[version.version].sentences()) or "nothing that fields show"
                if version.version in diffs
                else _origin(history),
            )
            for version in history.versions
        ],
    )
    if history.current is None:
        output.line()
        output.line(f"{history.name} is not stored any more: {_state(history)}.")


@app.command("diff")
@with_settings
def diff(
    invocation: Invocation,
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only this type.", show_default=False)
    ] = None,
    versions: Annotated[
        list[int] | None,
        typer.Argument(metavar="A B", help="Two stored versions of it.", show_default=False),
    ] = None,
    kind: KindOption = None,
) -> None:
    """Compare classes with the storage (exit code 3 if they differ), or two stored versions."""
    from storage_engine.schema.lineage import diff_versions

    models = invocation.models()
    if versions and len(versions) != 2:
        ctx.fail("two versions are compared: onto schema diff NAME A B")
    if versions is None and not models:
        ctx.fail("nothing to compare: name classes (--models MODULE) or two versions (NAME A B)")
    with invocation.repository() as repository:
        if name is not None and versions:
            before, after = (_version(repository, name, number, kind) for number in versions)
            diffs = [diff_versions(before, after)]
        else:
            diffs = _declared_diffs(repository, models, name, kind)
        uri = repository.uri
    output = invocation.output
    if output.json:
        output.document({"uri": uri, "diffs": [each.as_dict() for each in diffs]})
    elif not diffs:
        output.line("Classes and storage agree.")
    else:
        show_diffs(output, diffs)
    if not versions and any(each.from_version is not None for each in diffs):
        raise typer.Exit(MISMATCH)


@app.command("export")
@with_settings
def export(
    invocation: Invocation,
    output_file: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write to this file instead of stdout."),
    ] = None,
    history: Annotated[
        bool,
        typer.Option("--history", help="All versions, of dropped types too; else current ones."),
    ] = False,
) -> None:
    """Write the canonical schemas of the stored types as JSON."""
    with invocation.repository() as repository:
        histories = repository.type_histories()
        head = repository.head_commit_id()
    ordered = [histories[ref] for ref in sorted(histories)]
    types = (
        [each.as_dict() for each in ordered]
        if history
        else [
            {"type_kind": each.kind, "type_name": each.name, **each.current.as_dict()}
            for each in ordered
            if each.current is not None
        ]
    )
    document = {"commit_id": head, "types": types}
    if output_file is None:
        invocation.output.document(document)
        return
    try:
        output_file.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise ConfigurationError(f"--output {output_file}: {error.strerror}") from error
    if invocation.output.json:
        invocation.output.document({"output": str(output_file), "types": len(types)})
    else:
        invocation.output.line(
            f"Wrote the schemas of {counted(len(types), 'type')} to {output_file}."
        )


# --- dropping -----------------------------------------------------------------------------------


@app.command("drop")
@with_settings
def drop(
    invocation: Invocation,
    ctx: typer.Context,
    name: TypeName,
    kind: KindOption = None,
    cascade: Annotated[
        bool,
        typer.Option("--cascade", help="Drop the relation types that point to it as well."),
    ] = False,
    purge: Annotated[
        bool,
        typer.Option(
            "--purge", help="Remove the data for good; else its history is kept. Works later, too."
        ),
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Drop it; without, only say what would go.")
    ] = False,
    token: Annotated[
        str | None, typer.Option("--token", metavar="T", help="The token that the preview printed.")
    ] = None,
) -> None:
    """Drop a type: reads become empty, writes are refused; exit code 7 if relations use it."""
    from storage_engine.runtime.migration import apply_drop, preview_drop

    check_apply(ctx, apply=apply, token=token)
    commit_id = None
    with invocation.repository() as repository:
        if token is None:
            preview = preview_drop(repository, name, kind=kind, cascade=cascade, purge=purge)
        else:
            preview, commit_id = apply_drop(
                repository, name, token=token, kind=kind, cascade=cascade, purge=purge
            )
    if invocation.output.json:
        document = {**preview.as_dict(), "applied": apply, "commit_id": commit_id}
        invocation.output.document(document)
        return
    flags = "".join(
        f" {flag}"
        for flag, given in (
            (f"--kind {kind}", kind),
            ("--cascade", cascade),
            ("--purge", purge),
        )
        if given
    )
    command = f"onto schema drop {shlex.quote(name)}{flags}{invocation.repeated()}"
    _show_drop(invocation.output, preview, commit_id, command)


@app.command("repair")
@with_settings
def repair(
    invocation: Invocation,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the catalogs; without it, only say which.")
    ] = False,
) -> None:
    """Rebuild types.json, registry, versions and layout catalog from the log where they differ."""
    from storage_engine.maintenance.schema_catalogs import CatalogRepair, repair_catalogs

    with invocation.repository() as repository:
        uri, objects = repository.uri, repository.objects
        if objects is None:
            done = CatalogRepair(repository.head_commit_id(), (), 0, applied=False)
        else:
            done = repair_catalogs(objects, apply=apply)
    output = invocation.output
    if output.json:
        output.document({"uri": uri, **done.as_dict()})
    elif objects is None:
        output.line(
            "Nothing to repair: SQLite writes its schema tables with each commit, or nothing at "
            "all; `onto verify` compares them with the data."
        )
    elif not done.catalogs:
        output.line(f"Nothing to repair: {done.checked} catalogs agree with the log.")
    else:
        output.table(
            ["catalog", "because"],
            [(finding.key, finding.reason) for finding in done.catalogs],
        )
        if done.applied:
            output.line(f"{len(done.catalogs)} catalogs written, at commit {done.repair_head}.")
        else:
            output.line("Nothing was written. To write them: onto schema repair --apply")


def check_apply(ctx: typer.Context, *, apply: bool, token: str | None) -> None:
    """A token is what makes --apply do what the preview showed."""
    if apply and token is None:
        ctx.fail("--apply needs the token of a preview: run it without --apply first, then --token")
    if token is not None and not apply:
        ctx.fail("--token is for --apply")


def _show_drop(output: Output, preview: DropPreview, commit_id: int | None, command: str) -> None:
    output.table(
        ["type", "kind", "version", "latest rows", "data"],
        [
            (
                drop.type_name,
                drop.kind,
                drop.version,
                preview.rows.get(drop.ref),
                "removed for good" if drop.purge else "kept as history",
            )
            for drop in preview.drops
        ],
    )
    output.line()
    if commit_id is not None:
        dropped = bool(preview.rows)
        what = "Dropped" if dropped else "Removed the data of"
        output.line(f"{what} {counted(len(preview.drops), 'type')} as commit {commit_id}.")
        return
    if preview.past_of is not None:
        output.line(
            f"{preview.drops[0].type_name} was renamed to {preview.past_of}: reads of its past "
            "(`upgraded`, changes, diff) lose what was written before that."
        )
    output.line("Nothing was changed. To do it (the token holds until the storage changes):")
    output.line(f"  {command} --apply --token {preview.token}")


# --- differences --------------------------------------------------------------------------------


def show_diffs(output: Output, diffs: Sequence[SchemaDiff]) -> None:
    """One table for all: each change of a field on a line, with what it takes."""
    lines: list[tuple[Any, ...]] = []
    for diff in diffs:
        versions = f"{diff.from_version or '-'} -> {diff.to_version}"
        if not diff.changes:
            new = "new type" if diff.to_version == 1 else "created anew"
            what = new if diff.from_version is None else "stored form"
            lines.append((diff.type_name, versions, "", what, None, None, "nothing"))
        for change in diff.changes:
            takes = "nothing" if change.additive else "an upgrader"
            if diff.refusal is not None and not change.additive:
                takes = "impossible" if not change.path else takes
            lines.append(
                (
                    diff.type_name,
                    versions,
                    change.path,
                    change.change,
                    change.before,
                    change.after,
                    takes,
                )
            )
    output.table(["type", "version", "field", "change", "before", "after", "takes"], lines)
    for diff in diffs:
        if diff.refusal is not None:
            output.line()
            output.line(f"{diff.type_name}: {diff.refusal}.")


def _declared_diffs(
    repository: Repository, models: Any, name: str | None, kind: str | None
) -> list[SchemaDiff]:
    from storage_engine.schema.migration import plan_migration

    declared = [
        spec for spec in models.values() if name in (None, spec.name) and kind in (None, spec.kind)
    ]
    if not declared:
        names = ", ".join(sorted(spec.name for spec in models.values()))
        raise ConfigurationError(f"--models declares no {name}: there are {names}")
    plan = plan_migration(declared, repository.type_histories(), {})
    return [migration.diff for migration in plan.migrations]


# --- parts --------------------------------------------------------------------------------------


def _history(repository: Repository, name: str, kind: Any) -> TypeHistory:
    from storage_engine.runtime.reads import stored_history

    return stored_history(repository, name, kind)


def _version(repository: Repository, name: str, number: int | None, kind: Any) -> SchemaVersion:
    from storage_engine.runtime.reads import stored_version

    return stored_version(repository, name, number, kind)


def _summary(history: TypeHistory) -> dict[str, Any]:
    last = history.last
    return {
        "type_kind": history.kind,
        "type_name": history.name,
        "current_schema_version_id": history.current.version if history.current else None,
        "latest_schema_version_id": last.version,
        "activation_commit_id": last.activation_commit_id,
        "schema_sha256": last.schema_sha256,
        "versions": [version.version for version in history.versions],
        "dropped_commit_id": history.dropped_commit_id,
        "purged": history.purged,
        "renamed_to": history.renamed_to,
        "renamed_from": history.renamed_from,
    }


def _state(history: TypeHistory) -> str:
    if history.dropped_commit_id is None:
        return "current"
    what = f"renamed to {history.renamed_to}" if history.renamed_to else "dropped"
    gone = ", data removed" if history.purged else ""
    return f"{what} by commit {history.dropped_commit_id}{gone}"


def _origin(history: TypeHistory) -> str:
    return f"renamed from {history.renamed_from}" if history.renamed_from else "created"


def _lifetime(version: SchemaVersion) -> str:
    until = version.superseded_at_commit_id
    begun = version.activation_commit_id
    return f"from {begun} on" if until is None else f"{begun} to {until - 1}"


def _class_notes(declared: TypeSpec) -> dict[str, Any]:
    """What the class says for people; no storage has it."""
    described = {field.name: field.description for field in declared.fields}
    if declared.instance_key is not None:
        described[declared.instance_key] = declared.instance_key_description
    return {
        "description": declared.description,
        "owners": list(declared.owners),
        "tags": dict(declared.tags),
        "sensitive": declared.sensitive,
        "fields": {
            name: {"description": text, "sensitive": name in declared.sensitive_columns}
            for name, text in described.items()
        },
    }


def _told_by_class(declared: TypeSpec | None) -> list[tuple[str, Any]]:
    if declared is None:
        return []
    return [
        ("description", declared.description),
        ("owners", ", ".join(declared.owners) or None),
        ("tags", ", ".join(f"{name}={text}" for name, text in declared.tags.items()) or None),
        ("sensitive", "yes" if declared.sensitive else "no"),
    ]


def _show_fields(output: Output, version: SchemaVersion, declared: TypeSpec | None) -> None:
    from storage_engine.model.field_types import describe

    notes: dict[str, Any] = {} if declared is None else _class_notes(declared)["fields"]

    def noted(name: str) -> list[Any]:
        if declared is None:
            return []
        note = notes.get(name, {})
        hidden = "sensitive" if note.get("sensitive") else None
        return ["; ".join(filter(None, [hidden, note.get("description")])) or None]

    output.table(
        [
            *("field", "type", "stored as", "required", "default", "indexed", "id"),
            *(["description"] if declared is not None else []),
        ],
        [
            (
                field.name,
                describe(field.type_spec),
                field.storage,
                "yes" if field.required else "no",
                None if field.default is MISSING else json.dumps(field.default),
                "yes" if field.index else "no",
                field.field_id,
                *noted(field.name),
            )
            for field in version.spec.fields
        ],
    )
