"""Commits that build on one another before any of them is stored.

Each is given its manifest as if the one before it stood: id, parent and hashes, type heads, skip
pointers, checkpoint. The chain finds what was made so far, so that the next commit is drafted as on
any other head, and without a request. What came of it is uploaded together, and head is swung once,
to `head`. One commit is a series of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import (
    Chain,
    HeadVersion,
    Unpublished,
    parse_page,
    skip_pointers,
)
from storage_engine.commitlog.records import (
    AckedTogether,
    Checkpoint,
    CheckpointRef,
    CommitFile,
    Manifest,
    ManifestLink,
    MergePoint,
    Previous,
    TypeHead,
    TypeRef,
    UnitVersion,
    UpdatePoint,
    parse_timestamp,
    sha256,
    timestamp,
)
from storage_engine.commitlog.type_heads import next_type_heads, parse_buckets

FORMAT = 3
FORMAT_OF_BRANCHES = 4  # raised to by the first branch of a storage, or the first protection
MERGE, UPDATE = "merge", "update"  # kinds of commits that bring changes of another branch
_FORMAT_OF_POINTERS = 2  # manifests of earlier formats do not name the carriers before them
_MARKS_IN_HEAD = 256

T = TypeVar("T")
Place = Callable[[Checkpoint], Checkpoint]


@dataclass(frozen=True, slots=True)
class Upload:
    """An immutable object to write before the CAS: bytes, or a local file.

    `shared`: named by its content, so that others may have written it and rely on it.
    """

    key: str
    content: bytes | Path
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """What a commit is to contain. Which commit wrote a type before (`CommitFile.previous`) and
    what belongs to the chain are the series' to say."""

    files: Sequence[CommitFile]
    uploads: Sequence[Upload]
    touched: Mapping[TypeRef, TypeHead]  # type heads after this commit, of touched types
    # Of types whose schema changes and of which no rows are written: as they will be.
    amended: Mapping[TypeRef, TypeHead] = field(default_factory=dict)
    purged: Sequence[TypeRef] = ()  # types whose rows the log forgets: their files may be collected
    metadata: Mapping[str, str] = field(default_factory=dict)
    kind: str = "data"
    schema: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    acks: Sequence[Mapping[str, Any]] = ()
    idempotency: Mapping[str, Any] | None = None
    # Of a merge or an update, as `Manifest` has them; None: as the parent manifest has them.
    merged: Mapping[str, MergePoint] | None = None
    updated: UpdatePoint | None = None
    merged_marks: Mapping[str, Sequence[UnitVersion]] = field(default_factory=dict)
    changes: Mapping[TypeRef, Sequence[str]] = field(default_factory=dict)
    # Asked beside the uploads, and so after head was read: whether what it was drafted from, which
    # is not of this chain, still stands. If not it is drafted anew.
    confirm: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A unit of work that changes nothing: it is recorded in head, without a commit."""

    app_id: str
    version: UnitVersion


@dataclass(frozen=True, slots=True)
class Commit:
    """One of a series, as it will be stored."""

    manifest: Manifest
    path: str
    sha256: str
    size: int
    uploads: Sequence[Upload]


class Series:
    """The commits of one swap of head. The chain finds them until the series is left."""

    def __init__(self, chain: Chain, stored: HeadVersion) -> None:
        self._chain = chain
        self._unpublished = Unpublished()
        self.stored = stored
        self.head = stored.head
        self.manifest = chain.head_manifest(stored.head)
        self.commits: list[Commit] = []
        self._last_on = stored.head, ""  # what the last commit builds on, and its attempt
        self._refs: list[CheckpointRef] = []

    def __enter__(self) -> Self:
        self._chain.show(self._unpublished)
        return self

    def __exit__(self, *_: object) -> None:
        self._chain.hide(self._unpublished)

    @property
    def moved(self) -> bool:
        """Whether head must be swung for it."""
        return self.head is not self.stored.head

    @property
    def next_id(self) -> int:
        return self.head.commit_id + 1

    @property
    def version(self) -> HeadVersion:
        """The head that the next commit builds on. What is not stored has no ETag; its name is
        as unique."""
        if not self.moved:
            return self.stored
        return HeadVersion(self.head, f"unpublished {self.head.write_id}")

    def add(
        self,
        draft: Draft,
        *,
        attempt: str,
        now: datetime,
        runtime_id: str,
        author: str | None = None,
        created_at: str | None = None,
        origin: str = "",
        with_checkpoint: bool = False,
        place: Place | None = None,
    ) -> Commit:
        """Append a commit. `author` and `created_at` are those of a commit that another log has
        had, else ours and now, but never before the parent's. `place` changes the checkpoint that
        is written with it; a draft that purges has one too."""
        path = layout.manifest(self.next_id, attempt)
        manifest, buckets = self._manifest(draft, path, attempt)
        manifest = replace(
            manifest,
            created_at=created_at or self._created_at(now),
            runtime_id=runtime_id if author is None else author,
            origin=origin,
        )
        uploads = [*draft.uploads, *(Upload(key, data) for key, data in buckets)]
        ref = self.head.checkpoint
        if with_checkpoint or draft.purged or place is not None:
            checkpoint = state.next_checkpoint(self._chain, self.head, manifest, path)
            checkpoint = state.without_rows(checkpoint, draft.purged)
            ref, written = self._checkpoint(place(checkpoint) if place else checkpoint, attempt)
            uploads += written
            manifest = replace(manifest, checkpoint=ref)
        data = manifest.to_bytes()
        uploads.append(Upload(path, data))
        commit = Commit(manifest, path, sha256(data), len(data), uploads)
        for key, content in buckets:
            self._unpublished.buckets[key] = parse_buckets(content, key=key)
        self._unpublished.manifests[path] = manifest, commit.sha256
        self.commits.append(commit)
        self.manifest = manifest
        self._last_on = self.head, attempt
        self.head = replace(
            self.head,
            commit_id=manifest.commit_id,
            manifest_path=path,
            updated_at=timestamp(now),
            runtime_id=runtime_id,
            write_id=manifest.write_id,
            commit_sha256=commit.sha256,
            checkpoint=ref,
            marks={},
        )
        return commit

    def mark(self, mark: Mark) -> None:
        """Record a unit of work; the next commit carries it."""
        self.head = replace(
            self.head,
            marks={**self.head.marks, mark.app_id: mark.version},
            write_id=layout.new_write_id(),
        )

    def fold_marks(self) -> Sequence[Upload]:
        """Where head would carry too many marks: into a checkpoint with them."""
        if len(self.head.marks) <= _MARKS_IN_HEAD:
            return ()
        checkpoint = state.current_checkpoint(self._chain, self.head)
        attempt = layout.on_chain(layout.new_commit_attempt(), self._chain.incarnation)
        ref, uploads = self._checkpoint(checkpoint, attempt)
        self.head = replace(self.head, marks={}, checkpoint=ref)
        return uploads

    def seal(self, checkpoint_interval: int) -> tuple[Commit, Commit] | None:
        """Nothing more is added: the last commit, before it is uploaded, is told what those before
        it have acked, and carries the checkpoint that was due with any of them: so who commits next
        need read none of the others. That commit as it was and as it is now; None where it stays.
        """
        *earlier, last = self.commits
        below, attempt = self._last_on
        numbers = (self.stored.head.commit_id, last.manifest.commit_id)
        due = numbers[0] // checkpoint_interval < numbers[1] // checkpoint_interval
        due = due and last.manifest.checkpoint == below.checkpoint  # else it carries one
        acks = tuple(
            {
                **{name: ack[name] for name in ("namespace", "event_id", "handler_id")},
                "commit_id": commit.manifest.commit_id,
            }
            for commit in earlier
            for ack in commit.manifest.acks
        )
        if not (acks or due):
            return None
        manifest, uploads = last.manifest, [*last.uploads[:-1]]
        if acks:
            together = AckedTogether(acks, self.commits[0].manifest.acks_before)
            manifest = replace(manifest, acked_together=together)
        if due:
            checkpoint = state.next_checkpoint(self._chain, below, manifest, last.path)
            ref, written = self._checkpoint(checkpoint, attempt)
            uploads += written
            manifest = replace(manifest, checkpoint=ref)
            self.head = replace(self.head, checkpoint=ref)
        data = manifest.to_bytes()
        uploads.append(Upload(last.path, data))
        sealed = Commit(manifest, last.path, sha256(data), len(data), uploads)
        self._unpublished.manifests[last.path] = manifest, sealed.sha256
        self.commits[-1] = sealed
        self.manifest = manifest
        self.head = replace(self.head, commit_sha256=sealed.sha256)
        return last, sealed

    def note_published(self) -> None:
        """Head was swung: the chain keeps what it may be asked for next."""
        for ref in self._refs[-1:]:
            self._chain.note_checkpoint(ref, self._unpublished.checkpoints[ref.sha256])
        for commit in self.commits:
            self._chain.note_manifest(commit.path, commit.manifest, commit.sha256, commit.size)
            for upload in commit.uploads:
                if upload.key in self._unpublished.buckets and isinstance(upload.content, bytes):
                    buckets = self._unpublished.buckets[upload.key]
                    self._chain.note_buckets(upload.key, buckets, len(upload.content))

    def _manifest(
        self, draft: Draft, path: str, attempt: str
    ) -> tuple[Manifest, Sequence[tuple[str, bytes]]]:
        """And the buckets of type heads that are part of it."""
        parent, link = self.manifest, self.head.link
        commit_id = self.next_id
        before = self._chain.type_heads_at(self.head)
        heads = next_type_heads(
            before,
            {
                ref: replace(head, commit_id=commit_id, manifest_path=path)
                for ref, head in draft.touched.items()
            }
            | {
                ref: replace(head, commit_id=commit_id, manifest_path=path)
                if head.empty and not head.manifest_path
                else _proven(head, link)
                for ref, head in draft.amended.items()
            },
            link,
            lambda number: layout.type_head_bucket(commit_id, attempt, number),
        )
        manifest = Manifest(
            commit_id=commit_id,
            parent_commit_id=self.head.commit_id if parent is not None else None,
            parent_manifest_path=self.head.manifest_path,
            created_at="",
            runtime_id="",
            metadata=dict(draft.metadata),
            files=tuple(
                replace(file, previous=_previous(before.get(file.ref), link))
                for file in draft.files
            ),
            format=FORMAT,
            log_id=self.head.log_id,
            write_id=layout.new_write_id(),
            kind=draft.kind,
            schema=dict(draft.schema),
            events=tuple(draft.events),
            acks=tuple(draft.acks),
            idempotency=draft.idempotency,
            checkpoint=self.head.checkpoint,
            skip=skip_pointers(parent, link) if parent and link else (),
            type_heads=heads.inline,
            type_head_buckets=heads.table,
            parent_sha256=link.sha256 if link else "",
            marks=dict(self.head.marks),
            events_before=_newest(parent, link, "events"),
            acks_before=_newest(parent, link, "acks"),
            merged=_carried(draft.merged, parent.merged if parent is not None else {}),
            updated=_carried(draft.updated, parent.updated if parent is not None else None),
            merged_marks=dict(draft.merged_marks),
            changes=dict(draft.changes),
        )
        return manifest, heads.uploads

    def _created_at(self, now: datetime) -> str:
        if self.manifest is not None:
            now = max(now, parse_timestamp(self.manifest.created_at))
        return timestamp(now)

    def _checkpoint(
        self, checkpoint: Checkpoint, attempt: str
    ) -> tuple[CheckpointRef, list[Upload]]:
        checkpoint, pages = state.with_pages(checkpoint)
        data = checkpoint.to_bytes()
        key = layout.checkpoint(checkpoint.commit_id, attempt)
        ref = CheckpointRef(key, sha256(data), checkpoint.commit_id)
        self._unpublished.checkpoints[ref.sha256] = checkpoint
        for page, content in pages:
            self._unpublished.pages[sha256(content)] = parse_page(content, key=page)
        self._refs.append(ref)
        return ref, [*(Upload(*page, shared=True) for page in pages), Upload(key, data)]


def _carried(given: T | None, inherited: T) -> T:
    return inherited if given is None else given


def _newest(
    parent: Manifest | None, link: ManifestLink | None, what: Literal["events", "acks"]
) -> ManifestLink | None:
    """The newest manifest from the parent on that carries some, or that does not know."""
    if parent is None:
        return None
    carried, before = (
        (parent.events, parent.events_before)
        if what == "events"
        else (parent.acks or parent.acked_together, parent.acks_before)
    )
    return link if carried or parent.format < _FORMAT_OF_POINTERS else before


def _previous(top: TypeHead | None, link: ManifestLink | None) -> Previous | None:
    """The commit before that wrote rows of a type."""
    if top is None or top.empty:
        return None
    top = _proven(top, link)
    return Previous(top.commit_id, top.manifest_path, top.manifest_sha256)


def _proven(head: TypeHead, parent: ManifestLink | None) -> TypeHead:
    """What the parent wrote about itself lacks the parent's hash."""
    if parent is None or head.manifest_path != parent.path:
        return head
    return replace(head, manifest_sha256=parent.sha256)
