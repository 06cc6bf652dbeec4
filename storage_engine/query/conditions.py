"""The walk from an expression tree to an SQL condition, the same for every dialect.

Promise: on rows of the declared type the condition is true, false or NULL where
`testing.evaluator` says True, False or None. Rows come in one of two shapes: `columns`, a column
per field (JSON text for nested and mixed ones), or `payload`, all fields in one JSON document.

Integers are compared with floats exactly: DuckDB turns a BIGINT into a DOUBLE to compare the two,
so 2**53 + 1 equals 2.0**53 there. Such a comparison is restated within a single SQL type, without
rounding.

An endpoint condition is asked of the endpoint's visible versions: it holds when some version makes
it true (one version in latest and as-of reads, possibly several in history reads). So `normalise`
pushes negations down to single conditions, and conditions on one endpoint that are joined by `&`
are asked together, of the same version. Filters without endpoints stay as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from storage_engine.model.canonical import dumps
from storage_engine.model.decimals import decimal_type
from storage_engine.model.expressions import (
    NUMBERS,
    SCALARS,
    And,
    CompareOp,
    Comparison,
    Contains,
    Filter,
    In,
    Leaf,
    Not,
    Operand,
    Or,
    Source,
    Test,
    TextTest,
    base_kind,
    base_kinds,
    kind_of,
)
from storage_engine.model.spec import MISSING
from storage_engine.model.validation import INT64_MAX, INT64_MIN
from storage_engine.query.dialects import Dialect, Json, SqlColumn, quoted

Bound = tuple[CompareOp, Any] | bool  # an op and a value of the kind


def restated(kind: str, op: CompareOp, value: Any) -> Bound:
    """The comparison `x op value` for values x of a kind, with a value of that kind too; a bool
    when it is the same for all."""
    decimals = decimal_type(kind)
    if decimals is not None:
        return decimals.bound(op, value)
    if kind not in NUMBERS:
        return op, value
    return int_bound(op, value) if kind == "int" else float_bound(op, value)


def int_bound(op: CompareOp, value: int | float) -> Bound:
    """The comparison `x op value` for 64-bit integers x; a bool when it is the same for all."""
    if isinstance(value, int):
        return op, value
    if value > INT64_MAX:  # as floats are spaced here, nothing lies between
        return op in ("<", "<=", "!=")
    if value < INT64_MIN:
        return op in (">", ">=", "!=")
    floor = math.floor(value)
    if floor == value:
        return op, floor
    match op:
        case "==" | "!=":
            return op == "!="
        case "<" | "<=":
            return "<=", floor
        case _:
            return ">", floor


def float_bound(op: CompareOp, value: int | float) -> Bound:
    """The comparison `x op value` for finite floats x; a bool when it is the same for all."""
    near = float(value)
    if near == value:  # Python compares int and float exactly
        return op, near
    if op in ("==", "!="):
        return op == "!="
    side: Literal["<", ">"] = "<" if op in ("<", "<=") else ">"
    if side == "<":
        return ("<", near) if near > value else ("<=", near)
    return (">=", near) if near > value else (">", near)


@dataclass(frozen=True, repr=False)
class Endpoint(Filter):
    """Some visible version of the left or right entity makes `part` true."""

    source: Source
    part: Filter

    def __repr__(self) -> str:
        return f"some {self.source} version: {self.part!r}"

    def as_json(self) -> dict[str, Any]:
        return {"op": "endpoint", "source": self.source, "part": self.part.as_json()}

    def operands(self) -> Iterator[Operand]:
        yield from self.part.operands()


def normalise(expression: Filter) -> Filter:
    """The same filter with every endpoint condition inside an `Endpoint`."""
    if all(operand.source == "self" for operand in expression.operands()):
        return expression
    return _group(_push_down(expression, negate=False))


def conjuncts(expression: Filter | None) -> tuple[Filter, ...]:
    """Conditions that must all be true, the fewest that say the same."""
    if expression is None:
        return ()
    if isinstance(expression, And):
        return tuple(part for p in expression.parts for part in conjuncts(p))
    return (expression,)


def _push_down(node: Filter, *, negate: bool) -> Filter:
    if isinstance(node, Not):
        return _push_down(node.part, negate=not negate)
    if isinstance(node, And | Or):
        kind = And if isinstance(node, And) != negate else Or
        parts: list[Filter] = []
        for part in node.parts:
            inner = _push_down(part, negate=negate)
            parts += (
                inner.parts if isinstance(inner, And | Or) and type(inner) is kind else (inner,)
            )
        return kind(tuple(parts))
    return Not(node) if negate else node


def _group(node: Filter) -> Filter:
    sources = {operand.source for operand in node.operands()}
    if len(sources) == 1:
        source = sources.pop()
        return node if source == "self" else Endpoint(source, node)
    assert isinstance(node, And | Or)
    grouped: dict[Source | None, list[Filter]] = {}
    for part in node.parts:
        own = {operand.source for operand in part.operands()}
        grouped.setdefault(own.pop() if len(own) == 1 else None, []).append(part)
    parts: list[Filter] = []
    for source_, members in grouped.items():
        if source_ in ("left", "right"):
            parts.append(
                Endpoint(source_, members[0] if len(members) == 1 else type(node)(tuple(members)))
            )
        else:
            parts += members if source_ == "self" else map(_group, members)
    return parts[0] if len(parts) == 1 else type(node)(tuple(parts))


Shape = Literal["columns", "payload"]

_SQL_OPS: dict[CompareOp, str] = {
    "==": "=",
    "!=": "<>",
    "<": "<",
    "<=": "<=",
    ">": ">",
    ">=": ">=",
}
_ENDPOINT_ALIASES: dict[Source, str] = {"left": "l", "right": "r"}


class Conditions:
    """Compiles conditions on the rows of one table.

    `alias` is the table's; `endpoints` names the tables (or views) that hold the visible versions
    of the left and right entities.
    """

    def __init__(
        self,
        dialect: Dialect,
        shape: Shape,
        *,
        alias: str = "q",
        endpoints: Mapping[Source, str] | None = None,
    ) -> None:
        self.dialect = dialect
        self._shape = shape
        self._alias = alias
        self._endpoints = endpoints or {}
        self._elements = itertools.count()

    # --- the tree -----------------------------------------------------------------------------

    def condition(self, expression: Filter) -> str:
        """An SQL condition; true for the rows that `where(expression)` keeps."""
        return self._node(normalise(expression), self._alias)

    def _node(self, node: Filter, alias: str) -> str:
        match node:
            case And() | Or():
                word = " AND " if isinstance(node, And) else " OR "
                return f"({word.join(self._node(part, alias) for part in node.parts)})"
            case Not():
                return f"(NOT {self._node(node.part, alias)})"
            case Endpoint():
                return self._endpoint(node, alias)
            case Leaf():
                return self._leaf(node, alias)
        raise TypeError(f"{node!r} is not a filter that can be compiled")

    def _endpoint(self, node: Endpoint, alias: str) -> str:
        table, inner = self._endpoints[node.source], _ENDPOINT_ALIASES[node.source]
        return (
            f"EXISTS (SELECT 1 FROM {quoted(table)} AS {inner} "
            f'WHERE {inner}."entity_key" = {alias}.{quoted(f"{node.source}_key")} '
            f"AND {self._node(node.part, inner)})"
        )

    def _leaf(self, node: Leaf, alias: str) -> str:
        if isinstance(node, In) and not node.values:
            return "FALSE"
        operand = node.operand
        place = self._place(operand, alias)
        if operand.item_path is None:
            return self._test(node, place)
        keys = operand.item_path
        assert isinstance(place, Json)
        return place.some(self._element(), lambda element: self._test(node, element.at(keys)))

    def _element(self) -> str:
        return f"e{next(self._elements)}"

    # --- places -------------------------------------------------------------------------------

    def _place(self, operand: Operand, alias: str) -> SqlColumn | Json:
        if operand.identity is not None:
            return SqlColumn(f"{alias}.{quoted(operand.identity)}", "str")
        spec = operand.spec
        assert spec is not None
        if self._shape == "columns":
            column = f"{alias}.{quoted(operand.name)}"
            if spec.storage != "json":
                return SqlColumn(column, spec.storage)
            return self.dialect.document(column).at(operand.path)
        payload = f'{alias}."fields_json"'
        if spec.default is MISSING or spec.default is None:
            return self.dialect.document(payload).at((operand.name, *operand.path))
        # A payload written before the field existed lacks it: the default stands in.
        default = dumps(spec.default)
        return self.dialect.with_default(payload, operand.name, default).at(operand.path)

    def value(self, operand: Operand) -> tuple[str, str, bool]:
        """A place of one scalar kind as SQL, its kind, and whether it comes out of JSON."""
        place = self._place(operand, self._alias)
        if isinstance(place, SqlColumn):
            return place.sql, place.kind, False
        kind = value_kind(operand)
        if len(operand.kinds) == 1 and not operand.cast:
            return place.value(kind), kind, True
        return f"CASE WHEN {_any_kind(place, kind)} THEN {place.value(kind)} END", kind, True

    def present(self, operand: Operand) -> str:
        """Not NULL where a place has a value of any kind."""
        place = self._place(operand, self._alias)
        if isinstance(place, SqlColumn):
            return place.sql
        if operand.cast:
            return self.value(operand)[0]
        return f"CASE WHEN NOT {place.absent()} THEN 1 END"

    def list_length(self, operand: Operand) -> str:
        """The number of elements of a list, NULL for what is none."""
        place = self._place(operand, self._alias)
        assert isinstance(place, Json)
        return f"CASE WHEN {place.is_kind('list')} THEN {place.length()} END"

    # --- conditions on one place --------------------------------------------------------------

    def _test(self, node: Leaf, place: SqlColumn | Json) -> str:
        match node:
            case Comparison(op="=="):
                return self._equal(place, node.operand, (node.value,))
            case Comparison(op="!="):
                if isinstance(place, SqlColumn):
                    return self.compare(place, "!=", node.value)
                return f"(NOT {self._equal(place, node.operand, (node.value,))})"
            case Comparison():
                return self._ordered(place, node.operand, node.op, node.value)
            case In():
                return self._equal(place, node.operand, node.values)
            case TextTest():
                return self._text(place, node)
            case Contains():
                return self._contains(place, node)
            case Test():
                return self._known(place, node)
        raise TypeError(f"{node!r} is not a condition that can be compiled")

    def compare(self, column: SqlColumn, op: CompareOp, value: Any) -> str:
        """A comparison of a typed column with a value of its kind."""
        return self.bounded(column.sql, column.kind, op, value, in_json=False)

    def bounded(self, sql: str, kind: str, op: CompareOp, value: Any, *, in_json: bool) -> str:
        """A comparison of an SQL expression of a kind with a value of that kind."""
        bound = restated(kind, op, value)
        if isinstance(bound, bool):
            return _constant(sql, bound)
        op, value = bound
        return f"({sql} {_SQL_OPS[op]} {self.dialect.literal(kind, value, in_json=in_json)})"

    def _among(self, sql: str, kind: str, values: Sequence[Any], *, in_json: bool) -> str:
        """Whether a value of a kind equals one of several."""
        exact: list[Any] = []
        for value in values:
            bound = restated(kind, "==", value)
            if not isinstance(bound, bool):
                exact.append(bound[1])
        if not exact:
            return _constant(sql, False)
        marks = [self.dialect.literal(kind, value, in_json=in_json) for value in exact]
        return f"({sql} = {marks[0]})" if len(marks) == 1 else f"({sql} IN ({', '.join(marks)}))"

    def _equal(self, place: SqlColumn | Json, operand: Operand, values: Sequence[Any]) -> str:
        if isinstance(place, SqlColumn):
            return self._among(place.sql, place.kind, values, in_json=False)
        return self._equal_in_json(place, operand.kinds, values, cast=operand.cast)

    def _equal_in_json(
        self, place: Json, kinds: frozenset[str], values: Sequence[Any], *, cast: bool = False
    ) -> str:
        """Values of other kinds differ, so the answer for them is false; NULL after a cast, which
        makes them missing."""
        if len(kinds) == 1 and not cast:
            (kind,) = kinds
            return self._among(place.value(kind), kind, values, in_json=True)
        branches = []
        for kind in sorted(kinds):
            alike = [v for v in values if _same_kind(kind, kind_of(v))]
            if alike:
                test = self._among(place.value(kind), kind, alike, in_json=True)
                branches.append(f"WHEN {_any_kind(place, kind, cast=cast)} THEN {test}")
        if cast:
            return f"CASE {' '.join(branches)} END"
        return f"CASE WHEN {place.absent()} THEN NULL {' '.join(branches)} ELSE FALSE END"

    def _ordered(self, place: SqlColumn | Json, operand: Operand, op: CompareOp, value: Any) -> str:
        if isinstance(place, SqlColumn):
            return self.compare(place, op, value)
        kinds, given = operand.kinds, kind_of(value)
        if len(kinds) == 1 and not operand.cast:
            (kind,) = kinds
            return self.bounded(place.value(kind), kind, op, value, in_json=True)
        branches = [
            f"WHEN {_any_kind(place, kind, cast=operand.cast)} "
            f"THEN {self.bounded(place.value(kind), kind, op, value, in_json=True)}"
            for kind in sorted(kinds)
            if _same_kind(kind, given)
        ]
        return f"CASE {' '.join(branches)} END"

    def _text(self, place: SqlColumn | Json, node: TextTest) -> str:
        if isinstance(place, SqlColumn):
            if node.op == "startswith":
                return self._prefix_range(place, node.value)
            return self.dialect.ends(place.sql, node.value)
        text = place.value("str")
        starts = node.op == "startswith"
        test = (self.dialect.starts if starts else self.dialect.ends)(text, node.value)
        if node.operand.kinds == {"str"} and not node.operand.cast:
            return test
        return f"CASE WHEN {place.is_kind('str')} THEN {test} END"

    def _prefix_range(self, column: SqlColumn, prefix: str) -> str:
        """As two bounds, which statistics and indexes can use."""
        low = self.compare(column, ">=", prefix)
        end = after_prefix(prefix)
        return low if end is None else f"({low} AND {self.compare(column, '<', end)})"

    def _contains(self, place: SqlColumn | Json, node: Contains) -> str:
        if isinstance(place, SqlColumn):
            return self.dialect.has_part(place.sql, node.value)
        branches = []
        kinds, value = node.operand.kinds, node.value
        if node.element_kinds:
            listed = (
                place.some(
                    self._element(),
                    lambda element: self._equal_in_json(element, node.element_kinds, (value,)),
                )
                if _possible(value, node.element_kinds)
                else "FALSE"
            )
            branches.append(f"WHEN {place.is_kind('list')} THEN {listed}")
        if "str" in kinds and isinstance(value, str):
            part = self.dialect.has_part(place.value("str"), value)
            branches.append(f"WHEN {place.is_kind('str')} THEN {part}")
        return f"CASE {' '.join(branches)} END"

    def _known(self, place: SqlColumn | Json, node: Test) -> str:
        if isinstance(place, SqlColumn):
            match node.op:
                case "is_null":
                    return f"({place.sql} IS NULL)"
                case "is_not_null":
                    return f"({place.sql} IS NOT NULL)"
                case _:
                    return self.dialect.is_bool(place.sql, node.op == "is_true")
        if node.op in ("is_true", "is_false"):
            wanted = self._among(place.value("bool"), "bool", [node.op == "is_true"], in_json=True)
            return f"COALESCE({place.is_kind('bool')} AND {wanted}, FALSE)"
        absent = place.absent()
        if node.operand.cast:
            (kind,) = node.operand.kinds
            absent = f"(NOT COALESCE({_any_kind(place, kind)}, FALSE))"
        return absent if node.op == "is_null" else f"(NOT {absent})"


def value_kind(operand: Operand) -> str:
    """The one scalar kind of a place; integers and floats together are floats. TypeError when
    there is no such kind, so that its values have no order among themselves."""
    kinds = operand.kinds
    if len(kinds) == 1 and base_kinds(kinds) <= SCALARS:
        return next(iter(kinds))
    if kinds == NUMBERS:
        return "float"
    hint = "" if not operand.path else "; say which you mean: .path(..., str)"
    raise TypeError(f"{operand!r} is {operand.declared}: its values have no common order{hint}")


def after_prefix(prefix: str) -> str | None:
    """The first text after all that begin with `prefix`; None when there is none."""
    for length in range(len(prefix), 0, -1):
        last = ord(prefix[length - 1])
        if last < 0x10FFFF:
            following = 0xE000 if last == 0xD7FF else last + 1  # surrogates are no characters
            return prefix[: length - 1] + chr(following)
    return None


def _any_kind(place: Json, kind: str, *, cast: bool = True) -> str:
    """Whether a value can be read as a kind: an integer as a float too, where a cast says so."""
    if kind == "float" and cast:
        return f"({place.is_kind('int')} OR {place.is_kind('float')})"
    return place.is_kind(kind)


def _possible(value: Any, kinds: frozenset[str]) -> bool:
    kind = kind_of(value)
    return any(_same_kind(declared, kind) for declared in kinds)


def _same_kind(declared: str, kind: str) -> bool:
    """Whether values of a declared kind can be compared with a value of another."""
    return base_kind(declared) == kind or {declared, kind} == NUMBERS


def _constant(sql: str, truth: bool) -> str:
    """The same for every value, unknown for NULL."""
    return f"CASE WHEN {sql} IS NULL THEN NULL ELSE {'TRUE' if truth else 'FALSE'} END"
