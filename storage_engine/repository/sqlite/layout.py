"""The SQL that both engines share: reconcile, read and list rows of one data table.

A data table holds the versions of rows, clustered by identity and commit. The engines differ only
in which table a type has and what its payload columns are (`DataTable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from storage_engine.repository.protocol import Window


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def identity_columns(kind: str) -> tuple[str, ...]:
    return ("entity_key",) if kind == "entity" else ("left_key", "right_key", "instance_key")


@dataclass(frozen=True, slots=True)
class Column:
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

    @property
    def identity(self) -> tuple[str, ...]:
        return identity_columns(self.kind)

    @property
    def parameters(self) -> dict[str, str | int]:
        return {"type": self.type_name}

    def of_type(self, alias: str) -> str:
        """The condition that a row is of this type."""
        return f"{alias}.{quoted(self.type_column)} = :type" if self.type_column else "TRUE"

    def ids(self, alias: str) -> str:
        return _list(self.identity, alias)


@dataclass(frozen=True, slots=True)
class Staged:
    """A temporary table of intents: `seq` (order of intent), identity k0.., payload p0.."""

    name: str
    identity: int
    payload: Sequence[Column]

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


def reconcile(table: DataTable | None, staged: Staged) -> str:
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


def count_delta(staged: Staged) -> str:
    return f"SELECT COUNT(*), COUNT(previous) FROM temp.{staged.delta}"


def changed_since(table: DataTable, staged: Staged) -> str:
    """Targeted identities that have a version after commit :snapshot."""
    keys = ", ".join(f"i.{key}" for key in staged.keys)
    return (
        f"SELECT DISTINCT {keys} FROM temp.{staged.name} AS i "
        f"CROSS JOIN main.{quoted(table.name)} AS h "
        f"WHERE {table.of_type('h')} AND {_same(table, 'h', 'i')} AND h.commit_id > :snapshot "
        f"ORDER BY {keys}"
    )


def publish(table: DataTable, staged: Staged) -> str:
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


def select(table: DataTable, payload: Sequence[str], window: Window, keys: KeySet | None) -> str:
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
    rest = "".join(f", h.{quoted(name)}" for name in payload)
    if window.history:
        return (
            f"SELECT h.commit_id, {ids}{rest} FROM {source} WHERE {where} "
            f"ORDER BY h.commit_id, {ids}"
        )
    return (
        f"SELECT MAX(h.commit_id), {ids}{rest} FROM {source} WHERE {where} "
        f"GROUP BY {ids} ORDER BY {ids}"
    )


def head_of(table: DataTable) -> str:
    return (
        f"SELECT COALESCE(MAX(h.commit_id), 0) FROM main.{quoted(table.name)} AS h "
        f"WHERE {table.of_type('h')}"
    )


def changes(tables: Sequence[DataTable]) -> str:
    """Identities that commit :commit_id wrote in any of a type's tables, and whether an earlier
    version exists in any of them."""
    parts = []
    for table in tables:
        earlier = " OR ".join(
            f"EXISTS (SELECT 1 FROM main.{quoted(other.name)} AS m WHERE {other.of_type('m')} "
            f"AND {_equal(table, 'm', 'h')} AND m.commit_id < :commit_id)"
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


def _equal(table: DataTable, one: str, other: str) -> str:
    return " AND ".join(f"{one}.{quoted(c)} = {other}.{quoted(c)}" for c in table.identity)
