"""Kinds of fields with values for them, and odd keys.

Values come from few alternatives, so that rows share them: ties, groups and filters that hit are
what a comparison learns from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID

from hypothesis import strategies as st

from storage_engine.model import FieldRef
from storage_engine.model.decimals import Precision
from tests.query.worlds import (
    CLOCKS,
    COLOURS,
    DAYS,
    DECIMALS,
    FLOATS,
    HUGE,
    INTS,
    LEVELS,
    MOMENTS,
    MONEY,
    NASTY,
    RAWS,
    REFS,
    TEXTS,
    Colour,
    Level,
)

Ref = FieldRef[Any]
Values = st.SearchStrategy[Any]

LONG = "k" * 64  # as many characters as statistics keep of a text
_ODD_KEYS = st.sampled_from(
    [
        *filter(None, NASTY), " ", "%", "%%", "'", "''", "10", "9", "Z", "e\u0301", "\U0010ffff",
        LONG, f"{LONG}\U0001f600", "a/b", "..", "a,b",
    ]
) | st.text(min_size=1, max_size=3)  # fmt: skip
_LONG_KEYS = st.sampled_from([f"{LONG}a", f"{LONG}b", f"{LONG[1:]}z", "\U0010ffff" * 65])
KEYS = _ODD_KEYS | _LONG_KEYS
LONG_TEXTS = st.sampled_from([f"{LONG}a", f"{LONG}b", LONG, "\U0010ffff" * 66])


class Inner(TypedDict):
    n: NotRequired[int | None]
    at: NotRequired[datetime]
    raw: NotRequired[bytes]
    next: NotRequired[Inner]


class Part(TypedDict):
    price: NotRequired[Annotated[Decimal, Precision(9, 2)]]
    colour: NotRequired[Colour]
    kind: str
    n: NotRequired[int | float]
    day: NotRequired[date]


@dataclass(frozen=True, eq=False)
class Pool:
    """Numbers and texts to draw from. `exact`: sums are the same in any order of adding."""

    exact: bool
    texts: Values
    ints: Values
    floats: Values

    @cached_property
    def numbers(self) -> Values:
        return self.ints | self.floats

    @cached_property
    def scalars(self) -> Values:
        return st.none() | _ALIKE | self.numbers | self.texts

    @cached_property
    def anything(self) -> Values:
        return st.recursive(
            self.scalars,
            lambda inner: st.lists(inner, max_size=2) | self.dictionaries(inner),
            max_leaves=3,
        )

    def dictionaries(self, values: Values) -> Values:
        return st.dictionaries(_JSON_KEYS, values, max_size=3)

    @cached_property
    def inner(self) -> Values:
        optional = {"n": st.none() | self.ints, "at": MOMENTS, "raw": RAWS}
        flat = st.fixed_dictionaries({}, optional=optional)
        return st.fixed_dictionaries({}, optional={**optional, "next": flat})

    @cached_property
    def parts(self) -> Values:
        return st.fixed_dictionaries(
            {"kind": self.texts},
            optional={"n": self.numbers, "day": DAYS, "price": MONEY, "colour": COLOURS},
        )


_ALIKE = st.sampled_from([0, 0.0, False, 1, 1.0, True])  # equal in Python, not in JSON
_JSON_KEYS = st.sampled_from(["a", "b", "k", "two words", "a.b", "0", "é", "#", "$"])
WILD = Pool(False, TEXTS | LONG_TEXTS, INTS, FLOATS)
EXACT = Pool(
    True,
    st.sampled_from(["", "a", "b", "a\x00b", "é", LONG, f"{LONG}a"]),
    st.integers(-3, 3) | st.sampled_from([1000, -1000]),
    st.integers(-12, 12).map(lambda n: n / 4) | st.just(-0.0),
)

Place = Callable[[Ref], Ref]


@dataclass(frozen=True)
class Kind:
    """A declared type: values for it, and places in it to ask about beside the field itself."""

    annotation: Any
    values: Callable[[Pool], Values]
    places: tuple[Place, ...] = ()
    _made: dict[Pool, Values] = field(default_factory=dict, compare=False)

    def of(self, pool: Pool) -> Values:
        """Made once: making strategies takes longer than drawing from them."""
        if pool not in self._made:
            self._made[pool] = self.values(pool)
        return self._made[pool]

    def __repr__(self) -> str:
        return str(self.annotation)


def _optional(kind: Kind) -> Kind:
    return Kind(kind.annotation | None, lambda p: st.none() | kind.values(p), kind.places)


_IN_ANY: tuple[Place, ...] = (
    lambda f: f["a"],
    lambda f: f.path("a.b"),
    lambda f: f["two words"],
    lambda f: f["a.b"],
    lambda f: f.path("k", str),
    lambda f: f.path("k", int),
    lambda f: f.path("k", float),
    lambda f: f.path("k", bool),
    lambda f: f["a"].any_path("k"),
)
_IN_INNER: tuple[Place, ...] = (
    lambda f: f["n"],
    lambda f: f["at"],
    lambda f: f["raw"],
    lambda f: f.path("next.n"),
    lambda f: f["next"]["at"],
)
_SCALARS = [
    Kind(str, lambda p: p.texts),
    Kind(int, lambda p: p.ints),
    Kind(float, lambda p: p.floats),
    Kind(bool, lambda _: st.booleans()),
    Kind(datetime, lambda _: MOMENTS),
    Kind(date, lambda _: DAYS),
    Kind(bytes, lambda _: RAWS),
    Kind(Annotated[Decimal, Precision(9, 2)], lambda _: MONEY),
    Kind(Annotated[Decimal, Precision(38, 9)], lambda _: HUGE),
    Kind(time, lambda _: CLOCKS),
    Kind(Colour, lambda _: COLOURS),
    Kind(Level, lambda _: LEVELS),
    Kind(Literal["a", "b"], lambda _: st.sampled_from(["a", "b"])),
    Kind(UUID, lambda _: REFS),
]
_NESTED = [
    Kind(int | str, lambda p: p.ints | p.texts),
    Kind(int | float, lambda p: p.numbers),
    Kind(str | list[str], lambda p: p.texts | st.lists(p.texts, max_size=2)),
    Kind(
        dict[str, Any],
        lambda p: p.dictionaries(p.anything),
        (*_IN_ANY, lambda f: f["k"].any_path("a")),
    ),
    Kind(dict[str, int], lambda p: p.dictionaries(p.ints), (lambda f: f["a"], lambda f: f["é"])),
    Kind(Inner, lambda p: p.inner, _IN_INNER),
    Kind(list[str], lambda p: st.lists(p.texts, max_size=3)),
    Kind(list[date], lambda _: st.lists(DAYS, max_size=2)),
    Kind(list[int | None], lambda p: st.lists(st.none() | p.ints, max_size=3)),
    Kind(
        list[dict[str, Any]],
        lambda p: st.lists(p.dictionaries(p.anything), max_size=2),
        (lambda f: f.any_path("k"), lambda f: f.any_path("a.b")),
    ),
    Kind(
        list[Part],
        lambda p: st.lists(p.parts, max_size=2),
        (
            lambda f: f.any_path("kind"),
            lambda f: f.any_path("n"),
            lambda f: f.any_path("day"),
            lambda f: f.any_path("price"),
            lambda f: f.any_path("colour"),
        ),
    ),
]
_OPTIONAL = [_optional(kind) for kind in [*_SCALARS, *_NESTED] if kind.annotation is not Inner]
TYPED: list[Kind] = [*_SCALARS, *(_optional(kind) for kind in _SCALARS)]  # a column of their own
KINDS: list[Kind] = [
    *TYPED,
    *_SCALARS,
    *_NESTED,
    *_OPTIONAL,
    Kind(Inner | None, lambda p: st.none() | p.inner, _IN_INNER),
    Kind(Any, lambda p: p.anything, _IN_ANY),
    Kind(list[Any], lambda p: st.lists(p.anything, max_size=2), (lambda f: f.any_path("a"),)),
]

LITERALS: dict[str, Callable[[Pool], Values]] = {
    "str": lambda p: p.texts,
    "int": lambda p: p.numbers,
    "float": lambda p: p.numbers,
    "datetime": lambda _: MOMENTS,
    "date": lambda _: DAYS,
    "bytes": lambda _: RAWS,
    "decimal": lambda _: DECIMALS,
    "time": lambda _: CLOCKS,
}
