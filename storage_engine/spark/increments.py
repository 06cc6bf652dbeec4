"""A small source beside a large type: executors look its keys up in the files.

What comes back is the versions that the source's identities have, a few rows, and comparing goes on
with these as it would with all: so a wrong guess costs time, never an answer. A source counts as
small once its rows are known to be few: by what Catalyst expects of it, or by counting them, which
stops at the limit and is not done where it would take a shuffle.

Rows that the source lacks are not found this way, so a write that marks them compares with all.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from storage_engine.config import MIB, OntologiaConfig
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.object.read.files import DataFile, files_of
from storage_engine.repository.object.read.key_lookup import Effort, WantedKeys, look_up
from storage_engine.repository.object.read.plan import Entry
from storage_engine.repository.object.read.splits import packed
from storage_engine.spark.driver import expected_bytes, shuffles
from storage_engine.spark.hash_tables import brought
from storage_engine.spark.scans import row_columns, task_store
from storage_engine.spark.schema import COMMIT_ID
from storage_engine.spark.staged_parts import REPORT, REPORT_DDL, exchanged

LARGE_BYTES = 32 * MIB  # what is stored: less is soon compared as a whole
_FEW_ROWS = 100_000
_FEW_BYTES = 16 * MIB  # of their keys, and of what else they say: it travels with every task
_FOUND_BYTES = 64 * MIB  # of a task: many commits have many versions of few keys
_PART = 10  # and at most one of so many stored ones
_LITTLE = 8 * MIB  # by Catalyst's estimate
_TASK_BYTES = 32 * MIB


def is_increment(df: DataFrame, *, stored_rows: int, stored_bytes: int) -> bool:
    """Whether a source is worth being looked up by its keys."""
    if stored_bytes < LARGE_BYTES:
        return False
    limit = min(_FEW_ROWS, stored_rows // _PART)
    size = expected_bytes(df)
    if size is not None and size <= _LITTLE:
        return True  # if these are many rows after all, their number will tell
    return not shuffles(df) and df.limit(limit + 1).count() <= limit


@dataclass(frozen=True)
class MetRows:
    """The versions that a source's identities have in what is stored."""

    rows: Callable[[], DataFrame]
    count: int
    unique: bool  # no identity is in it twice
    bytes_read: int


@dataclass(frozen=True)
class KeyLookup:
    """Looks for identities in the files of a type."""

    spark: SparkSession
    uri: str
    config: OntologiaConfig
    spec: TypeSpec
    entries: Sequence[Entry]
    upto: int  # the commit as of which rows are latest
    stored_rows: int
    exact: Sequence[str] = ()

    def __call__(self, source: pa.Table) -> MetRows | None:
        """`source` has the stored columns of its rows, identities as bytes; None where there are
        too many. A row that is found has the latest version's own values as far as it takes to
        tell that it differs from the source's, and always in `exact` columns."""
        keys = source.select(list(self.spec.identity))
        if keys.num_rows > min(_FEW_ROWS, self.stored_rows // _PART) or keys.nbytes > _FEW_BYTES:
            return None
        exact = {*self.spec.identity, *self.exact}
        stated = source.select([name for name in source.column_names if name not in exact])
        wanted = WantedKeys(keys, self._exchanged(stated) if stated.nbytes <= _FEW_BYTES else None)
        files = [item for item in files_of(self.entries) if wanted.in_file(item.file)]
        entries = {id(item.entry): item.entry for item in files}.values()
        unique = len(entries) <= 1 and all(entry.unique(self.upto) for entry in entries)
        schema = exchanged(row_columns(self.spec, self._columns, with_commit_id=True))
        tables = [schema.empty_table()]
        effort = Effort()
        if files:
            reports = self._search(wanted, files, schema)
            if reports is None:
                return None
            for report in map(json.loads, reports):
                if report["rows"] is None:
                    return None
                effort.bytes_read += report["bytes_read"]
                with pa.ipc.open_stream(base64.b64decode(report["rows"])) as stream:
                    tables.append(stream.read_all())
        rows = pa.concat_tables(tables)
        frame = partial(self.spark.createDataFrame, rows, from_arrow_schema(schema))
        return MetRows(frame, rows.num_rows, unique, effort.bytes_read)

    def _exchanged(self, stated: pa.Table) -> pa.Table:
        """With the types that found rows have, too."""
        schema = exchanged(row_columns(self.spec, stated.column_names, with_commit_id=False))
        return stated.cast(pa.schema([field.with_nullable(True) for field in schema]))

    @property
    def _columns(self) -> list[str]:
        return [*self.spec.identity, *(field.name for field in self.spec.fields)]

    def _search(
        self, wanted: WantedKeys, files: Sequence[DataFile], schema: pa.Schema
    ) -> list[str] | None:
        tasks = [[_share(item) for item in some] for some in packed(files, _TASK_BYTES)]
        primary = self.spec.primary_key
        work = partial(_search_files, self.uri, self.config, wanted, schema, primary, tasks)
        frame = self.spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(work, REPORT_DDL)
        table = brought(frame)
        return table.column(0).to_pylist() if table is not None else None


@dataclass(frozen=True)
class _FileShare:
    path: str
    bytes: int
    commit_id: int | None  # None: its rows tell


def _share(item: DataFile) -> _FileShare:
    told = item.file.commit_id_source == "column"
    commit_id = None if told else item.entry.max_commit_id
    return _FileShare(item.file.path, item.file.bytes, commit_id)


def _search_files(
    uri: str,
    config: OntologiaConfig,
    wanted: WantedKeys,
    schema: pa.Schema,
    primary_key: str | None,
    tasks: Sequence[Sequence[_FileShare]],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    store = task_store(uri, config)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            effort = Effort()
            sink = io.BytesIO()
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            pieces = (
                _whole(rows, schema, share.commit_id, primary_key)
                for share in tasks[number]
                for rows in look_up(
                    store,
                    share.path,
                    share.bytes,
                    wanted,
                    _read_columns(schema, share, primary_key),
                    effort,
                )
            )
            with pa.ipc.new_stream(sink, schema, options=options) as stream:
                for rows in pieces:
                    stream.write_table(rows)
                    if sink.tell() > _FOUND_BYTES:
                        break
            fits = sink.tell() <= _FOUND_BYTES
            text = base64.b64encode(sink.getvalue()).decode() if fits else None
            report = json.dumps({**asdict(effort), "rows": text})
            yield pa.RecordBatch.from_arrays([pa.array([report])], schema=REPORT)


def _read_columns(schema: pa.Schema, share: _FileShare, primary_key: str | None) -> list[str]:
    """Those that a file has; the key stands for the field that it is made of."""
    return [
        name
        for name in schema.names
        if name != primary_key and (name != COMMIT_ID or share.commit_id is None)
    ]


def _whole(
    rows: pa.Table, schema: pa.Schema, commit_id: int | None, primary_key: str | None
) -> pa.Table:
    def column(name: str) -> Any:
        if name == COMMIT_ID and commit_id is not None:
            return pa.repeat(pa.scalar(commit_id, pa.int64()), rows.num_rows)
        return rows.column("entity_key" if name == primary_key else name)

    columns = [column(field.name).cast(field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)
