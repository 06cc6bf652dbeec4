"""Which versions a query sees: references resolved, and the SQL that picks the versions.

A version is visible in latest and as-of reads when its identity has no newer one within the
window. That is asked of each row by one look into the clustered order, apart from all other
conditions: SQLite may then use any index for those, and still no replaced version is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage_engine.commitlog.tags import unknown
from storage_engine.query.reference import Reference
from storage_engine.query.spec import When, after_pin
from storage_engine.repository.sqlite.data_table import DataTable, quoted

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
    where = [table.of_type("h", f"{name}_type")]
    # The plus keeps SQLite from going by the commits' index, where all versions must be looked at.
    commit = "h.commit_id" if seen.history else "+h.commit_id"
    bounded = seen.upto < seen.head
    if bounded:
        where.append(f"{commit} <= :upto")
    if seen.history:
        if seen.since:
            where.append(f"{commit} > :since")
    else:
        newer = [table.of_type("m", f"{name}_type")]
        newer += [f"m.{quoted(c)} = h.{quoted(c)}" for c in table.identity]
        newer.append("m.commit_id > h.commit_id")
        if bounded:
            newer.append("m.commit_id <= :upto")
        where.append(
            f"NOT EXISTS (SELECT 1 FROM main.{quoted(table.name)} AS m WHERE {_all(newer)})"
        )
    columns = [f"h.{quoted(c)}" for c in ("commit_id", *table.identity)]
    columns += [f"{table.value('h', c)} AS {quoted(c)}" for c in payload]
    listed = ", ".join(columns)
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


def _all(conditions: Iterable[str]) -> str:
    return " AND ".join(c for c in conditions if c != "TRUE") or "TRUE"
