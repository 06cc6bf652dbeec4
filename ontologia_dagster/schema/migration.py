"""The job that migrates: it shows what it would do, and then does it.

The job's preview writes nothing. It shows the difference, the rows and bytes that would be
rewritten and the upgraders that are missing, and gives a token: the config of the run that applies
it. That run does what was looked at, or says what has moved since.
"""

# No `from __future__ import annotations`: Dagster reads annotations of ops and assets as objects.

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from ontologia_dagster.dagster_compat import location_of
from ontologia_dagster.declaration import OntologyAsset, TypeAsset, find_type_assets, with_ends
from ontologia_dagster.downstream.metadata import SCHEMA_VERSION, column_changes, price, table
from ontologia_dagster.resources.ontology import migration_job_name
from ontologia_dagster.resources.spark import PIPES, submit
from ontologia_dagster.schema.differences import (
    diff_table,
    missing_sentence,
    missing_table,
)
from ontologia_dagster.storage.maintenance import Upkeep, maintenance_op, one_op_job, upkeep
from storage_engine.errors import ConfigurationError
from storage_engine.repository import MAIN
from storage_engine.runtime.arguments import declared_types
from storage_engine.wording import counted

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from ontologia_dagster.resources.spark import SparkResource
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository.protocol import Repository
    from storage_engine.schema.preview import MigrationPreview, MigrationResult

_GIB = 1024**3
SPARK_ABOVE = 4 * _GIB


class MigrationConfig(dg.Config):
    apply: bool = Field(default=False, description="Migrate; else only show what it would do")
    token: str | None = Field(
        default=None, description="Of the preview that is to be applied; needed unless `force`"
    )
    force: bool = Field(default=False, description="Apply without a preview and its token")
    upgraders: str | None = Field(
        default=None,
        description="The module with functions marked @upgrader; all that the models load if left "
        "out",
    )
    types: list[str] = Field(
        default_factory=list, description="Only these; all that the location declares if left out"
    )
    models: list[str] = Field(
        default_factory=list,
        description="Further modules with types, such as those that only handlers write",
    )
    spark_above_bytes: int = Field(
        default=SPARK_ABOVE,
        description="Types whose latest rows have files of at least this size are given to Spark",
    )


def migration_job(storage: str, declared: Sequence[OntologyAsset]) -> dg.JobDefinition:
    @maintenance_op(storage, "migrate_types", needs={"spark"})
    def migrate_types(context: dg.OpExecutionContext, config: MigrationConfig) -> None:
        _check(config)
        with upkeep(context, storage, "migrate", not config.apply) as work:
            work.metadata |= _migrate(context, work, storage, config, declared)

    return one_op_job(
        migration_job_name(storage),
        migrate_types,
        "Bring the storage to the declared types: new schema versions, with the latest rows "
        "rewritten for them, in one commit. Shows what it would do unless told to apply it.",
    )


def _check(config: MigrationConfig) -> None:
    problem = None
    if not config.apply and (config.token or config.force):
        problem = "token and force are for apply: true"
    elif config.token and config.force:
        problem = "force goes without a token: give one of them"
    if problem is not None:
        raise dg.Failure(problem, metadata={"error": "ConfigurationError"}, allow_retries=False)


def _migrate(
    context: dg.OpExecutionContext,
    work: Upkeep,
    storage: str,
    config: MigrationConfig,
    declared: Sequence[OntologyAsset],
) -> dict[str, Any]:
    from storage_engine.runtime import migration

    repository = work.repository
    assets = _assets(context, storage, declared)
    types = _stored_only(repository, _declared(assets, config))
    preview = migration.preview(repository, _specs(types), config.upgraders)
    shown = preview_metadata(repository, types, preview, f"{storage}_migrate_types", config)
    if not config.apply:
        _tell(context, preview)
        return shown
    result = apply_migration(
        context,
        work.ontology,
        context.resources.spark,
        repository,
        types,
        upgraders=config.upgraders,
        token=config.token,
        force=config.force,
        above_bytes=config.spark_above_bytes,
        rows=sum(preview.estimated_rows.values()),
    )
    if result.commit_id is None:
        context.log.info("nothing to migrate: the storage has the types as they are declared")
    else:
        context.log.info("migrated as commit %d: %s", result.commit_id, outcome(result))
        _observe(context, repository, assets, result)
    return {**shown, **result_metadata(result)}


# -- which types ----------------------------------------------------------------------------------


def _assets(
    context: dg.OpExecutionContext, storage: str, declared: Sequence[OntologyAsset]
) -> list[TypeAsset]:
    """Of the whole location, wherever they were declared; of a job that is run by itself, its
    own."""
    location = location_of(context)
    if location is not None:
        return find_type_assets(location, storage)
    return [TypeAsset(a.asset_key, a.type, models=a.models) for a in declared]


