"""Rows of a write counted by the values of one field, in the passes that the write makes anyway.

Times are counted by quarters of an hour, as the seconds since 1970 at which one begins: hours, days
and months are made of those in every zone. Other values are counted as text. Executors count what
they stage, comparing counts what is unchanged. Where there are more than LIMIT values nobody is
told: a field that is another one in every row is none to count by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from pyspark.sql import Column

LIMIT = 10_000
_QUARTER = 900  # seconds
INSERTED, UPDATED, UNCHANGED = range(3)
Tally = dict[str, list[int]]  # by value: rows inserted, updated and unchanged


def bucket_column(column: Column, storage: str) -> Column:
    """What a row is counted under, in Spark."""
    from pyspark.sql import functions as F

    if storage == "datetime":
        seconds = F.unix_seconds(column)
        return (seconds - F.pmod(seconds, F.lit(_QUARTER))).cast("string")
    return column.cast("string")


def bucket_array(values: pa.Array, storage: str) -> pa.Array:
    """The same of Arrow's values."""
    if storage == "datetime":
        begins = pc.floor_temporal(values, _QUARTER // 60, unit="minute")
        seconds = begins.cast(pa.timestamp("s", tz=values.type.tz)).cast(pa.int64())
        return seconds.cast(pa.string())
    return values.cast(pa.string())


def add_rows(tally: Tally, buckets: pa.Array, fresh: pa.Array | None) -> None:
    """Count staged rows; `fresh` tells inserts, all are where it is None."""
    kinds = pa.repeat(True, len(buckets)) if fresh is None else fresh
    rows = pa.table({"bucket": buckets, "fresh": kinds})
    for row in rows.group_by(["bucket", "fresh"]).aggregate([([], "count_all")]).to_pylist():
        counts = tally.setdefault(row["bucket"] or "", [0, 0, 0])
        counts[INSERTED if row["fresh"] else UPDATED] += row["count_all"]


def merged(tallies: Iterable[Tally], unchanged: Mapping[str, int]) -> Tally | None:
    """Of all tasks, and of what they did not get to see; None where there are too many values."""
    whole: Tally = {value: [0, 0, number] for value, number in unchanged.items()}
    for tally in tallies:
        for value, counts in tally.items():
            before = whole.get(value, [0, 0, 0])
            whole[value] = [a + b for a, b in zip(before, counts, strict=True)]
        if len(whole) > LIMIT:
            return None
    return whole
