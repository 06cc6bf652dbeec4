"""Migration by Spark, for types that have outgrown one machine.

Planning, the attempt's heartbeat, rows that others change meanwhile and the publish are the
engine's (`repository.object.write.migrate`); what differs is who rewrites. Executors read the files
with the latest rows, bring them into the new version batch by batch (`mapInArrow`) and write parts
straight into the store, under names that no other attempt at a task has. A crash leaves files that
nobody names.

Upgraders run on the executors, which therefore must be able to import their modules.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark import cloudpickle
from pyspark.errors import PySparkException

from storage_engine.config import MIB
from storage_engine.errors import (
    ConfigurationError,
    IntegrityError,
    MigrationError,
    StorageBackendError,
)
from storage_engine.model.arrow import row_schema
from storage_engine.objectstore.open import open_store
from storage_engine.query.spec import When
from storage_engine.repository.object.write.staged_write import PartFolder
from storage_engine.runtime import arguments, migration
from storage_engine.runtime.core import internals
from storage_engine.schema.migration import TypeMigration
from storage_engine.spark.driver import Cancelled, Jobs
from storage_engine.spark.reader import visible
from storage_engine.spark.scans import scan_of
from storage_engine.spark.staged_parts import REPORT, REPORT_DDL, taken_back, task_label

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from storage_engine.objectstore.protocol import ObjectStore
    from storage_engine.repository.protocol import Repository
    from storage_engine.runtime.session import Session
    from storage_engine.schema.migration import Progress
    from storage_engine.schema.preview import MigrationPreview, MigrationResult
    from storage_engine.schema.upgraders import UpgraderSource

SPARK_ABOVE = 4 * 1024 * MIB  # bytes of the files with a type's latest rows
_IN_TASK = re.compile(r"storage_engine\.errors\.(IntegrityError|StorageBackendError): (.*)")
_NOT_THERE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


@dataclass(frozen=True)
class RewriteTask:
    """Rewrites the rows of one partition and stages them in parts of about `part_bytes`."""

    migration: TypeMigration
    folder: PartFolder
    part_bytes: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A report of the parts or of the row that cannot be migrated: raised here, it would be
        tried again, and come back as a text."""
        try:
            report: dict[str, Any] = {"parts": self._stage(batches)}
        except MigrationError as error:
            report = {"error": {"message": str(error), **error.facts()}}
        if report != {"parts": []}:
            text = json.dumps(report, default=str)
            yield pa.RecordBatch.from_arrays([pa.array([text])], schema=REPORT)

    def _stage(self, batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
        _, label = task_label()
        parts: list[dict[str, Any]] = []
        store: ObjectStore | None = None
        try:
            with tempfile.TemporaryDirectory(prefix="ontologia-migrate-") as scratch:
                for number, rows in enumerate(self._parts(batches)):
                    if store is None:
                        store = open_store(self.folder.uri, self.folder.config)
                    path = Path(scratch) / f"{number}.parquet"
                    name = f"{label}-{number:03d}"
                    parts.append(self.folder.stage(store, name, rows, path, inserted=0))
                    path.unlink()
        finally:
            if store is not None:
                store.close()
        return parts

    def _parts(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        assert self.migration.source is not None
        schema = row_schema(self.migration.source.spec)
        rewrite = self.migration.rewrite()
        held: list[pa.Table] = []
        size = 0
        for batch in batches:
            if not batch.num_rows:
                continue
            held.append(rewrite(pa.Table.from_batches([taken_back(batch, schema)])))
            size += held[-1].nbytes
            if size >= self.part_bytes:
                yield pa.concat_tables(held)
                held, size = [], 0
        if held:
            yield pa.concat_tables(held)


class SparkStager:
    """Has Spark rewrite the rows of types with at least `above_bytes`; see `RowStager`.

    `spark` is asked for at the first of them.
    """

    def __init__(
        self, spark: Callable[[], SparkSession], repository: Repository, above_bytes: int
    ) -> None:
        self._spark = spark
        self._repository = repository
        self._above_bytes = above_bytes
        self._jobs: Jobs | None = None
        self._lost = False
        self.types: list[str] = []  # that Spark has rewritten

    def cancel(self) -> None:
        self._lost = True
        if self._jobs is not None:
            self._jobs.cancel()

    def stage(
        self, migration: TypeMigration, folder: PartFolder, as_of: int
    ) -> Sequence[Mapping[str, Any]] | None:
        objects = self._repository.objects
        assert objects is not None, "only engines of object stores stage"
        assert migration.source is not None
        source = migration.source.spec
        plan = objects.executor().plan(source, When(as_of))
        size = sum(item.file.bytes for item in plan.files)
        if not size or size < self._above_bytes:
            return None
        task = RewriteTask(_portable(migration), folder, objects.config.target_part_bytes)
        _check_portable(task)
        spark = self._spark()
        name = migration.spec.name
        self.types.append(name)
        self._jobs = Jobs(spark, f"{folder.attempt}-{name}", None)
        if self._lost:
            self._jobs.cancel()
        scan = scan_of(spark, objects.store, objects.config, source, plan.files)
        rows = visible(scan, plan, row_schema(source).names, with_commit_id=False)
        try:
            with self._jobs.running("stage", f"{name}: migrate to version {migration.version}"):
                reports = rows.mapInArrow(task, REPORT_DDL).toArrow()
        except (PySparkException, Py4JJavaError, Cancelled) as error:
            raise self._explained(error, migration) from error
        return _parts_of(reports.column(0).to_pylist())

    def _explained(self, error: Exception, migration: TypeMigration) -> Exception:
        name, text = migration.spec.name, str(error)
        if self._lost:
            return StorageBackendError(
                f"{name}: what the migration had staged was given up, as nothing was heard of it "
                "for too long; nothing was published, migrate again",
                operation="migrate",
                retryable=True,
            )
        if missing := _NOT_THERE.search(text):
            return ConfigurationError(
                f"{name}: Spark's executors cannot import {missing.group(1)!r}, and run what is in "
                "it: give them the modules of models and upgraders (`spark-submit --py-files`, or "
                "install them there), or migrate without Spark. Nothing was published"
            )
        if raised := _IN_TASK.search(text):
            kind, message = raised.groups()
            if kind == "IntegrityError":
                return IntegrityError(message)
            return StorageBackendError(message, operation="migrate", retryable=True)
        first = text.strip().partition("\n")[0]
        return StorageBackendError(
            f"Spark could not migrate {name}; nothing was published: {first}",
            operation="migrate",
            retryable=True,
        )


def _portable(migration: TypeMigration) -> TypeMigration:
    """Without users' classes, which executors need not have."""
    assert migration.source is not None
    source = replace(migration.source, spec=replace(migration.source.spec, python_class=None))
    return replace(migration, spec=replace(migration.spec, python_class=None), source=source)


def _check_portable(task: RewriteTask) -> None:
    try:
        cloudpickle.dumps(task)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever pickling users' functions raises
        names = ", ".join(step.name for step in task.migration.steps) or "its defaults"
        raise ConfigurationError(
            f"{task.migration.spec.name}: {names} cannot be sent to Spark's executors ({error}): "
            "let upgraders be functions of a module that executors can import, without open files, "
            "locks or connections around them, or migrate without Spark"
        ) from error


def _parts_of(reports: Iterable[str]) -> list[Mapping[str, Any]]:
    parts: list[Mapping[str, Any]] = []
    for text in reports:
        report = json.loads(text)
        if (problem := report.get("error")) is not None:
            raise MigrationError(
                problem["message"],
                type=problem["type"],
                identity=_identity(problem.get("identity")),
                old=problem.get("old"),
            )
        parts += report["parts"]
    return parts


def _identity(identity: Any) -> Any:
    return tuple(identity) if isinstance(identity, list) else identity


# -- entry ----------------------------------------------------------------------------------------


@overload
def migrate_with_spark(
    spark: SparkSession,
    session: Session,
    *,
    dry_run: Literal[True] = True,
    upgraders: UpgraderSource | None = None,
) -> MigrationPreview: ...


@overload
def migrate_with_spark(
    spark: SparkSession,
    session: Session,
    *,
    dry_run: Literal[False],
    token: str | None = None,
    force: bool = False,
    upgraders: UpgraderSource | None = None,
    above_bytes: int = SPARK_ABOVE,
    progress: Progress | None = None,
) -> MigrationResult: ...


def migrate_with_spark(
    spark: SparkSession,
    session: Session,
    *,
    dry_run: bool = True,
    token: str | None = None,
    force: bool = False,
    upgraders: UpgraderSource | None = None,
    above_bytes: int = SPARK_ABOVE,
    progress: Progress | None = None,
) -> MigrationPreview | MigrationResult:
    """Like `Session.migrate`, except that the rows of types whose latest files have at least
    `above_bytes` are rewritten by Spark's executors.

    Those of engine v1 and of SQLite are always rewritten on this machine. Raises what `migrate`
    raises, and ConfigurationError when executors cannot have the upgraders.
    """
    arguments.check_dry_run(dry_run=dry_run, token=token, force=force)
    if dry_run:
        return session.migrate(upgraders=upgraders)
    core = internals(session)
    with core.use("migrate"):
        declared = core.types.declared("migrate")
        stager = SparkStager(lambda: spark, core.repository, above_bytes)
        return core.migrate(
            lambda: migration.apply(
                core.repository,
                declared,
                upgraders,
                token=token,
                force=force,
                progress=progress,
                holder=core.settings.instance_metadata,
                stager=stager,
            )
        )
