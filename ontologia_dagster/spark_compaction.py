"""Gives what is too large for one machine to Spark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

if TYPE_CHECKING:
    from ontologia_dagster.resources import OntologyResource
    from storage_engine.maintenance.compaction import CompactionPlan, CompactionPolicy


@dataclass(frozen=True)
class Large:
    """What Spark has done, and the types that are therefore off the list."""

    types: frozenset[str] = frozenset()
    runs: tuple[Any, ...] = ()


def compact_large(
    context: dg.OpExecutionContext,
    ontology: OntologyResource,
    plan: CompactionPlan,
    policy: CompactionPolicy,
    above_bytes: int,
) -> Large:
    """Compact the types whose runs are above the size; without Spark where there are none."""
    large = [
        item.type_name for item in plan.types if sum(run.bytes for run in item.runs) > above_bytes
    ]
    if not large:
        return Large()
    from storage_engine.spark.compaction import compact_with_spark

    context.log.info("Spark compacts %s", ", ".join(large))
    with ontology.session() as session:
        report = compact_with_spark(
            context.resources.spark.session(),
            session,
            types=large,
            policy=policy,
            above_bytes=above_bytes,
        )
    return Large(frozenset(large), tuple(report.runs))
