"""All that we use of Dagster beyond what it documents, each behind a name of ours.

Nothing else in the package imports a private module of Dagster or reaches through a context into
its insides; `tests/dagster/test_compat.py` holds both, and fails when a new release moves one of
these or makes it do something else. What is here decides nothing: it says in Dagster's terms what
others have decided.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import dagster as dg
from dagster._core.definitions.data_version import (
    DATA_VERSION_IS_USER_PROVIDED_TAG,
    DATA_VERSION_TAG,
)
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.definitions.source_asset import SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION
from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._utils.cached_method import cached_method
from dagster_shared.check import CheckError
from dagster_shared.record import replace


class LastingChecks(dg.AssetChecksDefinition):
    """Checks that stay checks when Dagster copies them, as it does with all of a component: of a
    copy that is an asset without a key it would have to make checks again, and warns of that."""

    def with_attributes(self, **attributes: Any) -> Any:
        return lasting_checks(super().with_attributes(**attributes))


def lasting_checks(definition: dg.AssetsDefinition) -> LastingChecks:
    with warnings.catch_warnings():
        # All attributes of an existing definition, of which Dagster calls one beta.
        warnings.simplefilter("ignore", dg.BetaWarning)
        return LastingChecks(**definition.get_attributes_dict())


def with_lasting_checks(definitions: dg.Definitions) -> dg.Definitions:
    """For definitions that a component yields."""
    checks = [lasting_checks(each) for each in definitions.asset_checks or ()]
    return replace(definitions, asset_checks=checks)


_CHECKS_AT_ONCE = 500  # a statement names each


def latest_check_records(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey]
) -> dict[dg.AssetCheckKey, Any]:
    """Of checks that have one, the record of the last evaluation: in a few statements, where the
    instance's own method makes one for each."""
    records: dict[dg.AssetCheckKey, Any] = {}
    for start in range(0, len(keys), _CHECKS_AT_ONCE):
        page = keys[start : start + _CHECKS_AT_ONCE]
        records |= instance.event_log_storage.get_latest_asset_check_execution_by_key(page)
    return {key: records[key] for key in keys if key in records}


class FixedResource:
    """Mixed into a resource: its settings are the location's, and no launchpad offers them. Who
    starts a run chooses neither the storage nor whether it is guarded."""

    @cached_method  # one definition, as Dagster compares them by identity
    def get_resource_definition(self) -> Any:
        resource: Any = super()
        return resource.get_resource_definition().configured(self._resolved_config_dict)  # type: ignore[attr-defined]


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


@contextmanager
def runs_of_location(
    instance: dg.DagsterInstance, module: str, location: str, job: dg.JobDefinition
) -> Iterator[None]:
    """Runs of the job that this process executes itself belong to a location, as if they had been
    launched from it: `execute_in_process` says of none where it is from, and then neither the home
    page nor the job's shows it."""
    target = LoadableTargetOrigin(
        executable_path=sys.executable, module_name=module, attribute="defs"
    )
    repository = RemoteRepositoryOrigin(
        ManagedGrpcPythonEnvCodeLocationOrigin(target, location), SINGLETON_REPOSITORY_NAME
    )
    create = instance.create_run_for_job

    def create_run_for_job(**members: Any) -> dg.DagsterRun:
        return create(**{**members, "remote_job_origin": RemoteJobOrigin(repository, job.name)})

    instance.create_run_for_job = create_run_for_job  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del instance.create_run_for_job


def set_data_version(context: dg.OutputContext, version: int) -> None:
    """From an IO manager, which has no result to say it with."""
    context.step_context.set_data_version(context.asset_key, dg.DataVersion(str(version)))


def instance_of(context: dg.OutputContext) -> dg.DagsterInstance:
    return context.step_context.instance


def log_evaluation(
    context: dg.OpExecutionContext | dg.AssetExecutionContext, evaluation: dg.AssetCheckEvaluation
) -> None:
    """The result of a check from a step that is not the check's own: taken, and not documented."""
    event: Any = evaluation
    context.log_event(event)


def step_key(context: dg.AssetExecutionContext) -> str:
    key: str = context.op_execution_context.get_step_execution_context().step.key
    return key


def seconds_blocked_by_pool(context: dg.AssetExecutionContext) -> float:
    """How long this step has waited for a slot of its pool, up to now."""
    own = step_key(context)
    for entry in context.instance.all_logs(context.run.run_id, dg.DagsterEventType.ENGINE_EVENT):
        if entry.step_key == own and "blocked by limit for pool" in entry.message:
            return max(0.0, time.time() - float(entry.timestamp))
    return 0.0


def location_of(context: dg.OpExecutionContext) -> dg.RepositoryDefinition | None:
    """The definitions that the job belongs to; None for one that is run by itself, as in tests."""
    try:
        return context.repository_def
    except CheckError:
        return None


def materialises(context: dg.AssetCheckExecutionContext) -> bool:
    """Whether the run makes assets, so that its checks only came along."""
    layer = context.op_execution_context.job_def.asset_layer
    return bool(layer.asset_graph.executable_asset_keys)


def last_evaluation(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey
) -> dg.AssetCheckEvaluation | None:
    """The last result of a check: its latest record is often of a run that has yet to come to it,
    or has passed it over."""
    records = instance.event_log_storage.get_asset_check_execution_history(key, limit=25)
    evaluations = (record.evaluation for record in records)
    return next((e for e in evaluations if isinstance(e, dg.AssetCheckEvaluation)), None)


class _WithoutCheck(dg.AssetSelection):
    """Dagster's own difference wants the checks to be there."""

    def __init__(self, operand: dg.AssetSelection, name: str) -> None:
        self._operand = operand
        self._name = name

    def resolve_inner(self, asset_graph: Any, allow_missing: bool) -> AbstractSet[dg.AssetKey]:
        return self._operand.resolve_inner(asset_graph, allow_missing)

    def resolve_checks_inner(
        self, asset_graph: Any, allow_missing: bool
    ) -> AbstractSet[dg.AssetCheckKey]:
        keys = self._operand.resolve_checks_inner(asset_graph, allow_missing)
        return {key for key in keys if key.name != self._name}

    def to_serializable_asset_selection(self, asset_graph: Any) -> dg.AssetSelection:
        assets = dg.AssetSelection.assets(*self.resolve_inner(asset_graph, True)).without_checks()
        return assets | dg.AssetSelection.checks(*self.resolve_checks_inner(asset_graph, True))

    def __str__(self) -> str:
        return f"{self._operand} without the checks {self._name}"


def without_check(selection: dg.AssetSelection, name: str) -> dg.AssetSelection:
    """The same assets with their checks, but for those of this name, if there are any."""
    return _WithoutCheck(selection, name)


def free_slots(instance: dg.DagsterInstance, run_id: str) -> None:
    """Give back what a dead run holds of its pools."""
    storage = instance.event_log_storage
    if storage.supports_global_concurrency_limits:
        storage.free_concurrency_slots_for_run(run_id)


def limit_pool(instance: dg.DagsterInstance, pool: str, slots: int) -> None:
    storage = instance.event_log_storage
    if storage.supports_global_concurrency_limits:
        storage.set_concurrency_slots(pool, slots)
