"""Which versions a query sees: references resolved, and the SQL that picks the versions.

A version is visible in latest and as-of reads when its identity has no newer one within the
window. That is asked of each row by one look into the clustered order, apart from all other
conditions: SQLite may then use any index for those, and still no replaced version is returned.

The SQL of traversals: sources, each step's relations and the paths, as temporary tables.

A step is one join with what the step before has reached, whatever the number of entities. The
tables hold keys and commits only; rows are fetched in the end, for those that a path goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage_engine.commitlog.tags import unknown
from storage_engine.query.reference import Reference
from storage_engine.query.spec import When, after_pin
from storage_engine.repository.sqlite.data_table import DataTable, identity_columns, quoted

LAST_ID = 2**63 - 1  # of any commit; SQLite takes no larger number


@dataclass(frozen=True, slots=True)
class Seen:
    """Versions after commit `since` up to `upto`; all of them, or the newest of each identity."""

    head: int
    upto: int
    since: int = 0
    history: bool = False

    def as_json(self) -> dict[str, Any]:
        return {"upto": self.upto, "since": self.since, "history": self.history}


def resolve(
    when: When, head: int, pinned: int | None, commit_of: Callable[[Reference], int]
) -> Seen:
    """What `when` means at this head. Refuses references after the commit of a pinned view."""
    upto = head if pinned is None else pinned
    if when.as_of is not None:
        upto = commit_of(when.as_of)
        meant = when.as_of if isinstance(when.as_of, int) else upto
        if pinned is not None and meant > pinned:
            raise after_pin(when, pinned)
    return Seen(head, upto, min(when.since or 0, LAST_ID), when.history)


def named(tag: str, tags: Mapping[str, int]) -> int:
    """The commit of a tag."""
    if tag in tags:
        return tags[tag]
    raise unknown(tag, list(tags))


@dataclass(frozen=True)
class Visible:
    """A named table of the visible versions of one type, for a statement's WITH clause."""

    name: str
    sql: str
    parameters: Mapping[str, Any]


def visible(name: str, table: DataTable, payload: Sequence[str], seen: Seen) -> Visible:
    """`commit_id`, identity and payload columns of the versions that are seen."""
    where = [_of_type(table, "h", name)]
    # The plus keeps SQLite from going by the commits' index, where all versions must be looked at.
    commit = "h.commit_id" if seen.history else "+h.commit_id"
    bounded = seen.upto < seen.head
    if bounded:
        where.append(f"{commit} <= :upto")
    if seen.history:
        if seen.since:
            where.append(f"{commit} > :since")
    else:
        newer = [_of_type(table, "m", name)]
        newer += [f"m.{quoted(c)} = h.{quoted(c)}" for c in table.identity]
        newer.append("m.commit_id > h.commit_id")
        if bounded:
            newer.append("m.commit_id <= :upto")
        where.append(
            f"NOT EXISTS (SELECT 1 FROM main.{quoted(table.name)} AS m WHERE {_all(newer)})"
        )
    listed = ", ".join(f"h.{quoted(c)}" for c in ("commit_id", *table.identity, *payload))
    sql = f"SELECT {listed} FROM main.{quoted(table.name)} AS h WHERE {_all(where)}"
    parameters = {f"{name}_type": table.type_name, "upto": seen.upto, "since": seen.since}
    return Visible(name, sql, parameters)


def nothing(name: str, columns: Iterable[str]) -> Visible:
    """The same for a type of which nothing is stored."""
    listed = ", ".join(f"NULL AS {quoted(c)}" for c in columns)
    return Visible(name, f"SELECT {listed} WHERE FALSE", {})


def with_tables(tables: Iterable[Visible], sql: str) -> str:
    """A statement that may use the tables. They become part of it, so that its conditions and its
    order can use their indexes."""
    named = ", ".join(f"{quoted(t.name)} AS NOT MATERIALIZED ({t.sql})" for t in tables)
    return f"WITH {named} {sql}"


def _of_type(table: DataTable, alias: str, name: str) -> str:
    if table.type_column is None:
        return "TRUE"
    return f"{alias}.{quoted(table.type_column)} = :{name}_type"


