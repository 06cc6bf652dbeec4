"""Fields of stored JSON: what is taken, what is refused, and what the error says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storage_engine.commitlog import parsing
from storage_engine.errors import IntegrityError

VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "text": "a",
    "empty text": "",
    "number": 3,
    "negative": -1,
    "huge": 2**63,
    "float": 1.5,
    "list": [],
    "object": {},
    "time": "2026-01-01T00:00:00+00:00",
}

TAKEN: dict[str, tuple[Callable[[dict[str, Any], str], Any], set[str]]] = {
    "require_int": (parsing.require_int, {"number"}),
    "optional_int": (parsing.optional_int, {"number", "null", "absent"}),
    "require_text": (parsing.require_text, {"text", "time"}),
    "optional_text": (parsing.optional_text, {"text", "time", "empty text", "null", "absent"}),
    "require_time": (parsing.require_time, {"time"}),
    "optional_time": (parsing.optional_time, {"time", "null", "absent"}),
    "require_list": (parsing.require_list, {"list"}),
    "optional_list": (parsing.optional_list, {"list", "null", "absent"}),
    "require_objects": (parsing.require_objects, {"list"}),
    "optional_objects": (parsing.optional_objects, {"list", "null", "absent"}),
    "require_object": (parsing.require_object, {"object"}),
    "optional_object": (parsing.optional_object, {"object", "null", "absent"}),
    "optional_texts": (parsing.optional_texts, {"object", "null", "absent"}),
    "optional_bool": (
        lambda raw, field: parsing.optional_bool(raw, field, False),
        {"true", "null", "absent"},
    ),
    "require_choice": (
        lambda raw, field: parsing.require_choice(raw, field, ("a", "b")),
        {"text"},
    ),
    "optional_stats": (
        lambda raw, field: parsing.optional_stats({"stats": raw[field]} if raw else {}),
        {"object", "null", "absent"},
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_field_is_taken_or_refused_by_its_type(name: str) -> None:
    take, accepted = TAKEN[name]
    objects = {label: {"field": value} for label, value in VALUES.items()}
    taken = set()
    for label, raw in {**objects, "absent": {}}.items():
        try:
            take(raw, "field")
        except parsing.FieldError:
            continue
        taken.add(label)
    assert taken == accepted


@pytest.mark.parametrize(
    ("take", "raw", "message"),
    [
        (parsing.require_int, {}, "n should be an integer of at least 0 and is absent"),
        (parsing.require_int, {"n": None}, "n should be an integer of at least 0 and is null"),
        (
            parsing.require_int,
            {"n": 10**30},
            f"n should be an integer of at least 0 and is {10**30}",
        ),
        (parsing.require_text, {"n": {"a": 1}}, "n should be a text and is an object of 1 fields"),
        (parsing.require_objects, {"n": [{}, 7]}, "n[1] should be an object and is 7"),
        (parsing.optional_texts, {"n": {"a": 1}}, "n.a should be a text and is 1"),
    ],
)
def test_the_error_says_what_it_should_have_been(take: Any, raw: Any, message: str) -> None:
    with pytest.raises(parsing.FieldError) as caught:
        take(raw, "n")
    assert str(caught.value) == message


def test_statistics_are_lists_of_three_scalars() -> None:
    assert parsing.optional_stats({"stats": {"x": [1, None, 0]}}) == {"x": [1, None, 0]}
    for wrong in ([1], [1, 2, 3, 4], [1, [2], 0], "abc", 5, None):
        with pytest.raises(parsing.FieldError, match=r"stats\.x should be a list of 3 values"):
            parsing.optional_stats({"stats": {"x": wrong}})


def test_key_ranges_are_pairs_of_keys() -> None:
    assert parsing.optional_key_range({"key_range": {"x": ["a", None]}}) == {"x": ["a", None]}
    for wrong in (["a"], ["a", 2], [True, "b"], "ab", None):
        with pytest.raises(parsing.FieldError, match=r"key_range\.x should be a list of 2 keys"):
            parsing.optional_key_range({"key_range": {"x": wrong}})


def test_a_time_that_is_none_in_utc_is_refused() -> None:
    for text in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-13-01"):
        with pytest.raises(parsing.FieldError, match="a time in ISO 8601"):
            parsing.require_time({"t": text}, "t")


def test_a_long_value_is_cut_in_the_sentence() -> None:
    with pytest.raises(parsing.FieldError) as caught:
        parsing.require_int({"n": "x" * 1_000_000}, "n")
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    "error",
    [KeyError("a"), TypeError("b"), ValueError("c"), AttributeError("d"), RecursionError("e")],
)
def test_whatever_a_wrong_shape_raises_names_the_object(error: Exception) -> None:
    named = r"meta/head\.json is not a valid head"
    with (
        pytest.raises(IntegrityError, match=named) as caught,
        parsing.parsing("meta/head.json", "head"),
    ):
        raise error
    assert caught.value.key == "meta/head.json"
