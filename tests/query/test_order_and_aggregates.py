"""Order, paging, aggregates and groups come out the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage_engine.model import FieldRef
from storage_engine.model.arrow import ARROW_TYPES
from storage_engine.model.expressions import Filter
from storage_engine.query.aggregates import Aggregate, avg, avg_len, count, max, min, sum
from storage_engine.query.compiler import Compiler
from storage_engine.query.conditions import Shape
from storage_engine.query.spec import Order, QuerySpec
from storage_engine.repository.sqlite.data_table import from_values
from storage_engine.testing.evaluator import aggregate, matches, ordered, value_at
from tests.campaigns import examples
from tests.query.worlds import ENGINES, FILTERS, THING, Thing, World, objects

SORTABLE: list[Callable[[], FieldRef[Any]]] = [
    lambda: Thing.id,
    lambda: Thing.text,
    lambda: Thing.whole,
    lambda: Thing.real,
    lambda: Thing.flag,
    lambda: Thing.moment,
    lambda: Thing.day,
    lambda: Thing.raw,
    lambda: Thing.profile.path("k", str),
    lambda: Thing.profile.path("k", int),
    lambda: Thing.profile.path("k", float),
    lambda: Thing.profile.path("a", bool),
    lambda: Thing.node["n"],
    lambda: Thing.node["at"],
    lambda: Thing.node["raw"],
]
KEYS = st.lists(st.tuples(st.sampled_from(SORTABLE), st.booleans()), max_size=3)
SETTINGS = settings(
    deadline=None, max_examples=examples(60), suppress_health_check=list(HealthCheck)
)


@SETTINGS
@given(objects(), FILTERS, KEYS, st.none() | st.integers(0, 4), st.integers(0, 3))
def test_rows_come_in_the_same_order_everywhere(
    things: list[Thing],
    expression: Filter,
    keys: list[tuple[Callable[[], FieldRef[Any]], bool]],
    limit: int | None,
    offset: int,
) -> None:
    order = [(make().operand, descending) for make, descending in keys]
    spec = QuerySpec(
        THING, expression, tuple(Order(*key) for key in order), limit=limit, offset=offset
    )
    kept = [thing for thing in things if matches(expression, thing)]
    expected = [thing.id for thing in ordered(kept, order, lambda thing: thing.id)]
    expected = expected[offset:][: len(things) if limit is None else limit]
    world = World(things)
    try:
        for engine, shape in ENGINES:
            made = Compiler(engine, shape).select(spec, f"rows_{shape}", ["entity_key"])
            found = world.run(engine, shape, made.sql, made.parameters)
            assert [row[0] for row in found] == expected, (engine, shape)
    finally:
        world.close()


SMALL = st.integers(-1000, 1000)
HALVES = st.sampled_from([0.0, -0.0, 0.5, -1.25, 3.0])  # sums of these are exact


@st.composite
def countable(draw: st.DrawFn) -> list[Thing]:
    """Objects whose numbers can be added in any order with the same result."""
    made = draw(objects(max_size=10))
    return [
        thing.replace(
            whole=draw(st.none() | SMALL),
            real=draw(st.none() | HALVES),
            number=draw(st.none() | SMALL | HALVES),
            text=draw(st.none() | st.sampled_from(["a", "b", "a\x00b", ""])),
            profile=draw(
                st.none()
                | st.dictionaries(
                    st.just("k"), st.none() | SMALL | st.sampled_from(["x", 0.5, True, [1]])
                )
            ),
        )
        for thing in made
    ]


AGGREGATES: list[Callable[[], Aggregate]] = [
    lambda: count(),
    lambda: count(Thing.text),
    lambda: count(Thing.profile["k"]),
    lambda: count(Thing.profile.path("k", int)),
    lambda: sum(Thing.whole),
    lambda: sum(Thing.real),
    lambda: sum(Thing.number),
    lambda: sum(Thing.profile.path("k", int)),
    lambda: sum(Thing.profile.path("k", float)),
    lambda: avg(Thing.whole),
    lambda: avg(Thing.number),
    lambda: min(Thing.text),
    lambda: max(Thing.text),
    lambda: min(Thing.moment),
    lambda: max(Thing.node["at"]),
    lambda: max(Thing.day),
    lambda: min(Thing.raw),
    lambda: max(Thing.node["raw"]),
    lambda: min(Thing.number),
    lambda: min(Thing.profile.path("k", str)),
    lambda: avg_len(Thing.tags),
    lambda: avg_len(Thing.either),
    lambda: avg_len(Thing.open),
]
GROUPS = SORTABLE[1:]


def answer(world: World, engine: Any, shape: Shape, spec: QuerySpec) -> list[tuple[Any, ...]]:
    """What an engine answers, as Python values."""
    made = Compiler(engine, shape).aggregate(spec, f"rows_{shape}")
    if engine == "duckdb":
        table = world.duck.execute(made.sql, dict(made.parameters)).to_arrow_table()
        for column, (_, kind) in zip(table.schema, made.columns, strict=True):
            assert column.type == ARROW_TYPES[kind], (column, kind)  # type: ignore[index]
        columns = [column.to_pylist() for column in table.columns]
    else:
        rows = world.lite.execute(made.sql, dict(made.parameters)).fetchall()
        columns = [
            from_values([row[n] for row in rows], kind, ARROW_TYPES[kind]).to_pylist()  # type: ignore[index]
            for n, (_, kind) in enumerate(made.columns)
        ]
    return list(zip(*columns, strict=True))


def computed(one: Aggregate, things: list[Thing]) -> Any:
    if one.operand is None:
        return len(things)
    values = [value_at(one.operand, thing) for thing in things]
    if one.kind == "float" and one.function not in ("avg_len", "count"):
        values = [None if v is None else float(v) for v in values]
    return aggregate(one.function, values)


@SETTINGS
@given(countable(), FILTERS, st.lists(st.sampled_from(AGGREGATES), min_size=1, max_size=4))
def test_aggregates_are_the_same_everywhere(
    things: list[Thing], expression: Filter, makes: list[Callable[[], Aggregate]]
) -> None:
    asked = [make() for make in makes]
    spec = QuerySpec(
        THING, expression, aggregates=tuple((f"a{n}", one) for n, one in enumerate(asked))
    )
    kept = [thing for thing in things if matches(expression, thing)]
    expected = [tuple(computed(one, kept) for one in asked)]
    world = World(things)
    try:
        for engine, shape in ENGINES:
            found = answer(world, engine, shape, spec)
            assert found == [
                tuple(pytest.approx(v) if isinstance(v, float) else v for v in row)
                for row in expected
            ], (engine, shape)
            assert [type(v) for v in found[0]] == [type(v) for v in expected[0]], (engine, shape)
    finally:
        world.close()


@SETTINGS
@given(
    countable(),
    st.lists(st.sampled_from(GROUPS), min_size=1, max_size=2, unique=True),
    st.sampled_from(AGGREGATES),
    st.integers(0, 3),
    SMALL,
)
def test_groups_are_the_same_everywhere(
    things: list[Thing],
    keys: list[Callable[[], FieldRef[Any]]],
    make: Callable[[], Aggregate],
    least: int,
    bound: int,
) -> None:
    one, places = make(), [key().operand for key in keys]
    having = (count() >= least) & ~(sum(Thing.whole) > bound)
    spec = QuerySpec(
        THING,
        groups=tuple((f"k{n}", place) for n, place in enumerate(places)),
        aggregates=(("n", count()), ("value", one)),
        having=having,
    )
    groups: dict[tuple[Any, ...], list[Thing]] = {}
    for thing in ordered(things, [(place, False) for place in places], lambda t: t.id):
        groups.setdefault(tuple(value_at(place, thing) for place in places), []).append(thing)
    expected = []
    for key, members in groups.items():
        total = computed(sum(Thing.whole), members)
        if len(members) >= least and total is not None and not total > bound:
            expected.append((*key, len(members), computed(one, members)))
    world = World(things)
    try:
        for engine, shape in ENGINES:
            assert answer(world, engine, shape, spec) == expected, (engine, shape)
    finally:
        world.close()
