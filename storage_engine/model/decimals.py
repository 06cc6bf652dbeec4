"""Decimals of a declared precision: their columns, their texts, and comparisons without rounding.

    decimal_type("decimal(12,2)").read("12.3")      Decimal("12.30")

A value has exactly `scale` digits after the point, so that it has one text, and at most `precision`
digits in all. Promise: nothing is ever rounded; what does not fit raises ValueError. Python's own
decimal context, which users may change, has no say.

SQLite has no decimals. Up to 18 digits fit its integers, as counts of the last digit (12.30 is
1230); longer ones are texts of fixed width whose order is that of the numbers: `1` and the digits,
or for negative numbers `0` and what the digits lack to nines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Context, Decimal, DivisionByZero, Inexact, InvalidOperation, Overflow
from functools import lru_cache
from typing import Any, Literal

import pyarrow as pa

MAX_PRECISION = 38  # of Arrow's decimal128, DuckDB and Spark
INTEGER_PRECISION = 18  # so many digits always fit into 64 bits

_NAME = re.compile(r"decimal\((\d+),(\d+)\)")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_CONTEXT = Context(
    prec=4 * MAX_PRECISION, traps=[Inexact, InvalidOperation, Overflow, DivisionByZero]
)

DecimalBound = tuple[Literal["==", "!=", "<", "<=", ">", ">="], Decimal] | bool


@dataclass(frozen=True, slots=True)
class Precision:
    """How many digits a Decimal has, and how many of them after the point:
    `Annotated[Decimal, Precision(12, 2)]`."""

    precision: int
    scale: int

    def __post_init__(self) -> None:
        for name in ("precision", "scale"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"the {name} of a Decimal is an int")
        if not 1 <= self.precision <= MAX_PRECISION:
            raise ValueError(f"the precision of a Decimal is 1 to {MAX_PRECISION} digits")
        if not 0 <= self.scale <= self.precision:
            raise ValueError(
                f"the scale of a Decimal is 0 to its precision ({self.precision}), not {self.scale}"
            )

    @property
    def kind(self) -> str:
        """Its name as a kind of column."""
        return f"decimal({self.precision},{self.scale})"

    @property
    def arrow(self) -> pa.DataType:
        return pa.decimal128(self.precision, self.scale)

    @property
    def sql(self) -> str:
        """Its name in DuckDB and Spark."""
        return f"DECIMAL({self.precision},{self.scale})"

    @property
    def in_sqlite(self) -> str:
        return "INTEGER" if self.precision <= INTEGER_PRECISION else "TEXT"

    @property
    def total(self) -> Precision:
        """What sums of such values have."""
        return Precision(MAX_PRECISION, self.scale)

    def read(self, value: Decimal | int | str) -> Decimal:
        """The value with all its digits; ValueError, as the end of a sentence, if it has others."""
        if isinstance(value, str):
            value = exact_number(value)
        elif not isinstance(value, Decimal):
            value = Decimal(int(value))
        if not value.is_finite():
            raise ValueError("must be finite, not NaN or infinity")
        if value and value.adjusted() >= self.precision - self.scale:
            raise ValueError(f"has more than {self.precision - self.scale} digits before the point")
        try:
            exact = value.quantize(_UNITS[self.scale], context=_CONTEXT)
        except Inexact:
            raise ValueError(f"has more than {self.scale} digits after the point") from None
        return exact if exact else exact.copy_abs()

    def unscaled(self, value: Decimal) -> int:
        """How many units of the last digit a value is."""
        return int(value.scaleb(self.scale, _CONTEXT))

    def of_unscaled(self, units: int) -> Decimal:
        return Decimal(units).scaleb(-self.scale, _CONTEXT)

    # --- SQLite -------------------------------------------------------------------------------

    def to_sqlite(self, value: Decimal) -> int | str:
        units = self.unscaled(value)
        if self.precision <= INTEGER_PRECISION:
            return units
        if units >= 0:
            return f"1{units:0{self.precision}d}"
        return f"0{10**self.precision - 1 + units:0{self.precision}d}"

    def from_sqlite(self, stored: int | str) -> Decimal:
        """The inverse; ValueError for what it never gives."""
        if self.precision <= INTEGER_PRECISION:
            if type(stored) is not int or abs(stored) >= 10**self.precision:
                raise ValueError(f"{stored!r} is no {self.kind}")
            return self.of_unscaled(stored)
        if (
            not isinstance(stored, str)
            or len(stored) != self.precision + 1
            or not stored.isascii()
            or not stored.isdigit()
            or stored[0] not in "01"
        ):
            raise ValueError(f"{stored!r} is no {self.kind}")
        digits = int(stored[1:])
        return self.of_unscaled(digits if stored[0] == "1" else digits - 10**self.precision + 1)

    # --- comparisons --------------------------------------------------------------------------

    def bound(self, op: Any, value: Decimal) -> DecimalBound:
        """The comparison `x op value` for values x of this type; a bool when all answer alike."""
        most = 10**self.precision - 1
        largest, least = self.of_unscaled(most), self.of_unscaled(-most)
        if value > largest:
            return op in ("<", "<=", "!=")
        if value < least:
            return op in (">", ">=", "!=")
        floor = value.quantize(_UNITS[self.scale], rounding="ROUND_FLOOR", context=_ROUNDING)
        if floor == value:
            return op, self.read(floor)
        match op:
            case "==" | "!=":
                return bool(op == "!=")
            case "<" | "<=":
                bounded: Literal["<=", ">"] = "<="
            case _:
                bounded = ">"
        if floor < least:
            return bounded == ">"
        return bounded, self.read(floor)


_UNITS = [Decimal((0, (1,), -scale)) for scale in range(MAX_PRECISION + 1)]
_ROUNDING = Context(prec=4 * MAX_PRECISION, traps=[InvalidOperation])


@lru_cache(maxsize=256)
def decimal_type(kind: str) -> Precision | None:
    """The decimals that a kind of column names; None for other kinds."""
    match = _NAME.fullmatch(kind)
    return Precision(int(match[1]), int(match[2])) if match else None


def exact_number(text: str) -> Decimal:
    """A decimal number of any size; ValueError for another text."""
    if not _NUMBER.fullmatch(text):
        raise ValueError("is not a decimal number")
    return Decimal(text)


def text_of(value: Decimal) -> str:
    """The one text of a value that `Precision.read` has given: no exponent, all digits."""
    return format(value, "f")


def exact_sum(values: list[Decimal]) -> Decimal:
    """Without rounding; Python's own `sum` keeps 28 digits."""
    exponent = min(int(value.as_tuple().exponent) for value in values)
    units = sum(int(value.scaleb(-exponent, _CONTEXT)) for value in values)
    return Decimal(units).scaleb(exponent, _CONTEXT)
