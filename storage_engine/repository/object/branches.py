"""The branches of an opened storage: made, listed, deleted, and what differs on one.

Everything that works on a chain is given its head, lock, indices and identity as values; this is
where those of a branch come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from storage_engine.commitlog import branches, layout
from storage_engine.commitlog.branches import Branch
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.layout import MAIN
from storage_engine.commitlog.records import BranchPoint, Head
from storage_engine.errors import ConfigurationError, UnknownBranchError
from storage_engine.index.record import IndexObjects
from storage_engine.objectstore.protocol import ObjectStore

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository
    from storage_engine.repository.object.merge import MergeReport
    from storage_engine.repository.object.merge.run import Policies

_REFERENCE = re.compile(r"([a-z0-9][a-z0-9._/-]*)@([0-9]{1,18})")


def lock_key(fork: BranchPoint | None) -> str:
    return layout.branch_lock(fork.branch, fork.incarnation) if fork is not None else layout.LOCK


def type_indices(store: ObjectStore, engine_version: str, head: Head | None) -> IndexObjects:
    """The indices of main, or those of a branch, which go on from its parent's."""
    fork = head.fork if head is not None else None
    if head is None or fork is None:
        return IndexObjects(store, engine_version=engine_version)
    parent: Head | None = None
    if fork.parent != MAIN:
        version = branches.read_branch(store, fork.parent, log_id=head.log_id)
        parent = version.head if version is not None else None
    inherits = None
    if (parent.incarnation if parent is not None else "") == fork.parent_incarnation:
        inherits = type_indices(store, engine_version, parent), fork.base_commit
    return IndexObjects(
        store,
        engine_version=engine_version,
        under=layout.branch_indices(fork.branch, fork.incarnation),
        inherits=inherits,
    )


def branch_reference(text: str) -> tuple[str, int] | None:
    """What `run/42@17` means: a branch and a commit of its chain. None when it has another form."""
    match = _REFERENCE.fullmatch(text)
    return (match[1], int(match[2])) if match is not None else None


def own_commit(chain: Chain, text: str) -> int | None:
    """The commit of `branch@id`, where that is the branch that is read."""
    reference = branch_reference(text)
    return reference[1] if reference is not None and reference[0] == chain.branch else None


class Branches:
    """Of one opened storage; its own branch is the parent of those that it makes."""

    def __init__(self, repository: ObjectRepository) -> None:
        self._repository = repository
        self._store = repository.store
        self._chain = repository.chain

    def list(self) -> list[Branch]:
        """Main first, then the others by name."""
        main = self._main()
        heads = branches.list_heads(self._store, log_id=main.log_id)
        return [Branch.of(main), *(Branch.of(version.head) for version in heads)]

    def create(
        self,
        name: str,
        *,
        at: int | None = None,
        owner: str | None = None,
        expires_in: timedelta | None = None,
    ) -> Branch:
        """Fork a branch from this one, at its head or at one of its commits."""
        branches.check_name(name)
        if expires_in is not None and expires_in <= timedelta():
            raise ConfigurationError(f"expires_in: {expires_in} is no time to live")
        return branches.create_branch(
            self._chain,
            name,
            at=at,
            owner=owner or "",
            expires_at=self._store.now() + expires_in if expires_in is not None else None,
            runtime_id=self._repository.config.runtime_id,
            prepare=self._repository.allow_branches,
        )

    def delete(self, name: str) -> Branch:
        if name == MAIN:
            raise ConfigurationError(f"{MAIN!r} cannot be deleted")
        return branches.delete_branch(self._store, name, log_id=self._log_id())

    def protect(self, name: str, protected: bool = True) -> Branch:
        """Let a branch, or main, take merges only; or again whatever comes."""
        head = self.head(name)
        if protected:
            self._repository.allow_branches(head)
        own = name == self._repository.branch
        chain = self._chain if own else branches.chain_of(self._store, head)
        return branches.protect_branch(chain, protected)

    def head(self, name: str) -> Head:
        """The head of a branch now; UnknownBranchError names the nearest."""
        if name == MAIN:
            return self._main()
        return branches.require_branch(self._store, name, log_id=self._log_id()).head

    def merge(
        self,
        source: str,
        policies: Policies,
        *,
        dry_run: bool = False,
        metadata: Mapping[str, str] | None = None,
        holder: Mapping[str, Any] | None = None,
    ) -> MergeReport:
        """Bring the changes of a branch of this one into it."""
        from storage_engine.repository.object.merge import merge

        with self.opened(source) as other:
            return merge(
                self._repository,
                other,
                policies,
                dry_run=dry_run,
                metadata=metadata,
                holder=holder,
            )

    def update(
        self,
        policies: Policies,
        *,
        dry_run: bool = False,
        metadata: Mapping[str, str] | None = None,
        holder: Mapping[str, Any] | None = None,
    ) -> MergeReport:
        """Bring the changes of the parent into this branch."""
        from storage_engine.repository.object.merge import update

        fork = self._repository.fork
        if fork is None:
            raise ConfigurationError(f"{MAIN!r} has no parent to be updated from")
        with self.opened(fork.parent) as parent:
            if parent.chain.incarnation != fork.parent_incarnation:
                raise UnknownBranchError(fork.parent, gone=True)
            return update(
                self._repository,
                parent,
                policies,
                dry_run=dry_run,
                metadata=metadata,
                holder=holder,
            )

    @contextmanager
    def opened(self, name: str) -> Iterator[ObjectRepository]:
        """The storage on that branch: this repository itself where it is its own."""
        if name == self._repository.branch:
            yield self._repository
            return
        other = self._repository.on_branch(self.head(name))
        try:
            yield other
        finally:
            other.close()

    def kept_open(self, name: str) -> ObjectRepository:
        """The same, until this repository is closed."""
        return self._repository.beside(self.head(name))

    def _main(self) -> Head:
        if not self._chain.incarnation:
            return self._chain.read_head().head
        return Chain(self._store, self._store.parallel).read_head().head

    def _log_id(self) -> str:
        version = self._chain.known_head() or self._chain.read_head()
        return version.head.log_id
