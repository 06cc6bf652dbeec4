"""`onto query`: entities, relations, paths and SQL, for people and for programs."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from storage_engine.cli.arguments import Invocation, with_settings

if TYPE_CHECKING:
    from storage_engine.model.spec import Kind

FORMATS = ("table", "json", "csv", "arrow")
TABLE_ROWS = 50

app = typer.Typer(
    no_args_is_help=True, help="Ask for entities, relations and paths, or ask in SQL."
)


class FilterCommand(TyperCommand):
    """A command whose `--filter` takes two or three values, as its operator needs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from storage_engine.cli.query_terms import join_filters

        with_value = {
            name for p in self.params if not getattr(p, "is_flag", True) for name in p.opts
        }
        if not ctx.resilient_parsing:  # else a line is being completed, and not whole
            try:
                args = join_filters(args, with_value.__contains__)
            except ValueError as error:
                ctx.fail(str(error))
        return super().parse_args(ctx, args)


# --- options ----------------------------------------------------------------------------------

TypeName = Annotated[str, typer.Argument(metavar="TYPE", help="The type's name.")]


@dataclass(frozen=True)
class Line:
    """What a command was given, whichever it is."""

    filters: Sequence[str] = ()
    order_by: Sequence[str] = ()
    as_of: str | None = None
    with_history: bool = False
    history_since: int | None = None
    limit: int | None = None
    offset: int | None = None
    count: bool = False
    columns: Sequence[str] = ()
    explain: bool = False
    format: str | None = None
    schema_version: int | None = None


def _line_options(
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="PATH OP JSON",
            help="Only rows that meet this condition; several add up. No JSON after is_null, "
            "is_not_null, is_true, is_false.",
        ),
    ] = None,
    order_by: Annotated[
        list[str] | None,
        typer.Option(
            "--order-by", metavar="FIELD[:desc]", help="Sort by this field; several go one by one."
        ),
    ] = None,
    as_of: Annotated[
        str | None,
        typer.Option(
            "--as-of", metavar="N|TIME|TAG", help="As things were at a commit, a time or a tag."
        ),
    ] = None,
    with_history: Annotated[
        bool, typer.Option("--with-history", help="Every version, by commit and identity.")
    ] = False,
    history_since: Annotated[
        int | None,
        typer.Option(
            "--history-since", metavar="N", help="Every version that came after commit N."
        ),
    ] = None,
    schema_version: Annotated[
        int | None,
        typer.Option(
            "--schema-version",
            metavar="N",
            min=1,
            help="Rows of this schema version of the type, as it has them (`onto schema history`).",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            help=f"How many at most. Tables show {TABLE_ROWS} unless told, other formats all.",
        ),
    ] = None,
    offset: Annotated[
        int | None, typer.Option("--offset", metavar="N", min=0, help="Leave out the first N.")
    ] = None,
    count: Annotated[bool, typer.Option("--count", help="Only the number of rows.")] = False,
    columns: Annotated[
        list[str] | None,
        typer.Option("--columns", metavar="A,B", help="Only these columns, in this order."),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Tell how the storage would answer, and do not ask it."),
    ] = False,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="|".join(FORMATS),
            autocompletion=lambda: list(FORMATS),
            help="How to write the result. The default is table, or json with --json.",
        ),
    ] = None,
) -> None:
    """A signature to take parameters from; never called."""


def with_line(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a `Line`, but for those that mean nothing to it; its parameter
    `line` is filled from them."""
    every = inspect.signature(_line_options, eval_str=True).parameters
    options = [option for name, option in every.items() if name not in without]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "line"]

        @functools.wraps(function)
        def command(*args: Any, **values: Any) -> None:
            given = {option.name: values.pop(option.name) for option in options}
            if given.get("limit") is not None:  # one more is asked for, to know whether there is
                given["limit"] = min(given["limit"], sys.maxsize - 1)
            line = Line(**{name: value for name, value in given.items() if value is not None})
            function(*args, line=line, **values)

        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *options]
        )
        return command

    return decorate


# --- commands ---------------------------------------------------------------------------------


@app.callback()
@with_settings
def query(_invocation: Invocation) -> None:
    """Ask for entities, relations and paths, or ask in SQL."""


def _rows_of(kind: Kind) -> Callable[..., None]:
    @with_line()
    def rows(invocation: Invocation, ctx: typer.Context, line: Line, type_name: TypeName) -> None:
        from storage_engine.cli.query_answers import answer_rows

        answer_rows(invocation, ctx, line, kind, type_name)

    return rows


app.command("entities", cls=FilterCommand, help="Show entities of a type.")(
    with_settings(_rows_of("entity"))
)
app.command(
    "relations",
    cls=FilterCommand,
    help="Show relations of a type. Filters can be about their ends: left.FIELD, right.FIELD.",
)(with_settings(_rows_of("relation")))


@app.command("traverse", cls=FilterCommand)
@with_settings
@with_line("with_history", "history_since", "count", "schema_version")
def traverse(
    invocation: Invocation,
    ctx: typer.Context,
    line: Line,
    type_name: TypeName,
    via: Annotated[
        list[str],
        typer.Option(
            "--via",
            metavar="RELATION[:backwards]",
            help="Follow relations of this type, from whichever side paths have reached; several "
            "in turn. Of a type with itself: left to right, or :backwards.",
        ),
    ],
) -> None:
    """Follow relations from entities. Filter, order and paging are about where paths start."""
    from storage_engine.cli.query_answers import answer_paths

    answer_paths(invocation, ctx, line, type_name, via)


@app.command("sql")
@with_settings
@with_line(
    "filters",
    "order_by",
    "with_history",
    "history_since",
    "schema_version",
    "offset",
    "count",
    "columns",
)
def sql(
    invocation: Invocation,
    ctx: typer.Context,
    line: Line,
    statement: Annotated[
        str, typer.Argument(metavar="SELECT", help="One SELECT; each stored type is a table.")
    ],
    param: Annotated[
        list[str] | None,
        typer.Option("--param", metavar="NAME=JSON", help="The value of $NAME in the statement."),
    ] = None,
) -> None:
    """Ask in SQL, read-only, over the visible rows of every stored type."""
    from storage_engine.cli.query_answers import answer_sql

    answer_sql(invocation, ctx, line, statement, param or ())
