"""One attempt at a swap of head: draft, upload, guard, swap, and tell each what became of it.

Several may ask for a commit at once. Each drafts on what those before it have drafted, all of it is
uploaded together, and the one swap publishes it all or nothing. So whatever was learned from an
earlier draft (nothing to do, applied already, refused) is true only once the swap has been won; one
that fails by itself leaves the others alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from storage_engine.commitlog import ahead, layout
from storage_engine.commitlog.chain import Chain, HeadVersion
from storage_engine.commitlog.json_object import (
    Lost,
    StillUnknown,
    Won,
    create,
    write_conditionally,
)
from storage_engine.commitlog.lock import Lease
from storage_engine.commitlog.records import Checkpoint, Head, Manifest, TypeRef
from storage_engine.commitlog.series import Commit, Draft, Mark, Series, Upload
from storage_engine.errors import (
    CommitStateUnknownError,
    IntegrityError,
    LeaseExpiredError,
    LockContentionError,
    OntologiaError,
    StorageBackendError,
)
from storage_engine.objectstore.parallel import Gathering
from storage_engine.objectstore.protocol import ObjectStore, ObjectStoreError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Base:
    """What a draft builds on: a head with its manifest, and the names to write under.

    `version` is the head as the drafts before leave it, `stored` the one in the store.
    """

    version: HeadVersion
    manifest: Manifest | None
    attempt: str
    lease: Lease
    stored: HeadVersion

    @property
    def head(self) -> Head:
        return self.version.head

    @property
    def commit_id(self) -> int:
        return self.version.head.commit_id + 1


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


Prepare = Callable[[Base], Draft | Mark | None]


class Committer:
    """One who asks for a commit: how it drafts, and what became of it."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare
        self.decided = False
        self._outcome: PublishedCommit | Exception | None = None
        # While head may have been swung to its commit, or to one that its answer rests on: what to
        # tell if nobody learns whether it was.
        self.unknown: CommitStateUnknownError | None = None

    def decide(self, outcome: PublishedCommit | Exception | None) -> None:
        """For good."""
        self._outcome = outcome
        self.decided = True

    @property
    def published(self) -> PublishedCommit | None:
        """Its commit, if there is one."""
        return self._outcome if isinstance(self._outcome, PublishedCommit) else None

    def result(self) -> PublishedCommit | None:
        """None when it drafted nothing, or a mark alone. Raises what was its own fault."""
        assert self.decided
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


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


@dataclass(frozen=True, slots=True)
class _Learned:
    """What a committer is to be told. `commit` is its own; `waits`: it is true only once the swap
    has been won, as it is of what this committer drafted, or may rest on what others did."""

    committer: Committer
    outcome: PublishedCommit | Exception | None
    commit: Commit | None
    waits: bool
    confirm: Callable[[], bool] | None = None


