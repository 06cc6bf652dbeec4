"""What a run has done on its branch, told as observations until the branch is published.

An asset is materialised when everybody can see it. So a step of an audited run observes what it
made, with all that its materialisation will say, and the publication tells it: whoever waits for
new data outside the run, an automation condition or a freshness policy, follows the publication
and never the branch. What is told is read back from the logs of the run and its re-executions, so
that a publication can be tried again, and a person can publish what a run has left standing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import dagster as dg

from ontologia_dagster.dagster_compat import (
    location_of,
    provenance_tags,
    result_without_events,
    run_records,
    runs_asset,
    step_outcomes,
    steps_before,
    steps_of,
)
from ontologia_dagster.declaration import PartitionSpec
from ontologia_dagster.resources.branches import AUDITED, BRANCH_TAG, diff_command
from storage_engine.errors import ConfigurationError

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine import Branch
    from storage_engine.repository.protocol import Repository

FACTS = "ontologia/unpublished"
PUBLISHED = "ontologia/published"  # of a materialisation that was told so: the incarnation
ROOT_RUN = "dagster/root_run_id"
PUBLISHES_TAG = "ontologia/publishes"  # of a run that publishes the branch of others
RECHECK_TAG = "ontologia/recheck"  # of a run that only looks at the branch of another one
RUN_BRANCHES = "run/"


def publication_key(storage: str) -> dg.AssetKey:
    return dg.AssetKey(f"{storage}_publication")


def publish_job_name(storage: str) -> str:
    return f"{storage}_publish_branch"


def discard_job_name(storage: str) -> str:
    return f"{storage}_discard_branch"


def begin(
    context: dg.AssetExecutionContext, ontology: OntologyResource, storage: str
) -> Branch | None:
    """The branch that this step writes to; None where it writes for all to see."""
    require_publication(location_of(context.op_execution_context), ontology, storage)
    branch = ontology.begin_branch()
    if branch is None:
        return None
    publication = publication_key(storage)
    by = publication.to_user_string()
    if not runs_asset(context, publication):
        context.log.warning("%s is not part of this run, which publishes nothing by itself", by)
        by = f"the job {publish_job_name(storage)}"
    context.log.info(
        "working on branch %s: %s shows nothing of it until %s publishes it. `%s` shows what is "
        "there so far; %s throws it away",
        branch.name,
        branch.parent,
        by,
        diff_command(branch.name, ontology.storage_uri),
        discard_job_name(storage),
    )
    return branch


def require_publication(
    location: dg.RepositoryDefinition | None, ontology: OntologyResource, storage: str
) -> None:
    """Refuse to write where nothing would ever publish it: the resource says so, and the platform
    of its storage was built without. A location that has no platform may share another one's."""
    if ontology.publish != AUDITED or location is None:
        return
    jobs = set(location.job_names)
    if f"{storage}_gc" in jobs and publish_job_name(storage) not in jobs:
        raise ConfigurationError(
            f"the resource {storage!r} says publish={AUDITED!r}, and build_platform was not told: "
            f"nothing would publish what this run writes. Say build_platform(..., "
            f"publish={AUDITED!r})"
        )


def branch_of(ontology: OntologyResource, repository: Repository) -> Branch | None:
    """The branch that was opened, where that is a run's own."""
    from storage_engine.runtime.branches import branches_of

    if repository.branch == ontology.home:
        return None
    return branches_of(repository).find(repository.branch)


@dataclass(frozen=True)
class UnpublishedAsset:
    """One asset, or one of its partitions, as a run has left it on a branch.

    `type_name`: of an asset that is a type, whose version is the commit that publishes it; others
    have a `version` of their own. `cut` is how a type is cut into partitions.
    """

    key: dg.AssetKey
    partition: str | None
    incarnation: str
    base: int
    begun_at: str
    type_name: str | None
    version: str | None
    cut: PartitionSpec | None
    metadata: Mapping[str, Any]
    tags: Mapping[str, str]

    @classmethod
    def parse(cls, observed: dg.AssetObservation) -> Self | None:
        """None: it is about something else."""
        value = observed.metadata.get(FACTS)
        if not isinstance(value, dg.JsonMetadataValue) or not isinstance(value.data, dict):
            return None
        facts: dict[str, Any] = value.data
        return cls(
            observed.asset_key,
            observed.partition,
            facts["incarnation"],
            facts["base"],
            facts["begun_at"],
            facts["type"],
            facts["version"],
            PartitionSpec(**facts["cut"]) if facts["cut"] is not None else None,
            {name: each for name, each in observed.metadata.items() if name != FACTS},
            observed.tags or {},
        )


def observe(
    context: dg.AssetExecutionContext,
    branch: Branch,
    key: dg.AssetKey,
    by_partition: Mapping[str | None, Mapping[str, Any]],
    *,
    code_version: str,
    type_name: str | None = None,
    version: str | None = None,
    cut: PartitionSpec | None = None,
) -> Iterator[dg.MaterializeResult[None]]:
    """The end of a step on a branch: metadata by partition, under None of an asset without."""
    tags = provenance_tags(context, key, code_version)
    for partition, metadata in by_partition.items():
        context.log_event(
            observation(
                branch,
                key,
                metadata,
                partition=partition,
                type_name=type_name,
                version=version,
                cut=cut,
                tags=tags,
            )
        )
    yield result_without_events()


