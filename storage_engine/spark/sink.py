"""Writing by the data source: tasks stage rows as they come, the driver compares and publishes.

Spark calls `commit` with what the tasks report, in a process of its own, and `abort` after a commit
that raised: so `abort` first looks whether the log has the write. Only then, and only when no
publish can be under way any more, are the staged parts deleted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from storage_engine.errors import ConfigurationError
from storage_engine.repository.object.write.staged_write import discard_staged, head_commit_id
from storage_engine.runtime import arguments
from storage_engine.runtime.session import Session
from storage_engine.spark.datasource import SinkOptions, TypeLocation
from storage_engine.spark.publish import (
    WriteOptions,
    check_options,
    check_rows,
    check_unique,
    publish,
    take_parts,
    target_of,
)
from storage_engine.spark.schema import check_dataframe
from storage_engine.spark.staged_parts import LOOSE_BYTES, StageTarget, StageTask, TaskReport
from storage_engine.spark.storage import find_type, opened

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

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
        with opened(place.uri, place.settings) as repository:
            spec = find_type(repository, place.type, models=place.models)
            check_options(spec, options)
            check_dataframe(spec, schema)
            attempt = repository.begin_staged(
                spec,
                idempotency=arguments.unit_of_work(options.idempotency),
                order_by=options.order_by,
                announce=False,
            )
            applied = attempt.applied is not None
            target = target_of(attempt, options)
            return cls(place, options, target, attempt.base.commit_id, applied)

    def stage(self, batches: Iterator[pa.RecordBatch]) -> tuple[str, ...]:
        task = StageTask(self.target, loose_bytes=min(LOOSE_BYTES, self.target.part_bytes))
        reports = [batch.column(0).to_pylist() for batch in task(batches)]
        return tuple(text for texts in reports for text in texts)

    def publish(self, messages: Sequence[TaskMessage]) -> None:
        """What differs, as one commit, or nothing."""
        reports = [TaskReport.parse(text) for message in messages for text in message.reports]
        check_rows(self.target, reports)
        options = self.options
        staged = any(report.parts or report.loose for report in reports)
        if not staged and options.idempotency is None:
            return
        with Session(self.place.uri, config=self.place.settings) as session:
            attempt = session.repository.begin_staged(
                self.target.spec,
                idempotency=arguments.unit_of_work(options.idempotency),
                order_by=options.order_by,
                attempt=self.target.attempt,
            )
            if attempt.applied is not None:
                self.discard()
                return
            with attempt:
                ascending = take_parts(attempt, reports, self.target.part_bytes)
                if attempt.top is not None or options.order_by is not None:
                    attempt.keep_differing(since=self.base, part_bytes=self.target.part_bytes)
                    ascending = False
                check_unique(attempt, ascending=ascending)
                publish(session, attempt, options)

    def discard(self) -> None:
        """Delete what was staged, unless it is published or may yet be."""
        with opened(self.place.uri, self.place.settings) as repository:
            if (objects := repository.objects) is not None:
                discard_staged(objects.chain, self.target.attempt, since=self.base)


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
        attempt = hashlib.sha256("/".join(map(str, facts)).encode()).hexdigest()[:32]
        sink = self._of(attempt)
        base = head_commit_id(sink.place.uri, sink.place.settings)
        return TaskMessage(attempt, base, sink.stage(iterator), query_id=facts[0])

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        for sink in self._sinks(messages, batchId):
            sink.publish(_staged(messages))

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
