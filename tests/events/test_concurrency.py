"""Handlers of one worker that run beside one another."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_engine import (
    ConfigurationError,
    Entity,
    Event,
    Field,
    HandlerContext,
    Session,
    on_event,
)
from storage_engine.events import dispatcher
from storage_engine.events.lanes import Lanes
from storage_engine.runtime.core import internals
from storage_engine.runtime.worker import HandlerRun
from tests.events.clock import skipped_sleep
from tests.events.support import Bus, made_bus
from tests.events.test_rounds import FAST, wait_until
from tests.events.test_sessions import real, simulated

__all__ = ["real", "simulated"]


class Ordered(Event):
    n: Field[int]


class Invoice(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


@pytest.fixture
def session(bus: Bus) -> Iterator[Session]:
    with Session(bus.uri, config=bus.config(**FAST)) as session:
        yield session


@pytest.fixture
def skipping(tmp_path: Path) -> Iterator[Bus]:
    """Threads run by the real clock, and waits of the bus are skipped."""
    with skipped_sleep(), made_bus(f"file://{tmp_path}/skipping") as bus:
        yield bus


def send(session: Session, count: int, **fields: Any) -> None:
    session.emit([Ordered(id=f"o{n}", n=n, **fields) for n in range(count)])


def handler_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("onto-handler")]


# -- beside one another ---------------------------------------------------------------------------


def test_so_many_at_once_and_no_more(session: Session) -> None:
    """A barrier that four pass together, and none alone."""
    together = threading.Barrier(4)
    running: set[str] = set()
    most: list[int] = []

    @on_event(Ordered, id="meet")
    def meet(ctx: HandlerContext[Ordered]) -> None:
        running.add(ctx.event.id)
        most.append(len(running))
        together.wait(60)
        running.discard(ctx.event.id)
        ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))

    send(session, 20)
    runs: list[HandlerRun] = []
    totals = session.drain([meet], concurrency=4, observe=runs.append)

    assert (totals.handled, totals.failed, totals.dropped, totals.claimed) == (20, 0, 0, 20)
    assert max(most) == 4
    assert Counter(run.event_id for run in runs) == Counter(f"o{n}" for n in range(20))
    assert sorted(run.commit.commit_id for run in runs if run.commit) == list(range(1, 21))
    assert session.query().entities(Invoice).count() == 20
    wait_until(lambda: not handler_threads())


def test_one_at_a_time_runs_where_it_is_called(session: Session) -> None:
    threads: set[int] = set()

    @on_event(Ordered, id="x")
    def note(ctx: HandlerContext[Ordered]) -> None:
        threads.add(threading.get_ident())

    send(session, 3)
    session.drain([note])
    assert threads == {threading.get_ident()}


def test_handlers_start_by_priority(session: Session) -> None:
    """Three lanes: the first three that start are the three most urgent, and so on."""
    started: list[int] = []
    turns = [threading.Barrier(3) for _ in range(4)]

    @on_event(Ordered, id="x")
    def note(ctx: HandlerContext[Ordered]) -> None:
        started.append(ctx.event.n)
        turns[ctx.event.n // 3].wait(60)

    session.emit([Ordered(n=n, priority=100 - n) for n in (7, 2, 11, 0, 9, 4, 1, 10, 3, 8, 6, 5)])
    session.drain([note], concurrency=3)
    assert [sorted(started[n : n + 3]) for n in range(0, 12, 3)] == [
        [n, n + 1, n + 2] for n in range(0, 12, 3)
    ]


def test_each_reads_and_writes_by_itself(session: Session) -> None:
    """Queries, SQL, commits of their own, failures and notes, all at once."""

    @on_event(Ordered, id="busy", writes=[])
    def busy(ctx: HandlerContext[Ordered]) -> None:
        n = ctx.event.n
        ctx.ensure(Invoice(id=ctx.event.id, n=n))
        if n % 4 == 0:
            assert ctx.session.query().entities(Invoice).where(Invoice.n < 0).count() == 0
        elif n % 4 == 1:
            (row,) = ctx.session.sql("select count(*) as n from Invoice").collect()
            assert row["n"] >= 0
        elif n % 4 == 2:
            ctx.session.ensure(Invoice(id=f"own-{n}", n=n))
            ctx.session.commit()
        elif n % 8 == 7:
            raise ValueError("not today")

    session.ensure(Invoice(id="first", n=0))
    session.commit()
    send(session, 32)
    failed: dict[str, str] = {}
    totals = session.drain(
        [busy],
        concurrency=8,
        observe=lambda run: failed.update({run.event_id: run.error}) if run.error else None,
    )
    assert failed == dict.fromkeys(("o7", "o15", "o23", "o31"), "ValueError: not today")
    assert totals.handled == 28
    assert totals.notes == [
        "busy: it wrote Invoice, which @on_event(..., writes=[...]) does not name"
    ]
    rows = {row.id for row in session.query().entities(Invoice).collect()}
    assert rows == {
        "first",
        *(f"o{n}" for n in range(32) if n % 8 != 7),
        *(f"own-{n}" for n in range(2, 32, 4)),
    }


def test_observe_and_progress_come_one_at_a_time(real: Bus) -> None:
    inside = threading.Lock()
    overlapped: list[str] = []

    def alone(what: str) -> None:
        if not inside.acquire(blocking=False):
            overlapped.append(what)
            return
        time.sleep(0.002)
        inside.release()

    @on_event(Ordered, id="x")
    def bill(ctx: HandlerContext[Ordered]) -> None:
        if ctx.event.n % 2:
            ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))

    with Session(real.uri, config=real.config(**FAST)) as session:
        send(session, 40)
        session.drain([bill], concurrency=8, observe=lambda run: alone(run.event_id))
    assert overlapped == []


# -- one that hangs -------------------------------------------------------------------------------


def test_a_handler_that_hangs_stops_no_other(session: Session) -> None:
    """Others are claimed, handled, published and acked, more than one batch of them."""
    hangs = threading.Event()
    done: list[int] = []

    @on_event(Ordered, id="x")
    def bill(ctx: HandlerContext[Ordered]) -> None:
        if ctx.event.n == 0:
            assert hangs.wait(60)
        ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))

    def observe(run: HandlerRun) -> None:
        done.append(1)
        if len(done) == 119:
            hangs.set()

    send(session, 120)
    assert session.drain([bill], concurrency=2, observe=observe).handled == 120


def test_a_suspect_runs_alone_and_waits_for_the_others(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event that has ended two processes is handled when no other is, and others go on."""
    from tests.events.support import NAMESPACE

    running: Counter[str] = Counter()
    beside: list[int] = []

    @on_event(Ordered, id="x")
    def note(ctx: HandlerContext[Ordered]) -> None:
        running[ctx.event.id] = 1
        if ctx.event.id == "bad":
            beside.append(sum(running.values()))
        time.sleep(0.01)
        running[ctx.event.id] = 0
        if ctx.event.id == "bad":
            beside.append(sum(running.values()))

    config = bus.config(**FAST, **bus.short, event_claim_limit=5)
    with Session(bus.uri, config=config, namespace=NAMESPACE) as session:
        session.emit(Ordered(id="bad", n=0))
        store = internals(session).worker.store
        for name in ("one", "two"):  # they take it, and are never heard of again
            (_,) = store.consumer(NAMESPACE, [note.subscription()], name).claim(1, whole=True)
            bus.pass_lease(store)
        session.emit([Ordered(id=f"o{n}", n=n) for n in range(60)])
        totals = session.drain([note], concurrency=4)
        for _ in range(20):
            if beside:
                break
            store.sleep(1)
            totals = session.drain([note], concurrency=4)
    assert totals.failed == 0
    assert beside == [1, 0]