def observation(
    branch: Branch,
    key: dg.AssetKey,
    metadata: Mapping[str, Any],
    *,
    partition: str | None = None,
    type_name: str | None = None,
    version: str | None = None,
    cut: PartitionSpec | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.AssetObservation:
    """One asset, or partition, on a branch, with all that its materialisation will say."""
    facts = {
        "branch": branch.name,
        "incarnation": branch.incarnation,
        "base": branch.base_commit_id,
        "begun_at": branch.created_at,
        "type": type_name,
        "version": version,
        "cut": cut.model_dump(mode="json") if cut is not None else None,
    }
    return dg.AssetObservation(
        asset_key=key,
        partition=partition,
        description=f"On branch {branch.name}, not published yet.",
        metadata={**metadata, FACTS: dg.MetadataValue.json(facts)},
        tags=dict(tags or {}),
    )


def runs_on(instance: dg.DagsterInstance, branch: str) -> list[dg.DagsterRun]:
    """The runs that worked on a branch, oldest first: the one that it is named for, its
    re-executions, and those that named it."""
    return working(runs_about(instance, branch))


def publishers_of(instance: dg.DagsterInstance, branch: str) -> list[dg.DagsterRun]:
    """The runs of the job that publishes which were about a branch after the last that worked on
    it, oldest first."""
    return publishing(runs_about(instance, branch))


def working(runs: Sequence[dg.DagsterRun]) -> list[dg.DagsterRun]:
    return [run for run in runs if PUBLISHES_TAG not in run.tags]


def publishing(runs: Sequence[dg.DagsterRun]) -> list[dg.DagsterRun]:
    publishers: list[dg.DagsterRun] = []
    for run in runs:
        publishers = [*publishers, run] if PUBLISHES_TAG in run.tags else []
    return publishers


def runs_about(instance: dg.DagsterInstance, branch: str) -> list[dg.DagsterRun]:
    """The runs that worked on a branch, and those that published it, oldest first."""
    filters = [dg.RunsFilter(tags={tag: branch}) for tag in (BRANCH_TAG, PUBLISHES_TAG)]
    if branch.startswith(RUN_BRANCHES):
        root = branch.removeprefix(RUN_BRANCHES)
        filters += [dg.RunsFilter(run_ids=[root]), dg.RunsFilter(tags={ROOT_RUN: root})]
    return [run for run in run_records(instance, filters) if RECHECK_TAG not in run.tags]


def undone_steps(
    instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], storage: str
) -> list[str]:
    """What has to be done before a publication, blocking checks included, and was not, or ended
    badly the last time, in the runs on a branch."""
    publication = publication_key(storage).to_python_identifier()
    wanted: set[str] = set()
    done: dict[str, bool] = {}
    for run in runs:
        wanted |= steps_before(instance, run, publication)
        done |= step_outcomes(instance, run)
    return sorted(step for step in wanted if not done.get(step, False))


def unfinished_steps(instance: dg.DagsterInstance, run: dg.DagsterRun, storage: str) -> list[str]:
    """Of its own, what a run has still to do before a publication."""
    publication = publication_key(storage).to_python_identifier()
    wanted = steps_before(instance, run, publication) & steps_of(instance, run)
    done = step_outcomes(instance, run)
    return sorted(step for step in wanted if not done.get(step, False))


def left_on(instance: dg.DagsterInstance, runs: Iterable[dg.DagsterRun]) -> list[UnpublishedAsset]:
    """What these runs have left on branches, in the order in which it was made: of each asset and
    partition the last."""
    left: dict[tuple[dg.AssetKey, str | None], UnpublishedAsset] = {}
    for run in runs:
        for entry in instance.all_logs(run.run_id, dg.DagsterEventType.ASSET_OBSERVATION):
            event = entry.dagster_event
            if event is None:
                continue
            each = UnpublishedAsset.parse(event.asset_observation_data.asset_observation)
            if each is not None:
                left.pop((each.key, each.partition), None)
                left[each.key, each.partition] = each
    return list(left.values())


def told_by(
    instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], incarnation: str
) -> set[tuple[dg.AssetKey, str | None]]:
    """What publications of a branch have told already, before they were stopped."""
    told: set[tuple[dg.AssetKey, str | None]] = set()
    for run in runs:
        for entry in instance.all_logs(run.run_id, dg.DagsterEventType.ASSET_MATERIALIZATION):
            event = entry.dagster_event
            if event is None:
                continue
            made = event.step_materialization_data.materialization
            value = made.metadata.get(PUBLISHED)
            if value is not None and value.value == incarnation:
                told.add((made.asset_key, made.partition))
    return told
