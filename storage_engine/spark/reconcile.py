"""Which rows of a source are new, changed, older than what is stored, or nothing new.

Only hashes are compared; whole rows follow in a second reading of the source, and only those that
differ. Identities are matched by 128 bits, because each meets all others; the content of a row
meets only the stored one of its identity, for which 64 bits will do (one change in 10**19 would be
missed). Hashing passes over nulls, so a bit for each column that can be null tells them apart. Rows
that cannot be written take no part in the comparison: each goes on to staging, which says why.

The driver joins the hashes where they are few enough for it (`hash_tables`), else Spark does. Of a
small source the identities are brought along, and only the stored rows that these meet are compared
(`increments`).

A source that is a full extract also tells what it lacks: stored identities that none of its rows
has, bad, older and repeated ones included. That is told by identity alone, and only of rows that
are to be marked (`open_rows`); the latest rows of these identities are read again for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from storage_engine.model.spec import TypeSpec
from storage_engine.spark.hash_tables import absent_keys, brought, compare_hashes
from storage_engine.spark.increments import KeyLookup
from storage_engine.spark.schema import (
    COMMIT_ID,
    SourceRows,
    cannot_be_written,
    given_identity,
    quoted,
)
from storage_engine.spark.staged_parts import INSERT, REASONS
from storage_engine.spark.tallies import LIMIT

_BROADCAST_ROWS = 2_000_000  # identities: some 100 MB in an executor
_FEW_ROWS = 100_000
_TASK_ROWS = 2_000_000  # some 150 MB
_KEYS = ["__key", "__key2"]
_CONTENT = "__content"
_ORDER = "__order"
_NEWEST = "__newest"
_STATUS = "__status"
_SEEN = "__seen"  # the first key, of bad rows too; null where a row does not tell its identity
_OPEN = "__open"  # of a stored row: it is to be marked where the source lacks it
_BUCKET = "__bucket"  # what a row is counted under
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
class AbsentRows:
    """Stored rows that the source lacks, of those that are open to be marked."""

    frame: DataFrame | None  # their latest versions, in the row schema; None: the source has all
    count: int = 0
    of: int = 0
    untold: int = 0  # rows of the source that do not tell their identity
    cached: DataFrame | None = None


@dataclass(frozen=True)
class Reconciled:
    """The rows to stage, with a column that tells inserts; `cached` is for whoever stages them to
    unpersist."""

    frame: DataFrame | None  # None: nothing differs
    counts: Counts
    identities: int = 0  # that differ: the frame has a row of each, at least, and every bad row
    cached: DataFrame | None = None
    absent: AbsentRows = AbsentRows(None)
    unchanged_by: Mapping[str, int] | None = None  # None: not counted, or too many values
    bytes_read: int | None = None  # of stored files; None: all that was asked for


@dataclass(frozen=True)
class _Judged:
    """For each status the rows, and the identities that they are told apart by; and of those that
    differ the keys, with a column that tells inserts."""

    figures: Mapping[str, tuple[int, int]]
    changed: DataFrame
    cached: DataFrame | None = None
    absent: _AbsentKeys | None = None
    unchanged_by: Mapping[str, int] | None = None


@dataclass(frozen=True)
class _AbsentKeys:
    keys: DataFrame
    count: int
    of: int
    untold: int
    cached: DataFrame | None = None


@dataclass(frozen=True)
class StoredRows:
    """All versions that a source is compared with."""

    read: Callable[[], DataFrame]  # called where all of them are needed: naming files takes time
    count: int
    unique: bool  # no identity is in it twice
    in_driver: bool  # both sides are little enough to be compared there


def reconcile(
    source: SourceRows,
    stored: StoredRows | None,
    spec: TypeSpec,
    *,
    order_by: str | None,
    sift: bool = True,
    open_rows: Column | None = None,
    count_by: Column | None = None,
    look_up: KeyLookup | None = None,
) -> Reconciled:
    """Compare with `stored` (None: there is nothing). `sift`: keep rows apart that cannot be
    written. Where one stops the write that is spared: it differs from all that is stored, so
    staging gets to see it. `open_rows`: which of the stored rows are to be told of where the source
    lacks them. `count_by`: what rows are counted under. `look_up`: finds the stored rows of some
    identities; `stored` is read where these are many."""
    sift = sift or order_by is not None or REASONS in source.frame.columns
    seen = open_rows is not None
    narrow = _narrow(
        source, spec, order_by, sift=sift, seen=seen, count_by=count_by, whole=look_up is not None
    )
    mine = met = None
    if look_up is not None:
        mine = brought(narrow)
        met = look_up(_given_rows(mine, spec)) if mine is not None else None
        narrow = narrow.drop(*_given(spec).values())
    if mine is not None and met is not None:
        stored = StoredRows(met.rows, met.count, met.unique, in_driver=True)
        mine = mine.drop_columns(list(_given(spec).values()))
    else:
        mine = None
    versions = stored.read() if stored is not None else None
    hashed = _hashed(versions, spec, order_by, open_rows) if versions is not None else None
    judged = None
    if stored is not None and hashed is not None and stored.in_driver and order_by is None:
        judged = _by_driver(narrow, hashed, mine, unique=stored.unique, seen=seen)
    if judged is None:
        if mine is not None:  # it is not read again
            narrow = narrow.sparkSession.createDataFrame(mine, narrow.schema)
        judged = _by_spark(narrow, hashed, order_by, stored)
    absent = AbsentRows(None)
    if seen and stored is not None and versions is not None and hashed is not None:
        keys = judged.absent or _absent_by_spark(narrow, hashed)
        absent = _absent_rows(versions, spec, keys, unique=stored.unique)
    differing = _differing(source, spec, judged, order_by)
    return replace(
        differing,
        absent=absent,
        unchanged_by=judged.unchanged_by,
        bytes_read=met.bytes_read if met is not None else None,
    )


def _differing(
    source: SourceRows, spec: TypeSpec, judged: _Judged, order_by: str | None
) -> Reconciled:
    row_counts = {status: rows for status, (rows, _) in judged.figures.items()}
    counts = Counts(rows=sum(row_counts.values()), **row_counts)
    written = [judged.figures[status] for status in _WRITTEN if status in judged.figures]
    identities = sum(groups for _, groups in written)
    repeated = sum(rows - groups for rows, groups in written)
    if counts.written == 0:
        return Reconciled(None, counts, cached=judged.cached)
    said_once = order_by is None or repeated == 0
    if counts.inserted + counts.bad == counts.rows and said_once:
        # All are new: no need to look them up.
        return Reconciled(source.frame, counts, identities, judged.cached)
    changed = judged.changed
    if identities <= _BROADCAST_ROWS:
        changed = F.broadcast(changed)
    frame = _chosen(source, spec, changed, order_by, some_bad=counts.bad > 0)
    return Reconciled(frame, counts, identities, judged.cached)


def _by_driver(
    narrow: DataFrame, hashed: DataFrame, mine: pa.Table | None, *, unique: bool, seen: bool
) -> _Judged | None:
    """None where there is more of it than was expected. `mine`: what is in `narrow`, if at hand."""
    theirs = brought(hashed.drop(COMMIT_ID) if unique else hashed)
    if mine is None and theirs is not None:
        mine = brought(narrow)
    if theirs is None or mine is None:
        return None
    commit = None if unique else COMMIT_ID
    bucket = _BUCKET if _BUCKET in mine.column_names else None
    verdicts = compare_hashes(
        mine, theirs, _KEYS, _CONTENT, _STATUSES, commit=commit, bucket=bucket
    )
    totals = verdicts.group_by("status").aggregate([("n", "sum"), ("n", "count")])
    figures = {
        _STATUSES[row["status"]]: (row["n_sum"], row["n_count"]) for row in totals.to_pylist()
    }
    numbers = [_STATUSES.index(status) for status in _WRITTEN]
    differing = verdicts.filter(pc.is_in(verdicts.column("status"), pa.array(numbers)))
    new = pc.equal(differing.column("status"), _STATUSES.index("inserted"))
    keys = differing.select(_KEYS).append_column(INSERT, new)
    schema = f"{', '.join(f'{key} bigint' for key in _KEYS)}, {INSERT} boolean"
    spark = narrow.sparkSession
    absent = None
    if seen:
        lacked, of = absent_keys(mine, theirs, _KEYS, seen=_SEEN, open_rows=_OPEN, commit=commit)
        frame = spark.createDataFrame(lacked, f"{_KEYS[0]} bigint, {_KEYS[1]} bigint")
        absent = _AbsentKeys(frame, lacked.num_rows, of, mine.column(_SEEN).null_count)
    unchanged_by = None
    if bucket is not None:
        same = verdicts.filter(pc.equal(verdicts.column("status"), _STATUSES.index("unchanged")))
        unchanged_by = _bucketed(same.select([bucket, "n"]).to_pylist(), bucket)
    return _Judged(
        figures, spark.createDataFrame(keys, schema), absent=absent, unchanged_by=unchanged_by
    )


def _by_spark(
    narrow: DataFrame,
    hashed: DataFrame | None,
    order_by: str | None,
    stored: StoredRows | None,
) -> _Judged:
    ordered = [] if order_by is None else [_ORDER]
    compared = narrow.alias("mine")
    if hashed is not None and stored is not None:
        theirs = _latest(hashed, unique=stored.unique)
        if _by_hash(theirs, stored.count):
            theirs = theirs.hint("shuffle_hash")
        compared = compared.join(theirs.alias("theirs"), _same("theirs"), "left")
    status = _status(order_by, compared=hashed is not None)
    buckets = [_BUCKET] if _BUCKET in narrow.columns else []
    told = compared.select(
        *(f"mine.{n}" for n in [*_KEYS, *ordered, *buckets]), status.alias(_STATUS)
    )
    # What is not to be written is only counted: one group each, where the others have one for each
    # identity. So one pass gives both the figures and the identities.
    differs = _is(*_WRITTEN)
    judged = (
        told.groupBy(
            *(F.when(differs, F.col(n)).alias(n) for n in [*_KEYS, *ordered]),
            *(F.when(_is("unchanged"), F.col(n)).alias(n) for n in buckets),
            _STATUS,
        )
        .agg(F.count(F.lit(1)).alias("__n"))
        .persist(StorageLevel.MEMORY_AND_DISK)
    )
    totals = judged.groupBy(_STATUS).agg(F.sum("__n"), F.count(F.lit(1))).collect()
    figures = {_STATUSES[row[0]]: (int(row[1]), int(row[2])) for row in totals}
    changed = judged.filter(differs).select(*_KEYS, *ordered, _is("inserted").alias(INSERT))
    unchanged_by = None
    if buckets:
        same = judged.filter(_is("unchanged")).select(_BUCKET, F.col("__n").alias("n"))
        rows = [row.asDict() for row in same.limit(LIMIT + 1).collect()]
        unchanged_by = _bucketed(rows, _BUCKET)
    return _Judged(figures, changed, judged, unchanged_by=unchanged_by)


def _bucketed(rows: Sequence[Mapping[str, Any]], bucket: str) -> dict[str, int] | None:
    if len(rows) > LIMIT:
        return None
    return {str(row[bucket] or ""): int(row["n"]) for row in rows}


def _absent_by_spark(narrow: DataFrame, hashed: DataFrame) -> _AbsentKeys:
    """Both sides meet in one group for each identity, whichever of them has it, and how often."""
    first, second = _KEYS
    versions = hashed.select(*_KEYS, _OPEN, COMMIT_ID, F.lit(False).alias(_SEEN))
    rows = narrow.select(
        F.col(_SEEN).alias(first),
        second,
        F.lit(False).alias(_OPEN),
        F.lit(-1).cast("bigint").alias(COMMIT_ID),
        F.lit(True).alias(_SEEN),
    )
    identities = (
        versions.union(rows)
        .groupBy(*_KEYS)
        .agg(
            F.max_by(_OPEN, COMMIT_ID).alias(_OPEN),
            F.bool_or(_SEEN).alias(_SEEN),
            F.sum(F.when(F.col(first).isNull(), 1).otherwise(0)).alias("__untold"),
        )
        .filter(F.col(_OPEN) | F.col(first).isNull())
        .persist(StorageLevel.MEMORY_AND_DISK)
    )
    lacked = F.col(_OPEN) & ~F.col(_SEEN)
    figures = identities.agg(
        F.count(F.when(lacked, 1)), F.count(F.when(F.col(_OPEN), 1)), F.sum("__untold")
    ).first()
    assert figures is not None
    count, of, untold = (int(figure or 0) for figure in figures)
    return _AbsentKeys(identities.filter(lacked).select(*_KEYS), count, of, untold, identities)


def _absent_rows(
    stored: DataFrame, spec: TypeSpec, absent: _AbsentKeys, *, unique: bool
) -> AbsentRows:
    """The latest versions of what is lacking: few, so that all else is passed over first."""
    frame = None
    if absent.count:
        keys = F.broadcast(absent.keys) if absent.count <= _BROADCAST_ROWS else absent.keys
        names = [*spec.identity, *(f.name for f in spec.fields)]
        columns = {name: F.col(quoted(name)) for name in names}
        hashes = _hashes(spec, columns)
        keyed = stored.select(
            COMMIT_ID, *columns.values(), *(hashes[name].alias(name) for name in _KEYS)
        )
        frame = keyed.alias("mine").join(keys.alias("lacked"), _same("lacked"), "left_semi")
        if not unique:
            whole = F.struct(*columns.values())
            newest = F.max_by(whole, COMMIT_ID).alias("__latest")
            frame = frame.groupBy(*_KEYS).agg(newest).select("__latest.*")
        frame = frame.select(*columns.values())
    return AbsentRows(frame, absent.count, absent.of, absent.untold, absent.cached)


def _by_hash(theirs: DataFrame, rows: int) -> bool:
    """Whether a table of the stored hashes fits in a task, which spares sorting both sides. Few
    are left to Spark: it can send them to all executors instead."""
    partitions = int(theirs.sparkSession.conf.get("spark.sql.shuffle.partitions") or 200)
    return rows > _FEW_ROWS and rows / partitions <= _TASK_ROWS


def _same(other: str) -> Column:
    """Whether identities are the same. Spark joins by the first key alone, for which it has a fast
    table; the second, which it must not take for another key of the join, tells apart what meets.
    """
    first, second = _KEYS
    told_apart = F.col(f"mine.{second}").bitwiseXOR(F.col(f"{other}.{second}")) == 0
    return (F.col(f"mine.{first}") == F.col(f"{other}.{first}")) & told_apart


def _narrow(
    source: SourceRows,
    spec: TypeSpec,
    order_by: str | None,
    *,
    sift: bool,
    seen: bool,
    count_by: Column | None,
    whole: bool,
) -> DataFrame:
    """Hashes of the source's rows; `seen`: with those of the identities of bad rows; `whole`: with
    the rows themselves, identities as bytes."""
    hashes = _source_hashes(source, spec, sift=sift)
    if whole:
        for name, told_as in _given(spec).items():
            column = source.columns[name]
            hashes[told_as] = column.cast("binary") if name in spec.identity else column
    if seen:
        given = given_identity(source, spec)
        told = reduce(and_, (column.isNotNull() for column in given))
        hashes[_SEEN] = F.when(told, F.xxhash64(*given))
        hashes[_KEYS[1]] = F.xxhash64(F.lit(1), *given)
    if order_by is not None:
        hashes[_ORDER] = source.columns[order_by]
    if count_by is not None:
        hashes[_BUCKET] = count_by
    narrow = source.frame.select(*(column.alias(name) for name, column in hashes.items()))
    if order_by is None:
        return narrow
    # Of the rows of one identity those with the greatest value stay; nulls are the least.
    newest = F.max(_ORDER).over(Window.partitionBy(*_KEYS))
    return narrow.withColumn(_NEWEST, newest)


def _given(spec: TypeSpec) -> dict[str, str]:
    """By stored column: what it is called beside the hashes of a source."""
    fields = (field.name for field in spec.fields if field.name != spec.primary_key)
    return {name: f"__given_{name}" for name in (*spec.identity, *fields)}


def _given_rows(mine: pa.Table, spec: TypeSpec) -> pa.Table:
    """Those that can be stored: others match nothing."""
    given = _given(spec)
    names = [_KEYS[0], *(given[name] for name in spec.identity)]
    is_told = reduce(pc.and_, (pc.is_valid(mine.column(name)) for name in names))
    return mine.filter(is_told).select(list(given.values())).rename_columns(list(given))


def _hashed(
    stored: DataFrame, spec: TypeSpec, order_by: str | None, open_rows: Column | None
) -> DataFrame:
    """Hashes of all versions, after the commit."""
    names = [*spec.identity, *(f.name for f in spec.fields)]
    columns = {name: F.col(quoted(name)) for name in names}
    hashes = _hashes(spec, columns)
    if order_by is not None:
        hashes[_ORDER] = columns[order_by]
    if open_rows is not None:
        hashes[_OPEN] = open_rows
    return stored.select(COMMIT_ID, *(column.alias(name) for name, column in hashes.items()))


def _latest(hashed: DataFrame, *, unique: bool) -> DataFrame:
    if unique:
        return hashed.drop(COMMIT_ID)
    values = F.struct(*(name for name in hashed.columns if name not in (COMMIT_ID, *_KEYS)))
    newest = F.max_by(values, COMMIT_ID).alias("__latest")
    return hashed.groupBy(*_KEYS).agg(newest).select(*_KEYS, "__latest.*")


def _status(order_by: str | None, *, compared: bool) -> Column:
    """The number of a row's status; `compared`: what is stored stands beside it."""

    def is_(status: str) -> Column:
        return F.lit(_STATUSES.index(status))

    status = F.when(F.col(f"mine.{_KEYS[0]}").isNull(), is_("bad"))
    ours, theirs = F.col(f"mine.{_ORDER}"), F.col(f"theirs.{_ORDER}")
    if order_by is not None:
        status = status.when(~ours.eqNullSafe(F.col(_NEWEST)), is_("duplicates"))
    if not compared:
        return status.otherwise(is_("inserted"))
    status = status.when(F.col(f"theirs.{_KEYS[0]}").isNull(), is_("inserted"))
    if order_by is not None:
        older = theirs.isNotNull() & (ours.isNull() | (ours < theirs))
        status = status.when(older, is_("stale"))
    same = F.col(f"mine.{_CONTENT}") == F.col(f"theirs.{_CONTENT}")
    return status.when(same, is_("unchanged")).otherwise(is_("updated"))


