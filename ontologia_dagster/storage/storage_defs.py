"""What a storage brings to Dagster beside its types: head, log, checks, jobs, schedules, sensors.

`build_platform` makes all of it for one storage, `build_platforms` for an environment's storage
and its tenants', `location_resources` what they reach them through. Building opens nothing, and
everything that would act by itself is off unless told otherwise.
"""

# No `from __future__ import annotations`: Dagster reads annotations of ops and assets as objects.

import os
import warnings
from collections.abc import Sequence
from typing import Any

import dagster as dg
from dagster_aws.s3 import S3Resource

from ontologia_dagster.declaration import OntologyAsset, declared_types
from ontologia_dagster.ingestion.asset import build_types
from ontologia_dagster.resources.environments import Environment, Environments, S3Table
from ontologia_dagster.resources.ontology import (
    DEFAULT_LOCATION,
    OntologyResource,
    report_failures,
)
from ontologia_dagster.resources.spark import SparkResource
from ontologia_dagster.schema.migration import migration_job
from ontologia_dagster.storage import alerts, checks, events, maintenance
from ontologia_dagster.storage.alerts import Notifier
from ontologia_dagster.storage.log_tail import log_tail_sensor

STORAGE = "ontology"
_WEBHOOK = "ONTOLOGIA_WEBHOOK_URL"
# Nightly and weekly, each with the night to itself, and figures for who looks at them; all are off
# until somebody turns them on.
_SCHEDULES = {
    "compact": "0 2 * * *",
    "index_repair": "30 2 * * *",
    "gc": "0 3 * * 0",
    "deep_verify": "0 4 * * 0",
    "metrics": "*/5 * * * *",
}


def build_platform(
    declared: Sequence[OntologyAsset] = (),
    *,
    storage: str = STORAGE,
    types: Sequence[str] = (),
    beside: dg.Definitions | None = None,
    handlers: Sequence[str] = (),
    running: bool = False,
    first: bool = True,
) -> dg.Definitions:
    """All definitions of one storage and its types.

    storage:   the key of its OntologyResource; several storages have a platform each
    types:     further stored types, that handlers write or that are declared elsewhere, to be
               deeply verified by name
    beside:    definitions that declare further types (a `defs` folder, in YAML or Python)
    handlers:  modules with event handlers; without any there is no event sensor
    running:   sensors and schedules are on from the start, that of automation conditions too
    first:     of several platforms in a location one is: it has what a location needs once, the
               sensor that tells of failed runs and that of automation conditions
    """
    on = dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED
    elsewhere = declared_types(beside, storage) if beside is not None else []
    names = list(dict.fromkeys([*(asset.type for asset in declared), *elsewhere, *types]))
    deep = checks.deep_checks(storage, names)
    jobs: dict[str, Any] = {
        "compact": maintenance.compaction_job(storage, declared),
        "index_repair": maintenance.repair_job(storage),
        "gc": maintenance.gc_job(storage),
        "deep_verify": maintenance.deep_verify_job(storage, deep),
        "metrics": maintenance.metrics_job(storage, handlers),
    }
    sensors = [
        log_tail_sensor(storage, status=on),
        alerts.conditions_sensor(storage, handlers=handlers, status=on),
    ]
    if first:
        sensors.append(alerts.failed_runs_sensor(status=on))
    if first and running:
        sensors.append(_automation_sensor())
    more: list[Any] = [migration_job(storage, declared)]
    if handlers:
        drain = events.drain_job(storage, handlers)
        more += [drain, events.redrive_job(storage)]
        sensors.append(events.event_sensor(storage, handlers, drain, status=on))
    own = dg.Definitions(
        assets=[head_asset(storage), checks.log_asset(storage)],
        asset_checks=[deep],
        jobs=[*jobs.values(), *more],
        schedules=[_schedule(storage, name, job, running) for name, job in jobs.items()],
        sensors=sensors,
    )
    return dg.Definitions.merge(build_types(declared), own)


def build_platforms(environment: Environment, beside: dg.Definitions) -> dg.Definitions:
    """The platforms of an environment's storage and of its tenants'; `beside` declares types."""
    storages = [STORAGE, *(f"{STORAGE}_{tenant}" for tenant in environment.tenants)]
    return dg.Definitions.merge(
        *(
            build_platform(
                storage=storage,
                beside=beside,
                handlers=environment.handlers,
                first=storage == STORAGE,
            )
            for storage in storages
        )
    )


