"""The write lock: one holder by lease, ownership by token, never a wait without an end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.commitlog.lock import Lease, Tenure, WriteLock
from storage_engine.errors import (
    IntegrityError,
    LeaseExpiredError,
    LockContentionError,
    StorageBackendError,
)
from storage_engine.objectstore.memory import MemoryBackend, MemoryStore
from storage_engine.objectstore.protocol import ObjectNotFound
from storage_engine.testing.faults import Fault, FaultKind, FaultRule, plan_of
from tests.commitlog.support import World, at
from tests.engines import CUSTOMER, customer, rows_of, stream_of

TTL_MS = 3000
TIMEOUT_MS = 1000


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend("locks")


def lock_of(
    backend: MemoryBackend, owner: str = "writer", *, skew: float = 0.0, **options: Any
) -> WriteLock:
    """A lock as a process of its own sees it."""
    settings: dict[str, Any] = {
        "lease_ttl_ms": TTL_MS,
        "timeout_ms": TIMEOUT_MS,
        "keep_alive": False,
        **options,
    }
    return WriteLock(backend.client(skew=skew), owner_id=owner, **settings)


def store_of(lock: WriteLock) -> MemoryStore:
    assert isinstance(lock.store, MemoryStore)
    return lock.store


def fail(lock: WriteLock, kind: FaultKind, request: str, **fault: Any) -> None:
    rule = {name: fault.pop(name) for name in ("times", "nth") if name in fault}
    plan_of(store_of(lock)).rules.append(
        FaultRule(Fault(kind, **fault), request, layout.LOCK, **rule)
    )


def stored(backend: MemoryBackend) -> dict[str, Any] | None:
    data = backend.objects().get(layout.LOCK)
    return dict(json.loads(data)) if data is not None else None


# -- acquire, renew, release ------------------------------------------------------------------


def test_acquire_writes_who_holds_it_until_when(backend: MemoryBackend) -> None:
    lock = lock_of(backend, "ours", holder={"run": "r-1"})
    lease = lock.acquire()

    payload = stored(backend)
    assert payload is not None
    assert payload["owner_id"] == "ours"
    assert payload["token"] == lease.token
    assert payload["lease_ttl_ms"] == TTL_MS
    assert payload["holder"]["run"] == "r-1"
    assert {"host", "pid"} <= set(payload["holder"])
    assert lease.expires_at == backend.clock.now() + timedelta(milliseconds=TTL_MS)
    assert lease.safe()
    lease.guard()


def test_release_lets_the_next_one_in_at_once(backend: MemoryBackend) -> None:
    lock_of(backend, "one").acquire().release()

    assert stored(backend) is None
    assert lock_of(backend, "two").try_acquire() is not None


def test_a_released_lease_is_not_safe_and_is_not_released_twice(backend: MemoryBackend) -> None:
    lease = lock_of(backend).acquire()
    lease.release()
    other = lock_of(backend).acquire()

    lease.release()

    assert not lease.safe()
    assert not lease.renew()
    assert (stored(backend) or {})["token"] == other.token


def test_renewal_moves_the_expiry(backend: MemoryBackend) -> None:
    lease = lock_of(backend).acquire()
    backend.clock.sleep(TTL_MS / 1000 * 0.6)

    assert lease.renew()

    assert lease.expires_at == backend.clock.now() + timedelta(milliseconds=TTL_MS)
    backend.clock.sleep(TTL_MS / 1000 * 0.6)
    lease.guard()
    lease.release()
    assert stored(backend) is None


def test_the_keeper_renews_until_the_release(backend: MemoryBackend) -> None:
    """In real time: the keeper is a thread."""
    lock = lock_of(backend, lease_ttl_ms=60, keep_alive=True)
    renewed = threading.Event()
    lease = lock.acquire()

    def note(kind: str, key: str) -> None:
        if kind == "PUT_IF":
            renewed.set()

    store_of(lock).on_request(note, when="after")
    assert renewed.wait(240)
    lease.release()
    assert stored(backend) is None
    assert not [t for t in threading.enumerate() if t.name == "onto-lease"]


def test_payloads_differ_byte_for_byte_at_each_write(backend: MemoryBackend) -> None:
    """The clock stands still, the owner is the same: equal bytes would let a stale CAS pass."""
    lock = lock_of(backend)
    seen: list[bytes] = []
    store_of(lock).on_request(
        lambda kind, _: seen.append(backend.objects()[layout.LOCK]) if kind == "PUT_IF" else None,
        when="after",
    )
    for _ in range(3):
        lease = lock.acquire()
        assert lease.renew()
        assert lease.renew()
        lease.release()
    assert len(seen) == 9
    assert len(set(seen)) == 9


# -- contention -------------------------------------------------------------------------------


def test_waiting_ends_at_the_timeout_and_says_who_holds_it(backend: MemoryBackend) -> None:
    lock_of(backend, "theirs", holder={"run": "nightly"}).acquire()
    since = (stored(backend) or {})["acquired_at"]
    started = backend.clock.now()

    with pytest.raises(LockContentionError) as caught:
        lock_of(backend, "ours").acquire()

    error = caught.value
    assert error.owner_id == "theirs"
    assert error.holder["run"] == "nightly"
    assert error.acquired_at == since
    assert error.waited_ms >= TIMEOUT_MS
    for fact in ("theirs", "nightly", since):
        assert fact in str(error)
    assert backend.clock.now() - started < timedelta(milliseconds=2 * TIMEOUT_MS)


def test_a_timeout_of_zero_asks_once(backend: MemoryBackend) -> None:
    lock_of(backend).acquire()
    with pytest.raises(LockContentionError):
        lock_of(backend, timeout_ms=0).acquire()
    lock = lock_of(MemoryBackend("free"), timeout_ms=0)
    assert lock.acquire().safe()


def test_two_sessions_of_one_runtime_are_two_owners(backend: MemoryBackend) -> None:
    first = lock_of(backend, "same-runtime").acquire()

    with pytest.raises(LockContentionError):
        lock_of(backend, "same-runtime").acquire()

    backend.clock.sleep(TTL_MS / 1000)
    second = lock_of(backend, "same-runtime").acquire()
    assert first.token != second.token
    assert not first.renew()
    first.release()
    assert (stored(backend) or {})["token"] == second.token


def test_a_waiter_gets_the_lock_when_it_is_released(backend: MemoryBackend) -> None:
    held = lock_of(backend, "theirs").acquire()
    waiting = lock_of(backend, "ours")
    asked = [0]

    def release_at_third(kind: str, _: str) -> None:
        asked[0] += kind == "GET"
        if asked[0] == 3:
            held.release()

    store_of(waiting).on_request(release_at_third)
    assert waiting.acquire().safe()
    assert asked[0] == 3


def test_waiting_ends_even_when_the_lock_vanishes_between_put_and_get(
    backend: MemoryBackend,
) -> None:
    """Each PUT finds a lock, each GET finds none: neither path may forget the deadline."""
    lock = lock_of(backend, "ours")
    store = store_of(lock)
    other = backend.client()

    def appear(kind: str, key: str) -> None:
        if kind == "PUT_IF":
            backend.write(layout.LOCK, b'{"somebody": "else"}')
        elif kind == "GET":
            other.delete_many([key])

    store.on_request(appear)
    started = backend.clock.now()
    with pytest.raises(LockContentionError) as caught:
        lock.acquire()
    assert caught.value.owner_id == ""
    assert backend.clock.now() - started < timedelta(milliseconds=2 * TIMEOUT_MS)


def test_waiting_ends_even_when_every_takeover_is_lost(backend: MemoryBackend) -> None:
    lock = lock_of(backend, "ours")

    def expired_but_changing() -> None:
        expires_at, _, data = lock_of(backend, "theirs", lease_ttl_ms=0).payload("t", "then")
        assert expires_at <= backend.clock.now()
        backend.write(layout.LOCK, data)

    at(store_of(lock), "PUT_IF", layout.LOCK, expired_but_changing, times=None)
    with pytest.raises(LockContentionError):
        lock.acquire()


@pytest.mark.parametrize("content", [b"not json", b'{"owner_id": "x"}', b"[]"])
def test_a_lock_object_that_is_none_is_named(backend: MemoryBackend, content: bytes) -> None:
    backend.write(layout.LOCK, content)
    with pytest.raises(IntegrityError) as caught:
        lock_of(backend).acquire()
    assert layout.LOCK in str(caught.value)


# -- takeover ---------------------------------------------------------------------------------


def test_an_expired_lease_is_taken_over(backend: MemoryBackend) -> None:
    dead = lock_of(backend, "dead").acquire()
    backend.clock.sleep(TTL_MS / 1000)

    lease = lock_of(backend, "ours").acquire()

    payload = stored(backend) or {}
    assert (payload["owner_id"], payload["token"]) == ("ours", lease.token)
    assert not dead.safe()
    assert lease.safe()


def test_a_lease_is_not_taken_over_a_moment_before_it_ends(backend: MemoryBackend) -> None:
    held = lock_of(backend, "theirs").acquire()
    backend.clock.sleep(TTL_MS / 1000 - 0.001)

    assert lock_of(backend, "ours").try_acquire() is None
    with pytest.raises(LockContentionError):
        lock_of(backend, "ours", timeout_ms=0).acquire()
    assert (stored(backend) or {})["token"] == held.token


def test_of_two_that_take_over_one_wins(backend: MemoryBackend) -> None:
    lock_of(backend, "dead").acquire()
    backend.clock.sleep(TTL_MS / 1000)
    slow, fast = lock_of(backend, "slow"), lock_of(backend, "fast")
    won: list[Lease] = []

    def overtake(kind: str, _: str) -> None:
        if kind == "PUT_IF" and not won and asked[0]:
            won.append(fast.acquire())
        asked[0] += 1

    asked = [0]
    store_of(slow).on_request(overtake)
    with pytest.raises(LockContentionError) as caught:
        slow.acquire()
    assert caught.value.owner_id == "fast"
    assert won[0].safe()


def test_rfc0004_09_release_after_a_takeover_leaves_the_new_owner_alone(
    backend: MemoryBackend,
) -> None:
    old = lock_of(backend, "old").acquire()
    backend.clock.sleep(TTL_MS / 1000)
    new = lock_of(backend, "new").acquire()

    old.release()

    assert (stored(backend) or {})["token"] == new.token
    new.guard()
    assert new.renew()


def test_rfc0004_09_a_takeover_between_expiry_and_release_wins(backend: MemoryBackend) -> None:
    """The takeover happens when the old owner's delete is already on its way."""
    old_lock = lock_of(backend, "old")
    old = old_lock.acquire()
    backend.clock.sleep(TTL_MS / 1000)
    taken: list[Lease] = []
    at(
        store_of(old_lock),
        "DELETE_IF",
        layout.LOCK,
        lambda: taken.append(lock_of(backend, "new").acquire()),
    )

    old.release()

    assert (stored(backend) or {})["token"] == taken[0].token


