"""Rows compared by bucket, beside a comparison of Python's own. No Spark runs here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from storage_engine.spark import hash_compare
from storage_engine.spark.hash_compare import Pack, compare

Row = tuple[int, int, int]
MOST = 2**63


def batches(rows: list[Row], bad: list[bool] | None, size: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, max(1, len(rows)), size):
        some = rows[start : start + size]
        columns = [pa.array([row[n] for row in some], pa.int64()) for n in range(3)]
        if bad is not None:
            columns.append(pa.array(bad[start : start + size], pa.bool_()))
        yield pa.RecordBatch.from_arrays(columns, names=list("abcd")[: len(columns)])


def judged(
    source: list[Row], bad: list[bool], stored: list[Row], buckets: int
) -> list[tuple[Any, ...]]:
    """As Spark does it: pack both sides, sort by bucket and side, compare."""
    packed = [
        *Pack(0, buckets)(batches(stored, None, 7)),
        *Pack(1, buckets)(batches(source, bad, 5)),
    ]
    if not packed:
        return []
    table = pa.Table.from_batches(packed)
    ordered = table.sort_by([("bucket", "ascending"), ("side", "ascending")])
    found = compare(ordered.to_batches(max_chunksize=3))
    return [tuple(row.values()) for batch in found for row in batch.to_pylist()]


@pytest.mark.parametrize("seed", range(30))
def test_the_same_as_row_by_row(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Identities that share their first hash, repeated rows, and sides without rows included."""
    rng = random.Random(seed)
    monkeypatch.setattr(hash_compare, "_PACKED_ROWS", rng.choice([1, 16, 1 << 20]))
    ones = [rng.randrange(-MOST, MOST) for _ in range(rng.choice([1, 3, 40]))]
    identities = {(rng.choice(ones), rng.randrange(3)) for _ in range(rng.choice([0, 10, 120]))}
    stored = [(*identity, rng.randrange(2)) for identity in identities]
    others = [(rng.choice(ones), rng.randrange(4)) for _ in range(20)]
    pool = [*identities, *others]
    source = [(*rng.choice(pool), rng.randrange(3)) for _ in range(rng.choice([0, 5, 200]))]
    bad = [rng.random() < 0.1 for _ in source]

    known = {(one, two): content for one, two, content in stored}
    expected: list[tuple[Any, ...]] = []
    unchanged = 0
    for (one, two, content), is_bad in zip(source, bad, strict=True):
        if is_bad:
            continue
        if known.get((one, two)) == content:
            unchanged += 1
        else:
            new = (one, two) not in known
            expected.append((one, two, new, "inserted" if new else "updated", 1))
    found = judged(source, bad, stored, buckets=rng.choice([1, 4, 64]))
    counts = {row[3]: row[4] for row in found if row[0] is None}
    assert counts == {name: n for name, n in (("unchanged", unchanged), ("bad", sum(bad))) if n}
    assert sorted(row for row in found if row[0] is not None) == sorted(expected)
