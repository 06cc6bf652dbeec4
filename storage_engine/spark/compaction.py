"""Compaction by Spark, for runs of files that have outgrown one machine.

Planning, leases, the attempt's heartbeat and the publish are those of `maintenance.compaction`;
what differs is who merges. Executors read the inputs, Spark sorts them by ranges of identities,
and executors write `current` and `superseded` parts straight into the store (`mapInArrow`), under
names that no other attempt at a task has. The proof reads what was written back and compares it
with the inputs: without it nothing is published, and a crash leaves files that nobody names.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BooleanType, StructField, StructType

from storage_engine.config import MIB, OntologiaConfig
from storage_engine.errors import IntegrityError, OntologiaError, StorageBackendError
from storage_engine.maintenance.compaction import (
    CompactionPlan,
    CompactionPolicy,
    CompactionReport,
    RunPlan,
    compact,
)
from storage_engine.maintenance.compaction.build import (
    Attempt,
    Build,
    Guard,
    Tell,
    described,
    folder_of,
    labelled_part,
)
from storage_engine.maintenance.compaction.inputs import CURRENT, SUPERSEDED, Input, open_inputs
from storage_engine.maintenance.compaction.merge import (
    IDENTITY,
    MergedFile,
    MergeOrder,
    RoleWriter,
    split,
)
from storage_engine.maintenance.compaction.plan import SPARK_ABOVE
from storage_engine.maintenance.compaction.proof import NEWEST, Digest, demand
from storage_engine.maintenance.compaction.run import Progress
from storage_engine.objectstore.open import open_store
from storage_engine.repository.object.write.parquet import EncodedPart, SnapshotSettings
from storage_engine.spark.driver import Cancelled, Jobs
from storage_engine.spark.schema import quoted
from storage_engine.spark.staged_parts import exchanged, taken_back, task_label

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from storage_engine.repository.object.engine import ObjectRepository
    from storage_engine.repository.object.read.plan import CommitFile, Entry
    from storage_engine.repository.protocol import Repository
    from storage_engine.runtime.session import Session

IS_CURRENT = "__current"  # bool: the row is in a file of that role
REPORT = pa.schema([pa.field("report", pa.string())])
REPORT_DDL = "report string"
_BATCH_BYTES = 16 * MIB


@dataclass(frozen=True)
class ReadTask:
    """Brings the rows of files, which come as their numbers, each checked against its hash."""

    uri: str
    config: OntologiaConfig
    schema: bytes  # of the rows, serialised: types do not travel otherwise
    entries: tuple[Entry, ...]  # of one file each; they tell the commit where rows do not

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        store = open_store(self.uri, self.config)
        try:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    entry = self.entries[number]
                    [file] = entry.files
                    with tempfile.TemporaryDirectory(prefix="ontologia-compact-") as folder:
                        inputs = open_inputs(store, [entry], Path(folder))
                        if not inputs.schema.equals(schema):
                            raise IntegrityError(
                                f"{file.path} has other columns than the other files of its "
                                "schema version",
                                key=file.path,
                            )
                        yield from _rows(inputs.files[0], schema, file.role == CURRENT)
        finally:
            store.close()


def _rows(file: Input, schema: pa.Schema, current: bool) -> Iterator[pa.RecordBatch]:
    for batch in file.batches(schema, _BATCH_BYTES):
        rows = batch.cast(exchanged(schema))
        yield rows.append_column(IS_CURRENT, pa.repeat(current, batch.num_rows))


@dataclass(frozen=True)
class MergeTask:
    """Writes one range of identities, sorted by identity and commit, to parts in the store."""

    uri: str
    config: OntologiaConfig
    schema: bytes
    folder: str  # of the attempt, in the store
    order: MergeOrder

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema)).with_metadata(
            {"ontologia.attempt": self.order.mark}
        )
        with tempfile.TemporaryDirectory(prefix="ontologia-compact-") as folder:
            outputs = self._merge((_table(batch, schema) for batch in batches), schema, folder)
            reports = self._upload(outputs)
        if reports:
            yield pa.RecordBatch.from_arrays([pa.array(reports, pa.string())], schema=REPORT)

    def _merge(self, rows: Iterator[pa.Table], schema: pa.Schema, folder: str) -> list[MergedFile]:
        identity = IDENTITY[self.order.kind]
        writers = [
            RoleWriter(Path(folder), role, schema, identity, self.order)
            for role in (CURRENT, SUPERSEDED)
        ]
        try:
            for pair in split(rows, identity):
                for writer, some in zip(writers, pair, strict=True):
                    writer.add(some)
            return [output for writer in writers for output in writer.close()]
        finally:
            for writer in writers:
                writer.abort()

    def _upload(self, outputs: Iterable[MergedFile]) -> list[str]:
        _, label = task_label()
        store = open_store(self.uri, self.config)
        try:
            reports = []
            for number, output in enumerate(outputs):
                assert output.role is not None  # v1 is compacted elsewhere
                key = labelled_part(self.folder, output.role, f"{label}-{number:03d}")
                store.put_file(key, output.path)
                reports.append(_report(key, output))
            return reports
        finally:
            store.close()


@dataclass(frozen=True)
class Written:
    """A part in the store."""

    key: str
    role: str
    part: EncodedPart

    @classmethod
    def parse(cls, text: str) -> Written:
        raw: dict[str, Any] = json.loads(text)
        return cls(raw["key"], raw["role"], EncodedPart(content=b"", **raw["part"]))


def _report(key: str, output: MergedFile) -> str:
    part = {
        field.name: getattr(output.part, field.name)
        for field in dataclasses.fields(output.part)
        if field.name != "content"
    }
    return json.dumps({"key": key, "role": output.role, "part": part})


def _table(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches([taken_back(batch, schema)])


_LOOK_EVERY_S = 0.5
_IN_TASK = re.compile(r"storage_engine\.errors\.(IntegrityError|StorageBackendError): (.*)")


def compact_with_spark(
    spark: SparkSession,
    session: Session,
    *,
    types: Iterable[str] | None = None,
    policy: CompactionPolicy | CompactionPlan | None = None,
    above_bytes: int = SPARK_ABOVE,
    progress: Progress | None = None,
) -> CompactionReport:
    """Like `Session.compact`, except that runs of at least `above_bytes` are merged by Spark.

    Engine v1 orders its one file otherwise and is always merged on this machine. Raises what
    `compact` raises: IntegrityError, with nothing published of that run, when inputs are damaged
    or a merge cannot be proven.
    """
    repository = session.repository
    choose = spark_builds(lambda: spark, repository, above_bytes)
    return compact(repository, policy, progress, types=types, build=choose)


def spark_builds(
    spark: Callable[[], SparkSession], repository: Repository, above_bytes: int
) -> Callable[[RunPlan], Build | None]:
    """Which runs Spark merges. `spark` is asked for at the first of them."""

    def choose(run: RunPlan) -> Build | None:
        if repository.engine_version != "v2" or run.bytes < above_bytes:
            return None
        return SparkBuild(spark(), repository)  # type: ignore[arg-type]

    return choose


class SparkBuild:
    """Makes the snapshot of a run with Spark; see `Build`."""

    def __init__(self, spark: SparkSession, repository: ObjectRepository) -> None:
        self._spark = spark
        self._repository = repository
        self._config = repository.config
        self._settings = SnapshotSettings.of(repository.config)

    def __call__(self, run: RunPlan, attempt: Attempt, *, tell: Tell, guard: Guard) -> Entry:
        tell("read", 0)
        schema = self._schema(run)
        inputs = self._rows(schema, _single_files(run.entries))
        jobs = Jobs(self._spark, attempt.id, None)
        with cancelled_when_lost(jobs, attempt, guard):
            tell("merge", 0)
            with jobs.running("stage", f"{run.type_name}: compact"):
                written = self._merge(run, attempt, inputs, schema)
            snapshot = run.snapshot(_files(run, written))
            tell("prove", run.rows)
            outputs = self._rows(schema, _single_files([snapshot]))
            with jobs.running("stage", f"{run.type_name}: prove the compaction"):
                prove(run.kind, schema.names, inputs, outputs)
            guard()
        return snapshot

    def _schema(self, run: RunPlan) -> pa.Schema:
        """Of the rows with their commit, from the smallest file: all others must have the same."""
        smallest = min(_single_files(run.entries), key=lambda entry: entry.files[0].bytes)
        with tempfile.TemporaryDirectory(prefix="ontologia-compact-") as folder:
            return open_inputs(self._repository.store, [smallest], Path(folder)).schema

    def _rows(self, schema: pa.Schema, entries: Sequence[Entry]) -> DataFrame:
        task = ReadTask(
            self._repository.uri, self._config, schema.serialize().to_pybytes(), tuple(entries)
        )
        columns = [
            StructField(field.name, field.dataType)
            for field in from_arrow_schema(exchanged(schema)).fields
        ]
        numbers = self._spark.range(0, len(entries), 1, max(1, len(entries)))
        return numbers.mapInArrow(
            task, StructType([*columns, StructField(IS_CURRENT, BooleanType())])
        )

    def _merge(
        self, run: RunPlan, attempt: Attempt, inputs: DataFrame, schema: pa.Schema
    ) -> list[Written]:
        order = MergeOrder(
            run.kind,
            "v2",
            self._settings,
            expected_rows=run.rows,
            expected_bytes=run.expected_bytes,
            mark=attempt.id,
        )
        task = MergeTask(
            self._repository.uri,
            self._config,
            schema.serialize().to_pybytes(),
            folder_of(run, attempt.id),
            order,
        )
        identity = [F.col(name) for name in IDENTITY[run.kind]]
        ranges = max(1, -(-run.expected_bytes // self._settings.part_bytes))
        # Rows of one identity fall into one range, so parts never share one.
        merged = (
            inputs.drop(IS_CURRENT)
            .repartitionByRange(ranges, *identity)
            .sortWithinPartitions(*identity, F.col("commit_id"))
            .mapInArrow(task, REPORT_DDL)
        )
        return [Written.parse(row["report"]) for row in merged.collect()]


@contextmanager
def cancelled_when_lost(jobs: Jobs, attempt: Attempt, guard: Guard) -> Iterator[None]:
    """Cancels Spark's work, and raises why, once its result could not be published any more."""
    lost: list[OntologiaError] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_EVERY_S):
            try:
                guard()
                attempt.check_known()
            except OntologiaError as error:
                lost.append(error)
                jobs.cancel()
                return

    watcher = threading.Thread(target=look, name="onto-compact-watch", daemon=True)
    watcher.start()
    try:
        yield
    except (PySparkException, Py4JJavaError, Cancelled) as error:
        if lost:
            raise lost[0] from error
        raise _as_known(error) from error
    finally:
        done.set()
        watcher.join()


