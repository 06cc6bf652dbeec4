"""Reader side: which files hold a type, by index first and by the chain where that falls short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from storage_engine.commitlog import state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import JsonVersion
from storage_engine.commitlog.records import Entry, Head, Manifest, TypeHead, TypeRef
from storage_engine.index.record import IndexObjects, IndexVersion, TypeIndex


@dataclass(frozen=True, slots=True)
class Resolution:
    """The entries of a type up to a head, oldest first, and how they were found."""

    entries: tuple[Entry, ...]
    fallback: bool = False  # some of it came from the chain
    warning: str | None = None

    def within(self, *, since: int, upto: int) -> list[Entry]:
        return [e for e in self.entries if e.min_commit_id <= upto and e.max_commit_id > since]


def resolve(
    chain: Chain,
    indices: IndexObjects,
    head: Head,
    refs: Sequence[TypeRef],
    *,
    watermark_is_head: bool,
) -> list[Resolution]:
    """For each type. `watermark_is_head`: v1, where a fresh index has max_indexed_commit == head.

    The head manifest and all indices are asked for together.
    """
    fetches: list[Callable[[], Manifest | IndexVersion | None]]
    fetches = [partial(chain.head_manifest, head)]
    fetches += [partial(indices.read, ref, log_id=head.log_id) for ref in refs]
    fetched = chain.parallel.gather(fetches)
    versions = [version for version in fetched if isinstance(version, JsonVersion)]
    heads = state.type_heads(chain, head)
    return chain.parallel.map(
        lambda item: _resolved(
            chain, head, item[0], heads.get(item[0]), item[1].value, watermark_is_head
        ),
        zip(refs, versions, strict=True),
    )


def resolve_from_chain(chain: Chain, head: Head, refs: Sequence[TypeRef]) -> list[Resolution]:
    """The same from the truth alone: an index has named what is not there."""
    heads = state.type_heads(chain, head)
    return [
        Resolution(
            tuple(state.entries(chain, head, ref, top=heads.get(ref))),
            fallback=True,
            warning=f"index of {ref[1]} names files that are missing; read from the commit chain",
        )
        for ref in refs
    ]


def _resolved(
    chain: Chain,
    head: Head,
    ref: TypeRef,
    top: TypeHead | None,
    index: TypeIndex,
    watermark_is_head: bool,
) -> Resolution:
    if top is None:
        return Resolution(())
    index, warning = checked(chain, index, head, ref, top, watermark_is_head)
    if warning is None:
        return Resolution(_upto(head, index))
    missing = state.entries(chain, head, ref, top=top, above=index.max_indexed_commit)
    index = index.with_missing(missing)
    return Resolution(_upto(head, index), fallback=bool(missing), warning=warning)


def _upto(head: Head, index: TypeIndex) -> tuple[Entry, ...]:
    """An index read after the head may be ahead of it."""
    return tuple(e for e in index.entries if e.min_commit_id <= head.commit_id)


def checked(
    chain: Chain, index: TypeIndex, head: Head, ref: TypeRef, top: TypeHead, watermark_is_head: bool
) -> tuple[TypeIndex, str | None]:
    """The trustworthy part of an index, and what is wrong with the rest."""
    name = ref[1]
    needed = head.commit_id if watermark_is_head else top.commit_id
    if index.max_indexed_commit < needed:
        return index, f"index of {name} is at commit {index.max_indexed_commit}, needs {needed}"
    if top.commit_id != head.commit_id:
        return index, None
    # The head manifest is at hand and touches the type: its paths must be the indexed ones.
    manifest = chain.head_manifest(head)
    committed = {f.path for f in manifest.files_of(ref)} if manifest is not None else set()
    covering = [e for e in index.entries if e.contains(head.commit_id)]
    is_snapshot = any(e.is_snapshot for e in covering)
    if is_snapshot or (covering and {f.path for f in covering[0].files} == committed):
        return index, None
    kept = tuple(e for e in index.entries if e not in covering)
    problem = "another path than the head manifest" if covering else "no entry"
    return (
        replace(index, entries=kept, max_indexed_commit=head.commit_id - 1),
        f"index of {name} has {problem} for head commit {head.commit_id}",
    )
