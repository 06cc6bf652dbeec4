"""Whole SQL statements for query specs, on a table of rows that the engine has prepared.

The prepared table (a view, a CTE, a table) holds the versions that the query sees: `commit_id`,
the identity columns, and the fields in one of the shapes of `query.conditions`. Which versions
those are is the engine's business; so is what it may filter earlier, for which each condition says
what it reaches for (`Conjunct.reach`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from storage_engine.model.expressions import Filter, Source
from storage_engine.query.aggregates import (
    Aggregate,
    Having,
    HavingComparison,
    HavingMany,
    HavingNot,
)
from storage_engine.query.conditions import Conditions, Shape, conjuncts, normalise, value_kind
from storage_engine.query.dialects import Binder, Dialect, DuckDb, Sqlite, quoted
from storage_engine.query.spec import QuerySpec

Reach = Literal["identity", "typed", "row", "endpoint"]
DialectName = Literal["duckdb", "sqlite"]

_DIALECTS: dict[DialectName, type[Dialect]] = {"duckdb": DuckDb, "sqlite": Sqlite}


@dataclass(frozen=True)
class Conjunct:
    """One of the conditions that must all hold, on alias `q`.

    identity:  key columns alone: may be applied to versions, below "newest per key"
    typed:     typed columns alone: a Parquet scan can use it, but it may return stale versions if
               applied below "newest per key"
    row:       looks into JSON
    endpoint:  looks at endpoint entities too
    """

    expression: Filter
    sql: str
    parameters: Mapping[str, Any]
    reach: Reach
    columns: frozenset[str]


@dataclass(frozen=True)
class Statement:
    """SQL with its parameters by name. `columns` are the result's names and kinds, in order,
    where they are not those asked for (aggregates); in SQL they are called c0, c1, ..."""

    sql: str
    parameters: Mapping[str, Any]
    columns: tuple[tuple[str, str], ...] = ()


class Compiler:
    """Compiles one query for one engine. Its pieces share names for equal parameters, so that
    several of them can go into one statement with the parameters of each."""

    def __init__(
        self,
        dialect: DialectName,
        shape: Shape,
        *,
        prefix: str = "q",
        endpoints: Mapping[Source, str] | None = None,
    ) -> None:
        """`endpoints`: the tables with the visible versions of the left and right entities, in
        the same shape. `prefix` begins the parameters' names."""
        self._binder = Binder(prefix)
        self._dialect = _DIALECTS[dialect](self._binder)
        self._shape = shape
        self._conditions = Conditions(self._dialect, shape, endpoints=endpoints)

    def conjuncts(self, expression: Filter | None) -> tuple[Conjunct, ...]:
        """The conditions that a row must meet, apart."""
        if expression is None:
            return ()
        return tuple(self._conjunct(part) for part in conjuncts(normalise(expression)))

    def select(self, spec: QuerySpec, table: str, columns: Sequence[str]) -> Statement:
        """The rows of a spec, ordered and cut, as these columns of the table."""
        listed = ", ".join(f"q.{quoted(name)}" for name in columns)
        parts = [f"SELECT {listed} FROM {quoted(table)} AS q", self._where(spec)]
        parts += [f"ORDER BY {self._order(spec)}", self._cut(spec)]
        return self._statement(parts)

    def _order(self, spec: QuerySpec) -> str:
        """The sort keys of a spec, complete: no two rows are equal under them."""
        keys = []
        for key in spec.order:
            sql, _, _ = self._conditions.value(key.operand)
            keys.append(f"{sql} {'DESC' if key.descending else 'ASC'} NULLS LAST")
        history = ["commit_id"] if spec.when.history else []
        return ", ".join([*keys, *(f"q.{quoted(c)}" for c in [*history, *spec.type.identity])])

    def aggregate(self, spec: QuerySpec, table: str) -> Statement:
        """The groups of a spec with their aggregates."""
        inner: list[str] = []
        keys: list[str] = []
        columns: list[tuple[str, str]] = []
        for name, operand in spec.groups:
            sql, kind, in_json = self._conditions.value(operand)
            keys.append(self._inner(inner, self._dialect.shown(sql, kind, in_json=in_json)))
            columns.append((name, kind))
        outputs = list(keys)
        for name, aggregate in spec.aggregates:
            outputs.append(self._aggregate(aggregate, inner))
            columns.append((name, aggregate.kind))
        having = "" if spec.having is None else f"HAVING {self._having(spec.having, inner)}"
        source = (
            f"SELECT {', '.join(inner) or '1 AS v'} FROM {quoted(table)} AS q {self._where(spec)}"
        )
        listed = ", ".join(f"{sql} AS c{n}" for n, sql in enumerate(outputs))
        parts = [f"SELECT {listed} FROM ({source.strip()}) AS t"]
        if keys:
            parts += [f"GROUP BY {', '.join(keys)}", having]
            parts.append(f"ORDER BY {', '.join(f'{key} NULLS LAST' for key in keys)}")
        return self._statement(parts, columns)

    # --- parts --------------------------------------------------------------------------------

    def _conjunct(self, part: Filter) -> Conjunct:
        operands = list(part.operands())
        reach: Reach = "row"
        if any(o.source != "self" for o in operands):
            reach = "endpoint"
        elif all(o.identity is not None for o in operands):
            reach = "identity"
        elif self._shape == "columns" and all(
            o.spec is None or o.spec.storage != "json" for o in operands
        ):
            reach = "typed"
        columns = frozenset(o.identity or o.name for o in operands if o.source == "self")
        sql = self._conditions.condition(part)
        return Conjunct(part, sql, self._binder.used(sql), reach, columns)

    def _statement(
        self, parts: Sequence[str], columns: Sequence[tuple[str, str]] = ()
    ) -> Statement:
        sql = " ".join(filter(None, parts))
        return Statement(sql, self._binder.used(sql), tuple(columns))

    def _where(self, spec: QuerySpec) -> str:
        if spec.where is None:
            return ""
        return f"WHERE {self._conditions.condition(spec.where)}"

    def _cut(self, spec: QuerySpec) -> str:
        if spec.limit is None and not spec.offset:
            return ""
        if spec.limit is None:
            no_limit = "LIMIT -1 " if self._dialect.name == "sqlite" else ""
            return f"{no_limit}OFFSET {self._dialect.mark(spec.offset)}"
        limit = f"LIMIT {self._dialect.mark(spec.limit)}"
        return f"{limit} OFFSET {self._dialect.mark(spec.offset)}" if spec.offset else limit

    def _inner(self, inner: list[str], sql: str) -> str:
        """A column of the inner table: paths in it are parameters, which no two expressions of
        one GROUP BY statement may have and still count as the same."""
        inner.append(f"{sql} AS v{len(inner)}")
        return f"t.v{len(inner) - 1}"

    def _aggregate(self, aggregate: Aggregate, inner: list[str]) -> str:
        operand = aggregate.operand
        if operand is None:
            return "COUNT(*)"
        if aggregate.function == "avg_len":
            lengths = self._inner(inner, self._conditions.list_length(operand))
            return self._dialect.mean(lengths, "int")
        if aggregate.function == "count":
            return f"COUNT({self._inner(inner, self._conditions.present(operand))})"
        sql, kind, in_json = self._conditions.value(operand)
        value = self._inner(inner, self._dialect.shown(sql, kind, in_json=in_json))
        match aggregate.function:
            case "sum":
                return self._dialect.total(value, kind)
            case "avg":
                return self._dialect.mean(value, kind)
            case "min":
                return f"MIN({value})"
            case _:
                return f"MAX({value})"

    def _having(self, node: Having, inner: list[str]) -> str:
        match node:
            case HavingMany():
                word = f" {node.op.upper()} "
                return f"({word.join(self._having(part, inner) for part in node.parts)})"
            case HavingNot():
                return f"(NOT {self._having(node.part, inner)})"
            case HavingComparison():
                aggregate = node.aggregate
                in_json = self._dialect.shows_json and self._from_json(aggregate)
                return self._conditions.bounded(
                    self._aggregate(aggregate, inner),
                    aggregate.kind,
                    node.op,
                    node.value,
                    in_json=in_json,
                )
        raise TypeError(f"{node!r} is not a condition on groups that can be compiled")

    def _from_json(self, aggregate: Aggregate) -> bool:
        """Whether the result is written as in JSON; what is counted or added up never is."""
        operand = aggregate.operand
        if operand is None or aggregate.function not in ("min", "max"):
            return False
        return self._conditions.value(operand)[2]


def result_kinds(spec: QuerySpec) -> tuple[tuple[str, str], ...]:
    """Names and kinds of the columns that `Executor.aggregate` answers with."""
    groups = [(name, value_kind(operand)) for name, operand in spec.groups]
    return (*groups, *((name, aggregate.kind) for name, aggregate in spec.aggregates))
