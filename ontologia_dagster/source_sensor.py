"""Asks for a run when the files of a source have changed since the type was last materialised."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster import partitions, provenance
from ontologia_dagster.declaration import OntologyAsset
from ontologia_dagster.metadata import FINGERPRINT

if TYPE_CHECKING:
    from ontologia_dagster.resources import OntologyResource

_INTERVAL_S = 60


def source_sensor(declared: OntologyAsset, job: Any) -> dg.SensorDefinition:
    """The cursor is the state that was last asked for: a run that failed on it is not asked for
    again until the source changes, or somebody retries it."""

    @dg.sensor(
        name=f"{'__'.join(declared.asset_key.path)}_source",
        job=job,
        minimum_interval_seconds=_INTERVAL_S,
        required_resource_keys={declared.storage},
        description=f"Looks at the files that {declared.type} comes from.",
    )
    def source_changed(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        ontology: OntologyResource = getattr(context.resources, declared.storage)
        keys = _watched_keys(declared)
        paths = partitions.expanded_paths(declared.source.paths, keys)
        now = provenance.source_fingerprint(declared.source, paths, ontology)
        if now is None:
            return dg.SkipReason("nobody can tell the state of this source: give it a fingerprint")
        if now == context.cursor:
            return dg.SkipReason("the source is as it was")
        if not keys and now == _materialised(context.instance, declared):
            return dg.SensorResult(skip_reason="it was ingested as it is", cursor=now)
        requests = [dg.RunRequest(partition_key=key) for key in keys] or [dg.RunRequest()]
        return dg.SensorResult(run_requests=requests, cursor=now)

    return source_changed


def _watched_keys(declared: OntologyAsset) -> Sequence[str]:
    """A partitioned type is ingested anew for its latest partition, or all static ones."""
    if declared.partitions is None:
        return []
    definition = partitions.partitions_def(declared.partitions)
    if declared.partitions.kind == "static":
        return list(declared.partitions.keys)
    last = definition.get_last_partition_key()
    return [last] if last is not None else []


def _materialised(instance: dg.DagsterInstance, declared: OntologyAsset) -> str | None:
    event = instance.get_latest_materialization_event(declared.asset_key)
    if event is None or event.asset_materialization is None:
        return None
    found = event.asset_materialization.metadata.get(FINGERPRINT)
    return str(found.value) if found is not None else None
