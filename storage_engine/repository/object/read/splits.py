"""Plans that other processes carry out: taken apart into shares, and scanned one by one.

A plan names files and commits, so whoever gets a share of it later, and elsewhere, reads the same
rows. Shares are plain data: they can be pickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from storage_engine.commitlog.ranges import KeyRanges
from storage_engine.config import MIB
from storage_engine.errors import ConfigurationError
from storage_engine.query.dialects import quoted
from storage_engine.query.results import Rows
from storage_engine.repository.duck import Stream
from storage_engine.repository.object.read.files import DataFile, versioned_schema
from storage_engine.repository.object.read.plan import TypePlan, may_supersede, visible
from storage_engine.repository.user_sql import check_condition

if TYPE_CHECKING:
    import duckdb

    from storage_engine.repository.object.read.executor import Engine
    from storage_engine.repository.object.read.files import Brought

SHARE_BYTES = 32 * MIB
OPERATION = "operation"
_ASKED = "asked"


@dataclass(frozen=True)
class ChangePlan:
    """Changes of one type: `rows` are the versions of a span of commits.

    `earlier` may hold older versions of their identities, which make a change an update. It is
    empty where the log says of every file of `rows` that it has only inserts, or only updates.
    """

    rows: TypePlan
    earlier: tuple[DataFile, ...] = ()


def change_schema(spec_schema: pa.Schema) -> pa.Schema:
    """`versioned_schema` with the operation after the commit id."""
    operation = pa.field(OPERATION, pa.string(), nullable=False)
    return pa.schema([spec_schema.field(0), operation, *list(spec_schema)[1:]])


def shares(plan: TypePlan) -> list[TypePlan]:
    """Together the rows of the plan. A share of latest rows looks for newer versions by itself,
    so there are fewer shares the more there is to look through."""
    newer = sum(item.file.bytes for item in plan.newer)
    made = []
    for files in packed(plan.rows, max(SHARE_BYTES, newer)):
        checked: tuple[DataFile, ...] = ()
        if not plan.window.history:
            checked = tuple(may_supersede(plan.rows, files, plan.window.upto))
        made.append(replace(plan, rows=files, newer=checked))
    return made


def change_shares(span: TypePlan, everything: TypePlan) -> list[ChangePlan]:
    """`everything` is the history up to the end of the span."""
    made = []
    for files in packed(span.rows, SHARE_BYTES):
        unknown = KeyRanges()
        unknown.add(item.file.leading_keys for item in files if _known_operation(item) is None)
        earlier = tuple(
            item for item in everything.rows if unknown.overlaps(item.file.leading_keys)
        )
        made.append(ChangePlan(replace(span, rows=files), earlier))
    return made


def packed(files: Sequence[DataFile], share_bytes: int) -> Iterator[tuple[DataFile, ...]]:
    """The files in shares of about equal size, each of whole files."""
    total = sum(item.file.bytes for item in files)
    target = total / max(1, math.ceil(total / share_bytes))
    held: list[DataFile] = []
    size = 0
    for item in files:
        if held and size + item.file.bytes / 2 > target:
            yield tuple(held)
            held, size = [], 0
        held.append(item)
        size += item.file.bytes
    if held:
        yield tuple(held)


def scan_share(
    engine: Engine,
    plan: TypePlan | ChangePlan,
    columns: Mapping[str, str],
    shown: Sequence[str],
    condition: str | None,
) -> Rows:
    """The rows of a share, in no order.

    `columns` are names with the stored columns behind them; `condition` is SQL over these names,
    and `shown` are those that are returned.
    """
    rows = plan.rows if isinstance(plan, ChangePlan) else plan
    stored = versioned_schema(rows.spec)
    files = list(rows.files)
    if isinstance(plan, ChangePlan):
        stored = change_schema(stored)
        files += plan.earlier
    schema = pa.schema([stored.field(columns[name]).with_name(name) for name in shown])
    brought = engine.scanner.bring((rows.spec, item) for item in files)
    cursor = engine.duck.cursor()
    try:
        with engine.duck.errors():
            if isinstance(plan, ChangePlan):
                ctes = [f"{_ASKED} AS ({_changes(engine, cursor, plan, brought)})"]
            else:
                ctes = visible(engine.scanner, cursor, plan, _ASKED, brought=brought)
            named = ", ".join(f"{quoted(c)} AS {quoted(name)}" for name, c in columns.items())
            listed = ", ".join(map(quoted, shown))
            if condition:
                _check(cursor, condition, rows.spec.name)
            sql = (
                f"WITH {', '.join(ctes)} SELECT {listed} FROM (SELECT {named} FROM {_ASKED}) r"
                + (f" WHERE (\n{condition}\n)" if condition else "")
            )
            stream = _begun(engine, cursor, sql, condition, rows.spec.name)
    except BaseException:
        cursor.close()
        raise

    def batches() -> Iterator[pa.RecordBatch]:
        with engine.duck.errors():
            for batch in stream.batches():
                yield batch.cast(schema)

    return Rows(schema, batches())


def _check(cursor: duckdb.DuckDBPyConnection, condition: str, type_name: str) -> None:
    """A condition comes from users: it sees the type's columns and nothing else."""
    try:
        check_condition(cursor, condition)
    except ValueError as error:
        raise ConfigurationError(f"filter {condition!r} on {type_name}: {error}") from None


def _begun(
    engine: Engine,
    cursor: duckdb.DuckDBPyConnection,
    sql: str,
    condition: str | None,
    type_name: str,
) -> Stream:
    import duckdb

    mistakes = (duckdb.BinderException, duckdb.CatalogException)
    try:
        return Stream(engine.duck, cursor, sql)
    except mistakes as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(f"filter {condition!r} on {type_name}: {reason}") from None


def _changes(
    engine: Engine, cursor: duckdb.DuckDBPyConnection, plan: ChangePlan, brought: Brought
) -> str:
    """A query of the changes: what the log knows of a file is not looked up."""
    rows = plan.rows
    columns = ", ".join(f"q.{quoted(name)}" for name in versioned_schema(rows.spec).names[1:])
    keys = ", ".join(map(quoted, rows.spec.identity))
    parts = []
    for operation in ("insert", "update", None):
        files = [item for item in rows.rows if _known_operation(item) == operation]
        if not files and (rows.rows or operation is not None):
            continue
        source = engine.scanner.source(cursor, rows.spec, files, brought=brought)
        condition = rows.window.condition([item.entry for item in files])
        where = f" WHERE {condition}" if condition else ""
        op, joined = f"'{operation}'", ""
        if operation is None:  # also where there are no rows at all
            earlier = engine.scanner.source(
                cursor, rows.spec, plan.earlier, brought=brought, keys_only=True
            )
            op = "CASE WHEN f.first < q.commit_id THEN 'update' ELSE 'insert' END"
            joined = (
                f" JOIN (SELECT {keys}, min(commit_id) AS first FROM ({earlier}) e "
                f"SEMI JOIN (SELECT * FROM ({source}) q{where}) u USING ({keys}) "
                f"GROUP BY {keys}) f USING ({keys})"
            )
        parts.append(
            f"SELECT q.commit_id, {op} AS {OPERATION}, {columns} FROM ({source}) q{joined}{where}"
        )
    return " UNION ALL ".join(parts)


def _known_operation(item: DataFile) -> str | None:
    """Of all rows of a file, where the log says it."""
    if item.entry.is_snapshot:
        return None
    if item.file.updated == 0:
        return "insert"
    return "update" if item.file.inserted == 0 else None
