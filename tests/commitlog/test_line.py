"""The line before the write lock: first come first, handed over, and never in anybody's way."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from storage_engine import process
from storage_engine.commitlog import layout
from storage_engine.commitlog import line as line_module
from storage_engine.commitlog import lock as lock_module
from storage_engine.commitlog.chain import HeadVersion
from storage_engine.commitlog.json_object import Won
from storage_engine.commitlog.lease_keeper import LeaseKeeper
from storage_engine.commitlog.line import Place, TicketLine
from storage_engine.commitlog.lock import Lease, Tenure, WriteLock, break_lock
from storage_engine.commitlog.lock_object import LineNotes, LockState
from storage_engine.commitlog.records import Head, timestamp
from storage_engine.errors import IntegrityError, LeaseExpiredError, LockContentionError
from storage_engine.objectstore.memory import MemoryBackend, MemoryStore
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.testing.faults import Fault, FaultKind, FaultRule, plan_of
from tests.commitlog.support import at

TTL_MS = 30_000
TIMEOUT_MS = 10_000
PREFIX = layout.line_of(layout.LOCK) or ""
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are known by /proc")


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend("line")


def lock_of(backend: MemoryBackend, owner: str, *, skew: float = 0.0, **options: Any) -> WriteLock:
    settings = {"lease_ttl_ms": TTL_MS, "timeout_ms": TIMEOUT_MS, "keep_alive": False, **options}
    return WriteLock(backend.client(owner, skew=skew), owner_id=owner, **settings)


def store_of(lock: WriteLock) -> MemoryStore:
    assert isinstance(lock.store, MemoryStore)
    return lock.store


def fail(lock: WriteLock, kind: FaultKind, request: str, key: str, **rule: Any) -> None:
    plan_of(store_of(lock)).rules.append(FaultRule(Fault(kind), request, key, **rule))


def stored(backend: MemoryBackend) -> dict[str, Any]:
    return dict(json.loads(backend.objects()[layout.LOCK]))


def tickets(backend: MemoryBackend) -> list[str]:
    return [key for key in backend.objects() if key.startswith(layout.LINES)]


def requests_of(backend: MemoryBackend, client: str) -> list[str]:
    return [record.kind for record in backend.log if record.client == client]


def waited(
    backend: MemoryBackend, owner: str = "waited", **options: Any
) -> tuple[WriteLock, Lease]:
    """One that found the lock taken, waited, and holds it now."""
    before = lock_of(backend, "before").acquire()
    lock = lock_of(backend, owner, **options)
    at(store_of(lock), "GET", layout.LOCK, before.release)
    return lock, lock.acquire()


def stand(backend: MemoryBackend, owner: str = "ghost", **ticket: Any) -> Place:
    """A ticket whose owner never looks at the lock; of a process that nobody here can know."""
    store = backend.client()
    line = TicketLine(store, PREFIX)
    place = line.place(layout.new_write_id(), owner_id=owner, patience_ms=60_000)
    facts = {"machine": "", "pid": 0, "started": 0, **ticket}
    place.ticket = place.ticket._replace(**facts)
    line.join(place, owner_id=owner, holder={})
    backend.clock.sleep(0.001)
    return place


def head_at(commit_id: int) -> HeadVersion:
    path = layout.manifest(commit_id, "0" * 8)
    now = timestamp(datetime(2026, 1, 1, tzinfo=UTC))
    return HeadVersion(Head(commit_id, path, now, "before", write_id=f"w{commit_id}"), '"etag"')


def passed(backend: MemoryBackend, since: datetime) -> float:
    return (backend.clock.now() - since).total_seconds()


# -- nobody waits -------------------------------------------------------------------------------


def test_a_lone_writer_pays_for_no_line(backend: MemoryBackend) -> None:
    for _ in range(3):
        lock_of(backend, "alone").acquire().release()
    assert requests_of(backend, "alone") == ["PUT_IF", "DELETE_IF"] * 3
    assert backend.objects() == {}


def test_who_asks_once_leaves_no_ticket(backend: MemoryBackend) -> None:
    lock_of(backend, "holder").acquire()
    with pytest.raises(LockContentionError) as caught:
        lock_of(backend, "hasty", timeout_ms=0).acquire()
    assert tickets(backend) == []
    assert caught.value.place is None
    assert requests_of(backend, "hasty") == ["PUT_IF", "GET"]


def test_other_locks_have_no_line(backend: MemoryBackend) -> None:
    key = layout.compaction_lease("entity", "T")
    lock_of(backend, "holder", key=key).acquire()
    with pytest.raises(LockContentionError):
        lock_of(backend, "other", key=key).acquire()
    assert {record.key for record in backend.log} == {key}


def test_who_waited_and_finds_nobody_deletes_the_lock(backend: MemoryBackend) -> None:
    _, lease = waited(backend)
    lease.release()
    assert backend.objects() == {}


# -- tickets ------------------------------------------------------------------------------------


def test_tickets_sort_by_time_and_tell_who_waits() -> None:
    now = datetime(2026, 1, 1, 23, 59, 59, 999_999, tzinfo=UTC)
    made = [
        layout.Ticket(
            now + timedelta(microseconds=n), now + timedelta(days=n), f"{9 - n:032x}", m, p, s, o
        )
        for n, (m, p, s, o) in enumerate(
            [("", 0, 0, ""), ("0123456789abcdef", 7, 2**40, "a_b/c.json"), ("", 0, 0, "ü%\n" * 50)]
        )
    ]
    keys = [layout.ticket(PREFIX, ticket) for ticket in made]
    assert keys == sorted(keys)
    store = MemoryBackend("names").client()
    for key, ticket in zip(keys, made, strict=True):
        store.put_if_absent(key, b"{}", write_id="w")  # a key that every store can hold
        read = layout.parse_ticket(key, prefix=PREFIX)
        assert read is not None
        assert read._replace(owner="") == ticket._replace(owner="")
    assert layout.parse_ticket(keys[1], prefix=PREFIX) == made[1]
    for stranger in ("x", keys[0] + "x", keys[0].replace("T235959", "T995959"), layout.LOCK):
        assert layout.parse_ticket(stranger, prefix=PREFIX) is None


@pytest.mark.parametrize(
    "kind", [FaultKind.TIMEOUT, FaultKind.UNAVAILABLE, FaultKind.RESPONSE_LOST, FaultKind.CONFLICT]
)
def test_who_cannot_leave_a_ticket_waits_without(backend: MemoryBackend, kind: FaultKind) -> None:
    before = lock_of(backend, "before").acquire()
    lock = lock_of(backend, "ours")
    fail(lock, kind, "PUT_IF", f"{PREFIX}*", times=None)
    at(store_of(lock), "GET", layout.LOCK, before.release)
    lock.acquire().release()
    assert backend.objects() == {}


def waiter_gives_up(backend: MemoryBackend) -> None:
    lock_of(backend, "holder").acquire()
    stand(backend, "first")
    with pytest.raises(LockContentionError, match="place 2 of 2 in line") as caught:
        lock_of(backend, "second", timeout_ms=700).acquire()
    assert (caught.value.place, caught.value.waiting) == (2, 2)
    assert len(tickets(backend)) == 1


def test_a_ticket_goes_when_its_owner_gives_up(backend: MemoryBackend) -> None:
    waiter_gives_up(backend)


def test_planted_a_ticket_that_is_never_removed_is_found(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TicketLine, "leave", lambda *_: None)
    with pytest.raises(AssertionError):
        waiter_gives_up(backend)


@pytest.mark.parametrize("moment", ["sleep", "PUT_IF", "GET", "LIST"])
def test_a_ticket_goes_at_ctrl_c(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    lock_of(backend, "holder").acquire()
    lock = lock_of(backend, "ours", timeout_ms=500)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if moment == "sleep":
        monkeypatch.setattr(lock.store, "sleep", interrupt)
    else:
        at(store_of(lock), moment, "meta/*", interrupt, when="after")
    with pytest.raises(KeyboardInterrupt), Tenure() as tenure, tenure:
        lock.acquire(tenure, tried=True)
    assert tickets(backend) == []
    assert stored(backend)["owner_id"] == "holder"


# -- handing over -------------------------------------------------------------------------------


def test_who_waited_offers_the_lock_to_the_next(backend: MemoryBackend) -> None:
    _, lease = waited(backend)
    places = [stand(backend, name) for name in ("next", "third")]
    lease.note_head(head_at(41))
    backend.clock.sleep(0.2)

    lease.release()

    offer = stored(backend)
    now = backend.clock.now()
    assert offer["token"] == places[0].ticket.token
    assert (offer["owner_id"], offer["offered"], offer["holder"]) == ("next", True, {})
    assert datetime.fromisoformat(offer["expires_at"]) == now + timedelta(seconds=1)
    assert offer["line"]["waiting"] == [places[1].ticket.token]
    assert offer["line"]["head_commit_id"] == 41
    assert Head.parse(offer["line"]["head"].encode(), key="head") == head_at(41).head
    assert offer["line"]["head_etag"] == head_at(41).etag
    (name,) = offer["line"]["tickets"]
    assert layout.parse_ticket(PREFIX + name, prefix=PREFIX) == places[1].ticket
    assert 200 <= offer["line"]["turn_ms"] < 400
    # What programs that know of no line read, as it always was.
    assert {"owner_id", "acquired_at", "expires_at", "lease_ttl_ms", "token", "holder"} <= {*offer}
    assert not lease.safe()
    assert not lease.renew()


def test_the_next_accepts_and_holds_a_lease_like_any_other(backend: MemoryBackend) -> None:
    _, lease = waited(backend)
    lock = lock_of(backend, "next")
    at(store_of(lock), "GET", layout.LOCK, lease.release)

    ours = lock.acquire(tried=True)

    ours.guard()
    payload = stored(backend)
    assert (payload["owner_id"], payload["token"]) == ("next", ours.token)
    assert "offered" not in payload
    assert ours.expires_at == backend.clock.now() + timedelta(milliseconds=TTL_MS)
    assert ours.renew()
    assert requests_of(backend, "next")[:3] == ["PUT_IF", "GET", "PUT_IF"]  # ticket, look, accept
    ours.release()
    assert backend.objects() == {}, "lock and tickets are gone"


def test_payloads_of_offers_differ_byte_for_byte(backend: MemoryBackend) -> None:
    """The clock stands still and the same one is next: equal bytes would let a stale CAS pass."""
    place = stand(backend)
    seen = []
    for _ in range(3):
        _, lease = waited(backend)
        lease.release()
        seen.append(backend.objects()[layout.LOCK])
        assert stored(backend)["token"] == place.ticket.token
        backend.remove([layout.LOCK])
    assert len({*seen}) == 3


def test_who_has_lost_its_lease_hands_nothing_over(backend: MemoryBackend) -> None:
    _, lease = waited(backend)
    stand(backend)
    backend.clock.sleep(TTL_MS / 1000)
    other = lock_of(backend, "other").acquire()
    lease.release()
    assert stored(backend)["token"] == other.token
    other.guard()


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "kind", [FaultKind.RESPONSE_LOST, FaultKind.TIMEOUT, FaultKind.SERVER_ERROR, FaultKind.CONFLICT]
)
def test_an_unanswered_hand_over_is_settled(
    backend: MemoryBackend, kind: FaultKind, times: int
) -> None:
    warnings: list[str] = []
    lock, lease = waited(backend, warn=warnings.append)
    place = stand(backend)
    fail(lock, kind, "PUT_IF", layout.LOCK, times=times)
    lease.release()
    assert stored(backend)["token"] == place.ticket.token
    assert warnings == []


def test_a_hand_over_that_landed_and_was_accepted_unheard_leaves_the_next_alone(
    backend: MemoryBackend,
) -> None:
    lock, lease = waited(backend)
    other = lock_of(backend, "next")
    held: list[Lease] = []
    fail(lock, FaultKind.RESPONSE_LOST, "PUT_IF", layout.LOCK)

    def release() -> None:
        at(store_of(lock), "GET", layout.LOCK, lambda: None)
        lease.release()

    at(store_of(other), "GET", layout.LOCK, release)
    held.append(other.acquire(tried=True))
    held[0].guard()
    assert stored(backend)["token"] == held[0].token


def test_a_hand_over_that_cannot_be_written_is_told(backend: MemoryBackend) -> None:
    warnings: list[str] = []
    lock, lease = waited(backend, warn=warnings.append)
    stand(backend)
    fail(lock, FaultKind.TIMEOUT, "PUT_IF", layout.LOCK, times=None)
    lease.release()
    assert "not released" in warnings[0]


@pytest.mark.parametrize(
    "kind", [FaultKind.RESPONSE_LOST, FaultKind.TIMEOUT, FaultKind.SERVER_ERROR, FaultKind.CONFLICT]
)
def test_an_unanswered_acceptance_is_settled(backend: MemoryBackend, kind: FaultKind) -> None:
    _, lease = waited(backend)
    lock = lock_of(backend, "next")
    at(store_of(lock), "GET", layout.LOCK, lease.release)
    fail(lock, kind, "put_if_match", layout.LOCK)
    ours = lock.acquire(tried=True)
    ours.guard()
    assert stored(backend)["token"] == ours.token
    ours.release()
    assert backend.objects() == {}


def test_a_line_that_cannot_be_listed_keeps_nobody(backend: MemoryBackend) -> None:
    lock, lease = waited(backend)
    stand(backend)
    fail(lock, FaultKind.UNAVAILABLE, "LIST", "*", times=None)
    lease.release()
    assert layout.LOCK not in backend.objects(), "free for all"


# -- who is next does not come --------------------------------------------------------------------


def ghost_is_passed_over(backend: MemoryBackend) -> None:
    """The next in line is dead, and nobody here can tell: a second is lost, once."""
    _, lease = waited(backend)
    stand(backend)
    lease.release()
    began = backend.clock.now()
    lock = lock_of(backend, "after")
    ours = lock.acquire()
    assert 0.9 <= passed(backend, began) < 2
    ours.guard()
    ours.release()
    assert backend.objects() == {}, "nobody is offered the lock for the dead one again"


def test_an_offer_that_is_not_accepted_is_open_to_all_after_a_second(
    backend: MemoryBackend,
) -> None:
    ghost_is_passed_over(backend)


def test_planted_an_offer_that_nobody_opens_is_found(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "OFFER_MS", 10**8)
    with pytest.raises(LockContentionError):
        ghost_is_passed_over(backend)


def offer_is_accepted_late(backend: MemoryBackend) -> None:
    """Its owner was paused while it was next: somebody else has taken the lock meanwhile."""
    _, lease = waited(backend)
    lock = lock_of(backend, "paused")
    held: list[Lease] = []

    def pass_by() -> None:
        backend.clock.sleep(1.5)
        held.append(lock_of(backend, "other").acquire())

    at(store_of(lock), "GET", layout.LOCK, lease.release)
    for kind in ("PUT", "PUT_IF"):  # the acceptance is on its way
        at(store_of(lock), kind, layout.LOCK, pass_by)
    with pytest.raises(LockContentionError):
        lock.acquire(tried=True)
    assert held[0].safe()
    assert stored(backend)["token"] == held[0].token
    assert held[0].renew()


def test_an_offer_is_accepted_by_one_alone(backend: MemoryBackend) -> None:
    offer_is_accepted_late(backend)


def test_planted_an_offer_accepted_twice_is_found(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Lease.accept

    def careless(store: ObjectStore, key: str, data: bytes, **_: Any) -> Won:
        store.put(key, data)
        return Won(store.get(key).etag)

    def accept(self: Lease, state: LockState) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(lock_module, "write_conditionally", careless)
            return original(self, state)

    monkeypatch.setattr(Lease, "accept", accept)
    with pytest.raises(pytest.fail.Exception):
        offer_is_accepted_late(backend)


def test_who_was_passed_over_stands_in_line_again(backend: MemoryBackend) -> None:
    """It was paused for longer than a second, lost its turn and its ticket; it lives."""
    _, lease = waited(backend)
    lock = lock_of(backend, "paused")

    def turn() -> None:
        """The one after it takes the lock, and is overtaken by nobody."""
        lease.release()
        backend.clock.sleep(1.5)
        taken = lock_of(backend, "other").acquire()
        stand(backend, "third")
        backend.clock.sleep(0.1)
        taken.release()
        assert stored(backend)["owner_id"] == "third"

    at(store_of(lock), "GET", layout.LOCK, turn)
    at(store_of(lock), "GET", layout.LOCK, lambda: None, times=2)
    ours = lock.acquire(tried=True)  # after the third, who does not come
    ours.guard()
    written = [r.key for r in backend.log if r.client == "paused" and r.kind == "PUT_IF"]
    assert len([key for key in written if key.startswith(PREFIX)]) > 1, "its ticket, again"
    ours.release()
    assert backend.objects() == {}


@linux
def test_the_dead_of_this_machine_are_passed_over_at_once(backend: MemoryBackend) -> None:
    child = subprocess.run(
        [sys.executable, "-c", "from storage_engine.process import *; print(identity())"],
        capture_output=True,
        text=True,
        check=True,
    )
    dead = eval(child.stdout)
    facts = {
        "machine": line_module._machine(dead),
        "pid": dead["pid"],
        "started": dead["pid_started"],
    }
    assert facts["machine"] == line_module._machine(process.identity())
    _, lease = waited(backend)
    stand(backend, "dead", **facts)
    living = stand(backend, "living")
    lease.release()
    assert stored(backend)["token"] == living.ticket.token
    assert len(tickets(backend)) == 1, "the dead one's is taken away"


@linux
def test_who_dies_after_the_offer_is_followed_at_once(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = process.identity()
    facts = {"machine": line_module._machine(ours), "pid": ours["pid"], "started": 1}
    _, lease = waited(backend)
    stand(backend, "next", **facts)
    with monkeypatch.context() as patch:  # it lives when the lock is offered
        patch.setattr(lock_module, "gone", lambda *_: False)
        patch.setattr(line_module, "gone", lambda *_: False)
        lease.release()
    assert stored(backend)["holder"]["pid_started"] == 1
    began = backend.clock.now()
    lock_of(backend, "after").acquire().guard()
    assert passed(backend, began) == 0


def test_who_gives_up_while_the_lock_is_offered_to_it_opens_it(backend: MemoryBackend) -> None:
    _, lease = waited(backend)
    lock = lock_of(backend, "next")

    def interrupt() -> None:
        lease.release()
        raise KeyboardInterrupt

    at(store_of(lock), "GET", layout.LOCK, interrupt)
    with pytest.raises(KeyboardInterrupt), Tenure() as tenure, tenure:
        lock.acquire(tenure, tried=True)
    assert backend.objects() == {}


def test_a_ticket_whose_patience_is_over_does_not_count(backend: MemoryBackend) -> None:
    stand(backend, "late")
    backend.clock.sleep(120)
    _, lease = waited(backend)
    lease.release()
    assert backend.objects() == {}


# -- a lease that is promised ---------------------------------------------------------------------


class Turn:
    """Somebody holds the lock, and we are next; head shows a commit when `committed` is set."""

    def __init__(self, backend: MemoryBackend, **options: Any) -> None:
        self.backend = backend
        self.holding = lock_of(backend, "holder")
        self.lock = lock_of(backend, "next", **options)
        self.asked: list[tuple[int, str, bool]] = []
        self.committed_at = 2  # the number of the look that finds the holder's commit
        at(store_of(self.lock), "GET", layout.LOCK, self._begin)

    def _begin(self) -> None:
        (key,) = tickets(self.backend)
        ticket = layout.parse_ticket(key, prefix=PREFIX)
        assert ticket is not None
        self.holder = self.holding._new_lease(None)
        now = self.backend.clock.now()
        notes = LineNotes((ticket.token,), listed_at=now, turn_ms=200, head_commit_id=7)
        _, _, data = self.holding.payload(self.holder.token, timestamp(now), notes)
        self.backend.write(layout.LOCK, data)

    def is_past(self, commit_id: int, token: str, *, holds: bool) -> bool:
        self.asked.append((commit_id, token, holds))
        return len(self.asked) == self.committed_at

    def begin_early(self, tenure: Tenure | None = None) -> Lease:
        return self.lock.acquire(tenure, tried=True, early=self.is_past)

    def hand_over(self) -> None:
        state = self.holding.read()
        assert state is not None
        assert self.holder.accept(state)
        self.holder.stands_in_line(stand(self.backend, "holder"))
        self.holder.note_head(head_at(8))
        self.holder.release()


def test_who_is_next_begins_when_the_holders_commit_is_found(backend: MemoryBackend) -> None:
    turn = Turn(backend)

    lease = turn.begin_early()

    assert turn.asked == [(7, turn.holder.token, True)] * 2
    assert lease.promised
    assert not lease.safe(), "it is not ours yet"
    assert stored(backend)["owner_id"] == "holder"
    at(store_of(turn.lock), "GET", layout.LOCK, turn.hand_over)
    lease.guard()
    assert stored(backend)["token"] == lease.token
    assert lease.left_head == head_at(8)
    lease.guard()
    lease.release()
    assert backend.objects() == {}


def test_a_promise_that_does_not_come_true_ends_at_the_timeout(backend: MemoryBackend) -> None:
    turn = Turn(backend, timeout_ms=2000)
    lease = turn.begin_early()
    began = backend.clock.now()
    with pytest.raises(LockContentionError, match="held by 'holder'"):
        lease.guard()
    assert passed(backend, began) < 3
    with pytest.raises(LockContentionError):
        lease.guard()
    lease.release()
    assert tickets(backend) == []
    assert stored(backend)["owner_id"] == "holder"


def test_a_promise_that_was_missed_leaves_us_in_line(backend: MemoryBackend) -> None:
    """We were paused when the lock was offered to us, and have begun already: our ticket was taken
    for a dead one's, and without it others would go before us for ever."""
    turn = Turn(backend)
    lease = turn.begin_early()

    def miss() -> None:
        turn.hand_over()
        backend.clock.sleep(1.5)
        other = lock_of(backend, "other").acquire()
        backend.clock.sleep(0.1)
        third = stand(backend, "third")
        other.release()
        assert stored(backend)["token"] == third.ticket.token
        assert len(tickets(backend)) == 1, "ours is gone"

    at(store_of(turn.lock), "GET", layout.LOCK, miss)
    looked: list[list[str]] = []
    at(store_of(turn.lock), "GET", layout.LOCK, lambda: looked.append(tickets(backend)), times=3)
    lease.guard()
    assert len(looked[-1]) == 2, "it stands in line again"
    lease.release()


