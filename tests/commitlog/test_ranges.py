"""Ranges of commits and keys: when they meet, by themselves and against every member."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_engine.commitlog.ranges import (
    CommitRange,
    KeyRange,
    KeyRanges,
    ascending,
    disjoint,
    may_hold,
)
from storage_engine.commitlog.records import CommitFile, Entry
from tests.campaigns import examples

COMMITS = [CommitRange(a, b) for a, b in product(range(1, 6), repeat=2) if a <= b]
LETTERS = "abcde"
KEYS = [KeyRange(*ends) for ends in product([None, *LETTERS], repeat=2)]
KEYS = [keys for keys in KEYS if not keys.is_known or str(keys.low) <= str(keys.high)]


def commits(of: CommitRange) -> set[int]:
    return set(range(of.min_commit_id, of.max_commit_id + 1))


def letters(of: KeyRange) -> set[str]:
    """Those that may be in it, as an unknown end reaches as far as need be."""
    return {c for c in LETTERS if (of.low or "") <= c <= (of.high or "z")}


@pytest.mark.parametrize("one", COMMITS, ids=str)
def test_commit_ranges_are_sets_of_commits(one: CommitRange) -> None:
    assert one.is_single is (len(commits(one)) == 1)
    assert {n for n in range(8) if one.contains(n)} == commits(one)
    for other in COMMITS:
        assert one.covers(other) is (commits(one) >= commits(other))
        assert one.overlaps(other) is bool(commits(one) & commits(other))


def test_an_entry_is_a_range_with_files() -> None:
    file = CommitFile("entity", "Thing", "x", 1, 1, "", key_range={"entity_key": ["a", None]})
    snapshot, commit = Entry(2, 4, (file,)), Entry(3, 3, (file,))
    assert snapshot.is_snapshot
    assert not commit.is_snapshot
    assert snapshot.covers(commit)
    assert not commit.covers(snapshot)
    assert snapshot.commits == CommitRange(2, 4) != snapshot
    assert file.leading_keys == file.keys("entity_key") == KeyRange("a", None)
    assert file.keys("left_key") == KeyRange(None, None)


@pytest.mark.parametrize("one", KEYS, ids=str)
def test_key_ranges_never_miss_a_key(one: KeyRange) -> None:
    for other in KEYS:
        shared = letters(one) & letters(other)
        assert one.overlaps(other) is bool(shared)
        assert one.overlaps(other) is other.overlaps(one)
        if one.precedes(other):
            assert not shared
        assert one.overlaps(other) is not (one.precedes(other) or other.precedes(one))


@pytest.mark.parametrize(
    ("ranges", "in_order", "apart"),
    [
        ([], True, True),
        ([KeyRange("a", "b"), KeyRange("c", "d")], True, True),
        ([KeyRange("c", "d"), KeyRange("a", "b")], False, True),
        ([KeyRange("a", "c"), KeyRange("c", "d")], False, False),
        ([KeyRange("a", "b"), KeyRange("c", None)], False, False),
        ([KeyRange(None, None)], False, False),
    ],
)
def test_ranges_one_after_another(ranges: list[KeyRange], in_order: bool, apart: bool) -> None:
    assert ascending(ranges) is in_order
    assert disjoint(ranges) is apart


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(KEYS), max_size=6), st.sampled_from(KEYS))
def test_merged_ranges_meet_what_one_of_them_meets(some: list[KeyRange], other: KeyRange) -> None:
    merged = KeyRanges()
    merged.add(some)
    assert merged.overlaps(other) is any(other.overlaps(keys) for keys in some)


def test_what_a_file_may_hold() -> None:
    stored = {"left_key": ["b", "d"], "right_key": ["x", None]}
    assert may_hold(stored, {})
    assert may_hold(stored, {"left_key": KeyRange("d", "e"), "right_key": KeyRange("z", "z")})
    assert not may_hold(stored, {"left_key": KeyRange("d", "e"), "right_key": KeyRange("a", "w")})
    assert may_hold(stored, {"instance_key": KeyRange("a", "a")})
