"""Rows in a SQLite data table: how values are bound, and the SQL that both engines share.

A data table holds the versions of rows, clustered by identity and commit. The engines differ only
in which table a type has and what its payload columns are (`DataTable`). Values go to SQLite and
back without loss: datetimes, dates and times as fixed-width ISO 8601 text, so that text order is
time order, decimals as `model.decimals` says. SQLite has no negative zero; like every comparison
does, it takes -0.0 for 0.0.

Intents are loaded into temporary tables before the lock is taken. A slow stream therefore keeps no
other writer waiting, and memory holds one batch at a time (the tables live in a temporary file).
Rows keep the order of intent, so that the last one can win.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.errors import ValidationError
from storage_engine.model.arrow import row_schema
from storage_engine.model.columns import times_of_text
from storage_engine.model.decimals import decimal_type
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.protocol import ReadWindow, TypeInput
from storage_engine.repository.sqlite.connection import rollback
from storage_engine.repository.sqlite.forward import Forward

# Microseconds of 0001-01-01 and 9999-12-31T23:59:59.999999, days of the same: outside, text of
# four-digit years would neither sort nor come back.
_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896


def to_values(column: pa.Array, storage: str) -> list[Any]:
    """One Arrow column as the values to bind."""
    if storage == "datetime":
        column = pc.replace_substring(column.cast(pa.string()), " ", "T")
    elif storage in ("date", "time"):
        column = column.cast(pa.string())
    elif storage == "bool":
        column = column.cast(pa.int8())
    elif (decimals := decimal_type(storage)) is not None:
        return [None if v is None else decimals.to_sqlite(v) for v in column.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


def from_values(values: Sequence[Any], storage: str, arrow_type: pa.DataType) -> pa.Array:
    """What `to_values` made, as the Arrow column it came from."""
    if storage in ("datetime", "date"):
        return pa.array(values, pa.string()).cast(arrow_type)
    if storage == "time":
        return times_of_text(pa.array(values, pa.string()))
    decimals = decimal_type(storage)
    if decimals is not None:
        read = [None if v is None else decimals.from_sqlite(v) for v in values]
        return pa.array(read, arrow_type)
    if storage == "bool":
        if not {0, 1, None}.issuperset(values):
            raise ValueError("a truth value is neither 0 nor 1")
        return pa.array(values, pa.int8()).cast(pa.bool_())
    if storage == "json":
        for value in values:
            if value is not None:
                orjson.loads(value)
    return pa.array(values, arrow_type)


def read_schema(spec: TypeSpec) -> pa.Schema:
    """How rows come out: with the commit that wrote them."""
    return pa.schema([pa.field("commit_id", pa.int64(), nullable=False), *row_schema(spec)])


def checked_rows(spec: TypeSpec, rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """The rows in exactly the type's row schema; refuses what does not fit, naming the field."""
    schema = row_schema(spec)
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise ValidationError(f"{spec.name}: rows lack {', '.join(missing)}", type=spec.name)
    table = table.select(schema.names)
    for column in schema:
        values = table.column(column.name)
        problem = _problem(values, column)
        if problem:
            raise ValidationError(
                f"{spec.name}.{column.name}: {problem}", type=spec.name, field=column.name
            )
    return table.cast(schema)


def _problem(values: pa.ChunkedArray, column: pa.Field) -> str:
    """Why a column cannot be stored, "" when it can."""
    if values.null_count and not column.nullable:
        return "null in a column that takes none"
    if values.type != column.type:
        return f"expected {column.type}, got {values.type}"
    if pa.types.is_timestamp(column.type):
        return _out_of_range(values.cast(pa.int64()), _FIRST_US, _LAST_US)
    if pa.types.is_date32(column.type):
        return _out_of_range(values.cast(pa.int32()), _FIRST_DAY, _LAST_DAY)
    return ""


def _out_of_range(numbers: pa.ChunkedArray, first: int, last: int) -> str:
    bounds = pc.min_max(numbers).as_py()
    if bounds["min"] is None or first <= bounds["min"] <= bounds["max"] <= last:
        return ""
    return "a date outside the years 1 to 9999"


def encode(spec: TypeSpec, table: pa.Table, names: Sequence[str]) -> list[list[Any]]:
    """The named columns of a table in the row schema as values to bind."""
    storages = {f.name: f.storage for f in spec.fields}
    return [
        to_values(table.column(name).combine_chunks(), storages.get(name, "str")) for name in names
    ]