def test_rfc0004_09_an_expired_lease_that_nobody_took_is_given_back(
    backend: MemoryBackend,
) -> None:
    """RFC 0004 3.3 step 6: the guard's abort attempts an owner-conditional release."""
    lease = lock_of(backend).acquire()
    backend.clock.sleep(TTL_MS / 1000)
    with pytest.raises(LeaseExpiredError):
        lease.guard()

    lease.release()

    assert stored(backend) is None


def test_rfc0004_09_a_renewal_after_a_takeover_fails(backend: MemoryBackend) -> None:
    old = lock_of(backend, "old").acquire()
    backend.clock.sleep(TTL_MS / 1000)
    new = lock_of(backend, "new").acquire()

    assert not old.renew()

    with pytest.raises(LeaseExpiredError):
        old.guard()
    assert (stored(backend) or {})["token"] == new.token


# -- a lease that is not certainly ours -------------------------------------------------------


def test_the_last_third_of_a_lease_is_not_safe(backend: MemoryBackend) -> None:
    lease = lock_of(backend).acquire()
    backend.clock.sleep(TTL_MS / 1000 * 2 / 3 - 0.01)
    assert lease.safe()
    backend.clock.sleep(0.02)
    with pytest.raises(LeaseExpiredError):
        lease.guard()


