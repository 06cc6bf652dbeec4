"""Rewrites head without a commit: same commit id, another checkpoint, a new version of the object.

Compaction publishes so what it merged, and garbage collection fences so what it is about to
delete: a writer or compactor that read the older head can no longer publish. The CAS decides;
the lock only keeps others from wasted work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain, HeadVersion
from storage_engine.commitlog.json_object import Lost, Won, write_conditionally
from storage_engine.commitlog.lock import Lease, Tenure, WriteLock
from storage_engine.commitlog.records import (
    Checkpoint,
    CheckpointRef,
    Head,
    sha256,
    timestamp,
)
from storage_engine.errors import HeadMismatchError

log = logging.getLogger(__name__)

# From the head as it is under the lock to the checkpoint that head shall name; None when there is
# nothing (more) to publish. Runs again after a lost CAS. It must build on `current_checkpoint`,
# never on a cache, or replaced files would come back.
Change = Callable[[Head], Checkpoint | None]
After = Callable[[Head, Lease], None]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A head that stands (or stood, when others have gone on from it), and what it replaced."""

    head: Head
    before: Head
    attempts: int


def rewrite_head(
    chain: Chain,
    lock: WriteLock,
    *,
    runtime_id: str,
    max_attempts: int,
    change: Change,
    after: After | None = None,
) -> Rewritten | None:
    """Publish a checkpoint under the lock. `after` runs under the same lease once the CAS has
    been won (or nothing was to be done): projections, best effort.

    Raises LeaseExpiredError with nothing published when the lease is not safe before the CAS,
    HeadMismatchError when head moved at every attempt, and StillUnknown when the store did not
    say whether it took the last one.
    """
    with Tenure() as tenure, tenure:
        lease = lock.acquire(tenure)
        for attempt in range(1, max_attempts + 1):
            version = chain.read_head()
            checkpoint = change(version.head)
            if checkpoint is None:
                if after is not None:
                    after(version.head, lease)
                return None
            head = _with_checkpoint(chain, version.head, checkpoint, runtime_id)
            lease.guard()
            lease.note_head(None)
            if _swap(chain, version, head):
                if after is not None:
                    after(head, lease)
                return Rewritten(head, version.head, attempt)
            log.info("head moved before it could be rewritten; trying on the new one")
        raise HeadMismatchError(max_attempts)


def _with_checkpoint(chain: Chain, head: Head, checkpoint: Checkpoint, runtime_id: str) -> Head:
    """Upload a checkpoint under a key of its own and name it in a head."""
    checkpoint, pages = state.with_pages(checkpoint)
    data = checkpoint.to_bytes()
    key = layout.checkpoint(checkpoint.commit_id, layout.new_id())
    chain.parallel.map(lambda item: chain.store.put(*item), [*pages, (key, data)])
    ref = CheckpointRef(key, sha256(data), checkpoint.commit_id)
    chain.note_checkpoint(ref, checkpoint)
    return replace(
        head,
        updated_at=timestamp(chain.store.now()),
        runtime_id=runtime_id,
        write_id=layout.new_write_id(),
        checkpoint=ref,
    )


def _swap(chain: Chain, version: HeadVersion, head: Head) -> bool:
    """An unpublished checkpoint stays for garbage collection: a lost CAS whose answer was lost
    before may have been won, and built on, so deleting it would need a proof."""
    outcome = write_conditionally(
        chain.store, chain.head_key, head.to_bytes(), write_id=head.write_id, etag=version.etag
    )
    if isinstance(outcome, Won):
        chain.note_head(HeadVersion(head, outcome.etag))
        return True
    return _built_on(chain, outcome, head)


def _built_on(chain: Chain, outcome: Lost, ours: Head) -> bool:
    """Ours has also won when a commit since names our checkpoint."""
    if outcome.current is None:
        return False
    now = Head.parse(outcome.current.data, key=chain.head_key)
    chain.note_head(HeadVersion(now, outcome.current.etag))
    return now.checkpoint == ours.checkpoint
