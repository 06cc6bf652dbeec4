"""Writer side: what a commit does to the indices after its CAS.

v1 moves the watermark of every known type; v2 writes the touched types only, because the head
manifest's `type_heads` already tell a reader whether an index is complete. Either way a gap left
by an earlier writer is filled from the chain first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from storage_engine.commitlog import state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.publisher import Published
from storage_engine.commitlog.records import TypeHead, TypeRef, entry_of
from storage_engine.index.objects import IndexObjects
from storage_engine.index.record import TypeIndex
from storage_engine.index.resolve import checked


def index_writes(
    chain: Chain, indices: IndexObjects, published: Published, refs: Iterable[TypeRef]
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
    chain: Chain, index: TypeIndex, published: Published, ref: TypeRef, before: TypeHead | None
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
    return replace(
        index,
        max_indexed_commit=manifest.commit_id,
        log_id=manifest.log_id,
        current_schema_version_id=current.schema_version_id if current else None,
        activation_commit_id=current.activation_commit_id if current else None,
    )
