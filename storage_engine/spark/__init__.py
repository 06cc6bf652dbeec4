"""Spark for what outgrows one machine: bulk writes, scans and compaction of an ontology.

Names are loaded at first use: importing this package does not import pyspark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage_engine.spark.context import spark_session
    from storage_engine.spark.results import WriteProgress, WriteResult
    from storage_engine.spark.writer import write_entities, write_relations, write_type

__all__ = [
    "WriteProgress",
    "WriteResult",
    "spark_session",
    "write_entities",
    "write_relations",
    "write_type",
]

_MODULES = {
    "WriteProgress": "storage_engine.spark.results",
    "WriteResult": "storage_engine.spark.results",
    "spark_session": "storage_engine.spark.context",
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
