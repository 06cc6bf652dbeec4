"""Branches: heads beside main's, each forked from a parent at one of its commits.

A branch is one small object, `meta/branches/{name}/head.json`: the fields of a head, and where it
comes from (`BranchPoint`). Its commits go on from the base, with ids of their own chain. What it
inherits it shares with the parent; nothing is copied.

Promise: what a branch inherits is never collected under it. Whoever creates one reads the parent's
head again afterwards: a compaction or purge of before is seen there, and the new head written
anew; one of after finds the branch among the heads. Deleting one begins by saying so in its head,
so that a child that is being forked meanwhile is either listed, or withdraws by itself.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Self

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain, HeadVersion
from storage_engine.commitlog.json_object import Won, create, write_conditionally
from storage_engine.commitlog.layout import MAIN
from storage_engine.commitlog.records import (
    BranchPoint,
    Checkpoint,
    CheckpointRef,
    Head,
    ManifestLink,
    parse_timestamp,
    sha256,
    timestamp,
)
from storage_engine.errors import (
    BranchExistsError,
    ConfigurationError,
    HeadMismatchError,
    IntegrityError,
    ProtectedBranchError,
    StorageBackendError,
    UnknownBranchError,
)
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectNotFound,
    ObjectStore,
    ObjectStoreError,
    OutcomeUnknown,
    PreconditionFailed,
)

_PART = r"[a-z0-9][a-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})*")
_TIME = re.compile(r"\d{4}-\d\d-\d\d.*")
_LONGEST = 200  # as one part of a key, in which / takes three
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch as `list_branches` shows it; main is the one without a parent."""

    name: str
    commit_id: int
    updated_at: str
    parent: str | None = None
    base_commit_id: int = 0
    owner: str = ""
    created_at: str | None = None
    expires_at: str | None = None
    protected: bool = False
    incarnation: str = ""

    @classmethod
    def of(cls, head: Head) -> Self:
        fork = head.fork
        if fork is None:
            return cls(MAIN, head.commit_id, head.updated_at, protected=head.protected)
        return cls(
            fork.branch,
            head.commit_id,
            head.updated_at,
            fork.parent,
            fork.base_commit,
            fork.owner,
            fork.created_at,
            fork.expires_at,
            head.protected,
            fork.incarnation,
        )

    @property
    def commits(self) -> int:
        """Those of its own."""
        return self.commit_id - self.base_commit_id

    def expired(self, now: datetime) -> bool:
        return self.expires_at is not None and parse_timestamp(self.expires_at) <= now

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "parent": self.parent,
            "base_commit_id": self.base_commit_id if self.parent is not None else None,
            "commit_id": self.commit_id,
            "updated_at": self.updated_at,
            "owner": self.owner,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "protected": self.protected,
        }


def check_name(name: object) -> str:
    """Refuse names that a storage cannot keep, or that mean something else in a reference."""
    if not isinstance(name, str) or not _fits(name):
        raise ConfigurationError(
            f"{name!r} is no name for a branch: use up to {_LONGEST} lower-case letters, digits "
            "and ._- in parts with / between them (which counts three), each beginning with a "
            "letter or digit, such as run/42"
        )
    if name == MAIN:
        raise ConfigurationError(f"{MAIN!r} is the branch that every storage has: choose another")
    if name.isdecimal() or _reads_as_time(name):
        raise ConfigurationError(
            f"{name!r} is no name for a branch: it reads as a commit id or a time; choose for "
            f"example fix/{name}"
        )
    return name


def _fits(name: str) -> bool:
    """Whether a branch of the name can be there."""
    return _NAME.fullmatch(name) is not None and len(layout.segment(name)) <= _LONGEST


def _reads_as_time(name: str) -> bool:
    try:
        datetime.fromisoformat(name)
    except ValueError:
        return _TIME.fullmatch(name) is not None  # nearly one
    return True


def unknown(name: str, names: Sequence[str]) -> UnknownBranchError:
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return UnknownBranchError(name, nearest=nearest, count=len(names))


# -- looking --------------------------------------------------------------------------------------


def read_branch(store: ObjectStore, name: str, *, log_id: str | None) -> HeadVersion | None:
    """The head of a branch of this log, or with None of whichever; None when there is none."""
    if not isinstance(name, str):
        raise ConfigurationError(f"a branch is named by a text, such as run/42, not by {name!r}")
    if not _fits(name):
        return None
    key = layout.branch_head(name)
    try:
        stored = store.get(key)
    except ObjectNotFound:
        return None
    head = _parsed(stored.data, key)
    return HeadVersion(head, stored.etag) if log_id in (None, head.log_id) else None


