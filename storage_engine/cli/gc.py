"""`onto gc`: delete what nothing needs any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from storage_engine.cli.durations import parse_duration
from storage_engine.cli.objects import object_repository
from storage_engine.cli.options import Invocation
from storage_engine.cli.output import Output, size
from storage_engine.cli.progress import progress
from storage_engine.durations import show_duration

if TYPE_CHECKING:
    from storage_engine.maintenance.gc import GcPlan, GcReport

SHOWN = 20


def gc(
    invocation: Invocation,
    purge_compacted: Annotated[
        bool,
        typer.Option(
            "--purge-compacted",
            help="Also files that compaction has replaced, unless a tag keeps them.",
        ),
    ] = False,
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="SPAN",
            help="How long something must have been of no use: 12h, 7d, 1d12h.",
        ),
    ] = "7d",
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="How many objects to name.")
    ] = SHOWN,
    apply: Annotated[
        bool, typer.Option("--apply", help="Delete them; without it, only say which.")
    ] = False,
) -> None:
    """Delete objects that nothing needs: what failed writers left, and what was replaced."""
    from storage_engine.maintenance.gc import plan_gc, sweep

    grace = parse_duration(older_than)
    with object_repository(invocation, "objects to collect") as repository:
        with progress("looking") as looked:
            plan = plan_gc(
                repository,
                grace=grace,
                purge_compacted=purge_compacted,
                progress=lambda seen: looked(seen, None),
            )
        report = None
        if apply:
            with progress("deleting") as advance:
                report = sweep(repository, plan, progress=advance)
    if invocation.output.json:
        document = {**plan.as_dict(limit), "applied": apply}
        if report is not None:
            document["deleted"] = report.as_dict()
        invocation.output.document(document)
    else:
        _show(invocation.output, plan, report, limit)


def _show(output: Output, plan: GcPlan, report: GcReport | None, limit: int) -> None:
    span = show_duration(plan.grace)
    if not plan.doomed:
        output.line(f"Nothing to delete: all that is older than {span} is needed.")
    else:
        output.table(
            ["reason", "objects", "bytes"],
            [(why, count, size(total)) for why, (count, total) in plan.by_reason().items()],
        )
        shown = plan.doomed[:limit]
        if shown:
            output.line()
            output.table(
                ["object", "bytes", "written", "reason"],
                [(one.key, size(one.size), one.modified, one.reason) for one in shown],
            )
        if len(shown) < len(plan.doomed):
            output.line(f"{len(plan.doomed) - len(shown)} more not shown: raise --limit.")
    kept = [(why, count) for why, count in sorted(plan.kept.items()) if count]
    if kept:
        output.line()
        output.table(["kept although nothing names it", "objects"], kept)
    for note in plan.notes:
        output.line(f"Note: {note}.")
    output.line()
    if report is not None:
        spared = f", {report.spared} spared: they are needed after all" if report.spared else ""
        output.line(f"Deleted {report.objects} objects, {size(report.bytes)}{spared}.")
    elif plan.doomed:
        output.line(
            f"Nothing was deleted. {len(plan.doomed)} objects, {size(plan.bytes)}, would go "
            "with --apply."
        )
