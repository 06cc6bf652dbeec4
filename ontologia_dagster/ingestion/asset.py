"""The ingestion asset of a type: Spark writes, one commit, and a materialisation that names it.

`build_type` makes all that Dagster shows of a declaration: asset, check, job, schedule, sensor.

Each partition has the version of the commit that last changed it. With `dry_run` the step counts
what it would do, and leaves an observation instead: a preview before a backfill.
"""

# No `from __future__ import annotations`: Dagster reads annotations of ops and assets as objects.

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from ontologia_dagster.dagster_compat import (
    provenance_tags,
    result_without_events,
    version_tags,
)
from ontologia_dagster.declaration import OntologyAsset, automation, definition_metadata, with_ends
from ontologia_dagster.downstream.metadata import FINGERPRINT, schema_metadata, write_metadata
from ontologia_dagster.ingestion import partitions, provenance
from ontologia_dagster.ingestion.source_files import PARTITION_KEY
from ontologia_dagster.ingestion.source_sensor import (
    partition_request,
    source_sensor,
    spans_of_runs,
)
from ontologia_dagster.resources.ontology import SchemaAdvice, report_failures
from ontologia_dagster.resources.spark import find_earlier, preview_ingest, run_ingest
from ontologia_dagster.schema.differences import diff_table, schema_failure
from ontologia_dagster.schema.migration import apply_migration, outcome
from ontologia_dagster.storage.checks import index_check, schema_check
from ontologia_dagster.storage.maintenance import repair_job_name
from storage_engine.errors import ConfigurationError, MigrationTokenError
from storage_engine.schema.comparison import compare_types

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from ontologia_dagster.resources.spark import SparkResource
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository.protocol import Repository
    from storage_engine.schema.diff import SchemaDiff
    from storage_engine.spark.ingest_spec import IngestSpec
    from storage_engine.spark.results import WriteResult

SPARK = "spark"
_MIGRATION_TRIES = 5  # while other runs migrate the same types