def list_heads(store: ObjectStore, *, log_id: str) -> list[HeadVersion]:
    """The heads of all branches of this log, by name. Those of one that was erased do not count."""
    return heads_among(store, [info.key for info in store.list(layout.BRANCHES)], log_id=log_id)


def heads_among(store: ObjectStore, keys: Iterable[str], *, log_id: str) -> list[HeadVersion]:
    """The same, of objects that were listed."""
    listed = [layout.branch_of(key) for key in keys]
    names = [branch.name for branch in listed if branch is not None and not branch.incarnation]
    versions = store.parallel.map(lambda name: read_branch(store, name, log_id=log_id), names)
    return sorted(
        (version for version in versions if version is not None),
        key=lambda version: _fork(version.head).branch,
    )


def heads_after(
    store: ObjectStore, after: str | None, limit: int, *, log_id: str
) -> tuple[list[HeadVersion], str | None]:
    """The first heads after a name, in the order of keys (by name on their page), and after which
    name the others come: however many there are, no more than these are read."""
    start = layout.branch_head(after) if after is not None else ""
    names: list[str] = []
    for info in store.list(layout.BRANCHES, start_after=start):
        branch = layout.branch_of(info.key)
        if branch is not None and not branch.incarnation:
            names.append(branch.name)
        if len(names) > limit:
            break
    keys = [layout.branch_head(name) for name in names[:limit]]
    last = names[limit - 1] if len(names) > limit else None
    return heads_among(store, keys, log_id=log_id), last


def require_branch(store: ObjectStore, name: str, *, log_id: str) -> HeadVersion:
    """UnknownBranchError (a ValueError) names the nearest."""
    version = read_branch(store, name, log_id=log_id)
    if version is None:
        heads = list_heads(store, log_id=log_id)
        raise unknown(name, [_fork(other.head).branch for other in heads])
    return version


def chain_of(store: ObjectStore, head: Head) -> Chain:
    """The chain behind a head that was read."""
    fork = head.fork
    if fork is None:
        return Chain(store, store.parallel)
    return Chain(
        store,
        store.parallel,
        head_key=layout.branch_head(fork.branch),
        branch=fork.branch,
        incarnation=fork.incarnation,
    )


def children(heads: Iterable[HeadVersion], fork: BranchPoint) -> list[str]:
    """The branches that were forked from this one."""
    forks = [_fork(version.head) for version in heads]
    return [child.branch for child in forks if child.parent_incarnation == fork.incarnation]


def _parsed(data: bytes, key: str) -> Head:
    head = Head.parse(data, key=key)
    branch = layout.branch_of(key)
    if head.fork is None or branch is None or head.fork.branch != branch.name:
        raise IntegrityError(
            f"{key} is not the head of that branch: restore it from a copy of the storage, or "
            "delete the object if the branch is of no use",
            key=key,
        )
    return head


def _fork(head: Head) -> BranchPoint:
    assert head.fork is not None, "the head of a branch"
    return head.fork


# -- creating -------------------------------------------------------------------------------------


def create_branch(
    parent: Chain,
    name: str,
    *,
    at: int | None = None,
    owner: str = "",
    expires_at: datetime | None = None,
    runtime_id: str,
    prepare: Callable[[Head], None],
) -> Branch:
    """Fork a branch from the parent's head, or from an older commit of it.

    `prepare` is told the parent's head before anything is written.

    BranchExistsError when there is one; UnknownBranchError when the parent went away meanwhile.
    """
    check_name(name)
    read = parent.read_head()
    based_on = read.head
    link = _base(parent, based_on, at)
    fork = BranchPoint(
        branch=name,
        incarnation=layout.new_write_id(),
        parent=parent.branch,
        base=link,
        created_at=timestamp(parent.store.now()),
        parent_incarnation=parent.incarnation,
        owner=owner or runtime_id,
        expires_at=timestamp(expires_at) if expires_at is not None else None,
        marks=based_on.marks if link == based_on.link else {},
    )
    _check_parent(based_on, parent)
    prepare(based_on)
    head = Head(
        commit_id=fork.base_commit,
        manifest_path=link.path if link is not None else None,
        updated_at=fork.created_at,
        runtime_id=runtime_id,
        log_id=based_on.log_id,
        write_id=layout.new_write_id(),
        commit_sha256=link.sha256 or None if link is not None else None,
        checkpoint=_inherited(parent, based_on, fork),
        marks=fork.marks,
        fork=fork,
    )
    version = HeadVersion(head, _created(parent, head))
    return Branch.of(_confirmed(parent, read, version).head)


def _base(parent: Chain, head: Head, at: int | None) -> ManifestLink | None:
    if at is None or at == head.commit_id:
        return head.link
    if at == 0:
        return None
    located = parent.locate(head, at)
    if located is None:
        there = f"1 to {head.commit_id} are there" if head.commit_id else "there are none yet"
        raise ConfigurationError(f"no commit {at} to fork from: {there}")
    return parent.stretch(located, above=at - 1)[0][0]  # with its hash


