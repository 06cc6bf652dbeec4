"""Every durable write of enqueueing, claiming, acking, releasing and committing is interrupted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from storage_engine.commitlog import json_object, state
from storage_engine.events import records
from storage_engine.events.object import claims
from storage_engine.events.object.claims import ObjectClaims, StoredClaim
from storage_engine.events.object.consumer import ObjectConsumer
from storage_engine.events.object.pending_events import PendingEvents
from storage_engine.repository.object import engine, outbox
from storage_engine.testing.faults import READS, Fault, FaultKind, FaultPlan, FaultRule
from tests.events.fuzz import LONG
from tests.events.life import Broken, Shop, copy_of, new_shop
from tests.events.test_pauses import at_request

pytestmark = pytest.mark.simulation


@functools.cache
def empty() -> dict[str, bytes]:
    return new_shop().world.backend.objects()


@functools.cache
def requests() -> list[tuple[str, str]]:
    """(kind, key) of every request of an undisturbed life, which ends well."""
    shop, seen = copy_of(empty()), []
    with shop.process("first") as session:
        store = shop.world.writers[-1].store
        store.on_request(lambda kind, key: seen.append((kind, key)))
        shop.live(session)
    shop.go_on()
    shop.verify()
    assert shop.ran["fail", "alone"] == 2
    assert shop.ran["bill", "alone"] == shop.ran["listen", next(iter(shop.events("Noted")))] == 1
    return seen


def writes() -> list[int]:
    return [n for n, (kind, _) in enumerate(requests(), start=1) if kind not in READS]


def interrupted(kind: FaultKind, number: int, **fault: float) -> Shop:
    shop = copy_of(empty())
    plan = FaultPlan([FaultRule(Fault(kind, **fault), nth=number)])  # type: ignore[arg-type]
    with shop.process("first", plan) as session:
        shop.live(session)
    return shop


def test_a_life_has_every_kind_of_write() -> None:
    keys = [key for kind, key in requests() if kind not in READS]
    for part in ("events/", "claims/", "dead_letters/", "sessions/", "meta/head", "_positions/"):
        assert any(part in key for key in keys), part


@pytest.mark.parametrize(
    "kind",
    [
        FaultKind.CRASH_BEFORE,
        FaultKind.CRASH_AFTER,
        FaultKind.RESPONSE_LOST,
        FaultKind.TIMEOUT,
    ],
    ids=lambda kind: kind.value,
)
def test_no_interruption_loses_or_repeats(kind: FaultKind) -> None:
    for number in writes():
        shop = interrupted(kind, number)
        shop.go_on()
        try:
            shop.verify()
        except Broken as broken:
            raise AssertionError(f"{kind.value} at {requests()[number - 1]}: {broken}") from broken
        finally:
            shop.world.close()


def test_a_write_that_lands_late_changes_nothing() -> None:
    for number in writes():
        shop = interrupted(FaultKind.DELAYED, number, seconds=45.0)
        shop.go_on()
        shop.world.backend.land_all()
        shop.go_on(2)
        shop.verify()
        shop.world.close()


@pytest.mark.parametrize("seconds", [1200.0, *([90.0] if LONG else [])])
def test_a_process_that_is_paused_at_a_write_loses_and_repeats_nothing(seconds: float) -> None:
    """Longer than late arrivals are looked for (or than its leases)."""
    for number, (kind, key) in enumerate(requests(), start=1):
        if kind in READS and not LONG:
            continue
        shop = copy_of(empty())

        def others(shop: Shop = shop) -> None:
            shop.world.backend.clock.sleep(seconds)
            shop.go_on(1)

        with shop.process("first") as session:
            at_request(shop.world.writers[-1].store, number, others, "before")
            shop.live(session)
        shop.go_on()
        try:
            shop.verify()
        except Broken as broken:
            raise AssertionError(f"paused at {kind} {key}: {broken}") from broken
        finally:
            shop.world.close()


def test_long_after_nothing_runs_again_and_new_events_are_seen() -> None:
    shop = copy_of(empty())
    with shop.process("first") as session:
        shop.live(session)
    shop.go_on()
    for _ in range(2):
        shop.world.backend.clock.sleep(3600)
        shop.go_on(1)  # moves the watermarks past everything
    before = dict(shop.ran)
    shop.go_on(2)
    assert shop.ran == before
    positions = shop.documents("events/default/_positions/").values()
    assert all(p["finished"] == [] for p in positions)
    from tests.events.life import Ordered

    with shop.process("second") as session:
        shop.sent(lambda: session.emit(Ordered(id="new", n=3)), "new")
    shop.go_on()
    shop.verify()


# -- the invariants can fail: each defect is planted and found ------------------------------------


def broken_by(monkeypatch: pytest.MonkeyPatch, kind: FaultKind = FaultKind.CRASH_AFTER) -> bool:
    for number in writes():
        shop = interrupted(kind, number)
        try:
            shop.go_on()
            shop.verify()
        except Broken:
            return True
        finally:
            shop.world.close()
    return False


def plant(monkeypatch: pytest.MonkeyPatch, target: object, name: str, new: Callable) -> None:
    requests()  # of the right code
    monkeypatch.setattr(target, name, new)


def test_planted_nobody_notices_that_an_event_came_late(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, outbox, "is_late", lambda *_: False)
    with pytest.raises(AssertionError, match="paused at PUT"):
        test_a_process_that_is_paused_at_a_write_loses_and_repeats_nothing(1200.0)


def test_planted_no_look_into_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, state, "acked_since", lambda *_: set())
    assert broken_by(monkeypatch)


def test_planted_no_projection_of_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, PendingEvents, "_walk", lambda self: setattr(self, "_walked", 10**6))
    assert broken_by(monkeypatch)


def test_planted_dead_claims_count_as_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        ObjectConsumer,
        "_see_to_dead",
        lambda self, candidate, dead: self._finish(candidate),
    )
    assert broken_by(monkeypatch)


def test_planted_letter_before_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the specification's sketch: written first, so a crash leaves it to be written again
    under another time."""
    original = ObjectClaims.write

    def write(self: ObjectClaims, record: records.ClaimRecord, etag: str | None) -> object:
        if record.dead_lettered_at is not None:
            envelope: dict[str, Any] = {
                "id": record.event_id,
                "type": "Ordered",
                "payload": {"n": 1},
            }
            envelope |= {"root_event_id": record.event_id, "chain_depth": 0}
            self.bury(envelope, StoredClaim(record, ""))
        return original(self, record, etag)

    plant(monkeypatch, ObjectClaims, "write", write)
    assert broken_by(monkeypatch)


