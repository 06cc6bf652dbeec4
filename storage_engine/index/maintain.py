"""Writer side: what a commit does to the indices after its CAS.

v1 moves the watermark of every known type; v2 writes the touched types only, because the head
manifest's `type_heads` already tell a reader whether an index is complete. Either way what an
earlier writer left out is filled in from the chain first, and what does not prove to belong to
this chain is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import Entry, Head, TypeHead, TypeRef, entry_of
from storage_engine.commitlog.swap import PublishedCommit
from storage_engine.index.record import IndexObjects, TypeIndex
from storage_engine.index.resolve import belongs, resolve_type


def index_writes(
    chain: Chain,
    indices: IndexObjects,
    published: Sequence[PublishedCommit],
    refs: Iterable[TypeRef],
) -> list[Callable[[], None]]:
    """One independent write per type in `refs`, of commits that were published together."""
    log_id = published[-1].manifest.log_id
    before = chain.type_heads_at(published[0].base.head)

    def write(ref: TypeRef) -> Callable[[], None]:
        return lambda: indices.update(
            ref,
            log_id=log_id,
            is_new=ref not in before or before[ref].empty,
            after=before[ref].commit_id if ref in before else 0,
            change=lambda index: _advanced(chain, index, published, ref, before.get(ref)),
        )

    return [write(ref) for ref in refs]


def _advanced(
    chain: Chain,
    index: TypeIndex,
    published: Sequence[PublishedCommit],
    ref: TypeRef,
    before: TypeHead | None,
) -> TypeIndex | None:
    first, manifest = published[0], published[-1].manifest
    ours = [entry for each in published if (entry := entry_of(each.manifest, ref)) is not None]
    top = before
    if ours or any(ref in each.manifest.schema_changed() for each in published):
        top = (chain.type_heads(manifest) or {}).get(ref)
    if index.max_indexed_commit >= manifest.commit_id:
        _, newest = index.upto(manifest.commit_id)
        path = next((p.manifest_path for p in reversed(published) if entry_of(p.manifest, ref)), "")
        built_on_ours = newest is not None and newest.manifest_path == path
        if built_on_ours or _is_later(chain, index, top):
            return None  # a later writer has been here and covered our commits too
    entries = resolve_type(chain, index, first.base.head, ref, before).entries
    if top is not None and top.empty:
        entries = ()  # its rows were purged: an index that names their files would keep them
    entries = (*entries, *ours)
    written = manifest.checkpoint
    if written is not None and written.commit_id >= first.manifest.commit_id:
        # At hand, as these commits wrote it: the snapshot that one carries, and whatever an
        # earlier compaction could not bring here.
        entries = _following(entries, chain.checkpoint(written).entries.get(ref, ()))
    return described(
        ref,
        entries,
        commit_id=manifest.commit_id,
        log_id=manifest.log_id,
        top=top,
    )


def _is_later(chain: Chain, index: TypeIndex, top: TypeHead | None) -> bool:
    """Whether an index that is as far as a commit of ours, or further, is this log's, and `top`
    is in it. One that is ahead may tell of another history: head now decides."""
    entries, newest = index.upto(index.max_indexed_commit)
    if top is not None and (newest is None or newest.commit_id < top.commit_id):
        return False
    head = chain.read_head().head
    return belongs(chain, index, head) if entries else index.max_indexed_commit <= head.commit_id


def described(
    ref: TypeRef, entries: Iterable[Entry], *, commit_id: int, log_id: str, top: TypeHead | None
) -> TypeIndex:
    """The index of a type with these entries, the newest of which `top` committed."""
    dropped = top is not None and top.is_dropped
    past = () if top is None else top.succeeded(0) if dropped else top.past_versions
    return TypeIndex(
        ref[1],
        max_indexed_commit=commit_id,
        entries=tuple(entries),
        log_id=log_id,
        current_schema_version_id=top.schema_version_id if top and not dropped else None,
        activation_commit_id=top.activation_commit_id if top and not dropped else None,
        historical_versions=tuple(version._asdict() for version in past),
        max_indexed_manifest=top.manifest_path if top and not top.empty else None,
    )


def with_snapshots(
    chain: Chain,
    index: TypeIndex,
    truth: Sequence[Entry],
    head: Head,
    ref: TypeRef,
    top: TypeHead | None,
) -> TypeIndex | None:
    """The index with the snapshots that the log has; None when it has them and lacks nothing.

    A later writer's index keeps what it says of later commits; entries in it that reach further
    than a snapshot are a later compaction's.
    """
    if index.max_indexed_commit > head.commit_id and _is_later(chain, index, top):
        entries = _following(index.entries, truth)
        return None if _paths(entries) == _paths(index.entries) else replace(index, entries=entries)
    right = described(ref, truth, commit_id=head.commit_id, log_id=head.log_id, top=top)
    proven = index.max_indexed_manifest == right.max_indexed_manifest
    same = proven and _paths(index.entries) == _paths(truth)
    return None if same and index.max_indexed_commit == head.commit_id else right


def _following(entries: Sequence[Entry], truth: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries of an index with the log's snapshots in the place of what they replaced.

    One that cuts an entry in two stays out: where head was put back to before a compaction, the
    index may have its snapshot, which is right, and the log others of the same commits.
    """
    snapshots = [
        snapshot
        for snapshot in truth
        if snapshot.is_snapshot
        and all(snapshot.covers(entry) for entry in entries if snapshot.overlaps(entry))
    ]
    kept = [e for e in entries if not any(snapshot.covers(e) for snapshot in snapshots)]
    return tuple(sorted([*kept, *snapshots], key=lambda entry: entry.min_commit_id))


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
