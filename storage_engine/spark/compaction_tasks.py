"""What executors do in a compaction: bring the rows of files, and write sorted rows to new ones.

Both run in Spark's Python workers (`mapInArrow`) and know the store by its URI. Names of files are
unique per partition and task attempt: a task that runs twice leaves orphans and never a mixture.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.config import OntologiaConfig
from storage_engine.errors import IntegrityError
from storage_engine.maintenance.compaction.inputs import Input, open_inputs
from storage_engine.maintenance.compaction.merge import (
    CURRENT,
    IDENTITY,
    SUPERSEDED,
    MergeOrder,
    Output,
    RoleWriter,
    split,
)
from storage_engine.objectstore.open import open_store
from storage_engine.repository.object.parquet import EncodedPart
from storage_engine.spark.staging import task_label

IS_CURRENT = "__current"  # bool: the row is in a file of that role
REPORT = pa.schema([pa.field("report", pa.string())])
REPORT_DDL = "report string"
_BATCH_ROWS = 64 * 1024


@dataclass(frozen=True)
class ReadTask:
    """Brings the rows of files, which come as their numbers, each checked against its hash."""

    uri: str
    config: OntologiaConfig
    schema: bytes  # of the rows, serialised: types do not travel otherwise
    files: tuple[tuple[int, CommitFile], ...]  # with the commit of rows that do not say it

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        store = open_store(self.uri, self.config)
        try:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    commit_id, file = self.files[number]
                    with tempfile.TemporaryDirectory(prefix="ontologia-compact-") as folder:
                        entry = Entry(commit_id, commit_id, (file,))
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
    with pq.ParquetFile(file.path) as opened:
        for batch in opened.iter_batches(batch_size=_BATCH_ROWS):
            arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
            if file.commit_id is not None:
                given = pa.scalar(file.commit_id, pa.int64())
                arrays["commit_id"] = pa.repeat(given, batch.num_rows)
            columns = [arrays[name] for name in schema.names]
            yield pa.RecordBatch.from_arrays(
                [*columns, pa.repeat(current, batch.num_rows)], names=[*schema.names, IS_CURRENT]
            )


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

    def _merge(self, rows: Iterator[pa.Table], schema: pa.Schema, folder: str) -> list[Output]:
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

    def _upload(self, outputs: Iterable[Output]) -> list[str]:
        _, label = task_label()
        store = open_store(self.uri, self.config)
        try:
            reports = []
            for number, output in enumerate(outputs):
                key = f"{self.folder}/{output.role}/part-{label}-{number:03d}.parquet"
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


def _report(key: str, output: Output) -> str:
    part = {
        field.name: getattr(output.part, field.name)
        for field in dataclasses.fields(output.part)
        if field.name != "content"
    }
    return json.dumps({"key": key, "role": output.role, "part": part})


def _table(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches([batch]).select(schema.names).cast(schema)