@pytest.mark.parametrize("kind", [FaultKind.TIMEOUT, FaultKind.SERVER_ERROR])
def test_a_failed_renewal_makes_the_lease_unsafe(backend: MemoryBackend, kind: FaultKind) -> None:
    warnings: list[str] = []
    lock = lock_of(backend, warn=warnings.append)
    lease = lock.acquire()
    fail(lock, kind, "PUT_IF", times=None)

    assert not lease.renew()

    assert not lease.safe()
    with pytest.raises(LeaseExpiredError):
        lease.guard()
    assert "renewed" in warnings[0]
    plan_of(store_of(lock)).rules.clear()
    assert not lease.renew(), "once unsafe, always unsafe"


def test_a_refused_renewal_makes_the_lease_unsafe(backend: MemoryBackend) -> None:
    lock = lock_of(backend)
    lease = lock.acquire()

    def refuse() -> None:
        raise StorageBackendError("access denied", operation="put", key=layout.LOCK)

    at(store_of(lock), "PUT_IF", layout.LOCK, refuse)
    assert not lease.renew()
    assert not lease.safe()


def test_a_renewal_whose_answer_was_lost_counts(backend: MemoryBackend) -> None:
    lock = lock_of(backend)
    lease = lock.acquire()
    fail(lock, FaultKind.RESPONSE_LOST, "PUT_IF")
    assert lease.renew()
    assert lease.safe()
    lease.release()
    assert stored(backend) is None, "the ETag read back must be the one to release"


