"""Which rows of a source are new, changed, older than what is stored, or nothing new.

Only hashes are shuffled, on both sides; whole rows follow in a second reading of the source, and
only those that differ. A row is nothing new when the hash of its identity and the hash of all of it
are stored together: 128 bits. The identity's own has 64, because Spark joins by one long far faster
than by two; where too many rows meet for that, a second one is looked at as well. Hashing passes
over nulls, so a bit for each column that can be null tells them apart. Rows that cannot be written
take no part in the comparison: each goes on to staging, which says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, GroupedData, Window
from pyspark.sql import functions as F

from storage_engine.model.spec import TypeSpec
from storage_engine.spark.rows import SourceRows, cannot_be_written
from storage_engine.spark.schema import quoted
from storage_engine.spark.staging import INSERT, REASONS
from storage_engine.spark.stored import COMMIT

_BROADCAST_ROWS = 2_000_000  # identities: some 100 MB in an executor
_FEW_ROWS = 100_000
_TASK_ROWS = 2_000_000  # some 150 MB
# Stored rows up to which one hash tells identities apart. One type in 130,000 of this size has two
# with the same hash: they are published again whenever they are compared. No change is ever missed.
_ONE_HASH_ROWS = 1 << 24
_KEY = "__key"
_KEYS = [_KEY, "__key2"]
_CONTENT = "__content"
_ORDER = "__order"
_NEWEST = "__newest"
_STATUS = "__status"
_BITS = 62
_STATUSES = ("unchanged", "inserted", "updated", "stale", "duplicates", "bad")  # by number
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
    sift: bool = True,
) -> Reconciled:
    """Compare with `stored` (None: there is nothing), which has `stored_count` rows. `unique`: no
    identity is in it twice. `sift`: keep rows apart that cannot be written. Where one stops the
    write that is spared: it differs from all that is stored, so staging gets to see it."""
    sift = sift or order_by is not None or REASONS in source.frame.columns
    keys = _KEYS
    if stored is not None and order_by is None and stored_count <= _ONE_HASH_ROWS:
        keys = [_KEY]
    judged = (
        _judged(
            _narrow(source, spec, keys, order_by, sift=sift),
            stored,
            spec,
            keys,
            order_by,
            unique=unique,
            stored_count=stored_count,
        )
        .agg(F.count(F.lit(1)).alias("__n"))
        .persist(StorageLevel.MEMORY_AND_DISK)
    )
    figures = {
        _STATUSES[row[0]]: (int(row[1]), int(row[2]))
        for row in judged.groupBy(_STATUS).agg(F.sum("__n"), F.count(F.lit(1))).collect()
    }
    found = {status: rows for status, (rows, _) in figures.items()}
    counts = Counts(rows=sum(found.values()), **found)
    written = [figures[status] for status in _WRITTEN if status in figures]
    identities = sum(groups for _, groups in written)
    repeated = sum(rows - groups for rows, groups in written)
    if counts.written == 0:
        return Reconciled(None, counts, cached=judged)
    said_once = order_by is None or repeated == 0
    if counts.inserted + counts.bad == counts.rows and said_once:
        # All are new: no need to look them up.
        return Reconciled(source.frame, counts, identities, repeated, judged)
    wanted = [*keys, *([_ORDER] if order_by is not None else [])]
    changed = judged.filter(_is(*_WRITTEN)).select(*wanted, _is("inserted").alias(INSERT))
    if identities <= _BROADCAST_ROWS:
        changed = F.broadcast(changed)
    frame = _chosen(source, spec, changed, keys, order_by, some_bad=counts.bad > 0)
    return Reconciled(frame, counts, identities, repeated, judged)


def _judged(
    narrow: DataFrame,
    stored: DataFrame | None,
    spec: TypeSpec,
    keys: Sequence[str],
    order_by: str | None,
    *,
    unique: bool,
    stored_count: int,
) -> GroupedData:
    """Identities that differ, each with its status. What is not to be written is only counted: one
    group each. So one pass gives both the figures and the identities."""
    ordered = [] if order_by is None else [_ORDER]
    compared = narrow.alias("mine")
    if stored is not None:
        known = _latest(stored, spec, keys, unique=unique, order_by=order_by)
        if _by_hash(known, stored_count):
            known = known.hint("shuffle_hash")
        compared = compared.join(known.alias("known"), _same(keys, "known"), "left")
    status = _status(order_by, compared=stored is not None)
    told = compared.select(*(f"mine.{n}" for n in [*keys, *ordered]), status.alias(_STATUS))
    differs = _is(*_WRITTEN)
    return told.groupBy(*(F.when(differs, F.col(n)).alias(n) for n in [*keys, *ordered]), _STATUS)


def _by_hash(known: DataFrame, rows: int) -> bool:
    """Whether a table of the stored hashes fits in a task, which spares sorting both sides. Few
    are left to Spark: it can send them to all executors instead."""
    partitions = int(known.sparkSession.conf.get("spark.sql.shuffle.partitions") or 200)
    return rows > _FEW_ROWS and rows / partitions <= _TASK_ROWS


def _same(keys: Sequence[str], other: str) -> Column:
    """Whether identities are the same. Spark joins by the first key alone, for which it has a fast
    table; the second, which it must not take for another key of the join, tells apart what meets.
    """
    same = F.col(f"mine.{_KEY}") == F.col(f"{other}.{_KEY}")
    for name in keys[1:]:
        same = same & (F.col(f"mine.{name}").bitwiseXOR(F.col(f"{other}.{name}")) == 0)
    return same


def _narrow(
    source: SourceRows, spec: TypeSpec, keys: Sequence[str], order_by: str | None, *, sift: bool
) -> DataFrame:
    """Hashes of the source's rows."""
    hashes = _source_hashes(source, spec, keys, sift=sift)
    if order_by is not None:
        hashes[_ORDER] = source.columns[order_by]
    narrow = source.frame.select(*(column.alias(name) for name, column in hashes.items()))
    if order_by is None:
        return narrow
    # Of the rows of one identity those with the greatest value stay; nulls are the least.
    newest = F.max(_ORDER).over(Window.partitionBy(*keys))
    return narrow.withColumn(_NEWEST, newest)


