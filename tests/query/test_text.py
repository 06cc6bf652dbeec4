"""Filters typed at a command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from storage_engine.cli.query_terms import filter_from_text
from storage_engine.query import left
from tests.query.worlds import LINK, THING, Link, Thing

ENDS = {"left": THING, "right": THING}


@pytest.mark.parametrize(
    ("path", "op", "value", "expected"),
    [
        ("whole", ">", "5", Thing.whole > 5),
        ("whole", "=", "5", Thing.whole == 5),
        ("text", "in", '["a", "b"]', Thing.text.in_(["a", "b"])),
        ("text", "STARTSWITH", '"a"', Thing.text.startswith("a")),
        ("tags", "contains", '"a"', Thing.tags.contains("a")),
        ("flag", "is_true", None, Thing.flag.is_true()),
        ("profile.a.b", "!=", '"x"', Thing.profile.path("a.b") != "x"),
        ("events[].k", "==", "1", Thing.events.any_path("k") == 1),
        ("profile.k[].a.b", "==", "1", Thing.profile["k"].any_path("a.b") == 1),
        ("moment", "<", '"2020-01-01T00:00:00Z"', Thing.moment < datetime(2020, 1, 1, tzinfo=UTC)),
        ("raw", "==", '"YQ=="', Thing.raw == b"a"),
        ("id", "==", '"x"', Thing.id == "x"),
    ],
)
def test_typed_filters_are_the_written_ones(
    path: str, op: str, value: str | None, expected: object
) -> None:
    assert filter_from_text(THING, path, op, value) == expected


def test_endpoints_can_be_named() -> None:
    made = filter_from_text(LINK, "left.profile.a", "==", "1", endpoints=ENDS)  # type: ignore[arg-type]
    assert made == (left(Link).profile["a"] == 1)


@pytest.mark.parametrize(
    ("path", "op", "value", "message"),
    [
        ("txet", "==", "1", "Thing: unknown field 'txet', did you mean 'text'?"),
        ("", "==", "1", "Thing: unknown field ''"),
        ("node.nxet", "==", "1", "unknown key 'nxet', did you mean 'next'?"),
        ("whole", "=>", "1", "unknown operator '=>', did you mean"),
        ("whole", "startwith", "1", "did you mean 'startswith'?"),
        ("whole", "==", None, "whole ==: needs a value, written as JSON"),
        ("text", "==", "abc", "the value is not JSON; a text needs quotes"),
        ("whole", "==", '"x"', "Thing.whole is int | None; it cannot be compared with 'x' (str)"),
        ("whole", "==", "null", "use Thing.whole.is_null or .is_not_null"),
        ("whole", "is_null", "1", "whole is_null: takes no value"),
        ("text", "in", '"x"', "needs a JSON list"),
        ("moment", "==", '"yesterday"', "'yesterday' is not one"),
        ("events[]", "==", "1", "name a key of the elements"),
        ("profile.", "==", "1", "it ends in a dot"),
        ("profile..a", "==", "1", "bad path"),
        ("left.text", "==", "1", "unknown field 'left'"),
        ("text'; DROP TABLE x; --", "==", "1", "unknown field"),
    ],
)
def test_mistakes_say_what_would_be_right(
    path: str, op: str, value: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        filter_from_text(THING, path, op, value)
