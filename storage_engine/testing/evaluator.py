"""Evaluates filters on rows in Python: the definition of what they mean.

A condition is True, False or None (unknown), as in SQL; docs/queries.md has the tables. Rows are
mappings of field names to Python values (identity columns under their own names or the fields'),
or objects of declared classes. The SQL compilers are tested against this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cmp_to_key
from typing import Any

from storage_engine.model.decimals import exact_sum
from storage_engine.model.expressions import (
    NUMBERS,
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
    kind_of,
)
from storage_engine.model.scalars import lowered
from storage_engine.query.conditions import Endpoint, normalise

Row = Any  # a mapping, or an object of a declared class
Truth = bool | None

_ORDER: dict[CompareOp, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def matches(
    expression: Filter, row: Row, *, left: Sequence[Row] = (), right: Sequence[Row] = ()
) -> bool:
    """Whether a row passes `where(expression)`; `left` and `right` are the endpoint's visible
    versions."""
    return evaluate(expression, row, left=left, right=right) is True


def evaluate(
    expression: Filter, row: Row, *, left: Sequence[Row] = (), right: Sequence[Row] = ()
) -> Truth:
    """The truth of a filter on a row: True, False, or None for unknown."""
    return _evaluate(normalise(expression), row, {"left": left, "right": right})


def value_at(operand: Operand, row: Row) -> Any:
    """What a row has at a place, as it is compared (`lowered`); None when it is NULL or missing."""
    value = lowered(_follow(operand.path, _field(operand, row)))
    return _cast(operand, value) if operand.cast else value


def _evaluate(node: Filter, row: Row, endpoints: Mapping[Source, Sequence[Row]]) -> Truth:
    match node:
        case And():
            return _all(_evaluate(part, row, endpoints) for part in node.parts)
        case Or():
            return _not(_all(_not(_evaluate(part, row, endpoints)) for part in node.parts))
        case Not():
            return _not(_evaluate(node.part, row, endpoints))
        case Endpoint():
            versions = endpoints[node.source]
            return any(_evaluate(node.part, version, {}) is True for version in versions)
        case Leaf():
            return _leaf(node, row)
    raise TypeError(f"{node!r} is not a filter that can be evaluated")


def _all(truths: Iterable[Truth]) -> Truth:
    result: Truth = True
    for truth in truths:
        if truth is False:
            return False
        if truth is None:
            result = None
    return result


def _not(truth: Truth) -> Truth:
    return None if truth is None else not truth


def _leaf(node: Leaf, row: Row) -> Truth:
    operand = node.operand
    if operand.item_path is None:
        return _test(node, value_at(operand, row))
    items = _follow(operand.path, _field(operand, row))
    if not isinstance(items, list):
        return False
    elements = (lowered(_follow(operand.item_path, item)) for item in items)
    return any(_test(node, _cast(operand, v) if operand.cast else v) is True for v in elements)


def _test(node: Leaf, value: Any) -> Truth:
    if isinstance(node, Test):
        match node.op:
            case "is_null":
                return value is None
            case "is_not_null":
                return value is not None
            case "is_true":
                return value is True
            case _:
                return value is False
    if isinstance(node, In) and not node.values:
        return False
    if value is None:
        return None
    match node:
        case Comparison(op="=="):
            return equal(value, node.value)
        case Comparison(op="!="):
            return not equal(value, node.value)
        case Comparison():
            if not comparable(value, node.value):
                return None
            return _ORDER[node.op](value, node.value)
        case In():
            return any(equal(value, wanted) for wanted in node.values)
        case TextTest():
            if not isinstance(value, str):
                return None
            return bool(getattr(value, node.op)(node.value))
        case Contains():
            if isinstance(value, list):
                return any(equal(lowered(item), node.value) for item in value)
            if isinstance(value, str) and isinstance(node.value, str):
                return node.value in value
            return None
    raise TypeError(f"{node!r} is not a condition that can be evaluated")


def comparable(value: Any, other: Any) -> bool:
    """Whether two values are of one kind; integers and floats are, booleans are not numbers."""
    kinds = {kind_of(value), kind_of(other)}
    return len(kinds) == 1 or kinds == NUMBERS


def equal(value: Any, other: Any) -> bool:
    """Whether two values are the same; values of different kinds are not."""
    return comparable(value, other) and bool(value == other)


def _field(operand: Operand, row: Row) -> Any:
    if isinstance(row, Mapping):
        if operand.identity is not None and operand.identity in row:
            return row[operand.identity]
        return row.get(operand.name)
    return vars(row).get(operand.name)


def _follow(path: Iterable[str], value: Any) -> Any:
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _cast(operand: Operand, value: Any) -> Any:
    kind = kind_of(value)
    if kind == "int" and operand.kinds == {"float"}:
        return float(value)
    return value if kind in operand.kinds else None


# --- order and aggregates ---------------------------------------------------------------------


def ordered(
    rows: Iterable[Row], keys: Sequence[tuple[Operand, bool]], ties: Callable[[Row], Any]
) -> list[Row]:
    """Rows by the places in `keys` (with True for descending), NULLs last either way, then by
    `ties`."""

    def compare(row: Row, other: Row) -> int:
        for operand, descending in keys:
            a, b = value_at(operand, row), value_at(operand, other)
            if a is None or b is None:
                if (a is None) != (b is None):
                    return 1 if a is None else -1
            elif a != b:
                return (1 if a > b else -1) * (-1 if descending else 1)
        return 0

    return sorted(sorted(rows, key=ties), key=cmp_to_key(compare))


def aggregate(function: str, values: Iterable[Any]) -> Any:
    """`sum`, `avg`, `min`, `max`, `count` or `avg_len` of the values that are not None."""
    present = [value for value in values if value is not None]
    match function:
        case "count":
            return len(present)
        case "avg_len":
            lengths = [len(value) for value in present if isinstance(value, list)]
            return math.fsum(lengths) / len(lengths) if lengths else None
        case _ if not present:
            return None
        case "sum":
            if isinstance(present[0], Decimal):
                return exact_sum(present)
            return (
                math.fsum(present) if any(isinstance(v, float) for v in present) else sum(present)
            )
        case "avg":
            if isinstance(present[0], Decimal):
                return float(Fraction(exact_sum(present)) / len(present))
            return math.fsum(present) / len(present)
        case "min":
            return min(present)
        case _:
            return max(present)
