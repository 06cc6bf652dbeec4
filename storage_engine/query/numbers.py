"""Comparing integers with floats exactly, in engines that would round one to the other.

DuckDB turns a BIGINT into a DOUBLE to compare the two, so 2**53 + 1 equals 2.0**53 there. Both
functions restate a comparison with a number as one within a single SQL type, without rounding.
"""

from __future__ import annotations

import math
from typing import Literal

from storage_engine.model.expressions import CompareOp
from storage_engine.model.validation import INT64_MAX, INT64_MIN

Bound = tuple[CompareOp, int] | bool
FloatBound = tuple[CompareOp, float] | bool


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


def float_bound(op: CompareOp, value: int | float) -> FloatBound:
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