def test_planted_ack_before_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    from storage_engine.events.settler import Settler

    original = Settler._settle

    def settle(self: Settler, work: list) -> None:
        self._consumer.ack([claim for claim, outcome in work if hasattr(outcome, "emits")])
        original(self, work)

    plant(monkeypatch, Settler, "_settle", settle)
    assert broken_by(monkeypatch)


def test_planted_commit_without_ack(monkeypatch: pytest.MonkeyPatch) -> None:
    from storage_engine.repository.protocol import Ack

    plant(monkeypatch, Ack, "as_dict", lambda self: {**dict.fromkeys(_ACK, "")})
    assert broken_by(monkeypatch)


_ACK = ("namespace", "event_id", "handler_id", "token")


def test_planted_outbox_left_to_the_committing_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody projects at commit time: the walk alone must find everything (no defect)."""
    plant(monkeypatch, engine, "projections", lambda *_: [])
    shop = copy_of(empty())
    with shop.process("first") as session:
        shop.live(session)
    shop.go_on()
    shop.verify()


def test_planted_takeover_without_fencing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that overwrites whatever claim stands: two lives in turns show it."""
    original = json_object.write_conditionally

    def unfenced(
        store: object, key: str, data: bytes, *, write_id: str, etag: str | None
    ) -> object:
        store.put(key, data)  # type: ignore[attr-defined]
        return original(store, key + "x", data, write_id=write_id, etag=None)  # type: ignore[arg-type]

    plant(monkeypatch, claims, "write_conditionally", unfenced)
    assert broken_by(monkeypatch, FaultKind.CRASH_BEFORE)
