"""What random runs have found, as small as it gets; on every storage, against the model."""

from __future__ import annotations

from typing import Any

import pytest

from storage_engine.model import Entity, Field, Relation
from storage_engine.query import count, left, max
from tests.comparison.model import Model
from tests.comparison.pasts import Diff, Feed
from tests.comparison.questions import Aggregates, Rows, Time
from tests.comparison.scenarios import Question, play
from tests.comparison.schemas import Type
from tests.comparison.storages import LAYOUTS, Stated, opened


class Thing(Entity):
    id: Field[str] = Field(primary_key=True)
    text: Field[str | None] = Field(default=None)
    anything: Field[Any] = Field(default=None)
    counts: Field[dict[str, int] | None] = Field(default=None)


class Link(Relation[Thing, Thing]):
    weight: Field[int] = Field(default=1)


THING, LINK = Type(Thing, {}), Type(Link, {})


def run(*steps: tuple[list[Any], list[Question]]) -> None:
    """Commits, each with questions to ask after it."""
    for layout in LAYOUTS:
        model = Model()
        with opened(layout, checkpoint_interval=100, cached=False) as storages:
            for things, questions in steps:
                stated = tuple(Stated(type(thing), (thing,)) for thing in things)
                expected = model.commit(things)
                for storage in storages:
                    assert storage.commit(stated, event=False, pause=1) == expected
                    play(questions, storage, model)


def test_groups_are_kept_by_how_often_a_nested_field_has_a_value() -> None:
    things = [Thing(id="a", counts={}), Thing(id="b"), Thing(id="c", text="x")]
    having = count(Thing.counts) > 0
    run((things, [Aggregates(THING, None, (Thing.text,), (count(),), having, Time())]))


@pytest.mark.parametrize("values", [(1, True), (1, 1.0), (0.0, False), ([1], [True])])
def test_a_change_between_values_that_python_takes_for_equal_is_a_difference(
    values: tuple[Any, Any],
) -> None:
    before, after = Time("as_of", 1), Time("as_of", 2)
    run(
        ([Thing(id="a", anything=values[0])], []),
        ([Thing(id="a", anything=values[1])], [Diff(before, after)]),
    )


def test_an_answer_says_of_every_type_that_it_was_not_there_yet() -> None:
    link = Link(left_key="a", right_key="a")
    asked = left(Link).text.is_null()
    run(
        ([link], []),
        ([Thing(id="a")], [Rows(LINK, asked, (), None, 0, Time("as_of", 1), "collect")]),
    )
    run(
        ([Thing(id="a")], []),
        ([link], [Rows(THING, None, (), None, 0, Time("as_of", 1), "collect", (LINK,), (False,))]),
    )


def test_a_page_that_begins_within_a_commit_knows_the_rows_before_it() -> None:
    run(
        ([Thing(id="a"), Thing(id="b")], []),
        ([Thing(id="a", text="x"), Thing(id="c")], [Feed(0, (1, 1000)), Feed(0, (1, 2, 1000))]),
    )


def test_the_greatest_of_nothing_keeps_no_group() -> None:
    having = ~(max(Thing.counts["k"]) > 0)
    run(([Thing(id="a")], [Aggregates(THING, None, (Thing.id,), (count(),), having, Time())]))
