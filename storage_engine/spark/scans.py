"""Files of a plan as DataFrames: Spark's own Parquet reader where it can open them, else Arrow.

Both give the same columns, `commit_id` included where it is asked for: that of staged parts is in
their manifest, not in the file. Writers compare with stored rows and with their own staged ones
through the same scans; the files are those of one head, so that a DataFrame never mixes two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import LongType, StructField, StructType

from storage_engine.config import MIB, OntologiaConfig
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.repository.object.read.files import (
    STAGED_PART_URL,
    DataFile,
    attempt_in_url,
    decode,
    files_of,
    versioned_schema,
)
from storage_engine.repository.object.read.key_lookup import missing_file
from storage_engine.repository.object.read.plan import Entry
from storage_engine.repository.object.read.splits import packed
from storage_engine.repository.object.write.staged_write import StagedWrite
from storage_engine.spark.schema import COMMIT_ID, quoted
from storage_engine.spark.staged_parts import exchanged

_NAMED = 8  # the largest staged commits: one expression tells their parts; the others are joined
_TASK_BYTES = 32 * MIB
_BATCH_ROWS = 64 * 1024
# Hadoop takes these for a pattern, or leaves the file out without a word.
_ODD = re.compile(r"[*?\[\]{}\\]|/[._][^/]*$")
_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"


class Scan(Protocol):
    """Opens files of one type."""

    def read(
        self, files: Sequence[DataFile], columns: Sequence[str], *, with_commit_id: bool
    ) -> DataFrame:
        """Their rows: `columns` of the type's row schema, after `commit_id` where it is asked
        for."""


def scan_of(
    spark: SparkSession,
    store: ObjectStore,
    config: OntologiaConfig,
    spec: TypeSpec,
    files: Iterable[DataFile],
) -> Scan:
    """The best way to read these files."""
    files = list(files)
    if any(item.stored is not None for item in files):  # Spark would look for columns of today
        return ArrowScan(spark, spec, store.uri, config)
    s3a = reaches(spark, store)
    urls = {item.file.path: _url(store, item.file.path, s3a=s3a) for item in files}
    if all(url is not None for url in urls.values()):
        return NativeScan(spark, spec, {path: str(url) for path, url in urls.items()})
    return ArrowScan(spark, spec, store.uri, config)


def _url(store: ObjectStore, key: str, *, s3a: bool) -> str | None:
    """What Spark can open an object by."""
    path = store.local_path(key)
    if path is not None:
        url = f"file://{path}"
    elif s3a:
        url = "s3a" + f"{store.uri}/{key}".removeprefix("s3")
    else:
        return None
    return None if _ODD.search(url) else url


def has_s3a(spark: SparkSession) -> bool:
    """Whether hadoop-aws is on the class path, which PySpark does not bring with it.

    A Spark Connect client cannot see the class path of its server.
    """
    context = getattr(spark, "_jsc", None)
    if context is None:
        return False
    return context.hadoopConfiguration().getClassByNameOrNull(_S3A) is not None


def reaches(spark: SparkSession, store: ObjectStore) -> bool:
    """Whether Spark's `s3a://` means the store's own server: its settings may be for another one,
    where a bucket of that name can hold anything."""
    if store.server is None or not has_s3a(spark):
        return False
    hadoop: Any = spark._jsc.hadoopConfiguration()
    bucket = store.uri.removeprefix("s3://").partition("/")[0]
    theirs = hadoop.get(f"fs.s3a.bucket.{bucket}.endpoint") or hadoop.get("fs.s3a.endpoint") or ""
    return same_server(theirs, store.server)


def same_server(server: str, other: str) -> bool:
    """Whether two endpoints are one; "" is AWS, whatever the region."""

    def name(endpoint: str) -> str:
        plain = endpoint.removeprefix("https://").removeprefix("http://").rstrip("/").lower()
        return "" if plain.partition(":")[0].endswith(".amazonaws.com") else plain

    return name(server) == name(other)


def row_columns(spec: TypeSpec, columns: Sequence[str], *, with_commit_id: bool) -> pa.Schema:
    """Columns of the row schema as files have them, after `commit_id` where it is asked for."""
    declared = versioned_schema(spec)
    names = [COMMIT_ID, *columns] if with_commit_id else list(columns)
    return pa.schema([declared.field(name) for name in names])


def _in_files(schema: pa.Schema) -> StructType:
    """What Spark's reader is to be told of the columns: by default it refuses times of day, but
    reads them as numbers of microseconds."""
    fields = [
        StructField(field.name, LongType(), field.nullable)
        if pa.types.is_time(field.type)
        else from_arrow_schema(pa.schema([field])).fields[0]
        for field in schema
    ]
    return StructType(fields)


def _clock(micros: str) -> Column:
    """Microseconds of a day as text, whatever time zone the session is in."""
    parts = [
        (f"{micros} div 3600000000", 2, ""),
        (f"({micros} div 60000000) % 60", 2, ":"),
        (f"({micros} div 1000000) % 60", 2, ":"),
        (f"{micros} % 1000000", 6, "."),
    ]
    texts = (
        f"'{before}', lpad(cast({number} as string), {digits}, '0')"
        for number, digits, before in parts
    )
    return F.expr(f"concat({', '.join(texts)})")


def _row_count(files: Iterable[DataFile]) -> int:
    return sum(item.file.row_count for item in files)


@dataclass(frozen=True)
class NativeScan:
    """Spark's own reader: it prunes columns and pushes filters down to row groups."""

    spark: SparkSession
    spec: TypeSpec
    urls: Mapping[str, str]

    def read(
        self, files: Sequence[DataFile], columns: Sequence[str], *, with_commit_id: bool
    ) -> DataFrame:
        rows = _in_files(row_columns(self.spec, columns, with_commit_id=False))
        if not with_commit_id:
            scan = self._open(files, rows)
            return scan.select(*self._shown(scan, columns))
        own = [item for item in files if item.file.commit_id_source == "column"]
        given: dict[int, list[DataFile]] = {}
        for item in files:
            if item.file.commit_id_source != "column":
                given.setdefault(item.entry.max_commit_id, []).append(item)
        largest = sorted(given, key=lambda commit_id: -_row_count(given[commit_id]))
        named = {commit_id: given[commit_id] for commit_id in largest[:_NAMED]}
        others = {commit_id: given[commit_id] for commit_id in largest[_NAMED:]}
        parts = [self._together(own, named, columns)] if own or named else []
        if others:
            parts.append(self._joined(others, rows))
        return reduce(lambda a, b: a.unionByName(b), parts)

    def _together(
        self,
        own: Sequence[DataFile],
        named: Mapping[int, Sequence[DataFile]],
        columns: Sequence[str],
    ) -> DataFrame:
        """One scan of all these files, however many commits: a union would copy every row, and
        have whatever is joined with it joined once for each commit.

        The path tells the commit of a staged part, which costs nothing until somebody asks.
        """
        schema = _in_files(row_columns(self.spec, columns, with_commit_id=bool(own)))
        scan = self._open([*own, *(item for staged in named.values() for item in staged)], schema)
        commit_columns = [scan[COMMIT_ID]] if own else []  # null where the file has no such column
        if named:
            path = scan.metadataColumn("_metadata")["file_path"]
            told: Any = F  # `when` begins a CASE here, and continues it there
            for commit_id, staged in named.items():
                attempts = {item.attempt for item in staged}
                there = [path.contains(attempt_in_url(attempt)) for attempt in sorted(attempts)]
                told = told.when(reduce(lambda a, b: a | b, there), F.lit(commit_id))
            commit_columns.append(told)
        commit_ids = F.coalesce(*commit_columns).cast("long").alias(COMMIT_ID)
        return scan.select(commit_ids, *self._shown(scan, columns))

    def _shown(self, scan: DataFrame, columns: Iterable[str]) -> list[Column]:
        """Columns as readers get them: Spark reads a time of day as the number that it is."""
        times = {field.name for field in self.spec.fields if field.storage == "time"}
        return [
            _clock(quoted(name)).alias(name) if name in times else scan[quoted(name)]
            for name in columns
        ]

    def _open(self, files: Sequence[DataFile], schema: StructType) -> DataFrame:
        # A folder named `tier=Gold` above the files is no column.
        reader = self.spark.read.schema(schema).option("recursiveFileLookup", "true")
        # Whatever the session says of Spark's own old files: ours are in the one true calendar.
        reader = reader.option("datetimeRebaseMode", "CORRECTED")
        # And a file that is missing or damaged is an error, never a smaller answer.
        reader = reader.options(ignoreMissingFiles="false", ignoreCorruptFiles="false")
        return reader.parquet(*(self.urls[item.file.path] for item in files))

    def _joined(self, given: Mapping[int, Sequence[DataFile]], schema: StructType) -> DataFrame:
        """One scan of many commits' parts: the attempt in a part's path tells its commit."""
        attempts = {
            item.attempt: commit_id for commit_id, staged in given.items() for item in staged
        }
        commits = self.spark.createDataFrame(
            list(attempts.items()), f"__attempt string, {COMMIT_ID} long"
        )
        scan = self._open([item for staged in given.values() for item in staged], schema)
        path = scan.metadataColumn("_metadata")["file_path"]
        attempt = F.regexp_extract(path, STAGED_PART_URL, 1)
        joined = scan.select("*", attempt.alias("__attempt")).join(
            commits.hint("broadcast"), "__attempt"
        )
        return joined.select(COMMIT_ID, *self._shown(joined, schema.names))


