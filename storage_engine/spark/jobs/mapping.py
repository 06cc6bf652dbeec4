"""From a source's rows to rows of a type: drift, condition, transform, expressions, distinct.

With a declared schema, columns that were added, are missing or hold something else are found,
reported, and dealt with by the spec's policy; what comes out has exactly the declared columns and
types. Everything is lazy: the result is a plan that the writer runs. Rows that the source itself
spoils (a line with too many values, a value that is not of its declared type) come through with
their reasons in `REASONS`, whatever the condition says, so that the writer can stop at them or set
them aside.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from storage_engine.errors import ConfigurationError, ValidationError
from storage_engine.model.columns import columns_of
from storage_engine.model.spec import TypeSpec
from storage_engine.spark.ingest_spec import DRIFTED, DriftPolicy, IngestSpec
from storage_engine.spark.jobs.program import spark_said
from storage_engine.spark.jobs.source_lines import source_columns
from storage_engine.spark.jobs.sources import Opened, declared_schema, open_source
from storage_engine.spark.jobs.text_lines import FACTS, FAULT
from storage_engine.spark.schema import quoted
from storage_engine.spark.staged_parts import HELPERS, ORIGIN, REASONS
from storage_engine.wording import counted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_FLOATS = (FloatType, DoubleType)
# Of text, Spark would take 10:30 for a time of today, 2026 for its first day, and what follows a
# date for nothing.
_DAY = r"^\s*\d{4,}-\d{1,2}-\d{1,2}\s*$"
_MOMENT = r"^\s*\d{4,}-\d{1,2}-\d{1,2}([T ]|\s*$)"
_FINER = r"\.\d{6}\d*[1-9]"  # than microseconds, in which times are kept
_NUMBER = r"^\s*[+-]?(\d|\.|NaN|Inf|inf)[^dDfF]*$|^\s*[+-]?[Ii]nf(inity)?\s*$"


@dataclass(frozen=True)
class Settled:
    """What a source is taken for. `found` is what drifted, one sentence each."""

    frame: DataFrame
    found: tuple[str, ...] = ()


def settle(
    frame: DataFrame,
    declared: StructType,
    policy: DriftPolicy,
    *,
    options: Mapping[str, str],
    textual: bool,
    carry_on: bool,
) -> Settled:
    """The frame as declared. Raises ValidationError when something has drifted for which the
    policy is to fail.

    `carry_on`: bad rows will be set aside, not stop the write. Values of text sources are looked
    at in a pass of their own where they would be ignored (to be counted), or would stop what
    carries on; otherwise by the writer, as it reads them.
    """
    columns = {field.name: field for field in frame.schema.fields if field.name not in FACTS}
    wanted = {field.name: field for field in declared.fields}
    drifts = {
        "added": [f for name, f in columns.items() if name not in wanted],
        "missing": [f for name, f in wanted.items() if name not in columns],
        "retyped": [
            f
            for name, f in wanted.items()
            if name in columns and not _is(columns[name].dataType, f.dataType, textual)
        ],
    }
    differences = [
        _say(case, field, columns) for case, fields in drifts.items() for field in fields
    ]
    failing = [
        _say(case, field, columns)
        for case, fields in drifts.items()
        for field in fields
        if getattr(policy, case) == "fail"
    ]
    if failing:
        raise _refused(failing)
    reasons = [_added(f) for f in drifts["added"] if policy.added == "quarantine"]
    if policy.missing == "quarantine":
        reasons += [F.lit(f"{DRIFTED}{f.name} is missing") for f in drifts["missing"]]
    taken: list[Column] = []
    misfits: dict[str, Column] = {}
    for name, field in wanted.items():
        if name not in columns:
            taken.append(F.lit(None).cast(field.dataType).alias(name))
            continue
        source = F.col(quoted(name))
        value = _converted(source, columns[name].dataType, field.dataType, options, textual)
        taken.append(value.alias(name))
        if value is not source:
            reason = f"{DRIFTED}{name} is not {field.dataType.simpleString()}"
            misfits[reason] = source.isNotNull() & value.isNull()
    if policy.retyped == "ignore" or (policy.retyped == "fail" and carry_on):
        counted = _counted(frame, misfits)
        differences += counted
        if counted and policy.retyped == "fail":
            raise _refused(counted)
    else:
        reasons += [F.when(misfit, F.lit(reason)) for reason, misfit in misfits.items()]
    made = frame.select(*taken, *_told(frame, reasons, carry_on=carry_on))
    return Settled(made, tuple(differences))


def as_found(frame: DataFrame, *, carry_on: bool) -> Settled:
    """A source of which nothing was declared."""
    kept = [F.col(quoted(name)) for name in source_columns(frame)]
    return Settled(frame.select(*kept, *_told(frame, [], carry_on=carry_on)))


def _counted(frame: DataFrame, misfits: Mapping[str, Column]) -> list[str]:
    """How many values are not of their declared type, in one pass."""
    if not misfits:
        return []
    counts = frame.agg(*(F.count(F.when(misfit, 1)) for misfit in misfits.values())).first()
    assert counts is not None
    return [
        f"{reason} in {counted(n, 'row')}" for reason, n in zip(misfits, counts, strict=True) if n
    ]


def _refused(drifts: Sequence[str]) -> ValidationError:
    return ValidationError(
        f"the source is not as declared: {'; '.join(drifts)}. Nothing was written: correct the "
        "source or its schema, or declare drift as ignore or quarantine"
    )


def _told(frame: DataFrame, reasons: list[Column], *, carry_on: bool) -> list[Column]:
    """What is wrong with a row, and what it was in its source.

    The latter goes along with every row where bad ones are set aside, because any may turn out to
    be bad; else with those alone that the source spoils, for the error to show.
    """
    if FAULT in frame.columns:
        reasons = [*reasons, F.col(FAULT)]
    told = F.array_compact(F.array(*reasons)) if reasons else None
    made = [told.alias(REASONS)] if told is not None else []
    if carry_on:
        return [*made, _origin(frame).alias(ORIGIN)]
    if told is not None and FAULT in frame.columns:
        return [*made, F.when(F.size(told) > 0, _origin(frame)).alias(ORIGIN)]
    return made


def _origin(frame: DataFrame) -> Column:
    facts = [F.col(name) if name in frame.columns else F.lit(None) for name in FACTS]
    record = F.struct(*(F.col(quoted(name)) for name in source_columns(frame)))
    return F.struct(
        facts[0].cast("string").alias("file"),
        facts[1].cast("binary").alias("line"),
        facts[2].cast("string").alias("fault"),
        record.alias("record"),
    )


def _added(field: StructField) -> Column:
    present = F.col(quoted(field.name)).isNotNull()
    return F.when(present, F.lit(f"{DRIFTED}{field.name} is not declared"))


def _say(case: str, field: StructField, columns: Mapping[str, StructField]) -> str:
    kind = field.dataType.simpleString()
    if case == "retyped":
        return f"column {field.name} is {columns[field.name].dataType.simpleString()}, not {kind}"
    return f"column {field.name} ({kind}) is {case}"


def _is(actual: DataType, declared: DataType, textual: bool) -> bool:
    """Whether such values are of the declared type, or lose nothing by becoming so."""
    if textual and isinstance(actual, StringType):
        return True  # each value is looked at
    for family in (_INTEGERS, _FLOATS):
        if isinstance(actual, family) and isinstance(declared, family):
            return family.index(type(actual)) <= family.index(type(declared))
    return actual.simpleString() == declared.simpleString()


def _converted(
    source: Column,
    actual: DataType,
    declared: DataType,
    options: Mapping[str, str],
    textual: bool,
) -> Column:
    """A value of the declared type, null where there is none."""
    if actual.simpleString() == declared.simpleString():
        return source
    if not textual or not isinstance(actual, StringType):
        return source.try_cast(declared)
    match declared:
        case DateType() if "dateFormat" in options:
            return F.try_to_date(source, options["dateFormat"])
        case DateType():
            return F.when(source.rlike(_DAY), source.try_cast(declared))
        case TimestampType() if "timestampFormat" in options:
            return F.try_to_timestamp(source, F.lit(options["timestampFormat"]))
        case TimestampType() | TimestampNTZType():
            is_one = source.rlike(_MOMENT) & ~source.rlike(_FINER)
            return F.when(is_one, source.try_cast(declared))
        case FloatType() | DoubleType():
            return F.when(source.rlike(_NUMBER), source.try_cast(declared))
        case BinaryType():
            return F.encode(source, "UTF-8")
        case DecimalType():
            # Spark would round; zeros at the end are no digits that are lost.
            whole = rf"^\s*[+-]?[0-9]*(\.[0-9]{{0,{declared.scale}}}0*)?\s*$"
            return F.when(source.rlike(whole), source.try_cast(declared))
        case ArrayType() | StructType() | MapType():
            return F.from_json(source, declared.simpleString())
        case _:
            return source.try_cast(declared)


T = TypeVar("T")


@dataclass(frozen=True)
class MappedRows:
    """Rows ready for the writer, and what had drifted in their source."""

    frame: DataFrame
    drift: tuple[str, ...] = ()
    outside: int = 0  # rows of the source that the spec asks to count


def prepare(spark: SparkSession, spec: IngestSpec, type_spec: TypeSpec) -> MappedRows:
    """The rows that an order asks to write. Raises ConfigurationError when an expression or the
    transform is wrong, ValidationError when the source has drifted and that is to fail."""
    return mapped(open_source(spark, spec.source), spec, type_spec)


def mapped(opened: Opened, spec: IngestSpec, type_spec: TypeSpec) -> MappedRows:
    declared = declared_schema(spec.source)
    if declared is None:
        settled = as_found(opened.frame, carry_on=spec.on_bad_rows == "quarantine")
    else:
        settled = settle(
            opened.frame,
            declared,
            spec.drift,
            options=spec.source.options,
            textual=opened.textual,
            carry_on=spec.on_bad_rows == "quarantine",
        )
    frame = settled.frame
    outside = _count_of(frame, spec.outside) if spec.outside is not None else 0
    if spec.where is not None:
        frame = _where(frame, spec.where)
    if spec.transform is not None:
        frame = _transformed(frame, spec.transform)
    frame = _projected(frame, spec, type_spec)
    return MappedRows(_distinct(frame) if spec.distinct else frame, settled.found, outside)


def _count_of(frame: DataFrame, condition: str) -> int:
    """Rows for which a condition holds; those that the source spoils are told of otherwise."""

    def counted() -> int:
        holds = F.expr(condition)
        return frame.filter(holds & ~_spoiled() if REASONS in frame.columns else holds).count()

    return _stated("outside", condition, counted)


def _distinct(frame: DataFrame) -> DataFrame:
    """Equal rows are one, wherever they came from; lines that cannot be read are each their own,
    as far as they differ."""
    if ORIGIN not in frame.columns:
        return frame.distinct()
    names = [name for name in frame.columns if name != ORIGIN]
    if REASONS not in frame.columns:
        return frame.dropDuplicates(names)
    raw = F.when(_spoiled(), F.xxhash64(f"{ORIGIN}.line", f"{ORIGIN}.record"))
    marked = frame.withColumn("__raw", raw)
    return marked.dropDuplicates([*names, "__raw"]).drop("__raw")


def _where(frame: DataFrame, condition: str) -> DataFrame:
    def filtered() -> DataFrame:
        holds = F.expr(condition)
        kept = frame.filter(holds | _spoiled() if REASONS in frame.columns else holds)
        return _analysed(kept)

    return _stated("where", condition, filtered)


def _transformed(frame: DataFrame, name: str) -> DataFrame:
    """The function sees rows that are whole; spoiled ones go around it."""
    function = _function(name)
    if REASONS not in frame.columns:
        return _result(name, function(frame.drop(ORIGIN)))
    made = _result(name, function(frame.filter(~_spoiled()).drop(*HELPERS)))
    types = {field.name: field.dataType for field in frame.schema.fields}
    around = [
        (F.col(quoted(f.name)) if types.get(f.name) == f.dataType else F.lit(None))
        .cast(f.dataType)
        .alias(f.name)
        for f in made.schema.fields
    ]
    whole = made.withColumn(REASONS, F.array().cast("array<string>"))
    spoiled = frame.filter(_spoiled()).select(*around, REASONS, ORIGIN)
    return whole.unionByName(spoiled, allowMissingColumns=True)


def _projected(frame: DataFrame, spec: IngestSpec, type_spec: TypeSpec) -> DataFrame:
    """The type's columns. Without a mapping all columns are passed on: the writer then says which
    of them the type does not have."""
    if not spec.columns:
        return frame
    present = set(frame.columns)
    taken = {name: quoted(name) for name in columns_of(type_spec) if name in present}
    unknown = [name for name in spec.columns if name not in columns_of(type_spec)]
    if unknown:
        raise ConfigurationError(
            f"columns: {type_spec.name} has no column {', '.join(unknown)}; it has "
            f"{', '.join(columns_of(type_spec))}"
        )
    _check_case(source_names=present, unmapped=set(columns_of(type_spec)) - {*taken, *spec.columns})
    taken |= spec.columns
    selected = [
        _stated(f"columns.{name}", sql, partial(_valid, frame, sql)).alias(name)
        for name, sql in taken.items()
    ]
    return frame.select(*selected, *(F.col(name) for name in (REASONS, ORIGIN) if name in present))


def _check_case(source_names: set[str], unmapped: set[str]) -> None:
    """A column that differs from a field in case alone would be left out without a word."""
    names = {name.lower(): name for name in source_names - {*HELPERS}}
    near = [(name, names[name.lower()]) for name in sorted(unmapped) if name.lower() in names]
    if near:
        differs = "; ".join(
            f"the source has {other!r} where the type has {n!r}" for n, other in near
        )
        name, other = near[0]
        raise ValidationError(
            f"columns: {differs}. Say which is meant: {name}={other} takes it, {name}=null does not"
        )


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
        message = f"{member}: {sql!r} cannot be evaluated: {spark_said(error)}"
        raise ConfigurationError(message) from error


def _function(name: str) -> Callable[[DataFrame], Any]:
    module, _, function = name.partition(":")
    try:
        transform = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"transform {name}: {error}") from error
    if not callable(transform):
        raise ConfigurationError(f"transform {name}: is not a function")
    return transform  # type: ignore[no-any-return]


def _result(name: str, made: Any) -> DataFrame:
    if not hasattr(made, "unionByName"):
        raise ConfigurationError(f"transform {name}: returned {made!r}, not a DataFrame")
    return made  # type: ignore[no-any-return]


def _spoiled() -> Column:
    return F.size(F.col(REASONS)) > 0
