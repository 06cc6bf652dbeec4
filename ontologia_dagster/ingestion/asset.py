"""The ingestion asset of a type: Spark writes, one commit, and a materialisation that names it.

`build_type` makes all that Dagster shows of a declaration: asset, check, job, schedule, sensor.

Each partition has the version of the commit that last changed it. With `dry_run` the step counts
what it would do, and leaves an observation instead: a preview before a backfill.
"""

# No `from __future__ import annotations`: Dagster reads annotations of ops and assets as objects.

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from ontologia_dagster.dagster_compat import (
    provenance_tags,
    result_without_events,
    version_tags,
    with_asset_if_there,
    without_check,
)
from ontologia_dagster.declaration import (
    OntologyAsset,
    TypeAsset,
    ingestion_job_name,
    one_process_executor,
    with_ends,
)
from ontologia_dagster.downstream.metadata import (
    FINGERPRINT,
    partition_figures,
    sample_metadata,
    schema_metadata,
    write_metadata,
)
from ontologia_dagster.ingestion import partitions, provenance
from ontologia_dagster.ingestion.asset_page import page_attributes
from ontologia_dagster.ingestion.expectation_checks import (
    Broken,
    expectation_checks,
    expectation_results,
    unlooked_results,
)
from ontologia_dagster.ingestion.relation_ends import automation_beside, end_deps, ends_of
from ontologia_dagster.ingestion.run_log import RunClock, row_line
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
from ontologia_dagster.storage import unpublished
from ontologia_dagster.storage.checks import DEEP_VERIFY, index_check, schema_check
from ontologia_dagster.storage.maintenance import repair_job_name
from storage_engine.errors import BadRowsError, ConfigurationError, MigrationTokenError
from storage_engine.schema.comparison import compare_types

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from ontologia_dagster.resources.spark import SparkResource
    from storage_engine import Branch
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository.protocol import Repository
    from storage_engine.schema.diff import SchemaDiff
    from storage_engine.spark.ingest_spec import IngestSpec
    from storage_engine.spark.results import WriteResult

SPARK = "spark"
_MIGRATION_TRIES = 5  # while other runs migrate the same types


def build_type(declared: OntologyAsset, siblings: Sequence[TypeAsset] = ()) -> dg.Definitions:
    """All definitions of one type. The storage's own jobs and sensors are `build_platform`'s.

    `siblings` are assets of other types: a relation depends on those that are its ends.
    """
    job = ingestion_job(declared)
    return dg.Definitions(
        assets=[ingestion_asset(declared, siblings)],
        asset_checks=[
            index_check(
                declared.type_asset,
                repair_job_name(declared.storage),
                blocking=declared.blocking_checks,
            ),
            schema_check(declared),
        ],
        jobs=[job],
        schedules=[_schedule(declared, job)] if declared.schedule else [],
        sensors=[source_sensor(declared, job)] if declared.watch_source else [],
    )


def build_types(
    declared: Sequence[OntologyAsset], siblings: Sequence[TypeAsset] = ()
) -> dg.Definitions:
    """Of several types, which are siblings of each other."""
    every = [*(asset.type_asset for asset in declared), *siblings]
    return dg.Definitions.merge(*(build_type(asset, every) for asset in declared))


def ingestion_job(declared: OntologyAsset) -> Any:  # an unresolved asset job has no public name
    """The type's asset with its checks; in one process, so that one JVM serves all steps."""
    own = without_check(dg.AssetSelection.assets(declared.asset_key), DEEP_VERIFY)
    return dg.define_asset_job(
        ingestion_job_name(declared),
        selection=with_asset_if_there(own, unpublished.publication_key(declared.storage)),
        description=f"Ingest {declared.type} with Spark, and check its index and its schema.",
        executor_def=one_process_executor,
    )