def _inherited(parent: Chain, head: Head, fork: BranchPoint) -> CheckpointRef | None:
    """The checkpoint that a branch begins with: the parent's, unless that reaches further than the
    base. Then one of its own, which counts up to there."""
    ref = head.checkpoint
    if ref is None or ref.commit_id <= fork.base_commit or fork.base is None:
        return ref if fork.base is not None else None
    return _write_checkpoint(parent, state.checkpoint_at(parent, head, fork.base), fork)


def _write_checkpoint(parent: Chain, checkpoint: Checkpoint, fork: BranchPoint) -> CheckpointRef:
    checkpoint, pages = state.with_pages(checkpoint)
    data = checkpoint.to_bytes()
    key = layout.checkpoint(
        checkpoint.commit_id, layout.on_chain(layout.new_id(), fork.incarnation)
    )
    parent.parallel.map(lambda item: create(parent.store, *item), [*pages, (key, data)])
    ref = CheckpointRef(key, sha256(data), checkpoint.commit_id)
    parent.note_checkpoint(ref, checkpoint)
    return ref


def _created(parent: Chain, head: Head) -> str:
    """Write the head of a new branch; its ETag."""
    fork = _fork(head)
    key = layout.branch_head(fork.branch)
    etag: str | None = None
    for _ in range(_ATTEMPTS):
        outcome = write_conditionally(
            parent.store, key, head.to_bytes(), write_id=head.write_id, etag=etag
        )
        if isinstance(outcome, Won):
            return outcome.etag
        if outcome.current is None:
            if outcome.unanswered:
                break  # it may have been ours that was deleted
            etag = None
            continue
        existing = _parsed(outcome.current.data, key)
        if existing.log_id == head.log_id:
            other = _fork(existing)
            raise BranchExistsError(
                fork.branch, parent=other.parent, base_commit_id=other.base_commit
            )
        etag = outcome.current.etag  # of an erased log
    raise _busy(fork.branch, "create branch")


def _confirmed(parent: Chain, read: HeadVersion, version: HeadVersion) -> HeadVersion:
    """The new head, once the parent is seen to be as it was when it was read: from then on whoever
    replaces files of the parent, or collects garbage, finds the branch.

    A checkpoint of its own was nobody's until the head named it. A collection that took it for
    garbage has rewritten the parent's head before it deleted anything.
    """
    ours = chain_of(parent.store, version.head)
    for _ in range(_ATTEMPTS):
        try:
            now = parent.read_head()
            _check_parent(now.head, parent)
            if now.head.log_id != read.head.log_id:
                raise StorageBackendError(
                    "the storage was begun anew meanwhile; no branch was made",
                    operation="create branch",
                    retryable=True,
                )
        except (UnknownBranchError, ConfigurationError, StorageBackendError):
            _withdraw(parent.store, version)
            raise
        fork, ref = _fork(version.head), version.head.checkpoint
        own = ref is not None and layout.checkpoint_incarnation(ref.path) == fork.incarnation
        if now.etag == read.etag or (not own and now.head.checkpoint == read.head.checkpoint):
            return version
        if fork.base is None:
            return version  # it inherits nothing
        # Compacted or purged, or a checkpoint was due: what is named may go. Others may have
        # committed on the branch already, so that only what it inherits is exchanged.
        read = now
        version = _exchanged(ours, version, _inherited(parent, now.head, fork))
    raise _busy(_fork(version.head).branch, "create branch")


def _exchanged(ours: Chain, version: HeadVersion, inherited: CheckpointRef | None) -> HeadVersion:
    """The head with another checkpoint for what it inherits."""
    given = version.head.checkpoint
    for _ in range(_ATTEMPTS):
        fork = _fork(version.head)
        ref = inherited
        if version.head.checkpoint != given and inherited is not None:
            own = state.current_checkpoint(ours, version.head)
            base = ours.checkpoint(inherited)
            entries = {
                kind: (
                    *base.entries.get(kind, ()),
                    *(e for e in run if e.min_commit_id > fork.base_commit),
                )
                for kind, run in own.entries.items()
            }
            ref = _write_checkpoint(ours, replace(own, entries=entries), fork)
        head = replace(version.head, checkpoint=ref, write_id=layout.new_write_id())
        outcome = write_conditionally(
            ours.store, ours.head_key, head.to_bytes(), write_id=head.write_id, etag=version.etag
        )
        if isinstance(outcome, Won):
            return HeadVersion(head, outcome.etag)
        version = ours.read_head()
    raise _busy(_fork(version.head).branch, "create branch")


