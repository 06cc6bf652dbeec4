"""`onto verify`: does the storage contradict itself anywhere?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from storage_engine.cli.boundary import MISMATCH
from storage_engine.cli.options import Invocation
from storage_engine.cli.output import Output, size
from storage_engine.cli.progress import progress

if TYPE_CHECKING:
    from storage_engine.maintenance.integrity import IntegrityReport


def verify(
    invocation: Invocation,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also read every row: counts, values, both ends of relations."),
    ] = False,
) -> None:
    """Check the log, its checkpoints, tags and data files; exit code 3 if anything is wrong."""
    from storage_engine.maintenance.integrity import verify_storage

    with invocation.repository() as repository, progress("verifying") as advance:
        report = verify_storage(
            repository, deep=deep, progress=lambda _what, done, total: advance(done, total)
        )
    if invocation.output.json:
        invocation.output.document(report.as_dict())
    else:
        _show(invocation.output, report)
    if not report.ok:
        raise typer.Exit(MISMATCH)


def _show(output: Output, report: IntegrityReport) -> None:
    checked = dict(report.checked)
    output.facts(
        [
            ("storage", report.uri),
            ("head", f"commit {report.head_commit_id}" if report.head_commit_id else "no commits"),
            ("commits", checked.get("commits")),
            ("checkpoints", checked.get("checkpoints")),
            ("tags", checked.get("tags")),
            ("files", checked.get("files")),
            ("bytes read", size(checked["bytes"]) if "bytes" in checked else None),
            ("rows", checked.get("rows")),
        ]
    )
    output.line()
    if report.ok:
        depth = "" if report.deep else " (rows were not read: --deep)"
        output.line(f"Everything agrees{depth}.")
        return
    output.table(
        ["area", "reason", "type", "commit", "what", "object"],
        [(f.area, f.reason, f.type_name, f.commit_id, f.message, f.key) for f in report.findings],
    )
    more = report.total - len(report.findings)
    output.line(f"{report.total} findings{f', {more} of them not shown' if more else ''}.")