def rows_of(columns: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Columns of equal length as rows to bind."""
    return zip(*columns, strict=True)


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def identity_columns(kind: str) -> tuple[str, ...]:
    return ("entity_key",) if kind == "entity" else ("left_key", "right_key", "instance_key")


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A payload column: its SQLite name and declared type."""

    name: str
    sql_type: str


@dataclass(frozen=True, slots=True)
class DataTable:
    """Where the rows of one type are."""

    name: str
    kind: str
    type_name: str
    type_column: str | None = None  # set when the table holds other types too
    activation_commit_id: int = 0  # there are no rows from before it
    after_commit_id: int = 0  # rows up to it are those of a dropped type that had the same name
    schema_version_id: int | None = None  # only rows of that version, where there are others
    forward: Forward | None = None  # set when it has rows of older versions too

    @property
    def identity(self) -> tuple[str, ...]:
        return identity_columns(self.kind)

    @property
    def parameters(self) -> dict[str, str | int]:
        return {"type": self.type_name}

    def of_type(self, alias: str, parameter: str = "type") -> str:
        """The condition that a row is of this type."""
        conditions = []
        if self.type_column:
            conditions.append(f"{alias}.{quoted(self.type_column)} = :{parameter}")
        if self.after_commit_id:  # the plus keeps SQLite from going by the commits' index
            conditions.append(f"+{alias}.commit_id > {self.after_commit_id}")
        if self.schema_version_id is not None:
            conditions.append(f"{alias}.schema_version_id = {self.schema_version_id}")
        return " AND ".join(conditions) or "TRUE"

    def value(self, alias: str, column: str) -> str:
        """A payload column, in the version that is read."""
        if self.forward is not None:
            return self.forward.column(alias, column)
        return f"{alias}.{quoted(column)}"

    def ids(self, alias: str) -> str:
        return _list(self.identity, alias)


@dataclass(frozen=True, slots=True)
class IntentTable:
    """A temporary table of intents: `seq` (order of intent), identity k0.., payload p0.."""

    name: str
    identity: int
    payload: Sequence[TableColumn]

    @property
    def delta(self) -> str:
        return f"{self.name}_delta"

    @property
    def keys(self) -> list[str]:
        return [f"k{n}" for n in range(self.identity)]

    @property
    def values(self) -> list[str]:
        return [f"p{n}" for n in range(len(self.payload))]

    def create(self) -> list[str]:
        keys = [f"{key} TEXT NOT NULL" for key in self.keys]
        values = [
            f"{name} {column.sql_type}"
            for name, column in zip(self.values, self.payload, strict=True)
        ]
        columns = ", ".join(["seq INTEGER PRIMARY KEY", *keys, *values])
        return [
            f"CREATE TEMP TABLE {self.name} ({columns})",
            f"CREATE TEMP TABLE {self.delta} (seq INTEGER NOT NULL, previous INTEGER)",
        ]

    def drop(self) -> list[str]:
        return [f"DROP TABLE IF EXISTS temp.{name}" for name in (self.delta, self.name)]

    def insert(self) -> str:
        columns = [*self.keys, *self.values]
        marks = ", ".join("?" * len(columns))
        return f"INSERT INTO temp.{self.name} ({', '.join(columns)}) VALUES ({marks})"

    def last_intents(self) -> str:
        """One row per identity: the one with the highest `seq` (SQLite takes the other columns
        from the row that has the maximum)."""
        columns = ", ".join(["MAX(seq) AS seq", *self.keys, *self.values])
        return f"SELECT {columns} FROM temp.{self.name} GROUP BY {', '.join(self.keys)}"


@dataclass(frozen=True, slots=True)
class KeySet:
    """A temporary table of the identities that a read is limited to, each once."""

    name: str
    identity: int

    @property
    def keys(self) -> list[str]:
        return [f"k{n}" for n in range(self.identity)]

    def create(self) -> str:
        columns = ", ".join(f"{key} TEXT NOT NULL" for key in self.keys)
        return (
            f"CREATE TEMP TABLE {self.name} ({columns}, PRIMARY KEY ({', '.join(self.keys)})) "
            "WITHOUT ROWID"
        )

    def insert(self) -> str:
        return f"INSERT OR IGNORE INTO temp.{self.name} VALUES ({', '.join('?' * self.identity)})"


def reconcile(table: DataTable | None, staged: IntentTable) -> str:
    """Fill the delta: intents that are new (no previous commit) or differ from the latest row."""
    target = f"INSERT INTO temp.{staged.delta} (seq, previous)"
    if table is None:
        return f"{target} SELECT seq, NULL FROM ({staged.last_intents()})"
    changed = "h.commit_id IS NULL"
    if staged.payload:
        stored = _list([column.name for column in staged.payload], "h")
        changed += f" OR ({stored}) IS NOT ({_list(staged.values, 'i')})"
    name = quoted(table.name)
    return (
        f"{target} SELECT i.seq, h.commit_id FROM ({staged.last_intents()}) AS i "
        f"LEFT JOIN main.{name} AS h ON {table.of_type('h')} AND {_same(table, 'h', 'i')} "
        f"AND h.commit_id = (SELECT MAX(m.commit_id) FROM main.{name} AS m "
        f"WHERE {table.of_type('m')} AND {_same(table, 'm', 'i')}) "
        f"WHERE {changed}"
    )


def count_delta(staged: IntentTable) -> str:
    return f"SELECT COUNT(*), COUNT(previous) FROM temp.{staged.delta}"


def changed_since(table: DataTable, staged: IntentTable) -> str:
    """Targeted identities that have a version after commit :snapshot, and the last such."""
    keys = ", ".join(f"i.{key}" for key in staged.keys)
    return (
        f"SELECT {keys}, max(h.commit_id) FROM temp.{staged.name} AS i "
        f"CROSS JOIN main.{quoted(table.name)} AS h "
        f"WHERE {table.of_type('h')} AND {_same(table, 'h', 'i')} AND h.commit_id > :snapshot "
        f"GROUP BY {keys} ORDER BY {keys}"
    )


def overtaken(staged: IntentTable) -> str:
    """Identities of the delta whose latest version is of a commit after :snapshot, with it."""
    keys = ", ".join(f"i.{key}" for key in staged.keys)
    return (
        f"SELECT {keys}, d.previous FROM temp.{staged.delta} AS d "
        f"CROSS JOIN temp.{staged.name} AS i ON i.seq = d.seq "
        f"WHERE d.previous > :snapshot ORDER BY {keys}"
    )


def count_repeated(staged: IntentTable) -> str:
    """How many rows state an identity again."""
    keys = ", ".join(staged.keys)
    return (
        f"SELECT (SELECT count(*) FROM temp.{staged.name}) - "
        f"(SELECT count(*) FROM (SELECT DISTINCT {keys} FROM temp.{staged.name}))"
    )


def publish(table: DataTable, staged: IntentTable) -> str:
    """Write the delta's rows as versions of commit :commit_id."""
    names = ["commit_id", "schema_version_id"]
    values = [":commit_id", ":version"]
    if table.type_column:
        names.append(table.type_column)
        values.append(":type")
    names += [*table.identity, *(column.name for column in staged.payload)]
    values += [f"i.{name}" for name in [*staged.keys, *staged.values]]
    return (
        f"INSERT INTO main.{quoted(table.name)} ({', '.join(map(quoted, names))}) "
        f"SELECT {', '.join(values)} FROM temp.{staged.delta} AS d "
        f"CROSS JOIN temp.{staged.name} AS i ON i.seq = d.seq ORDER BY d.rowid"
    )


def select(
    table: DataTable, payload: Sequence[str], window: ReadWindow, keys: KeySet | None
) -> str:
    """Rows of a window: commit, identity, payload. Parameters :type, :upto, :since."""
    source = f"main.{quoted(table.name)} AS h"
    if keys is not None:
        source = f"temp.{keys.name} AS k CROSS JOIN {source}"
    conditions = [table.of_type("h")]
    if keys is not None:
        conditions.append(_same(table, "h", "k"))
    # The plus keeps SQLite on the clustered order, which gives the groups without sorting.
    commit = "h.commit_id" if window.history else "+h.commit_id"
    if window.as_of is not None:
        conditions.append(f"{commit} <= :upto")
    if window.since is not None:
        conditions.append(f"{commit} > :since")
    where = " AND ".join(conditions)
    ids = table.ids("h")
    rest = "".join(f", {table.value('h', name)}" for name in payload)
    if window.history:
        return (
            f"SELECT h.commit_id, {ids}{rest} FROM {source} WHERE {where} "
            f"ORDER BY h.commit_id, {ids}"
        )
    return (
        f"SELECT MAX(h.commit_id), {ids}{rest} FROM {source} WHERE {where} "
        f"GROUP BY {ids} ORDER BY {ids}"
    )


def index_right_keys(table: DataTable) -> str:
    """Relations lie in the order of their left keys; this finds them by the right ones. A table
    of an older program gets it with its next rows, and an older program keeps it up to date."""
    columns = [*([table.type_column] if table.type_column else []), "right_key"]
    return (
        f"CREATE INDEX IF NOT EXISTS main.{quoted(_right_key_index(table))} "
        f"ON {quoted(table.name)} ({', '.join(map(quoted, columns))})"
    )


def has_right_keys(connection: sqlite3.Connection, table: DataTable) -> bool:
    """Whether `index_right_keys` was done."""
    sql = "SELECT 1 FROM main.sqlite_master WHERE type = 'index' AND name = ? AND tbl_name = ?"
    row = connection.execute(sql, (_right_key_index(table), table.name)).fetchone()
    return row is not None


def _right_key_index(table: DataTable) -> str:
    return f"{table.name}:right_key"


def head_of(table: DataTable) -> str:
    return (
        f"SELECT COALESCE(MAX(h.commit_id), 0) FROM main.{quoted(table.name)} AS h "
        f"WHERE {table.of_type('h')}"
    )


def count_rows(table: DataTable) -> str:
    """Identities, and all their versions."""
    return (
        f"SELECT COUNT(*), COALESCE(SUM(versions), 0) FROM (SELECT COUNT(*) AS versions "
        f"FROM main.{quoted(table.name)} AS h WHERE {table.of_type('h')} "
        f"GROUP BY {table.ids('h')})"
    )


def changes(tables: Sequence[DataTable]) -> str:
    """Identities that commit :commit_id wrote in any of a type's tables, and whether an earlier
    version, after commit :after, exists in any of them."""
    parts = []
    for table in tables:
        earlier = " OR ".join(
            f"EXISTS (SELECT 1 FROM main.{quoted(other.name)} AS m WHERE {other.of_type('m')} "
            f"AND {_equal(table, 'm', 'h')} AND m.commit_id < :commit_id "
            "AND m.commit_id > :after)"
            for other in tables
        )
        parts.append(
            f"SELECT {table.ids('h')}, {earlier} FROM main.{quoted(table.name)} AS h "
            f"WHERE {table.of_type('h')} AND h.commit_id = :commit_id"
        )
    order = ", ".join(str(n + 1) for n in range(len(tables[0].identity)))
    return f"{' UNION ALL '.join(parts)} ORDER BY {order}"


def _list(names: Sequence[str], alias: str) -> str:
    return ", ".join(f"{alias}.{quoted(name)}" for name in names)


def _same(table: DataTable, stored: str, staged: str) -> str:
    """The stored row has the staged row's identity."""
    return " AND ".join(
        f"{stored}.{quoted(name)} = {staged}.k{n}" for n, name in enumerate(table.identity)
    )


def _equal(table: DataTable, left: str, other: str) -> str:
    return " AND ".join(f"{left}.{quoted(c)} = {other}.{quoted(c)}" for c in table.identity)


ToRows = Callable[[TypeSpec, pa.Table | pa.RecordBatch], Iterator[Any]]
Payload = Callable[[TypeSpec], Sequence[TableColumn]]

_numbers = itertools.count(1)  # in memory, a stream may commit to the storage that it feeds


@dataclass(frozen=True, slots=True)
class StagedType:
    """One type's intents, in the order in which they were stated."""

    spec: TypeSpec
    staged: IntentTable


@contextmanager
def staged_inputs(
    connection: sqlite3.Connection, inputs: Sequence[TypeInput], to_rows: ToRows, payload: Payload
) -> Iterator[list[StagedType]]:
    """Load the inputs, one temporary table per type, for as long as the context lasts."""
    types: dict[tuple[str, str], StagedType] = {}
    try:
        for given in inputs:
            part = types.get(given.spec.ref)
            if part is None:
                name = f"intents_{next(_numbers)}"
                staged = IntentTable(name, len(given.spec.identity), payload(given.spec))
                part = types[given.spec.ref] = StagedType(given.spec, staged)
                for statement in staged.create():
                    connection.execute(statement)
            for batch in _batches(given):
                _load(connection, part.staged, to_rows(given.spec, batch))
        yield list(types.values())
    finally:
        for part in types.values():
            for statement in part.staged.drop():
                connection.execute(statement)


def _batches(given: TypeInput) -> Iterable[pa.Table | pa.RecordBatch]:
    if given.table is not None:
        yield given.table
    if given.stream is not None:
        yield from given.stream


def _load(connection: sqlite3.Connection, staged: IntentTable, rows: Iterator[Any]) -> None:
    connection.execute("BEGIN")  # touches the temporary database only, so it takes no lock
    try:
        connection.executemany(staged.insert(), rows)
        connection.execute("COMMIT")
    finally:
        rollback(connection)
