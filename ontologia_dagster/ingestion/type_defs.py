"""From a declaration to what Dagster shows of a type: asset, check, job, schedule, sensor."""

from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from ontologia_dagster.declaration import OntologyAsset
from ontologia_dagster.ingestion import partitions
from ontologia_dagster.ingestion.asset import ingestion_asset
from ontologia_dagster.ingestion.source_sensor import source_sensor
from ontologia_dagster.storage.checks import index_check
from ontologia_dagster.storage.maintenance import repair_job_name


def build_type(declared: OntologyAsset) -> dg.Definitions:
    """All definitions of one type. The storage's own jobs and sensors are `build_platform`'s."""
    job = ingestion_job(declared)
    return dg.Definitions(
        assets=[ingestion_asset(declared)],
        asset_checks=[index_check(declared, repair_job_name(declared.storage))],
        jobs=[job],
        schedules=[_schedule(declared, job)] if declared.schedule else [],
        sensors=[source_sensor(declared, job)] if declared.watch_source else [],
    )


def build_types(declared: Sequence[OntologyAsset]) -> dg.Definitions:
    return dg.Definitions.merge(*(build_type(asset) for asset in declared))


def ingestion_job(declared: OntologyAsset) -> Any:  # an unresolved asset job has no public name
    """The type's asset with its checks; in one process, so that one JVM serves all steps."""
    return dg.define_asset_job(
        f"ingest_{'__'.join(declared.asset_key.path)}",
        selection=dg.AssetSelection.assets(declared.asset_key),
        description=f"Ingest {declared.type}.",
        executor_def=dg.in_process_executor,
    )


def _schedule(declared: OntologyAsset, job: Any) -> dg.ScheduleDefinition:
    name = f"{job.name}_schedule"
    assert declared.schedule is not None
    if declared.partitions is None:
        return dg.ScheduleDefinition(name=name, job=job, cron_schedule=declared.schedule)
    spec = declared.partitions
    definition = partitions.partitions_def(spec)

    @dg.schedule(
        name=name, job=job, cron_schedule=declared.schedule, execution_timezone=spec.timezone
    )
    def latest_partition(context: dg.ScheduleEvaluationContext) -> Iterator[Any]:
        """The latest complete span of time; all keys where partitions are static."""
        if spec.kind == "static":
            for key in spec.keys:
                yield dg.RunRequest(partition_key=key)
            return
        with dg.partition_loading_context(effective_dt=context.scheduled_execution_time):
            last = definition.get_last_partition_key()
        if last is None:
            yield dg.SkipReason("no partition is complete yet")
        else:
            yield dg.RunRequest(partition_key=last)

    return latest_partition
