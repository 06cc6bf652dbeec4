"""Decimals keep every digit, whatever Python's context says, and sort as numbers in SQLite."""

from __future__ import annotations

import decimal
import operator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_engine.model.decimals import Precision, decimal_type, exact_sum, text_of

OPS: dict[Any, Any] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@st.composite
def precisions(draw: st.DrawFn) -> Precision:
    precision = draw(st.sampled_from([1, 2, 9, 17, 18, 19, 37, 38]))
    return Precision(precision, draw(st.integers(0, precision)))


def values(precision: Precision) -> st.SearchStrategy[Decimal]:
    most = 10**precision.precision - 1
    edges = st.sampled_from([0, 1, -1, most, -most, most - 1])
    return (edges | st.integers(-most, most)).map(precision.of_unscaled)


@given(st.data(), precisions())
def test_sqlite_keeps_values_and_their_order(data: st.DataObject, precision: Precision) -> None:
    a, b = (data.draw(values(precision)) for _ in range(2))
    stored = [precision.to_sqlite(value) for value in (a, b)]
    assert [precision.from_sqlite(value) for value in stored] == [a, b]
    assert (stored[0] < stored[1]) == (a < b)  # type: ignore[operator]
    assert (stored[0] == stored[1]) == (a == b)


@given(st.data(), precisions(), st.sampled_from(sorted(OPS)))
def test_comparisons_are_restated_without_rounding(
    data: st.DataObject, precision: Precision, op: Any
) -> None:
    value = data.draw(values(precision))
    other = data.draw(
        values(precision) | st.decimals(allow_nan=False, allow_infinity=False, places=3)
    )
    bound = precision.bound(op, other)
    if isinstance(bound, bool):
        assert bound == OPS[op](value, other)
    else:
        assert bound[1] == precision.read(bound[1])
        assert OPS[bound[0]](value, bound[1]) == OPS[op](value, other)


def test_the_users_context_has_no_say() -> None:
    wide = Precision(38, 9)
    digits = "1234567890123456789012345678.123456789"
    with decimal.localcontext(decimal.Context(prec=3)):
        read = wide.read(digits)
        assert text_of(read) == "1234567890123456789012345678.123456789"
        assert wide.from_sqlite(wide.to_sqlite(read)) == Decimal(digits)
        assert wide.bound("<", Decimal(digits)) == ("<", Decimal(digits))
        assert wide.bound(">", Decimal("-1e40")) is True
        total = exact_sum([read, read.copy_negate(), read])
    assert total == Decimal(digits)


@pytest.mark.parametrize(
    ("given_value", "text"),
    [("1", "1.00"), ("-0", "0.00"), ("1e2", "100.00"), ("0.5000", "0.50"), ("99999.99",) * 2],
)
def test_a_value_has_one_text(given_value: str, text: str) -> None:
    assert text_of(Precision(7, 2).read(given_value)) == text


@pytest.mark.parametrize(
    ("given_value", "why"),
    [
        ("0.001", "more than 2 digits after the point"),
        ("100000", "more than 5 digits before the point"),
        ("1e400", "more than 5 digits before the point"),
        ("1e-400", "more than 2 digits after the point"),
        ("NaN", "not a decimal number"),
        ("1_0", "not a decimal number"),
        (" 1", "not a decimal number"),
        ("\u0661", "not a decimal number"),
        ("", "not a decimal number"),
        (Decimal("NaN"), "finite"),
        (Decimal("-Infinity"), "finite"),
    ],
)
def test_what_does_not_fit_is_refused(given_value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Precision(7, 2).read(given_value)


@pytest.mark.parametrize("stored", ["1", "x" * 21, "2" + "0" * 20, 5, None, "1" + "\u0660" * 20])
def test_what_sqlite_never_held_is_refused(stored: Any) -> None:
    with pytest.raises(ValueError, match="is no decimal"):
        Precision(20, 2).from_sqlite(stored)


def test_kinds_of_columns() -> None:
    assert decimal_type("decimal(12,2)") == Precision(12, 2)
    assert decimal_type("decimal") is None
    assert decimal_type("int") is None
