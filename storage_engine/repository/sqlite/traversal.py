"""The SQL of traversals: sources, each step's relations and the paths, as temporary tables.

A step is one join with what the step before has reached, whatever the number of entities. The
tables hold keys and commits only; rows are fetched in the end, for those that a path goes through.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from storage_engine.repository.sqlite.data_table import DataTable, identity_columns, quoted


@dataclass(frozen=True, slots=True)
class Hops:
    """Temporary tables of one traversal, gone with its transaction.

    NAME_0 has the sources and NAME_n the relations of step n: `n`, the place in the order of the
    answer, `commit_id` and the identity k0, k1, ...; NAME_paths has for each path the places h0,
    h1, ... of what it goes through.
    """

    name: str
    steps: int
    backwards: Collection[int] = ()  # of the steps, counted from 0, those from right to left

    def create(self) -> list[str]:
        made = []
        for number in range(self.steps + 1):
            keys = _keys("entity" if number == 0 else "relation")
            columns = ", ".join(f"{key} TEXT NOT NULL" for key in keys)
            made += [
                f"CREATE TEMP TABLE {self._hop(number)} "
                f"(n INTEGER PRIMARY KEY, commit_id INTEGER NOT NULL, {columns})",
                f"CREATE INDEX temp.{self._hop(number)}_start "
                f"ON {self._hop(number)} ({self._start(number)})",
            ]
        places = ", ".join(f"{place} INTEGER NOT NULL" for place in self._places)
        return [*made, f"CREATE TEMP TABLE {self._paths} ({places})"]

    def sources(self, select: str) -> str:
        """`select` gives commit and key in the order of the answer."""
        return f"INSERT INTO temp.{self._hop(0)} (commit_id, k0) {select}"

    def step(self, number: int, relations: str, *, by_right_key: bool) -> str:
        """The relations, out of a table of visible ones, that start where the last step ended.

        Relations lie in the order of their left keys, by which each is found at once; so it is by
        their right ones where these have an index. Otherwise all are looked through, once.
        """
        identity = ", ".join(f"q.{quoted(c)}" for c in identity_columns("relation"))
        reached = (
            f"(SELECT DISTINCT {self._end(number - 1)} AS reached "
            f"FROM temp.{self._hop(number - 1)}) AS r"
        )
        related = f"{quoted(relations)} AS q"
        start = "right_key" if number - 1 in self.backwards else "left_key"
        first, second = reached, related
        if start == "right_key" and not by_right_key:
            first, second = related, reached
        joined = f"{first} CROSS JOIN {second} ON q.{start} = r.reached"
        return f"SELECT q.commit_id, {identity} FROM {joined} ORDER BY {identity}"

    def fill_step(self, number: int, select: str) -> str:
        keys = ", ".join(_keys("relation"))
        return f"INSERT INTO temp.{self._hop(number)} (commit_id, {keys}) {select}"

    def fill_paths(self) -> str:
        joined = [f"temp.{self._hop(0)} AS s0"]
        for number in range(1, self.steps + 1):
            joined.append(
                f"temp.{self._hop(number)} AS s{number} "
                f"ON s{number}.{self._start(number)} = s{number - 1}.{self._end(number - 1)}"
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
        columns = [f"h.{quoted(c)}" for c in ("commit_id", *table.identity)]
        listed = ", ".join([*columns, *(table.value("h", c) for c in payload)])
        return (
            f"SELECT s.n, {listed} FROM temp.{self._hop(number)} AS s "
            f"CROSS JOIN main.{quoted(table.name)} AS h ON {' AND '.join(same)} "
            f"WHERE s.n IN (SELECT h{number} FROM temp.{self._paths}) ORDER BY s.n"
        )

    def _start(self, number: int) -> str:
        """The column by which a hop is reached: its left key, or its right one."""
        return "k1" if number - 1 in self.backwards else "k0"

    def _end(self, number: int) -> str:
        """The column that says what a hop reaches."""
        return "k0" if number == 0 or number - 1 in self.backwards else "k1"

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
