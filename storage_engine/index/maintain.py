"""Writer side: what a commit does to the indices after its CAS.

v1 moves the watermark of every known type; v2 writes the touched types only, because the head
manifest's `type_heads` already tell a reader whether an index is complete. Either way a gap left
by an earlier writer is filled from the chain first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from storage_engine.commitlog import state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.publisher import PublishedCommit
from storage_engine.commitlog.records import Entry, Head, TypeHead, TypeRef, entry_of
from storage_engine.index.record import IndexObjects, TypeIndex
from storage_engine.index.resolve import checked


def index_writes(
    chain: Chain, indices: IndexObjects, published: PublishedCommit, refs: Iterable[TypeRef]
) -> list[Callable[[], None]]:
    """One independent write per type in `refs`."""
    log_id = published.manifest.log_id
    before = state.type_heads(chain, published.base.head)

    def write(ref: TypeRef) -> Callable[[], None]:
        return lambda: indices.update(
            ref,
            log_id=log_id,
            is_new=ref not in before,
            change=lambda index: _advanced(chain, index, published, ref, before.get(ref)),
        )

    return [write(ref) for ref in refs]


def _advanced(
    chain: Chain,
    index: TypeIndex,
    published: PublishedCommit,
    ref: TypeRef,
    before: TypeHead | None,
) -> TypeIndex | None:
    manifest = published.manifest
    if index.max_indexed_commit >= manifest.commit_id:
        return None  # a later writer has been here and covered our commit too
    head = published.base.head
    if before is not None:
        # Once head has moved on nobody compares its path again: what is wrong goes now.
        index, _ = checked(chain, index, head, ref, before, watermark_is_head=False)
    gap = state.entries(chain, head, ref, top=before, above=index.max_indexed_commit)
    index = index.with_missing(gap)
    ours = entry_of(manifest, ref)
    if ours is not None:
        index = index.with_entry(ours)
    current = (manifest.type_heads or {}).get(ref)
    if manifest.checkpoint is not None and manifest.checkpoint.commit_id == manifest.commit_id:
        # At hand, as this commit wrote it: the snapshot that it carries, and whatever an earlier
        # compaction could not bring here.
        index = _replaced(index, chain.checkpoint(manifest.checkpoint).entries.get(ref, ()))
    return replace(
        index,
        max_indexed_commit=manifest.commit_id,
        log_id=manifest.log_id,
        current_schema_version_id=current.schema_version_id if current else None,
        activation_commit_id=current.activation_commit_id if current else None,
    )


def with_snapshots(
    index: TypeIndex, truth: Sequence[Entry], head: Head, top: TypeHead | None
) -> TypeIndex | None:
    """The index with the snapshots that the log has, in the place of what they replaced; None
    when it has them and lacks nothing. Entries that reach further than a snapshot are a later
    compaction's: they stay.
    """
    beyond = [entry for entry in truth if entry.max_commit_id > index.max_indexed_commit]
    changed = _replaced(index, truth).with_missing(beyond)
    same_paths = _paths(changed.entries) == _paths(index.entries)
    if same_paths and index.max_indexed_commit >= head.commit_id:
        return None
    if index.max_indexed_commit > head.commit_id:
        return changed  # a later writer has been here: what it says of the head is newer
    return replace(
        changed,
        max_indexed_commit=head.commit_id,
        log_id=head.log_id,
        current_schema_version_id=top.schema_version_id if top else None,
        activation_commit_id=top.activation_commit_id if top else None,
    )


def _replaced(index: TypeIndex, truth: Sequence[Entry]) -> TypeIndex:
    """With the log's snapshots in the place of what they replaced."""
    snapshots = [entry for entry in truth if entry.is_snapshot]
    kept = [e for e in index.entries if not any(snapshot.covers(e) for snapshot in snapshots)]
    added = [s for s in snapshots if not any(s.overlaps(entry) for entry in kept)]
    entries = sorted([*kept, *added], key=lambda entry: entry.min_commit_id)
    return replace(index, entries=tuple(entries))


def follows(index: TypeIndex, truth: Sequence[Entry]) -> bool:
    """Whether the index has no entry that the log has replaced by a snapshot."""
    snapshots = [entry for entry in truth if entry.is_snapshot]
    snapshot_paths = set(_paths(snapshots))
    return not any(
        snapshot.covers(entry) and not snapshot_paths.issuperset(_paths([entry]))
        for entry in index.entries
        for snapshot in snapshots
    )


def _paths(entries: Iterable[Entry]) -> list[str]:
    return [file.path for entry in entries for file in entry.files]