def head_asset(storage: str) -> Any:
    """Observable: its data version is the id of the latest commit."""

    def observed(context: dg.OpExecutionContext) -> dg.ObserveResult:
        ontology: OntologyResource = getattr(context.resources, storage)
        with report_failures(context.instance), ontology.repository() as repository:
            head = repository.head_commit_id()
            info = repository.storage_info()
        types = sorted(info["types"])
        return dg.ObserveResult(
            data_version=dg.DataVersion(str(head)),
            metadata={
                "dagster/uri": ontology.storage_uri,
                "backend": info["backend"],
                "engine_version": info["engine_version"],
                "commits": head,  # ids start at 1 and have no gaps
                "type_count": len(types),
                "types": dg.MetadataValue.md("\n".join(f"- {name}" for name in types)),
            },
        )

    with warnings.catch_warnings():
        # Dagster still calls it beta; nothing else is observed and not materialised.
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.observable_source_asset(
            name=f"{storage}_head",
            group_name="ontologia",
            description="The head of the commit log. Its data version is the id of the latest "
            "commit.",
            required_resource_keys={storage},
        )
        return decorate(observed)


def _automation_sensor() -> dg.SensorDefinition:
    """Dagster's own, which it would leave off: under its name, so that there is one of it."""
    return dg.AutomationConditionSensorDefinition(
        "default_automation_condition_sensor",
        target=dg.AssetSelection.all(),
        default_status=dg.DefaultSensorStatus.RUNNING,
    )


def _schedule(storage: str, name: str, job: Any, running: bool) -> dg.ScheduleDefinition:
    on = dg.DefaultScheduleStatus.RUNNING if running else dg.DefaultScheduleStatus.STOPPED
    config = {}
    if name == "gc":
        config = {"ops": {f"{storage}_collect_garbage": {"config": {"dry_run": False}}}}
    return dg.ScheduleDefinition(
        name=f"{job.name}_schedule",
        job=job,
        cron_schedule=_SCHEDULES[name],
        run_config=config,
        default_status=on,
    )


# -- resources ------------------------------------------------------------------------------------


def location_resources(
    environments: Environments | None = None, *, location: str = DEFAULT_LOCATION
) -> dict[str, Any]:
    """`ontology`, `ontology_<tenant>` for each tenant, `spark` and `notifier`.

    `location` is the code location's name, for runs that Dagster did not start from one.
    """
    environments = environments or Environments.load()
    current = environments.current
    spark = current.spark
    return {
        STORAGE: _ontology(environments, location, current.uri, current.s3),
        **{
            f"{STORAGE}_{tenant}": _ontology(
                environments, location, current.uri_of(tenant), table.s3 or current.s3
            )
            for tenant, table in current.tenants.items()
        },
        "spark": SparkResource(
            mode=spark.mode,
            master=spark.master,
            spark_config=dict(spark.config),
            submit_arguments=list(spark.submit_arguments),
        ),
        "notifier": Notifier(webhook_url=_secret(_webhook(current))),
    }


def _ontology(environments: Environments, location: str, uri: str, s3: S3Table) -> OntologyResource:
    current = environments.current
    return OntologyResource(
        storage_uri=uri,
        runtime_id=current.runtime_id,
        engine_options=dict(current.engine),
        location_name=location,
        environment=current.name,
        guarded=not current.production,
        production_uris=list(environments.production_uris),
        s3=S3Resource(
            endpoint_url=s3.endpoint_url,
            region_name=s3.region,
            profile_name=s3.profile,
            aws_access_key_id=_secret(s3.access_key_id_variable),
            aws_secret_access_key=_secret(s3.secret_access_key_variable),
            aws_session_token=_secret(s3.session_token_variable),
        ),
    )


def _secret(variable: str | None) -> Any:
    """A typed reference: its value is read by the process that needs it, and shown by none. There
    a variable that is named and not set is an error that names it."""
    return dg.EnvVar(variable) if variable else None


def _webhook(current: Environment) -> str | None:
    """Nobody has to be told: the usual variable may be unset, one that is named may not."""
    return current.webhook_url_variable or (_WEBHOOK if _WEBHOOK in os.environ else None)
