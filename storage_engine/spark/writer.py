"""Write a DataFrame into an ontology: executors stage parts, the driver publishes once.

    result = write_entities(df, Customer, session, idempotency=("crm", "2026-11-16"))

Either all rows that differ from what is stored are published, as one commit, or none. The write
lock is held for the publish only. A failed or killed task leaves files that nobody names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame

from storage_engine.errors import ConfigurationError
from storage_engine.model.conform import zone_notes
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.object.write.staged_write import StagedWrite
from storage_engine.repository.protocol import CommitResult, check_metadata
from storage_engine.runtime import arguments
from storage_engine.runtime.arguments import StoredClass
from storage_engine.runtime.core import internals
from storage_engine.runtime.session import Session
from storage_engine.spark.driver import Jobs, evaluated_once, is_steady, on_branch
from storage_engine.spark.hash_tables import fits
from storage_engine.spark.increments import KeyLookup, is_increment
from storage_engine.spark.missing import Marking, check_marking, with_own_names
from storage_engine.spark.missing_policy import MissingPolicy
from storage_engine.spark.publish import (
    WriteOptions,
    check_options,
    check_read_again,
    check_rows,
    check_unique,
    identities_by_reason,
    previewed,
    publish,
    said_twice,
    take_parts,
    target_of,
)
from storage_engine.spark.quality import evaluate, own_references, without_dangling
from storage_engine.spark.quarantine import tidy
from storage_engine.spark.reconcile import (
    AbsentRows,
    Counts,
    Reconciled,
    StoredRows,
    reconcile,
)
from storage_engine.spark.results import WriteResult
from storage_engine.spark.scans import repeated, stored_rows
from storage_engine.spark.schema import (
    SourceRows,
    arrow_schema,
    fitting_columns,
    source_rows,
)
from storage_engine.spark.staged_parts import (
    LOOSE_BYTES,
    REPORT_DDL,
    StageTarget,
    StageTask,
    TaskReport,
)
from storage_engine.spark.tallies import Tally, bucket_column, merged


def write_entities(
    df: DataFrame, type: StoredClass | TypeSpec, session: Session, **options: Any
) -> WriteResult:
    """`write_type` for an entity type; a relation is refused."""
    return _write(df, type, session, options, kind="entity")


def write_relations(
    df: DataFrame, type: StoredClass | TypeSpec, session: Session, **options: Any
) -> WriteResult:
    """`write_type` for a relation type; an entity is refused."""
    return _write(df, type, session, options, kind="relation")


def write_type(
    df: DataFrame, type: StoredClass | TypeSpec, session: Session, **options: Any
) -> WriteResult:
    """Publish the rows of `df` that differ from what is stored.

    `type` is a declared class, or a stored schema's TypeSpec. Columns are the field names; a
    relation has `left_key`, `right_key` and its instance key under its own name. A column may be
    missing where the field has a default or can be null; others are refused, all at once.

    branch:       the branch to write to; the session's own when left out
    idempotency, meta, expect, event:  as in `Session.commit`
    holder:       texts shown to whoever waits for the lock
    order_by:     a field: of rows with one identity the greatest value wins, and a row whose value
                  is less than the stored one's is not written. Without it, an identity that
                  appears twice is an error
    on_bad_rows:  "fail": rows with null keys, values that do not fit or broken expectations stop
                  the write; "quarantine": they go to a side table, and the others are published
    quarantine:   folder or URI of the side table
    expectations: conditions that rows must meet
    missing:      stored rows that `df`, a full extract, no longer has: "keep" (the default), or
                  {"set": {"active": False, "ended_at": "now"}, "limit": "10%"} to mark them; with
                  "scope", a condition over the type's fields, only such rows
    count_by:     a field: the result tells rows inserted, updated and unchanged by its values
    target_part_bytes: size of a part, counted as Arrow data
    progress:     called with a WriteProgress now and then
    dry_run:      count what would be written; nothing is published or set aside
    """
    return _write(df, type, session, options, kind=None)


def _write(
    df: DataFrame,
    type: StoredClass | TypeSpec,
    session: Session,
    options: Mapping[str, Any],
    *,
    kind: str | None,
) -> WriteResult:
    spec = type if isinstance(type, TypeSpec) else internals(session).bind(type)
    if kind is not None and spec.kind != kind:
        other = "write_relations" if kind == "entity" else "write_entities"
        raise ConfigurationError(f"{spec.name} is a {spec.kind} type: use {other}")
    try:
        asked = {name: value for name, value in options.items() if name != "branch"}
        wanted = WriteOptions(**{**asked, "missing": MissingPolicy.parse(options.get("missing"))})
    except TypeError as error:
        raise ConfigurationError(f"write: {error}") from None
    with on_branch(session, options.get("branch")) as using:
        return _Write(df, spec, using, wanted).run()


class _Write:
    """One write from start to end. Use once."""

    def __init__(
        self, df: DataFrame, spec: TypeSpec, session: Session, options: WriteOptions
    ) -> None:
        self._df = df
        self._spec = spec
        self._session = session
        self._repository = session.repository
        self._options = options
        self._cached: list[DataFrame] = []
        self._published = False
        self._marked_from: int | None = None  # the first part of marked rows
        self._stored_bytes = self._stored_bytes_read = 0
        check_options(spec, options)
        limit = internals(session).settings.config.max_commit_metadata_bytes
        check_metadata(arguments.texts("meta", options.meta), limit)  # before the job, not after

    def run(self) -> WriteResult:
        before = self._requests()
        self._df = fitting_columns(self._df, self._spec)
        check_marking(self._options.missing, self._spec, self._df)
        jobs: Jobs | None = None

        def lost() -> None:
            if jobs is not None:
                jobs.cancel()

        attempt = self._repository.begin_staged(
            self._spec,
            idempotency=arguments.unit_of_work(self._options.idempotency),
            order_by=self._options.order_by,
            holder=arguments.texts("holder", self._options.holder),
            on_lost=lost,
        )
        if attempt.applied is not None:
            return self._applied(attempt.applied.commit_id, attempt)
        with attempt, attempt:  # twice: Ctrl-C may come at the first instruction of leaving
            jobs = Jobs(self._df.sparkSession, attempt.attempt, self._options.progress)
            target = target_of(attempt, self._options)
            try:
                return self._run(attempt, target, jobs, before)
            except BaseException as error:
                # What a commit stands for, or may stand for, stays.
                if target.quarantine is not None and not (self._published or attempt.unknown):
                    tidy(target.quarantine, target.config, ())
                if isinstance(error, Exception):
                    attempt.check_alive()  # its loss is why Spark's job was cancelled
                raise
            finally:
                for frame in self._cached:
                    frame.unpersist()

    def _run(
        self, attempt: StagedWrite, target: StageTarget, jobs: Jobs, before: Mapping[str, int]
    ) -> WriteResult:
        spec = attempt.spec
        marking = Marking.of(self._options.missing, spec, attempt.began_at)
        with jobs.running("reconcile", f"{spec.name}: compare with what is stored"):
            df = self._expected(self._steady(attempt), spec)
            reconciled, source = self._reconcile(df, attempt, marking)
        absent = reconciled.absent
        self._cached += [c for c in (reconciled.cached, absent.cached) if c is not None]
        reports: list[TaskReport] = []
        if reconciled.frame is not None:
            task = StageTask(
                target,
                conformed=source.conformed,
                rehearsal=self._options.dry_run,
                loose_bytes=min(LOOSE_BYTES, target.part_bytes),
                count_by=self._options.count_by,
            )
            with jobs.running("stage", f"{spec.name}: stage parts"):
                rows = reconciled.frame.mapInArrow(task, REPORT_DDL).toArrow()
            reports = [TaskReport.parse(text) for text in rows.column(0).to_pylist()]
        if self._options.dry_run:
            check_read_again(spec, reconciled, reports)
            top = self._repository.type_head(spec)
            problem = marking.problem(absent) if marking is not None else None
            too_many = str(problem) if problem is not None else None
            preview = previewed(spec, top, reconciled, reports, self._options, too_many)
            return replace(
                preview,
                stored_bytes=self._stored_bytes,
                stored_bytes_read=self._stored_bytes_read,
                notes=self._notes(marking, absent),
            )
        attempt.check_alive()
        check_rows(target, reports)
        check_read_again(spec, reconciled, reports)
        if target.quarantine is not None:
            kept = [key for report in reports for key in report.quarantined]
            tidy(target.quarantine, target.config, kept)
        ascending = take_parts(attempt, reports, target.part_bytes)
        if marking is not None:
            ascending &= self._mark(attempt, target, jobs, marking, absent)
        self._check_unique(attempt, jobs, ascending=ascending)
        check_read_again(spec, reconciled, reports, unique=True)
        jobs.tell("publish", 0, 1)
        result = publish(self._session, attempt, self._options)
        self._published = True
        jobs.tell("publish", 1, 1)
        if result is not None and result.already_applied:
            if target.quarantine is not None:
                tidy(target.quarantine, target.config, ())
            return self._applied(result.commit_id, attempt)
        notes = self._notes(marking, absent, result)
        told = self._result(attempt, result, reconciled.counts, reports, target, before, notes)
        return replace(told, tally=self._tally(told, reconciled, reports))

    # -- steps --------------------------------------------------------------------------------

    def _compared(self, attempt: StagedWrite) -> bool:
        """Whether rows are looked at before those that differ are staged."""
        options = self._options
        return attempt.top is not None or options.order_by is not None or options.dry_run

    def _steady(self, attempt: StagedWrite) -> DataFrame:
        """The source, which is to have the same rows whenever this write reads it."""
        expectations = self._options.expectations
        again = self._compared(attempt) or (
            bool(expectations) and bool(own_references(expectations, attempt.spec))
        )
        if not again or is_steady(self._df):
            return self._df
        df = evaluated_once(self._df, attempt.attempt)
        self._cached.append(df)
        return df

    def _expected(self, df: DataFrame, spec: TypeSpec) -> DataFrame:
        expectations = self._options.expectations
        if not expectations:
            return df
        evaluated = evaluate(df, expectations, spec, self._session)
        if self._options.on_bad_rows == "fail":
            return evaluated  # one bad row is enough
        return without_dangling(evaluated, expectations, spec, self._session)

    def _mark(
        self,
        attempt: StagedWrite,
        target: StageTarget,
        jobs: Jobs,
        marking: Marking,
        absent: AbsentRows,
    ) -> bool:
        """Take rows that the extract lacks into the write, in parts of their own; whether order
        tells that no identity is in one of these twice."""
        problem = marking.problem(absent)
        if problem is not None:
            raise problem
        self._marked_from = len(attempt.files)
        if absent.frame is None or absent.untold:
            return True
        attempt.require_no_other_unit()
        task = StageTask(target, conformed=True, loose_bytes=min(LOOSE_BYTES, target.part_bytes))
        with jobs.running("stage", f"{attempt.spec.name}: stage rows that are missing"):
            rows = marking.marked(absent.frame).mapInArrow(task, REPORT_DDL).toArrow()
        reports = [TaskReport.parse(text) for text in rows.column(0).to_pylist()]
        return take_parts(attempt, reports, target.part_bytes)

    def _reconcile(
        self, df: DataFrame, attempt: StagedWrite, marking: Marking | None
    ) -> tuple[Reconciled, SourceRows]:
        spec, order_by = attempt.spec, self._options.order_by
        compared = self._compared(attempt)
        source = source_rows(df, spec, compared=compared)
        if not compared:
            return Reconciled(source.frame, Counts()), source
        stored, look_up = None, None
        if attempt.top is not None:
            entries = attempt.entries()
            files = [file for entry in entries for file in entry.files]
            count = sum(file.row_count for file in files)
            size = sum(file.bytes for file in files)
            self._stored_bytes = self._stored_bytes_read = size
            if marking is None and is_increment(self._df, stored_rows=count, stored_bytes=size):
                look_up = KeyLookup(
                    df.sparkSession,
                    attempt.uri,
                    attempt.config,
                    spec.without_class(),
                    entries,
                    upto=attempt.base.commit_id,
                    stored_rows=count,
                    exact=[order_by] if order_by is not None else [],
                )

            def read() -> DataFrame:
                columns = [*spec.identity, *(f.name for f in spec.fields)]
                rows = stored_rows(
                    df.sparkSession, attempt.uri, attempt.config, spec, entries, columns
                )
                return rows if marking is None else with_own_names(rows, spec)

            stored = StoredRows(
                read,
                count,
                unique=len(entries) <= 1 and all(e.unique(attempt.base.commit_id) for e in entries),
                in_driver=fits(self._df, stored_rows=count, stored_bytes=size),
            )
        reconciled = reconcile(
            source,
            stored,
            spec,
            order_by=order_by,
            sift=self._options.on_bad_rows != "fail" or self._options.dry_run,
            open_rows=marking.open_rows() if marking is not None and stored is not None else None,
            count_by=self._bucket(source, spec),
            look_up=look_up,
        )
        if reconciled.bytes_read is not None:
            self._stored_bytes_read = reconciled.bytes_read
        return reconciled, source

    def _bucket(self, source: SourceRows, spec: TypeSpec) -> Column | None:
        name = self._options.count_by
        if name is None:
            return None
        return bucket_column(source.columns[name], spec.field(name).storage)

    def _check_unique(self, attempt: StagedWrite, jobs: Jobs, *, ascending: bool) -> None:
        def by_spark() -> list[object]:
            with jobs.running("stage", f"{attempt.spec.name}: look for repeated identities"):
                return repeated(self._df.sparkSession, attempt)

        check_unique(attempt, ascending=ascending, by_spark=by_spark)

    # -- what is said of it -------------------------------------------------------------------

    def _result(
        self,
        attempt: StagedWrite,
        result: CommitResult | None,
        counts: Counts,
        reports: Sequence[TaskReport],
        target: StageTarget,
        before: Mapping[str, int],
        notes: Sequence[str],
    ) -> WriteResult:
        reasons: Counter[str] = Counter()
        for report in reports:
            reasons.update(report.reasons)
        published = attempt.files if result is not None else ()
        quarantined = sum(report.bad for report in reports)
        marked_from = len(published) if self._marked_from is None else self._marked_from
        marked = sum(f.row_count for f in published if (f.part or 0) >= marked_from)
        commit_id = result.commit_id if result is not None else None
        place = None
        if target.quarantine is not None and quarantined:
            place = f"{target.quarantine.uri.rstrip('/')}/{target.quarantine.prefix}".rstrip("/")
        return WriteResult(
            type_name=attempt.spec.name,
            commit_id=commit_id,
            # After a commit nothing more is asked of the store: it could fail, the commit stands.
            type_commit_id=commit_id or self._repository.type_head(attempt.spec),
            rows=counts.rows or sum(report.rows for report in reports),
            inserted=sum(file.inserted or 0 for file in published),
            updated=sum(file.updated or 0 for file in published) - marked,
            unchanged=counts.unchanged,
            marked=marked,
            quarantined=quarantined,
            duplicates=counts.duplicates + said_twice(counts, reports, self._options),
            stale=counts.stale,
            kept=attempt.kept,
            files=len(published),
            bytes=sum(file.bytes for file in published),
            stored_bytes=self._stored_bytes,
            stored_bytes_read=self._stored_bytes_read,
            attempts=result.attempts if result is not None else 0,
            lock_wait_ms=result.lock_wait_ms if result is not None else 0.0,
            requests=self._since(before),
            quarantine=place,
            reasons=dict(reasons) if quarantined else {},
            examples=identities_by_reason(reports) if quarantined else {},
            notes=notes,
        )

    def _tally(
        self, result: WriteResult, reconciled: Reconciled, reports: Sequence[TaskReport]
    ) -> Tally | None:
        """By value of the field that is counted by; None where it is not what was published, as
        another commit came first and rows were compared again."""
        counted = reconciled.unchanged_by if reconciled.counts.rows else {}
        if self._options.count_by is None or counted is None:
            return None
        tally = merged((report.tally for report in reports), counted)
        if tally is None:
            return None
        sums = [sum(row[place] for row in tally.values()) for place in range(3)]
        return tally if sums == [result.inserted, result.updated, result.unchanged] else None

    def _notes(
        self, marking: Marking | None, absent: AbsentRows, result: CommitResult | None = None
    ) -> tuple[str, ...]:
        missing = marking.notes(absent) if marking is not None else ()
        if result is None and not self._options.dry_run:
            return missing
        notes = zone_notes(self._spec, [arrow_schema(self._df.schema)])
        return (*notes, *missing, *(result.notes if result is not None else ()))

    def _applied(self, commit_id: int | None, attempt: StagedWrite) -> WriteResult:
        return WriteResult(
            type_name=attempt.spec.name,
            commit_id=commit_id,
            type_commit_id=self._repository.type_head(attempt.spec),
            already_applied=True,
        )

    def _requests(self) -> dict[str, int]:
        return self._repository.requests()

    def _since(self, before: Mapping[str, int]) -> dict[str, int]:
        now = self._requests()
        return {k: n - before.get(k, 0) for k, n in now.items() if n != before.get(k, 0)}