def prove(kind: str, names: Sequence[str], inputs: DataFrame, outputs: DataFrame) -> None:
    """As `maintenance.compaction.proof`, on frames: as many rows, the same multiset of rows, and
    in the current files exactly the newest row of each identity. Raises IntegrityError."""
    identity = [F.col(name) for name in IDENTITY[kind]]
    by_identity = inputs.groupBy(*identity).agg(
        F.count(F.lit(1)).alias("rows"),
        _total(_hash([F.col(quoted(name)) for name in names])).alias("content"),
        F.max("commit_id").alias("newest"),
    )
    before = by_identity.agg(
        F.sum("rows"),
        F.sum("content"),
        F.count(F.lit(1)),
        _total(_hash([*identity, F.col("newest")])),
    ).first()
    current = F.col(IS_CURRENT)
    after = outputs.agg(
        F.count(F.lit(1)),
        _total(_hash([F.col(quoted(name)) for name in names])),
        F.count(F.when(current, 1)),
        _total(F.when(current, _hash([*identity, F.col("commit_id")]))),
    ).first()
    assert before is not None
    assert after is not None
    for at, what in (
        (0, "the rows of the inputs and of the snapshot"),
        (2, NEWEST),
    ):
        was, became = (Digest(int(r[at] or 0), int(r[at + 1] or 0)) for r in (before, after))
        demand(was, became, what)


