"""From a source's rows to rows of a type: drift, condition, transform, expressions, distinct.

Everything is lazy: the result is a plan that the writer runs. Rows that the source itself spoils
(a line with too many values, a value that is not of its declared type) come through with their
reasons, whatever the condition says, so that the writer can stop at them or set them aside.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

from jobs.boundary import spark_said
from jobs.drift import as_found, settle
from jobs.orders import IngestOrder
from jobs.sources import Opened, declared_schema, open_source
from storage_engine.errors import ConfigurationError
from storage_engine.model.spec import TypeSpec
from storage_engine.spark.schema import quoted
from storage_engine.spark.staging import REASONS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """Rows ready for the writer, and what had drifted in their source."""

    frame: DataFrame
    drift: tuple[str, ...] = ()


def prepare(spark: SparkSession, order: IngestOrder, spec: TypeSpec) -> Prepared:
    """The rows that an order asks to write. Raises ConfigurationError when an expression or the
    transform is wrong, ValidationError when the source has drifted and that is to fail."""
    return mapped(open_source(spark, order.source), order, spec)


def mapped(opened: Opened, order: IngestOrder, spec: TypeSpec) -> Prepared:
    declared = declared_schema(order.source)
    if declared is None:
        settled = as_found(opened.frame)
    else:
        settled = settle(
            opened.frame,
            declared,
            order.drift,
            options=order.source.options,
            textual=opened.textual,
            carry_on=order.on_bad_rows == "quarantine",
        )
    frame = settled.frame
    if order.where is not None:
        frame = _where(frame, order.where)
    if order.transform is not None:
        frame = _transformed(frame, order.transform)
    frame = _projected(frame, order, spec)
    return Prepared(frame.distinct() if order.distinct else frame, settled.found)


def _where(frame: DataFrame, condition: str) -> DataFrame:
    def filtered() -> DataFrame:
        holds = F.expr(condition)
        found = frame.filter(holds | _spoiled() if REASONS in frame.columns else holds)
        return _analysed(found)

    return _stated("where", condition, filtered)


def _transformed(frame: DataFrame, name: str) -> DataFrame:
    """The function sees rows that are whole; spoiled ones go around it."""
    function = _function(name)
    if REASONS not in frame.columns:
        return _result(name, function(frame))
    made = _result(name, function(frame.filter(~_spoiled()).drop(REASONS)))
    types = {field.name: field.dataType for field in frame.schema.fields}
    around = [
        (F.col(quoted(f.name)) if types.get(f.name) == f.dataType else F.lit(None))
        .cast(f.dataType)
        .alias(f.name)
        for f in made.schema.fields
    ]
    whole = made.withColumn(REASONS, F.array().cast("array<string>"))
    return whole.unionByName(frame.filter(_spoiled()).select(*around, REASONS))


def _projected(frame: DataFrame, order: IngestOrder, spec: TypeSpec) -> DataFrame:
    """The type's columns. Without a mapping all columns are passed on: the writer then says which
    of them the type does not have."""
    if not order.columns:
        return frame
    present = set(frame.columns)
    taken = {name: quoted(name) for name in columns_of(spec) if name in present}
    unknown = [name for name in order.columns if name not in columns_of(spec)]
    if unknown:
        raise ConfigurationError(
            f"columns: {spec.name} has no column {', '.join(unknown)}; it has "
            f"{', '.join(columns_of(spec))}"
        )
    taken |= order.columns
    selected = [
        _stated(f"columns.{name}", sql, partial(_valid, frame, sql)).alias(name)
        for name, sql in taken.items()
    ]
    kept = [F.col(REASONS)] if REASONS in present else []
    return frame.select(*selected, *kept)


def columns_of(spec: TypeSpec) -> list[str]:
    """The columns by which rows of a type are written."""
    keys: list[str] = []
    if spec.kind == "relation":
        keys = ["left_key", "right_key", *([spec.instance_key] if spec.instance_key else [])]
    return keys + [field.name for field in spec.fields]


def _valid(frame: DataFrame, sql: str) -> Column:
    expression = F.expr(sql)
    _analysed(frame.select(expression.alias("value")))
    return expression


def _analysed(frame: DataFrame) -> DataFrame:
    frame.schema  # noqa: B018 - Spark Connect looks at a plan only when it is asked something
    return frame


def _stated(member: str, sql: str, work: Callable[[], T]) -> T:
    try:
        return work()
    except AnalysisException as error:
        said = f"{member}: {sql!r} cannot be evaluated: {spark_said(error)}"
        raise ConfigurationError(said) from error


def _function(name: str) -> Callable[[DataFrame], Any]:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"transform {name}: {error}") from error
    if not callable(found):
        raise ConfigurationError(f"transform {name}: is not a function")
    return found  # type: ignore[no-any-return]


def _result(name: str, made: Any) -> DataFrame:
    if not hasattr(made, "unionByName"):
        raise ConfigurationError(f"transform {name}: returned {made!r}, not a DataFrame")
    return made  # type: ignore[no-any-return]


def _spoiled() -> Column:
    return F.size(F.col(REASONS)) > 0
