"""Endpoint conditions: the same in SQL and in Python, for one version and for several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage_engine.model.expressions import Filter
from storage_engine.query import left, right
from storage_engine.query.conditions import Conditions, Endpoint, normalise
from storage_engine.query.dialects import Binder, DuckDb, Sqlite
from storage_engine.testing.evaluator import matches
from tests.campaigns import examples
from tests.query.worlds import ENGINES, LINK, Link, Thing, World

LEAVES: list[Callable[[], Filter]] = [
    lambda: Link.weight > 1,
    lambda: Link.weight.is_null(),
    lambda: left(Link).text == "a",
    lambda: left(Link).whole > 1,
    lambda: left(Link).whole.is_null(),
    lambda: left(Link).profile["k"] == 1,
    lambda: right(Link).text != "a",
    lambda: right(Link).id == "t1",
]
FILTERS = st.recursive(
    st.sampled_from(LEAVES).map(lambda make: make()),
    lambda inner: (
        st.builds(lambda a, b: a & b, inner, inner)
        | st.builds(lambda a, b: a | b, inner, inner)
        | st.builds(lambda a: ~a, inner)
    ),
    max_leaves=5,
)
KEYS = st.sampled_from(["t0", "t1", "t2"])
THINGS = st.lists(
    st.builds(
        Thing,
        id=KEYS,
        text=st.sampled_from([None, "a", "b"]),
        whole=st.sampled_from([None, 1, 2]),
        profile=st.sampled_from([None, {"k": 1}, {"k": "1"}]),
    ),
    max_size=5,
)
LINKS = st.lists(
    st.builds(
        lambda pair, weight: Link(left_key=pair[0], right_key=pair[1], weight=weight),
        st.tuples(KEYS, KEYS),
        st.sampled_from([None, 1, 2]),
    ),
    max_size=5,
    unique_by=lambda link: (link.left_key, link.right_key),
)


@settings(deadline=None, max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(THINGS, LINKS, FILTERS, st.booleans())
def test_endpoint_conditions_are_the_same_everywhere(
    things: list[Thing], links: list[Link], expression: Filter, history: bool
) -> None:
    if not history:  # one version each
        things = list({thing.id: thing for thing in things}.values())
    expected = sorted(
        (link.left_key, link.right_key)
        for link in links
        if matches(
            expression,
            link,
            left=[thing for thing in things if thing.id == link.left_key],
            right=[thing for thing in things if thing.id == link.right_key],
        )
    )
    world, entities = World(links, LINK), World(things)
    try:
        for shape in ("columns", "payload"):
            table = entities.duck.table(f"rows_{shape}").to_arrow_table()
            world.duck.register(f"things_{shape}", table)
            columns = ", ".join(
                row[1] for row in entities.lite.execute(f"PRAGMA table_info(rows_{shape})")
            )
            world.lite.execute(f"CREATE TABLE things_{shape} ({columns})")
            for row in entities.lite.execute(f"SELECT * FROM rows_{shape}"):
                marks = ", ".join("?" * len(row))
                world.lite.execute(f"INSERT INTO things_{shape} VALUES ({marks})", row)
        for engine, shape in ENGINES:
            binder = Binder()
            made = Conditions(
                DuckDb(binder) if engine == "duckdb" else Sqlite(binder),
                shape,
                endpoints={"left": f"things_{shape}", "right": f"things_{shape}"},
            ).condition(expression)
            sql = f"SELECT left_key, right_key FROM rows_{shape} AS q WHERE {made}"
            found = world.run(engine, shape, sql, binder.used(sql))
            assert sorted(found) == expected, (engine, shape)
    finally:
        world.close()
        entities.close()


def test_conditions_on_one_endpoint_are_asked_together() -> None:
    text, whole = left(Link).text == "a", left(Link).whole > 1
    own, other = Link.weight > 1, right(Link).text == "b"
    assert normalise(text & own & whole) == Endpoint("left", text & whole) & own
    assert normalise(~(text | other)) == Endpoint("left", ~text) & Endpoint("right", ~other)
    assert normalise(~own) == ~own


@pytest.mark.parametrize("negated", [False, True])
def test_a_relation_without_its_entity_meets_no_condition_on_it(negated: bool) -> None:
    link = Link(left_key="a", right_key="b")
    made: Any = left(Link).text.is_null()
    assert not matches(~made if negated else made, link)
