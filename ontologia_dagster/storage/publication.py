"""Publishing what a run has written on its branch: all types in one commit, or nothing.

Merge, tell, delete, in this order, so that it can be stopped anywhere and tried again. A branch
that is merged already is answered with the commit that did it: the parent's manifests keep it while
the branch is there, and the commit's metadata names the branch for ever. What has been told is in
the logs of runs. Only then the branch goes. A conflict, like a failed check before, leaves the
target as it was and the branch standing, for a person to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.dagster_compat import version_tags, with_inputs
from ontologia_dagster.downstream.metadata import commit_metadata, table
from ontologia_dagster.ingestion import partitions, provenance
from ontologia_dagster.resources.branches import (
    INCARNATION,
    BegunBranch,
    diff_command,
    lost_failure,
    published_as,
)
from ontologia_dagster.storage.unpublished import (
    PUBLISHED,
    UnpublishedAsset,
    discard_job_name,
    left_on,
    publish_job_name,
    publishers_of,
    runs_on,
    told_by,
)
from storage_engine.errors import (
    ConfigurationError,
    HeadMismatchError,
    MergeConflictError,
    UnknownBranchError,
)
from storage_engine.wording import counted

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine import Branch, MergeReport, Session
    from storage_engine.repository.protocol import CommitRecord, Repository

_TRIES = 5  # to publish a branch that was checked on what everybody sees
_SHOWN = 50  # conflicts
_OF_COMMIT = {"commit", "examine_commit", "commit_url"}

CheckAgain = Callable[[str], Sequence[str]]  # what has failed on that branch, as sentences


@dataclass(frozen=True)
class PublishedRun:
    """`commit` None: what the branch says everybody knew. `branch` None: there was none."""

    name: str
    branch: Branch | None
    commit: CommitRecord | None
    begun_at: str | None = None
    events: int | None = None
    earlier: bool = False  # an earlier attempt had merged it

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.commit.written) if self.commit is not None else 0

    def metadata(self, ontology: OntologyResource) -> dict[str, Any]:
        """With numbers that plot: rows, and seconds between the first write and all seeing it."""
        commit = self.commit
        metadata: dict[str, Any] = {
            "branch": self.name,
            **commit_metadata(ontology, commit.id if commit is not None else None),
            "rows_published": self.rows,
        }
        if commit is None:
            return metadata
        metadata |= {
            "types_published": len(commit.written),
            "types": table(
                ["type", "rows", "inserted", "changed"],
                [
                    (each.type_name, each.rows, each.inserted, each.updated)
                    for each in commit.written
                ],
            ),
        }
        if self.events is not None:
            metadata["events_published"] = self.events
        if self.begun_at is not None:
            waited = commit.created_at - datetime.fromisoformat(self.begun_at)
            metadata["seconds_to_publication"] = round(max(0.0, waited.total_seconds()), 3)
        return metadata

    def sentence(self, home: str) -> str:
        if self.commit is None:
            return f"{self.name} had nothing that {home} did not have; no commit was made"
        before = ", by an attempt before this one" if self.earlier else ""
        return (
            f"{self.name} is published as commit {self.commit.id} of {home}{before}: "
            f"{counted(self.rows, 'row')} of {counted(len(self.commit.written), 'type')}"
        )


def publish_branch(
    context: dg.OpExecutionContext | dg.AssetExecutionContext,
    ontology: OntologyResource,
    storage: str,
    name: str,
    *,
    on_conflict: str = "fail",
    check_again: CheckAgain | None = None,
    begun: BegunBranch | None = None,
) -> PublishedRun:
    """Merge a branch of the location's, tell of what it brought, and delete it.

    begun:  which branch of that name is meant, where a run publishes its own
    """
    from storage_engine.runtime.branches import branches_of

    instance = context.instance
    runs = runs_on(instance, name)
    if all(run.run_id != context.run.run_id for run in runs):
        runs.append(context.run)  # a re-execution by a program may not say of what
    holder = {"run_id": context.run.run_id, "job": context.run.job_name}
    with ontology.session(branch=ontology.home, holder=holder) as home:
        branches = branches_of(home.repository)
        branch = branches.find(name)
        left = left_on(instance, runs)
        incarnation = branch.incarnation if branch is not None else _last_incarnation(left, begun)
        left = [each for each in left if each.incarnation == incarnation]
        tellers = [*runs, *publishers_of(instance, name)]
        told = told_by(instance, tellers, incarnation) if incarnation else set()
        if not told and begun is not None and begun.is_lost(home.repository, branch):
            raise lost_failure(name)
        merged_upto: int | None = None
        if branch is None:
            published = _published_before(home.repository, name, left, begun)
        elif not branch.commits:  # all was as everybody knew it: not worth a commit
            published = PublishedRun(name, branch, None, branch.created_at)
            merged_upto = branch.commit_id
        else:
            report = _merge(context, ontology, storage, home, branch, on_conflict, check_again)
            merged_upto = report.source_commit_id
            commit_id = report.commit_id or branches.merged_by(name)
            published = PublishedRun(
                name,
                branch,
                _commit(home.repository, commit_id),
                branch.created_at,
                report.events if report.commit_id is not None else None,
                earlier=report.commit_id is None and commit_id is not None,
            )
        context.log.info("%s", published.sentence(ontology.home))
        untold = [each for each in left if (each.key, each.partition) not in told]
        _tell(context, ontology, home.repository, published, untold)
        if branch is not None:
            _delete(context, home, name, merged_upto)
    return published


def _last_incarnation(left: Sequence[UnpublishedAsset], begun: BegunBranch | None) -> str:
    if begun is not None:
        return begun.incarnation
    return left[-1].incarnation if left else ""


def _published_before(
    repository: Repository,
    name: str,
    left: Sequence[UnpublishedAsset],
    begun: BegunBranch | None,
) -> PublishedRun:
    """Of a branch that is gone: it was published by an attempt that was stopped afterwards, or
    nothing was ever written."""
    if begun is None:
        return PublishedRun(name, None, None)
    commit = _commit(repository, published_as(repository, begun.incarnation, begun.base))
    begun_at = left[-1].begun_at if left else None
    return PublishedRun(name, None, commit, begun_at, earlier=True)


def _commit(repository: Repository, commit_id: int | None) -> CommitRecord | None:
    if commit_id is None:
        return None
    [commit] = repository.commits_between(commit_id - 1, commit_id)
    return commit


# -- merge ----------------------------------------------------------------------------------------


def _merge(
    context: dg.OpExecutionContext | dg.AssetExecutionContext,
    ontology: OntologyResource,
    storage: str,
    home: Session,
    branch: Branch,
    on_conflict: Any,
    check_again: CheckAgain | None,
) -> MergeReport:
    meta = {provenance.RUN_ID: context.run.run_id, INCARNATION: branch.incarnation}
    try:
        if check_again is None:
            return home.merge(branch.name, on_conflict=on_conflict, meta=meta)
        for _ in range(_TRIES):
            seen = _bring_up_to_date(context, ontology, storage, home, branch, meta, check_again)
            try:
                return home.merge(branch.name, on_conflict=on_conflict, meta=meta, expect=seen)
            except HeadMismatchError:
                context.log.info("others have published meanwhile: checking on that")
    except MergeConflictError as error:
        raise conflict_failure(ontology, storage, branch.name, error) from error
    raise HeadMismatchError(_TRIES)


def _bring_up_to_date(
    context: dg.OpExecutionContext | dg.AssetExecutionContext,
    ontology: OntologyResource,
    storage: str,
    home: Session,
    branch: Branch,
    meta: Mapping[str, str],
    check_again: CheckAgain,
) -> int:
    """The parent's commit that the branch has all of, and on which its checks have passed."""
    if home.repository.head_commit_id() == branch.base_commit_id:
        return branch.base_commit_id  # nobody has moved, and the run has checked just that
    with ontology.session(branch=branch.name) as work:
        update = work.update_branch(meta=meta)
    if update.commit_id is not None:
        brought = ", ".join(each.type_name for each in update.types)
        context.log.info("what others have published meanwhile came into the branch: %s", brought)
    failed = check_again(branch.name)
    if failed:
        after = _next(ontology, storage, branch.name)
        raise dg.Failure(
            description=f"{branch.name} passed its checks, and does not together with what others "
            f"have published meanwhile: {'; '.join(failed)}. {after}",
            metadata={
                **standing_metadata(ontology, storage, branch.name),
                "failed_checks": dg.MetadataValue.md("\n".join(f"- {each}" for each in failed)),
            },
            allow_retries=False,
        )
    return update.source_commit_id


