"""Reads the log: head, manifests and checkpoints, with immutable ones kept in memory.

Skip pointers let any stretch of the chain be fetched in a logarithmic number of hops: a manifest
names, for each power of two, the nearest older commit that is a multiple of it. They are worked
out from the parent's pointers alone, so writing one costs no reads.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from storage_engine.commitlog import layout
from storage_engine.commitlog.parsing import parsing, require_list
from storage_engine.commitlog.records import (
    BucketRef,
    Checkpoint,
    CheckpointRef,
    CommitPoint,
    Head,
    Manifest,
    ManifestLink,
    PageRef,
    TypeHead,
    TypeRef,
    from_json,
    parse_points,
    sha256,
)
from storage_engine.commitlog.type_heads import (
    BucketedTypeHeads,
    BucketObject,
    parse_buckets,
)
from storage_engine.errors import IntegrityError, UninitializedStorageError, UnknownBranchError
from storage_engine.objectstore.parallel import Parallel
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore

# As stored; parsed they take several times as much.
_MANIFEST_BYTES = 16 << 20
_BUCKET_BYTES = 4 << 20
_PAGE_BYTES = 4 << 20
_CHECKPOINTS_KEPT = 2
_SKIP_LEVELS = 20


@dataclass(frozen=True, slots=True)
class HeadVersion:
    """A head as read, with the ETag that a CAS on it must name. `foreseen`: nobody has read it,
    and its ETag is none; it is what head will be if the writer before us swings it."""

    head: Head
    etag: str
    foreseen: bool = False


@dataclass(slots=True, eq=False)
class Unpublished:
    """What commits name that are being written: to be found as if it were stored."""

    manifests: dict[str, tuple[Manifest, str]] = field(default_factory=dict)  # by path, with hash
    buckets: dict[str, BucketObject] = field(default_factory=dict)  # by path
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)  # by hash
    pages: dict[str, tuple[CommitPoint, ...]] = field(default_factory=dict)  # by hash


@dataclass(slots=True, eq=False)
class AckedEvents:
    """Events that commits beyond `above`, up to the one of the manifest `path`, have handled, with
    the commits; see `state.acked_since`."""

    above: int = 0
    upto: int = 0
    path: str = ""
    commits: dict[tuple[str, str, str], int] = field(default_factory=dict)
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, above: int) -> None:
        self.above = self.upto = above
        self.path = ""
        self.commits.clear()

    def forget(self, above: int) -> None:
        """What is of no account beyond that."""
        self.above = max(above, self.above)
        self.commits = {name: n for name, n in self.commits.items() if n > self.above}


_Value = TypeVar("_Value")


class _Remembered(Generic[_Value]):
    """The immutable objects that were used last, as many as fit; at least one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._values: OrderedDict[str, tuple[_Value, int]] = OrderedDict()
        self._mutex = threading.Lock()

    def get(self, name: str) -> _Value | None:
        with self._mutex:
            if name not in self._values:
                return None
            self._values.move_to_end(name)
            return self._values[name][0]

    def put(self, name: str, value: _Value, size: int) -> None:
        with self._mutex:
            if name in self._values:
                self._bytes -= self._values.pop(name)[1]
            self._values[name] = value, size
            self._bytes += size
            while self._bytes > self._limit and len(self._values) > 1:
                self._bytes -= self._values.popitem(last=False)[1][1]


