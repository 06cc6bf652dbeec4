"""A source compared with the columns that it was declared to have.

Columns that were added, are missing or hold something else than declared are found, reported, and
dealt with by the order's policy. What comes out has exactly the declared columns and types. Where
single rows can be spoiled it has `REASONS` beside them: why a row cannot be taken, empty for all
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
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

from jobs.orders import DRIFTED, DriftPolicy
from jobs.zipped import MALFORMED
from storage_engine.errors import ValidationError
from storage_engine.spark.schema import quoted
from storage_engine.spark.staging import REASONS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_FLOATS = (FloatType, DoubleType)


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
            said = f"{DRIFTED}{name} is not {field.dataType.simpleString()}"
            misfits[said] = source.isNotNull() & value.isNull()
    if policy.retyped == "ignore" or (policy.retyped == "fail" and carry_on):
        counted = _counted(frame, misfits)
        found += counted
        if counted and policy.retyped == "fail":
            raise _refused(counted)
    else:
        reasons += [F.when(misfit, F.lit(said)) for said, misfit in misfits.items()]
    return Settled(frame.select(*taken, *_reasons(frame, reasons)), tuple(found))


def as_found(frame: DataFrame) -> Settled:
    """A source of which nothing was declared."""
    kept = [F.col(quoted(name)) for name in frame.columns if name != MALFORMED]
    return Settled(frame.select(*kept, *_reasons(frame, [])))


def _counted(frame: DataFrame, misfits: Mapping[str, Column]) -> list[str]:
    """How many values are not of their declared type, in one pass."""
    if not misfits:
        return []
    counts = frame.agg(*(F.count(F.when(misfit, 1)) for misfit in misfits.values())).first()
    assert counts is not None
    return [f"{said} in {n} rows" for said, n in zip(misfits, counts, strict=True) if n]


def _refused(drifts: Sequence[str]) -> ValidationError:
    return ValidationError(
        f"the source is not as declared: {'; '.join(drifts)}. Nothing was written: correct the "
        "source or its schema, or declare drift as ignore or quarantine"
    )


def _reasons(frame: DataFrame, reasons: list[Column]) -> list[Column]:
    if MALFORMED in frame.columns:
        broken = F.col(MALFORMED).isNotNull()
        reasons = [
            *reasons,
            F.when(broken, F.lit("line is malformed")),
        ]
    return [F.array_compact(F.array(*reasons)).alias(REASONS)] if reasons else []


def _added(field: StructField) -> Column:
    present = F.col(quoted(field.name)).isNotNull()
    return F.when(present, F.lit(f"{DRIFTED}{field.name} is not declared"))


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
            return F.try_to_date(source, options["dateFormat"])
        case TimestampType() if "timestampFormat" in options:
            return F.try_to_timestamp(source, F.lit(options["timestampFormat"]))
        case BinaryType():
            return F.encode(source, "UTF-8")
        case ArrayType() | StructType() | MapType():
            return F.from_json(source, declared.simpleString())
        case _:
            return source.try_cast(declared)
