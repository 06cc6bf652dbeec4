"""Requests that are published together, each as a commit of its own, by one swap of head.

Whoever leads takes those that wait, and under the lock those that have come since. Each drafts on
the rows of those before it, which are in memory; what a draft before it has not touched is met as
it is stored. Afterwards what was written stays in memory, so that the next commit reads none of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn, Self

from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import Head, TypeRef
from storage_engine.commitlog.series import Draft, Mark
from storage_engine.commitlog.swap import Base, Committer
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.commit_queue import PendingCommit, Turn
from storage_engine.repository.object.read.files import versioned_schema
from storage_engine.repository.object.read.latest import Resident, ResidentType
from storage_engine.repository.object.stored_schema import FIRST_VERSION
from storage_engine.repository.object.write.commit import CommitRun, Parts
from storage_engine.repository.object.write.reconcile import Delta

log = logging.getLogger(__name__)

Deltas = Mapping[TypeRef, tuple[TypeSpec, Delta]]


class GroupRows:
    """What the drafts of one attempt have written, as of the latest of them."""

    def __init__(self, chain: Chain, stored: Head) -> None:
        self._chain = chain
        self.stored = stored
        self._types: dict[TypeRef, ResidentType] = {}
        self._latest: tuple[Base, Deltas] | None = None

    def of(self, ref: TypeRef) -> ResidentType | None:
        return self._types.get(ref)

    def note(self, base: Base, deltas: Deltas) -> None:
        """A draft was made; it counts from when something builds on it."""
        self._latest = base, deltas

    def bring_to(self, head: Head) -> None:
        """Take in the latest draft, if `head` is of it: it may have come to nothing."""
        if self._latest is None:
            return
        base, deltas = self._latest
        self._latest = None
        if head.commit_id != base.commit_id:
            return
        assert head.manifest_path is not None
        top = (head.commit_id, head.manifest_path)
        for ref, (spec, delta) in deltas.items():
            if ref not in self._types:
                none = versioned_schema(spec).empty_table()
                epoch = (head.log_id, FIRST_VERSION)
                self._types[ref] = ResidentType(spec, none, upto=0, epoch=epoch, top=top)
            self._types[ref].add_commit(delta.rows, head.commit_id, top=top)

    def keep(self, resident: Resident) -> None:
        """They are published: what is kept of the stored rows is brought forward."""
        before = self._chain.type_heads_at(self.stored)
        for ref, rows in self._types.items():
            if ref not in before:
                resident.keep(ref, rows)
                continue
            kept = resident.get(ref)
            was = (before[ref].commit_id, before[ref].manifest_path)
            if kept is not None and kept.top == was:
                kept.add(rows.table(), upto=rows.upto, top=rows.top)


class _Member:
    """A request of the group."""

    def __init__(self, pending: PendingCommit, run: CommitRun, committer: Committer) -> None:
        self.pending = pending
        self.run = run
        self.committer = committer


class GroupRun:
    """Carries out what one turn of the queue takes. Use once, and leave it: whoever is not
    answered then is asked for by the next turn."""

    def __init__(self, parts: Parts, turn: Turn) -> None:
        self._parts = parts
        self._turn = turn
        self._members: list[_Member] = []
        self._rows: GroupRows | None = None
        self._attempts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Also when Ctrl-C came: others are told what is known of theirs."""
        for member in self._members:
            if not member.pending.done and member.committer.decided:
                member.run.settle(member.committer.result)
                self._tell(member)
            unknown = member.committer.unknown
            if not member.pending.done and unknown is not None:
                member.pending.fail(unknown)
        for member in self._members:
            with member.run, member.run:  # twice: Ctrl-C may come at its first instruction
                pass

    def run(self) -> None:
        try:
            if self._publish_is_needed():
                # What was staged is looked at once more on a head that stands.
                staged = any(member.pending.alone for member in self._members)
                self._parts.publisher.publish_together(
                    self._committers, self._joiners, foresee=not staged
                )
                self._remember()
                for member in self._unanswered():
                    member.run.settle(member.committer.result)
                    self._tell(member)
        except Exception as error:
            for member in self._unanswered():
                if not member.committer.decided:  # else that is the answer
                    member.run.settle(partial(_raise, error))
            raise
        finally:
            for member in self._members:
                member.run.clean_up()

    # -- before the lock ----------------------------------------------------------------------

    def _publish_is_needed(self) -> bool:
        """Answer the first ones as far as that needs no commit. What comes after one that does
        may depend on it: that is only looked at."""
        first: _Member | None = None
        for member in self._take():
            if first is not None:
                member.run.look()
                continue
            try:
                if not member.run.answered_unlocked():
                    first = member
                    continue
            except Exception as error:  # noqa: BLE001 - its own
                member.run.settle(partial(_raise, error))
            self._tell(member)
        return first is not None

    # -- under the lock -----------------------------------------------------------------------

    def _committers(self) -> Sequence[Committer]:
        """Everyone whom this attempt is for. Nobody joins after the first one: its attempts are
        counted for all."""
        self._rows = None
        self._attempts += 1
        members = self._unanswered() if self._attempts > 1 else self._take()
        return [member.committer for member in members if not member.committer.decided]

    def _joiners(self) -> Sequence[Committer]:
        """Who has come while the others drafted."""
        if self._attempts > 1:
            return ()
        there = len(self._members)
        self._take()
        return [member.committer for member in self._members[there:]]

    def _take(self) -> list[_Member]:
        members = {id(member.pending) for member in self._members}
        for pending in self._turn.take():
            if id(pending) not in members:
                run = CommitRun(self._parts, pending.request)
                prepare = partial(self._draft, run)
                self._members.append(_Member(pending, run, Committer(prepare)))
        return self._unanswered()

    def _unanswered(self) -> list[_Member]:
        return [member for member in self._members if not member.pending.done]

    def _draft(self, run: CommitRun, base: Base) -> Draft | Mark | None:
        if self._rows is None:
            self._rows = GroupRows(self._parts.chain, base.stored.head)
        self._rows.bring_to(base.head)
        draft = run.draft(base, self._rows if base.version is not base.stored else None)
        if isinstance(draft, Draft):
            self._rows.note(base, run.deltas)
        return draft

    # -- after the CAS ------------------------------------------------------------------------

    def _remember(self) -> None:
        """Keep what was just written, so that the next commit reads none of it."""
        commits = [c for m in self._members if (c := m.committer.published) is not None]
        if not commits or self._rows is None:
            return
        try:
            self._rows.bring_to(commits[-1].head)
            self._rows.keep(self._parts.resident)
        except Exception as error:  # noqa: BLE001 - after the CAS nothing raises
            latest = commits[-1].manifest.commit_id
            log.warning("commit %d is not kept in memory: %s", latest, error)
            for ref in {file.ref for commit in commits for file in commit.manifest.files}:
                self._parts.resident.drop(ref)

    @staticmethod
    def _tell(member: _Member) -> None:
        try:
            answer = member.run.answer()
        except Exception as error:  # noqa: BLE001 - handed to who waits for it
            member.pending.fail(error)
        else:
            member.pending.succeed(answer)


def _raise(error: Exception) -> NoReturn:
    raise error
