"""The branches of an opened storage: made, listed, deleted, and what differs on one.

Everything that works on a chain is given its head, lock, indices and identity as values; this is
where those of a branch come from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from storage_engine.commitlog import branches, layout
from storage_engine.commitlog.branches import Branch
from storage_engine.commitlog.chain import Chain, HeadVersion
from storage_engine.commitlog.layout import MAIN
from storage_engine.commitlog.records import BranchPoint, Head, MergePoint, TypeRef
from storage_engine.errors import ConfigurationError, UnknownBranchError
from storage_engine.index.record import IndexObjects
from storage_engine.objectstore.protocol import ObjectStore

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository
    from storage_engine.repository.object.merge import MergeReport, MergeTerms

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


@dataclass(frozen=True, slots=True)
class BranchExtent:
    """What a branch's commits have written since its base: what a merge has to look at."""

    commits: int
    rows: Mapping[TypeRef, int]
    bytes: int


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

    def page(self, after: str | None, limit: int) -> tuple[Sequence[Branch], str | None]:
        """The first branches after one, in the order of their objects, and after which the others
        come. Main is none of them."""
        heads, last = branches.heads_after(self._store, after, limit, log_id=self._log_id())
        return [Branch.of(version.head) for version in heads], last

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
        expires_at = self._expiry(expires_in) if expires_in is not None else None
        return branches.create_branch(
            self._chain,
            name,
            at=at,
            owner=owner or "",
            expires_at=expires_at,
            runtime_id=self._repository.config.runtime_id,
            prepare=self._repository.allow_branches,
        )

    def _expiry(self, expires_in: timedelta) -> datetime:
        if not isinstance(expires_in, timedelta):
            raise ConfigurationError(f"expires_in takes a timedelta, not {expires_in!r}")
        if expires_in <= timedelta():
            raise ConfigurationError(f"expires_in: {expires_in} is no time to live")
        try:
            return self._store.now() + expires_in
        except OverflowError:
            raise ConfigurationError(
                f"expires_in: {expires_in} is beyond all calendars; leave it out for a branch that "
                "stays"
            ) from None

    def delete(self, name: str, *, expect: int | None = None, dry_run: bool = False) -> Branch:
        if name == MAIN:
            raise ConfigurationError(f"{MAIN!r} cannot be deleted")
        if dry_run:
            return branches.preview_delete(self._store, name, log_id=self._log_id())
        return branches.delete_branch(self._store, name, log_id=self._log_id(), expect=expect)

    def protect(self, name: str, protected: bool = True) -> Branch:
        """Let a branch, or main, take merges only; or again whatever comes."""
        head = self.head(name)
        if protected:
            self._repository.allow_branches(head)
        own = name == self._repository.branch
        chain = self._chain if own else branches.chain_of(self._store, head)
        return branches.protect_branch(chain, protected)

    def find(self, name: str) -> Branch | None:
        """The branch of a name, other than main; None when there is none."""
        version = branches.read_branch(self._store, name, log_id=self._log_id())
        return Branch.of(version.head) if version is not None else None

    def head(self, name: str) -> Head:
        """The head of a branch now; UnknownBranchError names the nearest."""
        if name == MAIN:
            return self._main()
        return branches.require_branch(self._store, name, log_id=self._log_id()).head

    def merge(self, source: str, terms: MergeTerms, *, dry_run: bool = False) -> MergeReport:
        """Bring the changes of a branch of this one into it."""
        from storage_engine.repository.object.merge import merge

        with self._beside(source) as (other, heads):
            return merge(self._repository, other, terms, heads, dry_run=dry_run)

    def merged_by(self, name: str) -> int | None:
        """The commit of this branch that last merged another one, as that is now; None: none."""
        point = self.merge_points().get(self.head(name).incarnation)
        return point.commit_id if point is not None else None

    def merge_points(self) -> Mapping[str, MergePoint]:
        """How far other branches have been merged into this one, by incarnation. Those of branches
        that are gone are known for a while."""
        manifest = self._chain.head_manifest(self._chain.read_head().head)
        return manifest.merged if manifest is not None else {}

    def update(self, terms: MergeTerms, *, dry_run: bool = False) -> MergeReport:
        """Bring the changes of the parent into this branch."""
        from storage_engine.repository.object.merge import update

        fork = self._repository.fork
        if fork is None:
            raise ConfigurationError(f"{MAIN!r} has no parent to be updated from")
        with self._beside(fork.parent) as (parent, heads):
            if parent.chain.incarnation != fork.parent_incarnation:
                raise UnknownBranchError(fork.parent, gone=True)
            return update(self._repository, parent, terms, heads, dry_run=dry_run)

    @contextmanager
    def _beside(
        self, name: str
    ) -> Iterator[tuple[ObjectRepository, tuple[HeadVersion, HeadVersion]]]:
        """The storage on another branch, with our head now and its, which are read together."""
        read: list[Callable[[], HeadVersion | None]] = [
            self._chain.read_head,
            partial(self._at, name),
        ]
        ours, theirs = self._chain.parallel.gather(read)
        assert ours is not None
        if theirs is None or theirs.head.log_id != ours.head.log_id:
            theirs = branches.require_branch(self._store, name, log_id=ours.head.log_id)
        other = self._repository.on_branch(theirs.head)
        other.chain.note_head(theirs)
        try:
            yield other, (ours, theirs)
        finally:
            other.close()

    def _at(self, name: str) -> HeadVersion | None:
        if name == MAIN:
            return Chain(self._store, self._store.parallel).read_head()
        return branches.read_branch(self._store, name, log_id=None)

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

    def beside(self, head: Head) -> ObjectRepository:
        """The storage on the branch of a head that was read; whoever asks closes it."""
        return self._repository.on_branch(head)

    def extent(self, name: str, *, most_commits: int) -> BranchExtent | None:
        """How much a branch has written; None if in more commits than that."""
        head = self.head(name)
        fork = head.fork
        if fork is None or head.commit_id - fork.base_commit > most_commits:
            return None
        chain = branches.chain_of(self._store, head)
        rows: dict[TypeRef, int] = {}
        size = 0
        manifests = [m for _, m in chain.stretch(head.link, above=fork.base_commit)]
        for file in (file for manifest in manifests for file in manifest.files):
            rows[file.ref] = rows.get(file.ref, 0) + file.row_count
            size += file.bytes
        return BranchExtent(len(manifests), rows, size)

    def changed_types(self, head: Head, since: int) -> set[TypeRef]:
        """The types that a branch has written to, given a schema or ended after a commit."""
        tops = branches.chain_of(self._store, head).type_heads_at(head)
        return {
            ref
            for ref, top in tops.items()
            if max(top.changed_by, top.dropped_commit_id or 0) > since
        }

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
