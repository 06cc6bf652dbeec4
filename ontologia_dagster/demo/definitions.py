"""The demo as a code location of its own: the platform over the demo's types, and its assets."""

from __future__ import annotations

import os
from typing import Any

import dagster as dg

from ontologia_dagster import STORAGE as ONTOLOGY
from ontologia_dagster import (
    Environments,
    OntologyResource,
    build_platform,
    location_resources,
    one_process_executor,
)
from ontologia_dagster.dagster_compat import with_asset_if_there, without_check
from ontologia_dagster.demo.assets import ASSETS, CHECKS, DESTINATIONS_KNOWN, declarations
from ontologia_dagster.demo.instance import DELIVERY, STORAGE, demo_storage_uri
from ontologia_dagster.resources.branches import AUDITED
from ontologia_dagster.storage.checks import DEEP_VERIFY, INDEX_VERIFY, SCHEMA_MATCHES
from ontologia_dagster.storage.unpublished import publication_key
from storage_engine.repository.open import STORAGE_URI_VARIABLE

LOCATION = "flights"  # as workspace.yaml names it
HANDLER_MODULE = "ontologia_dagster.demo.events"
INGEST_JOB = f"{STORAGE}_ingest_all"
CORRECT_JOB = f"{STORAGE}_correct_all"
CHECK_JOB = f"{STORAGE}_check_types"
ALARM_JOB = f"{STORAGE}_look_for_trouble"
ALARMS = ("severe_delays", "disrupted_days", "airport_notices")
REPORTS = ("airline_punctuality",)

# Two attempts, soon after each other, so that nobody waits long to see a dead letter; and what a
# killed run had claimed is free again soon.
_ENGINE = {"event_max_attempts": 2, "event_backoff_base_ms": 200, "event_lease_ms": 10_000}
# One small machine: few tasks, no web page of Spark's own, nothing that others can connect to.
_SPARK = {
    "spark.sql.shuffle.partitions": "4",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Compiling for hours of work costs more than it saves in the minute or two that this takes.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
}


@dg.definitions
def defs() -> dg.Definitions:
    return demo_definitions()


def demo_definitions(ontology: OntologyResource | None = None) -> dg.Definitions:
    """All of it; on another ontology than the environment's, where one is given."""
    declared = declarations()
    resources = demo_resources() | ({STORAGE: ontology} if ontology is not None else {})
    after = dg.AssetSelection.assets(*ALARMS, *REPORTS)
    ingested = [declaration.asset_key for declaration in declared]
    own = dg.Definitions(assets=ASSETS, asset_checks=CHECKS)
    delivered = without_check(dg.AssetSelection.assets(DELIVERY, *ingested), DEEP_VERIFY)
    jobs = [
        dg.define_asset_job(
            INGEST_JOB,
            selection=without_check(delivered, DESTINATIONS_KNOWN),
            description="Deliver the files and ingest all types; flights for all months at once.",
            executor_def=one_process_executor,
        ),
        dg.define_asset_job(
            CORRECT_JOB,
            selection=with_asset_if_there(delivered, publication_key(STORAGE)),
            description="The same, audited: all types are published in one commit, if all flights "
            "go to airports that are there.",
            executor_def=one_process_executor,
        ),
        dg.define_asset_job(
            ALARM_JOB,
            selection=after,
            description="Look for trouble in what is stored, tell of it, and report.",
            executor_def=one_process_executor,
        ),
        dg.define_asset_job(
            CHECK_JOB,
            # Those of what the rows are expected to be come with the ingestion, and only with it.
            selection=dg.AssetSelection.checks(
                *(
                    dg.AssetCheckKey(key, name)
                    for key in ingested
                    for name in (INDEX_VERIFY, SCHEMA_MATCHES)
                )
            ),
            description="Compare every type's index with the log, and its class with the storage.",
            executor_def=one_process_executor,
        ),
    ]
    return dg.Definitions.merge(
        build_platform(
            declared,
            storage=STORAGE,
            beside=own,
            handlers=[HANDLER_MODULE],
            running=True,
            publish=AUDITED,
        ),
        own,
        dg.Definitions(jobs=jobs),
        dg.Definitions(
            resources=resources,
            executor=one_process_executor,  # one process, one JVM for all steps of a run
        ),
    )


def demo_resources() -> dict[str, Any]:
    """Of the environment that was chosen, with settings that suit the demo where it has none."""
    environments = Environments.load({**os.environ, STORAGE_URI_VARIABLE: demo_storage_uri()})
    current = environments.current
    spark = current.spark.model_copy(update={"config": {**_SPARK, **current.spark.config}})
    settings = {
        "engine": {**_ENGINE, **current.engine},
        "spark": spark,
        "create_storage": True,
        "tenants": {},
    }
    chosen = environments.model_copy(update={"current": current.model_copy(update=settings)})
    resources = location_resources(chosen, location=LOCATION)
    return {STORAGE: resources.pop(ONTOLOGY), **resources}
