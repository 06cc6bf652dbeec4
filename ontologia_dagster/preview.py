"""What an ingestion would do, as an observation of its asset: counts before a backfill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import dagster as dg

from ontologia_dagster.runner import look_ahead

if TYPE_CHECKING:
    from jobs.orders import IngestOrder
    from ontologia_dagster.resources import OntologyResource
    from ontologia_dagster.spark import SparkResource


def observe_preview(
    context: dg.AssetExecutionContext,
    key: dg.AssetKey,
    order: IngestOrder,
    ontology: OntologyResource,
    spark: SparkResource,
    keys: Sequence[str],
) -> None:
    """Counts rows and logs an observation; nothing is written and nothing materialised."""
    result = look_ahead(context, order, ontology, spark)
    said = f" of {len(keys)} partitions, {keys[0]} to {keys[-1]}" if keys else ""
    context.log.info(
        "would insert %d rows%s, change %d and leave %d as they are",
        result.inserted,
        said,
        result.updated,
        result.unchanged,
    )
    if result.problem is not None:
        context.log.warning("the write would be refused: %s", result.problem)
    context.log_event(
        dg.AssetObservation(
            asset_key=key,
            description="Preview: nothing was written.",
            metadata={
                "dry_run": True,
                "preview_rows_read": result.rows,
                "preview_rows_inserted": result.inserted,
                "preview_rows_changed": result.updated,
                "preview_rows_unchanged": result.unchanged,
                "preview_rows_quarantined": result.quarantined,
                "preview_partitions": len(keys),
                "preview_problem": result.problem or "none",
            },
        )
    )
