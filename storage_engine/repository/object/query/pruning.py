"""Which files cannot hold a row that a condition is true for, by what the log knows of each.

Promise: a file is left out only when no row in it can pass. Missing or cut statistics keep it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import Any

from storage_engine.commitlog.records import CommitFile, timestamp
from storage_engine.model.expressions import (
    And,
    CompareOp,
    Comparison,
    Filter,
    In,
    Leaf,
    Not,
    Or,
    Test,
    TextTest,
)
from storage_engine.query.sql import after_prefix

_INVERSE: Mapping[CompareOp, CompareOp] = {
    "==": "!=",
    "!=": "==",
    "<": ">=",
    "<=": ">",
    ">": "<=",
    ">=": "<",
}
_OPPOSITE_TEST = {"is_null": "is_not_null", "is_not_null": "is_null"}


def may_match(condition: Filter, file: CommitFile, *, negate: bool = False) -> bool:
    """Whether some row of the file may make the condition true (`negate`: false)."""
    match condition:
        case Not():
            return may_match(condition.part, file, negate=not negate)
        case And() | Or():
            together = isinstance(condition, And) != negate
            parts = (may_match(part, file, negate=negate) for part in condition.parts)
            return all(parts) if together else any(parts)
        case Leaf():
            try:
                return _leaf(condition, file, negate)
            except TypeError:  # statistics of another kind: written by someone else
                return True
    return True


Bound = tuple[int, str]  # (0, key); (-1, "") is below every key, (1, "") above
_BELOW: Bound = (-1, "")
_ABOVE: Bound = (1, "")


class KeyRanges:
    """The first identity column's ranges of many files, merged where they touch."""

    def __init__(self) -> None:
        self._ranges: list[tuple[Bound, Bound]] = []  # disjoint, ascending

    def add(self, files: Iterable[CommitFile]) -> None:
        for file in files:
            low, high = _key_range(file)
            first, last = self._touching(low, high)
            touching = self._ranges[first:last]
            if touching:
                low, high = min(low, touching[0][0]), max(high, touching[-1][1])
            self._ranges[first:last] = [(low, high)]

    def overlap(self, file: CommitFile) -> bool:
        """Whether an identity may be in this file and in one of those."""
        first, last = self._touching(*_key_range(file))
        return first < last

    def _touching(self, low: Bound, high: Bound) -> tuple[int, int]:
        first = bisect_left(self._ranges, low, key=lambda r: r[1])
        last = bisect_right(self._ranges, high, key=lambda r: r[0])
        return first, last


def _key_range(file: CommitFile) -> tuple[Bound, Bound]:
    name = "entity_key" if file.kind == "entity" else "left_key"
    low, high = file.key_range.get(name) or (None, None)
    return _BELOW if low is None else (0, low), _ABOVE if high is None else (0, high)


def may_hold(file: CommitFile, ranges: Mapping[str, tuple[str, str]]) -> bool:
    """Whether an identity within these ranges (column: least and greatest key) may be there."""
    return all(_overlap(file.key_range.get(name), bounds) for name, bounds in ranges.items())


def _overlap(one: Sequence[Any] | None, other: Sequence[Any] | None) -> bool:
    if not one or not other:
        return True
    return _at_most(one[0], other[1]) and _at_most(other[0], one[1])


def _at_most(low: Any, high: Any) -> bool:
    return low is None or high is None or bool(low <= high)


def _leaf(leaf: Leaf, file: CommitFile, negate: bool) -> bool:
    operand = leaf.operand
    if operand.source != "self" or operand.path or operand.item_path is not None:
        return True
    if operand.identity is not None:
        bounds = file.key_range.get(operand.identity)
        low, high, nulls = (*bounds, 0) if bounds else (None, None, None)
    else:
        if operand.spec is None or operand.spec.storage == "json":
            return True
        low, high, nulls = file.stats.get(operand.name, (None, None, None))
    if isinstance(leaf, Test):
        return _test(_OPPOSITE_TEST.get(leaf.op, "") if negate else leaf.op, file, nulls)
    if isinstance(leaf, In) and not leaf.values:
        return negate  # false, even of NULL
    if nulls is not None and 0 <= file.row_count <= nulls:
        return False  # nothing but NULLs: every comparison is unknown
    match leaf:
        case Comparison():
            return _compare(_INVERSE[leaf.op] if negate else leaf.op, leaf.value, low, high)
        case In() if not negate:
            return any(_compare("==", value, low, high) for value in leaf.values)
        case TextTest(op="startswith") if not negate:
            end = after_prefix(leaf.value)
            below = end is None or low is None or low < end
            return below and _at_most(leaf.value, high)
    return True


def _test(op: str, file: CommitFile, nulls: int | None) -> bool:
    if nulls is None:
        return True
    if op == "is_null":
        return nulls > 0
    if op == "is_not_null":
        return file.row_count < 0 or nulls < file.row_count
    return True


def _compare(op: CompareOp, value: Any, low: Any, high: Any) -> bool:
    value = _stored(value)
    if value is None:
        return True
    match op:
        case "==":
            return _at_most(low, value) and _at_most(value, high)
        case "!=":
            return low is None or high is None or not low == high == value
        case "<":
            return low is None or bool(low < value)
        case "<=":
            return _at_most(low, value)
        case ">":
            return high is None or bool(high > value)
        case _:
            return _at_most(value, high)


def _stored(value: Any) -> Any:
    """A value as statistics have it; None for kinds that they leave out."""
    if isinstance(value, datetime):
        return timestamp(value)
    if isinstance(value, date):
        return value.isoformat()
    return None if isinstance(value, bytes) else value
