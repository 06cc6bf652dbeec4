"""Stored rows as a DataFrame: Spark opens the files itself where it can, else Python brings them.

Used by writers to compare with; the files are those of one head, so that a DataFrame never mixes
two. Spark can open the files of a directory store; those of other stores travel as Arrow batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.config import OntologiaConfig
from storage_engine.model.columns import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.open import open_store
from storage_engine.spark.rows import SPARK_TYPES

COMMIT = "commit_id"
_PATTERN = re.compile(r"[*?\[\]{}\\]")  # Spark would take such a path for a pattern
_BATCH_ROWS = 64 * 1024
_ATTEMPT = ".*/staged/([0-9a-f]+)/"


def stored_rows(
    spark: SparkSession,
    uri: str,
    config: OntologiaConfig,
    spec: TypeSpec,
    entries: Sequence[Entry],
    columns: Sequence[str],
) -> DataFrame:
    """`commit_id` and the given row-schema columns of all rows in the entries' files."""
    files = [(entry.max_commit_id, file) for entry in entries for file in entry.files]
    store = open_store(uri, config)
    try:
        paths = [store.local_path(file.path) for _, file in files]
    finally:
        store.close()
    names = [str(path) for path in paths if path is not None and not _PATTERN.search(str(path))]
    if len(names) == len(files) and files:
        return _native(spark, spec, files, names, columns)
    return _by_arrow(spark, uri, config, spec, files, columns)


def _native(
    spark: SparkSession,
    spec: TypeSpec,
    files: Sequence[tuple[int, CommitFile]],
    paths: Sequence[str],
    columns: Sequence[str],
) -> DataFrame:
    ddl = _ddl(spec, columns)
    listed = [f"`{name}`" for name in columns]
    own = [p for p, (_, f) in zip(paths, files, strict=True) if f.commit_id_source == "column"]
    given: dict[int, list[str]] = {}
    for path, (commit_id, file) in zip(paths, files, strict=True):
        if file.commit_id_source != "column":
            given.setdefault(commit_id, []).append(path)
    frames = []
    if own:
        schema = f"{COMMIT} bigint, {ddl}"
        frames.append(spark.read.schema(schema).parquet(*own).select(COMMIT, *listed))
    if len(given) == 1:
        ((commit_id, some),) = given.items()
        read = spark.read.schema(ddl).parquet(*some)
        frames.append(read.select(F.lit(commit_id).cast("bigint").alias(COMMIT), *listed))
    elif given:
        # All files of an attempt are of one commit, and their path names the attempt.
        pairs = {file.path.split("/")[1]: commit_id for commit_id, file in files}
        commits = spark.createDataFrame(list(pairs.items()), f"__attempt string, {COMMIT} bigint")
        every = [path for some in given.values() for path in some]
        read = spark.read.schema(ddl).parquet(*every)
        attempt = F.regexp_extract(F.col("_metadata.file_path"), _ATTEMPT, 1)
        joined = read.withColumn("__attempt", attempt).join(F.broadcast(commits), "__attempt")
        frames.append(joined.select(COMMIT, *listed))
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionAll(frame)
    return whole


def _by_arrow(
    spark: SparkSession,
    uri: str,
    config: OntologiaConfig,
    spec: TypeSpec,
    files: Sequence[tuple[int, CommitFile]],
    columns: Sequence[str],
) -> DataFrame:
    task = ReadTask(uri, config, replace(spec, python_class=None), tuple(files), tuple(columns))
    ids = spark.range(0, len(files), 1, max(1, len(files)))
    return ids.mapInArrow(task, f"{COMMIT} bigint, {_ddl(spec, columns)}")


def _ddl(spec: TypeSpec, columns: Sequence[str]) -> str:
    types = dict.fromkeys(spec.identity, "string")
    types |= {f.name: SPARK_TYPES[f.storage] for f in spec.fields}
    return ", ".join(f"`{name}` {types[name]}" for name in columns)


@dataclass(frozen=True)
class ReadTask:
    """Brings the rows of files, which come as their numbers."""

    uri: str
    config: OntologiaConfig
    spec: TypeSpec
    files: tuple[tuple[int, CommitFile], ...]
    columns: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = open_store(self.uri, self.config)
        try:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    commit_id, file = self.files[number]
                    data = store.get(file.path).data
                    yield from self._rows(data, commit_id, file)
        finally:
            store.close()

    def _rows(self, data: bytes, commit_id: int, file: CommitFile) -> Iterator[pa.RecordBatch]:
        schema = row_schema(self.spec)
        target = pa.schema([(COMMIT, pa.int64()), *(schema.field(n) for n in self.columns)])
        own = file.commit_id_source == "column"
        wanted = [COMMIT, *self.columns] if own else list(self.columns)
        with pq.ParquetFile(pa.BufferReader(data)) as opened:
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
                found = {name: batch.column(name) for name in self.columns}
                ids = (
                    batch.column(COMMIT)
                    if own
                    else pa.repeat(pa.scalar(commit_id, pa.int64()), batch.num_rows)
                )
                arrays = [ids, *(found[name] for name in self.columns)]
                yield pa.RecordBatch.from_arrays(arrays, schema=target)
