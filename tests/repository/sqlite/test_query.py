"""Queries answer what the plain Python executor answers, in every temporal mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage_engine.model.expressions import Filter
from storage_engine.query import avg, avg_len, count, left, max, min, right, sum
from storage_engine.query.aggregates import Aggregate
from storage_engine.query.builder import Query
from storage_engine.query.spec import Order, QuerySpec, When
from storage_engine.repository.sqlite import MEMORY
from tests.query.worlds import LINK, THING, Link, Thing
from tests.repository.sqlite.query_world import (
    HEAD,
    PLACE,
    ROAD,
    STAY,
    Both,
    Place,
    Road,
    Stay,
    at,
    joined,
    load,
    rows,
)
from tests.repository.sqlite.support import open_at

WHENS = {
    "latest": When(),
    **{f"as_of_{n}": When(as_of=n) for n in (-1, 0, 1, 2, 3, HEAD, HEAD + 5)},
    "history": When(history=True),
    **{f"since_{n}": When(history=True, since=n) for n in (0, 1, 3, HEAD, 2**63 - 1)},
}
STATES = {name: when for name, when in WHENS.items() if not when.history}

FILTERS: dict[str, Callable[[], Filter]] = {
    "stale": lambda: Thing.text == "x",
    "not": lambda: ~(Thing.text == "y"),
    "whole": lambda: Thing.whole > 1,
    "null": lambda: Thing.whole.is_null(),
    "key": lambda: Thing.id == "b",
    "keys": lambda: Thing.id.in_(["a", "c", "zz"]),
    "prefix": lambda: Thing.id.startswith("b"),
    "key_and_value": lambda: (Thing.id <= "b") & (Thing.text == "y"),
    "path": lambda: Thing.profile["k"] == 1,
    "moment": lambda: Thing.node["at"].is_not_null() | (Thing.flag.is_true()),
    "default": lambda: Thing.named == "d",
    "list": lambda: Thing.tags.contains("t") | (Thing.events.any_path("k") == "x"),
    "mixed": lambda: Thing.mixed == 5,
}
LINK_FILTERS: dict[str, Callable[[], Filter]] = {
    "own": lambda: Link.weight > 1,
    "key": lambda: left(Link).id == "a",
    "left": lambda: left(Link).text == "x",
    "left_negated": lambda: ~(left(Link).text == "x"),
    "left_null": lambda: left(Link).whole.is_null(),
    "right_missing": lambda: right(Link).text.is_null(),
    "one_version": lambda: (left(Link).text == "y") & (left(Link).whole == 1),
    "both": lambda: (left(Link).whole > 1) & (right(Link).text != "x") & (Link.weight > 0),
    "either": lambda: (left(Link).text == "x") | (Link.weight == 7),
    "not_both": lambda: ~((left(Link).text == "x") & (right(Link).whole.is_not_null())),
}
PAGES: dict[str, dict[str, Any]] = {
    "all": {},
    "ordered": {"order": (Order(Thing.text.operand), Order(Thing.whole.operand, True))},
    "by_json": {"order": (Order(Thing.number.operand, True),)},
    "cut": {"limit": 2, "offset": 1},
    "ordered_cut": {"order": (Order(Thing.real.operand, True),), "limit": 2, "offset": 1},
    "offset": {"offset": 2},
    "none": {"limit": 0},
}


@pytest.fixture(scope="module", params=["v1", "v2", "v1 in memory", "v2 in memory"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    engine, *memory = request.param.split(" ", 1)
    path: str | Path = MEMORY if memory else tmp_path_factory.mktemp("query") / "onto.db"
    repository = open_at(path, engine)
    yield load(repository)
    repository.close()


def compare(world: Both, spec: QuerySpec, case: object = None) -> pa.Table:
    found, expected = rows(world.executor, spec), rows(world.model, spec)
    assert found.schema.equals(expected.schema)
    assert found.to_pylist() == expected.to_pylist(), case
    return found


@pytest.mark.parametrize("when", WHENS.values(), ids=WHENS)
def test_rows_are_the_same(world: Both, when: When) -> None:
    for spec in (THING, LINK, PLACE, STAY, ROAD):
        compare(world, QuerySpec(spec, when=when), spec.name)


@pytest.mark.parametrize("when", WHENS.values(), ids=WHENS)
def test_filtered_rows_are_the_same(world: Both, when: When) -> None:
    for case, make in FILTERS.items():
        for page in ("all", "ordered_cut"):
            compare(world, QuerySpec(THING, make(), when=when, **PAGES[page]), (case, page))


@pytest.mark.parametrize("when", WHENS.values(), ids=WHENS)
def test_pages_are_the_same(world: Both, when: When) -> None:
    for case, page in PAGES.items():
        compare(world, QuerySpec(THING, when=when, **page), case)


@pytest.mark.parametrize("when", WHENS.values(), ids=WHENS)
def test_endpoint_filters_keep_the_same_relations(world: Both, when: When) -> None:
    for case, make in LINK_FILTERS.items():
        compare(world, QuerySpec(LINK, make(), when=when), case)
    stays: dict[str, Filter] = {
        "left": left(Stay).text == "y",
        "right": right(Stay).size > 0,
        "both": (left(Stay).text == "y") & (right(Stay).size > 0) & (Stay.nights > 1),
    }
    for case, made in stays.items():
        compare(world, QuerySpec(STAY, made, when=when), case)


AGGREGATES: tuple[tuple[str, Aggregate], ...] = (
    ("n", count()),
    ("texts", count(Thing.text)),
    ("least", min(Thing.whole)),
    ("most", max(Thing.moment)),
    ("last", max(Thing.day)),
    ("raw", max(Thing.raw)),
    ("text", min(Thing.text)),
    ("total", sum(Thing.whole)),
    ("reals", sum(Thing.real)),
    ("mean", avg(Thing.real)),
    ("lengths", avg_len(Thing.tags)),
    ("inner", max(Thing.node["at"])),
)
GROUPS = {
    "none": (),
    "text": (("text", Thing.text.operand),),
    "two": (("named", Thing.named.operand), ("flag", Thing.flag.operand)),
    "json": (("k", Thing.profile.path("k", int).operand), ("moment", Thing.moment.operand)),
}


@pytest.mark.parametrize("when", WHENS.values(), ids=WHENS)
def test_aggregates_are_the_same(world: Both, when: When) -> None:
    for case, groups in GROUPS.items():
        for where in (None, Thing.text == "y", Thing.text == "nobody"):
            spec = QuerySpec(THING, where, when=when, groups=groups, aggregates=AGGREGATES)
            found, expected = world.executor.aggregate(spec), world.model.aggregate(spec)
            assert found.schema.equals(expected.schema)
            assert found.to_pylist() == expected.to_pylist(), (case, where)


def test_aggregates_see_endpoint_filters_and_having(world: Both) -> None:
    query = Query(world.executor)
    gold = query.relations(Link).where(left(Link).text == "y")
    assert gold.count() == 2
    assert gold.sum(Link.weight) == 6
    groups = query.entities(Thing).with_history().group_by(Thing.text).having(count() > 1)
    assert groups.agg(n=count()).to_pylist() == [{"text": "x", "n": 2}, {"text": "y", "n": 2}]


@pytest.mark.parametrize("when", STATES.values(), ids=STATES)
def test_paths_are_the_same(world: Both, when: When) -> None:
    cases = [
        QuerySpec(THING, via=(LINK,)),
        QuerySpec(THING, via=(LINK, LINK)),
        QuerySpec(THING, via=(LINK, LINK, LINK, LINK)),
        QuerySpec(THING, via=(STAY, ROAD)),
        QuerySpec(THING, via=(LINK, STAY, ROAD, ROAD)),
        QuerySpec(THING, Thing.text == "y", via=(LINK, STAY)),
        QuerySpec(THING, via=(LINK,), order=(Order(Thing.text.operand, True),), offset=1, limit=2),
        QuerySpec(PLACE, Place.size.is_not_null(), via=(ROAD,)),
        QuerySpec(THING, via=(LINK,), backwards=frozenset({0})),
        QuerySpec(THING, via=(LINK, LINK, LINK), backwards=frozenset({0, 2})),
        QuerySpec(PLACE, via=(STAY,), backwards=frozenset({0})),
        QuerySpec(PLACE, via=(ROAD, STAY, LINK, STAY), backwards=frozenset({0, 1})),
    ]
    for case in cases:
        spec = at(case, when)
        found, expected = world.executor.traverse(spec), world.model.traverse(spec)
        assert found.sources.schema.equals(expected.sources.schema)
        assert found.paths.schema.equals(expected.paths.schema)
        assert joined(found) == joined(expected), spec


def test_a_traversal_returns_the_rows_that_paths_use_and_no_others(world: Both) -> None:
    found = world.executor.traverse(QuerySpec(THING, via=(STAY, ROAD)))
    assert found.sources.column("entity_key").to_pylist() == ["a", "c"]
    assert found.relations[0].num_rows == 3
    assert found.paths.num_rows == 3


@pytest.mark.parametrize("when", WHENS.values(), ids=WHENS)
def test_endpoints_are_the_same(world: Both, when: When) -> None:
    keys = pa.array(["a", "c", "missing", "'; --", "a\x00b"])
    for spec, side in ((LINK, "left"), (LINK, "right"), (STAY, "left")):
        asked = QuerySpec(spec, when=when)
        found = world.executor.endpoints(asked, side, keys)  # type: ignore[arg-type]
        expected = world.model.endpoints(asked, side, keys)  # type: ignore[arg-type]
        assert found.schema.equals(expected.schema)
        assert found.sort_by("entity_key").to_pylist() == expected.to_pylist()


def test_any_number_of_endpoints_is_loaded_at_once(world: Both) -> None:
    keys = pa.array([f"{n:06}" for n in range(40_000)] + ["a"])
    found = world.executor.endpoints(QuerySpec(LINK), "left", keys)
    assert found.column("entity_key").to_pylist() == ["a"]


def test_objects_come_with_their_endpoints(world: Both) -> None:
    query = Query(world.executor)
    for found in (query.relations(Stay).collect(), list(query.relations(Stay).objects())):
        assert [(s.nr, s.left.text, s.right.size) for s in found] == [
            ("1", "y", 1), ("2", "y", 1), ("1", "a\x00b", 9),
        ]  # fmt: skip
    then = query.relations(Stay).as_of(3).collect()
    assert [(s.nights, s.right.size) for s in then] == [(3, 1), (1, 1), (3, None)]
    (path, *_) = query.entities(Thing).via(Stay).via(Road).collect()
    assert (path.source.id, path.relations[1].right.id) == ("a", "q")
    assert isinstance(path.relations[1], Road)


# --- pinned -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", range(HEAD + 1))
def test_a_pinned_executor_sees_its_commit_for_ever(world: Both, pinned: int) -> None:
    executor = world.repository.executor(pinned)
    for case, make in {"all": lambda: None, **FILTERS}.items():
        spec = QuerySpec(THING, make())
        expected = rows(world.model, at(spec, When(as_of=pinned)))
        assert rows(executor, spec).to_pylist() == expected.to_pylist(), case
    every = rows(world.model, QuerySpec(THING, when=When(history=True))).to_pylist()
    for since in (None, 1):
        spec = QuerySpec(THING, when=When(history=True, since=since))
        expected_rows = [row for row in every if (since or 0) < row["commit_id"] <= pinned]
        assert rows(executor, spec).to_pylist() == expected_rows
    spec = QuerySpec(THING, via=(LINK,))
    assert joined(executor.traverse(spec)) == joined(
        world.model.traverse(at(spec, When(as_of=pinned)))
    )
    keys = pa.array(["a", "b"])
    for when in (When(), When(history=True)):
        found = executor.endpoints(QuerySpec(LINK, when=when), "left", keys)
        expected = world.model.endpoints(QuerySpec(LINK, when=When(as_of=pinned)), "left", keys)
        assert found.to_pylist() == expected.to_pylist()


def test_a_pinned_executor_refuses_what_came_later(world: Both) -> None:
    executor = world.repository.executor(2)
    assert rows(executor, QuerySpec(THING, when=When(as_of=1))).num_rows == 3
    assert rows(executor, QuerySpec(THING, when=When(as_of=2))).num_rows == 4
    later = world.repository.get_commit(3)
    assert later is not None
    for reference in (3, HEAD + 1, later.created_at):
        spec = QuerySpec(THING, when=When(as_of=reference))
        for ask in (executor.rows, executor.aggregate, executor.explain):
            with pytest.raises(ValueError, match="after commit 2, at which this view is pinned"):
                ask(spec)
    for wrong in (-1, HEAD + 1):
        with pytest.raises(ValueError, match=f"the storage is at commit {HEAD}"):
            world.repository.executor(wrong)