Declared = Sequence[tuple["TypeSpec", str]]  # types, each with the module that it is in


def _declared(assets: Sequence[TypeAsset], config: MigrationConfig) -> Declared:
    named = {(asset.type_name, asset.models) for asset in assets if asset.models is not None}
    types: dict[Any, tuple[TypeSpec, str]] = {}
    for models in config.models:
        types |= {spec.ref: (spec, models) for spec in _types_of(models)}
    for models in sorted({models for _, models in named}):
        for spec in _types_of(models):
            if (spec.name, models) in named:
                types |= {other.ref: (other, models) for other in with_ends(spec, models)}
    names = {spec.name for spec, _ in types.values()}
    unknown = sorted(set(config.types) - names)
    if unknown:
        raise ConfigurationError(
            f"types {', '.join(unknown)}: the location declares {', '.join(sorted(names))}; types "
            "that have no asset are those of the modules in `models`"
        )
    return [
        (spec, models)
        for spec, models in types.values()
        if not config.types or spec.name in config.types
    ]


def _types_of(models: str) -> "list[TypeSpec]":
    return list(declared_types(models, option="models").values())


def _stored_only(repository: "Repository", declared: Declared) -> Declared:
    """Those that the storage has or had: others are made by their first write."""
    histories = repository.type_histories()
    return [
        (spec, models)
        for spec, models in declared
        if spec.ref in histories or (spec.kind, spec.renamed_from) in histories
    ]


def _specs(types: Declared) -> "list[TypeSpec]":
    return [spec for spec, _ in types]


# -- who does it ----------------------------------------------------------------------------------


def apply_migration(
    context: dg.OpExecutionContext | dg.AssetExecutionContext,
    ontology: "OntologyResource",
    spark: "SparkResource",
    repository: "Repository",
    types: Declared,
    *,
    upgraders: str | None,
    token: str | None = None,
    force: bool = False,
    above_bytes: int = SPARK_ABOVE,
    rows: int = 0,
) -> "MigrationResult":
    """By this process, and for what is large by Spark: from here, or all of it on the cluster.
    `rows` are about so many in all."""
    from storage_engine.runtime import migration
    from storage_engine.spark.migration import SparkStager

    sizes = source_sizes(repository, _specs(types)).values()
    large = repository.engine_version == "v2" and any(sum(n) >= above_bytes for n in sizes)
    if spark.mode == PIPES and large:
        return _submit(
            context, ontology, spark, types, upgraders, token, above_bytes, repository.branch
        )
    return migration.apply(
        repository,
        _specs(types),
        upgraders,
        token=token,
        force=force,
        progress=_teller(context, rows),
        holder={"run_id": context.run.run_id, "job": context.run.job_name},
        stager=SparkStager(spark.session, repository, above_bytes) if large else None,
    )


def _submit(
    context: dg.OpExecutionContext | dg.AssetExecutionContext,
    ontology: "OntologyResource",
    spark: "SparkResource",
    types: Declared,
    upgraders: str | None,
    token: str | None,
    above_bytes: int,
    branch: str,
) -> "MigrationResult":
    """Through the program, whose driver rewrites what is small."""
    from storage_engine.schema.preview import MigrationResult

    arguments = ["--storage-uri", ontology.storage_uri, "--spark-above", str(above_bytes)]
    arguments += ["--apply", *(["--token", token] if token is not None else ["--force"])]
    arguments += ["--upgraders", upgraders] if upgraders is not None else []
    arguments += ["--branch", branch] if branch != MAIN else []
    for models in dict.fromkeys(models for _, models in types):
        arguments += ["--models", models]
    for spec in _specs(types):
        arguments += ["--type", spec.name]
    # To an asset's step the program would report a materialisation of the asset.
    piped = not isinstance(context, dg.AssetExecutionContext)
    printed = submit(context, ontology, spark, "migrate", arguments, piped=piped)
    names = {field.name for field in fields(MigrationResult)}
    return MigrationResult(**{name: value for name, value in printed.items() if name in names})


# -- what is shown --------------------------------------------------------------------------------


