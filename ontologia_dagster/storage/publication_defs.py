"""What an audited storage has beside others: the asset that publishes, the jobs for branches that
stand, and the sensor that looks after them."""

# No `from __future__ import annotations`: Dagster reads annotations of ops and assets as objects.

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg
from pydantic import Field

from ontologia_dagster.dagster_compat import (
    checks_job,
    note_in_run,
    steps_of,
    version_of,
)
from ontologia_dagster.declaration import (
    EMITS_METADATA,
    STORAGE_METADATA,
    TYPE_METADATA,
    WRITTEN_BY_METADATA,
)
from ontologia_dagster.resources.branches import AUDITED, BRANCH_TAG, existing
from ontologia_dagster.resources.ontology import report_failures
from ontologia_dagster.storage.events import UNFINISHED
from ontologia_dagster.storage.lineage import DEFAULT_STORAGE
from ontologia_dagster.storage.maintenance import one_op_job
from ontologia_dagster.storage.publication import (
    CheckAgain,
    PublishedRun,
    publish_branch,
    standing_metadata,
)
from ontologia_dagster.storage.standing import StandingBranch, standing_branches
from ontologia_dagster.storage.unpublished import (
    PUBLISHES_TAG,
    RECHECK_TAG,
    discard_job_name,
    publication_key,
    publish_job_name,
    runs_on,
    undone_steps,
    unfinished_steps,
)
from storage_engine.wording import counted

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource

_INTERVAL_S = 30
_PER_TICK = 50  # runs asked for: the daemon makes them one after the other
_BACKFILL = "dagster/backfill"
_NOT_AUDITED = (
    "nothing is published, as the resource %r does not say publish=%r: runs write for all to see"
)
_RETRY = dg.RetryPolicy(
    max_retries=3, delay=5, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS
)


def publication_definitions(
    storage: str, beside: Sequence[dg.AssetSpec], *, status: dg.DefaultSensorStatus
) -> dg.Definitions:
    """`beside`: all assets that are known of, of which those count that write to the storage or
    read it."""
    return dg.Definitions(
        assets=[publication_asset(storage, _before(storage, beside))],
        jobs=[publish_job(storage), discard_job(storage)],
        sensors=[standing_sensor(storage, status=status)],
    )


def _before(storage: str, specs: Sequence[dg.AssetSpec]) -> list[dg.AssetKey]:
    """The assets that a publication comes after: all of the storage's, but for what comes of
    publications: types that handlers write, and what depends on the publication."""
    after = {publication_key(storage)}
    while True:
        more = {
            spec.key
            for spec in specs
            if spec.key not in after and any(dep.asset_key in after for dep in spec.deps)
        }
        if not more:
            break
        after |= more
    return [spec.key for spec in specs if spec.key not in after and _is_of(storage, spec)]


def _is_of(storage: str, spec: dg.AssetSpec) -> bool:
    metadata = {name: getattr(v, "value", v) for name, v in spec.metadata.items()}
    if WRITTEN_BY_METADATA in metadata:
        return False
    emits = metadata.get(EMITS_METADATA)
    sends = isinstance(emits, dict) and emits.get("storage") == storage
    # An asset that the IO manager keeps may say of which type it is, and no more.
    unsaid = DEFAULT_STORAGE if TYPE_METADATA in metadata else None
    return sends or metadata.get(STORAGE_METADATA, unsaid) == storage


# -- the asset ------------------------------------------------------------------------------------