def _is(*statuses: str) -> Column:
    return F.col(_STATUS).isin(*(_STATUSES.index(status) for status in statuses))


def _chosen(
    source: SourceRows,
    spec: TypeSpec,
    changed: DataFrame,
    order_by: str | None,
    *,
    some_bad: bool,
) -> DataFrame:
    """The whole rows of what differs, and every bad one."""
    names = [quoted(name) for name in source.frame.columns]
    hashes = _source_hashes(source, spec, sift=some_bad)
    same = _same("changed")
    if order_by is not None:
        hashes[_ORDER] = source.columns[order_by]
        same = same & F.col(f"mine.{_ORDER}").eqNullSafe(F.col(f"changed.{_ORDER}"))
    keyed = source.frame.select("*", *(column.alias(name) for name, column in hashes.items()))
    mine, bad = keyed.alias("mine"), F.col(f"mine.{_KEYS[0]}").isNull()
    joined = mine.join(changed.alias("changed"), same, "left" if some_bad else "inner")
    if some_bad:
        joined = joined.filter(bad | F.col(INSERT).isNotNull())
    if order_by is not None:
        # One row said twice is one row, except that each bad one is to be seen.
        each = F.when(bad, F.monotonically_increasing_id()).alias("__each")
        columns = [f"mine.{name}" for name in [*_KEYS, _CONTENT]]
        kept = joined.select(*(f"mine.{name}" for name in names), *columns, INSERT, each)
        return kept.dropDuplicates([*_KEYS, _CONTENT, "__each"]).select(*names, INSERT)
    return joined.select(*(f"mine.{name}" for name in names), INSERT)