def test_a_promised_lease_that_nobody_wants_any_more_leaves_the_line(
    backend: MemoryBackend,
) -> None:
    turn = Turn(backend)
    with Tenure() as tenure, tenure:
        assert turn.begin_early(tenure).promised
    assert tickets(backend) == []
    assert stored(backend)["owner_id"] == "holder"


def test_a_holder_that_dies_after_its_commit_is_followed(backend: MemoryBackend) -> None:
    turn = Turn(backend, timeout_ms=2 * TTL_MS)
    lease = turn.begin_early()
    lease.guard()  # when its lease has run out
    assert stored(backend)["token"] == lease.token
    assert lease.left_head is None, "whether it has made its commit, the lock does not tell"


def test_a_promise_comes_true_in_the_background(tmp_path: Path) -> None:
    """In real time, on a directory: who is next uploads while it waits."""
    with closing(open_store(f"file://{tmp_path}")) as store:
        locks = [
            WriteLock(store, owner_id=f"w{n}", lease_ttl_ms=TTL_MS, timeout_ms=60_000)
            for n in range(3)
        ]
        first = locks[0].acquire()
        second = threading.Thread(target=lambda: held.append(locks[1].acquire()))
        held: list[Lease] = []
        second.start()
        wait_for(lambda: len(list(store.list(PREFIX))) == 1)
        first.release()
        second.join(60)
        shown = threading.Event()
        third = threading.Thread(
            target=lambda: held.append(locks[2].acquire(early=lambda *_, **__: shown.is_set()))
        )
        third.start()
        wait_for(lambda: len(list(store.list(PREFIX))) == 1)  # the second's is gone by then
        held[0].note_head(head_at(1))
        held[0].release()
        third.join(60)
        held[1].guard()
        state = locks[2].read()
        assert state is not None
        assert state.token == held[1].token
        wait_for(lambda: (held_now := locks[2].read()) is not None and not held_now.offered)
        held[1].guard()  # who takes longer than an offer lasts has accepted it by then
        held[1].release()
        assert list(store.list("meta/")) == []
    assert not [t for t in threading.enumerate() if t.name == "onto-lease"]


