"""What an ingestion does before it reads its source: it agrees with the storage on the schema.

The same class, or one that is not stored yet: the run goes on. What is additive is applied where
the declaration says so, once, however many runs begin at the same time. All else stops the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.schema.compare import (
    SchemaAdvice,
    compare,
    diff_table,
    schema_failure,
    with_ends,
)
from ontologia_dagster.schema.migration import apply_migration, outcome
from storage_engine.errors import MigrationTokenError

if TYPE_CHECKING:
    from ontologia_dagster.declaration import OntologyAsset
    from ontologia_dagster.resources.ontology import OntologyResource
    from ontologia_dagster.resources.spark import SparkResource
    from storage_engine.model.spec import TypeSpec
    from storage_engine.schema.diff import SchemaDiff

_TRIES = 5  # while other runs migrate the same types


def agree_on_schema(
    context: dg.AssetExecutionContext,
    declared: OntologyAsset,
    ontology: OntologyResource,
    spec: TypeSpec,
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
    for remaining in reversed(range(_TRIES)):
        with ontology.repository() as repository:
            comparison = compare(repository, specs)
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
    diffs: Sequence[SchemaDiff],
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