class Chain:
    """The committed history behind one head, as far as it has been looked at."""

    def __init__(
        self,
        store: ObjectStore,
        parallel: Parallel,
        *,
        head_key: str = layout.HEAD,
        branch: str = layout.MAIN,
        incarnation: str = "",
    ) -> None:
        """`incarnation`: of the branch, which another one of the same name is not."""
        self.store = store
        self.parallel = parallel
        self.head_key = head_key
        self.branch = branch
        self.incarnation = incarnation
        self._head: HeadVersion | None = None
        self._foreseen: str | None = None
        self._manifests: _Remembered[tuple[Manifest, str]] = _Remembered(_MANIFEST_BYTES)
        self._buckets: _Remembered[BucketObject] = _Remembered(_BUCKET_BYTES)
        self._pages: _Remembered[tuple[CommitPoint, ...]] = _Remembered(_PAGE_BYTES)
        self._checkpoints: OrderedDict[str, Checkpoint] = OrderedDict()
        self._unpublished: tuple[Unpublished, ...] = ()
        self.acked = AckedEvents()
        self._mutex = threading.Lock()

    # -- commits that are being written ---------------------------------------------------------

    def show(self, unpublished: Unpublished) -> None:
        """Find these too. Their names are nobody else's, so that only who writes them asks."""
        with self._mutex:
            self._unpublished = (*self._unpublished, unpublished)

    def hide(self, unpublished: Unpublished) -> None:
        with self._mutex:
            self._unpublished = tuple(u for u in self._unpublished if u is not unpublished)

    # -- head ---------------------------------------------------------------------------------

    def known_head(self) -> HeadVersion | None:
        """The head as this process last saw it, without asking."""
        return self._head

    def read_head(self) -> HeadVersion:
        """The head now: one request, and a short one while it has not moved."""
        seen = self._head
        try:
            if seen is None:
                stored = self.store.get(self.head_key)
            else:
                changed = self.store.get_if_changed(self.head_key, seen.etag)
                if changed is None:
                    return seen
                stored = changed
        except ObjectNotFound:
            if self.incarnation:
                raise UnknownBranchError(self.branch, gone=True) from None
            raise UninitializedStorageError(self.store.uri) from None
        version = HeadVersion(Head.parse(stored.data, key=self.head_key), stored.etag)
        if not self.is_ours(version.head):
            raise UnknownBranchError(self.branch, gone=True)
        self.note_head(version)
        return version

    def is_ours(self, head: Head) -> bool:
        """Whether a head that was found in the place of ours is of this very branch."""
        return head.incarnation == self.incarnation

    def note_head(self, version: HeadVersion) -> None:
        """Remember a head that was read or published here."""
        self._head = version

    def note_foreseen(self, path: str) -> None:
        """Remember the manifest of a head that is built on before it stands."""
        self._foreseen = path

    def may_never_stand(self, head: Head) -> bool:
        """Whether a head was foreseen: another commit may come to have its number."""
        return head.manifest_path is not None and head.manifest_path == self._foreseen

    # -- manifests ----------------------------------------------------------------------------

    def manifest(self, link: ManifestLink) -> Manifest:
        return self._verified(link)[0]

    def _verified(self, link: ManifestLink) -> tuple[Manifest, str]:
        """A manifest and the hash of its content, which is the one that was named."""
        remembered = self._at_hand(link.path)
        if remembered is None:
            try:
                data = self.store.bulk.get(link.path).data
            except ObjectNotFound:
                raise IntegrityError(
                    f"manifest {link.path} is named by the log but missing from {self.store.uri}",
                    key=link.path,
                ) from None
            digest = sha256(data)
            _check_content(link, digest)
            remembered = Manifest.parse(data, key=link.path), digest
            self._manifests.put(link.path, remembered, len(data))
        manifest, digest = remembered
        _check_content(link, digest)
        if manifest.commit_id != link.commit_id:
            raise IntegrityError(
                f"manifest {link.path} is of commit {manifest.commit_id}, the log names it as "
                f"commit {link.commit_id}",
                key=link.path,
            )
        return remembered

    def _at_hand(self, path: str) -> tuple[Manifest, str] | None:
        for unpublished in self._unpublished:
            if path in unpublished.manifests:
                return unpublished.manifests[path]
        return self._manifests.get(path)

    def note_manifest(self, path: str, manifest: Manifest, digest: str, size: int) -> None:
        """Remember a manifest that was published here, or is about to be."""
        self._manifests.put(path, (manifest, digest), size)

    def head_manifest(self, head: Head) -> Manifest | None:
        if head.link is None:
            return None
        manifest = self.manifest(head.link)
        if manifest.log_id and head.log_id and manifest.log_id != head.log_id:
            raise IntegrityError(
                f"{self.head_key} says that the log is {head.log_id}, its manifest "
                f"{head.link.path} that it is {manifest.log_id}",
                key=self.head_key,
            )
        return manifest

    def stretch(
        self, top: ManifestLink | None, *, above: int
    ) -> list[tuple[ManifestLink, Manifest]]:
        """Manifests from `top` back to the commit after `above`, newest first.

        Fetched in parallel along skip pointers.
        """
        if top is None:
            return []
        manifests: dict[str, tuple[ManifestLink, Manifest]] = {}
        wanted = [top]
        while wanted:
            loaded = self._load(wanted)
            manifests.update((link.path, (link, manifest)) for link, manifest in loaded)
            following = {
                link.path: link
                for _, manifest in manifests.values()
                for link in _links(manifest)
                if link.commit_id > above
            }
            wanted = [link for path, link in following.items() if path not in manifests]
        kept = [item for item in manifests.values() if item[0].commit_id > above]
        return sorted(kept, key=lambda item: -item[0].commit_id)

    def fetch_together(self, checkpoint: CheckpointRef, top: ManifestLink) -> None:
        """A checkpoint and the manifests that `top` links to above it: one hop, not two."""
        links = [p for p in _links(self.manifest(top)) if p.commit_id > checkpoint.commit_id]
        fetches: list[Callable[[], object]] = [partial(self.checkpoint, checkpoint)]
        fetches += [partial(self.manifest, link) for link in {p.path: p for p in links}.values()]
        self.parallel.gather(fetches)

    def _load(self, links: Sequence[ManifestLink]) -> list[tuple[ManifestLink, Manifest]]:
        """Manifests in order, each with a link that proves it; those not at hand are fetched
        together."""
        missing = [link for link in links if self._at_hand(link.path) is None]
        fetched = dict(
            zip((m.path for m in missing), self.parallel.map(self._verified, missing), strict=True)
        )
        loaded = []
        for link in links:
            manifest, digest = fetched.get(link.path) or self._verified(link)
            loaded.append((ManifestLink(link.commit_id, link.path, digest), manifest))
        return loaded

    def locate(self, head: Head, commit_id: int) -> ManifestLink | None:
        """The committed manifest with this id, or None when there is none."""
        if head.link is None or not 1 <= commit_id <= head.commit_id:
            return None
        if head.checkpoint is not None and commit_id <= head.checkpoint.commit_id:
            point = self._point(self.checkpoint(head.checkpoint), commit_id)
            if point is not None:
                return point.link
        link, manifest = head.link, self.manifest(head.link)
        while manifest.commit_id > commit_id:
            step = min(
                (p for p in _links(manifest) if p.commit_id >= commit_id),
                key=lambda p: p.commit_id,
                default=None,
            )
            if step is None:
                raise IntegrityError(
                    f"manifest {link.path} does not lead to its ancestors", key=link.path
                )
            link, manifest = step, self.manifest(step)
        return link

    def has(self, head: Head, path: str) -> bool:
        """Whether a manifest is one of the log up to `head`. Reads less than `locate`: not the
        manifest itself."""
        attempt = layout.commit_attempt(path)
        if attempt is None or head.link is None or not 1 <= attempt.commit_id <= head.commit_id:
            return False
        commit_id = attempt.commit_id
        if head.checkpoint is not None and commit_id <= head.checkpoint.commit_id:
            point = self._point(self.checkpoint(head.checkpoint), commit_id)
            if point is not None:
                return point.link.path == path
        link: ManifestLink | None = head.link
        while link is not None and link.commit_id > commit_id:
            links = [p for p in _links(self.manifest(link)) if p.commit_id >= commit_id]
            link = min(links, key=lambda p: p.commit_id, default=None)
        return link is not None and link.path == path

    def newest(self, head: Head, *, limit: int, above: int = 0) -> list[Manifest]:
        """The latest `limit` manifests with an id beyond `above`, newest first."""
        floor = max(above, head.commit_id - limit)
        recent_floor = max(floor, head.checkpoint.commit_id) if head.checkpoint else floor
        manifests = [m for _, m in self.stretch(head.link, above=recent_floor)]
        if recent_floor > floor and head.checkpoint is not None:
            older = self.commit_points(self.checkpoint(head.checkpoint), above=floor)
            recent = {m.commit_id for m in manifests}
            links = [p.link for p in reversed(older) if p.commit_id not in recent]
            manifests += [manifest for _, manifest in self._load(links)]
        return manifests[:limit]

    # -- type heads ---------------------------------------------------------------------------

    def type_heads(self, manifest: Manifest) -> Mapping[TypeRef, TypeHead] | None:
        """For each known type, the commit that last touched it as of a manifest; None when it
        was written by an implementation that did not carry them."""
        if manifest.type_head_buckets is not None:
            return BucketedTypeHeads(manifest.type_head_buckets, self.load_buckets)
        return manifest.type_heads

    def type_heads_at(self, head: Head) -> Mapping[TypeRef, TypeHead]:
        """For each known type, the commit that last touched it."""
        manifest = self.head_manifest(head)
        if manifest is None:
            return {}
        carried = self.type_heads(manifest)
        if carried is not None:
            return carried
        # A log begun by an implementation that did not carry them: work them out once.
        heads: dict[TypeRef, TypeHead] = {}
        for link, older in reversed(self.stretch(head.link, above=0)):
            heads.update(self.type_heads(older) or {})
            for file in older.files:
                before = heads.get(file.ref)
                heads[file.ref] = TypeHead(
                    commit_id=older.commit_id,
                    manifest_path=link.path,
                    schema_version_id=file.schema_version_id,
                    schema_sha256=before.schema_sha256 if before else "",
                    activation_commit_id=before.activation_commit_id if before else older.commit_id,
                    layout_sha256=before.layout_sha256 if before else "",
                    manifest_sha256=link.sha256,
                )
        return heads

    def load_buckets(self, refs: Sequence[BucketRef]) -> list[BucketObject]:
        """Buckets of type heads, whose hashes are checked."""
        return self.parallel.map(self._bucket_object, refs)

    def _bucket_object(self, ref: BucketRef) -> BucketObject:
        for unpublished in self._unpublished:
            if ref.path in unpublished.buckets:
                return unpublished.buckets[ref.path]
        buckets = self._buckets.get(ref.path)
        if buckets is None:
            data = self._content(ref.path, ref.sha256, "bucket of type heads")
            buckets = parse_buckets(data, key=ref.path)
            self._buckets.put(ref.path, buckets, len(data))
        return buckets

    def note_buckets(self, key: str, buckets: BucketObject, size: int) -> None:
        """Remember buckets that were published here."""
        self._buckets.put(key, buckets, size)

    def _content(self, key: str, digest: str, what: str) -> bytes:
        """Of an object that is named with its hash."""
        try:
            data = self.store.bulk.get(key).data
        except ObjectNotFound:
            raise IntegrityError(f"{what} {key} is missing", key=key) from None
        if sha256(data) != digest:
            raise IntegrityError(f"{what} {key} has other content", key=key)
        return data

    # -- checkpoints --------------------------------------------------------------------------

    def checkpoint(self, ref: CheckpointRef) -> Checkpoint:
        for unpublished in self._unpublished:
            if ref.sha256 in unpublished.checkpoints:
                return unpublished.checkpoints[ref.sha256]
        with self._mutex:
            if ref.sha256 in self._checkpoints:
                return self._checkpoints[ref.sha256]
        data = self._content(ref.path, ref.sha256, "checkpoint")
        checkpoint = Checkpoint.parse(data, key=ref.path)
        if checkpoint.commit_id != ref.commit_id:
            raise IntegrityError(
                f"checkpoint {ref.path} is of commit {checkpoint.commit_id}, the log names it as "
                f"of commit {ref.commit_id}",
                key=ref.path,
            )
        self.note_checkpoint(ref, checkpoint)
        return checkpoint

    def note_checkpoint(self, ref: CheckpointRef, checkpoint: Checkpoint) -> None:
        with self._mutex:
            self._checkpoints[ref.sha256] = checkpoint
            while len(self._checkpoints) > _CHECKPOINTS_KEPT:
                self._checkpoints.popitem(last=False)

    def commit_points(self, checkpoint: Checkpoint, *, above: int = 0) -> list[CommitPoint]:
        """The commits that a checkpoint covers, beyond `above`, oldest first."""
        pages = [page for page in checkpoint.pages if page.max_commit_id > above]
        older = [point for points in self.parallel.map(self.page, pages) for point in points]
        return [point for point in (*older, *checkpoint.commits) if point.commit_id > above]

    def page(self, ref: PageRef) -> tuple[CommitPoint, ...]:
        for unpublished in self._unpublished:
            if ref.sha256 in unpublished.pages:
                return unpublished.pages[ref.sha256]
        points = self._pages.get(ref.sha256)
        if points is None:
            key = layout.commit_page(ref.sha256)
            data = self._content(key, ref.sha256, "page of commits")
            points = parse_page(data, key=key)
            self._pages.put(ref.sha256, points, len(data))
        return points

    def _point(self, checkpoint: Checkpoint, commit_id: int) -> CommitPoint | None:
        page = next((page for page in checkpoint.pages if page.contains(commit_id)), None)
        points = self.page(page) if page is not None else checkpoint.commits
        at = bisect_left(points, commit_id, key=lambda point: point.commit_id)
        at_hand = at < len(points) and points[at].commit_id == commit_id
        return points[at] if at_hand else None


def parse_page(data: bytes, *, key: str) -> tuple[CommitPoint, ...]:
    raw = from_json(data, key=key)
    with parsing(key, "page of commits"):
        return parse_points(require_list(raw, "commits"))


def skip_pointers(parent: Manifest, link: ManifestLink) -> tuple[ManifestLink, ...]:
    """For each power of two, the nearest commit at or before `parent` that is a multiple of it."""
    best: dict[int, ManifestLink] = {}
    candidates = [link, *parent.skip]
    for level in range(_SKIP_LEVELS):
        multiple = 1 << level
        fitting = [p for p in candidates if p.commit_id % multiple == 0]
        if not fitting:
            break
        nearest = max(fitting, key=lambda p: p.commit_id)
        best[nearest.commit_id] = nearest
    return tuple(best[c] for c in sorted(best, reverse=True))


def _links(manifest: Manifest) -> Iterable[ManifestLink]:
    if manifest.parent is not None:
        yield manifest.parent
    yield from manifest.skip


def _check_content(link: ManifestLink, digest: str) -> None:
    if link.sha256 and link.sha256 != digest:
        raise IntegrityError(
            f"manifest {link.path} has other content than was committed: run `onto verify`",
            key=link.path,
        )
