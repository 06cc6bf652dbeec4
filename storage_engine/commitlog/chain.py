"""Reads the log: head, manifests and checkpoints, with immutable ones kept in memory.

Skip pointers let any stretch of the chain be fetched in a logarithmic number of hops: a manifest
names, for each power of two, the nearest older commit that is a multiple of it. They are worked
out from the parent's pointers alone, so writing one costs no reads.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import (
    Checkpoint,
    CheckpointRef,
    Head,
    Manifest,
    SkipPointer,
    sha256,
)
from storage_engine.errors import IntegrityError, UninitializedStorageError
from storage_engine.objectstore.parallel import Parallel
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore

_MANIFESTS_KEPT = 4096
_CHECKPOINTS_KEPT = 2
_SKIP_LEVELS = 20


@dataclass(frozen=True, slots=True)
class HeadVersion:
    """A head as read, with the ETag that a CAS on it must name."""

    head: Head
    etag: str


class Chain:
    """The committed history of one storage, as far as it has been looked at."""

    def __init__(self, store: ObjectStore, parallel: Parallel) -> None:
        self.store = store
        self.parallel = parallel
        self._head: HeadVersion | None = None
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._checkpoints: OrderedDict[str, Checkpoint] = OrderedDict()
        self._mutex = threading.Lock()

    # -- head ---------------------------------------------------------------------------------

    def known_head(self) -> HeadVersion | None:
        """The head as this process last saw it, without asking."""
        return self._head

    def read_head(self) -> HeadVersion:
        """The head now: one request, and a short one while it has not moved."""
        seen = self._head
        try:
            if seen is None:
                stored = self.store.get(layout.HEAD)
            else:
                changed = self.store.get_if_changed(layout.HEAD, seen.etag)
                if changed is None:
                    return seen
                stored = changed
        except ObjectNotFound:
            raise UninitializedStorageError(self.store.uri) from None
        version = HeadVersion(Head.parse(stored.data, key=layout.HEAD), stored.etag)
        self.note_head(version)
        return version

    def note_head(self, version: HeadVersion) -> None:
        """Remember a head that was read or published here."""
        self._head = version

    # -- manifests ----------------------------------------------------------------------------

    def manifest(self, path: str) -> Manifest:
        with self._mutex:
            if path in self._manifests:
                self._manifests.move_to_end(path)
                return self._manifests[path]
        try:
            stored = self.store.get(path)
        except ObjectNotFound:
            raise IntegrityError(
                f"manifest {path} is named by the log but missing from {self.store.uri}", key=path
            ) from None
        manifest = Manifest.parse(stored.data, key=path)
        self.note_manifest(path, manifest)
        return manifest

    def note_manifest(self, path: str, manifest: Manifest) -> None:
        with self._mutex:
            self._manifests[path] = manifest
            self._manifests.move_to_end(path)
            while len(self._manifests) > _MANIFESTS_KEPT:
                self._manifests.popitem(last=False)

    def head_manifest(self, head: Head) -> Manifest | None:
        return self.manifest(head.manifest_path) if head.manifest_path else None

    def stretch(self, top_path: str | None, *, above: int) -> list[tuple[str, Manifest]]:
        """Manifests from `top_path` back to the commit after `above`, newest first.

        Fetched in parallel along skip pointers.
        """
        if top_path is None:
            return []
        manifests: dict[str, Manifest] = {}
        wanted = [top_path]
        while wanted:
            manifests.update(self._load(wanted))
            wanted = [
                path
                for path in dict.fromkeys(
                    p.path for m in manifests.values() for p in _links(m) if p.commit_id > above
                )
                if path not in manifests
            ]
        kept = [(path, m) for path, m in manifests.items() if m.commit_id > above]
        return sorted(kept, key=lambda item: -item[1].commit_id)

    def fetch_together(self, checkpoint: CheckpointRef, top_path: str) -> None:
        """A checkpoint and the manifests that `top_path` links to above it: one hop, not two."""
        links = [p for p in _links(self.manifest(top_path)) if p.commit_id > checkpoint.commit_id]
        fetches: list[Callable[[], object]] = [partial(self.checkpoint, checkpoint)]
        fetches += [partial(self.manifest, path) for path in dict.fromkeys(p.path for p in links)]
        self.parallel.gather(fetches)

    def _load(self, paths: Sequence[str]) -> dict[str, Manifest]:
        """Manifests by path, in order; those not at hand are fetched together."""
        with self._mutex:
            at_hand = {path: self._manifests[path] for path in paths if path in self._manifests}
        missing = [path for path in paths if path not in at_hand]
        fetched = dict(zip(missing, self.parallel.map(self.manifest, missing), strict=True))
        return {path: at_hand.get(path) or fetched[path] for path in paths}

    def locate(self, head: Head, commit_id: int) -> str | None:
        """The path of the committed manifest with this id, or None when there is none."""
        if not 1 <= commit_id <= head.commit_id or head.manifest_path is None:
            return None
        if head.checkpoint is not None and commit_id <= head.checkpoint.commit_id:
            points = self.checkpoint(head.checkpoint).commits
            at = bisect_left(points, commit_id, key=lambda point: point.commit_id)
            if at < len(points) and points[at].commit_id == commit_id:
                return points[at].manifest_path
        path, manifest = head.manifest_path, self.manifest(head.manifest_path)
        while manifest.commit_id > commit_id:
            step = min(
                (p for p in _links(manifest) if p.commit_id >= commit_id),
                key=lambda p: p.commit_id,
                default=None,
            )
            if step is None:
                raise IntegrityError(f"manifest {path} does not lead to its ancestors", key=path)
            path, manifest = step.path, self.manifest(step.path)
        return path

    def newest(self, head: Head, *, limit: int, above: int = 0) -> list[Manifest]:
        """The latest `limit` manifests with an id beyond `above`, newest first."""
        floor = max(above, head.commit_id - limit)
        recent_floor = max(floor, head.checkpoint.commit_id) if head.checkpoint else floor
        manifests = [m for _, m in self.stretch(head.manifest_path, above=recent_floor)]
        if recent_floor > floor and head.checkpoint is not None:
            older = [p for p in self.checkpoint(head.checkpoint).commits if p.commit_id > floor]
            paths = [p.manifest_path for p in reversed(older)]
            recent = {m.commit_id for m in manifests}
            manifests += [m for m in self._load(paths).values() if m.commit_id not in recent]
        return manifests[:limit]

    # -- checkpoints --------------------------------------------------------------------------

    def checkpoint(self, ref: CheckpointRef) -> Checkpoint:
        with self._mutex:
            if ref.sha256 in self._checkpoints:
                return self._checkpoints[ref.sha256]
        try:
            stored = self.store.get(ref.path)
        except ObjectNotFound:
            raise IntegrityError(f"checkpoint {ref.path} is missing", key=ref.path) from None
        if sha256(stored.data) != ref.sha256:
            raise IntegrityError(f"checkpoint {ref.path} has other content", key=ref.path)
        checkpoint = Checkpoint.parse(stored.data, key=ref.path)
        self.note_checkpoint(ref, checkpoint)
        return checkpoint

    def note_checkpoint(self, ref: CheckpointRef, checkpoint: Checkpoint) -> None:
        with self._mutex:
            self._checkpoints[ref.sha256] = checkpoint
            while len(self._checkpoints) > _CHECKPOINTS_KEPT:
                self._checkpoints.popitem(last=False)


def skip_pointers(parent: Manifest, parent_path: str) -> tuple[SkipPointer, ...]:
    """For each power of two, the nearest commit at or before `parent` that is a multiple of it."""
    best: dict[int, SkipPointer] = {}
    candidates = [SkipPointer(parent.commit_id, parent_path), *parent.skip]
    for level in range(_SKIP_LEVELS):
        multiple = 1 << level
        fitting = [p for p in candidates if p.commit_id % multiple == 0]
        if not fitting:
            break
        nearest = max(fitting, key=lambda p: p.commit_id)
        best[nearest.commit_id] = nearest
    return tuple(best[c] for c in sorted(best, reverse=True))


def _links(manifest: Manifest) -> Iterable[SkipPointer]:
    if manifest.parent_manifest_path is not None and manifest.parent_commit_id is not None:
        yield SkipPointer(manifest.parent_commit_id, manifest.parent_manifest_path)
    yield from manifest.skip