UNANSWERED = [FaultKind.TIMEOUT, FaultKind.RESPONSE_LOST, FaultKind.UNAVAILABLE, FaultKind.CONFLICT]


@pytest.mark.parametrize("kind", UNANSWERED)
def test_a_release_is_asked_for_again(backend: MemoryBackend, kind: FaultKind) -> None:
    """Else all others wait for the whole lease, because of one 503."""
    warnings: list[str] = []
    lock = lock_of(backend, warn=warnings.append)
    lease = lock.acquire()
    fail(lock, kind, "DELETE_IF", times=3)
    lease.release()
    assert stored(backend) is None
    assert warnings == []


@pytest.mark.parametrize("kind", UNANSWERED)
def test_a_release_that_fails_warns_and_does_not_raise(
    backend: MemoryBackend, kind: FaultKind
) -> None:
    warnings: list[str] = []
    lock = lock_of(backend, warn=warnings.append)
    lease = lock.acquire()
    fail(lock, kind, "DELETE_IF", times=None)
    lease.release()
    assert "not released" in warnings[0]


def test_a_release_that_is_asked_for_again_leaves_the_next_owner_alone(
    backend: MemoryBackend,
) -> None:
    """The first request lands late, when somebody else has taken the lock already."""
    lock = lock_of(backend)
    lease = lock.acquire()
    fail(lock, FaultKind.RESPONSE_LOST, "DELETE_IF")

    def take(kind: str, _: str) -> None:
        if kind == "DELETE_IF" and stored(backend) is None:
            assert lock_of(backend, "next").try_acquire() is not None

    store_of(lock).on_request(take)
    lease.release()
    assert (stored(backend) or {})["owner_id"] == "next"


@pytest.mark.parametrize("seconds", [-3600, -1, 3600])
def test_a_clock_that_jumps_while_somebody_waits(backend: MemoryBackend, seconds: int) -> None:
    """Set back, it makes nobody wait for longer; nor is the holder's end overlooked. Set forward,
    the lease has run out as far as anybody can tell."""
    held = lock_of(backend, "holder").acquire()
    waiting = lock_of(backend, "waiting", timeout_ms=2500)
    fail(waiting, FaultKind.SKEW, "GET", nth=2, seconds=seconds)
    began = backend.clock.now()
    if seconds > 0:
        assert waiting.acquire().token != held.token
        return
    with pytest.raises(LockContentionError) as caught:
        waiting.acquire()
    assert 2500 <= caught.value.waited_ms < 3500
    assert (backend.clock.now() - began).total_seconds() < 10


