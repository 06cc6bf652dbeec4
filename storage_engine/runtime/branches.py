"""Branches as sessions have them: made, listed, deleted, protected."""

from __future__ import annotations

from datetime import timedelta

from storage_engine.commitlog.branches import Branch
from storage_engine.query.reference import Reference, checked_reference
from storage_engine.repository.object.branches import Branches
from storage_engine.repository.protocol import Repository, no_branches


def branches_of(repository: Repository) -> Branches:
    """UnsupportedEngineError where a storage has none."""
    objects = repository.objects
    if objects is None or objects.engine_version == "v1":
        raise no_branches(repository)
    return objects.branches


def create_branch(
    repository: Repository,
    name: str,
    at: Reference | None = None,
    *,
    owner: str | None = None,
    expires_in: timedelta | None = None,
) -> Branch:
    branches = branches_of(repository)
    commit_id: int | None = None
    if at is not None:
        commit_id = repository.require_commit(checked_reference(at, "at"))
    return branches.create(name, at=commit_id, owner=owner, expires_in=expires_in)


__all__ = ["Branch", "branches_of", "create_branch"]
