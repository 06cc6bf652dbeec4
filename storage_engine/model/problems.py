"""Faulty rows of a column: how many, the first one, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, slots=True)
class Problem:
    """`first` is a row number, counted from 0, within the batch."""

    what: str
    count: int
    first: int

    def say(self, column: str, offset: int) -> str:
        rows = "1 row" if self.count == 1 else f"{self.count} rows"
        where = "row" if self.count == 1 else "first row"
        return f"column {column!r} {self.what} in {rows} ({where} {offset + self.first})"


def masked(mask: pa.Array, what: str) -> Problem | None:
    """The problem of the rows where `mask` is true; None when there are none."""
    count = pc.sum(mask).as_py()
    if not count:
        return None
    return Problem(what, int(count), int(pc.index(mask, value=True).as_py()))
