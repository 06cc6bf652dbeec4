"""Ontologia in Dagster: what a project imports.

    from ontologia_dagster import OntologyAsset, SourceSpec, build_platform, location_resources

Everything public is importable from here, and docs/dagster.md uses nothing else. Names are loaded
at first use: importing the package imports no Dagster, reads no file and opens no storage.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ontologia_dagster.components.ontology_type import OntologyTypeComponent
    from ontologia_dagster.declaration import (
        EVENTS_POOL,
        INGEST_POOL,
        MAINTENANCE_POOL,
        CompactionSpec,
        FreshnessSpec,
        OntologyAsset,
        PartitionSpec,
        RetrySpec,
        SourceSpec,
        on_new_data,
        one_process_executor,
    )
    from ontologia_dagster.downstream.io_manager import OntologyIOManager
    from ontologia_dagster.downstream.queries import query_asset
    from ontologia_dagster.ingestion.asset import build_type, build_types
    from ontologia_dagster.resources.environments import Environment, Environments
    from ontologia_dagster.resources.ontology import OntologyResource, report_failures
    from ontologia_dagster.resources.spark import SparkResource
    from ontologia_dagster.storage.alerts import Alert, Notifier
    from ontologia_dagster.storage.lineage import emits
    from ontologia_dagster.storage.storage_defs import (
        STORAGE,
        build_platform,
        build_platforms,
        location_resources,
    )

__all__ = [
    "EVENTS_POOL",
    "INGEST_POOL",
    "MAINTENANCE_POOL",
    "STORAGE",
    "Alert",
    "CompactionSpec",
    "Environment",
    "Environments",
    "FreshnessSpec",
    "Notifier",
    "OntologyAsset",
    "OntologyIOManager",
    "OntologyResource",
    "OntologyTypeComponent",
    "PartitionSpec",
    "RetrySpec",
    "SourceSpec",
    "SparkResource",
    "build_platform",
    "build_platforms",
    "build_type",
    "build_types",
    "emits",
    "location_resources",
    "on_new_data",
    "one_process_executor",
    "query_asset",
    "report_failures",
]

_MODULES = {
    "Alert": "ontologia_dagster.storage.alerts",
    "CompactionSpec": "ontologia_dagster.declaration",
    "EVENTS_POOL": "ontologia_dagster.declaration",
    "Environment": "ontologia_dagster.resources.environments",
    "Environments": "ontologia_dagster.resources.environments",
    "FreshnessSpec": "ontologia_dagster.declaration",
    "INGEST_POOL": "ontologia_dagster.declaration",
    "MAINTENANCE_POOL": "ontologia_dagster.declaration",
    "Notifier": "ontologia_dagster.storage.alerts",
    "OntologyAsset": "ontologia_dagster.declaration",
    "OntologyIOManager": "ontologia_dagster.downstream.io_manager",
    "OntologyResource": "ontologia_dagster.resources.ontology",
    "OntologyTypeComponent": "ontologia_dagster.components.ontology_type",
    "PartitionSpec": "ontologia_dagster.declaration",
    "RetrySpec": "ontologia_dagster.declaration",
    "STORAGE": "ontologia_dagster.storage.storage_defs",
    "SourceSpec": "ontologia_dagster.declaration",
    "SparkResource": "ontologia_dagster.resources.spark",
    "build_platform": "ontologia_dagster.storage.storage_defs",
    "build_platforms": "ontologia_dagster.storage.storage_defs",
    "build_type": "ontologia_dagster.ingestion.asset",
    "build_types": "ontologia_dagster.ingestion.asset",
    "emits": "ontologia_dagster.storage.lineage",
    "location_resources": "ontologia_dagster.storage.storage_defs",
    "on_new_data": "ontologia_dagster.declaration",
    "one_process_executor": "ontologia_dagster.declaration",
    "query_asset": "ontologia_dagster.downstream.queries",
    "report_failures": "ontologia_dagster.resources.ontology",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