class _Uploads:
    """What one attempt writes before its swap, on its way from when it is sent."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._via = store  # for what is small
        self._gathering: Gathering | None = None
        self._small: list[_Learned | None] = []  # whose they are
        self._large: list[tuple[_Learned | None, Callable[[], None]]] = []
        self.created: list[Upload] = []
        self.taken: list[str] = []  # names that somebody else has given
        self.outdated = False  # something that a draft was made from has changed

    def send(self, owner: _Learned | None, upload: Upload, *, many: bool) -> None:
        """`many`, at the first one: through what takes many at once."""
        if isinstance(upload.content, Path):
            self._large.append((owner, partial(self._put_file, upload, upload.content)))
            return
        self._add(owner, partial(self._create, upload, upload.content), many=many)

    def ask(self, owner: _Learned, confirm: Callable[[], bool]) -> None:
        """Look beside the uploads whether what was drafted from still stands."""
        self._add(owner, partial(self._confirm, confirm), many=False)

    def finish(self, checks: Sequence[Callable[[], None]]) -> list[tuple[_Learned | None, object]]:
        """Wait for all, with `checks` beside them, which never raise; how each ended, and whose it
        is."""
        outcomes: list[tuple[_Learned | None, object]] = []
        if self._gathering is not None:
            for check in checks:
                self._gathering.add(check)
            outcomes += zip(self._small, self._gathering.outcomes(), strict=False)
        if not self.taken:
            # Put without a condition: whoever has created the manifest owns these names.
            ended = self._via.parallel.gather_outcomes([thunk for _, thunk in self._large])
            outcomes += zip((owner for owner, _ in self._large), ended, strict=True)
        return outcomes

    def _add(self, owner: _Learned | None, request: Callable[[], None], *, many: bool) -> None:
        if self._gathering is None:
            self._via = self._store.bulk if many else self._store
            self._gathering = self._via.parallel.gathering()
        self._small.append(owner)
        self._gathering.add(request)

    def _confirm(self, confirm: Callable[[], bool]) -> None:
        if not confirm():
            self.outdated = True

    def _create(self, upload: Upload, content: bytes) -> None:
        if create(self._via, upload.key, content):
            self.created.append(upload)
        else:
            self.taken.append(upload.key)

    def _put_file(self, upload: Upload, path: Path) -> None:
        self.created.append(upload)
        self._store.put_file(upload.key, path)


class Swap:
    """Under one lease, on one head. Use once."""

    def __init__(
        self,
        chain: Chain,
        lease: Lease,
        version: HeadVersion,
        *,
        number: int,
        waited_ms: float,
        runtime_id: str,
        checkpoint_interval: int,
        waiting: WaitingSnapshots | None,
    ) -> None:
        self._chain = chain
        self._store = chain.store
        self._lease = lease
        self._number = number
        self._waited_ms = waited_ms
        self._runtime_id = runtime_id
        self._checkpoint_interval = checkpoint_interval
        self._waiting = waiting
        self._snapshot: WaitingSnapshot | None = None
        self._series = Series(chain, version)
        self._uploads = _Uploads(chain.store)
        self._sent = 0  # of the answers, those whose uploads are on their way
        self._answers: list[_Learned] = []
        self._alone = False  # whether only one was there to begin with
        self.published: Sequence[PublishedCommit] = ()  # oldest first
        self.settled = False  # else those who are not decided try again
        self.counts = True  # whether head moved, so that it was an attempt in vain
        self.failed = False  # nothing was published, and something went wrong

    def run(
        self, committers: Sequence[Committer], join: Callable[[], Sequence[Committer]] = tuple
    ) -> None:
        """`join`: who has come since, and is decided with them."""
        self._alone = len(committers) == 1
        with self._series, ExitStack() as carried:
            while committers:
                for committer in committers:
                    self._draft(committer, carried)
                    if self._answers[-1].commit is not None and not self._in_doubt():
                        # What is not the last any more, while the next ones draft.
                        self._send(len(self._answers) - 1)
                committers = join()
            if self._in_doubt() or not (self._series.moved or self._stands_as_told()):
                self._draft_again()
            elif not self._series.moved:
                self.failed = any(isinstance(a.outcome, Exception) for a in self._answers)
                self._decide()
            elif self._upload():
                self._swap()

    # -- drafts -------------------------------------------------------------------------------

    def _draft(self, committer: Committer, carried: ExitStack) -> None:
        series = self._series
        base = Base(
            series.version,
            series.manifest,
            layout.on_chain(self._attempt(), self._chain.incarnation),
            self._lease,
            series.stored,
        )
        outcome: PublishedCommit | Exception | None = None
        commit: Commit | None = None
        confirm: Callable[[], bool] | None = None
        try:
            draft = committer.prepare(base)
            if isinstance(draft, Draft):
                commit, outcome = self._add(base, draft, carried)
                confirm = draft.confirm
            elif draft is not None:
                series.mark(draft)
        except Exception as error:  # noqa: BLE001 - its own; the others go on without it
            outcome = error
        self._answers.append(_Learned(committer, outcome, commit, series.moved, confirm))

    def _attempt(self) -> str:
        """Who builds on it before head names it takes the first commit for the only one."""
        if self._alone and not self._answers:
            return self._lease.take_attempt()
        return layout.new_commit_attempt()

    def _add(self, base: Base, draft: Draft, carried: ExitStack) -> tuple[Commit, PublishedCommit]:
        """The first one carries the snapshot that waits."""
        snapshot: WaitingSnapshot | None = None
        if not self._series.commits and self._snapshot is None and self._waiting is not None:
            snapshot = carried.enter_context(self._waiting.carry())
        commit = self._series.add(
            draft,
            attempt=base.attempt,
            now=self._store.now(),
            runtime_id=self._runtime_id,
            place=snapshot.place if snapshot is not None else None,
        )
        if snapshot is not None:
            self._snapshot = snapshot  # now that a commit has it
        return commit, PublishedCommit(
            base,
            commit.manifest,
            commit.path,
            self._number,
            self._waited_ms,
            snapshot.ref if snapshot is not None else None,
        )

    def _in_doubt(self) -> bool:
        """Whether something was learned from a foreseen head that is true only of one that stands:
        that there is nothing to do, or an error, as what its manifest names may not be there yet.
        """
        if not self._series.stored.foreseen:
            return False
        failed = any(isinstance(answer.outcome, Exception) for answer in self._answers)
        return failed or not self._series.moved

    def _stands_as_told(self) -> bool:
        """Whether the head that came with the lock is the one that stands, as some swing it without
        the lock. A swap finds that out by itself; an answer without one would be of the past."""
        told, stored = self._lease.left_head, self._series.stored
        if told is None or told.etag != stored.etag:
            return True  # we have read it
        version = self._chain.read_head()
        self._lease.note_head(version)
        return version.etag == stored.etag

    def _draft_again(self) -> None:
        """What was foreseen or told is no base for this: drop it, and take a head that stands."""
        self._uploads.finish(())
        self._discard(self._uploads.created)
        self.counts = False

    # -- uploads ------------------------------------------------------------------------------

    def _send(self, upto: int) -> None:
        """Upload what was drafted since the last time, without waiting for it."""
        many = len(self._series.commits) > 1
        for answer in self._answers[self._sent : upto]:
            for upload in answer.commit.uploads if answer.commit is not None else ():
                self._uploads.send(answer, upload, many=many)
        self._sent = max(upto, self._sent)

    def _seal(self) -> None:
        """The last commit is as it will be stored only when nobody drafts any more."""
        sealed = self._series.seal(self._checkpoint_interval) if self._series.commits else None
        for number, answer in enumerate(self._answers if sealed is not None else ()):
            if sealed is not None and answer.commit is sealed[0]:
                assert isinstance(answer.outcome, PublishedCommit)
                outcome = replace(answer.outcome, manifest=sealed[1].manifest)
                self._answers[number] = replace(answer, outcome=outcome, commit=sealed[1])

    def _upload(self) -> bool:
        """Whether head may be swung now. If not, nothing was published."""
        uploads = self._uploads
        foreseen = self._series.stored.foreseen
        try:
            self._seal()
        except (ObjectStoreError, OntologiaError):
            if not foreseen:
                raise
            self._draft_again()
            return False
        self._send(len(self._answers))
        for upload in self._series.fold_marks():
            uploads.send(None, upload, many=False)
        for answer in self._answers:
            if answer.confirm is not None and not foreseen:
                uploads.ask(answer, answer.confirm)
        checks = self._snapshot.checks if self._snapshot is not None else ()
        outcomes = uploads.finish(() if foreseen else checks)
        if self._leave_failed(outcomes, uploads.created):
            return False
        if uploads.outdated:
            self._discard(uploads.created)
            return False
        if uploads.taken:
            # It may be named by head by now: nothing of that name is touched.
            taken = uploads.taken[0]
            log.warning("%s is there already: the commit is tried under another name", taken)
            return False
        try:
            self._lease.guard()
        except (LeaseExpiredError, LockContentionError, StorageBackendError, IntegrityError):
            self._discard(uploads.created)  # no CAS was sent: certainly not published
            raise
        if foreseen and not self._stand_as_foreseen(checks):
            self._discard(uploads.created)
            self.counts = False
            return False
        if self._snapshot is not None and self._snapshot.refused:
            self._discard(uploads.created)  # the next attempt goes without it
            self.counts = False
            return False
        return True

    def _stand_as_foreseen(self, checks: Sequence[Callable[[], None]]) -> bool:
        """Whether head is what this was drafted on, now that the lock is ours; `checks` hold only
        from when that is known."""
        version = self._lease.left_head or self._chain.read_head()
        if not ahead.matches(self._series.stored.head, version.head):
            return False
        if any(answer.confirm is not None for answer in self._answers):
            return False  # they are asked at the next attempt, on a head that was read
        self._series.stored = version
        self._store.parallel.gather_outcomes(checks)
        return True

    def _leave_failed(
        self,
        outcomes: Sequence[tuple[_Learned | None, object]],
        created: Sequence[Upload],
    ) -> bool:
        """Whether an upload has failed: then those whose uploads they were leave, and the others
        are drafted anew without them."""
        failures = [(a, o) for a, o in outcomes if isinstance(o, BaseException)]
        if not failures:
            return False
        for _, error in failures:
            if not isinstance(error, Exception):
                raise error
        self._discard(created)
        self.counts = False
        for answer, error in failures:
            assert isinstance(error, Exception)
            if answer is None:
                raise error
            if not answer.committer.decided:
                answer.committer.decide(error)
        self.settled = all(answer.committer.decided for answer in self._answers)
        self.failed = True
        return True

    def _discard(self, uploads: Sequence[Upload]) -> None:
        """Delete what a certainly unpublished attempt wrote, as far as that goes."""
        try:
            self._store.delete_many([upload.key for upload in uploads if not upload.shared])
        except (ObjectStoreError, StorageBackendError) as error:
            log.info("orphans of a lost attempt stay for garbage collection: %s", error)

    # -- the swap -----------------------------------------------------------------------------

    def _swap(self) -> None:
        series = self._series
        for answer in self._answers:
            if answer.waits:
                answer.committer.unknown = _unknown(answer.commit, series.head)
        self._lease.note_head(None)
        try:
            outcome = write_conditionally(
                self._store,
                self._chain.head_key,
                series.head.to_bytes(),
                write_id=series.head.write_id,
                etag=series.stored.etag,
            )
            won = isinstance(outcome, Won)
            if isinstance(outcome, Lost):
                won = self._is_ancestor(outcome)
                if not won and outcome.unanswered and not self._stands(outcome):
                    # A branch that ours may have been the last commit of: what it named may be
                    # part of the parent by now.
                    raise StillUnknown(self._chain.head_key)
        except StillUnknown as error:
            self._decide_unknown(error)
            return
        except StorageBackendError:
            self._forget_unknown()  # refused: it did not land
            raise
        if not won:
            self._discard([u for commit in series.commits for u in commit.uploads])
            self._forget_unknown()
            return
        if isinstance(outcome, Won):
            stands = HeadVersion(series.head, outcome.etag)
            self._chain.note_head(stands)
            self._lease.note_head(stands)
        series.note_published()
        if self._snapshot is not None:
            self._snapshot.published = True
        self._decide()

    def _is_ancestor(self, outcome: Lost) -> bool:
        """Our commits have also won when another writer has already built on them."""
        if outcome.current is None or not self._series.commits:
            return False
        ours = self._series.commits[-1]
        try:
            now = Head.parse(outcome.current.data, key=self._chain.head_key)
            if not self._chain.is_ours(now):
                return False
            self._chain.note_head(HeadVersion(now, outcome.current.etag))
            there = self._chain.locate(now, ours.manifest.commit_id)
        except OntologiaError as error:  # whether ours is below cannot be told
            raise StillUnknown(self._chain.head_key) from error
        return there is not None and there.path == ours.path

    def _stands(self, outcome: Lost) -> bool:
        """Whether what was found in the place of our head is a later one of it."""
        if outcome.current is None:
            return False
        return self._chain.is_ours(Head.parse(outcome.current.data, key=self._chain.head_key))

    def _decide(self) -> None:
        for answer in self._answers:
            answer.committer.decide(answer.outcome)
        outcomes = [answer.outcome for answer in self._answers]
        self.published = [each for each in outcomes if isinstance(each, PublishedCommit)]
        self.settled = True

    def _decide_unknown(self, cause: StillUnknown) -> None:
        """Nobody can tell: neither those who have drafted, nor those whose answer rests on it."""
        for answer in self._answers:
            error = answer.committer.unknown
            if error is not None:
                error.__cause__ = cause
            answer.committer.decide(error if error is not None else answer.outcome)
        self.settled = self.failed = True

    def _forget_unknown(self) -> None:
        for answer in self._answers:
            answer.committer.unknown = None


def _unknown(commit: Commit | None, head: Head) -> CommitStateUnknownError:
    """Of a commit of its own, or of what it rests on."""
    if commit is None:
        return CommitStateUnknownError(
            commit_id=head.commit_id, manifest_path=head.manifest_path or "", write_id=head.write_id
        )
    return CommitStateUnknownError(
        commit_id=commit.manifest.commit_id,
        manifest_path=commit.path,
        write_id=commit.manifest.write_id,
    )