def _latest(
    stored: DataFrame, spec: TypeSpec, keys: Sequence[str], *, unique: bool, order_by: str | None
) -> DataFrame:
    names = [*spec.identity, *(f.name for f in spec.fields)]
    columns = {name: F.col(quoted(name)) for name in names}
    hashes = _hashes(spec, columns, keys)
    if order_by is not None:
        hashes[_ORDER] = columns[order_by]
    hashed = stored.select(COMMIT, *(column.alias(name) for name, column in hashes.items()))
    if unique:
        return hashed.drop(COMMIT)
    values = F.struct(*(name for name in hashes if name not in keys))
    newest = F.max_by(values, COMMIT).alias("__latest")
    return hashed.groupBy(*keys).agg(newest).select(*keys, "__latest.*")


def _status(order_by: str | None, *, compared: bool) -> Column:
    """The number of a row's status; `compared`: what is stored stands beside it."""

    def is_(status: str) -> Column:
        return F.lit(_STATUSES.index(status))

    status = F.when(F.col(f"mine.{_KEY}").isNull(), is_("bad"))
    ours, theirs = F.col(f"mine.{_ORDER}"), F.col(f"known.{_ORDER}")
    if order_by is not None:
        status = status.when(~ours.eqNullSafe(F.col(_NEWEST)), is_("duplicates"))
    if not compared:
        return status.otherwise(is_("inserted"))
    status = status.when(F.col(f"known.{_KEY}").isNull(), is_("inserted"))
    if order_by is not None:
        older = theirs.isNotNull() & (ours.isNull() | (ours < theirs))
        status = status.when(older, is_("stale"))
    same = F.col(f"mine.{_CONTENT}") == F.col(f"known.{_CONTENT}")
    return status.when(same, is_("unchanged")).otherwise(is_("updated"))


def _is(*statuses: str) -> Column:
    return F.col(_STATUS).isin(*(_STATUSES.index(status) for status in statuses))


def _chosen(
    source: SourceRows,
    spec: TypeSpec,
    changed: DataFrame,
    keys: Sequence[str],
    order_by: str | None,
    *,
    some_bad: bool,
) -> DataFrame:
    """The whole rows of what differs, and every bad one."""
    names = [quoted(name) for name in source.frame.columns]
    hashes = _source_hashes(source, spec, keys, sift=some_bad)
    same = _same(keys, "changed")
    if order_by is not None:
        hashes[_ORDER] = source.columns[order_by]
        same = same & F.col(f"mine.{_ORDER}").eqNullSafe(F.col(f"changed.{_ORDER}"))
    keyed = source.frame.select("*", *(column.alias(name) for name, column in hashes.items()))
    mine, bad = keyed.alias("mine"), F.col(f"mine.{_KEY}").isNull()
    joined = mine.join(changed.alias("changed"), same, "left" if some_bad else "inner")
    if some_bad:
        joined = joined.filter(bad | F.col(INSERT).isNotNull())
    if order_by is not None:
        # One row said twice is one row, except that each bad one is to be seen.
        each = F.when(bad, F.monotonically_increasing_id()).alias("__each")
        said = [f"mine.{name}" for name in [*keys, _CONTENT]]
        kept = joined.select(*(f"mine.{name}" for name in names), *said, INSERT, each)
        return kept.dropDuplicates([*keys, _CONTENT, "__each"]).select(*names, INSERT)
    return joined.select(*(f"mine.{name}" for name in names), INSERT)


def _source_hashes(
    source: SourceRows, spec: TypeSpec, keys: Sequence[str], *, sift: bool
) -> dict[str, Column]:
    """Without a key where a row cannot be written: such a one matches nothing, whatever its
    identity, so that a good one beside it is judged alone."""
    hashes = _hashes(spec, source.columns, keys)
    if sift:
        hashes[_KEY] = F.when(~cannot_be_written(source, spec), hashes[_KEY])
    return hashes


def _hashes(
    spec: TypeSpec, columns: Mapping[str, Column], keys: Sequence[str]
) -> dict[str, Column]:
    """By name: the keys, and the hash of identity and fields."""
    identity = [columns[name] for name in spec.identity]
    fields = [f for f in spec.fields if f.name != spec.primary_key]  # which is the identity
    nulls = _null_bits([columns[f.name] for f in fields if f.nullable])
    whole = F.xxhash64(*nulls, *identity, *(columns[f.name] for f in fields))
    made = {_KEY: F.xxhash64(*identity), _KEYS[1]: F.xxhash64(F.lit(1), *identity)}
    return {name: made[name] for name in keys} | {_CONTENT: whole}


def _null_bits(columns: Sequence[Column]) -> list[Column]:
    """Hashing passes over nulls as if they were not there: say where they are."""
    made = []
    for start in range(0, len(columns), _BITS):
        bits = F.lit(0).cast("bigint")
        for place, column in enumerate(columns[start : start + _BITS]):
            bits = bits + F.when(column.isNull(), 1 << place).otherwise(0)
        made.append(bits)
    return made
