"""The head that a lock is handed over with: whoever swings head otherwise than by a commit says so,
or the next one would take an older head for what stands, and believe what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from storage_engine.commitlog import layout
from storage_engine.commitlog.branches import protect_branch
from storage_engine.commitlog.chain import HeadVersion
from storage_engine.commitlog.line import TicketLine
from storage_engine.commitlog.lock import Lease, Tenure, WriteLock
from storage_engine.commitlog.replay import Replay, ReplayedCommit
from storage_engine.config import OntologiaConfig
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.process import identity
from storage_engine.repository.object import admin
from tests.commitlog.support import World, Writer, at
from tests.engines import CUSTOMER, customer, rows_of


def fence(writer: Writer) -> None:
    sweep(writer.repo, plan_gc(writer.repo, grace=timedelta()))


def copy(writer: Writer) -> None:
    head = writer.repo.chain.read_head().head
    replayed = ReplayedCommit(
        head.commit_id + 1, "0" * 8, head.updated_at, "other", "data", {}, (), (), {}
    )
    repo = writer.repo
    replay = Replay(repo.chain, repo.lock, runtime_id="copy", checkpoint_interval=100)
    replay.publish([replayed], "elsewhere")


def erase(writer: Writer) -> None:
    etag = writer.repo.chain.read_head().etag
    admin.erase(writer.store, "v2", OntologiaConfig(), head_etag=etag)


@pytest.mark.parametrize("swing", [fence, copy, erase], ids=lambda each: each.__name__)
def test_who_swings_head_without_a_commit_hands_no_head_over(
    world: World, monkeypatch: pytest.MonkeyPatch, swing: Callable[[Writer], None]
) -> None:
    """It has waited in line, was told the head that it began with, and somebody waits behind it."""
    writer = world.open("ours")
    writer.put(customer("a"))
    writer.repo.flush()
    world.backend.write(layout.manifest(2, "f" * 8), b"of an attempt that failed")
    acquire = WriteLock.acquire
    handed: list[bytes] = []

    def acquire_in_line(self: WriteLock, tenure: Tenure | None = None) -> Lease:
        lease = acquire(self, tenure)
        lease.stands_in_line(self.place(lease.token))
        lease.note_head(writer.repo.chain.read_head())
        return lease

    def give_back(self: Lease) -> None:
        store = world.backend.client("behind")
        line = TicketLine(store, layout.line_of(layout.LOCK) or "")
        place = line.place("1" * 32, owner_id="behind", patience_ms=60_000)
        place.ticket = place.ticket._replace(machine="", pid=0, started=0)
        line.join(place, owner_id="behind", holder={})
        released(self)
        handed.append(world.backend.objects()[layout.LOCK])

    released = Lease._give_back
    monkeypatch.setattr(WriteLock, "acquire", acquire_in_line)
    monkeypatch.setattr(Lease, "_give_back", give_back)
    before = world.head()
    swing(writer)
    assert world.head().write_id != before.write_id, "head was swung"
    assert handed
    lease = writer.repo.lock._new_lease(None)
    state = writer.repo.lock.read()
    assert state is not None
    assert state.offered
    assert lease.hold_offer(state) or lease.accept(state)
    assert lease.left_head is None


def test_who_misses_its_turn_by_a_moment_waits_for_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offer is held without a word, for a second. Who stood still for longer finds that somebody
    else has taken it: nothing was published, and that is nobody's error."""
    writer, other = world.open("ours"), world.open("other")
    writer.put(customer("a"))
    writer.repo.flush()
    lock, publisher = writer.repo.lock, writer.repo.publisher
    begin = publisher._begin
    begun: list[Lease] = []
    quietly: list[bool] = []

    def begin_with_offer(
        tenure: Tenure,
        held: Lease | None = None,
        *,
        foresee: bool = False,
        quiet: bool = False,
    ) -> tuple[Lease, HeadVersion, float]:
        quietly.append(quiet)
        if begun:
            lock.keep_alive = False
            return begin(tenure, held)
        lease = lock._new_lease(tenure)
        begun.append(lease)
        place = lock.place(lease.token)
        lease.stands_in_line(place)
        other.repo.lock.acquire()._offer(place.ticket, [], identity())
        state = lock.read()
        assert state is not None
        lock.keep_alive = True
        assert lease.hold_offer(state)
        return lease, writer.repo.chain.read_head(), 0.0

    def stand_still() -> None:
        world.backend.clock.sleep(1.5)
        other.put(customer("b"))

    monkeypatch.setattr(Lease, "_start", lambda self, work: None)
    monkeypatch.setattr(publisher, "_begin", begin_with_offer)
    at(writer.store, "PUT_IF", "commits/2-*/manifest.json", stand_still)
    result = writer.put(customer("c"))
    assert (result.commit_id, result.attempts) == (3, 1)
    assert quietly == [True, False], "the next one is accepted, and cannot be missed so"
    assert {*other.ages()} == {"a", "b", "c"}
    assert writer.warning() is None, "there is nothing to do about it"
    assert world.orphans() == []


def test_what_is_learned_from_a_head_that_was_left_is_not_told_of_a_later_one(
    world: World,
) -> None:
    """Main is given free without the lock, after the holder has noted its head and before it hands
    the lock over: who asks for a commit then is not refused by what was before."""
    holder, other, writer = (world.open(name) for name in ("holder", "other", "writer"))
    holder.put(customer("a"))
    holder.repo.flush()
    protect_branch(holder.repo.chain, True)
    lock = holder.repo.lock
    lease = lock.acquire()
    lease.stands_in_line(lock.place(lease.token))
    lease.note_head(holder.repo.chain.read_head())
    protect_branch(other.repo.chain, False)
    at(writer.store, "GET", layout.LOCK, lease.release)

    assert writer.put(customer("b")).commit_id == 2
    assert writer.commit(rows_of(CUSTOMER, customer("b"))) is None
    assert world.orphans() == []
