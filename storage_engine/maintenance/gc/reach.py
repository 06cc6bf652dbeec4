"""What a storage needs, as of one head: everything else may be garbage.

Roots are the chain (its manifests always stay), the state as of head, the checkpoints that a
reader within its grace may still use, the indices, and the tags. An object is needed when one of
them names it. Each branch has such roots of its own: its head, the chain behind it and its indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.branches import heads_among
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import (
    Checkpoint,
    CheckpointRef,
    CommitFile,
    Entry,
    Head,
    Manifest,
    ManifestLink,
    TypeRef,
    parse_timestamp,
    sha256,
)
from storage_engine.commitlog.schema_log import purged_upto
from storage_engine.commitlog.tags import Tag, list_tags
from storage_engine.errors import IntegrityError
from storage_engine.index.record import IndexObjects
from storage_engine.objectstore.protocol import ObjectInfo, ObjectNotFound

_BATCH = 256


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """The oldest checkpoint that readers may still rely on: published at least a grace ago, the
    newest such. What it does not list, no reader has been given since."""

    key: str
    uploaded: datetime
    commit_id: int
    files: frozenset[str]


@dataclass(slots=True)
class Reach:
    """What is needed as of `head`."""

    head: Head
    attempts: frozenset[str]  # commits/{id}-{attempt} of the chain
    files: frozenset[str]  # data files of the state as of head
    indexed: dict[str, TypeRef]  # data files that an index names
    pinned: dict[str, str]  # data files and checkpoints -> the tag that keeps them
    purged: Mapping[TypeRef, int]  # types whose rows up to a commit were given up
    branches: Mapping[str, Head] = field(default_factory=dict)  # by incarnation
    checkpoints: frozenset[str] = frozenset()  # that a head names
    leftovers: tuple[ObjectInfo, ...] = ()  # of branches that are gone
    _staged: dict[str, int] | None = field(default=None, repr=False)
    _branch_files: frozenset[str] | None = field(default=None, repr=False)

    def needs(self, key: str) -> bool:
        """Whether a data file must stay whatever else is true."""
        return key in self.files or key in self.indexed or key in self.pinned

    def staged_in_chain(self, chain: Chain) -> dict[str, int]:
        """Files that a commit published and did not write itself (staged before it, or adopted
        from a branch by a merge), and which commit, replaced by a snapshot or not. Only manifests
        know, so they are read, once."""
        if self._staged is None:
            self._staged = {
                file.path: manifest.commit_id
                for link, manifest in history(chain, self.head)
                for file in manifest.files
                if not file.path.startswith(f"{layout.manifest_prefix(link.path)}/")
            }
        return self._staged

    def files_of_branches(self, chain: Chain) -> frozenset[str]:
        """What commits of branches that live have published, also if it is not needed now."""
        if self._branch_files is None:
            self._branch_files = frozenset(
                file.path
                for head in self.branches.values()
                if head.fork is not None
                for _, manifest in chain.stretch(head.link, above=head.fork.base_commit)
                for file in manifest.files
            )
        return self._branch_files


def reach(chain: Chain, indices: IndexObjects, head: Head | None = None) -> Reach:
    """Ask everything that can name an object, as of a head of main or as of now."""
    head = head if head is not None else chain.read_head().head
    now = state.current_checkpoint(chain, head)
    attempts, files = _named_by(chain, now)
    needed = Reach(
        head=head,
        attempts=attempts,
        files=files,
        indexed=_indexed(chain, indices, head),
        pinned=_pinned(chain, head),
        purged=purged_upto(now.schemas),
        checkpoints=frozenset([head.checkpoint.path] if head.checkpoint is not None else []),
    )
    return _with_branches(chain, indices, needed) if indices.engine_version == "v2" else needed


def _named_by(chain: Chain, now: Checkpoint) -> tuple[frozenset[str], frozenset[str]]:
    """The attempts and the data files of a chain."""
    points = chain.commit_points(now)
    return (
        frozenset(layout.manifest_prefix(point.manifest_path) for point in points),
        frozenset(f.path for entries in now.entries.values() for f in _files(entries)),
    )


def _with_branches(chain: Chain, indices: IndexObjects, main: Reach) -> Reach:
    """Also what the branches need, and tags of branches that are gone."""
    objects, heads = _branch_heads(chain, main.head)
    alive = {head.incarnation: head for head in heads}
    for head in heads:
        assert head.fork is not None
        attempts, files = _named_by(chain, state.current_checkpoint(chain, head))
        main.attempts |= attempts
        main.files |= files
        if head.checkpoint is not None:
            main.checkpoints |= {head.checkpoint.path}
        under = layout.branch_indices(head.fork.branch, head.fork.incarnation)
        own = IndexObjects(chain.store, engine_version=indices.engine_version, under=under)
        main.indexed |= _indexed(chain, own, head)
    for tag in list_tags(chain, main.head):
        if tag.incarnation and tag.incarnation not in alive:
            main.attempts |= _attempts_below(chain, tag)
    main.branches = alive
    main.leftovers = tuple(
        info
        for info in objects
        if (branch := layout.branch_of(info.key)) is not None
        and branch.incarnation
        and branch.incarnation not in alive
    )
    return main


def _branch_heads(chain: Chain, main: Head) -> tuple[list[ObjectInfo], list[Head]]:
    """Objects of branches, and their heads, read until no branch was made meanwhile: a new one may
    have been forked from an older head than was read of its parent, which must be read again."""
    while True:
        objects = list(chain.store.list(layout.BRANCHES))
        keys = [info.key for info in objects]
        heads = [v.head for v in heads_among(chain.store, keys, log_id=main.log_id)]
        if not heads:
            return objects, []
        again = {info.key for info in chain.store.list(layout.BRANCHES)}
        made = {key for key in again if key not in keys}
        if not any((b := layout.branch_of(key)) is not None and not b.incarnation for key in made):
            return objects, heads


def _attempts_below(chain: Chain, tag: Tag) -> frozenset[str]:
    """The commits down to a tagged one, of which the branch is gone."""
    floor = tag.checkpoint.commit_id if tag.checkpoint is not None else 0
    paths = []
    if tag.manifest_path is not None:
        top = ManifestLink(tag.commit_id, tag.manifest_path)
        paths += [link.path for link, _ in chain.stretch(top, above=min(floor, tag.commit_id - 1))]
    if tag.checkpoint is not None:
        points = chain.commit_points(chain.checkpoint(tag.checkpoint))
        paths += [point.manifest_path for point in points if point.commit_id <= tag.commit_id]
    return frozenset(layout.manifest_prefix(path) for path in paths)


def history(chain: Chain, head: Head) -> Iterator[tuple[ManifestLink, Manifest]]:
    """All manifests, newest first, fetched in batches."""
    floor = head.checkpoint.commit_id if head.checkpoint is not None else 0
    recent = chain.stretch(head.link, above=floor)
    yield from recent
    if head.checkpoint is None:
        return
    points = chain.commit_points(chain.checkpoint(head.checkpoint))
    links = [point.link for point in reversed(points)]
    for start in range(0, len(links), _BATCH):
        batch = links[start : start + _BATCH]
        yield from zip(batch, chain.parallel.map(chain.manifest, batch), strict=True)


def _indexed(chain: Chain, indices: IndexObjects, head: Head) -> dict[str, TypeRef]:
    refs = indices.listed(chain.store)
    versions = chain.parallel.map(lambda ref: indices.read(ref, log_id=head.log_id), refs)
    return {
        file.path: ref
        for ref, version in zip(refs, versions, strict=True)
        for file in _files(version.value.entries)
    }


def _pinned(chain: Chain, head: Head) -> dict[str, str]:
    pinned: dict[str, str] = {}
    for tag in list_tags(chain, head):
        for key in pinned_by(chain, tag):
            pinned.setdefault(key, tag.name)
    return pinned


def pinned_by(chain: Chain, tag: Tag) -> Iterator[str]:
    """The files that held the tagged commit when it was tagged, and the checkpoint that says so."""
    floor = 0
    if tag.checkpoint is not None:
        yield tag.checkpoint.path
        floor = tag.checkpoint.commit_id
        try:
            content = chain.checkpoint(tag.checkpoint)
        except IntegrityError as error:
            raise IntegrityError(
                f"tag {tag.name!r} cannot be followed, so nothing is collected: {error}; delete "
                "the tag and create it again",
                key=tag.checkpoint.path,
            ) from error
        for entries in content.entries.values():
            yield from (
                f.path for e in entries if e.min_commit_id <= tag.commit_id for f in e.files
            )
    if tag.commit_id > floor and tag.manifest_path is not None:
        top = ManifestLink(tag.commit_id, tag.manifest_path)
        for _, manifest in chain.stretch(top, above=floor):
            yield from (file.path for file in manifest.files)


# -- checkpoints ----------------------------------------------------------------------------------


def retained(
    chain: Chain, head: Head, checkpoints: Iterable[ObjectInfo], cutoff: datetime
) -> RetainedCheckpoint | None:
    """Looked for from the newest on. A checkpoint was published if the next commit (or head)
    names it, and then not after that commit was drafted (or head was written)."""
    for info in sorted(
        checkpoints, key=lambda i: (layout.checkpoint_commit(i.key), i.modified), reverse=True
    ):
        ref, published = _publication(chain, head, info.key)
        if ref is None or published is None or published > cutoff:
            continue
        content = chain.checkpoint(ref)
        files = {f.path for entries in content.entries.values() for f in _files(entries)}
        return RetainedCheckpoint(info.key, info.modified, content.commit_id, frozenset(files))
    return None


def never_published(
    chain: Chain, head: Head, info: ObjectInfo, uploaded: Mapping[str, datetime]
) -> bool:
    """Whether no head can ever have named this checkpoint (one that may be on its way apart).

    Each published one is uploaded after the one before was published. So if what is named at its
    commit was uploaded earlier, this one did not come after it, nor before.
    """
    commit_id = layout.checkpoint_commit(info.key)
    if commit_id > head.commit_id:
        return True
    if _publication(chain, head, info.key)[0] is not None:
        return False
    following = chain.locate(head, commit_id + 1)
    named = chain.manifest(following).checkpoint if following is not None else head.checkpoint
    return named is None or uploaded.get(named.path, info.modified) < info.modified


def files_of_checkpoint(chain: Chain, key: str) -> frozenset[str]:
    """All data files that a checkpoint object lists, published or not; none when it is gone or
    cannot be read, as then no reader can use it either."""
    try:
        data = chain.store.get(key).data
        content = Checkpoint.parse(data, key=key)
    except (ObjectNotFound, IntegrityError):
        return frozenset()
    chain.note_checkpoint(CheckpointRef(key, sha256(data), content.commit_id), content)
    return frozenset(f.path for entries in content.entries.values() for f in _files(entries))


def _publication(
    chain: Chain, head: Head, key: str
) -> tuple[CheckpointRef | None, datetime | None]:
    """Who named it, and a time at which it had certainly been published."""
    commit_id = layout.checkpoint_commit(key)
    own, following = chain.locate(head, commit_id), chain.locate(head, commit_id + 1)
    after = chain.manifest(following) if following is not None else None
    bound = parse_timestamp(after.created_at if after is not None else head.updated_at)
    named = [chain.manifest(own).checkpoint] if own is not None else []
    named += [after.checkpoint if after is not None else head.checkpoint]
    ref = next((ref for ref in named if ref is not None and ref.path == key), None)
    return ref, bound if ref is not None else None


def _files(entries: Iterable[Entry]) -> Iterator[CommitFile]:
    return (file for entry in entries for file in entry.files)
