"""`onto export` and `onto import`: rows of types as files. An import without `--apply` only says
what it would do."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Annotated, Literal

import typer

from storage_engine.cli.arguments import Invocation, written_options
from storage_engine.cli.errors import CONFLICT, FAILED, prompt_interrupts
from storage_engine.cli.output import BROKEN_PIPE, Output, one_line, printable, progress
from storage_engine.wording import counted, size

if TYPE_CHECKING:
    from storage_engine.repository.protocol import Idempotency
    from storage_engine.runtime.exchange import ExportReport, ImportReport

PIPE = "-"
_LONGEST_VERSION = 19  # digits
FileFormats = Literal["jsonl", "csv", "parquet"]


def export(
    invocation: Invocation,
    ctx: typer.Context,
    output: Annotated[
        str,
        typer.Option("--output", metavar="DIR|-", help="The folder to write to; - is stdout."),
    ],
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type", metavar="NAME", help="Only this type; several times for several. All if none."
        ),
    ] = None,
    file_format: Annotated[
        FileFormats, typer.Option("--format", help="How rows are written.")
    ] = "jsonl",
    as_of: Annotated[
        str | None,
        typer.Option(
            "--as-of", metavar="N|TIME|TAG", help="As things were at a commit, a time or a tag."
        ),
    ] = None,
    history_since: Annotated[
        int | None,
        typer.Option(
            "--history-since",
            metavar="N",
            min=0,
            help="Every version that came after commit N, not only the latest.",
        ),
    ] = None,
    with_metadata: Annotated[
        bool,
        typer.Option("--with-metadata", help="Add commit_id, the commit that wrote each version."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into a folder that is not empty.")
    ] = False,
) -> None:
    """Write the rows of types as of one commit: a file for each type and export.json, or a pipe."""
    from storage_engine.query.reference import parse_reference
    from storage_engine.runtime.exchange import export_types

    piped = output == PIPE
    if piped and invocation.output.json:
        ctx.fail("--output - writes rows on stdout: leave out --json")
    if piped and file_format == "parquet" and sys.stdout.isatty():
        ctx.fail("Parquet is binary: send it to a file or a program, not to a terminal")
    try:
        at = None if as_of is None else parse_reference(as_of, "--as-of")
    except ValueError as error:
        ctx.fail(str(error))
    with (
        _reader_that_goes_away(),
        prompt_interrupts(lambda: None),
        invocation.repository() as repository,
        progress("exporting") as advance,
    ):
        report = export_types(
            repository,
            sys.stdout.buffer if piped else output,
            types=types,
            file_format=file_format,
            as_of=at,
            history_since=history_since,
            with_metadata=with_metadata,
            overwrite=overwrite,
            progress=lambda _name, rows: advance(rows, None),
        )
    for note in report.notes:
        invocation.output.note(note)
    if invocation.output.json:
        invocation.output.document(report.as_dict())
    elif not piped:
        _show_export(invocation.output, report)


@contextmanager
def _reader_that_goes_away() -> Iterator[None]:
    """Of what is written to stdout itself, past `Output`."""
    try:
        yield
    except BrokenPipeError:
        raise typer.Exit(BROKEN_PIPE) from None


def _show_export(output: Output, report: ExportReport) -> None:
    types = report.summary.types
    if types:
        output.table(
            ["type", "kind", "rows", "size", "file"],
            [(t.spec.name, t.spec.kind, t.rows, size(t.bytes), t.file) for t in types],
        )
    since = report.summary.history_since
    what = "" if since is None else f", every version after commit {since}"
    output.line(
        f"{counted(report.rows, 'row')} of {counted(len(types), 'type')} as of commit "
        f"{report.summary.commit_id}{what}, in {report.output}"
    )


# --- import -----------------------------------------------------------------------------------


def import_(
    invocation: Invocation,
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Option(
            "--input", metavar="DIR|FILE|-", help="The folder or file to read; - is stdin."
        ),
    ],
    apply: Annotated[
        bool, typer.Option("--apply", help="Write; without it, only say what.")
    ] = False,
    on_conflict: Annotated[
        Literal["abort", "skip", "upsert"],
        typer.Option(
            "--on-conflict",
            help="Of rows that are stored with other values: refuse all, keep what is stored, or "
            "write new versions.",
        ),
    ] = "abort",
    file_format: Annotated[
        FileFormats | None,
        typer.Option("--format", help="What the input is, where its name does not tell."),
    ] = None,
    type_name: Annotated[
        str | None,
        typer.Option(
            "--type", metavar="NAME", help="The type of a CSV or Parquet input, if not its name."
        ),
    ] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            metavar="APP:VERSION",
            help="The name of this unit of work, which is done once; from the content unless told.",
        ),
    ] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option("--meta", metavar="KEY=VALUE", help="A text to keep with the commit."),
    ] = None,
) -> None:
    """Check files of rows, say what importing them would do, and do it in one commit."""
    from storage_engine.runtime.exchange import import_types

    given: str | IO[bytes] = source
    if source == PIPE:
        if sys.stdin is None:
            ctx.fail("--input - reads stdin, which is closed")
        given = sys.stdin.buffer
    with invocation.repository() as repository, progress("importing") as advance:
        report = import_types(
            repository,
            given,
            declared=invocation.models(),
            apply=apply,
            on_conflict=on_conflict,
            file_format=file_format,
            type_name=type_name,
            idempotency=_unit(ctx, idempotency_key),
            meta=_metadata(ctx, meta or ()),
            progress=lambda _what, rows: advance(rows, None),
            holder={"command": "onto import"},
        )
    for note in report.notes:
        invocation.output.note(note)
    if invocation.output.json:
        invocation.output.document(report.as_dict())
    elif report.problems:
        _show_problems(invocation.output, report)
    else:
        options = written_options(
            ("--format", file_format),
            ("--type", type_name),
            ("--on-conflict", on_conflict if on_conflict != "abort" else None),
            ("--idempotency-key", idempotency_key),
            *(("--meta", text) for text in meta or ()),
        )
        _show_import(invocation, report, source, options)
    if report.problems:
        raise typer.Exit(FAILED)
    if report.conflicts:
        raise typer.Exit(CONFLICT)


def _unit(ctx: typer.Context, text: str | None) -> Idempotency | None:
    from storage_engine.runtime.arguments import unit_of_work

    if text is None:
        return None
    app_id, colon, version = text.rpartition(":")
    if not colon or not app_id or not version:
        ctx.fail(f"--idempotency-key {text}: write APP:VERSION, such as crm:2026-11-16")
    plain = version.isascii() and version.isdigit()
    if plain and len(version) > _LONGEST_VERSION:
        ctx.fail("--idempotency-key: a version in digits is a number of 64 bits")
    return unit_of_work((app_id, int(version) if plain else version))


def _metadata(ctx: typer.Context, texts: Sequence[str]) -> dict[str, str]:
    made: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            ctx.fail(f"--meta {text}: write KEY=VALUE")
        if any("\ud800" <= character <= "\udfff" for character in text):  # as Python has bytes
            ctx.fail(f"--meta {text!r} is not UTF-8")
        made[key] = value
    return made


def _show_problems(output: Output, report: ImportReport) -> None:
    for problem in report.problems:
        output.line(str(problem))
    more = "" if report.problems_complete else "at least "
    _say(
        f"{report.source}: {more}{counted(len(report.problems), 'problem')}, nothing was written: "
        "mend the input and run it again"
    )


def _show_import(
    invocation: Invocation,
    report: ImportReport,
    source: str,
    options: str,
) -> None:
    from storage_engine.errors import ImportConflictError

    output = invocation.output
    if report.types:
        output.table(
            ["type", "kind", "rows", "new", "changed", "unchanged", "conflicts"],
            [
                (t.type_name, t.kind, t.rows, t.insert, t.update, t.unchanged, t.conflict)
                for t in report.types
            ],
        )
    if report.conflicts:
        for each in report.types:
            names = [" -> ".join(filter(None, identity)) for identity in each.examples]
            if names:
                more = ", ..." if each.conflict > len(names) else ""
                output.line(f"stored otherwise, {each.type_name}: {', '.join(names)}{more}")
        try:
            report.require()
        except ImportConflictError as error:
            _say(str(error))
        return
    if report.already_applied:
        by = f" by commit {report.commit_id}" if report.commit_id else ", and changed nothing"
        output.line(f"Nothing was written: this input was imported before{by}.")
    elif not report.types:
        output.line(f"Nothing was written: there are no rows in {source}.")
    elif not report.applied:
        output.line(
            f"Nothing was written. To import: onto import --input {shlex.quote(source)}"
            f"{invocation.repeated()}{options} --apply"
        )
    elif report.commit_id is None:
        output.line("Nothing was written: all of it is stored already.")
    else:
        output.line(f"Commit {report.commit_id}: {counted(report.writes, 'row')} written.")


def _say(message: str) -> None:
    """What went wrong, on one line, as errors are told."""
    sys.stderr.write(f"error: {printable(one_line(message))}\n")
