"""Which files hold a type: by its index where that is proven, by the chain where it falls short.

An index is believed for the entries of which the newest ends with a commit of this chain: the
type's head, or an ancestor of it that what comes after names. A watermark is no proof. Storages
are copied while they are written, and heads are restored from older versions; then an index is
ahead of head and tells of another history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from storage_engine.commitlog import state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import Entry, Head, Manifest, Previous, TypeHead, TypeRef
from storage_engine.errors import OntologiaError
from storage_engine.index.record import (
    IndexObjects,
    IndexVersion,
    TypeIndex,
    of_log,
    same_commit,
)
from storage_engine.objectstore.protocol import ObjectStoreError


@dataclass(frozen=True, slots=True)
class Resolution:
    """The entries of a type up to a head, oldest first, and how they were found."""

    entries: tuple[Entry, ...]
    fallback: bool = False  # some of it came from the chain
    warning: str | None = None

    def within(self, *, since: int, upto: int) -> list[Entry]:
        return [e for e in self.entries if e.min_commit_id <= upto and e.max_commit_id > since]


@dataclass(frozen=True, slots=True)
class Early:
    """Indices that were read together with the head. `settled`: that was known before, and had not
    moved, so that they are no older than had they been read after it."""

    indices: Mapping[TypeRef, IndexVersion]
    settled: bool


def resolve(
    chain: Chain,
    indices: IndexObjects,
    head: Head,
    refs: Sequence[TypeRef],
    *,
    watermark_is_head: bool,
    early: Early | None = None,
) -> list[Resolution]:
    """For each type. `watermark_is_head`: v1, where a fresh index has max_indexed_commit == head.

    The head manifest and all indices are asked for together, but for `early` ones: such a one is
    read again if it is not complete and may have been read too early.
    """
    at_hand = early.indices if early is not None else {}
    settled = early is not None and early.settled
    fetches: list[Callable[[], Manifest | IndexVersion | None]]
    fetches = [partial(chain.head_manifest, head)]
    fetches += [partial(indices.read, r, log_id=head.log_id) for r in refs if r not in at_hand]
    fetched = iter(chain.parallel.gather(fetches)[1:])
    heads = chain.type_heads_at(head)

    def resolved(item: tuple[TypeRef, IndexVersion | None]) -> Resolution:
        ref, version = item
        top = heads.get(ref)
        if version is None:
            index = of_log(at_hand[ref].value, head.log_id)
            if not settled and not _is_complete(index, head, top, watermark_is_head):
                index = indices.read(ref, log_id=head.log_id).value
        else:
            index = version.value
        return resolve_type(chain, index, head, ref, top, watermark_is_head)

    versions = [None if ref in at_hand else cast(IndexVersion, next(fetched)) for ref in refs]
    return chain.parallel.map(resolved, zip(refs, versions, strict=True))


def read_early(
    chain: Chain, indices: IndexObjects, refs: Sequence[TypeRef], expected: Head | None
) -> tuple[Head, Early]:
    """The head now, together with the indices of these types, and with the manifest of the head
    that is `expected`, where it is not at hand: one hop instead of two."""

    def look_ahead() -> None:
        if expected is not None:
            with suppress(ObjectStoreError, OntologiaError):  # said by who needs it
                chain.head_manifest(expected)

    fetches: list[Callable[[], Any]] = [chain.read_head, look_ahead]
    fetches += [partial(indices.read, ref, log_id="") for ref in refs]
    version, _, *read = chain.parallel.gather(fetches)
    return version.head, Early(dict(zip(refs, read, strict=True)), version.head == expected)


def resolve_from_chain(chain: Chain, head: Head, refs: Sequence[TypeRef]) -> list[Resolution]:
    """The same from the truth alone: an index has named what is not there."""
    heads = chain.type_heads_at(head)
    return [
        Resolution(
            tuple(state.entries(chain, head, ref, top=heads.get(ref))),
            fallback=True,
            warning=f"index of {ref[1]} names files that are missing; read from the commit chain",
        )
        for ref in refs
    ]


def resolve_type(
    chain: Chain,
    index: TypeIndex,
    head: Head,
    ref: TypeRef,
    top: TypeHead | None,
    watermark_is_head: bool = False,
) -> Resolution:
    """The entries up to `head`, where `top` last touched the type, without a request while the
    index is proven and complete."""
    if top is None or top.empty:
        return Resolution(())
    name = ref[1]
    lag = _lag(index, head, top, name, watermark_is_head)
    entries, newest = index.upto(head.commit_id)
    if newest is not None and _ends_with(entries, newest, top):
        return Resolution(entries, warning=lag)
    if newest is not None and newest.commit_id < top.commit_id:
        for above in dict.fromkeys((index.max_indexed_commit, newest.commit_id)):
            missing = state.entries(chain, head, ref, top=top, above=above)
            joined = _joined(chain, head, index, entries, missing)
            if joined is not None:
                warning = lag or f"index of {name} has no entry for commit {top.commit_id}"
                return Resolution(joined, fallback=True, warning=warning)
    truth = tuple(state.entries(chain, head, ref, top=top))
    if head.fork is not None and top.commit_id <= head.fork.base_commit:
        return Resolution(truth, fallback=True)  # of the parent: there is no index to complain of
    unproven = _unproven(index, head, top, name, truth)
    return Resolution(truth, True, unproven if index.problem else lag or unproven)


def _is_complete(
    index: TypeIndex, head: Head, top: TypeHead | None, watermark_is_head: bool
) -> bool:
    """Whether the index alone tells the entries up to `head`, and proves it."""
    if top is None or top.empty:
        return True
    entries, newest = index.upto(head.commit_id)
    fresh = _lag(index, head, top, "", watermark_is_head) is None
    return fresh and newest is not None and _ends_with(entries, newest, top)


def _ends_with(entries: Sequence[Entry], newest: Previous, top: TypeHead) -> bool:
    return newest.manifest_path == top.manifest_path and entries[-1].contains(top.commit_id)


def belongs(chain: Chain, index: TypeIndex, head: Head) -> bool:
    """Whether all that the index says was committed up to `head`, and by this chain."""
    entries, newest = index.upto(head.commit_id)
    return (
        newest is not None
        and len(entries) == len(index.entries)
        and index.max_indexed_commit <= head.commit_id
        and _is_committed(chain, head, newest)
    )


def _joined(
    chain: Chain,
    head: Head,
    index: TypeIndex,
    entries: Sequence[Entry],
    missing: Sequence[Entry],
) -> tuple[Entry, ...] | None:
    """The entries of an index and those that the chain has beyond them, in the place of those
    that a snapshot spans; None when they do not prove to follow each other."""
    if not missing:
        return None
    first = missing[0]
    kept = [entry for entry in entries if entry.max_commit_id < first.min_commit_id]
    if any(entry.min_commit_id < first.min_commit_id for entry in entries[len(kept) :]):
        return None  # cut in two
    before = index.commit_at(len(kept) - 1) if kept else None
    if not _follows(chain, head, first.files[0].previous, before):
        return None
    return (*kept, *missing)


def _follows(chain: Chain, head: Head, named: Previous | None, before: Previous | None) -> bool:
    """Whether the commit before an entry is the one that the index ends with."""
    if before is None:
        return named is None
    if named is not None:
        return same_commit(named, before)
    # The entry does not say: a snapshot of ours before 0.2, or the first implementation's.
    return _is_committed(chain, head, before)


def _is_committed(chain: Chain, head: Head, commit: Previous) -> bool:
    link = chain.locate(head, commit.commit_id)
    return link is not None and link.path == commit.manifest_path


def _lag(
    index: TypeIndex, head: Head, top: TypeHead, name: str, watermark_is_head: bool
) -> str | None:
    needed = head.commit_id if watermark_is_head else top.commit_id
    if index.max_indexed_commit >= needed:
        return None
    return f"index of {name} is at commit {index.max_indexed_commit}, needs {needed}"


def _unproven(
    index: TypeIndex, head: Head, top: TypeHead, name: str, truth: Sequence[Entry]
) -> str | None:
    """What is wrong with an index that was not believed."""
    if index.problem:
        return f"index of {name} {index.problem}; read from the commit chain"
    if index.max_indexed_manifest is not None and index.entries:
        if index.entries[-1].max_commit_id > head.commit_id:
            return None  # of commits that came after this head was read, as far as anybody can see
        return (
            f"index of {name} belongs to another history: it ends with "
            f"{index.max_indexed_manifest}, the log with {top.manifest_path}; read from the "
            "commit chain"
        )
    # Written before indices could be proven. It is right when it says what the log says, but for
    # snapshots of the first implementation, which the log does not know.
    commits = {entry.commits: _paths(entry) for entry in truth}
    upto = [entry for entry in index.entries if entry.min_commit_id <= head.commit_id]
    singles = [entry for entry in upto if entry.is_single]
    if any(commits.get(entry.commits) != _paths(entry) for entry in singles):
        return f"index of {name} has another path than the log; read from the commit chain"
    if not any(entry.contains(top.commit_id) for entry in upto):
        return f"index of {name} has no entry for commit {top.commit_id}"
    return None


def _paths(entry: Entry) -> set[str]:
    return {file.path for file in entry.files}
