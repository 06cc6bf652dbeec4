"""Stored rows as a DataFrame, for writers to compare with.

The files are those of one head, so that a DataFrame never mixes two.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from storage_engine.commitlog.records import Entry
from storage_engine.config import OntologiaConfig
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.open import open_store
from storage_engine.repository.object.scan import files_of
from storage_engine.spark.scans import scan_of
from storage_engine.spark.schema import COMMIT_ID as COMMIT

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
