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
    get_input_data_version_tag,
)
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.definitions.source_asset import SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION
from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.storage.tags import (
    AUTO_RETRY_RUN_ID_TAG,
    HIDDEN_TAG_PREFIX,
    WILL_RETRY_TAG,
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


_AT_ONCE = 500  # a statement names each


def latest_check_records(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey]
) -> dict[dg.AssetCheckKey, Any]:
    """Of checks that have one, the record of the last evaluation: in a few statements, where the
    instance's own method makes one for each."""
    records: dict[dg.AssetCheckKey, Any] = {}
    for start in range(0, len(keys), _AT_ONCE):
        page = keys[start : start + _AT_ONCE]
        records |= instance.event_log_storage.get_latest_asset_check_execution_by_key(page)
    return {key: records[key] for key in keys if key in records}


def latest_materialisations(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey]
) -> dict[dg.AssetKey, tuple[int, dg.AssetMaterialization]]:
    """Of assets that have one, the last, with its id in the event log: in a few statements, where
    asking for the latest events makes several for each."""
    latest: dict[dg.AssetKey, tuple[int, dg.AssetMaterialization]] = {}
    for start in range(0, len(keys), _AT_ONCE):
        for record in instance.get_asset_records(keys[start : start + _AT_ONCE]):
            last = record.asset_entry.last_materialization_record
            made = last.asset_materialization if last is not None else None
            if last is not None and made is not None:
                latest[record.asset_entry.asset_key] = last.storage_id, made
    return latest


class FixedResource:
    """Mixed into a resource: its settings are the location's, and no launchpad offers them. Who
    starts a run chooses neither the storage nor whether it is guarded."""

    @cached_method  # one definition, as Dagster compares them by identity
    def get_resource_definition(self) -> Any:
        resource: Any = super()
        return resource.get_resource_definition().configured(self._resolved_config_dict)  # type: ignore[attr-defined]


def hidden_tag(name: str) -> str:
    """Of a run, for programs: the UI does not show it."""
    return f"{HIDDEN_TAG_PREFIX}{name}"


def steps_before(instance: dg.DagsterInstance, run: dg.DagsterRun, step: str) -> set[str]:
    """The steps of a run's job that have to end well before this one begins, blocking checks among
    them; all of its steps where it does not have this one."""
    if run.execution_plan_snapshot_id is None:
        return set()
    plan = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
    waits_for = {
        each.key: {
            handle.step_key for given in each.inputs for handle in given.upstream_output_handles
        }
        for each in plan.steps
    }
    if step not in waits_for:
        return set(waits_for)
    before: set[str] = set()
    left = [step]
    while left:
        more = waits_for.get(left.pop(), set()) - before
        before |= more
        left += more
    return before


def steps_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[str]:
    """The steps that a run executes."""
    if run.execution_plan_snapshot_id is None:
        return set()
    plan = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
    return set(plan.step_keys_to_execute)


_ENDED_WELL = {dg.DagsterEventType.STEP_SUCCESS, dg.DagsterEventType.STEP_SKIPPED}
_NOT_ENDED_WELL = {
    dg.DagsterEventType.STEP_START,
    dg.DagsterEventType.STEP_RESTARTED,
    dg.DagsterEventType.STEP_UP_FOR_RETRY,
    dg.DagsterEventType.STEP_FAILURE,
}


def step_outcomes(instance: dg.DagsterInstance, run: dg.DagsterRun) -> dict[str, bool]:
    """Whether they ended well, of steps that a run has begun."""
    outcomes: dict[str, bool] = {}
    for entry in instance.all_logs(run.run_id, _ENDED_WELL | _NOT_ENDED_WELL):
        if entry.step_key is not None and entry.dagster_event is not None:
            outcomes[entry.step_key] = entry.dagster_event.event_type in _ENDED_WELL
    return outcomes


def will_be_retried(run: dg.DagsterRun) -> bool:
    """Whether the daemon runs a failed run again, or has."""
    return run.status is dg.DagsterRunStatus.FAILURE and run.tags.get(WILL_RETRY_TAG) == "true"


def retry_of(run: dg.DagsterRun) -> str | None:
    """The run by which the daemon has retried this one."""
    return run.tags.get(AUTO_RETRY_RUN_ID_TAG)


def version_tags(version: int | str) -> dict[str, str]:
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


def with_inputs(tags: Mapping[str, str], versions: Mapping[dg.AssetKey, str]) -> dict[str, str]:
    """The same tags, of a materialisation whose inputs are these versions of assets now."""
    inputs = {get_input_data_version_tag(key): version for key, version in versions.items()}
    return {name: inputs.get(name, text) for name, text in tags.items()}


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


