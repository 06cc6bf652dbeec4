"""A source compared with the columns that it was declared to have.

Columns that were added, are missing or hold something else than declared are found, reported, and
dealt with by the order's policy. What comes out has exactly the declared columns and types. Where
single rows can be spoiled it has `REASONS` beside them: why a row cannot be taken, empty for all
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.errors import ParseException
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from jobs.orders import DriftPolicy, Source
from jobs.zipped import MALFORMED
from storage_engine.errors import ConfigurationError, ValidationError
from storage_engine.spark.quality import REASONS, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_FLOATS = (FloatType, DoubleType)


@dataclass(frozen=True)
class Settled:
    """What a source is taken for. `found` is what drifted, one sentence each."""

    frame: DataFrame
    found: tuple[str, ...] = ()


def declared_schema(source: Source) -> StructType | None:
    """The declared columns; ConfigurationError when the text is no schema."""
    if source.schema is None:
        return None
    try:
        parsed = DataType.fromDDL(source.schema)
    except ParseException as error:
        raise _no_schema(source.schema, " ".join(str(error).split())) from error
    if not isinstance(parsed, StructType) or not parsed.fields:
        raise _no_schema(source.schema, "it names no columns")
    return parsed


def settle(
    frame: DataFrame,
    declared: StructType,
    policy: DriftPolicy,
    *,
    options: Mapping[str, str],
    textual: bool,
) -> Settled:
    """The frame as declared. Raises ValidationError when the policy is to fail and the columns
    themselves have drifted; values of text sources are looked at row by row, when they are read.
    """
    columns = {field.name: field for field in frame.schema.fields if field.name != MALFORMED}
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
    found = [_say(case, field, columns) for case, fields in drifts.items() for field in fields]
    failing = [
        _say(case, field, columns)
        for case, fields in drifts.items()
        for field in fields
        if getattr(policy, case) == "fail"
    ]
    if failing:
        raise ValidationError(
            f"the source is not as declared: {'; '.join(failing)}. Nothing was written: correct "
            "the source or its schema, or declare drift as ignore or quarantine"
        )
    reasons = [_added(f) for f in drifts["added"] if policy.added == "quarantine"]
    if policy.missing == "quarantine":
        reasons += [sf.lit(f"source column {f.name} is missing") for f in drifts["missing"]]
    taken: list[Column] = []
    for name, field in wanted.items():
        if name not in columns:
            taken.append(sf.lit(None).cast(field.dataType).alias(name))
            continue
        source = sf.col(quoted(name))
        value = _converted(source, columns[name].dataType, field.dataType, options, textual)
        taken.append(value.alias(name))
        if value is not source and policy.retyped != "ignore":
            misfit = source.isNotNull() & value.isNull()
            said = f"source column {name} is not {field.dataType.simpleString()}"
            reasons.append(sf.when(misfit, sf.lit(said)))
    return Settled(frame.select(*taken, *_reasons(frame, reasons)), tuple(found))


def as_found(frame: DataFrame) -> Settled:
    """A source of which nothing was declared."""
    kept = [sf.col(quoted(name)) for name in frame.columns if name != MALFORMED]
    return Settled(frame.select(*kept, *_reasons(frame, [])))


def _reasons(frame: DataFrame, reasons: list[Column]) -> list[Column]:
    if MALFORMED in frame.columns:
        broken = sf.col(MALFORMED).isNotNull()
        reasons = [
            *reasons,
            sf.when(broken, sf.lit("line has more or fewer values than the header")),
        ]
    return [sf.array_compact(sf.array(*reasons)).alias(REASONS)] if reasons else []


def _added(field: StructField) -> Column:
    present = sf.col(quoted(field.name)).isNotNull()
    return sf.when(present, sf.lit(f"source column {field.name} is not declared"))


def _say(case: str, field: StructField, columns: Mapping[str, StructField]) -> str:
    kind = field.dataType.simpleString()
    if case == "retyped":
        return f"column {field.name} is {columns[field.name].dataType.simpleString()}, not {kind}"
    return f"column {field.name} ({kind}) is {case}"


def _is(found: DataType, declared: DataType, textual: bool) -> bool:
    """Whether such values are of the declared type, or lose nothing by becoming so."""
    if textual and isinstance(found, StringType):
        return True  # each value is looked at
    for family in (_INTEGERS, _FLOATS):
        if isinstance(found, family) and isinstance(declared, family):
            return family.index(type(found)) <= family.index(type(declared))
    return found.simpleString() == declared.simpleString()


def _converted(
    source: Column,
    found: DataType,
    declared: DataType,
    options: Mapping[str, str],
    textual: bool,
) -> Column:
    """A value of the declared type, null where there is none."""
    if found.simpleString() == declared.simpleString():
        return source
    if not textual or not isinstance(found, StringType):
        return source.try_cast(declared)
    match declared:
        case DateType() if "dateFormat" in options:
            return sf.try_to_date(source, options["dateFormat"])
        case TimestampType() if "timestampFormat" in options:
            return sf.try_to_timestamp(source, sf.lit(options["timestampFormat"]))
        case BinaryType():
            return sf.encode(source, "UTF-8")
        case ArrayType() | StructType() | MapType():
            return sf.from_json(source, declared.simpleString())
        case _:
            return source.try_cast(declared)


def _no_schema(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"source.schema {text!r} is not a schema such as 'id STRING, seats BIGINT': {why}"
    )