# -- unanswered acquire -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FaultKind.RESPONSE_LOST, FaultKind.SERVER_ERROR])
def test_an_unanswered_acquire_that_landed_is_found(
    backend: MemoryBackend, kind: FaultKind
) -> None:
    lock = lock_of(backend)
    fail(lock, kind, "PUT_IF", applied=True)

    lease = lock.try_acquire()

    assert lease is not None
    lease.guard()
    assert (stored(backend) or {})["token"] == lease.token
    lease.release()
    assert stored(backend) is None


def test_an_unanswered_takeover_that_landed_is_found(backend: MemoryBackend) -> None:
    lock_of(backend, "dead").acquire()
    backend.clock.sleep(TTL_MS / 1000)
    lock = lock_of(backend, "ours")
    fail(lock, FaultKind.RESPONSE_LOST, "put_if_match")
    assert (stored(backend) or {})["token"] != lock.acquire().token
    assert (stored(backend) or {})["owner_id"] == "ours"


def test_an_own_token_found_too_late_does_not_count(backend: MemoryBackend) -> None:
    """The answer was lost, and by the time the read-back comes most of the lease has passed."""
    lock = lock_of(backend)
    fail(lock, FaultKind.RESPONSE_LOST, "PUT_IF")
    fail(lock, FaultKind.SLOW, "GET", seconds=TTL_MS / 1000 * 0.7)

    assert lock.try_acquire() is None
    assert stored(backend) is None, "it is given back, so that nobody waits for it"


def test_an_unanswered_acquire_that_lands_while_we_wait_is_ours(backend: MemoryBackend) -> None:
    """Else we would wait for our own zombie until its lease ends."""
    lock = lock_of(backend, "ours", timeout_ms=2500)
    fail(lock, FaultKind.DELAYED, "PUT_IF", requests=1)  # lands just before the next PUT

    lease = lock.acquire()

    lease.guard()
    assert (stored(backend) or {})["token"] == lease.token
    assert backend.clock.now() < lease.expires_at
    lease.release()
    assert stored(backend) is None


def test_an_unanswered_first_try_is_found_by_the_wait_that_follows(
    backend: MemoryBackend,
) -> None:
    lock = lock_of(backend, "ours")
    fail(lock, FaultKind.DELAYED, "PUT_IF", requests=1)
    assert lock.try_acquire() is None
    assert lock.acquire().safe()


def test_an_unreadable_lock_after_an_unanswered_acquire_can_be_found_later(
    backend: MemoryBackend,
) -> None:
    lock = lock_of(backend, "ours")
    fail(lock, FaultKind.RESPONSE_LOST, "PUT_IF")
    fail(lock, FaultKind.UNAVAILABLE, "GET")
    with pytest.raises(StorageBackendError):
        lock.try_acquire()
    assert lock.acquire().safe()


def test_anothers_token_after_an_unanswered_acquire_is_not_ours(backend: MemoryBackend) -> None:
    lock = lock_of(backend, "ours")
    fail(lock, FaultKind.TIMEOUT, "PUT_IF")
    at(store_of(lock), "GET", layout.LOCK, lambda: lock_of(backend, "theirs").acquire())
    assert lock.try_acquire() is None
    assert (stored(backend) or {})["owner_id"] == "theirs"


def test_a_conflict_at_acquire_is_tried_again(backend: MemoryBackend) -> None:
    lock = lock_of(backend)
    fail(lock, FaultKind.CONFLICT, "PUT_IF", times=3)
    assert lock.acquire().safe()


# -- clocks that differ -----------------------------------------------------------------------


@pytest.mark.parametrize("skew", [-0.9, +0.9])
def test_skew_within_a_third_of_the_ttl_never_makes_two_safe_holders(
    backend: MemoryBackend, skew: float
) -> None:
    """RFC 0004 3.1: clocks may differ by ttl / 3. The safety margin is as wide."""
    held = lock_of(backend, "theirs").acquire()
    ours = lock_of(backend, "ours", skew=skew, timeout_ms=0)
    for _ in range(50):
        backend.clock.sleep(0.1)
        try:
            lease = ours.acquire()
        except LockContentionError:
            continue
        assert lease.safe()
        assert not held.safe()
        return
    pytest.fail("the expired lock was never taken over")


