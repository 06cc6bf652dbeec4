"""Faulty rows of a column: how many, the first one, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, slots=True)
class Problem:
    """`first` is a row number, counted from 0, within the batch."""

    what: str
    count: int
    first: int
    mask: pa.Array | None = field(default=None, compare=False, repr=False)  # the rows, if known
    details: Mapping[int, str] = field(default_factory=dict, compare=False, repr=False)  # by row

    @property
    def kind(self) -> str:
        """What is wrong, without what differs from row to row."""
        return self.what.partition(",")[0]

    def rows(self) -> list[int]:
        """The faulty rows, where whoever found the problem says which they are."""
        return pc.indices_nonzero(self.mask).to_pylist() if self.mask is not None else []

    def say(self, column: str, offset: int) -> str:
        rows = "1 row" if self.count == 1 else f"{self.count} rows"
        where = "row" if self.count == 1 else "first row"
        return f"column {column!r} {self.what} in {rows} ({where} {offset + self.first})"


def masked(mask: pa.Array, what: str) -> Problem | None:
    """The problem of the rows where `mask` is true; None when there are none."""
    count = pc.sum(mask).as_py()
    if not count:
        return None
    first = int(pc.index(mask, value=True).as_py())
    return Problem(what, int(count), first, pc.fill_null(mask, False))
