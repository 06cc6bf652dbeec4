"""Streams out of an ontology and into it; each change is read, and each batch published, once.

Out: the change feed of a type, with commit and operation. Offsets are commit ids. A batch covers
whole commits, and Spark's checkpoint says which were read, so a query that is stopped or killed
goes on where it was.

In, with `foreachBatch`:

    query = df.writeStream.foreachBatch(batch_writer(Customer, uri, order_by="updated_at"))

A batch that runs again, after a failure or a restart from the checkpoint, finds its unit of work
(query id, batch id) in the log and publishes nothing. `writeStream.format("ontologia")` does the
same with options as texts (`storage_engine.spark.datasource`).

Both kinds of writing by the data source end here: tasks stage rows as they come, the driver
compares and publishes. Spark calls `commit` with what the tasks report, in a process of its own,
and `abort` after a commit that raised: so `abort` first looks whether the log has the write. Only
then, and only when no publish can be under way any more, are the staged parts deleted.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError, IntegrityError, UnknownBranchError
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.object.write.staged_write import (
    attempt_beside,
    discard_staged,
    head_commit_id,
)
from storage_engine.repository.open import open_repository
from storage_engine.repository.protocol import Repository
from storage_engine.runtime import arguments
from storage_engine.runtime.session import Session
from storage_engine.spark.datasource import (
    PinnedRead,
    SinkOptions,
    TypeLocation,
    partitions_of,
    read_share,
)
from storage_engine.spark.driver import SameBranch, find_type, is_connect, on_branch
from storage_engine.spark.publish import (
    WriteOptions,
    check_options,
    check_rows,
    check_unique,
    publish,
    take_parts,
    target_of,
)
from storage_engine.spark.results import WriteResult
from storage_engine.spark.schema import check_dataframe
from storage_engine.spark.staged_parts import LOOSE_BYTES, StageTarget, StageTask, TaskReport
from storage_engine.spark.writer import write_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)

# What Spark says of a micro-batch to its tasks.
_QUERY = "sql.streaming.queryId"
_RUN = "spark.jobGroup.id"
_BATCH = "streaming.sql.batchId"


@dataclass(frozen=True)
class TaskMessage(WriterCommitMessage):
    """What one task tells the driver."""

    attempt: str
    base: int  # head when the task, or its job, began
    reports: tuple[str, ...]
    query_id: str | None = None


@dataclass(frozen=True)
class Sink:
    """A write, as plain data: `target` is where parts go, `base` the head when it was planned."""

    place: TypeLocation
    options: WriteOptions
    target: StageTarget
    base: int
    applied: bool  # the unit of work is in the log already: there is nothing to do

    @classmethod
    def plan(cls, given: SinkOptions, schema: StructType, *, overwrite: bool) -> Sink:
        if overwrite:
            raise ConfigurationError(
                "data source ontologia: nothing is ever overwritten, rows get new versions: "
                'write with .mode("append")'
            )
        place = given.place
        options = WriteOptions(idempotency=given.idempotency, **given.writing)
        with place.opened() as repository:
            spec = find_type(repository, place.type, models=place.models)
            check_options(spec, options)
            check_dataframe(spec, schema)
            attempt = repository.begin_staged(
                spec,
                idempotency=arguments.unit_of_work(options.idempotency),
                order_by=options.order_by,
            )
            applied = attempt.applied is not None
            target = target_of(attempt, options)
            return cls(place, options, target, attempt.base.commit_id, applied)

    def stage(self, batches: Iterator[pa.RecordBatch]) -> tuple[str, ...]:
        task = StageTask(self.target, loose_bytes=min(LOOSE_BYTES, self.target.part_bytes))
        reports = [batch.column(0).to_pylist() for batch in task(batches)]
        return tuple(text for texts in reports for text in texts)

    def publish(self, messages: Sequence[TaskMessage], batch_id: int = 0) -> None:
        """What differs, as one commit, or nothing. `batch_id`: of a stream."""
        reports = [TaskReport.parse(text) for message in messages for text in message.reports]
        check_rows(self.target, reports)
        options = self.options
        staged = any(report.parts or report.loose for report in reports)
        if not staged and options.idempotency is None:
            return
        place = self.place
        with Session(place.uri, config=place.settings, branch=place.branch) as session:
            check_earlier_batches(session.repository, options.idempotency, batch_id)
            attempt = session.repository.begin_staged(
                self.target.spec,
                idempotency=arguments.unit_of_work(options.idempotency),
                order_by=options.order_by,
                attempt=self.target.attempt,
            )
            if attempt.applied is not None:
                self.discard()
                return
            with attempt, attempt:  # twice: Ctrl-C may come at the first instruction of leaving
                ascending = take_parts(attempt, reports, self.target.part_bytes)
                if attempt.top is not None or options.order_by is not None:
                    attempt.keep_differing(since=self.base, part_bytes=self.target.part_bytes)
                    ascending = False
                check_unique(attempt, ascending=ascending)
                publish(session, attempt, options)

    def discard(self) -> None:
        """Delete what was staged, unless it is published or may yet be."""
        try:
            with self.place.opened() as repository:
                if (objects := repository.objects) is not None:
                    discard_staged(objects.chain, self.target.attempt, since=self.base)
        except UnknownBranchError as error:
            # It may have been merged before it was deleted: garbage collection knows.
            log.info("staged parts stay for garbage collection: %s", error)


class BatchSink(DataSourceArrowWriter):
    """`df.write.format("ontologia")`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        sink = self._sink
        reports = () if sink.applied else sink.stage(iterator)
        return TaskMessage(sink.target.attempt, sink.base, reports)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if not self._sink.applied:
            self._sink.publish(_staged(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if not self._sink.applied:
            self._sink.discard()


class StreamSink(DataSourceStreamArrowWriter):
    """`writeStream.format("ontologia")`: each batch of a query is published once.

    The query's id is in its checkpoint, so it outlives restarts; a new checkpoint is a new query.
    """

    def __init__(self, sink: Sink, app_id: str | None) -> None:
        self._sink = sink
        self._app_id = app_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        facts = [
            context.getLocalProperty(name) if context else None for name in (_QUERY, _RUN, _BATCH)
        ]
        if not all(facts):
            raise ConfigurationError(
                "data source ontologia: Spark does not tell its tasks which query and batch they "
                "are of; write the stream with foreachBatch(batch_writer(...))"
            )
        # All tasks of a batch stage under one name, and the same batch in another run under
        # another.
        name = hashlib.sha256("/".join(map(str, facts)).encode()).hexdigest()[:32]
        attempt = attempt_beside(name, self._sink.target.attempt)
        sink = self._of(attempt)
        place = sink.place
        base = head_commit_id(place.uri, place.settings, place.branch, attempt)
        return TaskMessage(attempt, base, sink.stage(iterator), query_id=facts[0])

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        for sink in self._sinks(messages, batchId):
            sink.publish(_staged(messages), batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        for sink in self._sinks(messages, batchId):
            sink.discard()

    def _sinks(
        self, messages: Sequence[WriterCommitMessage | None], batch_id: int
    ) -> Iterator[Sink]:
        """The batch's write; none when no task has reported."""
        staged = _staged(messages)
        if not staged:
            return
        names = [name for name in (self._app_id, staged[0].query_id) if name]
        sink = self._of(staged[0].attempt)
        options = replace(sink.options, idempotency=("/".join(names), batch_id))
        yield replace(sink, options=options, base=min(message.base for message in staged))

    def _of(self, attempt: str) -> Sink:
        target = self._sink.target
        aside = target.quarantine
        if aside is not None:
            prefix = aside.prefix.replace(aside.attempt, attempt)
            aside = replace(aside, attempt=attempt, prefix=prefix)
        return replace(self._sink, target=replace(target, attempt=attempt, quarantine=aside))


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[TaskMessage]:
    return [message for message in messages if isinstance(message, TaskMessage)]


def check_earlier_batches(
    repository: Repository, unit: tuple[str, int | str] | None, batch_id: int
) -> None:
    """A branch that has nothing of the batches before is another one than they went to: it was
    made anew under the name. Spark opens it by its name for each batch. (Each batch leaves its
    mark, also one that changes nothing.)"""
    objects = repository.objects
    if not batch_id or unit is None or objects is None or not objects.chain.incarnation:
        return
    if objects.last_version(unit[0]) is None:
        raise ConfigurationError(
            f"branch {repository.branch!r} has nothing of the batches before {batch_id} of this "
            "query: it was deleted and made anew, or is another one than they went to. Start the "
            "query with a new checkpoint"
        )


_NO_WORKER = "Python worker failed to connect back"

Offset = Mapping[str, Any]  # {"commit_id": 41, "log_id": "..."}


class ChangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows the commits that change one type."""

    def __init__(self, asked: PinnedRead) -> None:
        options = asked.options
        if not options.changes:
            raise ConfigurationError(
                "data source ontologia: a stream reads the change feed; add "
                '.option("changes", "true"), which adds the columns commit_id and operation'
            )
        if options.as_of is not None:
            raise ConfigurationError(
                "data source ontologia: a stream has no end, so it takes no as_of; "
                "since says where it begins"
            )
        self._asked = asked
        self._opened: ObjectRepository | None = None
        self._last: int | None = None  # the end of a query that reads what is there now

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's
        return self._offset(self._asked.options.since or 0)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The commit that last changed the type, or an earlier one within the limit."""
        self._check_log(start)  # or commits of another log would pass for read
        begin = int(start["commit_id"])
        end = self._repository().type_head(self._asked.spec) if self._last is None else self._last
        if isinstance(limit, ReadMaxFiles):
            end = min(end, begin + limit.max_files)
        return self._offset(max(begin, end))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's
        most = self._asked.options.max_commits
        return ReadAllAvailable() if most is None else ReadMaxFiles(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's
        self._last = self._repository().type_head(self._asked.spec)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        self._check_log(start)
        self._check_log(end)
        since, upto = int(start["commit_id"]), int(end["commit_id"])
        if since >= upto:
            return partitions_of(())
        plans = self._repository().executor().plan_changes(self._asked.spec, since=since, upto=upto)
        return partitions_of(plans)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_share(self._asked, partition)

    def _repository(self) -> ObjectRepository:
        """One for the life of the query, in the process that plans its batches."""
        if self._opened is None:
            place = self._asked.options.place
            repository = open_repository(place.uri, place.settings, branch=place.branch)
            SameBranch(self._asked.incarnation).check(repository)
            self._opened = repository.objects
            assert self._opened is not None, "no storage but this kind has changes to stream"
        return self._opened

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _offset(self, commit_id: int) -> dict[str, Any]:
        incarnation = self._asked.incarnation
        chain = {"incarnation": incarnation} if incarnation else {}
        return {"commit_id": commit_id, "log_id": self._log_id(), **chain}

    def _log_id(self) -> str:
        return self._repository().chain.read_head().head.log_id

    def _check_log(self, offset: Offset) -> None:
        if offset["log_id"] != self._log_id():
            raise IntegrityError(
                f"{self._asked.options.place.uri} was erased and begun anew since this query read "
                "from it: its commit ids mean other commits now; start the query with a new "
                "checkpoint"
            )
        if offset.get("incarnation", "") != self._asked.incarnation:
            raise ConfigurationError(
                f"the checkpoint of this query is of another branch than "
                f"{self._asked.options.place.branch!r} as it is now, and commit ids are each "
                "branch's own: start the query with a new checkpoint"
            )


def start_query(starting: DataStreamWriter, *, patience_s: float = 120.0) -> StreamingQuery:
    """`starting.start()`, also where the machine is busy.

    Spark gives the Python process that runs `foreachBatch` on a Connect server ten seconds to
    come up, and has no setting for it. A query that failed by that has done nothing yet, so it is
    started again until `patience_s` are over.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return starting.start()
        except Exception as error:
            if _NO_WORKER not in str(error) or time.monotonic() > deadline:
                raise
            log.warning("the Python worker of a streaming query did not come up: once more")


def batch_writer(
    type: Any,
    storage: Session | str,
    *,
    branch: str | None = None,
    app_id: str | None = None,
    config: OntologiaConfig | None = None,
    on_result: Callable[[WriteResult], None] | None = None,
    **options: Any,
) -> BatchWriter:
    """A function for `foreachBatch` that writes each micro-batch as one commit.

    type:       a declared class, a TypeSpec, or the name of a stored type
    storage:    a Session, or a storage URI (the only way with Spark Connect)
    branch:     the branch to write to; the session's own, or main, when left out. A query ends
                with it, also when another is made under its name
    app_id:     put before the query's id in the unit of work. With Spark Connect, which does not
                tell a batch its query, it is the whole name: use another with a new checkpoint
    on_result:  called with the WriteResult of each batch
    options:    those of `write_type`, but for `idempotency`
    """
    if "idempotency" in options:
        raise ConfigurationError(
            "batch_writer: the batch itself is the unit of work; leave idempotency out"
        )
    return BatchWriter(type, storage, branch, app_id, config, on_result, options)


@dataclass(frozen=True)
class BatchWriter:
    """What `batch_writer` makes."""

    type: Any
    storage: Session | str
    branch: str | None = None
    app_id: str | None = None
    config: OntologiaConfig | None = None
    on_result: Callable[[WriteResult], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        unit = (self._name_of(df), batch_id)
        if isinstance(self.storage, Session):
            with on_branch(self.storage, self.branch) as session:
                self._write(df, session, unit)
            return
        with Session(self.storage, config=self.config, branch=self.branch) as session:
            self._write(df, session, unit)

    def __getstate__(self) -> dict[str, Any]:
        """Spark Connect sends the function to its server."""
        if isinstance(self.storage, Session):
            raise ConfigurationError(
                "batch_writer: an open Session cannot be sent to a Spark Connect server; give the "
                "storage's URI"
            )
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def _write(self, df: DataFrame, session: Session, unit: tuple[str, int]) -> None:
        check_earlier_batches(session.repository, unit, unit[1])
        spec = self.type
        if isinstance(spec, str):
            spec = find_type(session.repository, spec)
        result = write_type(df, spec, session, idempotency=unit, **self.options)
        if self.on_result is not None:
            self.on_result(result)

    def _name_of(self, df: DataFrame) -> str:
        """The same at every restart from one checkpoint, and another for another checkpoint."""
        if is_connect(df.sparkSession):
            if self.app_id is None:
                raise ConfigurationError(
                    "batch_writer: Spark Connect does not tell a batch the id of its query; name "
                    "the query by app_id, and give it a new name with each new checkpoint"
                )
            return self.app_id
        query_id = df.sparkSession.sparkContext.getLocalProperty(_QUERY)
        if query_id is None:
            raise ConfigurationError("batch_writer: this is for foreachBatch of a streaming query")
        return f"{self.app_id}/{query_id}" if self.app_id else query_id