def _source_hashes(source: SourceRows, spec: TypeSpec, *, sift: bool) -> dict[str, Column]:
    """Without a key where a row cannot be written: such a one matches nothing, whatever its
    identity, so that a good one beside it is judged alone."""
    hashes = _hashes(spec, source.columns)
    if sift:
        hashes[_KEYS[0]] = F.when(~cannot_be_written(source, spec), hashes[_KEYS[0]])
    return hashes


def _hashes(spec: TypeSpec, columns: Mapping[str, Column]) -> dict[str, Column]:
    """By name: the keys, and the content."""
    identity = [columns[name] for name in spec.identity]
    fields = [f for f in spec.fields if f.name != spec.primary_key]  # which is the identity
    nulls = _null_bits([columns[f.name] for f in fields if f.nullable])
    first, second = _KEYS
    return {
        first: F.xxhash64(*identity),
        second: F.xxhash64(F.lit(1), *identity),
        _CONTENT: F.xxhash64(*nulls, *(columns[f.name] for f in fields)),
    }


def _null_bits(columns: Sequence[Column]) -> list[Column]:
    """Hashing passes over nulls as if they were not there: say where they are. At least one value:
    a relation may have no fields at all."""
    made = []
    for start in range(0, len(columns), _BITS):
        bits = F.lit(0).cast("bigint")
        for place, column in enumerate(columns[start : start + _BITS]):
            bits = bits + F.when(column.isNull(), 1 << place).otherwise(0)
        made.append(bits)
    return made or [F.lit(0)]
