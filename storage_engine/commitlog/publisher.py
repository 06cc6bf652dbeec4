"""The writer's nine steps: lock, head, data and manifest, guard, CAS, projections, release.

The commit is made by the CAS on head and by nothing else. Before it, whatever was written is
invisible; after it, nothing raises: projections and the release of the lock are best effort, run
in the background, and report by warnings.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain, HeadVersion, skip_pointers
from storage_engine.commitlog.json_object import (
    Lost,
    StillUnknown,
    Won,
    create,
    write_conditionally,
)
from storage_engine.commitlog.lease_keeper import LINGER_S, LeaseKeeper
from storage_engine.commitlog.lock import Lease, Tenure, WriteLock
from storage_engine.commitlog.records import (
    Checkpoint,
    CheckpointRef,
    CommitFile,
    Head,
    Manifest,
    ManifestLink,
    TypeHead,
    TypeRef,
    UnitVersion,
    parse_timestamp,
    sha256,
    timestamp,
)
from storage_engine.commitlog.type_heads import next_type_heads
from storage_engine.errors import (
    CommitStateUnknownError,
    HeadMismatchError,
    LeaseExpiredError,
    LockContentionError,
    OntologiaError,
    StorageBackendError,
)
from storage_engine.objectstore.parallel import Background
from storage_engine.objectstore.protocol import ObjectStoreError
from storage_engine.process import at_end_of_child

log = logging.getLogger(__name__)

FORMAT = 3
_FORMAT_OF_POINTERS = 2  # manifests of earlier formats do not name the carriers before them
_MARKS_IN_HEAD = 256


@dataclass(frozen=True, slots=True)
class Upload:
    """An immutable object to write before the CAS: bytes, or a local file.

    `shared`: named by its content, so that others may have written it and rely on it.
    """

    key: str
    content: bytes | Path
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Base:
    """What an attempt builds on: the head it read, and the names it will write under."""

    version: HeadVersion
    manifest: Manifest | None
    attempt: str
    lease: Lease

    @property
    def head(self) -> Head:
        return self.version.head

    @property
    def commit_id(self) -> int:
        return self.version.head.commit_id + 1


@dataclass(frozen=True, slots=True)
class Draft:
    """What an attempt wants to publish."""

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


@dataclass(frozen=True, slots=True)
class Mark:
    """A unit of work that changes nothing: it is recorded in head, without a commit."""

    app_id: str
    version: UnitVersion


@dataclass(frozen=True, slots=True)
class PublishedCommit:
    """A commit that stands."""

    base: Base
    manifest: Manifest
    manifest_path: str
    attempts: int
    lock_wait_ms: float
    carried: TypeRef | None = None  # the type whose snapshot it published too

    @property
    def head(self) -> Head:
        """As this commit has made it, whatever came since."""
        return replace(
            self.base.head,
            commit_id=self.manifest.commit_id,
            manifest_path=self.manifest_path,
            commit_sha256=None,
            checkpoint=self.manifest.checkpoint,
            marks={},
        )


class WaitingSnapshot(Protocol):
    """A snapshot whose files are in the store. A commit carries it: its checkpoint has the
    snapshot in the place of what was merged, and its CAS publishes both."""

    ref: TypeRef
    refused: bool  # one of `checks` found so: it must not be published
    published: bool

    @property
    def checks(self) -> Sequence[Callable[[], None]]:
        """Sent beside the uploads, as they hold only from when head was read; they never raise."""

    def place(self, checkpoint: Checkpoint) -> Checkpoint:
        """With the snapshot, or as it is when that no longer fits."""


class WaitingSnapshots(Protocol):
    def carry(self) -> AbstractContextManager[WaitingSnapshot | None]:
        """One for an attempt to publish; it waits on afterwards unless `published` was set."""


Prepare = Callable[[Base], Draft | Mark | None]
Projector = Callable[[PublishedCommit], Sequence[Callable[[], object]]]


class Publisher:
    """Publishes drafts, one at a time, for one opened storage."""

    def __init__(
        self,
        chain: Chain,
        lock: WriteLock,
        *,
        runtime_id: str,
        max_attempts: int,
        checkpoint_interval: int,
        project: Projector,
        warn: Callable[[str], None],
    ) -> None:
        self._chain = chain
        self._store = chain.store
        self._parallel = chain.parallel
        self._lock = lock
        self._runtime_id = runtime_id
        self._max_attempts = max_attempts
        self._checkpoint_interval = checkpoint_interval
        self._project = project
        self._warn = warn
        self.waiting: WaitingSnapshots | None = None
        self._leases = LeaseKeeper(LINGER_S if chain.store.timers else 0.0)
        self._finishing: Background[None] | None = None
        self._mutex = threading.Lock()

    def publish(self, prepare: Prepare) -> PublishedCommit | None:
        """Run `prepare` on the head under the lock and publish what it drafts.

        None when it drafts nothing, or a mark alone. `prepare` runs again on the new head after a
        lost CAS, and what it raises ends the attempt with nothing published.
        """
        with self._mutex, Tenure() as tenure, tenure:
            waited_ms = 0.0
            attempt = 0
            lease: Lease | None = None
            while attempt < self._max_attempts:
                attempt += 1
                if attempt > 1:
                    self._back_off(attempt)
                lease, version, wait = self._begin(tenure, lease)
                waited_ms += wait
                base = Base(version, None, layout.new_commit_attempt(), lease)
                base = replace(base, manifest=self._chain.head_manifest(version.head))
                draft = prepare(base)
                published: PublishedCommit | None = None
                if isinstance(draft, Draft):
                    with self.waiting.carry() if self.waiting else nullcontext() as snapshot:
                        published = self._attempt(base, draft, attempt, waited_ms, snapshot)
                        if snapshot is not None and snapshot.refused:
                            attempt -= 1  # nobody came first: the next one goes without it
                    done = published is not None
                else:
                    done = draft is None or self._record(base, draft)
                if done:
                    self._finish(published, lease)
                    tenure.hand_over(lease)
                    return published
                if not (lease.contended and lease.renew()):  # in line, we would be the last again
                    tenure.give_back()
                    lease = None
            raise HeadMismatchError(self._max_attempts)

    @property
    def pending(self) -> bool:
        """Whether projections of our own latest commit are still on their way."""
        return self._finishing is not None and not self._finishing.done

    def flush(self) -> None:
        """Wait until projections are written and the lock is given back."""
        if self._parallel.elsewhere:
            return  # the parent's, which sees to it
        self._leases.stop_lingering()
        if (finishing := self._finishing) is not None:
            finishing.wait()

    # -- steps --------------------------------------------------------------------------------

    def _begin(self, tenure: Tenure, held: Lease | None = None) -> tuple[Lease, HeadVersion, float]:
        """Lock and head together: the CAS makes an early head read safe."""
        if held is not None:
            return held, self._chain.read_head(), 0.0
        head = self._chain.known_head()
        lease = self._leases.take_over(tenure)
        if lease is not None and head is not None:
            return lease, head, 0.0  # we published it and have held the lock since
        started = self._store.now()
        read: Lease | HeadVersion | BaseException | None = None
        if not self._lock.passed_on:
            requests: list[Callable[[], Lease | HeadVersion | None]] = [
                partial(self._lock.try_acquire, tenure),
                self._chain.read_head,
            ]
            acquired, read = self._parallel.gather_outcomes(requests)
            if isinstance(acquired, BaseException):
                raise acquired
            lease = acquired if isinstance(acquired, Lease) else None
        if lease is None:
            lease = self._lock.acquire(tenure, tried=True, early=self._is_past)
            read = self._chain.known_head() if self._is_told(lease) else None
        version = read if isinstance(read, HeadVersion) else self._chain.read_head()
        waited = (self._store.now() - started).total_seconds() * 1000
        return lease, version, waited

    def _is_past(self, commit_id: int) -> bool:
        """Whether head names a later commit."""
        return self._chain.read_head().head.commit_id > commit_id

    def _is_told(self, lease: Lease) -> bool:
        """Whether we have read the head that a lease begins with: what its holder before left."""
        known = self._chain.known_head()
        return lease.promised or (
            known is not None and known.head.commit_id == lease.head_commit_id
        )

    def _attempt(
        self,
        base: Base,
        draft: Draft,
        attempt: int,
        waited_ms: float,
        snapshot: WaitingSnapshot | None,
    ) -> PublishedCommit | None:
        path = layout.manifest(base.commit_id, base.attempt)
        manifest, buckets = self._manifest(base, draft, path)
        uploads = [*draft.uploads, *(Upload(key, data) for key, data in buckets)]
        checkpoint_ref = base.head.checkpoint
        due = base.commit_id % self._checkpoint_interval == 0
        if snapshot is not None or draft.purged or due:
            checkpoint = state.next_checkpoint(self._chain, base.head, manifest, path)
            checkpoint = state.without_rows(checkpoint, draft.purged)
            if snapshot is not None:
                checkpoint = snapshot.place(checkpoint)
            checkpoint_ref, written = self._checkpoint(checkpoint, base.attempt)
            uploads += written
            manifest = replace(manifest, checkpoint=checkpoint_ref)
        data = manifest.to_bytes()
        uploads.append(Upload(path, data))
        created: list[Upload] = []
        try:
            taken = self._upload(uploads, created, snapshot)
            if taken is None:
                base.lease.guard()
        except (LeaseExpiredError, LockContentionError, StorageBackendError):
            self._discard(created)  # no CAS was sent: certainly not published
            raise
        if taken is not None:
            # It may be named by head by now: nothing of that name is touched.
            log.warning("%s is there already: the commit is tried under another name", taken)
            return None
        if snapshot is not None and snapshot.refused:
            self._discard(uploads)  # the next attempt goes without it
            return None
        head = Head(
            commit_id=base.commit_id,
            manifest_path=path,
            updated_at=timestamp(self._store.now()),
            runtime_id=self._runtime_id,
            log_id=base.head.log_id,
            write_id=manifest.write_id,
            commit_sha256=sha256(data),
            checkpoint=checkpoint_ref,
        )
        won = self._swap_head(base, head)
        if won is None:
            self._discard(uploads)
            return None
        if won.etag:
            self._chain.note_head(HeadVersion(head, won.etag))
        self._chain.note_manifest(path, manifest, data)
        for key, content in buckets:
            self._chain.note_buckets(key, content)
        carried = None
        if snapshot is not None:
            snapshot.published = True
            carried = snapshot.ref
        return PublishedCommit(base, manifest, path, attempt, waited_ms, carried)

    def _record(self, base: Base, mark: Mark) -> bool:
        """Swing head to itself with a mark; whether that has won. Not if head moved on: then the
        unit is looked at again, and may find itself recorded."""
        head = replace(
            base.head,
            marks={**base.head.marks, mark.app_id: mark.version},
            write_id=layout.new_write_id(),
        )
        if len(head.marks) > _MARKS_IN_HEAD:
            checkpoint = state.current_checkpoint(self._chain, head)
            ref, uploads = self._checkpoint(checkpoint, base.attempt)
            if self._upload(uploads, []) is not None:
                return False
            head = replace(head, marks={}, checkpoint=ref)
        base.lease.guard()
        try:
            outcome = self._write_head(base, head)
        except StillUnknown as error:
            raise _unknown(head) from error
        if isinstance(outcome, Won):
            self._chain.note_head(HeadVersion(head, outcome.etag))
            return True
        return False

    def _manifest(
        self, base: Base, draft: Draft, path: str
    ) -> tuple[Manifest, Sequence[tuple[str, bytes]]]:
        """And the buckets of type heads that are part of it."""
        parent, link = base.manifest, base.head.link
        created_at = self._store.now()
        if parent is not None:
            created_at = max(created_at, parse_timestamp(parent.created_at))
        heads = next_type_heads(
            self._chain.type_heads_at(base.head),
            {
                ref: replace(head, commit_id=base.commit_id, manifest_path=path)
                for ref, head in draft.touched.items()
            }
            | {
                ref: replace(head, commit_id=base.commit_id, manifest_path=path)
                if head.empty and not head.manifest_path
                else proven_head(head, link)
                for ref, head in draft.amended.items()
            },
            link,
            lambda number: layout.type_head_bucket(base.commit_id, base.attempt, number),
        )
        manifest = Manifest(
            commit_id=base.commit_id,
            parent_commit_id=base.head.commit_id if parent is not None else None,
            parent_manifest_path=base.head.manifest_path,
            created_at=timestamp(created_at),
            runtime_id=self._runtime_id,
            metadata=dict(draft.metadata),
            files=tuple(draft.files),
            format=FORMAT,
            log_id=base.head.log_id,
            write_id=layout.new_write_id(),
            kind=draft.kind,
            schema=dict(draft.schema),
            events=tuple(draft.events),
            acks=tuple(draft.acks),
            idempotency=draft.idempotency,
            checkpoint=base.head.checkpoint,
            skip=skip_pointers(parent, link) if parent and link else (),
            type_heads=heads.inline,
            type_head_buckets=heads.table,
            parent_sha256=link.sha256 if link else "",
            marks=dict(base.head.marks),
            events_before=_newest(parent, link, "events"),
            acks_before=_newest(parent, link, "acks"),
        )
        return manifest, heads.uploads

    def _checkpoint(
        self, checkpoint: Checkpoint, attempt: str
    ) -> tuple[CheckpointRef, list[Upload]]:
        checkpoint, pages = state.with_pages(checkpoint)
        data = checkpoint.to_bytes()
        key = layout.checkpoint(checkpoint.commit_id, attempt)
        ref = CheckpointRef(key, sha256(data), checkpoint.commit_id)
        self._chain.note_checkpoint(ref, checkpoint)
        return ref, [*(Upload(*page, shared=True) for page in pages), Upload(key, data)]

    def _upload(
        self,
        uploads: Sequence[Upload],
        created: list[Upload],
        snapshot: WaitingSnapshot | None = None,
    ) -> str | None:
        """Create all of them, noting in `created` what is ours; or the key of one that exists with
        other bytes: another attempt has drawn the same name."""
        taken: list[str] = []

        def write(upload: Upload, content: bytes) -> None:
            if create(self._store, upload.key, content):
                created.append(upload)
            else:
                taken.append(upload.key)

        def write_file(upload: Upload, path: Path) -> None:
            created.append(upload)
            self._store.put_file(upload.key, path)

        small = [(u, u.content) for u in uploads if isinstance(u.content, bytes)]
        requests: list[Callable[[], None]] = [partial(write, *upload) for upload in small]
        requests += snapshot.checks if snapshot is not None else ()
        self._parallel.gather(requests)
        if not taken:
            # Put without a condition: whoever has created the manifest owns these names.
            large = [(u, u.content) for u in uploads if isinstance(u.content, Path)]
            self._parallel.gather([partial(write_file, *upload) for upload in large])
        return next(iter(taken), None)

    def _swap_head(self, base: Base, head: Head) -> Won | None:
        try:
            outcome = self._write_head(base, head)
            if isinstance(outcome, Won):
                return outcome
        except StillUnknown as error:
            raise _unknown(head) from error
        try:
            return Won("") if self._is_ancestor(outcome, head) else None
        except OntologiaError as error:  # whether ours is below cannot be told
            raise _unknown(head) from error

    def _write_head(self, base: Base, head: Head) -> Won | Lost:
        return write_conditionally(
            self._store,
            self._chain.head_key,
            head.to_bytes(),
            write_id=head.write_id,
            etag=base.version.etag,
        )

    def _is_ancestor(self, outcome: Lost, ours: Head) -> bool:
        """Our commit has also won when another writer has already built on it."""
        if outcome.current is None:
            return False
        now = Head.parse(outcome.current.data, key=self._chain.head_key)
        self._chain.note_head(HeadVersion(now, outcome.current.etag))
        there = self._chain.locate(now, ours.commit_id)
        return there is not None and there.path == ours.manifest_path

    def _discard(self, uploads: Sequence[Upload]) -> None:
        """Delete what a certainly unpublished attempt wrote, as far as that goes."""
        try:
            self._store.delete_many([upload.key for upload in uploads if not upload.shared])
        except (ObjectStoreError, StorageBackendError) as error:
            log.info("orphans of a lost attempt stay for garbage collection: %s", error)

    def _back_off(self, attempt: int) -> None:
        ceiling = min(1.0, 0.01 * 2 ** (attempt - 1))
        self._store.sleep(ceiling * random.uniform(0.5, 1.0) + random.uniform(0, 0.02))

    # -- after the CAS ------------------------------------------------------------------------

    def _finish(self, published: PublishedCommit | None, lease: Lease) -> None:
        earlier = self._finishing
        if published is not None:
            lease.note_commit(published.manifest.commit_id)
        if lease.contended:
            self._lock.note_passed_on(True)  # it will be, in a moment

        def finish() -> None:
            if earlier is not None:
                earlier.settle()  # its index versions are what ours replace
            projections: Sequence[Callable[[], object]] = ()
            if published is not None:
                try:
                    projections = self._project(published)
                except Exception as error:  # noqa: BLE001 - after the CAS nothing raises
                    self._warn(f"after commit {published.manifest.commit_id}: {error}")
            release = self._leases.lingering_release(lease)
            for outcome in self._parallel.gather_outcomes([*projections, release]):
                if isinstance(outcome, Exception):
                    self._warn(f"after commit: {outcome}")
                elif isinstance(outcome, BaseException):
                    raise outcome

        self._finishing = self._parallel.start(finish)
        _note_unfinished(self._finishing)


_unfinished: list[Background[None]] = []  # of all publishers of this process, the latest ones


def _note_unfinished(background: Background[None]) -> None:
    _unfinished[:] = [earlier for earlier in _unfinished if not earlier.done]
    _unfinished.append(background)
    at_end_of_child(_finish_all)


def _finish_all() -> None:
    for background in _unfinished:
        if not background.elsewhere:
            background.settle()


def _newest(
    parent: Manifest | None, link: ManifestLink | None, what: Literal["events", "acks"]
) -> ManifestLink | None:
    """The newest manifest from the parent on that carries some, or that does not know."""
    if parent is None:
        return None
    carried, before = (
        (parent.events, parent.events_before)
        if what == "events"
        else (parent.acks, parent.acks_before)
    )
    return link if carried or parent.format < _FORMAT_OF_POINTERS else before


def proven_head(head: TypeHead, parent: ManifestLink | None) -> TypeHead:
    """What the parent wrote about itself lacks the parent's hash."""
    if parent is None or head.manifest_path != parent.path:
        return head
    return replace(head, manifest_sha256=parent.sha256)


def _unknown(head: Head) -> CommitStateUnknownError:
    return CommitStateUnknownError(
        commit_id=head.commit_id, manifest_path=head.manifest_path or "", write_id=head.write_id
    )
