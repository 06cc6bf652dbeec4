"""Which rows of a source are new, changed, older than what is stored, or nothing new.

Only hashes are shuffled, on both sides; whole rows follow in a second reading of the source, and
only those that differ. Identities are matched by 128 bits, because each meets all others; the
content of a row meets only the stored one of its identity, for which 64 bits will do (one change
in 10**19 would be missed). Hashing passes over nulls, so a bit for each column tells them apart.
Rows that cannot be written take no part in the comparison: each goes on to staging, which says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from storage_engine.model.spec import TypeSpec
from storage_engine.spark.rows import SourceRows, cannot_be_written
from storage_engine.spark.staging import INSERT
from storage_engine.spark.stored import COMMIT

_BROADCAST_ROWS = 2_000_000  # identities: some 100 MB in an executor
_FEW_ROWS = 100_000
_TASK_ROWS = 2_000_000  # some 150 MB
_KEYS = ["__k1", "__k2"]
_CONTENT = "__content"
_ORDER = "__order"
_BAD = "__bad"
_BITS = 62
_WRITTEN = ("inserted", "updated")


@dataclass(frozen=True)
class Counts:
    """What comparing has found, in rows of the source."""

    rows: int = 0
    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    stale: int = 0
    duplicates: int = 0
    bad: int = 0

    @property
    def written(self) -> int:
        return self.inserted + self.updated + self.bad


@dataclass(frozen=True)
class Reconciled:
    """The rows to stage, with a column that tells inserts; `cached` until `free`."""

    frame: DataFrame | None  # None: nothing differs
    counts: Counts
    identities: int = 0  # that differ: the frame has a row of each, at least, and every bad row
    repeated: int = 0  # rows whose identity another one has, of those that differ
    cached: DataFrame | None = None

    def free(self) -> None:
        if self.cached is not None:
            self.cached.unpersist()


def reconcile(
    source: SourceRows,
    stored: DataFrame | None,
    spec: TypeSpec,
    *,
    unique: bool,
    order_by: str | None,
    stored_count: int = 0,
) -> Reconciled:
    """Compare with `stored` (None: there is nothing), which has `stored_count` rows. `unique`: no
    identity is in it twice."""
    narrow = _narrow(source, spec, order_by)
    # What is not to be written is only counted: one group each, where the others have one row per
    # identity. So one pass gives both the figures and the identities.
    wanted = [*_KEYS, *([_ORDER] if order_by is not None else [])]
    differs = F.col("__status").isin(*_WRITTEN)
    judged = (
        _joined(narrow, stored, spec, unique, order_by, stored_count)
        .groupBy(*(F.when(differs, F.col(n)).alias(n) for n in [*wanted, INSERT]), "__status")
        .agg(F.count(F.lit(1)).alias("__n"))
        .persist(StorageLevel.MEMORY_AND_DISK)
    )
    figures = judged.groupBy("__status").agg(F.sum("__n"), F.count(F.lit(1))).collect()
    found = {row[0]: int(row[1]) for row in figures}
    counts = Counts(rows=sum(found.values()), **found)
    identities = sum(int(row[2]) for row in figures if row[0] in _WRITTEN)
    repeated = sum(int(row[1]) - int(row[2]) for row in figures if row[0] in _WRITTEN)
    changed = judged.filter(differs).select(*wanted, INSERT).dropDuplicates(wanted)
    if counts.written == 0:
        return Reconciled(None, counts, cached=judged)
    said_once = order_by is None or repeated == 0
    if counts.inserted + counts.bad == counts.rows and said_once:
        # All are new: no need to look them up.
        return Reconciled(source.frame, counts, identities, repeated, judged)
    if identities <= _BROADCAST_ROWS:
        changed = F.broadcast(changed)
    frame = _chosen(source, spec, changed, order_by, some_bad=counts.bad > 0)
    return Reconciled(frame, counts, identities, repeated, judged)


def _joined(
    narrow: DataFrame,
    stored: DataFrame | None,
    spec: TypeSpec,
    unique: bool,
    order_by: str | None,
    stored_count: int,
) -> DataFrame:
    """Each row's status, by a join of Spark's own."""
    compared = _compared(narrow, order_by)
    if stored is not None:
        known = _latest(stored, spec, unique=unique, order_by=order_by)
        if _by_hash(known, stored_count):
            known = known.hint("shuffle_hash")
        compared = compared.join(known, _KEYS, "left")
        status = _status(order_by)
    else:
        compared = compared.withColumn("__known", F.lit(None).cast("boolean"))
        status = _first_status(order_by)
    kept = [*_KEYS, *([_ORDER] if order_by is not None else [])]
    return compared.select(*kept, F.col("__known").isNull().alias(INSERT), status.alias("__status"))


def _by_hash(known: DataFrame, rows: int) -> bool:
    """Whether a table of the stored hashes fits in a task, which spares sorting both sides. Few
    are left to Spark: it can send them to all executors instead."""
    partitions = int(known.sparkSession.conf.get("spark.sql.shuffle.partitions") or 200)
    return rows > _FEW_ROWS and rows / partitions <= _TASK_ROWS


def _narrow(source: SourceRows, spec: TypeSpec, order_by: str | None) -> DataFrame:
    columns = [*_hashes(spec, source.columns)]
    if order_by is not None:
        columns.append(source.columns[order_by].alias(_ORDER))
    columns.append(cannot_be_written(source, spec).alias(_BAD))
    return source.frame.select(*columns)


def _compared(narrow: DataFrame, order_by: str | None) -> DataFrame:
    if order_by is None:
        return narrow
    # Of the rows of one identity those with the greatest value stay; nulls are the least.
    newest = F.max(F.when(~F.col(_BAD), F.col(_ORDER))).over(Window.partitionBy(*_KEYS))
    return narrow.withColumn("__newest", newest)


def _latest(stored: DataFrame, spec: TypeSpec, *, unique: bool, order_by: str | None) -> DataFrame:
    columns = {name: F.col(f"`{name}`") for name in [*spec.identity, *_names(spec)]}
    own = [F.col(f"`{order_by}`").alias(_ORDER)] if order_by is not None else []
    hashed = stored.select(COMMIT, *_hashes(spec, columns), *own)
    content = [_CONTENT, *([_ORDER] if order_by is not None else [])]
    if not unique:
        newest = F.max_by(F.struct(*content), COMMIT).alias("__latest")
        hashed = hashed.groupBy(*_KEYS).agg(newest).select(*_KEYS, "__latest.*")
    renamed = [F.col(name).alias(f"{name}s") for name in content]
    return hashed.select(*_KEYS, *renamed, F.lit(True).alias("__known"))


def _status(order_by: str | None) -> Column:
    status = F.when(F.col(_BAD), "bad")
    if order_by is not None:
        status = status.when(~F.col(_ORDER).eqNullSafe(F.col("__newest")), "duplicates")
    status = status.when(F.col("__known").isNull(), "inserted")
    if order_by is not None:
        ours, theirs = F.col(_ORDER), F.col(f"{_ORDER}s")
        status = status.when(theirs.isNotNull() & (ours.isNull() | (ours < theirs)), "stale")
    same = F.col(_CONTENT) == F.col(f"{_CONTENT}s")
    return status.when(same, "unchanged").otherwise("updated")


def _first_status(order_by: str | None) -> Column:
    status = F.when(F.col(_BAD), "bad")
    if order_by is not None:
        status = status.when(~F.col(_ORDER).eqNullSafe(F.col("__newest")), "duplicates")
    return status.otherwise("inserted")


def _chosen(
    source: SourceRows, spec: TypeSpec, changed: DataFrame, order_by: str | None, *, some_bad: bool
) -> DataFrame:
    """The whole rows of what differs, and every bad one."""
    names = source.frame.columns
    bad = cannot_be_written(source, spec).alias(_BAD)
    keyed = source.frame.select("*", *_hashes(spec, source.columns), bad)
    how, wanted = "inner", F.lit(True)
    if some_bad:
        # A bad row matches nothing, whatever its identity: a good one beside it is judged alone.
        how, wanted = "left", F.col(_BAD) | F.col(INSERT).isNotNull()
    if order_by is None:
        match = [F.col(f"mine.{name}") == F.col(f"changed.{name}") for name in _KEYS]
    else:
        keyed = keyed.withColumn(_ORDER, source.columns[order_by])
        match = [F.col(f"mine.{n}").eqNullSafe(F.col(f"changed.{n}")) for n in [*_KEYS, _ORDER]]
    on = ~F.col(f"mine.{_BAD}") if some_bad else F.lit(True)
    for condition in match:
        on = on & condition
    joined = keyed.alias("mine").join(changed.alias("changed"), on, how).filter(wanted)
    if order_by is not None:
        # One row said twice is one row, except that each bad one is to be seen.
        kept = joined.select(
            *(f"mine.{n}" for n in _quoted([*names, *_KEYS, _CONTENT, _BAD])), INSERT
        )
        each = F.when(F.col(_BAD), F.monotonically_increasing_id())
        joined = kept.withColumn("__each", each).dropDuplicates([*_KEYS, _CONTENT, "__each"])
        return joined.select(*_quoted(names), INSERT)
    return joined.select(*(f"mine.{name}" for name in _quoted(names)), INSERT)


def _hashes(spec: TypeSpec, columns: Mapping[str, Column]) -> list[Column]:
    identity = [columns[name] for name in spec.identity]
    fields = [columns[name] for name in _names(spec)]
    nulls = _null_bits(fields)
    return [
        F.xxhash64(*identity).alias("__k1"),
        F.xxhash64(F.lit(1), *identity).alias("__k2"),
        F.xxhash64(*nulls, *fields).alias(_CONTENT),
    ]


def _null_bits(columns: Sequence[Column]) -> list[Column]:
    """Hashing passes over nulls as if they were not there: say where they are."""
    made = []
    for start in range(0, len(columns), _BITS):
        bits = F.lit(0).cast("bigint")
        for place, column in enumerate(columns[start : start + _BITS]):
            bits = bits + F.when(column.isNull(), 1 << place).otherwise(0)
        made.append(bits)
    return made or [F.lit(0)]


def _names(spec: TypeSpec) -> list[str]:
    """Fields to compare: an entity's key is compared as its identity."""
    return [f.name for f in spec.fields if f.name != spec.primary_key]


def _quoted(names: Sequence[str]) -> list[str]:
    return [f"`{name.replace('`', '``')}`" for name in names]
