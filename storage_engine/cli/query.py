"""`onto query`: entities, relations, paths and SQL, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable
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
Filters = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="PATH OP JSON",
        help="Only rows that meet this condition; several add up. No JSON after is_null, "
        "is_not_null, is_true, is_false.",
    ),
]
OrderBy = Annotated[
    list[str] | None,
    typer.Option(
        "--order-by", metavar="FIELD[:desc]", help="Sort by this field; several go one by one."
    ),
]
AsOf = Annotated[
    str | None,
    typer.Option(
        "--as-of", metavar="N|TIME|TAG", help="As things were at a commit, a time or a tag."
    ),
]
WithHistory = Annotated[
    bool, typer.Option("--with-history", help="Every version, by commit and identity.")
]
HistorySince = Annotated[
    int | None,
    typer.Option(
        "--history-since", metavar="N", min=0, help="Every version that came after commit N."
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        metavar="N",
        min=1,
        help=f"How many at most. Tables show {TABLE_ROWS} unless told, other formats all.",
    ),
]
Offset = Annotated[
    int | None, typer.Option("--offset", metavar="N", min=0, help="Leave out the first N.")
]
Count = Annotated[bool, typer.Option("--count", help="Only the number of rows.")]
Columns = Annotated[
    list[str] | None,
    typer.Option("--columns", metavar="A,B", help="Only these columns, in this order."),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Tell how the storage would answer, and do not ask it.")
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="|".join(FORMATS),
        help="How to write the result. The default is table, or json with --json.",
    ),
]


# --- commands ---------------------------------------------------------------------------------


@app.callback()
@with_settings
def query(_invocation: Invocation) -> None:
    """Ask for entities, relations and paths, or ask in SQL."""


def _rows_of(kind: Kind) -> Callable[..., None]:
    def rows(
        invocation: Invocation,
        ctx: typer.Context,
        type_name: TypeName,
        filters: Filters = None,
        order_by: OrderBy = None,
        as_of: AsOf = None,
        with_history: WithHistory = False,
        history_since: HistorySince = None,
        limit: Limit = None,
        offset: Offset = None,
        count: Count = False,
        columns: Columns = None,
        explain: Explain = False,
        format: FormatOption = None,
    ) -> None:
        from storage_engine.cli.answers import Line, answer_rows

        line = Line(
            filters=filters or (),
            order_by=order_by or (),
            as_of=as_of,
            with_history=with_history,
            history_since=history_since,
            limit=limit,
            offset=offset,
            count=count,
            columns=columns or (),
            explain=explain,
            format=format,
        )
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
def traverse(
    invocation: Invocation,
    ctx: typer.Context,
    type_name: TypeName,
    via: Annotated[
        list[str],
        typer.Option(
            "--via", metavar="RELATION", help="Follow relations of this type; several in turn."
        ),
    ],
    filters: Filters = None,
    order_by: OrderBy = None,
    as_of: AsOf = None,
    limit: Limit = None,
    offset: Offset = None,
    columns: Columns = None,
    explain: Explain = False,
    format: FormatOption = None,
) -> None:
    """Follow relations from entities. Filter, order and paging are about where paths start."""
    from storage_engine.cli.answers import Line, answer_paths

    line = Line(
        filters=filters or (),
        order_by=order_by or (),
        as_of=as_of,
        limit=limit,
        offset=offset,
        columns=columns or (),
        explain=explain,
        format=format,
    )
    answer_paths(invocation, ctx, line, type_name, via)


@app.command("sql")
@with_settings
def sql(
    invocation: Invocation,
    ctx: typer.Context,
    statement: Annotated[
        str, typer.Argument(metavar="SELECT", help="One SELECT; each stored type is a table.")
    ],
    param: Annotated[
        list[str] | None,
        typer.Option("--param", metavar="NAME=JSON", help="The value of $NAME in the statement."),
    ] = None,
    as_of: AsOf = None,
    limit: Limit = None,
    explain: Explain = False,
    format: FormatOption = None,
) -> None:
    """Ask in SQL, read-only, over the visible rows of every stored type."""
    from storage_engine.cli.answers import Line, answer_sql

    line = Line(as_of=as_of, limit=limit, explain=explain, format=format)
    answer_sql(invocation, ctx, line, statement, param or ())
