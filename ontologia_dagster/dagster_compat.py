"""All that we use of Dagster beyond what it documents, each behind a name of ours.

Nothing else in the package imports a private module of Dagster or reaches through a context into
its insides; `tests/dagster/test_compat.py` holds both, and fails when a new release moves one of
these or makes it do something else. What is here decides nothing: it says in Dagster's terms what
others have decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import dagster as dg
from dagster._core.definitions.data_version import (
    DATA_VERSION_IS_USER_PROVIDED_TAG,
    DATA_VERSION_TAG,
)
from dagster._core.definitions.source_asset import SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION
from dagster_shared.check import CheckError


def version_tags(version: int) -> dict[str, str]:
    """What a materialisation that we report ourselves carries as its data version."""
    return {DATA_VERSION_TAG: str(version), DATA_VERSION_IS_USER_PROVIDED_TAG: "true"}


def version_of(tags: Mapping[str, str]) -> int:
    """The commit that a materialisation stands for; 0 where its version is no commit's number."""
    text = tags.get(DATA_VERSION_TAG, "")
    return int(text) if text.isdigit() else 0


def latest_versions(
    instance: dg.DagsterInstance,
    key: dg.AssetKey,
    partitions: Sequence[str] | None,
    after: int | None = None,
) -> dict[str, int]:
    """The commits that the latest materialisations of partitions (None: of all) stand for; only of
    records after `after`."""
    tags = instance.event_log_storage.get_latest_tags_by_partition(
        key,
        dg.DagsterEventType.ASSET_MATERIALIZATION,
        [DATA_VERSION_TAG],
        partitions,
        after_cursor=after,
    )
    return {partition: version_of(of_partition) for partition, of_partition in tags.items()}


def last_record_id(instance: dg.DagsterInstance) -> int:
    """Of the latest record in the event log; later ones have greater ids."""
    return instance.event_log_storage.get_maximum_record_id() or 0


def provenance_tags(
    context: dg.AssetExecutionContext, key: dg.AssetKey, code_version: str
) -> dict[str, str]:
    """As Dagster's own events of this step have them: the code version, and what the inputs were.
    The data version is left to `version_tags`."""
    from dagster._core.execution.plan.execute_step import (
        _build_data_version_tags,
        _get_input_provenance_data,
    )

    step = context.op_execution_context.get_step_execution_context()
    inputs = _get_input_provenance_data(key, step)
    tags = _build_data_version_tags(dg.DataVersion(""), code_version, inputs, True)
    return {name: text for name, text in tags.items() if name not in version_tags(0)}


def result_without_events() -> dg.MaterializeResult[None]:
    """The end of an asset that has logged its materialisations itself. What comes after it in the
    run (its checks, assets downstream) waits for this."""
    return dg.MaterializeResult(metadata={SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION: True})


def set_data_version(context: dg.OutputContext, version: int) -> None:
    """From an IO manager, which has no result to say it with."""
    context.step_context.set_data_version(context.asset_key, dg.DataVersion(str(version)))


def instance_of(context: dg.OutputContext) -> dg.DagsterInstance:
    return context.step_context.instance


def step_key(context: dg.AssetExecutionContext) -> str:
    key: str = context.op_execution_context.get_step_execution_context().step.key
    return key


def location_of(context: dg.OpExecutionContext) -> dg.RepositoryDefinition | None:
    """The definitions that the job belongs to; None for one that is run by itself, as in tests."""
    try:
        return context.repository_def
    except CheckError:
        return None


def free_slots(instance: dg.DagsterInstance, run_id: str) -> None:
    """Give back what a dead run holds of its pools."""
    storage = instance.event_log_storage
    if storage.supports_global_concurrency_limits:
        storage.free_concurrency_slots_for_run(run_id)


def limit_pool(instance: dg.DagsterInstance, pool: str, slots: int) -> None:
    storage = instance.event_log_storage
    if storage.supports_global_concurrency_limits:
        storage.set_concurrency_slots(pool, slots)
