"""What filters look like, what they refuse, and what they say then."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest

from storage_engine.model.expressions import And, Comparison, Filter, Or
from storage_engine.query import left, right
from tests.query.worlds import LINK, Link, Thing

ANY: Any = Thing


def shown(made: object) -> str:
    return repr(made)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Thing.whole == 5, "Thing.whole == 5"),
        (5 < Thing.whole, "Thing.whole > 5"),  # noqa: SIM300
        (Thing.text.in_(["a", "b", "a"]), "Thing.text.in_(['a', 'b'])"),
        (Thing.text.startswith("a%"), "Thing.text.startswith('a%')"),
        (Thing.tags.contains("a"), "Thing.tags.contains('a')"),
        (Thing.profile["a"]["b c"].is_null(), "Thing.profile['a']['b c'].is_null()"),
        (Thing.profile.path("a.b") != 1, "Thing.profile['a']['b'] != 1"),
        (Thing.events.any_path("a.b") == 1, "Thing.events.any_path('a.b') == 1"),
        (left(Link).text == "x", "left(Link).text == 'x'"),
        (right(Link).profile["a"] == "x", "right(Link).profile['a'] == 'x'"),
        (
            (Thing.whole > 1) & (Thing.whole < 3) & ~Thing.flag.is_true() | Thing.text.is_null(),
            "(((Thing.whole > 1) & (Thing.whole < 3) & ~Thing.flag.is_true()) | "
            "Thing.text.is_null())",
        ),
    ],
)
def test_filters_read_as_written(made: Filter, text: str) -> None:
    assert shown(made) == text
    assert json.loads(json.dumps(made.as_json())) == made.as_json()


def test_filters_are_values() -> None:
    assert ((Thing.whole > 1) & (Thing.whole < 3)) == And((Thing.whole > 1, Thing.whole < 3))
    assert len({Thing.whole > 1, Thing.whole > 1, Thing.whole > 2}) == 2
    assert isinstance((Thing.whole > 1) | (Thing.whole < 3), Or)
    with pytest.raises(AttributeError):
        (Thing.whole > 1).value = 3  # type: ignore[attr-defined]


def test_values_are_normalised() -> None:
    east = timezone(timedelta(hours=2))
    made = Thing.moment == datetime(2020, 1, 1, 2, tzinfo=east)
    assert isinstance(made, Comparison)
    assert made.value == datetime(2020, 1, 1, tzinfo=UTC)
    assert made.value.tzinfo is UTC
    naive = Thing.moment == datetime(2020, 1, 1)  # noqa: DTZ001
    assert naive == made
    raw: Any = ANY.raw == bytearray(b"a")
    assert isinstance(raw, Comparison)
    assert type(raw.value) is bytes


def test_the_same_filter_as_json() -> None:
    made = (Thing.moment > datetime(2020, 1, 1, tzinfo=UTC)) & (left(Link).raw == b"a")
    assert made.as_json() == {
        "op": "and",
        "parts": [
            {
                "op": ">",
                "operand": {"type": "Thing", "field": "moment"},
                "value": "2020-01-01T00:00:00.000000+00:00",
            },
            {
                "op": "==",
                "operand": {
                    "type": "Thing",
                    "field": "raw",
                    "source": "left",
                    "relation": "Link",
                },
                "value": "YQ==",
            },
        ],
    }


WRONG_TYPES = [
    (lambda: ANY.whole == "x", "Thing.whole is int | None; it cannot be compared with 'x' (str)"),
    (lambda: ANY.text > 5, "Thing.text is str | None; it cannot be compared with 5 (int)"),
    (lambda: ANY.day == datetime(2020, 1, 1, tzinfo=UTC), "Thing.day is date | None; it cannot"),
    (lambda: ANY.moment == date(2020, 1, 1), "Thing.moment is datetime | None; it cannot"),
    (lambda: ANY.raw == "a", "Thing.raw is bytes | None; it cannot be compared with 'a' (str)"),
    (lambda: ANY.mixed == b"a", "Thing.mixed is int | str | None; it cannot"),
    (lambda: ANY.open == b"a", "Thing.open is Any; it cannot be compared with b'a' (bytes)"),
    (lambda: ANY.open == [1], "Thing.open is Any; it cannot be compared with [1] (list)"),
    (lambda: ANY.node["at"] == "x", "Thing.node['at'] is datetime; it cannot"),
    (lambda: ANY.text == None, "use Thing.text.is_null() or .is_not_null()"),  # noqa: E711
    (lambda: ANY.text != None, "use Thing.text.is_null() or .is_not_null()"),  # noqa: E711
    (lambda: ANY.flag == True, "use Thing.flag.is_true() or .is_false()"),  # noqa: E712
    (lambda: ANY.whole != False, "Thing.whole is int | None; it cannot be compared with False"),  # noqa: E712
    (lambda: ANY.money == True, "it cannot be compared with True (bool)"),  # noqa: E712
    (
        lambda: ANY.whole.in_([1, True]),
        "Thing.whole is int | None; it cannot be compared with True",
    ),
    (lambda: ANY.whole.in_([None]), "use Thing.whole.is_null()"),
    (lambda: ANY.text.in_("abc"), "Thing.text.in_() takes a list of values, not 'abc'"),
    (lambda: ANY.text.in_(5), "Thing.text.in_() takes a list of values, not 5"),
    (lambda: ANY.whole == ANY.real, "can be compared with a value, not with Thing.real"),
    (lambda: ANY.whole.startswith("1"), "Thing.whole is int | None; startswith needs a text"),
    (lambda: ANY.whole.endswith("1"), "Thing.whole is int | None; endswith needs a text"),
    (lambda: ANY.whole.contains("1"), "Thing.whole is int | None; contains needs a text or a list"),
    (lambda: ANY.text.startswith(1), "Thing.text.startswith() takes a str, not int"),
    (lambda: ANY.text.contains(b"1"), "Thing.text.contains() takes a str, not bytes"),
    (lambda: ANY.tags.contains(1), "an element of Thing.tags is str; it cannot be compared"),
    (lambda: ANY.tags.contains(None), "NULL equals nothing"),
    (lambda: ANY.text.is_true(), "Thing.text is str | None, not bool"),
    (lambda: ANY.profile[0], "use any_path(...) or contains(...)"),
    (lambda: ANY.profile.path(3), "a path is a str such as 'address.city', not int"),
    (lambda: ANY.profile.path("a", list), "the type of a path is str, int, float or bool"),
    (lambda: ANY.node.path("n", str), "Thing.node['n'] is int | None, which is never str"),
    (lambda: (ANY.whole > 1) and (ANY.whole < 3), "combine conditions with & | ~"),
    (lambda: not (ANY.whole > 1), "combine conditions with & | ~"),
    (lambda: 1 < ANY.whole < 3, "(1 < x) & (x < 5)"),
    (lambda: (ANY.whole > 1) & True, "put each comparison in parentheses"),
    (lambda: (ANY.whole > 1) | "x", "put each comparison in parentheses"),
    (lambda: ANY.flag & (ANY.whole > 1), "write Thing.flag.is_true() or compare it"),
    (lambda: (ANY.whole > 1) | ANY.flag, "Thing.flag is not a condition"),
    (lambda: ANY.whole > 1 & ANY.flag, "put each comparison in parentheses"),
    (lambda: ~ANY.flag, "write Thing.flag.is_true() or compare it"),
    (lambda: "x" in ANY.tags, "use any_path(...) or contains(...)"),
    (lambda: left(ANY).text, "takes a relation class; Thing is an entity"),
]


@pytest.mark.parametrize(("make", "message"), WRONG_TYPES)
def test_wrong_types_are_refused_when_built(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        make()


BAD_VALUES = [
    (lambda: ANY.whole == 2**63, "Thing.whole: 9223372036854775808 is beyond 64 bits (int64)"),
    (lambda: ANY.real > float("nan"), "Thing.real: nan is not finite"),
    (lambda: ANY.real < float("inf"), "Thing.real: inf is not finite"),
    (lambda: ANY.text == "\ud800", "contains a lone surrogate"),
    (
        lambda: ANY.moment > datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))),
        "lies outside years 1 to 9999 in UTC",
    ),
    (lambda: ANY.profile.path(""), "bad path ''"),
    (lambda: ANY.profile.path("a..b"), "bad path 'a..b'"),
    (lambda: ANY.profile.path(".a"), "bad path '.a'"),
    (lambda: ANY.profile.path("a[0]"), "bad path 'a[0]'"),
    (lambda: ANY.profile.path("a b"), "bad path 'a b'"),
    (lambda: ANY.profile.path("$.a"), "bad path '$.a'"),
    (lambda: ANY.profile.path("a'"), "bad path"),
    (lambda: ANY.profile.path('a"'), "cannot be searched by"),
    (lambda: ANY.profile['a"b'], "cannot be searched by"),
    (lambda: ANY.profile["a\\b"], "cannot be searched by"),
    (lambda: ANY.profile["a\nb"], "cannot be searched by"),
    (lambda: ANY.profile["*"], "cannot be searched by"),
    (lambda: ANY.profile[""], "a key is empty"),
    (lambda: ANY.events.any_path(""), "bad path ''"),
    (lambda: ANY.events["k"], "a list has no keys; use any_path('k')"),
    (lambda: ANY.events.any_path("k")["x"], "is the end of a path"),
    (lambda: ANY.text["x"], "Thing.text is str | None, which has no keys"),
    (lambda: ANY.text.any_path("x"), "Thing.text is str | None, not a list"),
    (lambda: ANY.node["nn"], "unknown key 'nn', did you mean 'n'?"),
    (lambda: ANY.node["next"]["nxet"], "unknown key 'nxet', did you mean 'next'?"),
    (lambda: left(Link).events.any_path("k"), "any_path is not available on endpoints"),
]


@pytest.mark.parametrize(("make", "message"), BAD_VALUES)
def test_bad_values_and_paths_are_refused_when_built(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_unknown_fields_of_endpoints_name_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"left\(Link\) is a Thing: .* did you mean 'text'"):
        left(Link).txet  # type: ignore[attr-defined]  # noqa: B018
    assert LINK.left == "Thing"