@dataclass(frozen=True)
class ArrowScan:
    """Executors open the store themselves and hand Spark Arrow batches."""

    spark: SparkSession
    spec: TypeSpec
    uri: str
    config: OntologiaConfig

    def read(
        self, files: Sequence[DataFile], columns: Sequence[str], *, with_commit_id: bool
    ) -> DataFrame:
        schema = exchanged(row_columns(self.spec, columns, with_commit_id=with_commit_id))
        tasks = [
            [
                (
                    item.file.path,
                    item.entry.max_commit_id if item.file.commit_id_source != "column" else None,
                    item if item.stored is not None else None,
                )
                for item in some
            ]
            for some in packed(files, _TASK_BYTES)
        ]
        plain = TypeSpec.from_schema_dict(self.spec.schema_dict())  # without the user's class
        work = partial(_read_tasks, self.uri, self.config, plain, schema, tasks)
        return in_arrow(self.spark, len(tasks), work, schema)


def in_arrow(spark: SparkSession, tasks: int, work: Any, schema: pa.Schema) -> DataFrame:
    """A DataFrame of what `work(numbers)` yields, one Spark task for each number."""
    numbers = spark.range(0, tasks, 1, tasks)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from work(batch.column(0).to_pylist())

    return numbers.mapInArrow(run, from_arrow_schema(schema))


