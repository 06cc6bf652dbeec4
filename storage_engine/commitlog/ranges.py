"""Ranges of commits and of identity keys, as values that can be asked whether they meet.

A commit range is exact. A key range is what a file's statistics tell, and may tell less than all:
an end that is unknown (None) reaches as far as need be, so "does not overlap" is always true.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

_Bound = tuple[int, str]  # (0, key); (-1, "") is below every key, (1, "") above


@dataclass(frozen=True, slots=True)
class CommitRange:
    """Commits from `min_commit_id` to `max_commit_id`, both included."""

    min_commit_id: int
    max_commit_id: int

    @property
    def commits(self) -> CommitRange:
        """The range alone, where it is part of something larger."""
        return CommitRange(self.min_commit_id, self.max_commit_id)

    @property
    def is_single(self) -> bool:
        return self.min_commit_id == self.max_commit_id

    def contains(self, commit_id: int) -> bool:
        return self.min_commit_id <= commit_id <= self.max_commit_id

    def covers(self, other: CommitRange) -> bool:
        """Whether all of the other's commits are in this one."""
        return (
            self.min_commit_id <= other.min_commit_id and other.max_commit_id <= self.max_commit_id
        )

    def overlaps(self, other: CommitRange) -> bool:
        return (
            self.min_commit_id <= other.max_commit_id and other.min_commit_id <= self.max_commit_id
        )


class KeyRange(NamedTuple):
    """Keys from `low` to `high`, both included; a pair, as the log stores it."""

    low: str | None = None
    high: str | None = None

    @classmethod
    def parse(cls, bounds: Sequence[Any] | None) -> KeyRange:
        """As it is stored for a column of a file; of a file without one nothing is known."""
        return cls._make(bounds) if bounds else _EVERY_KEY

    @property
    def is_known(self) -> bool:
        """Whether both ends are."""
        return self.low is not None and self.high is not None

    def overlaps(self, other: KeyRange) -> bool:
        """Whether some key may be in both."""
        return _at_most(self.low, other.high) and _at_most(other.low, self.high)

    def precedes(self, other: KeyRange) -> bool:
        """Whether all keys are certainly less than all of the other's."""
        return self.high is not None and other.low is not None and self.high < other.low

    def bounds(self) -> tuple[_Bound, _Bound]:
        """The ends in a form that sorts."""
        low = (-1, "") if self.low is None else (0, self.low)
        high = (1, "") if self.high is None else (0, self.high)
        return low, high


_EVERY_KEY = KeyRange()


def _at_most(low: str | None, high: str | None) -> bool:
    return low is None or high is None or low <= high


def may_hold(stored: Mapping[str, Any], wanted: Mapping[str, KeyRange]) -> bool:
    """Whether a file with these stored ranges may have an identity within all of the wanted ones
    (by column)."""
    return all(KeyRange.parse(stored.get(name)).overlaps(keys) for name, keys in wanted.items())


def ascending(ranges: Iterable[KeyRange]) -> bool:
    """Whether each range certainly ends before the next one begins."""
    every = list(ranges)
    return all(keys.is_known for keys in every) and all(a.precedes(b) for a, b in pairwise(every))


def disjoint(ranges: Iterable[KeyRange]) -> bool:
    """Whether no key can be in two of the ranges."""
    return ascending(sorted(ranges, key=KeyRange.bounds))


class KeyRanges:
    """Many ranges, merged where they touch."""

    def __init__(self) -> None:
        self._merged: list[tuple[_Bound, _Bound]] = []  # disjoint, ascending

    def __bool__(self) -> bool:
        return bool(self._merged)

    def add(self, ranges: Iterable[KeyRange]) -> None:
        for keys in ranges:
            low, high = keys.bounds()
            first, last = self._touching(low, high)
            touching = self._merged[first:last]
            if touching:
                low, high = min(low, touching[0][0]), max(high, touching[-1][1])
            self._merged[first:last] = [(low, high)]

    def overlaps(self, keys: KeyRange) -> bool:
        """Whether some key may be in this range and in one of those."""
        first, last = self._touching(*keys.bounds())
        return first < last

    def _touching(self, low: _Bound, high: _Bound) -> tuple[int, int]:
        first = bisect_left(self._merged, low, key=lambda r: r[1])
        last = bisect_right(self._merged, high, key=lambda r: r[0])
        return first, last
