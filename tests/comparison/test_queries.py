"""Queries have the same answers on every storage as in plain Python: rows, order, aggregates and
paths, at all times, whatever happened to the indices."""

from __future__ import annotations

from hypothesis import given

from tests.comparison.questions import aggregations, paths, rows
from tests.comparison.scenarios import Scenario, examples, scenarios


@examples(30)
@given(scenarios(rows, asked=14))
def test_rows_are_the_same_everywhere(scenario: Scenario) -> None:
    scenario.run()


@examples(24)
@given(scenarios(aggregations))
def test_aggregates_are_the_same_everywhere(scenario: Scenario) -> None:
    scenario.run()


@examples(18)
@given(scenarios(paths, asked=4, relations=1))
def test_paths_are_the_same_everywhere(scenario: Scenario) -> None:
    scenario.run()
