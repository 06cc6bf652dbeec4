"""What a storage brings to Dagster beside its types: head, log, checks, jobs, schedules, sensors.

`build_platform` makes all of it for one storage, `build_platforms` for an environment's storage
and its tenants', `location_resources` what they reach them through. Building opens nothing, and
everything that would act by itself is off unless told otherwise.
"""

# No `from __future__ import annotations`: Dagster reads annotations of ops and assets as objects.

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_aws.s3 import S3Resource

from ontologia_dagster.declaration import OntologyAsset, TypeAsset, asset_specs, declared_assets
from ontologia_dagster.ingestion.asset import build_types
from ontologia_dagster.resources.branches import AUDITED, DIRECT, Publish
from ontologia_dagster.resources.environments import Environment, Environments, S3Table
from ontologia_dagster.resources.ontology import (
    DEFAULT_LOCATION,
    OntologyResource,
    report_failures,
)
from ontologia_dagster.resources.spark import SparkResource
from ontologia_dagster.schema.migration import migration_job
from ontologia_dagster.storage import (
    alerts,
    checks,
    dead_letters,
    deep_checks,
    events,
    maintenance,
)
from ontologia_dagster.storage.alerts import Notifier
from ontologia_dagster.storage.drain import drain_definitions
from ontologia_dagster.storage.lineage import EventLineage
from ontologia_dagster.storage.log_tail import log_tail_sensor
from ontologia_dagster.storage.publication_defs import publication_definitions
from storage_engine.errors import ConfigurationError

STORAGE = "ontology"
_WEBHOOK = "ONTOLOGIA_WEBHOOK_URL"
# Nightly and weekly, each with the night to itself, and figures for who looks at them; all are off
# until somebody turns them on.
_SCHEDULES = {
    "compact": ("0 2 * * *", "Every night: merge small files of types."),
    "index_repair": ("30 2 * * *", "Every night: rewrite indices that differ from the log."),
    "gc": ("0 3 * * 0", "Every Sunday: delete objects that nothing has needed for a week."),
    "deep_verify": ("0 4 * * 0", "Every Sunday: read everything back and compare."),
    "metrics": ("*/5 * * * *", "Every five minutes: figures of the storage and its bus."),
}


def build_platform(
    declared: Sequence[OntologyAsset] = (),
    *,
    storage: str = STORAGE,
    types: Sequence[str] = (),
    beside: dg.Definitions | None = None,
    handlers: Sequence[str] = (),
    key_prefix: Sequence[str] = (),
    group: str | None = None,
    running: bool = False,
    first: bool = True,
    publish: Publish = DIRECT,
    branch: str | None = None,
) -> dg.Definitions:
    """All definitions of one storage and its types.

    storage:   the key of its OntologyResource; several storages have a platform each
    types:     stored types that have no asset here, as other programs write them, to be deeply
               verified by name; those that handlers name have one
    beside:    definitions of further types (a `defs` folder, in YAML or Python), and of assets
               that send events; they are not part of the result
    handlers:  modules with event handlers; without any there is no event sensor
    key_prefix, group:
               of the assets of events, handlers and types that handlers write; without a group
               each is in that of what comes before it
    running:   sensors and schedules are on from the start, that of automation conditions too
    first:     of several platforms in a location one is: it has what a location needs once, the
               sensor that tells of failed runs and that of automation conditions
    publish:   audited: runs are published by an asset of their own, `{storage}_publication`; as
               its resource says
    branch:    what the location works on, where that is not main: nothing is maintained there, and
               no event handled
    """
    if publish not in (DIRECT, AUDITED):
        raise ConfigurationError(f"publish is {publish!r}: say {DIRECT!r} or {AUDITED!r}")
    on = dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED
    elsewhere = declared_assets(beside, storage) if beside is not None else []
    lineage = EventLineage.of(
        storage,
        events.load_handlers(handlers) if handlers else [],
        ingested=[*(asset.type_asset for asset in declared), *elsewhere],
        key_prefix=key_prefix,
        group=group,
    )
    built = build_types(declared, [*elsewhere, *lineage.type_assets()])
    verified: dict[str, TypeAsset | None] = dict.fromkeys(types)
    verified |= {asset.type_name: asset for asset in lineage.type_assets()}
    deep = deep_checks.deep_checks(storage, {**verified, **lineage.ingested})
    jobs: dict[str, Any] = {
        "compact": maintenance.compaction_job(storage, declared),
        "index_repair": maintenance.repair_job(storage),
        "gc": maintenance.gc_job(storage),
        "deep_verify": maintenance.deep_verify_job(storage, deep),
        "metrics": maintenance.metrics_job(lineage),
    }
    sensors = [
        log_tail_sensor(storage, status=on),
        alerts.conditions_sensor(storage, handlers=lineage.handlers, status=on),
    ]
    if first:
        sensors.append(alerts.failed_runs_sensor(status=on))
    if first and running:
        sensors.append(_automation_sensor())
    own = dg.Definitions(
        assets=[head_asset(storage), deep_checks.log_asset(storage)],
        asset_checks=[deep],
        jobs=[*jobs.values(), migration_job(storage, declared)],
        schedules=[_schedule(storage, name, job, running) for name, job in jobs.items()]
        if branch is None
        else [],
        sensors=sensors,
    )
    others = [*asset_specs(built), *(asset_specs(beside) if beside else ())]
    parts = [built, own, _event_side(lineage, handlers, others, on, on_main=branch is None)]
    if publish == AUDITED:
        parts.append(publication_definitions(storage, others, status=on))
    return dg.Definitions.merge(*parts)