def test_a_hanging_handler_keeps_suspects_waiting_once_and_others_not(
    skipping: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    original = Lanes.wait_for_all

    def wait_for_all(self: Any, seconds: float) -> None:
        waits.append(seconds)
        original(self, 0.01)

    monkeypatch.setattr(Lanes, "wait_for_all", wait_for_all)
    hangs, done = threading.Event(), []

    @on_event(Ordered, id="x")
    def note(ctx: HandlerContext[Ordered]) -> None:
        if ctx.event.id == "hangs":
            assert hangs.wait(60)
        done.append(ctx.event.id)
        if len(done) == 30:
            hangs.set()

    with Session(
        skipping.uri, config=skipping.config(**FAST, **skipping.short, event_claim_limit=2)
    ) as session:
        session.emit(Ordered(id="bad", n=0))
        store = internals(session).worker.store
        for name in ("one", "two"):
            (_,) = store.consumer("default", [note.subscription()], name).claim(1, whole=True)
            skipping.pass_lease(store)
        session.emit([Ordered(id="hangs", n=0, priority=999)])
        session.emit([Ordered(id=f"o{n}", n=n) for n in range(30)])
        session.drain([note], concurrency=2)
    assert set(done) == {"bad", "hangs", *(f"o{n}" for n in range(30))}
    assert waits.count(skipping.lease_ms / 1000) <= 2  # not every tenth round, while it hangs


# -- the end --------------------------------------------------------------------------------------


def test_stop_waits_for_those_that_run_and_gives_back_the_rest(session: Session) -> None:
    started = threading.Barrier(3)

    @on_event(Ordered, id="x")
    def bill(ctx: HandlerContext[Ordered]) -> None:
        ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))
        if not stopped:
            started.wait(60)
            session.stop()
            stopped.append(1)
            time.sleep(0.02)

    stopped: list[int] = []
    send(session, 30)
    totals = session.run([bill], concurrency=3)

    assert 3 <= totals.handled < 30
    assert session.query().entities(Invoice).count() == totals.handled
    assert session.drain([bill], concurrency=3).handled == 30 - totals.handled


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, "observe"])
def test_what_ends_the_worker_with_several_in_flight(
    session: Session, error: type[BaseException] | str
) -> None:
    """The others end and count, the one that raised is given back, and the caller is told."""
    together = threading.Barrier(4)
    armed = [1]

    @on_event(Ordered, id="x")
    def bill(ctx: HandlerContext[Ordered]) -> None:
        if armed:
            together.wait(60)
        if armed and ctx.event.n == 2 and isinstance(error, type):
            raise error
        ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))

    def observe(run: HandlerRun) -> None:
        if armed and error == "observe":
            raise ZeroDivisionError

    send(session, 4)
    expected = error if isinstance(error, type) else ZeroDivisionError
    with pytest.raises(expected):
        session.drain([bill], concurrency=4, observe=observe)
    armed.clear()
    stored = {row.id for row in session.query().entities(Invoice).collect()}
    assert stored == {"o0", "o1", "o3"} | ({"o2"} if error == "observe" else set())
    assert session.drain([bill], concurrency=4).handled == 4 - len(stored)
    assert session.query().entities(Invoice).count() == 4


