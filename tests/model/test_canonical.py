"""Canonical JSON: one text per value, nothing that cannot come back."""

import json
from datetime import UTC, date, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_engine.errors import ValidationError
from storage_engine.model import build_type_spec, canonical_json, decode, encode

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """A form in which 1, 1.0 and True differ, and -0.0 and 0.0 too."""
    if isinstance(value, dict):
        return {k: typed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [typed(v) for v in value]
    return (type(value).__name__, repr(value))


def test_form():
    value = {"b": [1, 2.0, None, True], "a": "é\n", "aa": {}}
    assert canonical_json(value) == '{"a":"é\\n","aa":{},"b":[1,2.0,null,true]}'


@settings(deadline=None)
@given(JSON)
def test_round_trip_keeps_types(value: Any):
    assert typed(json.loads(canonical_json(value))) == typed(value)


@settings(deadline=None)
@given(st.dictionaries(TEXT, INT64, min_size=2))
def test_key_order_does_not_matter(value: dict[str, int]):
    turned = dict(reversed(value.items()))
    assert canonical_json(turned) == canonical_json(value)


BAD = [
    (float("nan"), "finite"),
    (float("inf"), "finite"),
    ([float("-inf")], "finite"),
    (2**63, "beyond 64 bits"),
    (2**64 - 1, "beyond 64 bits"),
    (-(2**63) - 1, "beyond 64 bits"),
    ("\ud800", "surrogate"),
    ({"\udc00": 1}, "surrogate"),
    ((1, 2), "tuple is not a JSON value"),
    ({1: 2}, "key of type int"),
    (datetime(2024, 1, 1, tzinfo=UTC), "datetime is not a JSON value"),
    (b"x", "bytes is not a JSON value"),
    (object(), "object is not a JSON value"),
    ({1, 2}, "set is not a JSON value"),
]


@pytest.mark.parametrize(("value", "said"), BAD, ids=range(len(BAD)))
def test_refused(value: Any, said: str):
    with pytest.raises(ValidationError, match=said):
        canonical_json(value)


def test_depth_is_limited_before_the_encoder_fails():
    deep: Any = 1
    for _ in range(201):
        deep = [deep]
    with pytest.raises(ValidationError, match="200 levels deep"):
        canonical_json(deep)
    assert canonical_json(deep[0]).startswith("[[[")


ENCODED = [
    (datetime, datetime(2024, 1, 2, tzinfo=UTC), "2024-01-02T00:00:00.000000+00:00"),
    (date, date(1, 2, 3), "0001-02-03"),
    (bytes, b"\xfb\xff\xbf", "+/+/"),
    (list[bytes | None], [b"", None], ["", None]),
    (dict[str, list[date]], {"a": [date(2024, 1, 1)]}, {"a": ["2024-01-01"]}),
    (
        int | datetime,
        datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
        "9999-12-31T23:59:59.999999+00:00",
    ),
    (int | datetime, 5, 5),
    (list[str], ["2024-01-01"], ["2024-01-01"]),
]


@pytest.mark.parametrize(("annotation", "value", "encoded"), ENCODED, ids=str)
def test_encode_and_decode(annotation: Any, value: Any, encoded: Any):
    spec = build_type_spec(annotation)
    assert encode(spec, value) == encoded
    again = decode(spec, encoded)
    assert typed(again) == typed(value)
