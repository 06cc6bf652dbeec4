"""`onto index`: are the type indices what the log says, and make them so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from storage_engine.cli.boundary import MISMATCH
from storage_engine.cli.objects import object_repository
from storage_engine.cli.options import Invocation, with_settings
from storage_engine.cli.output import Output

if TYPE_CHECKING:
    from storage_engine.index.repair import Repair
    from storage_engine.index.verify import IndexReport

app = typer.Typer()
_INDICES = "type indices"


@app.callback()
@with_settings
def index(_invocation: Invocation) -> None:
    """Look after the type indices of a storage on S3 or in a directory."""


@app.command("verify")
@with_settings
def verify(invocation: Invocation) -> None:
    """Compare every type index with the log; exit code 3 if anything is wrong."""
    from storage_engine.maintenance.indices import verify_indices

    with object_repository(invocation, _INDICES) as repository:
        report = verify_indices(repository)
        uri = repository.uri
    if invocation.output.json:
        invocation.output.document({"uri": uri, **report.as_dict()})
    else:
        _show_report(invocation.output, report)
    if not report.ok:
        raise typer.Exit(MISMATCH)


@app.command("repair")
@with_settings
def repair(
    invocation: Invocation,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the indices; without it, only say which.")
    ] = False,
) -> None:
    """Rewrite the indices that differ from the log, under the write lock; head stays as it is."""
    from storage_engine.maintenance.indices import repair_indices

    with object_repository(invocation, _INDICES) as repository:
        done = repair_indices(repository, apply=apply)
        uri = repository.uri
    if invocation.output.json:
        invocation.output.document({"uri": uri, **done.as_dict()})
    else:
        _show_repair(invocation.output, done)


def _show_report(output: Output, report: IndexReport) -> None:
    output.table(
        ["type", "kind", "indexed to", "needs", "entries", "findings"],
        [
            (
                t.ref[1],
                t.ref[0],
                t.version.index.max_indexed_commit,
                t.needed,
                len(t.version.index.entries),
                len(t.findings),
            )
            for t in report.types
        ],
    )
    if report.ok:
        output.line(f"{len(report.types)} indices agree with the log at {_head(report)}.")
        return
    output.line()
    output.table(
        ["type", "kind", "reason", "commit", "what", "path"],
        [(f.type_name, f.kind, f.reason, f.commit_id, f.message, f.path) for f in report.findings],
    )
    output.line()
    output.line("`onto index repair` shows what would be written, `--apply` writes it.")


def _head(report: IndexReport) -> str:
    return f"commit {report.head_commit_id}"


def _show_repair(output: Output, done: Repair) -> None:
    if not done.types:
        output.line(f"Nothing to repair: {done.checked} indices agree with the log.")
        return
    output.table(
        ["type", "kind", "indexed to", "becomes", "entries", "become", "because of"],
        [(t.type_name, t.kind, *t.watermark, *t.entries, ", ".join(t.reasons)) for t in done.types],
    )
    if done.applied:
        output.line(f"{len(done.types)} indices written, at commit {done.repair_head}.")
    else:
        output.line("Nothing was written. To write them: onto index repair --apply")
