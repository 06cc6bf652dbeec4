"""The contract of an event store, on every kind of storage."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from storage_engine.errors import LeaseExpiredError
from storage_engine.events.dispatcher import Dispatcher, Pace
from storage_engine.events.outcomes import Success
from storage_engine.events.protocol import Consumer, EventStore
from storage_engine.events.records import Claim, Failure
from storage_engine.events.schedules import Scheduler
from storage_engine.repository.protocol import CommitRequest
from tests.engines import on_servers
from tests.events.support import BILL, NAMESPACE, SHIP, Billed, Bus, ids, order, take_all


def wait(store: EventStore, seconds: float) -> None:
    store.sleep(seconds)


def one(worker: Consumer) -> Claim:
    (claim,) = worker.claim(10, whole=True)
    return claim


def failure(claim: Claim, error: str = "boom", *, retry: bool = True) -> Failure:
    return Failure(claim, error, retry)


# -- claiming -------------------------------------------------------------------------------------


@on_servers
def test_an_event_is_claimed_acked_and_then_finished(bus: Bus) -> None:
    store = bus.open()
    store.enqueue([order(1)])
    worker = bus.worker()

    claim = one(worker)
    assert claim.envelope == order(1, created_at=claim.envelope["created_at"])
    assert (claim.record.attempts, claim.record.deliveries) == (0, 1)
    assert worker.claim(10, whole=True) == []
    assert bus.worker().claim(10) == []
    assert worker.ack([claim]) == [True]
    assert bus.worker().claim(10) == []

    (info,) = store.list_events(NAMESPACE, 10)
    assert info.status == "acked"


@on_servers
def test_by_priority_then_by_age(bus: Bus) -> None:
    store = bus.open()
    at = store.now()
    for number, (priority, seconds) in enumerate([(100, 3), (100, 1), (300, 2), (5, 0)]):
        created = at + timedelta(seconds=seconds)
        store.enqueue([order(number, priority=priority, created_at=created)])

    assert ids(bus.worker().claim(10)) == ["order-2", "order-1", "order-0", "order-3"]


def test_the_limit_holds(bus: Bus) -> None:
    bus.open().enqueue([order(n) for n in range(7)])
    worker = bus.worker()

    assert [len(worker.claim(3)) for _ in range(4)] == [3, 3, 1, 0]


def test_each_handler_gets_the_event_and_the_more_important_one_first(bus: Bus) -> None:
    from dataclasses import replace

    bus.open().enqueue([order(1)])
    worker = bus.worker(SHIP, replace(BILL, priority=200))

    assert [c.handler_id for c in worker.claim(10)] == [BILL.handler_id, SHIP.handler_id]


def test_other_types_and_namespaces_are_left_alone(bus: Bus) -> None:
    store = bus.open()
    store.enqueue([Billed(order_id="1").envelope(NAMESPACE)])
    store.enqueue([order(1) | {"namespace": "elsewhere"}])

    assert bus.worker().claim(10) == []


def test_an_event_is_enqueued_once_by_its_id(bus: Bus) -> None:
    store = bus.open()
    store.enqueue([order(1)])
    store.enqueue([order(1)])

    assert len(take_all(bus.worker())) == 1


def test_any_text_is_an_id(bus: Bus) -> None:
    odd = ["../../etc", "a/b", ".hidden", "_projected", "ä ö?", "%2F", "a_b"]
    store = bus.open()
    store.enqueue([order(n, id=text) for n, text in enumerate(odd)])
    worker = bus.worker()

    claims = take_all(worker)
    assert sorted(ids(claims)) == sorted(odd)
    assert worker.ack(claims) == [True] * len(odd)
    assert {i.envelope["id"] for i in store.list_events(NAMESPACE, 50, status="acked")} == set(odd)


@on_servers
def test_sixteen_workers_race_and_each_event_goes_to_one(bus: Bus) -> None:
    # moto takes one request at a time, and twenty seconds for the 48 of the others.
    count = 16 if bus.kind == "moto" else 48
    bus.open().enqueue([order(n) for n in range(count)])
    workers = [bus.worker(name=f"w{n}", s3_lock_timeout_ms=60_000) for n in range(16)]
    gate = threading.Barrier(16)

    def race(worker: Consumer) -> list[str]:
        gate.wait()
        found = []
        for _ in range(4):
            claims = worker.claim(8)
            assert worker.ack(claims) == [True] * len(claims)
            found += ids(claims)
        return found

    with ThreadPoolExecutor(16) as pool:
        won = [event for found in pool.map(race, workers) for event in found]
    rest = take_all(bus.worker())
    assert Counter([*won, *ids(rest)]) == Counter(f"order-{n}" for n in range(count))


def test_what_others_hold_does_not_hide_the_rest(bus: Bus) -> None:
    bus.open().enqueue([order(n) for n in range(6)])
    first, second = bus.worker(), bus.worker()
    assert len(first.claim(4)) == 4

    assert len(second.claim(2)) == 2


# -- leases ---------------------------------------------------------------------------------------


@on_servers
def test_a_lease_that_ran_out_is_taken_over_and_the_stale_worker_can_do_nothing(bus: Bus) -> None:
    store = bus.open(**bus.short)
    store.enqueue([order(1)])
    stale, fresh = bus.worker(name="stale", **bus.short), bus.worker(name="fresh", **bus.short)
    lost = one(stale)
    assert fresh.claim(10) == []
    bus.pass_lease(store)

    taken = one(fresh)
    assert (taken.record.session_id, taken.record.deliveries) == ("fresh", 2)
    assert taken.record.token != lost.record.token
    assert stale.extend([lost]) == [False]
    assert lost.lost
    assert stale.ack([lost]) == [False]
    assert stale.release([failure(lost)]) == [None]
    assert fresh.ack([taken]) == [True]
    (info,) = store.list_events(NAMESPACE, 10)
    assert info.claims[0].session_id == "fresh"
    assert info.claims[0].attempts == 0


@pytest.mark.parametrize("act", ["ack", "release", "give_back", "extend"])
def test_each_act_of_a_stale_worker_is_refused_by_itself(bus: Bus, act: str) -> None:
    store = bus.open(**bus.short)
    store.enqueue([order(1)])
    stale, fresh = bus.worker(**bus.short), bus.worker(**bus.short)
    lost = one(stale)
    assert fresh.claim(10) == []
    bus.pass_lease(store)
    taken = one(fresh)

    getattr(stale, act)([failure(lost)] if act == "release" else [lost])
    (info,) = store.list_events(NAMESPACE, 10)
    assert info.claims == (taken.record,)
    assert lost.lost


def test_an_extended_lease_holds(bus: Bus) -> None:
    store = bus.open(**bus.short)
    store.enqueue([order(1)])
    worker, other = bus.worker(**bus.short), bus.worker(**bus.short)
    claim = one(worker)
    assert other.claim(10) == []
    for _ in range(3):
        wait(store, bus.lease_ms / 1500)
        assert worker.extend([claim]) == [True]
    assert other.claim(10, whole=True) == []
    assert worker.ack([claim]) == [True]


def test_a_claim_that_is_let_go_comes_again_when_its_lease_has_run_out(bus: Bus) -> None:
    store = bus.open(**bus.short)
    store.enqueue([order(1)])
    worker = bus.worker(**bus.short)
    claim = one(worker)
    worker.let_go([claim])
    assert worker.extend([claim]) == []
    assert worker.claim(10) == []
    bus.pass_lease(store)

    assert one(worker).record.deliveries == 2


def test_a_claim_that_is_given_back_is_due_at_once_and_was_no_delivery(bus: Bus) -> None:
    bus.open().enqueue([order(1)])
    worker = bus.worker()
    worker.give_back([one(worker)])

    again = one(bus.worker())
    assert (again.record.deliveries, again.record.attempts) == (1, 0)


# -- failures -------------------------------------------------------------------------------------


@on_servers
def test_a_failure_is_tried_again_after_a_growing_pause(bus: Bus) -> None:
    settings: dict[str, Any] = {"event_backoff_base_ms": 200, "event_backoff_max_ms": 1_000}
    store = bus.open(**settings)
    store.enqueue([order(1)])
    worker = bus.worker(**settings)
    pauses = []
    for attempt in (1, 2, 3):
        claim = one(worker)
        assert claim.record.attempts == attempt - 1
        (record,) = worker.release([failure(claim)])
        assert record is not None
        assert record.last_error == "boom"
        pause = (record.available_at - record.lease_until).total_seconds()
        pauses.append(pause)
        assert worker.claim(10) == []
        due = worker.next_due()
        assert due == record.available_at
        wait(store, pause + 0.05)
    for pause, expected in zip(pauses, (0.4, 0.8, 1.0), strict=True):
        assert expected <= pause <= expected + 0.1


@on_servers
def test_at_the_limit_it_is_a_dead_letter(bus: Bus) -> None:
    settings: dict[str, Any] = {"event_max_attempts": 2, "event_backoff_base_ms": 0}
    store = bus.open(**settings)
    store.enqueue([order(1, chain_depth=3, root_event_id="first")])
    worker = bus.worker(**settings)
    worker.release([failure(one(worker))])
    wait(store, 0.2)
    (record,) = worker.release([failure(one(worker), "the end")])

    assert record is not None
    assert record.dead_lettered_at is not None
    assert worker.claim(10, whole=True) == []
    (letter,) = store.list_dead_letters(NAMESPACE, 10)
    assert (letter.event_id, letter.handler_id) == ("order-1", BILL.handler_id)
    assert (letter.attempts, letter.last_error, letter.event_type) == (2, "the end", "OrderPlaced")
    told, failed = sorted(
        store.list_events(NAMESPACE, 10), key=lambda i: i.envelope["type"], reverse=True
    )
    assert failed.status == "dead_lettered"
    assert told.envelope["type"] == "event.dead_letter"
    assert (told.envelope["root_event_id"], told.envelope["chain_depth"]) == ("first", 4)
    assert told.envelope["payload"]["event_id"] == "order-1"
    assert told.envelope["payload"]["last_error"] == "the end"


def test_without_retry_it_is_dead_at_once(bus: Bus) -> None:
    store = bus.open()
    store.enqueue([order(1)])
    worker = bus.worker()
    worker.release([failure(one(worker), retry=False)])

    assert [x.attempts for x in store.list_dead_letters(NAMESPACE, 10)] == [1]


def test_a_dead_letter_at_the_end_of_a_chain_tells_nobody(bus: Bus) -> None:
    store = bus.open(max_event_chain_depth=3)
    store.enqueue([order(1, chain_depth=3)])
    worker = bus.worker(max_event_chain_depth=3)
    worker.release([failure(one(worker), retry=False)])

    assert len(store.list_dead_letters(NAMESPACE, 10)) == 1
    assert len(store.list_events(NAMESPACE, 10)) == 1


@on_servers
def test_a_handler_that_kills_its_process_ends_as_a_dead_letter(bus: Bus) -> None:
    settings: dict[str, Any] = {**bus.short, "event_max_attempts": 3}
    store = bus.open(**settings)
    store.enqueue([order(1)])
    for delivery in (1, 2, 3):
        claim = one(bus.worker(**settings))  # and nobody ever answers
        assert claim.record.deliveries == delivery
        bus.pass_lease(store)
    assert bus.worker(**settings).claim(10) == []

    (letter,) = store.list_dead_letters(NAMESPACE, 10)
    assert letter.attempts == 0
    assert "delivered 3 times" in (letter.last_error or "")


def test_a_suspect_is_handled_alone_and_others_are_not_taken_along(bus: Bus) -> None:
    settings = {**bus.short, "event_max_attempts": 5}
    store = bus.open(**settings)
    store.enqueue([order(n) for n in range(4)])
    for _ in range(2):
        worker = bus.worker(**settings)
        assert len(worker.claim(10)) == 4
        bus.pass_lease(store)
    worker = bus.worker(**settings)
    assert worker.claim(10, ahead=True) == []
    sizes = []
    for _ in range(4):
        claims = worker.claim(10)
        sizes.append(len(claims))
        assert all(claim.suspect for claim in claims)
        worker.ack(claims)
    assert sizes == [1, 1, 1, 1]


def test_suspects_get_their_turn_while_others_keep_coming(bus: Bus) -> None:
    """A worker with much to do claims ahead, which never takes a suspect."""
    settings = {**bus.short, "event_max_attempts": 5}
    store = bus.open(**settings)
    store.enqueue([order(f"suspect-{n}") for n in range(3)])
    for _ in range(2):
        assert len(bus.worker(**settings).claim(10)) == 3
        bus.pass_lease(store)
    store.enqueue([order(n) for n in range(120)])
    handled: list[str] = []

    def handle(claim: Claim) -> Success:
        handled.append(claim.event_id)
        return Success()

    lease = timedelta(milliseconds=bus.lease_ms)
    Dispatcher(
        store,
        bus.worker(store=store),
        handle,
        namespace=NAMESPACE,
        session_id="worker",
        pace=Pace(2, timedelta(milliseconds=1), lease, timedelta(minutes=1)),
        scheduler=Scheduler(store, NAMESPACE, ()),
        metadata={},
        flush=lambda: None,
    ).run(until_idle=True)
    assert len(handled) == len(set(handled)) == 123
    suspects = [place for place, name in enumerate(handled) if "suspect" in name]
    assert max(suspects) < 80, suspects


def test_events_that_nobody_here_handles_do_not_hide_others(bus: Bus) -> None:
    """However many of them stand first, and however few are claimed at a time."""
    store = bus.open()
    store.enqueue([{**order(f"other-{n}"), "type": "Other"} for n in range(23)])
    store.enqueue([order("ours")])

    assert ids(bus.worker(store=store).claim(2)) == ["order-ours"]


def test_a_whole_look_comes_to_the_end_whatever_is_in_between(bus: Bus) -> None:
    """Of more events than are listed at once."""
    if bus.kind not in ("memory", "sqlite"):
        pytest.skip("6,000 files for one rule")
    store = bus.open()
    store.enqueue([{**order(f"other-{n}"), "type": "Other"} for n in range(6_000)])
    store.enqueue([order("ours")])

    assert ids(bus.worker(store=store).claim(50, whole=True)) == ["order-ours"]


# -- commits --------------------------------------------------------------------------------------


@on_servers
def test_an_event_of_a_commit_reaches_handlers(bus: Bus) -> None:
    bus.open()
    bus.opened[0].commit(CommitRequest([], events=[order(1)]))
    bus.opened[0].flush()

    assert ids(bus.worker().claim(10)) == ["order-1"]


@on_servers
def test_a_commit_acks(bus: Bus) -> None:
    store = bus.open(**bus.short)
    store.enqueue([order(1)])
    worker = bus.worker(store=store)
    claim = one(worker)
    bus.opened[0].commit(CommitRequest([], events=[order(2)], acks=[claim.as_ack()]))
    bus.pass_lease(store)  # and the worker dies before its ack

    assert ids(take_all(bus.worker(**bus.short))) == ["order-2"]
    assert {
        i.status for i in store.list_events(NAMESPACE, 10) if i.envelope["id"] == "order-1"
    } == {"acked"}


def test_an_event_that_another_commit_has_handled_does_not_stop_a_takeover(bus: Bus) -> None:
    """Found by the soak: the log is asked for an expired claim and tells of other events too."""
    store = bus.open(**bus.short)
    store.enqueue([order(1)])
    one(bus.worker(store=store))  # and it dies
    survivor = bus.worker(**bus.short)
    assert survivor.claim(10) == []
    store.enqueue([order(2)])
    handled = bus.worker(store=store).claim(10)
    assert ids(handled) == ["order-2"]
    bus.opened[0].commit(CommitRequest([], events=[order(3)], acks=[handled[0].as_ack()]))
    bus.pass_lease(store)

    assert "order-1" in ids(take_all(survivor))


@on_servers
def test_two_workers_cannot_both_commit_for_one_event(bus: Bus) -> None:
    store = bus.open(**bus.short)
    store.enqueue([order(1)])
    stale = bus.worker(store=store)
    lost = one(stale)
    other = bus.open(**bus.short)
    fresh = bus.worker(store=other)
    assert fresh.claim(10) == []
    bus.pass_lease(store)
    taken = one(fresh)

    bus.opened[1].commit(CommitRequest([], events=[order(2)], acks=[taken.as_ack()]))
    with pytest.raises(LeaseExpiredError, match="no longer claimed"):
        bus.opened[0].commit(CommitRequest([], events=[order(3)], acks=[lost.as_ack()]))
    assert bus.opened[0].head_commit_id() == 1


# -- sessions -------------------------------------------------------------------------------------


@on_servers
def test_sessions_come_beat_and_die(bus: Bus) -> None:
    store = bus.open()
    store.register_session(NAMESPACE, "a", {"pid": 1})
    store.register_session(NAMESPACE, "b", {})
    bus.pass_lease(store)
    ttl = bus.lease_ms
    store.heartbeat(NAMESPACE, "a")
    store.heartbeat(NAMESPACE, "c")

    found = {s.session_id: s for s in store.list_sessions(NAMESPACE, ttl)}
    assert {name: s.is_dead for name, s in found.items()} == {"a": False, "b": True, "c": False}
    assert found["a"].metadata == {"pid": 1}
    assert found["a"].started_at < found["a"].last_heartbeat
    (namespace,) = store.list_namespaces(ttl)
    assert (namespace.sessions, namespace.dead_sessions) == (2, 1)
    store.end_session(NAMESPACE, "a")
    assert {s.session_id for s in store.list_sessions(NAMESPACE, ttl)} == {"b", "c"}


# -- administration -------------------------------------------------------------------------------


def dead(bus: Bus, store: EventStore, number: int) -> None:
    store.enqueue([order(number)])
    worker = bus.worker(store=store)
    claims = take_all(worker)
    worker.release([failure(c, f"no {number}", retry=False) for c in claims])


def test_namespaces_are_counted(bus: Bus) -> None:
    store = bus.open()
    assert store.list_namespaces(1_000) == []
    dead(bus, store, 1)
    store.enqueue([order(2) | {"namespace": "elsewhere"}])
    store.register_session("third", "s", {})

    found = {
        n.namespace: (n.events, n.sessions, n.dead_letters) for n in store.list_namespaces(10**9)
    }
    assert found == {"shop": (2, 0, 1), "elsewhere": (1, 0, 0), "third": (0, 1, 0)}


def test_status_and_filters(bus: Bus) -> None:
    store = bus.open()
    dead(bus, store, 1)
    store.enqueue([order(2), order(3)])
    worker = bus.worker(store=store)
    claims = {c.event_id: c for c in take_all(worker)}
    worker.ack([claims["order-2"]])
    store.enqueue([order(4)])

    def status(**wanted: str) -> dict[str, str]:
        found = store.list_events(NAMESPACE, 50, **wanted)
        return {i.envelope["id"]: i.status for i in found if i.envelope["type"] == "OrderPlaced"}

    assert status() == {
        "order-1": "dead_lettered",
        "order-2": "acked",
        "order-3": "claimed",
        "order-4": "pending",
    }
    assert status(status="pending") == {"order-4": "pending"}
    assert status(type="Other") == {}
    assert len(store.list_events(NAMESPACE, 2)) == 2


def test_inspect_shows_the_claims(bus: Bus) -> None:
    store = bus.open()
    dead(bus, store, 1)
    store.enqueue([order(1) | {"namespace": "elsewhere"}])

    (info,) = store.inspect_event("order-1", NAMESPACE)
    assert info.claims[0].last_error == "no 1"
    assert {i.envelope["namespace"] for i in store.inspect_event("order-1")} == {
        NAMESPACE,
        "elsewhere",
    }
    assert store.inspect_event("nobody") == []


@on_servers
def test_replay_sends_a_copy_that_begins_anew(bus: Bus) -> None:
    store = bus.open()
    store.enqueue([order(1, chain_depth=4, root_event_id="x", priority=7)])
    worker = bus.worker(store=store)
    worker.ack(take_all(worker))
    copy = store.replay_event(NAMESPACE, "order-1")

    assert copy is not None
    assert copy["id"] != "order-1"
    assert (copy["root_event_id"], copy["chain_depth"], copy["priority"]) == (copy["id"], 0, 7)
    (claim,) = take_all(worker)
    assert claim.envelope == copy
    assert store.replay_event(NAMESPACE, "nobody") is None


@on_servers
def test_redrive_is_for_the_handler_that_gave_up_alone(bus: Bus) -> None:
    store = bus.open()
    dead(bus, store, 1)
    (letter,) = store.list_dead_letters(NAMESPACE, 10)
    copy = store.redrive(letter)

    assert copy is not None
    assert (copy["root_event_id"], copy["payload"]) == ("order-1", {"order_id": "1"})
    assert store.list_dead_letters(NAMESPACE, 10) == []
    assert store.redrive(letter) is None
    claims = take_all(bus.worker(BILL, SHIP))
    assert {(c.handler_id, c.event_id) for c in claims} == {
        (BILL.handler_id, copy["id"]),
        (SHIP.handler_id, "order-1"),
    }
    (info,) = store.inspect_event("order-1", NAMESPACE)
    assert info.status != "dead_lettered"


def test_dead_letters_by_handler(bus: Bus) -> None:
    store = bus.open()
    dead(bus, store, 1)

    assert len(store.list_dead_letters(NAMESPACE, 10, handler_id=BILL.handler_id)) == 1
    assert store.list_dead_letters(NAMESPACE, 10, handler_id="x") == []


@on_servers
def test_cleanup_deletes_old_events_with_their_claims(bus: Bus) -> None:
    store = bus.open()
    dead(bus, store, 1)
    store.register_session(NAMESPACE, "s", {})
    bus.opened[0].commit(CommitRequest([], events=[order(2)]))
    bus.opened[0].flush()
    store.sleep(0.05)
    before = store.now()
    store.sleep(0.05)
    store.enqueue([order(3)])

    assert store.cleanup_events(NAMESPACE, before, apply=False) == 3
    assert len(store.list_events(NAMESPACE, 10)) == 4
    assert store.cleanup_events(NAMESPACE, before) == 3
    assert [i.envelope["id"] for i in store.list_events(NAMESPACE, 10)] == ["order-3"]
    assert len(store.list_dead_letters(NAMESPACE, 10)) == 1
    assert len(store.list_sessions(NAMESPACE, 10**9)) == 1
    assert ids(take_all(bus.worker())) == ["order-3"]  # the log does not bring them back
    assert store.cleanup_events(NAMESPACE, store.now() - timedelta(days=1)) == 0


# -- positions ------------------------------------------------------------------------------------


def test_a_new_worker_goes_on_where_the_last_one_was(bus: Bus) -> None:
    store = bus.open()
    store.enqueue([order(n) for n in range(5)])
    worker = bus.worker(store=store)
    claims = take_all(worker)
    worker.ack(claims[:-1])
    worker.give_back(claims[-1:])
    worker.save()
    store.enqueue([order(9)])

    assert sorted(ids(take_all(bus.worker()))) == ["order-4", "order-9"]


def test_a_handler_that_takes_another_type_sees_its_earlier_events(bus: Bus) -> None:
    store = bus.open()
    store.enqueue([order(1), Billed(order_id="1", id="billed").envelope(NAMESPACE)])
    worker = bus.worker(store=store)
    worker.ack(take_all(worker))
    worker.save()
    from dataclasses import replace

    both = replace(BILL, event_types=frozenset({"OrderPlaced", "Billed"}))
    assert ids(take_all(bus.worker(both))) == ["billed"]
