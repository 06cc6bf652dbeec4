"""A proven snapshot becomes part of the log: a new checkpoint, published by a CAS of head.

Under the lock it is looked at once more whether the replaced entries still stand, next to each
other, in the checkpoint that head names plus the manifests since. Commits that landed meanwhile
stay as they are. The index follows, best effort: it is a projection.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from storage_engine.commitlog import state
from storage_engine.commitlog.lock import Lease, WriteLock
from storage_engine.commitlog.records import Checkpoint, Entry, Head, TypeRef
from storage_engine.commitlog.rewrite import rewrite_head
from storage_engine.errors import OntologiaError, StorageBackendError
from storage_engine.index.maintain import with_snapshots
from storage_engine.maintenance.compaction.plan import RunPlan
from storage_engine.objectstore.protocol import ObjectStoreError

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository


class RunOutcome(Enum):
    PUBLISHED = "published"
    SUPERSEDED = "superseded"  # another compactor has replaced the same entries


def publish(
    repository: ObjectRepository,
    lock: WriteLock,
    run: RunPlan,
    snapshot: Entry,
    *,
    log_id: str,
    still_ours: Callable[[], None],
) -> RunOutcome:
    """`still_ours` raises when the snapshot's files may be collected."""
    chain = repository.chain
    outcome = RunOutcome.SUPERSEDED

    def change(head: Head) -> Checkpoint | None:
        nonlocal outcome
        outcome = RunOutcome.SUPERSEDED
        if head.log_id != log_id:
            return None  # the storage was erased and begun anew
        truth = state.current_checkpoint(chain, head)
        entries = truth.entries.get(run.ref, ())
        replaced = placed(entries, run, snapshot)
        if replaced is None:
            return None
        outcome = RunOutcome.PUBLISHED
        if replaced == entries:
            return None  # by an attempt of ours whose answer was lost
        still_ours()
        check_present(repository, snapshot)
        return replace(truth, entries={**truth.entries, run.ref: replaced})

    rewrite_head(
        chain,
        lock,
        runtime_id=repository.config.runtime_id,
        max_attempts=repository.config.commit_max_attempts,
        change=change,
        after=lambda head, lease: update_index(repository, head, run.ref, lease),
    )
    return outcome


def placed(entries: tuple[Entry, ...], run: RunPlan, snapshot: Entry) -> tuple[Entry, ...] | None:
    """The entries with the run's replaced by the snapshot, or as they are when it is one of them;
    None when those of the run do not all stand, as planned and next to each other."""
    standing = [paths(entry) for entry in entries]
    if paths(snapshot) in standing:
        return entries
    planned = [paths(entry) for entry in run.entries]
    if planned[0] not in standing:
        return None
    start = standing.index(planned[0])
    stop = start + len(planned)
    if standing[start:stop] != planned:
        return None
    return (*entries[:start], snapshot, *entries[stop:])


def paths(entry: Entry) -> tuple[str, ...]:
    """What an entry is known by: the content of a path never changes."""
    return tuple(file.path for file in entry.files)


def check_present(repository: ObjectRepository, snapshot: Entry) -> None:
    """All files of the snapshot are there, whole."""
    prefix = os.path.commonpath(paths(snapshot))
    sizes = {info.key: info.size for info in repository.store.list(prefix)}
    for file in snapshot.files:
        if sizes.get(file.path) != file.bytes:
            raise StorageBackendError(
                f"{file.path} is gone or changed before it was published; nothing was published, "
                "compact again",
                operation="compact",
                key=file.path,
                retryable=True,
            )


def update_index(repository: ObjectRepository, head: Head, ref: TypeRef, lease: Lease) -> None:
    """Bring the index to what the log says. What fails here is made up for by the next run."""
    try:
        lease.guard()
        top = state.type_heads(repository.chain, head).get(ref)
        truth = state.entries(repository.chain, head, ref, top=top)
        repository.indices.update(
            ref,
            log_id=head.log_id,
            change=lambda index: with_snapshots(repository.chain, index, truth, head, ref, top),
        )
    except (ObjectStoreError, OntologiaError) as error:
        repository.warn(f"index of {ref[1]} does not have its new snapshot yet: {error}")
