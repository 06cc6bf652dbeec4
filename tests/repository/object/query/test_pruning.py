"""A file is left out only when nothing in it can pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_engine.commitlog.ranges import KeyRange, KeyRanges, may_hold
from storage_engine.commitlog.records import CommitFile
from storage_engine.model import objects_to_table
from storage_engine.model.expressions import Filter
from storage_engine.repository.object.read.plan import may_match
from storage_engine.repository.object.write.parquet import encode_bytes, stored_table
from storage_engine.testing import evaluator
from tests.campaigns import examples
from tests.query.worlds import FILTERS, TEXTS, THING, Thing, objects


def file_of(things: list[Thing]) -> CommitFile:
    """What a manifest says of a file with these rows."""
    rows = objects_to_table(THING, things)
    table = stored_table(THING, rows, engine_version="v2", schema_version_id=1, commit_id=1)
    part = encode_bytes(THING, table)
    return part.describe(THING, "x", schema_version_id=1, part=None, inserted=len(things))


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(things=objects(), expression=FILTERS)
def test_a_file_with_a_matching_row_is_kept(things: list[Thing], expression: Filter) -> None:
    file = file_of(things)
    matches = any(evaluator.matches(expression, thing) for thing in things)
    assert may_match(expression, file) or not matches
    opposite = any(evaluator.matches(~expression, thing) for thing in things)
    assert may_match(~expression, file) or not opposite
    unknown = replace(file, stats={}, key_range={}, row_count=-1)
    assert may_match(expression, unknown) or not matches


LONG = "x" * 100

SINGLE: list[tuple[Filter, bool]] = [
    (Thing.id == "b", True),
    (Thing.id == "d", False),
    (Thing.id < "a", False),
    (Thing.id <= "a", True),
    (Thing.id > "c", False),
    (Thing.id != "b", True),
    (Thing.id.in_(["x", "b"]), True),
    (Thing.id.in_(["x", "y"]), False),
    (Thing.id.startswith("c"), True),
    (Thing.id.startswith("d"), False),
    (~(Thing.id >= "a"), False),
    ((Thing.id == "z") | (Thing.id == "b"), True),
    ((Thing.id == "z") & (Thing.id == "b"), False),
    (~((Thing.id >= "a") | (Thing.id == "z")), False),
]


@pytest.mark.parametrize(("condition", "kept"), SINGLE, ids=[repr(c) for c, _ in SINGLE])
def test_key_ranges_decide(condition: Filter, kept: bool) -> None:
    file = CommitFile("entity", "Thing", "x", 3, 1, "", key_range={"entity_key": ["a", "c"]})
    assert may_match(condition, file) is kept


def test_statistics_of_another_kind_keep_a_file() -> None:
    odd: dict[str, Any] = {f.name: [{}, {}, 0] for f in THING.fields}
    file = CommitFile("entity", "Thing", "x", 3, 1, "", stats=odd)
    for condition, _ in SINGLE:
        assert may_match(condition, replace(file, key_range={"entity_key": [1, 2]}))


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(st.lists(TEXTS, min_size=1, max_size=4), max_size=6), st.lists(TEXTS, min_size=1))
def test_files_that_share_a_key_are_seen_to(others: list[list[str]], keys: list[str]) -> None:
    ranges = KeyRanges()
    ranges.add(_with_keys(some).leading_keys for some in others)
    shared = any(min(some) <= max(keys) and min(keys) <= max(some) for some in others)
    assert ranges.overlaps(_with_keys(keys).leading_keys) is shared


def test_a_range_whose_end_was_cut_reaches_as_far_as_need_be() -> None:
    cut = CommitFile("entity", "Thing", "x", 1, 1, "", key_range={"entity_key": ["x" * 64, None]})
    ranges = KeyRanges()
    ranges.add([cut.leading_keys])
    assert ranges.overlaps(_with_keys([LONG]).leading_keys)
    assert ranges.overlaps(_with_keys(["z"]).leading_keys)
    assert not ranges.overlaps(_with_keys(["a"]).leading_keys)
    assert may_hold(cut.key_range, {"entity_key": KeyRange(LONG, LONG)})
    assert not may_hold(cut.key_range, {"entity_key": KeyRange("a", "b")})
    assert KeyRanges().overlaps(cut.leading_keys) is False
    unknown = CommitFile("entity", "Thing", "y", 1, 1, "")
    assert ranges.overlaps(unknown.leading_keys)


def _with_keys(keys: list[str]) -> CommitFile:
    bounds = [min(keys), max(keys)]
    return CommitFile("entity", "Thing", "x", len(keys), 1, "", key_range={"entity_key": bounds})
