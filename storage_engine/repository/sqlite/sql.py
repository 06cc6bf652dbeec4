"""SQL of users on a SQLite storage: in DuckDB, on Arrow tables of the types that are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa

from storage_engine.model.spec import TypeSpec
from storage_engine.query.executor import Executor, Parameters, Rows
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.duck import Duck
from storage_engine.repository.sql import Tables, run_sql, tables_of

if TYPE_CHECKING:
    import duckdb


def sql(
    executor: Executor,
    duck: Duck,
    known_types: Callable[[], list[TypeSpec]],
    upto: int,
    statement: str,
    parameters: Parameters | None,
) -> Rows:
    """All tables as of commit `upto`, whatever is committed meanwhile."""

    def provide(cursor: duckdb.DuckDBPyConnection, tables: Tables) -> None:
        for name, spec in tables.items():
            rows = executor.rows(QuerySpec(spec, when=When(as_of=upto)))
            cursor.register(name, pa.Table.from_batches(rows.batches, schema=rows.schema))

    return run_sql(duck, statement, parameters, tables_of(known_types()), provide)