def build_type(declared: OntologyAsset) -> dg.Definitions:
    """All definitions of one type. The storage's own jobs and sensors are `build_platform`'s."""
    job = ingestion_job(declared)
    return dg.Definitions(
        assets=[ingestion_asset(declared)],
        asset_checks=[
            index_check(declared, repair_job_name(declared.storage)),
            schema_check(declared),
        ],
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
            for span in spans_of_runs(declared, spec.keys):
                # Of several Dagster wants to know which is which, within this tick.
                yield partition_request(span, run_key=span[0])
            return
        with dg.partition_loading_context(effective_dt=context.scheduled_execution_time):
            last = definition.get_last_partition_key()
        if last is None:
            yield dg.SkipReason("no partition is complete yet")
        else:
            yield dg.RunRequest(partition_key=last)

    return latest_partition


class IngestConfig(dg.Config):
    """What can be said in the launchpad."""

    dry_run: bool = Field(
        default=False,
        description="Count what would be inserted and changed, and write nothing: a preview "
        "before a backfill",
    )


def ingestion_asset(declared: OntologyAsset) -> dg.AssetsDefinition:
    """The asset of a declaration. Loading it imports no models and opens no storage."""
    definition = partitions.partitions_def(declared.partitions)
    backfill = None
    if definition is not None:
        single = declared.backfill == "single_run"
        backfill = dg.BackfillPolicy.single_run() if single else dg.BackfillPolicy.multi_run(1)

    def ingest_type(
        context: dg.AssetExecutionContext, config: IngestConfig
    ) -> Iterator[dg.MaterializeResult[None]]:
        ontology: OntologyResource = getattr(context.resources, declared.storage)
        advice = SchemaAdvice.of(ontology, declared.storage, declared.models)
        with report_failures(context.instance, advice):
            yield from _ingest(context, declared, ontology, dry_run=config.dry_run)

    with warnings.catch_warnings():
        # Range runs need a backfill policy, which Dagster still calls beta.
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.asset(
            key=declared.asset_key,
            deps=[dg.AssetKey.from_user_string(dep) for dep in declared.deps],
            description=declared.description,
            group_name=declared.group,
            owners=list(declared.owners),
            tags=declared.tags,
            kinds={"spark", "parquet"},
            metadata={**definition_metadata(declared), "dagster/table_name": declared.type},
            partitions_def=definition,
            backfill_policy=backfill,
            automation_condition=automation(declared.automation),
            freshness_policy=declared.freshness.policy() if declared.freshness else None,
            retry_policy=declared.retry.policy(),
            code_version=declared.code_version,
            pool=declared.pool,
            required_resource_keys={declared.storage, SPARK},
            output_required=False,
        )
        return decorate(ingest_type)


def _ingest(
    context: dg.AssetExecutionContext,
    declared: OntologyAsset,
    ontology: "OntologyResource",
    *,
    dry_run: bool,
) -> Iterator[dg.MaterializeResult[None]]:
    spark: SparkResource = getattr(context.resources, SPARK)
    keys = _partition_keys(context, declared)
    order, spec = ingest_spec(declared, ontology.storage_uri, keys)
    migrated = agree_on_schema(context, declared, ontology, spec, dry_run=dry_run)
    if migrated is None:
        return
    prints = provenance.source_fingerprints(declared, keys, ontology)
    order = order.replace(
        idempotency=provenance.unit_of_work(
            context, declared, keys, ontology.location, provenance.combine(prints.values())
        ),
        meta={**declared.meta, **provenance.commit_metadata(context, declared, keys)},
    )
    if dry_run:
        observe_preview(context, declared, order, ontology, spark, keys)
        return
    result = find_earlier(order, ontology, spec)
    if result is None:
        result = run_ingest(context, order, ontology, spark, provenance.holder(context))
    if result.commit_id is None:
        context.log.info("%s is as it was; nothing was written", declared.type)
    _warn_of_rows_outside(context, declared, result)
    with ontology.repository() as repository:
        count = row_count(repository, spec)
        metadata = {
            **write_metadata(result, ontology.storage_uri, spec, count, cut=bool(keys)),
            **schema_metadata(repository, spec, context.instance, declared.asset_key),
            **migrated,
        }
        stored = _partition_states(repository, spec, declared, keys) if keys else {}
    if not keys:
        version = dg.DataVersion(str(result.type_commit_id))
        told = {**metadata, **_fingerprint(prints[""])}
        yield dg.MaterializeResult(metadata=told, data_version=version)
        return
    own = {
        key: {"dagster/partition_row_count": state.rows, **_fingerprint(prints[key])}
        for key, state in stored.items()
    }
    versions = {key: state.commit_id for key, state in stored.items()}
    yield from _partition_results(context, declared, metadata, own, versions)


def agree_on_schema(
    context: dg.AssetExecutionContext,
    declared: OntologyAsset,
    ontology: "OntologyResource",
    spec: "TypeSpec",
    *,
    dry_run: bool,
) -> dict[str, Any] | None:
    """Go on only with a type that is as the storage has it, or new to it.

    Where the declaration says `schema: additive`, additive changes are applied here: the metadata
    tells of them. None: a preview, which applies nothing, has left an observation of them instead.
    """
    advice = SchemaAdvice.of(ontology, declared.storage, declared.models)
    specs = with_ends(spec, declared.models)
    spark: SparkResource = context.resources.spark
    for remaining in reversed(range(_MIGRATION_TRIES)):
        with ontology.repository() as repository:
            comparison = compare_types(specs, repository.type_histories)
            if comparison.agrees:
                return {}
            if declared.schema_changes != "additive" or not comparison.additive:
                raise schema_failure(comparison, advice)
            if dry_run:
                _observe_pending(context, declared, comparison.summary(), comparison.diffs)
                return None
            changed = {migration.ref for migration in comparison.differing}
            try:
                result = apply_migration(
                    context,
                    ontology,
                    spark,
                    repository,
                    [(each, declared.models) for each in specs if each.ref in changed],
                    upgraders=None,
                    force=True,
                )
            except MigrationTokenError:
                if not remaining:
                    raise
                continue  # another run was faster, maybe with the same
        if result.commit_id is None:
            return {}  # another run has done it
        context.log.info(
            "additive changes were applied: %s. %s", comparison.summary(), outcome(result)
        )
        return {
            "schema_diff": diff_table(comparison.diffs),
            "schema_commit": result.commit_id,
            "schema_rows_rewritten": sum(result.rows_migrated.values()),
        }
    raise AssertionError("the last try returns or raises")


def _observe_pending(
    context: dg.AssetExecutionContext,
    declared: OntologyAsset,
    summary: str,
    diffs: "Sequence[SchemaDiff]",
) -> None:
    context.log.info("a run would first apply additive changes: %s", summary)
    context.log_event(
        dg.AssetObservation(
            asset_key=declared.asset_key,
            description="Preview: nothing was written.",
            metadata={
                "dry_run": True,
                "preview_problem": "rows can be counted once the schema was changed, which a run "
                f"does first: {summary}",
                "schema_diff": diff_table(diffs),
            },
        )
    )


def _partition_keys(context: dg.AssetExecutionContext, declared: OntologyAsset) -> list[str]:
    """Of the partitions that the run is on; none of a type that is not cut."""
    if declared.partitions is None:
        return []
    if not context.has_partition_key and not context.has_partition_key_range:
        raise ConfigurationError(
            f"{declared.asset_key.to_user_string()} has {declared.partitions.kind} partitions, and "
            "this run is on none of them: launch it with a partition or a range of them (in the "
            "UI: Materialize, then choose; `dg launch --partition KEY`; in Python: "
            "materialize(..., partition_key=KEY))"
        )
    return list(context.partition_keys)


def _warn_of_rows_outside(
    context: dg.AssetExecutionContext, declared: OntologyAsset, result: "WriteResult"
) -> None:
    if declared.partitions is None or not result.outside:
        return
    own = any(PARTITION_KEY in path for path in declared.source.paths)
    context.log.warning(
        "%d rows of the source were left out: by %s they belong to no partition%s",
        result.outside,
        declared.partitions.field,
        " of this run, whose files they are in" if own else f" of {declared.type}",
    )


def observe_preview(
    context: dg.AssetExecutionContext,
    declared: OntologyAsset,
    order: "IngestSpec",
    ontology: "OntologyResource",
    spark: "SparkResource",
    keys: Sequence[str],
) -> None:
    """Counts rows and logs an observation; nothing is written and nothing materialised."""
    result = preview_ingest(context, order, ontology, spark)
    extent = f" of {len(keys)} partitions, {keys[0]} to {keys[-1]}" if keys else ""
    context.log.info(
        "would insert %d rows%s, change %d and leave %d as they are",
        result.inserted,
        extent,
        result.updated,
        result.unchanged,
    )
    _warn_of_rows_outside(context, declared, result)
    if result.problem is not None:
        context.log.warning("the write would be refused: %s", result.problem)
    context.log_event(
        dg.AssetObservation(
            asset_key=declared.asset_key,
            description="Preview: nothing was written.",
            metadata={
                "dry_run": True,
                "preview_rows_read": result.rows,
                "preview_rows_inserted": result.inserted,
                "preview_rows_changed": result.updated,
                "preview_rows_unchanged": result.unchanged,
                "preview_rows_quarantined": result.quarantined,
                "preview_partitions": len(keys),
                **({"preview_rows_in_no_partition": result.outside} if keys else {}),
                "preview_problem": result.problem or "none",
            },
        )
    )


def _partition_results(
    context: dg.AssetExecutionContext,
    declared: OntologyAsset,
    shared: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
    versions: Mapping[str, int],
) -> Iterator[dg.MaterializeResult[None]]:
    """The result of a run on these partitions: metadata that all have, that of each, and the
    commit that each is at.

    A partition's version is the commit that last changed one of its rows, so that a run which left
    it as it was, in a range with others or by itself, re-triggers nothing. Dagster gives all
    partitions of one result the same version: where they differ, its own events are switched off
    and ours take their place, with the same tags.
    """
    if len(set(versions.values())) == 1:
        for key, metadata in own.items():
            context.add_asset_metadata(metadata, partition_key=key)
        version = str(next(iter(versions.values())))
        yield dg.MaterializeResult(metadata=shared, data_version=dg.DataVersion(version))
        return
    tags = provenance_tags(context, declared.asset_key, declared.code_version)
    for key, metadata in own.items():
        context.log_event(
            dg.AssetMaterialization(
                asset_key=declared.asset_key,
                partition=key,
                metadata={**shared, **metadata},
                tags={**tags, **version_tags(versions[key])},
            )
        )
    yield result_without_events()


def ingest_spec(
    declared: OntologyAsset, storage_uri: str, keys: Sequence[str]
) -> "tuple[IngestSpec, TypeSpec]":
    """The spec for the job, with the bounds of the partitions in its condition, and its type."""
    from storage_engine.spark.jobs.ingest import type_of

    paths = partitions.expand_paths(declared.source.paths, keys)
    order = declared.ingest_spec(storage_uri, paths)
    spec = type_of(order)
    if declared.partitions is None or not keys:
        return order, spec
    kind = partitions.field_type(spec, declared.partitions)
    bounds = partitions.source_condition(declared, keys, kind)
    where = f"({declared.where}) AND ({bounds})" if declared.where else bounds
    outside = partitions.source_outside(declared, keys, kind)
    return order.replace(where=where, outside=outside), spec


def _fingerprint(fingerprint: str | None) -> dict[str, str]:
    return {FINGERPRINT: fingerprint} if fingerprint is not None else {}


def row_count(repository: "Repository", spec: "TypeSpec") -> int:
    """Identities of the type: from the log where it tells, else counted."""
    from storage_engine.maintenance.metrics import collect

    for figures in collect(repository).types:
        if (figures.kind, figures.type_name) == spec.ref and figures.identities is not None:
            return figures.identities
    if spec.ref not in {stored.ref for stored in repository.known_types()}:
        return 0
    rows = repository.executor().sql(f'SELECT count(*) AS n FROM "{spec.name}"')
    return int(next(iter(rows.batches)).column(0)[0].as_py())


def _partition_states(
    repository: "Repository", spec: "TypeSpec", declared: OntologyAsset, keys: Sequence[str]
) -> dict[str, partitions.PartitionState]:
    assert declared.partitions is not None
    if spec.ref not in {stored.ref for stored in repository.known_types()}:
        return dict.fromkeys(keys, partitions.PartitionState())
    return partitions.read_states(repository.executor(), spec, declared.partitions, keys)
