"""Marks stored rows that a full extract no longer has, in Spark, for the commit of the others.

Which rows they are is told when the source is compared with what is stored (`reconcile`); here is
what is open to be marked, when too many are missing, and the rows with their marks.

A row that is marked stays as it is until its identity comes back: then it is changed like any
other, by what the extract says of it, and fields that the extract does not name take their
defaults, so that the marks go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import and_

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from storage_engine.errors import ConfigurationError, MissingRowsError
from storage_engine.model.canonical import decode
from storage_engine.model.spec import MISSING, FieldSpec, TypeSpec
from storage_engine.spark.missing_policy import FieldMark, MissingPolicy, field_marks
from storage_engine.spark.reconcile import AbsentRows
from storage_engine.spark.schema import quoted, row_ddl, value_column
from storage_engine.spark.staged_parts import INSERT

_SHOWN = 3


@dataclass(frozen=True)
class Marking:
    """How one write marks rows: the fields, and the one moment that `now` is for all of them."""

    policy: MissingPolicy
    spec: TypeSpec
    marks: Sequence[FieldMark]
    moment: datetime

    @classmethod
    def of(cls, policy: MissingPolicy, spec: TypeSpec, moment: datetime) -> Marking | None:
        """None where rows are kept."""
        return cls(policy, spec, field_marks(policy, spec), moment) if policy.marks else None

    def open_rows(self) -> Column:
        """Which stored rows are to be marked if they are missing: in scope, and not marked yet. A
        field that takes the time has its mark once it has any value, so that it never moves."""
        marked = reduce(and_, (_has_mark(mark) for mark in self.marks))
        if self.policy.scope is None:
            return ~marked
        return F.coalesce(F.expr(self.policy.scope), F.lit(False)) & ~marked

    def marked(self, frame: DataFrame) -> DataFrame:
        """Rows in the row schema with the marks set; none of them is new."""
        values = {
            mark.field.name: value_column(mark.field, mark.at(self.moment)) for mark in self.marks
        }
        columns = [
            values[name].alias(name) if name in values else F.col(quoted(name))
            for name in frame.columns
        ]
        return frame.select(*columns, F.lit(False).alias(INSERT))

    def problem(self, absent: AbsentRows) -> MissingRowsError | None:
        """What stops the write, with examples: more are missing than may be."""
        if absent.frame is None or absent.untold or absent.count <= self.policy.allowed(absent.of):
            return None
        identity = [quoted(name) for name in self.spec.identity]
        rows = absent.frame.select(*identity).orderBy(*identity).limit(_SHOWN).collect()
        named = [tuple(part for part in row if part != "") for row in rows]
        return MissingRowsError(
            type=self.spec.name,
            missing=absent.count,
            of=absent.of,
            limit=self.policy.limit,
            examples=[parts[0] if len(parts) == 1 else parts for parts in named],
        )

    def notes(self, absent: AbsentRows) -> tuple[str, ...]:
        if not absent.untold or not absent.count:
            return ()
        return (
            f"{absent.untold} rows of the source do not tell which {self.spec.name} they are, so "
            f"none of the {absent.count} that seem to be missing was marked; put those rows right",
        )


def check_marking(policy: MissingPolicy, spec: TypeSpec, df: DataFrame) -> None:
    """Before any job: the fields and values fit the type, the scope can be asked of its rows, and
    what is in the extract is told apart from what was marked."""
    marks = field_marks(policy, spec)
    given = set(df.columns)
    if marks and all(mark.field.name not in given and _is_default(mark) for mark in marks):
        names = ", ".join(mark.field.name for mark in marks)
        raise ConfigurationError(
            f"missing.set of {spec.name}: {names} is what rows of the extract have too, as it has "
            "no such column and the default is the same. Let columns say what a row has that is "
            "there, such as active: true"
        )
    if policy.scope is not None:
        _check_scope(df.sparkSession, policy.scope, spec)


def _has_mark(mark: FieldMark) -> Column:
    column = F.col(quoted(mark.field.name))
    return column.isNotNull() if mark.is_now else column.eqNullSafe(_value(mark))


def _value(mark: FieldMark) -> Column:
    return value_column(mark.field, mark.value)


def _is_default(mark: FieldMark) -> bool:
    return not mark.is_now and mark.value == _default(mark.field)


def _default(field: FieldSpec) -> object:
    if field.default is MISSING:
        return None if field.default_factory is None else MISSING
    return decode(field.type_spec, field.default)


def with_own_names(stored: DataFrame, spec: TypeSpec) -> DataFrame:
    """Stored rows, for a scope: with their instance key under its own name too."""
    if spec.instance_key is None:
        return stored
    return stored.withColumn(spec.instance_key, F.col("instance_key"))


def _check_scope(spark: SparkSession, scope: str, spec: TypeSpec) -> None:
    from storage_engine.spark.jobs.program import spark_said

    nothing = with_own_names(spark.createDataFrame([], row_ddl(spec)), spec)
    try:
        kind = nothing.select(F.expr(scope).alias("holds")).schema.fields[0]
    except AnalysisException as error:
        raise ConfigurationError(
            f"missing.scope: {scope!r} cannot be asked of stored rows of {spec.name}: "
            f"{spark_said(error)}"
        ) from error
    if kind.dataType.simpleString() != "boolean":
        raise ConfigurationError(
            f"missing.scope: {scope!r} is {kind.dataType.simpleString()}, not a condition"
        )
