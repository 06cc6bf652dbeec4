"""Stored and staged rows as DataFrames, for writers to compare with.

The files are those of one head, so that a DataFrame never mixes two. Identities that are in staged
parts more than once are looked for by Spark where the driver alone would take too long, or would
have to bring the parts over a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from storage_engine.config import OntologiaConfig
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.open import open_store
from storage_engine.repository.object.read.files import files_of
from storage_engine.repository.object.write.staged_write import StagedWrite
from storage_engine.spark.scans import scan_of
from storage_engine.spark.schema import COMMIT_ID as COMMIT

if TYPE_CHECKING:
    from storage_engine.commitlog.records import Entry

__all__ = ["COMMIT", "stored_rows"]


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


# Up to here the driver looks through the keys itself; beyond it Spark does, which costs a shuffle.
DRIVER_ROWS = 20_000_000
DRIVER_BYTES = 64 * 1024 * 1024  # of parts that are not local


def for_spark(attempt: StagedWrite) -> bool:
    """Whether the parts are too much for the driver."""
    rows = sum(file.row_count for file in attempt.files)
    size = sum(file.bytes for file in attempt.files)
    return rows > DRIVER_ROWS or (not attempt.local and size > DRIVER_BYTES)


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