def _withdraw(store: ObjectStore, version: HeadVersion) -> None:
    """Take a new branch away whose parent is no more. What cannot be done now, who deletes or
    collects expired branches does."""
    try:
        store.delete_if_match(layout.branch_head(_fork(version.head).branch), version.etag)
    except (ObjectStoreError, StorageBackendError):
        return


def _check_parent(head: Head, parent: Chain) -> None:
    if head.fork is not None and head.fork.deleting:
        raise UnknownBranchError(parent.branch, gone=True)


# -- deleting, protecting -------------------------------------------------------------------------


def delete_branch(
    store: ObjectStore, name: str, *, log_id: str, expect: int | None = None
) -> Branch:
    """Take a branch away, with what it has of its own. Refuses one with children, a protected one,
    and one that is not at the commit that is expected. Its commits and files are garbage from now
    on, but for what tags and merges keep."""
    version = require_branch(store, name, log_id=log_id)
    doomed = _fork(version.head)
    gone = False
    for _ in range(_ATTEMPTS):
        _check_protection(version.head)
        if expect not in (None, version.head.commit_id):
            raise HeadMismatchError(1)
        marked = _marked(store, version)
        if marked is not None:
            try:
                _check_children(store, version.head)
            except ConfigurationError:
                _unmark(store, marked)
                raise
            try:
                store.delete_if_match(layout.branch_head(name), marked.etag)
                gone = True
            except (PreconditionFailed, ConditionalConflict, OutcomeUnknown):
                pass
        if not gone:
            current = read_branch(store, name, log_id=log_id)
            gone = current is None or current.head.incarnation != doomed.incarnation
            if current is not None and not gone:
                version = current
                continue
        if gone:
            _clear(store, doomed)
            return Branch.of(version.head)
    raise _busy(name, "delete branch")


def preview_delete(store: ObjectStore, name: str, *, log_id: str) -> Branch:
    """The branch that would be taken away; refuses what `delete_branch` would refuse now."""
    head = require_branch(store, name, log_id=log_id).head
    _check_protection(head)
    _check_children(store, head)
    return Branch.of(head)


def _check_protection(head: Head) -> None:
    if head.protected:
        raise ProtectedBranchError(_fork(head).branch, "delete_branch")


def _check_children(store: ObjectStore, head: Head) -> None:
    fork = _fork(head)
    forked = children(list_heads(store, log_id=head.log_id), fork)
    if forked:
        raise ConfigurationError(
            f"branch {fork.branch!r} has children: delete or merge them first ({', '.join(forked)})"
        )


def protect_branch(chain: Chain, protected: bool) -> Branch:
    """Let a branch, or main, take merges only, or whatever comes."""
    for _ in range(_ATTEMPTS):
        version = chain.read_head()
        if version.head.protected == protected:
            return Branch.of(version.head)
        head = replace(version.head, protected=protected, write_id=layout.new_write_id())
        outcome = write_conditionally(
            chain.store, chain.head_key, head.to_bytes(), write_id=head.write_id, etag=version.etag
        )
        if isinstance(outcome, Won):
            chain.note_head(HeadVersion(head, outcome.etag))
            return Branch.of(head)
    raise _busy(chain.branch, "protect branch")


def _marked(store: ObjectStore, version: HeadVersion) -> HeadVersion | None:
    """The head that says that it is being deleted; None when it moved meanwhile."""
    if _fork(version.head).deleting:
        return version
    return _rewritten(store, version, deleting=True)


def _unmark(store: ObjectStore, version: HeadVersion) -> None:
    _rewritten(store, version, deleting=False)  # if it moved, the next one to delete it looks again


def _rewritten(store: ObjectStore, version: HeadVersion, *, deleting: bool) -> HeadVersion | None:
    fork = replace(_fork(version.head), deleting=deleting)
    head = replace(version.head, fork=fork, write_id=layout.new_write_id())
    outcome = write_conditionally(
        store,
        layout.branch_head(fork.branch),
        head.to_bytes(),
        write_id=head.write_id,
        etag=version.etag,
    )
    return HeadVersion(head, outcome.etag) if isinstance(outcome, Won) else None


def _clear(store: ObjectStore, fork: BranchPoint) -> None:
    """Indices and lock of a branch that is gone; what stays is for garbage collection."""
    try:
        folder = layout.branch_folder(fork.branch, fork.incarnation)
        store.delete_many([info.key for info in store.list(folder)])
    except (ObjectStoreError, StorageBackendError):
        return


def _busy(name: str, operation: str) -> StorageBackendError:
    return StorageBackendError(
        f"branch {name!r} is being changed by others, try again",
        operation=operation,
        key=layout.branch_head(name) if name != MAIN else layout.HEAD,
        retryable=True,
    )