def preview_metadata(
    repository: "Repository",
    types: Declared,
    preview: "MigrationPreview",
    op_name: str,
    config: MigrationConfig,
) -> dict[str, Any]:
    files = source_sizes(repository, _specs(types))
    sizes = {name: sum(of_type) for name, of_type in files.items()}
    names = dict.fromkeys([*preview.estimated_rows, *preview.types_schema_only])
    rows = sum(preview.estimated_rows.values())
    upgrading = set(preview.types_requiring_upgraders)
    shown: dict[str, Any] = {
        "has_changes": preview.has_changes,
        "possible": preview.possible,
        "diff": diff_table(preview.diffs),
        "plan": table(
            ["type", "rows", "bytes", "upgraders", "by_spark"],
            [
                (
                    name,
                    preview.estimated_rows.get(name, 0),
                    sizes.get(name),
                    name in upgrading,
                    repository.engine_version == "v2"
                    and sizes.get(name, -1) >= config.spark_above_bytes,
                )
                for name in names
            ],
        ),
        "missing_upgraders": missing_table(preview.missing_upgraders),
        "estimated_rows": rows,
        "estimated_bytes": sum(size for name, size in sizes.items() if name in names),
        # A file is read and one like it is written.
        "estimated_price_usd": price(
            dict.fromkeys(("GET", "PUT"), sum(len(files[n]) for n in names if n in files))
        ),
    }
    if preview.has_changes and not config.apply:
        shown["token"] = preview.token
        if preview.possible:
            shown["next"] = dg.MetadataValue.md(_next(op_name, preview.token, config))
    return shown


def _next(op_name: str, token: str, config: MigrationConfig) -> str:
    lines = ["apply: true", f'token: "{token}"']
    if config.upgraders:
        lines.append(f"upgraders: {config.upgraders}")
    lines += [f"{n}: [{', '.join(v)}]" for n in ("types", "models") if (v := getattr(config, n))]
    body = "\n".join(f"      {line}" for line in lines)
    return f"```yaml\nops:\n  {op_name}:\n    config:\n{body}\n```"


def source_sizes(repository: "Repository", specs: "Sequence[TypeSpec]") -> dict[str, list[int]]:
    """Of each file with latest rows, by type; nothing where rows are not in files."""
    from storage_engine.query.spec import When

    objects = repository.objects
    if objects is None:
        return {}
    sizes = {}
    stored = {spec.ref: spec for spec in repository.known_types()}
    for spec in specs:
        old = stored.get(spec.ref) or stored.get((spec.kind, spec.renamed_from or ""))
        if old is not None:
            plan = objects.executor().plan(old, When())
            sizes[spec.name] = [item.file.bytes for item in plan.files]
    return sizes


def result_metadata(result: "MigrationResult") -> dict[str, Any]:
    return {
        "migrated": table(
            [SCHEMA_VERSION, "type", "rows"],
            [
                (result.new_schema_versions[name], name, result.rows_migrated.get(name, 0))
                for name in result.types_migrated
            ],
        ),
        "rows_rewritten": sum(result.rows_migrated.values()),
        "commit": result.commit_id if result.commit_id is not None else dg.MetadataValue.null(),
        "duration_s": round(result.duration_s, 3),
    }


def outcome(result: "MigrationResult") -> str:
    return ", ".join(
        f"{name} to schema version {result.new_schema_versions[name]} "
        f"({counted(result.rows_migrated.get(name, 0), 'row')})"
        for name in result.types_migrated
    )


def _tell(context: dg.OpExecutionContext, preview: "MigrationPreview") -> None:
    if not preview.has_changes:
        context.log.info("nothing to migrate: the storage has the types as they are declared")
    elif preview.missing_upgraders:
        context.log.warning("%s", missing_sentence(preview.missing_upgraders))
    for diff in preview.diffs:
        if diff.refusal is not None:
            context.log.warning("%s: %s", diff.type_name, diff.refusal)


def _observe(
    context: dg.OpExecutionContext,
    repository: "Repository",
    assets: Sequence[TypeAsset],
    result: "MigrationResult",
) -> None:
    """The assets of types that were migrated show it; a materialisation of the commit is left to
    the log tail and to the next run."""
    histories = repository.type_histories()
    for asset in assets:
        for history in histories.values():
            if history.name != asset.type_name or asset.type_name not in result.types_migrated:
                continue
            now = history.last.version
            before = history.versions[-2].version if len(history.versions) > 1 else None
            context.log_event(
                dg.AssetObservation(
                    asset_key=asset.key,
                    description=f"Migrated to schema version {now}.",
                    metadata={
                        SCHEMA_VERSION: now,
                        "commit": result.commit_id,
                        **column_changes(history, before, now),
                    },
                )
            )


def _teller(
    context: dg.OpExecutionContext | dg.AssetExecutionContext, total: int
) -> Callable[[str, int], None]:
    """Logs at each tenth."""
    done = tenths = 0

    def tell(type_name: str, rows: int) -> None:
        nonlocal done, tenths
        done += rows
        if total and done * 10 // total > tenths:
            tenths = done * 10 // total
            context.log.info("%d of about %d rows rewritten, now %s", done, total, type_name)

    return tell
