"""SQL that users write, on DuckDB: what may be asked, and what a mistake is answered with.

Only one SELECT, or the EXPLAIN of one, is run. Its tables are the stored types; each is opened
only when the statement names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.query.executor import Parameters, Rows
from storage_engine.repository.duck import Duck, Stream
from storage_engine.repository.protocol import labels

if TYPE_CHECKING:
    import duckdb

Tables = Mapping[str, TypeSpec]  # by the name that statements use
_ABOUT_TABLES = re.compile(r"\s*show\b", re.IGNORECASE)
_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+)?", re.IGNORECASE)
_MISSING_TABLE = re.compile(r"Table with name (\S+) does not exist")


def tables_of(types: Sequence[TypeSpec]) -> dict[str, TypeSpec]:
    return dict(zip(labels([spec.ref for spec in types]), types, strict=True))


def run_sql(
    duck: Duck,
    statement: str,
    parameters: Parameters | None,
    tables: Tables,
    provide: Callable[[duckdb.DuckDBPyConnection, Tables], None],
) -> Rows:
    """`provide` makes tables of the named types on a cursor."""
    cursor = duck.cursor()
    try:
        with _mistakes(tables):
            _check(cursor, statement)
        with duck.errors():
            named = {name: spec for name, spec in tables.items() if _may_name(statement, name)}
            provide(cursor, named)
        with duck.errors(), _mistakes(tables):
            columns = sum(len(row_schema(spec)) for spec in named.values())
            stream = Stream(duck, cursor, statement, parameters, columns=columns)
    except BaseException:
        cursor.close()
        raise
    return Rows(stream.schema, _batches(duck, stream, tables))


def _batches(duck: Duck, stream: Stream, tables: Tables) -> Iterator[pa.RecordBatch]:
    with duck.errors(), _mistakes(tables):
        yield from stream.batches()


def _may_name(statement: str, table: str) -> bool:
    """Whether the text has the name in it; a table too many costs a little, one too few fails."""
    if _ABOUT_TABLES.match(statement):
        return True
    return re.search(rf"(?<!\w){re.escape(table)}(?!\w)", statement, re.IGNORECASE) is not None


def _check(cursor: duckdb.DuckDBPyConnection, statement: str) -> None:
    import duckdb

    if not isinstance(statement, str):
        raise TypeError(f"sql takes the text of a statement, not {statement!r}")
    statements = cursor.extract_statements(statement)
    if len(statements) != 1:
        raise ValueError(f"sql takes one statement, not {len(statements)}")
    kind = statements[0].type
    if kind == duckdb.StatementType.EXPLAIN and (explained := _EXPLAIN.match(statement)):
        # EXPLAIN ANALYZE does what it explains.
        kind = next((s.type for s in cursor.extract_statements(statement[explained.end() :])), kind)
    if kind != duckdb.StatementType.SELECT:
        raise ValueError(
            f"sql reads only: a SELECT is expected, not {kind.name}; "
            "data is written with session.ensure and session.ingest"
        )


@contextmanager
def _mistakes(stored: Tables) -> Iterator[None]:
    """What is wrong with a statement, without DuckDB's advice about tables that are not ours."""
    import duckdb

    try:
        yield
    except duckdb.CatalogException as error:
        missing = _MISSING_TABLE.search(str(error))
        if missing is None:
            raise ValueError(f"sql: {_said(error)}") from error
        tables = ", ".join(stored) or "none yet"
        unknown = unknown_name(missing[1], stored, what="table")
        raise ValueError(f"sql: {unknown} (the tables are the stored types: {tables})") from error
    except (duckdb.ProgrammingError, duckdb.DataError) as error:
        raise ValueError(f"sql: {_said(error)}") from error


def _said(error: Exception) -> str:
    """DuckDB's words, the place included, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return "; ".join(lines)
