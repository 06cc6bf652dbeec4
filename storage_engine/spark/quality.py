"""Evaluates expectations on a DataFrame: each row learns which of them it breaks.

Conditions on single rows and uniqueness need one pass; each referential expectation adds a join
with the keys of its target type, as they are stored when the frame is evaluated. Nothing is
decided here: who writes stops at broken rows or sets them aside.

A row of an entity type that refers to its own type may refer to another row of the input. Where bad
rows are set aside, those that refer to one of them must follow, and those that refer to these
(`without_dangling`): references are brought to the driver for that, as hashes of 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DecimalType, NumericType, StringType
from pyspark.sql.window import Window

from storage_engine.errors import ConfigurationError, ValidationError
from storage_engine.model.expectations import (
    Expectation,
    InRange,
    Matches,
    NotNull,
    RefersTo,
    Unique,
)
from storage_engine.model.spec import TypeSpec
from storage_engine.spark.hash_tables import brought
from storage_engine.spark.schema import CARRIED, cannot_be_written, quoted, source_rows
from storage_engine.spark.staged_parts import REASONS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from storage_engine.runtime.session import Session


def evaluate(
    df: DataFrame, expectations: Sequence[Expectation], spec: TypeSpec, session: Session
) -> DataFrame:
    """The frame with an array of texts, REASONS: the expectations that the row breaks, after any
    reasons that it came with. Raises ValidationError when an expectation does not fit the
    columns.
    """
    _check(df, expectations, spec)
    frame = df
    broken: list[Column] = []
    for number, expectation in enumerate(expectations):
        if isinstance(expectation, RefersTo):
            frame, fails = _refers(frame, expectation, f"__found_{number}", spec, session)
        else:
            fails = _breaks(expectation, frame)
        broken.append(F.when(fails, F.lit(expectation.describe())))
    given = F.col(REASONS) if REASONS in df.columns else F.array().cast("array<string>")
    reasons = F.array_compact(F.array(*broken)) if broken else F.array().cast("array<string>")
    kept = [F.col(quoted(name)) for name in df.columns if name != REASONS]
    return frame.select(*kept, F.concat(given, reasons).alias(REASONS))


def own_references(expectations: Sequence[Expectation], spec: TypeSpec) -> list[RefersTo]:
    """Those by which rows of a type refer to others of the same."""
    return [
        each
        for each in expectations
        if isinstance(each, RefersTo) and spec.ref == ("entity", each.type_name)
    ]


def without_dangling(
    frame: DataFrame, expectations: Sequence[Expectation], spec: TypeSpec, session: Session
) -> DataFrame:
    """An evaluated frame, whose bad rows will be set aside: rows that refer to one which is then
    not there, stored or in the input, break the expectation too."""
    references = own_references(expectations, spec)
    if not references:
        return frame
    source = source_rows(frame, spec, compared=True)
    (key,) = spec.identity
    good = source.frame.filter(~cannot_be_written(source, spec)).select(
        F.xxhash64(source.columns[key]).alias("key"),
        *(_hash(source.columns[each.column]).alias(f"ref{n}") for n, each in enumerate(references)),
    )
    stored = _stored_keys(frame, references[0], session)
    if (
        stored is not None
    ):  # what is stored stays, whatever becomes of the row that would replace it
        stored_keys = stored.select(F.xxhash64("key").alias("stored")).distinct()
        for number in range(len(references)):
            name = f"ref{number}"
            joined = good.join(stored_keys, F.col(name) == F.col("stored"), "left")
            missing = F.when(F.col("stored").isNull(), F.col(name)).alias(name)
            good = joined.select(*(missing if n == name else F.col(n) for n in good.columns))
    table = brought(good)
    if table is None:
        raise ConfigurationError(
            f"{spec.name} refers to itself, and its references are more than Spark brings to the "
            "driver, which has to follow them where bad rows are set aside: raise "
            "spark.driver.maxResultSize (16 bytes a row), or write with on_bad_rows='fail'"
        )
    gone = _gone(table)
    if not len(gone):
        return frame
    keys = frame.sparkSession.createDataFrame(pa.table({"gone": gone}), "gone bigint")
    marked = frame
    broken: list[Column] = []
    for number, each in enumerate(references):
        mark = f"__gone_{number}"
        reference = F.xxhash64(F.col(quoted(each.column)))
        marked = marked.join(F.broadcast(keys.toDF(mark)), reference == F.col(mark), "left")
        told = F.array_contains(REASONS, each.describe())
        dangles = F.col(quoted(each.column)).isNotNull() & F.col(mark).isNotNull() & ~told
        broken.append(F.when(dangles, F.lit(each.describe())))
    kept = [F.col(quoted(name)) for name in frame.columns if name != REASONS]
    reasons = F.concat(F.col(REASONS), F.array_compact(F.array(*broken)))
    return marked.select(*kept, reasons.alias(REASONS))


def _hash(column: Column) -> Column:
    return F.when(column.isNotNull(), F.xxhash64(column))


def _gone(rows: pa.Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    """References to what is not there. A row falls with any of its references, an identity with the
    last of its rows, and what refers to it with the identity.
    """
    keys, place, left = np.unique(
        rows.column("key").to_numpy(), return_inverse=True, return_counts=True
    )
    references: list[tuple[Any, Any]] = []  # by column: rows by what they refer to, and that
    gone: list[Any] = []
    falling: list[Any] = []
    for name in rows.column_names[1:]:
        given = np.flatnonzero(rows.column(name).is_valid().to_numpy())
        targets = rows.column(name).drop_null().to_numpy()
        target = np.searchsorted(keys, targets)
        there = np.isin(targets, keys)
        gone.append(targets[~there])
        falling.append(given[~there])
        order = np.argsort(target[there], kind="stable")
        references.append((given[there][order], target[there][order]))
    stands = np.ones(rows.num_rows, dtype=bool)
    front = np.unique(np.concatenate(falling))
    while len(front):
        stands[front] = False
        np.subtract.at(left, place[front], 1)
        lost = np.unique(place[front])
        lost = lost[left[lost] == 0]
        gone.append(keys[lost])
        following = [
            referring[start:end]
            for referring, target in references
            for start, end in zip(
                np.searchsorted(target, lost, "left"),
                np.searchsorted(target, lost, "right"),
                strict=True,
            )
        ]
        reached = np.unique(np.concatenate(following)) if following else front[:0]
        front = reached[stands[reached]]
    return np.unique(np.concatenate(gone))


def _check(df: DataFrame, expectations: Sequence[Expectation], spec: TypeSpec) -> None:
    """All that does not fit, at once."""
    types = {field.name: field.dataType for field in df.schema.fields if field.name not in CARRIED}
    wrong: list[str] = []
    for expectation in expectations:
        missing = [name for name in expectation.columns if name not in types]
        if missing:
            wrong.append(f"{expectation.describe()}: there is no column {', '.join(missing)}")
        elif (why := _unfit(expectation, types)) is not None:
            wrong.append(f"{expectation.describe()}: {why}")
    if wrong:
        raise ValidationError(
            f"{spec.name}: expectations do not fit: {'; '.join(wrong)} (columns: "
            f"{', '.join(types)})",
            type=spec.name,
        )


def _unfit(expectation: Expectation, types: dict[str, DataType]) -> str | None:
    match expectation:
        case InRange(column, low, high):
            kind = types[column]
            bounds = [bound for bound in (low, high) if bound is not None]
            if isinstance(kind, NumericType) == any(isinstance(b, str) for b in bounds):
                return f"{column} is {kind.simpleString()}"
        case Matches(column) | RefersTo(column) if not isinstance(types[column], StringType):
            return f"{column} is {types[column].simpleString()}, not a text"
        case _:
            pass
    return None


def _breaks(expectation: Expectation, frame: DataFrame) -> Column:
    match expectation:
        case NotNull(column):
            return F.col(quoted(column)).isNull()
        case Unique(columns):
            keys = [F.col(quoted(column)) for column in columns]
            alike = F.count(F.lit(1)).over(Window.partitionBy(*keys))
            whole = reduce(and_, (key.isNotNull() for key in keys))
            return whole & (alike > 1)
        case InRange(column, low, high):
            value = F.col(quoted(column))
            kind = frame.schema[column].dataType
            outside = F.lit(False)
            if low is not None:
                outside |= value < _bound(low, kind)
            if high is not None:
                outside |= value > _bound(high, kind)
            return value.isNotNull() & outside
        case Matches(column, pattern):
            return ~F.rlike(F.col(quoted(column)), F.lit(rf"\A(?:{pattern})\z"))
        case _:
            raise AssertionError(expectation)


def _bound(value: Any, kind: DataType) -> Column:
    """Texts are dates, times or texts, as the column is; numbers are compared as numbers."""
    if isinstance(value, float) and isinstance(kind, DecimalType):
        return F.lit(Decimal(repr(value)))  # else decimals would be compared as floats
    return F.lit(value).cast(kind) if isinstance(value, str) else F.lit(value)


def _refers(
    frame: DataFrame, expectation: RefersTo, mark: str, spec: TypeSpec, session: Session
) -> tuple[DataFrame, Column]:
    column = F.col(quoted(expectation.column))
    keys = _stored_keys(frame, expectation, session)
    if own_references([expectation], spec) and spec.primary_key in frame.columns:
        own = frame.select(F.col(quoted(str(spec.primary_key))).alias("key"))
        keys = own if keys is None else keys.unionByName(own)
    if keys is None:
        return frame, column.isNotNull()
    stored_keys = keys.distinct().select(F.col("key").alias(f"{mark}_key"), F.lit(True).alias(mark))
    joined = frame.join(stored_keys, column == F.col(f"{mark}_key"), "left")
    return joined, column.isNotNull() & F.col(mark).isNull()


def _stored_keys(frame: DataFrame, expectation: RefersTo, session: Session) -> DataFrame | None:
    """The keys of the latest rows, as column `key`; None when the type was never written."""
    from storage_engine.spark.reader import read_type

    entity_types = {
        spec.name: spec for spec in session.repository.known_types() if spec.kind == "entity"
    }
    target = entity_types.get(expectation.type_name)
    if target is None or target.primary_key is None:
        return None
    rows = read_type(frame.sparkSession, target, session, columns=[target.primary_key])
    return rows.select(F.col(quoted(target.primary_key)).alias("key"))
