"""`onto compact`: merge the many small files of types into few large ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from storage_engine.cli.options import Invocation
from storage_engine.cli.output import Output, size

if TYPE_CHECKING:
    from storage_engine.maintenance.compaction import (
        CompactionPlan,
        CompactionProgress,
        CompactionReport,
    )
    from storage_engine.maintenance.compaction.run import Progress

MIN_ENTRIES = 2  # who asks for compaction by hand means it


def compact(
    invocation: Invocation,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="NAME", help="Only this type; may be given several times."),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do it. Without, show what would be done.")
    ] = False,
) -> None:
    """Merge the small files of types into large ones; reads stay the same, history is kept."""
    from storage_engine.maintenance.compaction import (
        CompactionPolicy,
        plan_compaction,
    )
    from storage_engine.maintenance.compaction import compact as carry_out

    output = invocation.output
    with invocation.repository() as repository:
        plan = plan_compaction(repository, CompactionPolicy(min_entries=MIN_ENTRIES), types)
        if not apply or plan.empty:
            if output.json:
                output.document({**plan.as_dict(), "applied": False})
            else:
                _show_plan(output, plan)
            return
        with _progress(output) as progress:
            report = carry_out(repository, plan, progress)
    if output.json:
        output.document({**plan.as_dict(), "applied": True, "report": report.as_dict()})
    else:
        _show_report(output, report)


def _show_plan(output: Output, plan: CompactionPlan) -> None:
    if plan.note is not None:
        output.line(f"{plan.note[0].upper()}{plan.note[1:]}.")
        return
    if not plan.types:
        output.line("No types yet: there is nothing to compact.")
        return
    output.table(
        ["type", "kind", "entries", "after", "files", "rows", "bytes", "about", "why"],
        [
            (
                item.type_name,
                item.kind,
                item.entries,
                item.entries_after,
                sum(len(run.paths) for run in item.runs),
                sum(run.rows for run in item.runs),
                size(sum(run.bytes for run in item.runs)),
                size(sum(run.expected_bytes for run in item.runs)),
                item.reason,
            )
            for item in plan.types
        ],
    )
    output.line()
    if plan.empty:
        output.line("Nothing to compact.")
    else:
        rows = sum(run.rows for run in plan.runs)
        output.line(f"Would rewrite {rows} rows. Nothing was changed: add --apply to do it.")


def _show_report(output: Output, report: CompactionReport) -> None:
    if report.runs:
        output.table(
            ["type", "kind", "commits", "outcome", "files", "into", "rows", "bytes", "now"],
            [
                (
                    run.type_name,
                    run.kind,
                    f"{run.min_commit_id}-{run.max_commit_id}",
                    run.outcome,
                    run.files_in,
                    run.files_out,
                    run.rows,
                    size(run.bytes_in),
                    size(run.bytes_out),
                )
                for run in report.runs
            ],
        )
        output.line()
    for name, why in report.skipped.items():
        output.line(f"{name} left out: {why}.")
    for name in report.reindexed:
        output.line(f"{name}: index brought to the snapshots of an earlier compaction.")
    output.line(f"{report.rows_rewritten} rows rewritten. The files they came from are kept.")


@contextmanager
def _progress(output: Output) -> Iterator[Progress | None]:
    """A bar on stderr, for people at a terminal."""
    if output.json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns: Sequence[TextColumn | BarColumn | TaskProgressColumn] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} rows"),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("compact", total=1)

        def show(now: CompactionProgress) -> None:
            what = f"{now.type_name} {now.min_commit_id}-{now.max_commit_id}: {now.stage}"
            bar.update(task, description=what, completed=now.done, total=now.total)

        yield show
