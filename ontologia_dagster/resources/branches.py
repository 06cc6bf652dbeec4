"""On which branch a run or a location works.

Where a storage is published `audited`, a run works on `run/{root run id}`: a step that is tried
again and a re-execution from failure go on with the same one. It is made by the first step that
writes, whichever that is; who only reads before that, or after the run was published, sees what
everybody sees. A run with the tag `ontologia/branch` works on the branch that the tag names.

A location has a branch of its own where `ONTOLOGIA_BRANCH` names one, and by itself in a branch
deployment of Dagster+: `pr/{number}`. What it writes others see when that branch is merged.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Self

import dagster as dg

from ontologia_dagster.dagster_compat import hidden_tag, steps_of
from ontologia_dagster.declaration import STORAGE_METADATA
from ontologia_dagster.ingestion.provenance import RUN_ID
from storage_engine.config import duration
from storage_engine.errors import (
    BranchExistsError,
    ConfigurationError,
    UnknownBranchError,
)
from storage_engine.repository import MAIN
from storage_engine.repository.open import target_of

if TYPE_CHECKING:
    from storage_engine import Branch
    from storage_engine.repository.protocol import Repository

Publish = Literal["direct", "audited"]
AUDITED: Publish = "audited"
DIRECT: Publish = "direct"

INCARNATION = "ontologia/branch_incarnation"  # in the metadata of the commit that published it
BRANCH_TAG = "ontologia/branch"
BRANCH_VARIABLE = "ONTOLOGIA_BRANCH"
# What Dagster+ sets: https://docs.dagster.io, "Built-in environment variables".
_IS_DEPLOYED = "DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT"
_PULL_REQUEST = "DAGSTER_CLOUD_PULL_REQUEST_ID"
_DEPLOYMENT = "DAGSTER_CLOUD_DEPLOYMENT_NAME"
_PAGE = 100


def location_branch(environ: Mapping[str, str]) -> str | None:
    """What a location works on by its environment; None: on main, as always."""
    stated = environ.get(BRANCH_VARIABLE)
    if stated:
        return checked_branch(stated, BRANCH_VARIABLE)
    if environ.get(_IS_DEPLOYED) != "1":
        return None
    number = environ.get(_PULL_REQUEST)
    if number:
        return f"pr/{_part(number)}"
    name = environ.get(_DEPLOYMENT)
    if name:
        return f"deployment/{_part(name)}"
    raise ConfigurationError(
        f"{_IS_DEPLOYED} is 1, and neither {_PULL_REQUEST} nor {_DEPLOYMENT} says which branch "
        f"deployment this is: name the branch of the storage in {BRANCH_VARIABLE}"
    )


def checked_branch(name: str | None, stated_in: str) -> str | None:
    """As a location's own, of which main is none; ConfigurationError where none can be called
    that."""
    from storage_engine.runtime.branches import checked_branch_name

    if name is None or name == MAIN:
        return None
    try:
        return checked_branch_name(name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{stated_in}: {error}") from None


def _part(text: str) -> str:
    """As part of a branch's name."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("._-") or "unnamed"


def checked_retention(text: str) -> str:
    """ValueError where no branch could stand for that long."""
    if not duration(text):
        raise ValueError(f"{text!r} is no time to look at a branch in: write 12h, 7d or 2w")
    return text


def refuse_without_branches(uri: str, publish: Publish, branch: str | None) -> None:
    """Of a storage that by its URI can have no branches, where one is needed."""
    if target_of(uri).sqlite_path is None or (publish == DIRECT and branch is None):
        return
    why = f"publish is {AUDITED!r}" if publish == AUDITED else f"{branch!r} is to be worked on"
    raise ConfigurationError(
        f"{why}, and {uri} has no branches: it is SQLite, and they need engine v2 on an object "
        f"store or in a directory; bring it to one with `onto copy {shlex.quote(uri)} TARGET`"
    )


def run_branch(run: dg.DagsterRun) -> str:
    """The branch of a run that has one."""
    stated = run.tags.get(BRANCH_TAG)
    if stated is not None:
        if stated == MAIN:
            raise ConfigurationError(
                f"the tag {BRANCH_TAG} names {MAIN!r}, which is where runs are published to: name "
                "the branch of another run, or leave the tag out"
            )
        return stated
    return f"run/{run.root_run_id or run.run_id}"


def fork_once(
    repository: Repository, name: str, *, owner: str, expires_in: timedelta | None
) -> Branch:
    """The branch of that name, which is made unless it is there: of several who try, all get the
    same one."""
    from storage_engine.runtime.branches import branches_of, create_branch

    branches = branches_of(repository)
    branch = branches.find(name)
    if branch is None:
        try:
            branch = create_branch(repository, name, owner=owner, expires_in=expires_in)
        except BranchExistsError:  # another step was faster
            branch = branches.find(name)
    if branch is None:
        raise UnknownBranchError(name, gone=True)
    return _of_ours(repository, branch)