def _schedule(declared: OntologyAsset, job: Any) -> dg.ScheduleDefinition:
    name = f"{job.name}_schedule"
    assert declared.schedule is not None
    if declared.partitions is None:
        return dg.ScheduleDefinition(
            name=name,
            job=job,
            cron_schedule=declared.schedule,
            description=f"Ingest {declared.type}.",
        )
    spec = declared.partitions
    definition = partitions.partitions_def(spec)

    @dg.schedule(
        name=name,
        job=job,
        cron_schedule=declared.schedule,
        execution_timezone=spec.timezone,
        description=f"Ingest {declared.type}: "
        + ("all partitions." if spec.kind == "static" else "the latest complete partition."),
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


def ingestion_asset(
    declared: OntologyAsset, siblings: Sequence[TypeAsset] = ()
) -> dg.AssetsDefinition:
    """The asset of a declaration. Loading it imports the models, for its page and the ends of a
    relation, and opens no storage."""
    ends = ends_of(declared, siblings)
    definition = partitions.partitions_def(declared.partitions)
    backfill = None
    if definition is not None:
        single = declared.backfill == "single_run"
        backfill = dg.BackfillPolicy.single_run() if single else dg.BackfillPolicy.multi_run(1)

    def ingest_type(
        context: dg.AssetExecutionContext, config: IngestConfig
    ) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
        ontology: OntologyResource = getattr(context.resources, declared.storage)
        advice = SchemaAdvice.of(ontology, declared.storage, declared.models)
        with report_failures(context.instance, advice):
            yield from _ingest(context, declared, ontology, dry_run=config.dry_run)

    with warnings.catch_warnings():
        # Range runs need a backfill policy, which Dagster still calls beta.
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.asset(
            key=declared.asset_key,
            deps=[
                *(dg.AssetKey.from_user_string(dep) for dep in declared.deps),
                *end_deps(declared, ends),
            ],
            group_name=declared.group,
            partitions_def=definition,
            backfill_policy=backfill,
            automation_condition=automation_beside(declared, ends),
            freshness_policy=declared.freshness.policy() if declared.freshness else None,
            retry_policy=declared.retry.policy(),
            code_version=declared.code_version,
            pool=declared.pool,
            required_resource_keys={declared.storage, SPARK},
            output_required=False,
            check_specs=expectation_checks(declared),
            **page_attributes(declared),
        )
        made: Any = decorate(ingest_type)
    asset: dg.AssetsDefinition = made
    return asset


def _ingest(
    context: dg.AssetExecutionContext,
    declared: OntologyAsset,
    ontology: "OntologyResource",
    *,
    dry_run: bool,
) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
    clock = RunClock(context, declared.pool)
    spark: SparkResource = getattr(context.resources, SPARK)
    keys = _partition_keys(context, declared)
    branch = None
    if ontology.run_branch is not None and not dry_run:
        branch = unpublished.begin(context, ontology, declared.storage)
    order, spec = ingest_spec(declared, ontology.storage_uri, keys)
    order = order.replace(branch=branch.name if branch is not None else ontology.branch)
    migrated = agree_on_schema(
        context, declared, ontology, spec, dry_run=dry_run, branch=branch.name if branch else None
    )
    if migrated is None:
        why = "not evaluated: this was a preview, and a run would change the schema first"
        yield from unlooked_results(declared, context.instance, why)
        return
    prints = provenance.source_fingerprints(declared, keys, ontology)
    order = order.replace(
        idempotency=provenance.unit_of_work(
            context, declared, keys, ontology.location, provenance.combine(prints.values())
        ),
        meta={**declared.meta, **provenance.commit_metadata(context, declared, keys)},
    )
    if dry_run:
        preview = observe_preview(context, declared, order, ontology, spark, keys)
        yield from expectation_results(declared, Broken.of_result(preview, preview=True))
        return
    result = find_earlier(order, ontology, spec)
    spark_s = 0.0
    if result is None:
        begun = time.monotonic()
        try:
            result = run_ingest(context, order, ontology, spark, provenance.holder(context))
        except BadRowsError as error:
            yield from expectation_results(declared, Broken.of_error(error))
            raise
        spark_s = time.monotonic() - begun
    context.log.info("%s", row_line(result, keys))
    context.log.info("%s", clock.line(result))
    _warn_of_rows_outside(context, declared, result)
    with ontology.repository() as repository:
        count = row_count(repository, spec)
        metadata = {
            **write_metadata(
                result,
                ontology,
                spec,
                count,
                spark_s=spark_s,
                partitions=len(keys),
                branch=branch.name if branch is not None else None,
            ),
            **schema_metadata(repository, spec, context.instance, declared.asset_key),
            **sample_metadata(repository, spec, result.type_commit_id),
            **migrated,
        }
        stored = _partition_states(repository, spec, declared, keys) if keys else {}
    if result.already_applied:
        why = "not evaluated again: this very work was done before"
        yield from unlooked_results(declared, context.instance, why)
    else:
        yield from expectation_results(declared, Broken.of_result(result))
    if not keys:
        version = dg.DataVersion(str(result.type_commit_id))
        told = {**metadata, **_fingerprint(prints[""])}
        if branch is not None:
            yield from _observe(context, declared, branch, {None: told})
            return
        yield dg.MaterializeResult(metadata=told, data_version=version)
        return
    written: dict[str, dict[str, int]] = {}
    if result.tally is not None and declared.partitions is not None:
        by_key: Mapping[str, Sequence[int]] = partitions.written_by_key(
            result.tally, spec, declared.partitions
        )
        written = {key: partition_figures(by_key.get(key, (0, 0, 0))) for key in keys}
    own = {
        key: {
            "dagster/partition_row_count": state.rows,
            **written.get(key, {}),
            **_fingerprint(prints[key]),
        }
        for key, state in stored.items()
    }
    if branch is not None:
        told_by_key = {key: {**metadata, **figures} for key, figures in own.items()}
        yield from _observe(context, declared, branch, told_by_key)
        return
    versions = {key: state.commit_id for key, state in stored.items()}
    yield from _partition_results(context, declared, metadata, own, versions)


def _observe(
    context: dg.AssetExecutionContext,
    declared: OntologyAsset,
    branch: "Branch",
    by_partition: Mapping[Any, Mapping[str, Any]],
) -> Iterator[dg.MaterializeResult[None]]:
    return unpublished.observe(
        context,
        branch,
        declared.asset_key,
        by_partition,
        code_version=declared.code_version,
        type_name=declared.type,
        cut=declared.partitions,
    )


def agree_on_schema(
    context: dg.AssetExecutionContext,
    declared: OntologyAsset,
    ontology: "OntologyResource",
    spec: "TypeSpec",
    *,
    dry_run: bool,
    branch: str | None = None,
) -> dict[str, Any] | None:
    """Go on only with a type that is as the storage has it, there where the step writes, or new to
    it.

    Where the declaration says `schema: additive`, additive changes are applied here: the metadata
    tells of them. None: a preview, which applies nothing, has left an observation of them instead.
    """
    advice = SchemaAdvice.of(ontology, declared.storage, declared.models)
    specs = with_ends(spec, declared.models)
    spark: SparkResource = context.resources.spark
    for remaining in reversed(range(_MIGRATION_TRIES)):
        with ontology.repository(branch=branch) as repository:
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
) -> "WriteResult":
    """Counts rows and logs an observation; nothing is written and nothing materialised."""
    result = preview_ingest(context, order, ontology, spark)
    context.log.info("preview: %s", row_line(result, keys))
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
                "preview_rows_marked": result.marked,
                "preview_rows_quarantined": result.quarantined,
                "preview_partitions": len(keys),
                **({"preview_rows_in_no_partition": result.outside} if keys else {}),
                "preview_problem": result.problem or "none",
            },
        )
    )
    return result


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
    missing = order.missing
    if missing.marks:
        missing = missing.within_scope(partitions.stored_condition(declared.partitions, keys, kind))
    several = declared.partitions.field if len(keys) > 1 else None
    return order.replace(where=where, outside=outside, missing=missing, count_by=several), spec


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
