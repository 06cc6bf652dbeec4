"""Windows, differences, the change feed and SQL say the same on every storage as in plain Python,
whatever happened to the indices."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.comparison.pasts import questions
from tests.comparison.scenarios import Scenario, examples, scenarios

pytestmark = pytest.mark.timeout(600)  # many scenarios each, on five storages


@examples(5)
@given(scenarios(questions, asked=6))
def test_the_past_is_the_same_everywhere(scenario: Scenario) -> None:
    scenario.run()