def test_ctrl_c_does_not_wait_for_ever(skipping: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that goes on is let go of, and what it left is not published later."""
    monkeypatch.setattr(dispatcher, "_GRACE_S", 0.05)
    hangs, ended = threading.Event(), threading.Event()
    runs: list[str] = []
    told: list[HandlerRun] = []

    @on_event(Ordered, id="x")
    def bill(ctx: HandlerContext[Ordered]) -> None:
        runs.append(ctx.event.id)
        ctx.ensure(Invoice(id=ctx.event.id, n=len(runs)))
        if ctx.event.n == 0 and len(runs) < 9:
            hangs.wait(60)
            ended.set()

    def interrupt() -> None:
        wait_until(lambda: len(told) == 7)
        signal.raise_signal(signal.SIGINT)

    config = skipping.config(**FAST, **skipping.short)
    with Session(skipping.uri, config=config) as session:
        send(session, 8)
        sender = threading.Thread(target=interrupt)
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            session.drain([bill], concurrency=8, observe=told.append)
        sender.join()
        hangs.set()
        assert ended.wait(60)
        wait_until(lambda: not handler_threads())
        assert session.query().entities(Invoice).count() == 7
        skipping.pass_lease(internals(session).worker.store)
        wait_until(lambda: session.drain([bill], concurrency=8).handled == 1)
        assert runs.count("o0") == 2
        assert session.query().entities(Invoice).count() == 8


def test_sigterm_ends_it_in_order(real: Bus) -> None:
    @on_event(Ordered, id="x")
    def kill(ctx: HandlerContext[Ordered]) -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.02)

    with Session(real.uri, config=real.config(**FAST)) as session:
        send(session, 40)
        assert 1 <= session.run([kill], concurrency=4).handled < 40


@pytest.mark.parametrize("given", [0, -1, 257, 2.0, "8", True, None])
def test_a_wrong_number_is_refused(given: Any) -> None:
    @on_event(Ordered, id="x")
    def note(ctx: HandlerContext[Ordered]) -> None: ...

    with Session(":memory:") as session:
        for act in (session.run, session.drain):
            with pytest.raises(ConfigurationError, match="concurrency takes a number of handlers"):
                act([note], concurrency=given)  # type: ignore[operator]