def find(repository: Repository, name: str) -> Branch | None:
    from storage_engine.runtime.branches import branches_of

    return branches_of(repository).find(name)


def existing(repository: Repository, name: str) -> Branch:
    """The branch of that name; UnknownBranchError has the nearest."""
    from storage_engine.runtime.branches import branches_of

    if name == repository.branch:
        raise ConfigurationError(
            f"{name!r} is what this location publishes to: name a branch of it"
        )
    branches = branches_of(repository)
    branches.head(name)
    branch = branches.find(name)
    if branch is None:
        raise UnknownBranchError(name, gone=True)
    return _of_ours(repository, branch)


def _of_ours(repository: Repository, branch: Branch) -> Branch:
    if branch.parent != repository.branch:
        raise ConfigurationError(
            f"branch {branch.name!r} is a branch of {branch.parent!r}, and this location works on "
            f"{repository.branch!r}: it is published from the location that made it"
        )
    return branch


# -- which branch of its name it is ---------------------------------------------------------------


@dataclass(frozen=True)
class BegunBranch:
    """The branch that a run has begun to write to, remembered with the run: where that is gone, no
    step may go on with a new one of the same name, or half of the run would be published."""

    run_id: str
    incarnation: str
    base: int

    @classmethod
    def of(cls, run: dg.DagsterRun, storage_uri: str) -> Self | None:
        """What a run, or one whose tags it has taken over, has begun."""
        text = run.tags.get(_begun_tag(storage_uri))
        if text is None:
            return None
        run_id, incarnation, base = text.split("/")
        return cls(run_id, incarnation, int(base))

    @classmethod
    def before(cls, instance: dg.DagsterInstance, run: dg.DagsterRun, uri: str) -> Self | None:
        """What this run has begun, or one that it goes on from: not those of which it does all
        steps again, which it begins anew."""
        again: set[str] | None = None
        at: dg.DagsterRun | None = instance.get_run_by_id(run.run_id) or run
        while at is not None:
            begun = cls.of(at, uri)
            if begun is not None and begun.run_id == at.run_id:
                again = steps_of(instance, run) if again is None else again
                if at.run_id == run.run_id or not steps_of(instance, at) <= again:
                    return begun
            at = instance.get_run_by_id(at.parent_run_id) if at.parent_run_id else None
        return None

    @classmethod
    def remember(
        cls, instance: dg.DagsterInstance, run: dg.DagsterRun, uri: str, branch: Branch
    ) -> None:
        text = f"{run.run_id}/{branch.incarnation}/{branch.base_commit_id}"
        instance.add_run_tags(run.run_id, {_begun_tag(uri): text})

    def is_lost(self, repository: Repository, now: Branch | None) -> bool:
        """Whether it is gone, and was not published before."""
        if now is not None and now.incarnation == self.incarnation:
            return False
        return published_as(repository, self.incarnation, self.base) is None

    def is_published_by(self, repository: Repository, run_id: str, now: Branch | None) -> bool:
        """Whether the run that began it has published it, and is not to write any more."""
        if self.run_id != run_id or now is not None:
            return False
        commit_id = published_as(repository, self.incarnation, self.base)
        if commit_id is None:
            return False
        [commit] = repository.commits_between(commit_id - 1, commit_id)
        return commit.metadata.get(RUN_ID) == run_id


def _begun_tag(storage_uri: str) -> str:
    digest = hashlib.sha256(storage_uri.encode()).hexdigest()[:12]
    return hidden_tag(f"ontologia_branch_{digest}")


def published_as(repository: Repository, incarnation: str, base: int) -> int | None:
    """The last commit that merged a branch, which was forked at the base."""
    from storage_engine.runtime.branches import branches_of

    point = branches_of(repository).merge_points().get(incarnation)
    if point is not None:
        return point.commit_id
    upto = repository.head_commit_id()
    while upto > base:
        since = max(base, upto - _PAGE)
        for commit in reversed(repository.commits_between(since, upto)):
            if commit.metadata.get(INCARNATION) == incarnation:
                return commit.id
        upto = since
    return None


def lost_failure(name: str) -> dg.Failure:
    return dg.Failure(
        description=f"branch {name!r} is gone with what was written to it, and was never "
        "published: it was discarded, or has expired. Run everything again to write it anew",
        metadata={"branch": name},
        allow_retries=False,
    )


def published_failure(name: str) -> dg.Failure:
    return dg.Failure(
        description=f"this run has published branch {name!r} already, and what it writes now would "
        f"be published by nobody: say in the asset's metadata of which storage it is "
        f"({STORAGE_METADATA}), so that the publication waits for it, or make it in a run of its "
        "own",
        metadata={"branch": name},
        allow_retries=False,
    )


def diff_command(name: str, storage_uri: str) -> str:
    """How to look at what a branch would bring."""
    return f"onto branch diff {shlex.quote(name)} --storage-uri {shlex.quote(storage_uri)}"
