"""Every engine and shape keeps the rows that the evaluator keeps."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from storage_engine.model.expressions import Filter
from tests.campaigns import examples
from tests.query.worlds import ENGINES, FILTERS, Thing, World, objects


@settings(deadline=None, max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(objects(), FILTERS)
def test_filters_keep_the_same_rows_everywhere(things: list[Thing], expression: Filter) -> None:
    world = World(things)
    try:
        expected = world.expected(expression)
        opposite = world.expected(~expression)
        for engine, shape in ENGINES:
            assert world.where(engine, shape, expression) == expected, (engine, shape)
            assert world.where(engine, shape, ~expression) == opposite, (engine, shape)
    finally:
        world.close()
