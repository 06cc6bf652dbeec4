"""Compares two sets of hashed rows a bucket at a time, where Spark would join them row by row.

Each row is three numbers: two that stand for its identity, one for its content. Tasks pack them by
bucket, so that Spark shuffles some large values instead of millions of small rows, and a bucket is
compared by sorting and searching whole columns. For stored rows whose identities are unique.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_Column = npt.NDArray[np.int64]
Rows = tuple[_Column, _Column, _Column]  # of one length

_STORED, _SOURCE = 0, 1
_BUCKETS = 32  # in a partition: small enough to be sorted within a processor's cache
_PACKED_ROWS = 1 << 20  # held by a task before they are handed on
_WIDTH = 3

PACKED = "bucket int, side int, bad bigint, rows binary"
_PACKED = pa.schema(
    [("bucket", pa.int32()), ("side", pa.int32()), ("bad", pa.int64()), ("rows", pa.binary())]
)
# One row for each that differs; and, with `status` alone, how many others there are of a kind.
JUDGED = "__k1 bigint, __k2 bigint, __insert boolean, __status string, __n bigint"
_JUDGED = pa.schema(
    [
        ("__k1", pa.int64()),
        ("__k2", pa.int64()),
        ("__insert", pa.bool_()),
        ("__status", pa.string()),
        ("__n", pa.int64()),
    ]
)


def judge(source: DataFrame, stored: DataFrame, partitions: int) -> DataFrame:
    """What becomes of the rows of `source`, as JUDGED. Both sides have two identity hashes and a
    content hash, in this order; `source` has a boolean besides: the row is bad, and only counted.
    """
    buckets = partitions * _BUCKETS
    ours = source.mapInArrow(Pack(_SOURCE, buckets), PACKED)
    theirs = stored.mapInArrow(Pack(_STORED, buckets), PACKED)
    together = ours.unionAll(theirs).repartition(partitions, "bucket")
    return together.sortWithinPartitions("bucket", "side").mapInArrow(compare, JUDGED)


@dataclass(frozen=True)
class Pack:
    """Tasks' first half: rows by bucket, as bytes."""

    side: int
    buckets: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held: list[Rows] = []
        count = bad = 0
        for batch in batches:
            if batch.num_columns > _WIDTH:
                fits = np.invert(batch.column(_WIDTH).to_numpy(zero_copy_only=False).astype(bool))
                bad += batch.num_rows - int(fits.sum())
                rows = _rows(batch, fits if not fits.all() else None)
            else:
                rows = _rows(batch, None)
            held.append(rows)
            count += len(rows[0])
            if count >= _PACKED_ROWS:
                yield self._packed(held)
                held, count = [], 0
        if count:
            yield self._packed(held)
        if bad:
            counted = {"bucket": -1, "side": self.side, "bad": bad}
            yield pa.RecordBatch.from_pylist([counted], schema=_PACKED)

    def _packed(self, held: list[Rows]) -> pa.RecordBatch:
        columns = [np.concatenate(column) for column in zip(*held, strict=True)]
        small = self.buckets <= 1 << 16  # these are sorted by their digits, which is much faster
        bucket = (columns[0].view(np.uint64) % np.uint64(self.buckets)).astype(
            np.uint16 if small else np.uint32
        )
        order = np.argsort(bucket, kind="stable")
        columns = [column[order] for column in columns]
        sizes = np.bincount(bucket, minlength=self.buckets)
        ends = np.cumsum(sizes)
        numbers = np.flatnonzero(sizes)
        packed = [
            b"".join(column[ends[n] - sizes[n] : ends[n]].tobytes() for column in columns)
            for n in numbers
        ]
        return pa.RecordBatch.from_arrays(
            [
                pa.array(numbers, pa.int32()),
                pa.repeat(pa.scalar(self.side, pa.int32()), len(numbers)),
                pa.nulls(len(numbers), pa.int64()),
                pa.array(packed, pa.binary()),
            ],
            schema=_PACKED,
        )


def _rows(batch: pa.RecordBatch, fits: npt.NDArray[np.bool_] | None) -> Rows:
    one, two, three = (batch.column(n).to_numpy() for n in range(_WIDTH))
    return (one, two, three) if fits is None else (one[fits], two[fits], three[fits])


def compare(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Tasks' second half. Rows come by bucket, those that are stored first."""
    unchanged = bad = 0
    known: _Known | None = None
    parts: list[bytes] = []
    at = None
    for batch in batches:
        for row in range(batch.num_rows):
            bucket, side, count, data = (batch.column(n)[row] for n in range(4))
            if count.is_valid:
                bad += count.as_py()
                continue
            if bucket.as_py() != at:
                at, parts, known = bucket.as_py(), [], None
            if side.as_py() == _STORED:
                parts.append(data.as_py())
                continue
            if known is None:
                known = _Known.of(parts)
            differing, same = known.differing(_unpacked(data.as_buffer()))
            unchanged += same
            if differing.num_rows:
                yield differing
    for status, n in (("unchanged", unchanged), ("bad", bad)):
        if n:
            counted = {"__status": status, "__n": n}
            yield pa.RecordBatch.from_pylist([counted], schema=_JUDGED)


@dataclass(frozen=True)
class _Known:
    """The stored rows of a bucket, in the order of their first hash."""

    rows: Rows

    @classmethod
    def of(cls, parts: list[bytes]) -> _Known:
        unpacked = [_unpacked(part) for part in parts]
        if not unpacked:
            empty = np.empty(0, np.int64)
            return cls((empty, empty, empty))
        one, two, three = (np.concatenate(column) for column in zip(*unpacked, strict=True))
        order = np.argsort(one)
        return cls((one[order], two[order], three[order]))

    def differing(self, rows: Rows) -> tuple[pa.RecordBatch, int]:
        """Those of the rows that are not here as they are, and how many are."""
        one, two, three = rows
        known_one, known_two, known_three = self.rows
        found, same = np.zeros(len(one), bool), np.zeros(len(one), bool)
        place, rest = np.searchsorted(known_one, one), np.arange(len(one))
        while len(rest):  # once, as a rule: two identities hardly ever share their first hash
            rest = rest[place[rest] < len(known_one)]
            rest = rest[known_one[place[rest]] == one[rest]]
            at = place[rest]
            hit = known_two[at] == two[rest]
            found[rest[hit]] = True
            same[rest[hit]] = known_three[at[hit]] == three[rest[hit]]
            rest = rest[~hit]
            place[rest] += 1
        differ = ~same
        known = pa.array(found[differ])
        count = len(known)
        batch = pa.RecordBatch.from_arrays(
            [
                pa.array(one[differ]),
                pa.array(two[differ]),
                pc.invert(known),
                pc.if_else(known, "updated", "inserted"),
                pa.repeat(pa.scalar(1, pa.int64()), count),
            ],
            schema=_JUDGED,
        )
        return batch, len(one) - count


def _unpacked(data: Any) -> Rows:
    one, two, three = np.frombuffer(data, np.int64).reshape(_WIDTH, -1)
    return one, two, three
