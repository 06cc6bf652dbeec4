"""Random histories on random schemas, with questions after each commit, on every storage.

The run is the same each time, and shows a failure as it finds it: to make one smaller takes
minutes. ONTOLOGIA_COMPARISON_EXAMPLES=2000 makes it a search: so many examples a test, other ones
each time, and failures made small (add --timeout=0).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from storage_engine.model import Entity
from tests.comparison.model import Model
from tests.comparison.questions import Asking
from tests.comparison.schemas import Schema, Type, schemas
from tests.comparison.storages import DISTURBANCES, LAYOUTS, Stated, Storage, opened
from tests.comparison.values import KEYS, KINDS, Kind

_ASKED_FOR = int(os.environ.get("ONTOLOGIA_COMPARISON_EXAMPLES", "0"))


def examples(count: int) -> settings:
    """Settings of a test that has `count` examples by default."""
    return settings(
        max_examples=_ASKED_FOR or count,
        derandomize=not _ASKED_FOR,
        phases=[Phase.generate, *([Phase.shrink] if _ASKED_FOR else [])],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


class Question(Protocol):
    def check(self, model: Model, storage: Storage) -> None:
        """Ask it, and raise AssertionError if the model answers otherwise."""


@dataclass(frozen=True)
class Step:
    """One commit, what happens to the storages then, and what they are asked."""

    stated: tuple[Stated, ...]
    event: bool
    pause: int  # seconds, on storages with a clock of their own
    disturbances: tuple[tuple[str, int], ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Scenario:
    schema: Schema
    layout: tuple[str, ...]
    checkpoint_interval: int
    cached: bool
    steps: tuple[Step, ...]

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        """How Hypothesis shows it: as a script, not as a tree."""
        said = [f"{self.layout}, {self.checkpoint_interval=}, {self.cached=}"]
        said += [f"type {one!r}" for one in self.schema.types]
        for step in self.steps:
            said.append(f"commit {step.event=} {step.pause=}")
            said += [
                f"  {'ingest' if stated.bulk else 'ensure'} {thing!r}"
                for stated in step.stated
                for thing in stated.things
            ]
            said += [f"  {name} {choice}" for name, choice in step.disturbances]
            said += [f"  ask {question!r}" for question in step.questions]
        printer.text("\n".join(["", *said]))

    def run(self) -> None:
        model = Model()
        with opened(
            self.layout, checkpoint_interval=self.checkpoint_interval, cached=self.cached
        ) as storages:
            for step in self.steps:
                things = [thing for stated in step.stated for thing in stated.things]
                expected = model.commit(things, event=step.event)
                for storage in storages:
                    with _noting(storage, model, step.stated):
                        found = storage.commit(step.stated, event=step.event, pause=step.pause)
                        assert found == expected, f"commit {found}, not {expected}"
                    for name, choice in step.disturbances:
                        with _noting(storage, model, name):
                            DISTURBANCES[name](storage, choice)
                    play(step.questions, storage, model)


def play(questions: Sequence[Question], storage: Storage, model: Model) -> None:
    for question in questions:
        with _noting(storage, model, question):
            question.check(model, storage)


@contextmanager
def _noting(storage: Storage, model: Model, doing: object) -> Iterator[None]:
    """Where something went wrong goes with the error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"on {storage.name}, head {model.head}, at {doing!r}")
        raise


def scenarios(
    questions: Callable[[Asking], st.SearchStrategy[Question]],
    *,
    asked: int = 8,
    relations: int = 0,
    kinds: Sequence[Kind] = KINDS,
    layouts: Sequence[tuple[str, ...]] = LAYOUTS,
) -> st.SearchStrategy[Scenario]:
    """`asked`: so many questions at most after a commit. `relations`: at least so many types.
    `kinds`: of fields."""
    return _scenarios(questions, asked, schemas(relations=relations, kinds=kinds), layouts)


@st.composite
def _scenarios(
    draw: st.DrawFn,
    questions: Callable[[Asking], st.SearchStrategy[Question]],
    asked: int,
    schema_strategy: st.SearchStrategy[Schema],
    layouts: Sequence[tuple[str, ...]],
) -> Scenario:
    schema = draw(schema_strategy)
    keys = draw(st.lists(KEYS, min_size=3, max_size=7, unique=True))
    things = [thing for one in schema.types for thing in _things(draw, schema, one, keys)]
    count = draw(st.integers(1, 4))
    ask = questions(Asking(schema, things, count))
    steps = []
    for _ in range(count):
        steps.append(
            Step(
                _stated(draw, things),
                draw(st.integers(0, 5)) == 5,
                draw(st.sampled_from([0, 1, 60])),
                tuple(draw(st.lists(_DISTURBED, max_size=2))),
                tuple(draw(st.lists(ask, min_size=asked // 2, max_size=asked))),
            )
        )
    return Scenario(
        schema,
        draw(st.sampled_from(layouts)),
        draw(st.sampled_from([2, 100])),
        draw(st.booleans()),
        tuple(steps),
    )


_DISTURBED = st.tuples(st.sampled_from(sorted(DISTURBANCES)), st.integers(0, 11))


def _things(draw: st.DrawFn, schema: Schema, one: Type, keys: Sequence[str]) -> list[Any]:
    """Some objects; several of them differ from another one in a single field."""
    made = [_thing(draw, schema, one, keys) for _ in range(draw(st.integers(3, 7)))]
    if one.kinds:
        for _ in range(draw(st.integers(0, 3))):
            name = draw(st.sampled_from(sorted(one.kinds)))
            value = draw(one.kinds[name].of(schema.pool))
            made.append(draw(st.sampled_from(made)).replace(**{name: value}))
    return made


def _thing(draw: st.DrawFn, schema: Schema, one: Type, keys: Sequence[str]) -> Any:
    spec, key = one.spec, st.sampled_from(keys)
    names = [spec.primary_key] if issubclass(one.cls, Entity) else ["left_key", "right_key"]
    names += [spec.instance_key] if spec.instance_key else []
    values = {str(name): draw(key) for name in names}
    values |= {name: draw(kind.of(schema.pool)) for name, kind in one.kinds.items()}
    return one.cls(**values)


def _stated(draw: st.DrawFn, things: Sequence[Any]) -> tuple[Stated, ...]:
    """All objects, or some again and again: commits repeat and undo each other."""
    some = st.lists(st.sampled_from(things), min_size=1, max_size=12)
    chosen = draw(st.permutations(things) if draw(st.integers(0, 3)) == 0 else some)
    by_class: dict[Any, list[Any]] = {}
    for thing in chosen:
        by_class.setdefault(type(thing), []).append(thing)
    return tuple(
        Stated(cls, tuple(found), draw(st.integers(0, 2)) == 2) for cls, found in by_class.items()
    )