def _hash(columns: Sequence[Column]) -> Column:
    """Of a row. Hashing passes over nulls as if they were not there: say where they are."""
    return F.xxhash64(*columns, *(column.isNull() for column in columns))


def _total(hashes: Column) -> Column:
    """A sum does not depend on order; as a decimal it does not run over."""
    return F.sum(hashes.cast("decimal(20,0)"))


def _single_files(entries: Iterable[Entry]) -> list[Entry]:
    """An entry for each file, so that files can be handed out one by one."""
    return [replace(entry, files=(file,)) for entry in entries for file in entry.files]


def _files(run: RunPlan, written: Sequence[Written]) -> tuple[CommitFile, ...]:
    """In the order of identities, the current ones first."""
    files: list[CommitFile] = []
    for role in (CURRENT, SUPERSEDED):
        parts = sorted((w for w in written if w.role == role), key=lambda w: w.key)
        for number, part_written in enumerate(parts):
            part = number if len(parts) > 1 else None
            files.append(described(run, part_written.key, role, part_written.part, part))
    return tuple(files)


def _as_known(error: Exception) -> Exception:
    """What a task raised on purpose; types do not survive the way from Python workers."""
    raised = _IN_TASK.search(str(error))
    if raised is None:
        first = str(error).strip().partition("\n")[0]
        return StorageBackendError(
            f"Spark could not merge; nothing was published: {first}",
            operation="compact",
            retryable=True,
        )
    name, message = raised.groups()
    if name == "IntegrityError":
        return IntegrityError(message)
    return StorageBackendError(message, operation="compact", retryable=True)