def conflict_failure(
    ontology: OntologyResource, storage: str, name: str, error: MergeConflictError
) -> dg.Failure:
    conflicts = [
        (
            each["conflict"],
            each["type_name"],
            "/".join(each["identity"]),
            ", ".join(each["fields"]),
            each["message"],
        )
        for each in error.conflicts[:_SHOWN]
    ]
    return dg.Failure(
        description=f"{error}. {_next(ontology, storage, name)}",
        metadata={
            "error": type(error).__name__,
            "conflict_count": len(error.conflicts),
            "conflicts": table(["kind", "type", "identity", "fields", "what"], conflicts),
            **standing_metadata(ontology, storage, name),
        },
        allow_retries=False,
    )


def standing_metadata(ontology: OntologyResource, storage: str, name: str) -> dict[str, Any]:
    """Of a branch that stands: how to look at it, and the jobs that end it."""
    return {
        "branch": name,
        "diff_command": diff_command(name, ontology.storage_uri),
        "publish_job": dg.MetadataValue.job(publish_job_name(storage), ontology.location),
        "discard_job": dg.MetadataValue.job(discard_job_name(storage), ontology.location),
    }


def _next(ontology: OntologyResource, storage: str, name: str) -> str:
    return (
        f"{ontology.home} is as it was, and branch {name} stands: "
        f"`{diff_command(name, ontology.storage_uri)}` shows it, the job "
        f"{publish_job_name(storage)} publishes it, {discard_job_name(storage)} throws it away"
    )