def test_a_clock_far_ahead_takes_over_early_and_the_old_holder_cannot_renew(
    backend: MemoryBackend,
) -> None:
    """More skew than allowed costs the holder its lease; the CAS keeps the data right."""
    held = lock_of(backend, "theirs").acquire()
    hasty = lock_of(backend, "hasty", skew=60).acquire()
    assert hasty.safe()
    assert held.safe(), "it cannot know yet"
    assert not held.renew()
    assert not held.safe()


# -- in a commit ------------------------------------------------------------------------------


def lose_lease(world: World) -> Callable[[], None]:
    return world.pass_lease


@pytest.mark.parametrize("bulk", [True, False], ids=["staged", "small"])
def test_a_lease_lost_while_writing_publishes_nothing(either_world: World, bulk: bool) -> None:
    world = either_world
    ours = world.open("ours", checkpoint_interval=2)
    ours.put(customer("a", age=1))
    before = world.stored_keys()
    at(ours.store, "PUT_IF", "commits/*/manifest.json", lose_lease(world))

    rows = [customer("a", age=2)]
    intent = stream_of(CUSTOMER, rows) if bulk else rows_of(CUSTOMER, *rows)

    with pytest.raises(LeaseExpiredError):
        ours.commit(intent)

    assert world.head().commit_id == 1
    assert world.orphans() == []
    assert world.stored_keys() == before, "parts, checkpoint and lock are gone"
    assert world.open("other").ages() == {"a": 1}
    assert ours.put(customer("a", age=3)).commit_id == 2


def test_a_renewal_that_failed_during_the_upload_stops_the_commit(world: World) -> None:
    ours = world.open("ours")
    held: list[Lease] = []
    original = ours.repo.lock.try_acquire

    def note(tenure: Tenure | None = None) -> Lease | None:
        lease = original(tenure)
        if lease is not None:
            held.append(lease)
        return lease

    ours.repo.lock.try_acquire = note  # type: ignore[method-assign,assignment]
    ours.fail(FaultKind.TIMEOUT, "put_if_match", layout.LOCK, times=None)
    at(ours.store, "PUT_IF", "commits/*/manifest.json", lambda: held[0].renew())

    with pytest.raises(LeaseExpiredError):
        ours.put(customer("a"))

    assert world.head().commit_id == 0
    assert world.orphans() == []


def test_a_lease_that_ran_out_after_the_cas_leaves_the_index_to_the_next_commit(
    either_world: World,
) -> None:
    world = either_world
    ours, other = world.open("ours"), world.open("other")
    ours.put(customer("a", age=1))
    index = world.document(layout.index(*CUSTOMER.ref))
    at(ours.store, "PUT_IF", layout.HEAD, lose_lease(world), when="after")

    assert ours.put(customer("a", age=2)).commit_id == 2

    assert "lease" in str(ours.warning())
    assert world.document(layout.index(*CUSTOMER.ref)) == index
    assert other.ages() == {"a": 2}
    other.put(customer("a", age=3))
    assert world.document(layout.index(*CUSTOMER.ref))["max_indexed_commit"] == 3
    assert world.open().repo.index_warnings() == []


def test_the_holder_of_one_commit_is_not_shown_for_the_next(world: World) -> None:
    ours = world.open("ours")
    shown: list[dict[str, Any]] = []
    at(
        ours.store,
        "PUT_IF",
        layout.LOCK,
        lambda: shown.append(world.document(layout.LOCK)["holder"]),
        when="after",
        times=None,
    )
    ours.put(customer("a", age=1), holder={"run": "r-1"})
    ours.put(customer("a", age=2))
    assert shown[0]["run"] == "r-1"
    assert "run" not in shown[1]


def test_contention_reaches_the_caller_of_commit(world: World) -> None:
    theirs, ours = world.open("theirs"), world.open("ours", s3_lock_timeout_ms=50)
    theirs.repo.lock.holder = {"run": "nightly"}
    lease = theirs.repo.lock.acquire()

    with pytest.raises(LockContentionError) as caught:
        ours.put(customer("a"))

    assert (caught.value.owner_id, caught.value.holder) == ("theirs", {"run": "nightly"})
    lease.release()
    assert ours.put(customer("a")).commit_id == 1
    with pytest.raises(ObjectNotFound):
        world.backend.read(layout.LOCK)
