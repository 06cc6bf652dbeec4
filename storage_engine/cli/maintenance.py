"""`onto index`, `verify`, `gc` and `compact`: looking after the objects of a storage.

All but `verify` open a storage only when it is made of objects. What changes anything does so with
`--apply` only, and says before what it would do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from storage_engine.cli.arguments import Invocation, parse_duration, with_settings
from storage_engine.cli.errors import MISMATCH, CommandError
from storage_engine.cli.output import Output, progress
from storage_engine.config import show_duration
from storage_engine.wording import counted, size

if TYPE_CHECKING:
    from storage_engine.index.repair import Repair
    from storage_engine.index.verify import IndexReport
    from storage_engine.maintenance.compaction import (
        CompactionPlan,
        CompactionProgress,
        CompactionReport,
    )
    from storage_engine.maintenance.compaction.run import Progress
    from storage_engine.maintenance.gc import GcPlan, GcReport
    from storage_engine.maintenance.integrity import IntegrityReport
    from storage_engine.repository.object.engine import ObjectRepository


class ObjectStorageOnlyError(CommandError):
    """The command does something that a SQLite storage does not need."""

    def __init__(self, uri: str, what: str) -> None:
        self.uri = uri
        super().__init__(
            f"{uri} is a SQLite storage, which has no {what}: the command is for storages on S3 "
            "or in a directory"
        )


@contextmanager
def object_repository(invocation: Invocation, what: str) -> Iterator[ObjectRepository]:
    """The storage; `what` says what of it the command is about."""
    with invocation.repository() as repository:
        if (objects := repository.objects) is None:
            raise ObjectStorageOnlyError(repository.uri, what)
        yield objects


index_app = typer.Typer()
_INDICES = "type indices"


@index_app.callback()
@with_settings
def index_group(_invocation: Invocation) -> None:
    """Look after the type indices of a storage on S3 or in a directory."""


@index_app.command("verify")
@with_settings
def index_verify(invocation: Invocation) -> None:
    """Compare every type index with the log; exit code 3 if anything is wrong."""
    from storage_engine.maintenance.indices import verify_indices

    with object_repository(invocation, _INDICES) as repository:
        report = verify_indices(repository)
        uri = repository.uri
    if invocation.output.json:
        invocation.output.document({"uri": uri, **report.as_dict()})
    else:
        _show_index_report(invocation.output, report)
    if not report.ok:
        raise typer.Exit(MISMATCH)


@index_app.command("repair")
@with_settings
def index_repair(
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
        _show_index_repair(invocation.output, done)


def _show_index_report(output: Output, report: IndexReport) -> None:
    output.table(
        ["type", "kind", "indexed to", "needs", "entries", "findings"],
        [
            (
                t.ref[1],
                t.ref[0],
                t.version.value.max_indexed_commit,
                t.needed,
                len(t.version.value.entries),
                len(t.findings),
            )
            for t in report.types
        ],
    )
    if report.ok:
        output.line(f"{_agree(len(report.types))} with the log at {_head(report)}.")
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


def _agree(count: int) -> str:
    return f"{counted(count, 'index', 'indices')} {'agrees' if count == 1 else 'agree'}"


def _show_index_repair(output: Output, done: Repair) -> None:
    if not done.types:
        output.line(f"Nothing to repair: {_agree(done.checked)} with the log.")
        return
    output.table(
        ["type", "kind", "indexed to", "becomes", "entries", "become", "because of"],
        [(t.type_name, t.kind, *t.watermark, *t.entries, ", ".join(t.reasons)) for t in done.types],
    )
    if done.applied:
        output.line(
            f"{counted(len(done.types), 'index', 'indices')} written, at commit {done.repair_head}."
        )
    else:
        output.line("Nothing was written. To write them: onto index repair --apply")


def verify(
    invocation: Invocation,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also read every row: counts, values, both ends of relations."),
    ] = False,
) -> None:
    """Check the log, its checkpoints, tags and data files; exit code 3 if anything is wrong."""
    from storage_engine.maintenance.integrity import verify_storage

    models = invocation.models().values()
    with invocation.repository() as repository, progress("verifying") as advance:
        report = verify_storage(
            repository,
            deep=deep,
            models=models,
            progress=lambda _what, done, total: advance(done, total),
        )
    if invocation.output.json:
        invocation.output.document(report.as_dict())
    else:
        _show_findings(invocation.output, report)
    if not report.ok:
        raise typer.Exit(MISMATCH)


def _show_findings(output: Output, report: IntegrityReport) -> None:
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
            ("declared types", checked.get("models")),
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
    output.line(
        f"{counted(report.total, 'finding')}{f', {more} of them not shown' if more else ''}."
    )


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
        _show_garbage(invocation.output, plan, report, limit)


def _show_garbage(output: Output, plan: GcPlan, report: GcReport | None, limit: int) -> None:
    span = show_duration(plan.grace)
    if plan.expired and report is None:
        output.line(f"Expired branches, to be deleted: {', '.join(plan.expired)}")
    elif report is not None and report.branches:
        output.line(f"Expired branches, deleted: {', '.join(report.branches)}")
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
                [
                    (garbage.key, size(garbage.size), garbage.modified, garbage.reason)
                    for garbage in shown
                ],
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
        output.line(f"Deleted {counted(report.objects, 'object')}, {size(report.bytes)}{spared}.")
    elif plan.doomed:
        output.line(
            f"Nothing was deleted. {counted(len(plan.doomed), 'object')}, {size(plan.bytes)}, "
            "would go with --apply."
        )


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
                _show_compaction_plan(output, plan)
            return
        with _progress(output) as progress:
            report = carry_out(repository, plan, progress)
    if output.json:
        output.document({**plan.as_dict(), "applied": True, "report": report.as_dict()})
    else:
        _show_compaction(output, report)


def _show_compaction_plan(output: Output, plan: CompactionPlan) -> None:
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
        output.line(
            f"Would rewrite {counted(rows, 'row')}. Nothing was changed: add --apply to do it."
        )


def _show_compaction(output: Output, report: CompactionReport) -> None:
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
    output.line(
        f"{counted(report.rows_rewritten, 'row')} rewritten. The files they came from are kept."
    )


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
