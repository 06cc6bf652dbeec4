"""Events of one ordering key: one at a time, the oldest first, whatever happens to them."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from storage_engine import (
    Entity,
    Event,
    Field,
    HandlerContext,
    Session,
    TypeDeclarationError,
    on_event,
)
from storage_engine.runtime.core import internals
from tests.events.support import Bus
from tests.events.test_rounds import FAST

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Placed(Event, ordering_key="order"):
    order: Field[str]
    n: Field[int]


class Cancelled(Event, ordering_key="of", priority=500):
    of: Field[str]
    n: Field[int]


class Free(Event):
    n: Field[int]


class Step(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


@pytest.fixture
def session(bus: Bus) -> Iterator[Session]:
    with Session(
        bus.uri, config=bus.config(**FAST, event_claim_limit=7, event_max_attempts=100)
    ) as session:
        # Times of events are told by the test, not too long ago for the bus to look for them.
        global BEGIN
        BEGIN = internals(session).worker.store.now() - timedelta(seconds=4)
        yield session


def at(n: int) -> datetime:
    return BEGIN + timedelta(milliseconds=n)


class Seen:
    """What handlers saw, by key, and whether two of one key ran at once."""

    def __init__(self) -> None:
        self.by_key: dict[str, list[int]] = defaultdict(list)
        self._running: set[str] = set()
        self._mutex = threading.Lock()
        self.overlaps: list[str] = []

    def enter(self, key: str, n: int) -> None:
        with self._mutex:
            if key in self._running:
                self.overlaps.append(key)
            self._running.add(key)
            self.by_key[key].append(n)

    def leave(self, key: str) -> None:
        with self._mutex:
            self._running.discard(key)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_in_order_and_one_at_a_time(session: Session, concurrency: int) -> None:
    """Sent in any order, of two types and other priorities, among others that have no order."""
    seen = Seen()

    @on_event(Placed, Cancelled, Free, id="x")
    def follow(ctx: HandlerContext[Any]) -> None:
        event = ctx.event
        key = {"Placed": "order", "Cancelled": "of"}.get(event.event_type)
        if key is None:
            return
        seen.enter(getattr(event, key), event.n)
        time.sleep(random.uniform(0, 0.003))
        before = ctx.session.query().entities(Step).where(Step.id == getattr(event, key)).first()
        assert (before.n if before else -1) < event.n
        ctx.ensure(Step(id=getattr(event, key), n=event.n))
        seen.leave(getattr(event, key))

    events: list[Event] = []
    for n in range(24):
        key = "abc"[n % 3]
        made = Placed(order=key, n=n, created_at=at(n), priority=random.randint(1, 900))
        events.append(made if n % 4 else Cancelled(of=key, n=n, created_at=at(n)))
        events.append(Free(n=n, created_at=at(n)))
    random.shuffle(events)
    session.emit(events)
    totals = session.drain([follow], concurrency=concurrency)

    assert (totals.handled, totals.failed) == (48, 0)
    assert seen.overlaps == []
    assert seen.by_key == {k: [n for n in range(24) if "abc"[n % 3] == k] for k in "abc"}


def test_one_that_fails_holds_back_those_of_its_key_alone(session: Session) -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}
    fails = [True]

    @on_event(Placed, id="x")
    def follow(ctx: HandlerContext[Placed]) -> None:
        event = ctx.event
        seen[event.order].append(event.n)
        if event.order == "a" and event.n == 0 and fails:
            raise ValueError("not yet")
        ctx.ensure(Step(id=event.id, n=event.n))

    session.emit([Placed(order=key, n=n, created_at=at(n)) for n in range(6) for key in "ab"])
    session.drain([follow], concurrency=4)
    assert set(seen["a"]) == {0}
    assert seen["b"] == [0, 1, 2, 3, 4, 5]
    fails.clear()
    while seen["a"][-1] < 5:
        internals(session).worker.store.sleep(0.15)
        session.drain([follow], concurrency=4)
    assert seen["a"][-6:] == [0, 1, 2, 3, 4, 5]
    assert set(seen["a"][:-5]) == {0}


def test_a_dead_letter_lets_the_next_go(bus: Bus) -> None:
    order: list[int] = []

    @on_event(Placed, id="x")
    def follow(ctx: HandlerContext[Placed]) -> None:
        order.append(ctx.event.n)
        if ctx.event.n == 1:
            raise ValueError("never")

    with Session(bus.uri, config=bus.config(**FAST, event_max_attempts=1)) as session:
        now = internals(session).worker.store.now()
        session.emit(
            [Placed(order="a", n=n, created_at=now + timedelta(milliseconds=n)) for n in range(4)]
        )
        totals = session.drain([follow], concurrency=4)
    assert order == [0, 1, 2, 3]
    assert (totals.handled, totals.dead_lettered) == (3, 1)


def test_a_commit_that_fails_holds_back_the_next_as_the_handler_has_ended_long_ago(
    session: Session,
) -> None:
    """Only when the first is published may the second run."""
    order: list[int] = []

    @on_event(Placed, id="x")
    def follow(ctx: HandlerContext[Placed]) -> None:
        order.append(ctx.event.n)
        ctx.ensure(Step(id=ctx.event.id, n=ctx.event.n))
        if ctx.event.n == 0 and order.count(0) == 1:
            ctx.commit(expect={Step: 99})

    session.ensure(Step(id="first", n=0))
    session.commit()
    session.emit([Placed(order="a", n=n, created_at=at(n)) for n in range(3)])
    while len(order) < 4:
        session.drain([follow], concurrency=3)
        internals(session).worker.store.sleep(0.15)
    assert order == [0, 0, 1, 2]


def test_each_handler_has_its_own_order(session: Session) -> None:
    """One that fails for one handler is no matter for another."""
    heard: list[int] = []

    @on_event(Placed, id="fails")
    def fails(ctx: HandlerContext[Placed]) -> None:
        raise ValueError("never")

    @on_event(Placed, id="hears")
    def hears(ctx: HandlerContext[Placed]) -> None:
        heard.append(ctx.event.n)

    session.emit([Placed(order="a", n=n, created_at=at(n)) for n in range(5)])
    session.drain([fails, hears], concurrency=2)
    assert heard == [0, 1, 2, 3, 4]


def test_an_older_one_that_comes_late_waits_for_the_one_in_hand(session: Session) -> None:
    seen = Seen()

    @on_event(Placed, Free, id="x")
    def follow(ctx: HandlerContext[Any]) -> None:
        if ctx.event.event_type == "Free":
            return
        seen.enter("a", ctx.event.n)
        if ctx.event.n == 5:
            session.emit([Placed(order="a", n=1, created_at=at(1)), Free(n=0)])
            time.sleep(0.1)
        seen.leave("a")

    session.emit(Placed(order="a", n=5, created_at=at(5)))
    while len(seen.by_key["a"]) < 2:
        session.drain([follow], concurrency=4)
    assert (seen.by_key["a"], seen.overlaps) == ([5, 1], [])


def test_a_hot_key_does_not_hide_others(session: Session) -> None:
    """Behind more of one key than are claimed or read at once."""
    handled: list[str] = []

    @on_event(Placed, id="x")
    def follow(ctx: HandlerContext[Placed]) -> None:
        handled.append(ctx.event.order)
        if ctx.event.order == "other":
            session.stop()

    session.emit([Placed(order="hot", n=n, created_at=at(n)) for n in range(60)])
    session.emit(Placed(order="other", n=0, created_at=at(100)))
    session.run([follow])
    assert len(handled) < 20  # of each claim's worth that is read, one of the hot ones is handled


def test_run_goes_on_with_the_next_at_once(bus: Bus) -> None:
    """Without waiting for the next poll, which here would be for ever."""

    @on_event(Placed, id="x")
    def follow(ctx: HandlerContext[Placed]) -> None:
        ctx.ensure(Step(id=ctx.event.id, n=ctx.event.n))
        if ctx.event.n == 5:
            opened.stop()

    with Session(bus.uri, config=bus.config(event_poll_interval_ms=3_600_000)) as opened:
        now = internals(opened).worker.store.now()
        opened.emit(
            [Placed(order="a", n=n, created_at=now + timedelta(milliseconds=n)) for n in range(6)]
        )
        assert opened.run([follow]).handled == 6


# -- declaration ----------------------------------------------------------------------------------


def test_the_field_must_be_there() -> None:
    with pytest.raises(TypeDeclarationError, match="ordering_key names 'nr', and its fields are n"):

        class Wrong(Event, ordering_key="nr"):
            n: Field[int]

    with pytest.raises(TypeDeclarationError, match="takes the name of a field"):

        class Wronger(Event, ordering_key=["n"]):  # type: ignore[arg-type]
            n: Field[int]


def test_a_base_hands_it_down() -> None:
    class Base(Event, abstract=True, ordering_key="order"):
        order: Field[str]

    class Derived(Base):
        n: Field[int]

    @on_event(Derived, Free)
    def follow(ctx: HandlerContext[Any]) -> None: ...

    assert follow.subscription().ordering_keys == {"Derived": "order"}


def test_values_that_are_nothing_have_no_order() -> None:
    class Maybe(Event, ordering_key="order"):
        order: Field[int | None] = Field(default=None)

    @on_event(Maybe)
    def follow(ctx: HandlerContext[Maybe]) -> None: ...

    subscription = follow.subscription()
    assert subscription.order_of(Maybe().envelope("x")) is None
    assert subscription.order_of(Maybe(order=0).envelope("x")) == "0"