def wait_for(state: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not state():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- offers that are held as they are -------------------------------------------------------------


def offered_to(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> tuple[WriteLock, Lease, LockState]:
    """The lock stands in the name of one that waits, whose background is ours to play."""
    monkeypatch.setattr(Lease, "_start", lambda self, work: None)
    _, holder = waited(backend)
    lock = lock_of(backend, "next", keep_alive=True)
    lease = lock._new_lease(None)
    place = lock.place(lease.token)
    assert lock.line is not None
    lock.line.join(place, owner_id="next", holder={})
    lease.stands_in_line(place)
    holder.note_head(head_at(4))
    holder.release()
    state = lock.read()
    assert state is not None
    assert (state.token, state.offered) == (lease.token, True)
    return lock, lease, state


def test_an_offer_is_held_and_handed_on_without_a_word(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lease, state = offered_to(backend, monkeypatch)
    before = len(requests_of(backend, "next"))
    assert lease.hold_offer(state)
    lease.guard()
    assert len(requests_of(backend, "next")) == before
    assert lease.left_head == head_at(4)
    behind = stand(backend, "behind")
    lease.release()
    assert (stored(backend)["token"], stored(backend)["offered"]) == (behind.ticket.token, True)
    assert [key for key in tickets(backend) if lease.token in key] == []


@pytest.mark.parametrize(
    ("behind", "age_s", "lists"), [(3, 0.0, 0), (3, 0.6, 1), (2, 0.0, 1)], ids=str
)
def test_who_was_told_just_now_who_waits_does_not_list_them(
    backend: MemoryBackend,
    monkeypatch: pytest.MonkeyPatch,
    behind: int,
    age_s: float,
    lists: int,
) -> None:
    monkeypatch.setattr(Lease, "_start", lambda self, work: None)
    _, holder = waited(backend)
    places = [stand(backend, f"w{n}") for n in range(behind)]
    holder.release()
    lock = lock_of(backend, "w0", keep_alive=True)
    state = lock.read()
    assert state is not None
    lease = lock._new_lease(None)
    lease.token = state.token
    lease.stands_in_line(places[0])
    assert lease.hold_offer(state)
    backend.clock.sleep(age_s)

    lease._look_at_line()
    assert requests_of(backend, "w0").count("LIST") == lists
    assert len(tickets(backend)) == behind - 1, "our own is gone"
    lease.release()
    assert stored(backend)["token"] == places[1].ticket.token
    shown = [place.ticket.token for place in places[2:]]
    assert stored(backend)["line"]["waiting"] == shown


def test_who_has_handed_it_over_just_now_does_not_look_at_once(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lease, "_start", lambda self, work: None)
    lock, lease = waited(backend, keep_alive=True)
    others = [stand(backend, f"w{n}") for n in range(2)]
    backend.clock.sleep(0.2)
    lease.release()
    began = backend.clock.now()
    at(store_of(lock), "GET", layout.LOCK, lambda: backend.remove([layout.LOCK]))
    at(store_of(lock), "GET", layout.LOCK, lambda: looked.append(passed(backend, began)))
    looked: list[float] = []
    assert lock.acquire(tried=True).safe()
    assert 0.2 < looked[0] < 0.5 * len(others)


def test_who_is_next_but_one_begins_on_what_the_next_will_commit(backend: MemoryBackend) -> None:
    asked: list[tuple[int, str, bool]] = []
    holding, lock = lock_of(backend, "holder"), lock_of(backend, "ours")
    first = stand(backend, "first")

    def begin() -> None:
        now = backend.clock.now()
        found = [layout.parse_ticket(key, prefix=PREFIX) for key in tickets(backend)]
        waiting = tuple(ticket.token for ticket in found if ticket is not None)
        notes = LineNotes(waiting, listed_at=now, turn_ms=200, head_commit_id=7)
        _, _, data = holding.payload("of the holder", timestamp(now), notes)
        backend.write(layout.LOCK, data)

    def early(commit_id: int, token: str, *, holds: bool) -> bool:
        asked.append((commit_id, token, holds))
        return len(asked) == 2

    at(store_of(lock), "GET", layout.LOCK, begin)
    assert lock.acquire(tried=True, early=early).promised
    assert asked == [(8, first.ticket.token, False)] * 2


def test_who_is_not_named_in_the_line_does_not_begin_early(backend: MemoryBackend) -> None:
    """Not even where nobody is: somebody may have come before us who is not named either."""
    holding, lock = lock_of(backend, "holder"), lock_of(backend, "ours", timeout_ms=500)

    def begin() -> None:
        now = backend.clock.now()
        notes = LineNotes((), listed_at=now, turn_ms=200, head_commit_id=7)
        _, _, data = holding.payload("of the holder", timestamp(now), notes)
        backend.write(layout.LOCK, data)

    def early(commit_id: int, token: str, *, holds: bool) -> bool:
        raise AssertionError

    at(store_of(lock), "GET", layout.LOCK, begin)
    with pytest.raises(LockContentionError):
        lock.acquire(tried=True, early=early)


def test_who_needs_longer_than_an_offer_lasts_accepts_it(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lease, state = offered_to(backend, monkeypatch)
    assert lease.hold_offer(state)
    backend.clock.sleep(0.9)
    assert not lease.safe()
    lease.guard()  # which accepts
    assert "offered" not in stored(backend)
    backend.clock.sleep(TTL_MS / 2000)
    assert lease.safe()
    lease.release()
    assert layout.LOCK not in backend.objects()


def test_an_offer_that_was_held_for_too_long_is_lost(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And open to all after a second, also where its holder has died on another machine."""
    _, lease, state = offered_to(backend, monkeypatch)
    assert lease.hold_offer(state)
    backend.clock.sleep(1.1)
    other = lock_of(backend, "other", timeout_ms=100).acquire()
    with pytest.raises(LeaseExpiredError):
        lease.guard()
    lease.release()
    assert stored(backend)["token"] == other.token


def test_an_offer_that_the_background_accepts_meanwhile_is_not_lost(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the clock and the look at what we hold."""
    _, lease, state = offered_to(backend, monkeypatch)
    assert lease.hold_offer(state)
    backend.clock.sleep(0.9)
    safe = Lease.safe
    asked: list[bool] = []

    def slow(self: Lease) -> bool:
        asked.append(safe(self))
        if len(asked) == 1:
            assert self.renew()
        return asked[-1]

    monkeypatch.setattr(Lease, "safe", slow)
    lease.guard()
    assert asked[0] is False
    lease.release()


@pytest.mark.parametrize("quiet", [True, False])
def test_an_offer_is_held_without_a_word_only_by_who_would_wait_again(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    """Others, who collect garbage or copy a log, have no other turn."""
    _, holder = waited(backend)
    monkeypatch.setattr(Lease, "_start", lambda self, work: None)
    lock = lock_of(backend, "next", keep_alive=True)
    at(store_of(lock), "GET", layout.LOCK, holder.release)
    lease = lock.acquire(tried=True, quiet=quiet)
    assert lease.on_offer is quiet
    assert stored(backend).get("offered", False) is quiet
    lease.release()


def test_a_head_that_came_with_an_offer_goes_with_it(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one was faster to take it, has made a commit and gone: that head is an older one."""
    lock, lease, state = offered_to(backend, monkeypatch)
    backend.clock.sleep(1.1)
    other = lock_of(backend, "other", timeout_ms=100).acquire()
    assert not lease.accept(state)
    other.release()
    backend.remove([layout.LOCK])  # whoever was next has gone, too
    assert lease.create()
    assert lease.left_head is None
    now = lock.read()
    assert now is not None
    assert now.line is None or now.line.head == ""


def test_an_offer_that_is_seen_late_is_accepted_first(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lease, state = offered_to(backend, monkeypatch)
    backend.clock.sleep(0.6)
    assert not lease.hold_offer(state)
    assert lease.accept(state)
    assert "offered" not in stored(backend)
    lease.release()


# -- who goes on with a lease ----------------------------------------------------------------------


def test_who_goes_on_with_a_lease_looks_who_waits(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not wait itself, and would keep others waiting for as long as it has commits."""
    monkeypatch.setattr(Lease, "_start", lambda self, work: None)
    keeper = LeaseKeeper(0.0)
    lease = lock_of(backend, "busy", keep_alive=True).acquire()
    contended = []
    for _ in range(5):
        keeper.lingering_release(lease)
        assert keeper.take_over(Tenure()) is lease
        contended.append(lease.contended)
    assert contended == [False] * 4 + [True], "at last, for all it knows"
    contended.clear()
    lease._look_at_line()  # as its background does
    contended.append(lease.contended)
    place = stand(backend, "behind")
    lease.look_who_waits()
    lease._look_at_line()
    contended.append(lease.contended)
    assert contended == [False, True]
    keeper.lingering_release(lease)()
    assert (stored(backend)["token"], stored(backend)["offered"]) == (place.ticket.token, True)


def test_a_lease_waits_for_what_is_in_the_queue(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lease, "_start", lambda self, work: None)
    queued = threading.Event()
    queued.set()
    keeper = LeaseKeeper(0.001, queued.is_set)
    lease = lock_of(backend, "busy", keep_alive=True).acquire()
    release = threading.Thread(target=keeper.lingering_release(lease))
    release.start()
    time.sleep(0.05)
    assert keeper.take_over(Tenure()) is lease
    release.join(60)
    assert lease.safe()
    queued.clear()
    keeper.lingering_release(lease)()
    assert layout.LOCK not in backend.objects()
    assert keeper.take_over(Tenure()) is None


# -- what others see ------------------------------------------------------------------------------


def test_an_offer_can_be_shown_and_broken(backend: MemoryBackend) -> None:
    _, lease = waited(backend)
    place = stand(backend, "next")
    lease.release()
    lock = lock_of(backend, "looking")
    assert [w["owner_id"] for w in lock.waiting()] == ["next"]
    broken = break_lock(lock.store, place.ticket.token).state
    assert broken is not None
    assert broken.offered
    assert layout.LOCK not in backend.objects()
    lock.acquire(tried=True).guard()


def test_a_clock_that_is_ahead_opens_an_offer_early_and_nobody_is_hurt(
    backend: MemoryBackend,
) -> None:
    _, lease = waited(backend)
    lock = lock_of(backend, "next")
    hasty: list[Lease] = []

    def hand_over() -> None:
        lease.release()
        hasty.append(lock_of(backend, "hasty", skew=5).acquire())

    at(store_of(lock), "GET", layout.LOCK, hand_over)
    at(store_of(lock), "GET", layout.LOCK, lambda: hasty[0].release() if hasty else None, times=3)
    ours = lock.acquire(tried=True)
    assert [hasty[0].safe(), ours.safe()] == [False, True]
    with pytest.raises(LeaseExpiredError):
        hasty[0].guard()


BAD_LINES: list[Any] = [
    [],
    "x",
    {"waiting": "x"},
    {"waiting": [1]},
    {"listed_at": "yesterday"},
    {"turn_ms": -1},
    {"turn_ms": 1.5},
    {"head_commit_id": "x"},
    {"tickets": [1]},
    {"head": 1},
    {"head_etag": None},
]


@pytest.mark.parametrize("bad", [{"line": line} for line in BAD_LINES] + [{"offered": "yes"}])
def test_a_lock_object_with_a_line_that_is_none_is_named(
    backend: MemoryBackend, bad: dict[str, Any]
) -> None:
    lock_of(backend, "holder").acquire()
    backend.write(layout.LOCK, json.dumps({**stored(backend), **bad}).encode())
    with pytest.raises(IntegrityError, match="onto lock break"):
        lock_of(backend, "ours").acquire()
    assert tickets(backend) == []
