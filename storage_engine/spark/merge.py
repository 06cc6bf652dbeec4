"""Merges of branches whose changes have outgrown one machine.

Heads, conflicts, the lock and the publish are the engine's (`repository.object.merge`); what
differs is who compares. Spark joins the identities that the source has changed with what the
target has of them and with what both sides knew, and stages the rows that come. Rows in conflict
go to the driver, where the policy decides, unless it takes one side as a whole. So the result is
that of a merge without Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from storage_engine.errors import StorageBackendError
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.object.merge.bulk import LargeType, LargeVerdict, RowSet
from storage_engine.repository.object.read.files import files_of, versioned_schema
from storage_engine.repository.object.write.staged_write import PartFolder
from storage_engine.runtime import arguments
from storage_engine.runtime.branches import branches_of, merge_terms
from storage_engine.runtime.core import internals
from storage_engine.spark.driver import Cancelled, Jobs, evaluated_once
from storage_engine.spark.reader import visible
from storage_engine.spark.scans import row_columns, scan_of
from storage_engine.spark.schema import quoted
from storage_engine.spark.staged_parts import (
    INSERT,
    REPORT_DDL,
    StageTarget,
    StageTask,
    TaskReport,
    exchanged,
    taken_back,
)

if TYPE_CHECKING:
    from storage_engine.repository.object.merge import MergeReport, Policy
    from storage_engine.runtime.arguments import StoredClass
    from storage_engine.runtime.session import Session
    from storage_engine.schema.upgraders import UpgraderSource

SPARK_ABOVE = 1_000_000  # changed rows of a type
_TAKEN, _NEW = "__taken", "__new"


def merge_with_spark(
    spark: SparkSession,
    session: Session,
    source: str,
    *,
    on_conflict: Policy | Mapping[StoredClass | str, Policy] = "fail",
    upgraders: UpgraderSource | None = None,
    dry_run: bool = False,
    meta: Mapping[str, str] | None = None,
    above_rows: int = SPARK_ABOVE,
) -> MergeReport:
    """Like `Session.merge`, except that types of which the branch has changed at least `above_rows`
    rows are compared and staged by Spark. The result is the same.

    Types whose rows have to be brought up to another schema version are always compared here.
    """
    return merge_by(
        SparkMerger(lambda: spark, above_rows),
        session,
        source,
        on_conflict=on_conflict,
        upgraders=upgraders,
        dry_run=dry_run,
        meta=meta,
    )


def update_with_spark(
    spark: SparkSession,
    session: Session,
    *,
    on_conflict: Policy | Mapping[StoredClass | str, Policy] = "fail",
    upgraders: UpgraderSource | None = None,
    dry_run: bool = False,
    meta: Mapping[str, str] | None = None,
    above_rows: int = SPARK_ABOVE,
) -> MergeReport:
    """Like `Session.update_branch`, likewise."""
    return merge_by(
        SparkMerger(lambda: spark, above_rows),
        session,
        None,
        on_conflict=on_conflict,
        upgraders=upgraders,
        dry_run=dry_run,
        meta=meta,
    )


def merge_by(
    merger: SparkMerger,
    session: Session,
    source: str | None,
    *,
    on_conflict: Policy | Mapping[StoredClass | str, Policy],
    upgraders: UpgraderSource | None,
    dry_run: bool,
    meta: Mapping[str, str] | None,
) -> MergeReport:
    """A merge of the source; None: an update from the parent."""
    core = internals(session)
    operation = "merge" if source is not None else "update_branch"
    with core.use(operation):
        branches = branches_of(core.repository)
        terms = merge_terms(
            core.types,
            core.repository,
            on_conflict=on_conflict,
            upgraders=upgraders,
            metadata=arguments.texts("meta", meta),
            holder=core.settings.instance_metadata,
        )
        terms = replace(terms, merger=merger)

        def work() -> MergeReport:
            if source is None:
                return branches.update(terms, dry_run=dry_run)
            return branches.merge(source, terms, dry_run=dry_run)

        return core.migrate(work, operation)


class SparkMerger:
    """Has Spark compare types with at least `above_rows` changed rows; see `RowMerger`."""

    def __init__(self, spark: Callable[[], SparkSession], above_rows: int) -> None:
        self._spark = spark
        self._above_rows = above_rows
        self._jobs: list[Jobs] = []  # of types that are compared together
        self._lost = False
        self.types: list[str] = []  # that Spark has compared

    def takes(self, changed_rows: int) -> bool:
        return changed_rows >= self._above_rows

    def cancel(self) -> None:
        self._lost = True
        for jobs in self._jobs:
            jobs.cancel()

    def compare(self, asked: LargeType, folder: PartFolder | None) -> LargeVerdict:
        name = asked.spec.name
        spark = self._spark()
        if name not in self.types:
            self.types.append(name)
        label = f"merge-{folder.attempt if folder is not None else 'preview'}-{name}"
        jobs = Jobs(spark, label, None)
        self._jobs.append(jobs)
        if self._lost:
            jobs.cancel()
        differing = evaluated_once(_differing(spark, asked), label)
        try:
            with jobs.running("reconcile", f"{name}: compare both sides"):
                return _LargeComparison(asked, folder, differing).run(jobs)
        except (PySparkException, Py4JJavaError, Cancelled) as error:
            raise self._explained(error, name) from error
        finally:
            differing.unpersist()

    def _explained(self, error: Exception, name: str) -> Exception:
        why = str(error).strip().partition("\n")[0]
        if self._lost:
            why = "what was staged was given up, as nothing was heard of it for too long"
        return StorageBackendError(
            f"Spark could not merge {name}; nothing was published: {why}",
            operation="merge",
            retryable=True,
        )


# -- the comparison -------------------------------------------------------------------------------


def _differing(spark: SparkSession, asked: LargeType) -> DataFrame:
    """The source's rows that say what the target does not know: its columns, `o` the target's row
    and `k0`, `k1` what both knew (null where there is none), and whether the row is taken."""
    spec = asked.spec
    theirs = _rows(spark, asked.theirs)
    if asked.own is not None:
        theirs = theirs.join(_keys_in(spark, asked), list(spec.identity), "left_semi")
    bounds = _key_bounds(asked.theirs)
    sides = [_as_struct(spark, rows, f"k{n}", bounds) for n, rows in enumerate(asked.shared)]
    if asked.ours is not None:
        sides.append(_as_struct(spark, asked.ours, "o", bounds))
    joined = reduce(lambda a, b: a.join(b, list(spec.identity), "left"), sides, theirs)
    nothing = F.lit(None).cast(_struct_of(theirs, spec))
    if not asked.shared:
        joined = joined.withColumn("k0", nothing)
    if asked.ours is None:
        joined = joined.withColumn("o", F.col("k0"))
    shared = [f"k{n}" for n in range(max(1, len(asked.shared)))]
    as_agreed = [_same(spec, None, side) for side in shared]
    informed = _same(spec, None, "o") | reduce(lambda a, b: a & b, as_agreed)
    unmoved = ~reduce(lambda a, b: a | b, as_agreed) & reduce(
        lambda a, b: a | b,
        [(F.col("o").isNull() & F.col(side).isNull()) | _same(spec, "o", side) for side in shared],
    )
    return joined.where(~informed).withColumn(_TAKEN, unmoved).withColumn(_NEW, F.col("o").isNull())


def _rows(spark: SparkSession, asked: RowSet) -> DataFrame:
    plan = asked.plan()
    names = row_schema(asked.spec).names
    repository = asked.side.repository
    if not plan.rows:
        schema = exchanged(row_columns(asked.spec, names, with_commit_id=True))
        return spark.createDataFrame([], from_arrow_schema(schema))
    scan = scan_of(spark, repository.store, repository.config, asked.spec, plan.files)
    return visible(scan, plan, names, with_commit_id=True)


def _as_struct(
    spark: SparkSession, asked: RowSet, name: str, bounds: tuple[str, str] | None
) -> DataFrame:
    """A side's rows by identity, each as one value; only those that the source's can meet."""
    rows, identity = _rows(spark, asked), asked.spec.identity
    if bounds is not None:
        rows = rows.where(F.col(identity[0]).between(*bounds))
    values = [name for name in rows.columns if name not in identity]
    return rows.select(*identity, F.struct(*(_column(v) for v in values)).alias(name))


def _keys_in(spark: SparkSession, asked: LargeType) -> DataFrame:
    """The identities that the source's own commits wrote."""
    files = files_of(asked.own or ())
    repository = asked.theirs.side.repository
    scan = scan_of(spark, repository.store, repository.config, asked.spec, files)
    return scan.read(files, list(asked.spec.identity), with_commit_id=False)


