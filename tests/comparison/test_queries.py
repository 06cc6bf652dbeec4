"""Queries have the same answers on every storage as in plain Python: rows, order, aggregates and
paths, at all times, whatever happened to the indices."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.comparison.questions import aggregations, narrow, paths, rows
from tests.comparison.scenarios import Scenario, examples, scenarios
from tests.comparison.storages import OBJECT_STORES
from tests.comparison.values import TYPED

pytestmark = pytest.mark.timeout(600)  # many scenarios each, on five storages


@examples(6)
@given(scenarios(rows, asked=14))
def test_rows_are_the_same_everywhere(scenario: Scenario) -> None:
    scenario.run()


@examples(5)
@given(scenarios(narrow, asked=30, kinds=TYPED, layouts=OBJECT_STORES))
def test_no_file_is_left_out_that_has_an_answer(scenario: Scenario) -> None:
    scenario.run()


@examples(6)
@given(scenarios(aggregations))
def test_aggregates_are_the_same_everywhere(scenario: Scenario) -> None:
    scenario.run()


@examples(5)
@given(scenarios(paths, asked=4, relations=1))
def test_paths_are_the_same_everywhere(scenario: Scenario) -> None:
    scenario.run()