def _all(conditions: Iterable[str]) -> str:
    return " AND ".join(c for c in conditions if c != "TRUE") or "TRUE"


@dataclass(frozen=True, slots=True)
class Hops:
    """Temporary tables of one traversal, gone with its transaction.

    NAME_0 has the sources and NAME_n the relations of step n: `n`, the place in the order of the
    answer, `commit_id` and the identity k0, k1, ...; NAME_paths has for each path the places h0,
    h1, ... of what it goes through.
    """

    name: str
    steps: int

    def create(self) -> list[str]:
        made = []
        for number in range(self.steps + 1):
            keys = _keys("entity" if number == 0 else "relation")
            columns = ", ".join(f"{key} TEXT NOT NULL" for key in keys)
            made += [
                f"CREATE TEMP TABLE {self._hop(number)} "
                f"(n INTEGER PRIMARY KEY, commit_id INTEGER NOT NULL, {columns})",
                f"CREATE INDEX temp.{self._hop(number)}_k0 ON {self._hop(number)} (k0)",
            ]
        places = ", ".join(f"{place} INTEGER NOT NULL" for place in self._places)
        return [*made, f"CREATE TEMP TABLE {self._paths} ({places})"]

    def sources(self, select: str) -> str:
        """`select` gives commit and key in the order of the answer."""
        return f"INSERT INTO temp.{self._hop(0)} (commit_id, k0) {select}"

    def step(self, number: int, relations: str) -> str:
        """The relations, out of a table of visible ones, that start where the last step ended."""
        reached = "k0" if number == 1 else "k1"
        identity = ", ".join(f"q.{quoted(c)}" for c in identity_columns("relation"))
        return (
            f"SELECT q.commit_id, {identity} "
            f"FROM (SELECT DISTINCT {reached} AS reached FROM temp.{self._hop(number - 1)}) AS r "
            f"CROSS JOIN {quoted(relations)} AS q ON q.left_key = r.reached ORDER BY {identity}"
        )

    def fill_step(self, number: int, select: str) -> str:
        keys = ", ".join(_keys("relation"))
        return f"INSERT INTO temp.{self._hop(number)} (commit_id, {keys}) {select}"

    def fill_paths(self) -> str:
        joined = [f"temp.{self._hop(0)} AS s0"]
        for number in range(1, self.steps + 1):
            reached = "k0" if number == 1 else "k1"
            joined.append(
                f"temp.{self._hop(number)} AS s{number} ON s{number}.k0 = s{number - 1}.{reached}"
            )
        places = ", ".join(f"s{number}.n" for number in range(self.steps + 1))
        return (
            f"INSERT INTO temp.{self._paths} SELECT {places} FROM {' CROSS JOIN '.join(joined)} "
            f"ORDER BY {places}"
        )

    def paths(self) -> str:
        return f"SELECT {', '.join(self._places)} FROM temp.{self._paths} ORDER BY rowid"

    def found(self, number: int, table: DataTable, payload: Sequence[str]) -> str:
        """Place, commit, identity and payload of what paths go through. Parameter :type."""
        same = [table.of_type("h"), "h.commit_id = s.commit_id"]
        same += [f"h.{quoted(c)} = s.k{n}" for n, c in enumerate(table.identity)]
        listed = ", ".join(f"h.{quoted(c)}" for c in ("commit_id", *table.identity, *payload))
        return (
            f"SELECT s.n, {listed} FROM temp.{self._hop(number)} AS s "
            f"CROSS JOIN main.{quoted(table.name)} AS h ON {' AND '.join(same)} "
            f"WHERE s.n IN (SELECT h{number} FROM temp.{self._paths}) ORDER BY s.n"
        )

    def _hop(self, number: int) -> str:
        return f"{self.name}_{number}"

    @property
    def _paths(self) -> str:
        return f"{self.name}_paths"

    @property
    def _places(self) -> list[str]:
        return [f"h{number}" for number in range(self.steps + 1)]


def _keys(kind: str) -> list[str]:
    return [f"k{n}" for n in range(len(identity_columns(kind)))]
