"""The demo as a code location of its own: the platform over the demo's types, and its assets."""

from __future__ import annotations

from typing import Any

import dagster as dg

from ontologia_dagster import (
    STORAGE,
    Environments,
    OntologyResource,
    build_platform,
    location_resources,
)
from ontologia_dagster.demo.assets import ASSETS, declarations
from ontologia_dagster.demo.instance import GROUP
from ontologia_dagster.demo.ontology import Disruption, Incident

LOCATION = "flights"  # as workspace.yaml names it
HANDLER_MODULE = "ontologia_dagster.demo.events"
INGEST_JOB = "ingest_all"
CHECK_JOB = "check_indices"
ALARM_JOB = "look_for_trouble"
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
    everything = dg.AssetSelection.groups(GROUP)
    jobs = [
        dg.define_asset_job(
            INGEST_JOB,
            selection=everything - after,
            description="Deliver the files and ingest all types; flights for all months at once.",
            executor_def=dg.in_process_executor,
        ),
        dg.define_asset_job(
            ALARM_JOB,
            selection=after,
            description="Look for trouble in what is stored, tell of it, and report.",
            executor_def=dg.in_process_executor,
        ),
        dg.define_asset_job(
            CHECK_JOB,
            selection=dg.AssetSelection.checks_for_assets(*(asset.asset_key for asset in declared)),
            description="Compare every type's index with the log, and its class with the storage.",
            executor_def=dg.in_process_executor,
        ),
    ]
    return dg.Definitions.merge(
        build_platform(
            declared,
            types=[Incident.__name__, Disruption.__name__],
            handlers=[HANDLER_MODULE],
            running=True,
        ),
        dg.Definitions(assets=ASSETS, jobs=jobs),
        dg.Definitions(
            resources=resources,
            executor=dg.in_process_executor,  # one process, one JVM for all steps of a run
        ),
    )


def demo_resources() -> dict[str, Any]:
    """Of the environment that was chosen, with settings that suit the demo where it has none."""
    environments = Environments.load()
    current = environments.current
    spark = current.spark.model_copy(update={"config": {**_SPARK, **current.spark.config}})
    settings = {"engine": {**_ENGINE, **current.engine}, "spark": spark}
    chosen = environments.model_copy(update={"current": current.model_copy(update=settings)})
    return location_resources(chosen, location=LOCATION)
