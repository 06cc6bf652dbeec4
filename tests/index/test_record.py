"""Merging entries of the chain into an index that lags."""

from __future__ import annotations

import pytest

from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.index.record import TypeIndex


def entry(first: int, last: int | None = None) -> Entry:
    path = f"commits/{first}.parquet" if last is None else f"snapshots/{first}-{last}.parquet"
    file = CommitFile("entity", "Customer", path, 1, 1, "")
    return Entry(first, last or first, (file,))


def ranges(index: TypeIndex) -> list[tuple[int, int]]:
    return [(e.min_commit_id, e.max_commit_id) for e in index.entries]


@pytest.mark.parametrize(
    ("indexed", "found", "expected"),
    [
        ([], [(1, 1), (3, 3)], [(1, 1), (3, 3)]),
        ([(1, 1)], [(1, 1), (3, 3)], [(1, 1), (3, 3)]),
        # a snapshot in the index covers what the chain has commit by commit
        ([(1, 4)], [(3, 3), (4, 4), (6, 6)], [(1, 4), (6, 6)]),
        # a snapshot in the checkpoint takes the place of the entries that it was made of
        ([(1, 1), (2, 2)], [(1, 5)], [(1, 5)]),
        ([(1, 1), (2, 2)], [(1, 5), (7, 7)], [(1, 5), (7, 7)]),
        ([(1, 3), (4, 4)], [(1, 6)], [(1, 6)]),
        ([(1, 1), (2, 2)], [(2, 5)], [(1, 1), (2, 5)]),
        # and does not where the index is as far
        ([(1, 1), (5, 5)], [(1, 5)], [(1, 1), (5, 5)]),
    ],
)
def test_missing_entries_neither_overlap_nor_get_lost(
    indexed: list[tuple[int, int]], found: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    def made(pairs: list[tuple[int, int]]) -> list[Entry]:
        return [entry(a, b if b != a else None) for a, b in pairs]

    index = TypeIndex("Customer", entries=tuple(made(indexed)))
    assert ranges(index.with_missing(made(found))) == expected