def publication_asset(storage: str, after: Sequence[dg.AssetKey]) -> dg.AssetsDefinition:
    """After everything that the run wrote, and its blocking checks: one merge."""

    @dg.asset(
        key=publication_key(storage),
        deps=list(after),
        group_name="ontologia",
        description="What a run has written, published: all types in one commit, or nothing. It "
        "comes after all assets of the run and their blocking checks.",
        required_resource_keys={storage},
        retry_policy=_RETRY,
    )
    def publication(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        ontology: OntologyResource = getattr(context.resources, storage)
        own = ontology.run_branch
        if own is None:
            context.log.warning(_NOT_AUDITED, storage, AUDITED)
            return dg.MaterializeResult(
                metadata={"note": _NOT_AUDITED % (storage, AUDITED), "rows_published": 0},
                data_version=_version(context, storage, None),
            )
        with report_failures(context.instance):
            _require_audited(context, ontology, storage, own)
            check_again = _check_again(context, storage, own) if ontology.recheck else None
            done = publish_branch(
                context,
                ontology,
                storage,
                own,
                check_again=check_again,
                begun=ontology.begun_branch(),
            )
        return dg.MaterializeResult(
            metadata=done.metadata(ontology), data_version=_version(context, storage, done)
        )

    return publication


def _require_audited(
    context: dg.AssetExecutionContext, ontology: "OntologyResource", storage: str, name: str
) -> None:
    """In a run that goes on with the branch of others, all that those have left undone is done now.
    Of its own steps Dagster sees to that. What another one has only begun would be published by
    halves."""
    others = [run for run in runs_on(context.instance, name) if run.run_id != context.run.run_id]
    for run in others:
        if run.status in UNFINISHED and unfinished_steps(context.instance, run, storage):
            raise dg.Failure(
                description=f"run {run.run_id} still works on branch {name}, and what it has begun "
                "would be published by halves: it publishes all of it at its end, or re-execute "
                "this one from failure then",
                metadata={
                    **standing_metadata(ontology, storage, name),
                    "run": dg.MetadataValue.dagster_run(run.run_id),
                },
                allow_retries=False,
            )
    own = steps_of(context.instance, context.run)
    undone = [step for step in undone_steps(context.instance, others, storage) if step not in own]
    if undone:
        raise dg.Failure(
            description=f"what is on branch {name} did not pass: {', '.join(undone)} failed or was "
            f"never done. Re-execute the run from failure; the job {publish_job_name(storage)} "
            "publishes it as it is",
            metadata=standing_metadata(ontology, storage, name),
            allow_retries=False,
        )


def _version(
    context: dg.AssetExecutionContext, storage: str, done: PublishedRun | None
) -> dg.DataVersion:
    """The last publication's commit, also after a run that had nothing to publish."""
    if done is not None and done.commit is not None:
        return dg.DataVersion(str(done.commit.id))
    event = context.instance.get_latest_materialization_event(publication_key(storage))
    made = event.asset_materialization if event is not None else None
    return dg.DataVersion(str(version_of((made.tags if made is not None else None) or {})))


def _check_again(
    context: dg.OpExecutionContext | dg.AssetExecutionContext, storage: str, name: str
) -> CheckAgain:
    """The blocking checks that the runs on a branch have made, once more, on it as it is then."""
    keys: dict[dg.AssetCheckKey, None] = {}
    evaluated = dg.DagsterEventType.ASSET_CHECK_EVALUATION
    for run in runs_on(context.instance, name):
        for entry in context.instance.all_logs(run.run_id, evaluated):
            if entry.dagster_event is not None:
                check = entry.dagster_event.asset_check_evaluation_data
                if check.blocking:
                    keys[check.asset_check_key] = None
    job = checks_job(context, f"{storage}_check_again", list(keys))

    def check_again(branch: str) -> list[str]:
        if job is None:
            return []
        result = job.execute_in_process(
            instance=context.instance,
            tags={BRANCH_TAG: branch, RECHECK_TAG: "true"},
            raise_on_error=False,
        )
        evaluations = result.get_asset_check_evaluations()
        failed = [
            f"{each.check_name} of {each.asset_key.to_user_string()}: "
            f"{each.description or 'it failed'}"
            for each in evaluations
            if not each.passed and each.severity == dg.AssetCheckSeverity.ERROR
        ]
        if not failed and not result.success:
            failed = [f"the checks of run {result.run_id} did not come to an end"]
        return failed

    return check_again


# -- jobs -----------------------------------------------------------------------------------------


class PublishConfig(dg.Config):
    branch: str = Field(description="The branch that somebody has looked at, such as run/42")
    recheck: bool = Field(
        default=False,
        description="First bring in what others have published meanwhile, and run the blocking "
        "checks of the branch's runs again",
    )
    on_conflict: Literal["fail", "ours", "theirs", "fields"] = Field(
        default="fail",
        description="Of rows that both sides have changed: refuse, keep what all see, take the "
        "branch's, or combine changes to different fields",
    )


class DiscardConfig(dg.Config):
    branch: str = Field(description="The branch to throw away, with all that only it has")


def publish_job(storage: str) -> dg.JobDefinition:
    @dg.op(name=f"{storage}_merge_branch", required_resource_keys={storage}, retry_policy=_RETRY)
    def publish(context: dg.OpExecutionContext, config: PublishConfig) -> None:
        ontology: OntologyResource = getattr(context.resources, storage)
        with report_failures(context.instance):
            _require(context, ontology, config.branch)
            context.instance.add_run_tags(context.run.run_id, {PUBLISHES_TAG: config.branch})
            check_again = _check_again(context, storage, config.branch) if config.recheck else None
            done = publish_branch(
                context,
                ontology,
                storage,
                config.branch,
                on_conflict=config.on_conflict,
                check_again=check_again,
            )
        context.add_output_metadata(done.metadata(ontology))

    return one_op_job(
        publish_job_name(storage),
        publish,
        "Publish a branch that stands, after somebody has looked at it.",
    )


def discard_job(storage: str) -> dg.JobDefinition:
    @dg.op(name=f"{storage}_delete_branch", required_resource_keys={storage}, retry_policy=_RETRY)
    def discard(context: dg.OpExecutionContext, config: DiscardConfig) -> None:
        ontology: OntologyResource = getattr(context.resources, storage)
        with report_failures(context.instance), ontology.session(branch=ontology.home) as session:
            _require(context, ontology, config.branch)
            gone = session.delete_branch(config.branch)
        context.log.info(
            "branch %s is gone, with %s of its own; %s is as it was",
            gone.name,
            counted(gone.commits, "commit"),
            ontology.home,
        )
        context.add_output_metadata({"branch": gone.name, "commits_discarded": gone.commits})

    return one_op_job(discard_job_name(storage), discard, "Throw a branch away that stands.")


def _require(context: dg.OpExecutionContext, ontology: "OntologyResource", name: str) -> None:
    """UnknownBranchError names the nearest; one of another location, and one that a run works on,
    are refused."""
    with ontology.repository(branch=ontology.home) as repository:
        existing(repository, name)
    for run in runs_on(context.instance, name):
        if run.status in UNFINISHED and run.run_id != context.run.run_id:
            raise dg.Failure(
                description=f"run {run.run_id} works on branch {name}: wait until it has ended, or "
                "terminate it",
                metadata={"branch": name, "run": dg.MetadataValue.dagster_run(run.run_id)},
                allow_retries=False,
            )


def publish_config(storage: str, branch: str, **more: str | bool) -> dict[str, Any]:
    return {"ops": {f"{storage}_merge_branch": {"config": {"branch": branch, **more}}}}


def discard_config(storage: str, branch: str) -> dict[str, Any]:
    return {"ops": {f"{storage}_delete_branch": {"config": {"branch": branch}}}}


# -- the sensor -----------------------------------------------------------------------------------


def standing_sensor(storage: str, *, status: dg.DefaultSensorStatus) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{storage}_standing_branches",
        # By its name: Dagster copies a sensor to bind its job, and warns of its own copy.
        job_name=publish_job_name(storage),
        minimum_interval_seconds=_INTERVAL_S,
        required_resource_keys={storage},
        default_status=status,
        description="Publishes branches of runs that went well and had no publication of their "
        "own; writes into the log of failed runs where their branches stand.",
    )
    def standing(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        ontology: OntologyResource = getattr(context.resources, storage)
        with report_failures():
            branches = list(standing_branches(context.instance, ontology, storage))
        noted = _parse_cursor(context.cursor)
        due = [each for each in branches if each.publishable][:_PER_TICK]
        others = [each for each in branches if not each.publishable]
        for each in others:
            if each.key not in noted:
                note_in_run(context.instance, each.run, each.sentence(ontology, storage))
        summary = f"{counted(len(others), 'branch', 'branches')} left to people"
        return dg.SensorResult(
            run_requests=list(_requests(storage, due, recheck=ontology.recheck)),
            skip_reason=None if due else summary,
            cursor=json.dumps(sorted(each.key for each in others)),
        )

    return standing


def _requests(
    storage: str, due: Sequence[StandingBranch], *, recheck: bool
) -> Iterator[dg.RunRequest]:
    """Once for each state of a branch: one that conflicts is not tried again by itself."""
    for each in due:
        # Dagster counts for a backfill what its runs have materialised, and this one does it.
        backfill = each.run.tags.get(_BACKFILL)
        yield dg.RunRequest(
            tags={
                PUBLISHES_TAG: each.branch.name,
                **({_BACKFILL: backfill} if backfill is not None else {}),
            },
            run_key=f"{each.key}/{each.branch.commit_id}",
            run_config=publish_config(
                storage, each.branch.name, **({"recheck": True} if recheck else {})
            ),
        )


def _parse_cursor(cursor: str | None) -> set[str]:
    try:
        raw: Any = json.loads(cursor) if cursor else []
    except ValueError:
        return set()
    return {str(each) for each in raw} if isinstance(raw, list) else set()