def location_of(
    context: dg.OpExecutionContext | dg.OutputContext,
) -> dg.RepositoryDefinition | None:
    """The definitions that the job belongs to; None for one that is run by itself, as in tests."""
    step = context.step_context if isinstance(context, dg.OutputContext) else context
    try:
        return step.repository_def
    except CheckError:
        return None


def materialises(context: dg.AssetCheckExecutionContext) -> bool:
    """Whether the run makes assets, so that its checks only came along."""
    layer = context.op_execution_context.job_def.asset_layer
    return bool(layer.asset_graph.executable_asset_keys)


def runs_asset(context: dg.AssetExecutionContext, key: dg.AssetKey) -> bool:
    """Whether the run makes this asset, too."""
    layer = context.op_execution_context.job_def.asset_layer
    return key in layer.asset_graph.executable_asset_keys


def run_records(
    instance: dg.DagsterInstance, filters: Sequence[dg.RunsFilter]
) -> list[dg.DagsterRun]:
    """Of runs that one of these lets through, oldest first."""
    records = {
        record.dagster_run.run_id: record
        for each in filters
        for record in instance.get_run_records(each)
    }
    return [r.dagster_run for r in sorted(records.values(), key=lambda r: r.create_timestamp)]


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


class _WithAssetIfThere(dg.AssetSelection):
    """Dagster's own union wants the asset to be there."""

    def __init__(self, operand: dg.AssetSelection, key: dg.AssetKey) -> None:
        self._operand = operand
        self._key = key

    def resolve_inner(self, asset_graph: Any, allow_missing: bool) -> AbstractSet[dg.AssetKey]:
        there = {self._key} & set(asset_graph.get_all_asset_keys())
        return {*self._operand.resolve_inner(asset_graph, allow_missing), *there}

    def resolve_checks_inner(
        self, asset_graph: Any, allow_missing: bool
    ) -> AbstractSet[dg.AssetCheckKey]:
        return self._operand.resolve_checks_inner(asset_graph, allow_missing)

    def to_serializable_asset_selection(self, asset_graph: Any) -> dg.AssetSelection:
        assets = dg.AssetSelection.assets(*self.resolve_inner(asset_graph, True)).without_checks()
        return assets | dg.AssetSelection.checks(*self.resolve_checks_inner(asset_graph, True))

    def __str__(self) -> str:
        return f"{self._operand} and {self._key.to_user_string()}"


def with_asset_if_there(selection: dg.AssetSelection, key: dg.AssetKey) -> dg.AssetSelection:
    """The same, and this asset in a location that has it."""
    return _WithAssetIfThere(selection, key)


def checks_job(
    context: dg.OpExecutionContext | dg.AssetExecutionContext,
    name: str,
    keys: Sequence[dg.AssetCheckKey],
) -> dg.JobDefinition | None:
    """A job of checks, as the run or else its location has them; None where there are none. Those
    that come with the making of an asset are left out."""
    op = context.op_execution_context if isinstance(context, dg.AssetExecutionContext) else context
    layer, location = op.job_def.asset_layer, location_of(op)
    elsewhere = location.asset_checks_defs_by_key if location is not None else {}
    alone: dict[dg.AssetCheckKey, dg.AssetsDefinition] = {}
    for key in keys:
        definition: dg.AssetsDefinition | None = elsewhere.get(key)
        if key in layer.asset_graph.asset_check_keys:
            definition = layer._get_data(key).assets_def
        if definition is not None and not definition.keys:
            alone[key] = definition
    if not alone:
        return None
    return dg.Definitions(
        asset_checks=[lasting_checks(each) for each in {id(d): d for d in alone.values()}.values()],
        jobs=[
            dg.define_asset_job(
                name,
                selection=dg.AssetSelection.checks(*alone),
                executor_def=dg.in_process_executor,
            )
        ],
    ).resolve_job_def(name)


def note_in_run(instance: dg.DagsterInstance, run: dg.DagsterRun, message: str) -> None:
    """Into the log of a run that has ended."""
    instance.report_engine_event(message, run)


def free_slots(instance: dg.DagsterInstance, run_id: str) -> None:
    """Give back what a dead run holds of its pools."""
    storage = instance.event_log_storage
    if storage.supports_global_concurrency_limits:
        storage.free_concurrency_slots_for_run(run_id)


def limit_pool(instance: dg.DagsterInstance, pool: str, slots: int) -> None:
    storage = instance.event_log_storage
    if storage.supports_global_concurrency_limits:
        storage.set_concurrency_slots(pool, slots)
