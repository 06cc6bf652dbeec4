"""Random histories, copied in the middle and at the end into a storage of another engine, answer
there as they do in plain Python, whatever happened to the source's indices and files."""

from __future__ import annotations

import pytest
from hypothesis import given

from storage_engine.transfer import copy_repository
from tests.comparison.model import Model
from tests.comparison.pasts import questions
from tests.comparison.scenarios import Scenario, examples, play, scenarios
from tests.comparison.storages import DISTURBANCES, Storage, opened

pytestmark = pytest.mark.timeout(600)

# Each engine as a source and as a target; memory is one place for all, so it is a source only.
_SOURCES = (("sqlite-v1", "sqlite-v2", "directory-v1", "memory-v2"),)
_TARGETS = ("directory-v2", "directory-v1", "sqlite-v2", "sqlite-v1")


@examples(4)
@given(scenarios(questions, asked=6, layouts=_SOURCES))
def test_a_copy_answers_as_the_source(scenario: Scenario) -> None:
    model = Model()
    settings = {"checkpoint_interval": scenario.checkpoint_interval, "cached": scenario.cached}
    with opened(scenario.layout, **settings) as sources, opened(_TARGETS, **settings) as targets:  # type: ignore[arg-type]
        for number, step in enumerate(scenario.steps):
            things = [thing for stated in step.stated for thing in stated.things]
            model.commit(things, event=step.event)
            for source, target in zip(sources, targets, strict=True):
                source.commit(step.stated, event=step.event, pause=step.pause)
                for name, choice in step.disturbances:
                    DISTURBANCES[name](source, choice)
                if number % 2 == 0 or step is scenario.steps[-1]:
                    _copy(source, target)
        for source, target in zip(sources, targets, strict=True):
            target.created_at = source.created_at
            target.views = {n: target.session.at(n) for n in source.views}
            for step in scenario.steps:
                play(step.questions, target, model)


def _copy(source: Storage, target: Storage) -> None:
    report = copy_repository(source.session.repository, target.session.repository)
    assert report.comparison is not None
    assert report.comparison.differences == ()