def _key_bounds(asked: RowSet) -> tuple[str, str] | None:
    """The least and the greatest key of the first identity column, where files tell them all."""
    ranges = [item.file.leading_keys for item in asked.plan().rows]
    lows, highs = [r.low for r in ranges], [r.high for r in ranges]
    if not ranges or None in lows or None in highs:
        return None
    return min(str(low) for low in lows), max(str(high) for high in highs)


def _column(name: str, side: str | None = None) -> Column:
    return F.col(f"{side}.{quoted(name)}" if side is not None else quoted(name))


def _struct_of(rows: DataFrame, spec: TypeSpec) -> StructType:
    """The type of a side's row as one value."""
    return StructType([f for f in rows.schema.fields if f.name not in spec.identity])


def _same(spec: TypeSpec, side: str | None, other: str) -> Column:
    """Whether both are there and say the same; None: the source's row, which is."""

    there = [F.col(name).isNotNull() for name in (side, other) if name is not None]
    fields = [_column(f.name, side).eqNullSafe(_column(f.name, other)) for f in spec.fields]
    return reduce(lambda a, b: a & b, [*there, *fields])


class _LargeComparison:
    def __init__(self, asked: LargeType, folder: PartFolder | None, differing: DataFrame) -> None:
        self._asked = asked
        self._spec = asked.spec
        self._folder = folder
        self._differing = differing

    def run(self, jobs: Jobs) -> LargeVerdict:
        asked = self._asked
        counted = {
            row[_TAKEN]: (row["rows"], row["new"])
            for row in self._differing.groupBy(_TAKEN)
            .agg(F.count("*").alias("rows"), F.sum(F.col(_NEW).cast("long")).alias("new"))
            .collect()
        }
        rows, inserted = counted.get(True, (0, 0))
        disputed, disputed_new = counted.get(False, (0, 0))
        taken = F.col(_TAKEN)
        resolved = 0
        if asked.policy in ("ours", "theirs"):
            resolved = disputed
            if asked.policy == "theirs":
                taken, rows, inserted = F.lit(True), rows + disputed, inserted + disputed_new
        if not disputed and asked.adoptable == rows and rows:
            return LargeVerdict(rows, inserted, adopts=True)
        result = LargeVerdict(rows, inserted, resolved)
        if disputed and not resolved:
            result = self._with_disputed(result)
            if asked.policy == "fail":
                return result  # it will not be published
        if self._folder is None or not rows:
            return result
        return replace(result, parts=self._stage(jobs, taken))

    def _with_disputed(self, result: LargeVerdict) -> LargeVerdict:
        """With the rows in conflict, as each side has them."""
        disputed = self._differing.where(~F.col(_TAKEN))
        shared = [f"k{n}" for n in range(len(self._asked.shared))]
        return replace(
            result,
            theirs=self._table(disputed),
            ours=self._side(disputed, "o"),
            shared=[self._side(disputed, name) for name in shared] or [self._empty()],
        )

    def _side(self, disputed: DataFrame, name: str) -> pa.Table:
        return self._table(
            disputed.where(F.col(name).isNotNull()).select(*self._spec.identity, f"{name}.*")
        )

    def _table(self, rows: DataFrame) -> pa.Table:
        schema = versioned_schema(self._spec)
        brought = rows.select(*(_column(name) for name in schema.names)).toArrow()
        batches = [taken_back(batch, schema) for batch in brought.to_batches()]
        return pa.Table.from_batches(batches, schema)

    def _empty(self) -> pa.Table:
        return versioned_schema(self._spec).empty_table()

    def _stage(self, jobs: Jobs, taken: Column) -> Sequence[Mapping[str, Any]]:
        """In the order of identities, as all that is stored."""
        folder = self._folder
        assert folder is not None
        names = row_schema(self._spec).names
        rows = self._differing.where(taken).select(
            *(_column(name) for name in names), F.col(_NEW).alias(INSERT)
        )
        identity = [_column(name) for name in self._spec.identity]
        ordered = rows.repartitionByRange(*identity).sortWithinPartitions(*identity)
        target = StageTarget(
            uri=folder.uri,
            config=folder.config,
            attempt=folder.attempt,
            spec=folder.spec,
            schema_version_id=folder.schema_version_id,
            part_bytes=folder.config.target_part_bytes,
            quarantine=None,
        )
        task = StageTask(target, conformed=True)
        with jobs.running("stage", f"{self._spec.name}: stage what comes"):
            reports = ordered.mapInArrow(task, REPORT_DDL).toArrow()
        parsed = [TaskReport.parse(text) for text in reports.column(0).to_pylist()]
        return [part for report in parsed for part in report.parts]
