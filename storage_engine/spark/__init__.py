"""Spark for what outgrows one machine: bulk writes, scans, compaction, migration and merges of an
ontology.

Names are loaded at first use: importing this package does not import pyspark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage_engine.spark.datasource import register
    from storage_engine.spark.driver import spark_session
    from storage_engine.spark.merge import merge_with_spark, update_with_spark
    from storage_engine.spark.migration import migrate_with_spark
    from storage_engine.spark.reader import read_entities, read_relations, read_type
    from storage_engine.spark.results import WriteProgress, WriteResult
    from storage_engine.spark.schema import check_dataframe, spark_schema
    from storage_engine.spark.streaming import batch_writer, start_query
    from storage_engine.spark.writer import write_entities, write_relations, write_type

__all__ = [
    "WriteProgress",
    "WriteResult",
    "batch_writer",
    "check_dataframe",
    "merge_with_spark",
    "migrate_with_spark",
    "read_entities",
    "read_relations",
    "read_type",
    "register",
    "spark_schema",
    "spark_session",
    "start_query",
    "update_with_spark",
    "write_entities",
    "write_relations",
    "write_type",
]

_MODULES = {
    "WriteProgress": "storage_engine.spark.results",
    "WriteResult": "storage_engine.spark.results",
    "batch_writer": "storage_engine.spark.streaming",
    "check_dataframe": "storage_engine.spark.schema",
    "merge_with_spark": "storage_engine.spark.merge",
    "migrate_with_spark": "storage_engine.spark.migration",
    "read_entities": "storage_engine.spark.reader",
    "read_relations": "storage_engine.spark.reader",
    "read_type": "storage_engine.spark.reader",
    "register": "storage_engine.spark.datasource",
    "spark_schema": "storage_engine.spark.schema",
    "spark_session": "storage_engine.spark.driver",
    "start_query": "storage_engine.spark.streaming",
    "update_with_spark": "storage_engine.spark.merge",
    "write_entities": "storage_engine.spark.writer",
    "write_relations": "storage_engine.spark.writer",
    "write_type": "storage_engine.spark.writer",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