def _delete(
    context: dg.OpExecutionContext | dg.AssetExecutionContext,
    home: Session,
    name: str,
    upto: int | None,
) -> None:
    try:
        home.delete_branch(name, expect=upto)
    except UnknownBranchError:
        return  # somebody else was faster
    except HeadMismatchError:
        context.log.warning("%s is published, and stays: it was written to since", name)
    except ConfigurationError as error:  # it has children, or is protected
        context.log.warning("%s is published, and stays: %s", name, error)


# -- tell -----------------------------------------------------------------------------------------


def _tell(
    context: dg.OpExecutionContext | dg.AssetExecutionContext,
    ontology: OntologyResource,
    repository: Repository,
    published: PublishedRun,
    untold: Sequence[UnpublishedAsset],
) -> None:
    """Now that all can see them, assets are materialised, in the order in which they were made."""
    commit = published.commit
    versions = _versions(repository, commit, untold)
    inputs = {each.key: str(versions[each.key, None]) for each in untold if each.partition is None}
    for each in untold:
        written = commit is not None and each.type_name in commit.types
        of_commit: dict[str, Any] = {}
        if each.type_name is not None:
            made = commit.id if commit is not None and written else None
            of_commit = commit_metadata(ontology, made, each.type_name)
        kept = {k: v for k, v in each.metadata.items() if k not in _OF_COMMIT}
        tags = with_inputs(each.tags, inputs) | version_tags(versions[each.key, each.partition])
        context.log_event(
            dg.AssetMaterialization(
                asset_key=each.key,
                partition=each.partition,
                description=f"Published from branch {published.name}.",
                metadata={**kept, **of_commit, PUBLISHED: each.incarnation},
                tags=tags,
            )
        )


def _versions(
    repository: Repository, commit: CommitRecord | None, untold: Sequence[UnpublishedAsset]
) -> dict[tuple[dg.AssetKey, str | None], str]:
    """What each is at: the commit that last changed it, as of the publication."""
    refs = {name: (kind, name) for kind, name in repository.type_refs()}
    versions: dict[tuple[dg.AssetKey, str | None], str] = {}
    cut: dict[dg.AssetKey, list[UnpublishedAsset]] = {}
    for each in untold:
        version = each.version or "0"
        if each.type_name in refs:
            if each.cut is not None and each.partition is not None:
                cut.setdefault(each.key, []).append(each)
                continue
            [spec] = repository.stored_types([refs[each.type_name]])
            changed = commit is not None and each.type_name in commit.types
            version = str(
                commit.id if commit is not None and changed else repository.type_head(spec)
            )
        versions[each.key, each.partition] = version
    for key, of_key in cut.items():
        first = of_key[0]
        assert first.cut is not None
        assert first.type_name is not None
        [spec] = repository.stored_types([refs[first.type_name]])
        executor = repository.executor(commit.id if commit is not None else None)
        keys = [each.partition for each in of_key if each.partition is not None]
        states = partitions.read_states(executor, spec, first.cut, keys)
        versions |= {(key, partition): str(state.commit_id) for partition, state in states.items()}
    return versions