# Path, the commit of its rows where the file does not say it, and what must be brought forward.
_Task = Sequence[tuple[str, int | None, DataFile | None]]


def _read_tasks(
    uri: str,
    config: OntologiaConfig,
    spec: TypeSpec,
    schema: pa.Schema,
    tasks: Sequence[_Task],
    numbers: Iterable[int],
) -> Iterator[pa.RecordBatch]:
    store = task_store(uri, config)
    for number in numbers:
        for path, given, older in tasks[number]:
            if older is None:
                yield from _read_file(store, path, schema, given)
                continue
            rows = decode(spec, store.bulk.get(path).data, older)
            yield from rows.select(schema.names).cast(schema).to_batches()


@lru_cache(maxsize=8)
def task_store(uri: str, config: OntologiaConfig) -> ObjectStore:
    """One for the life of a Python worker, which serves many tasks."""
    return open_store(uri, config)


def _read_file(
    store: ObjectStore, path: str, schema: pa.Schema, commit_id: int | None
) -> Iterator[pa.RecordBatch]:
    try:
        content = pa.BufferReader(store.bulk.get(path).data)
    except ObjectNotFound:
        raise missing_file(store, path) from None
    names = [name for name in schema.names if commit_id is None or name != COMMIT_ID]
    with pq.ParquetFile(content) as opened:
        for batch in opened.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
            columns = [
                pa.repeat(pa.scalar(commit_id, pa.int64()), batch.num_rows)
                if name == COMMIT_ID and commit_id is not None
                else batch.column(name)
                for name in schema.names
            ]
            yield pa.RecordBatch.from_arrays(
                [c.cast(f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
            )


def stored_rows(
    spark: SparkSession,
    uri: str,
    config: OntologiaConfig,
    spec: TypeSpec,
    entries: Sequence[Entry],
    columns: Sequence[str],
) -> DataFrame:
    """`commit_id` and the given row-schema columns of all rows in the entries' files."""
    files = files_of(entries)
    store = open_store(uri, config)
    try:
        scan = scan_of(spark, store, config, spec, files)
    finally:
        store.close()
    return scan.read(files, columns, with_commit_id=True)


def repeated(spark: SparkSession, attempt: StagedWrite) -> list[object]:
    """Three identities at most."""
    identity = list(attempt.spec.identity)
    keys = stored_rows(
        spark, attempt.uri, attempt.config, attempt.spec, [attempt.as_entry()], identity
    )
    # Hashes are shuffled, and only what they have in common is looked at itself.
    hashed = keys.select(F.xxhash64(*identity).alias("__hash"))
    again = hashed.groupBy("__hash").count().filter("count > 1").limit(1000)
    hashes = [row[0] for row in again.collect()]
    if not hashes:
        return []
    some = keys.filter(F.xxhash64(*identity).isin(hashes))
    twice = some.groupBy(*identity).count().filter("count > 1").orderBy(*identity).limit(3)
    rows = [tuple(row[name] for name in identity) for row in twice.collect()]
    return [row[0] if len(row) == 1 else row for row in rows]
