"""When is a type worth compacting, and which of its entries belong together?

Entries are merged in size tiers. Going back from the newest, an entry joins the run of those after
it while it is not much larger than they are together. So what stays unmerged is always more than
`ratio` times as large as all that is newer: a type has a logarithmic number of entries after a
compaction, and a row is rewritten only when its entry grows by a constant factor, which is
logarithmically often. Runs are always adjacent entries, so no snapshot is ever swallowed by a
range that it is not part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from storage_engine.commitlog.records import Entry
from storage_engine.config import MIB

SPARK_ABOVE = 1024 * MIB  # of a run: what is less, one machine merges well


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to compact a type now, why, and which runs of adjacent entries to merge."""

    worth: bool
    reason: str
    runs: tuple[tuple[Entry, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class CompactionPolicy:
    """`min_entries`: fewer in a run are left alone. `ratio`: an entry of up to this many times
    the rows of those after it is merged with them: more means fewer files and more rewriting.
    `small_bytes`: commits of less join each other whatever their sizes, as each must be rewritten
    once anyway; a larger one (a bulk load) is a good file as it is, and counts by its size."""

    min_entries: int = 8
    ratio: float = 1.5
    small_bytes: int = 16 * MIB

    def __post_init__(self) -> None:
        if self.min_entries < 2 or self.ratio <= 0 or self.small_bytes < 0:
            raise ValueError("a policy needs min_entries >= 2, ratio > 0 and small_bytes >= 0")

    def verdict(self, entries: Sequence[Entry]) -> Verdict:
        """What to do with the entries of a type, oldest first."""
        runs = tuple(run for run in self.runs(entries) if len(run) >= self.min_entries)
        if runs:
            merged = sum(len(run) for run in runs)
            into = f"{len(runs)} snapshot{'s' if len(runs) > 1 else ''}"
            return Verdict(True, f"{merged} of {len(entries)} entries can become {into}", runs)
        if len(entries) < self.min_entries:
            return Verdict(False, f"{len(entries)} of at least {self.min_entries} entries")
        return Verdict(False, f"no run of {self.min_entries} entries of similar size")

    def runs(self, entries: Sequence[Entry]) -> list[tuple[Entry, ...]]:
        """All entries in adjacent runs, oldest first; one of a single entry is to be kept."""
        found: list[list[Entry]] = []
        for entry in reversed(entries):
            if found and self._joins(entry, found[-1]):
                found[-1].append(entry)
            else:
                found.append([entry])
        return [tuple(reversed(run)) for run in reversed(found)]

    def _joins(self, older: Entry, run: Sequence[Entry]) -> bool:
        if older.schema_version_id != run[0].schema_version_id:
            return False  # other columns
        if self._is_small(older) and all(self._is_small(entry) for entry in run):
            return True
        return rows(older) <= self.ratio * sum(rows(entry) for entry in run)

    def _is_small(self, entry: Entry) -> bool:
        is_commit = entry.min_commit_id == entry.max_commit_id
        return is_commit and size(entry) < self.small_bytes


def rows(entry: Entry) -> int:
    return sum(max(0, file.row_count) for file in entry.files)


def size(entry: Entry) -> int:
    return sum(file.bytes for file in entry.files)
