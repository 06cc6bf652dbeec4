"""Types that change again and again say the same on every storage as in plain Python, in every mode
of reading, whatever happens to files and indices in between."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests import campaigns
from tests.comparison.evolution import Evolution, evolutions
from tests.comparison.scenarios import examples

pytestmark = pytest.mark.timeout(600)


@examples(campaigns.examples(2))
@given(evolutions())
def test_random_schema_histories_are_the_same_everywhere(evolution: Evolution) -> None:
    evolution.run()