def _event_side(
    lineage: EventLineage,
    modules: Sequence[str],
    beside: Sequence[dg.AssetSpec],
    status: dg.DefaultSensorStatus,
    *,
    on_main: bool,
) -> dg.Definitions:
    """What handlers bring: events, handlers and what they write as assets, checks, jobs, sensor.
    Events are handled on main alone: elsewhere nobody asks for it."""
    nodes = lineage.node_specs(beside)
    if not lineage.handlers:
        return dg.Definitions(assets=nodes)
    drain = drain_definitions(lineage, modules, beside)
    letters = dead_letters.letters_check(lineage)
    repair = maintenance.repair_job_name(lineage.storage)
    return dg.Definitions(
        assets=[*nodes, *([drain.asset] if drain.asset is not None else [])],
        asset_checks=[
            *([letters] if letters is not None else []),
            *(checks.index_check(asset, repair) for asset in lineage.type_assets()),
        ],
        jobs=[drain.job, dead_letters.redrive_job(lineage)],
        sensors=[events.event_sensor(lineage, drain.job, status=status)] if on_main else [],
    )


def build_platforms(
    environment: Environment, beside: dg.Definitions, *, handlers: Sequence[str] = ()
) -> dg.Definitions:
    """The platforms of an environment's storage and of its tenants'; `beside` declares types, and
    `handlers` are modules in addition to the environment's."""
    storages = {"": STORAGE, **{tenant: f"{STORAGE}_{tenant}" for tenant in environment.tenants}}
    return dg.Definitions.merge(
        *(
            build_platform(
                storage=storage,
                beside=beside,
                handlers=list(dict.fromkeys([*environment.handlers, *handlers])),
                key_prefix=[tenant] if tenant else [],
                first=not tenant,
                publish=environment.publish,
                branch=environment.branch,
            )
            for tenant, storage in storages.items()
        )
    )


def handler_modules(folder: Path) -> list[str]:
    """Every `handlers.py` below a package's folder, by the name under which it is imported."""
    above = folder
    while (above / "__init__.py").exists():
        above = above.parent
    files = sorted(path for path in folder.rglob("handlers.py") if path.is_file())
    return [".".join(path.relative_to(above).with_suffix("").parts) for path in files]


def head_asset(storage: str) -> Any:
    """Observable: its data version is the id of the latest commit."""

    def observed(context: dg.OpExecutionContext) -> dg.ObserveResult:
        ontology: OntologyResource = getattr(context.resources, storage)
        failures = report_failures(context.instance)
        with failures, ontology.repository(branch=ontology.home) as repository:
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
    cron, description = _SCHEDULES[name]
    config = {}
    if name == "gc":
        config = {"ops": {f"{storage}_collect_garbage": {"config": {"dry_run": False}}}}
    return dg.ScheduleDefinition(
        name=f"{job.name}_schedule",
        job=job,
        cron_schedule=cron,
        description=description,
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
        explore_url=current.explore_url,
        environment=current.name,
        guarded=not current.production,
        production_uris=list(environments.production_uris),
        creates_storage=current.creates(uri),
        publish=current.publish,
        recheck=current.recheck,
        branch_retention=current.branch_retention,
        branch=current.branch,
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
