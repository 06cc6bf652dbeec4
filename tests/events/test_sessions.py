"""Handlers as users write and run them, on every kind of storage."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_engine import (
    ConfigurationError,
    Entity,
    Event,
    EventDeadLetter,
    EventLoopLimitError,
    Field,
    HandlerContext,
    HandlerError,
    Schedule,
    Session,
    ValidationError,
    on_event,
)
from storage_engine.events.outcomes import Totals
from storage_engine.repository.object import outbox
from storage_engine.runtime.core import internals
from storage_engine.runtime.worker import HandlerRun
from tests.events.support import Bus, made_bus


class Ordered(Event):
    n: Field[int]


class Billed(Event):
    n: Field[int]


class Invoice(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


FAST = {"event_backoff_base_ms": 0, "event_poll_interval_ms": 20}


@pytest.fixture
def open_session(bus: Bus) -> Iterator[Callable[..., Session]]:
    opened: list[Session] = []

    def make(**settings: Any) -> Session:
        opened.append(Session(bus.uri, config=bus.config(**{**FAST, **settings})))
        return opened[-1]

    yield make
    for session in opened:
        session.close()


def counted(totals: Totals) -> tuple[int, int, int]:
    return totals.handled, totals.failed, totals.dead_lettered


def rest(session: Session, seconds: float = 0.15) -> None:
    internals(session).worker.store.sleep(seconds)


def invoices(session: Session) -> dict[str, int]:
    from storage_engine.model import spec_of

    rows = session.repository.read(spec_of(Invoice)).to_pylist()
    return {row["entity_key"]: row["n"] for row in rows}


# -- what a handler leaves ------------------------------------------------------------------------


def test_a_drain_waits_for_events_of_its_own_commits(
    bus: Bus, open_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are brought out after the commit, which takes as long as the store does."""
    create = outbox.create
    monkeypatch.setattr(outbox, "create", lambda *given: (time.sleep(0.3), create(*given)))
    billed: list[int] = []

    @on_event(Ordered)
    def bill(ctx: HandlerContext[Ordered]) -> None:
        ctx.ensure(Invoice(id=str(ctx.event.n), n=ctx.event.n))
        ctx.commit(event=Billed(n=ctx.event.n))

    @on_event(Billed)
    def collect(ctx: HandlerContext[Billed]) -> None:
        billed.append(ctx.event.n)

    session = open_session()
    session.emit(Ordered(n=1))
    session.drain([bill, collect])
    assert billed == [1]


def test_the_example_of_the_api(open_session: Callable[..., Session]) -> None:
    heard: list[tuple[int, int, str]] = []

    @on_event(Ordered, priority=200)
    def bill(ctx: HandlerContext[Ordered]) -> None:
        ctx.ensure(Invoice(id=f"i{ctx.event.n}", n=ctx.event.n))
        ctx.add_commit_meta("handler", "bill")
        ctx.commit(event=Billed(n=ctx.event.n))

    @on_event(Billed)
    def listen(ctx: HandlerContext[Billed]) -> None:
        heard.append((ctx.event.n, ctx.event.chain_depth, ctx.event.root_event_id))
        assert ctx.lease_until > internals(session).worker.store.now()

    session = open_session()
    first, second = Ordered(n=1), Ordered(n=2)
    session.emit([first, second])
    totals = session.drain([bill, listen])

    assert counted(totals) == (4, 0, 0)
    assert sorted(heard) == sorted([(1, 1, first.id), (2, 1, second.id)])
    assert invoices(session) == {"i1": 1, "i2": 2}
    assert [c["metadata"] for c in session.list_commits()] == [{"handler": "bill"}] * 2
    assert counted(session.drain([bill, listen])) == (0, 0, 0)


def test_intents_are_committed_without_being_asked(open_session: Callable[..., Session]) -> None:
    @on_event(Ordered)
    def bill(ctx: HandlerContext[Ordered]) -> None:
        ctx.ensure(Invoice(id="a", n=1))

    session = open_session()
    session.emit([Ordered(n=1), Ordered(n=2)])

    assert counted(session.drain([bill])) == (2, 0, 0)
    assert len(session.list_commits()) == 1  # the second changed nothing, and is acked all the same


def test_a_failure_drops_what_the_handler_wanted(open_session: Callable[..., Session]) -> None:
    attempts: list[int] = []

    @on_event(Ordered)
    def bill(ctx: HandlerContext[Ordered]) -> None:
        attempts.append(1)
        ctx.ensure(Invoice(id="a", n=len(attempts)))
        ctx.commit(event=Billed(n=1))
        if len(attempts) < 3:
            raise RuntimeError("not yet")

    session = open_session()
    session.emit(Ordered(n=1))
    for _ in range(4):
        session.drain([bill])
        rest(session)

    assert len(attempts) == 3
    assert invoices(session) == {"a": 3}
    assert len(session.list_commits()) == 1


def test_a_dead_letter_is_an_event_too(open_session: Callable[..., Session]) -> None:
    letters: list[EventDeadLetter] = []

    @on_event(Ordered, id="fail")
    def fail(ctx: HandlerContext[Ordered]) -> None:
        raise ZeroDivisionError("impossible")

    @on_event(EventDeadLetter)
    def tell(ctx: HandlerContext[EventDeadLetter]) -> None:
        letters.append(ctx.event)

    session = open_session(event_max_attempts=2)
    event = Ordered(n=1)
    session.emit(event)
    for _ in range(4):
        session.drain([fail, tell])
        rest(session)

    (letter,) = letters
    assert (letter.event_id, letter.handler_id, letter.failed_type) == (event.id, "fail", "Ordered")
    assert (letter.attempts, letter.last_error) == (2, "ZeroDivisionError: impossible")
    assert letter.root_event_id == event.id


def test_a_circle_of_events_ends(open_session: Callable[..., Session]) -> None:
    seen: list[int] = []

    @on_event(Ordered, id="again")
    def again(ctx: HandlerContext[Ordered]) -> None:
        seen.append(ctx.event.chain_depth)
        ctx.emit(Ordered(n=1))

    session = open_session(max_event_chain_depth=3)
    session.emit(Ordered(n=1))
    totals = session.drain([again])

    assert seen == [0, 1, 2, 3]
    assert counted(totals) == (3, 1, 1)
    (letter,) = internals(session).worker.store.list_dead_letters("default", 5)
    assert EventLoopLimitError.__name__ in (letter.last_error or "")
    assert "max_event_chain_depth" in (letter.last_error or "")


def test_an_event_that_no_longer_fits_its_class_fails(open_session: Callable[..., Session]) -> None:
    class Old(Event, name="Ordered"):
        text: Field[str]

    @on_event(Ordered, id="bill")
    def bill(ctx: HandlerContext[Ordered]) -> None:
        raise AssertionError("is not reached")

    session = open_session(event_max_attempts=1)
    session.emit(Old(text="x"))

    assert counted(session.drain([bill])) == (0, 1, 1)


def test_a_second_run_of_a_handler_sends_the_same_events(
    open_session: Callable[..., Session],
) -> None:
    """So what a crashed run had sent is handled once."""
    sent: list[str] = []

    @on_event(Ordered, id="tell")
    def tell(ctx: HandlerContext[Ordered]) -> None:
        ctx.emit([Billed(n=1), Billed(n=2), Billed(n=3, id="named")])
        sent.extend(envelope["id"] for envelope in ctx._events)
        if len(sent) == 3:
            raise RuntimeError("once more")

    session = open_session()
    session.emit(Ordered(n=1))
    for _ in range(3):
        session.drain([tell])
        rest(session)
    assert sent[:3] == sent[3:]
    assert len(set(sent)) == 3
    assert sent[2] == "named"


def test_a_handler_reads_with_its_session(open_session: Callable[..., Session]) -> None:
    heads: list[int] = []

    @on_event(Ordered)
    def look(ctx: HandlerContext[Ordered]) -> None:
        heads.append(ctx.session.snapshot)

    session = open_session()
    session.commit(event=Ordered(n=1))
    session.flush()
    session.ensure(Invoice(id="mine", n=1))
    session.drain([look])

    assert heads == [1]
    assert internals(session).has_intents  # a handler does not touch the intents of who runs it
    session.discard()


def test_a_commit_of_unknown_outcome_is_settled_by_the_log(simulated: Bus) -> None:
    """The worker itself finds out later; here the commit had landed."""
    from storage_engine.errors import CommitStateUnknownError
    from storage_engine.repository.commit_queue import PendingCommit

    runs: list[int] = []
    with Session(simulated.uri, config=simulated.config(event_lease_ms=30_000)) as session:
        repository = session.repository
        submit = repository.submit

        def silent(request: Any) -> PendingCommit:
            pending = submit(request)
            landed = pending.result

            def result() -> Any:
                landed()
                raise CommitStateUnknownError(commit_id=1, manifest_path="m", write_id="w")

            pending.result = result  # type: ignore[method-assign]
            return pending

        repository.submit = silent  # type: ignore[method-assign]

        @on_event(Ordered, id="bill")
        def bill(ctx: HandlerContext[Ordered]) -> None:
            runs.append(ctx.event.n)
            ctx.ensure(Invoice(id="a", n=len(runs)))

        session.emit(Ordered(n=1))
        totals = session.drain([bill])
        assert (counted(totals), totals.dropped) == ((0, 0, 0), 1)
        rest(session, 31)
        assert counted(session.drain([bill])) == (0, 0, 0)
        (info,) = internals(session).worker.store.list_events("default", 5)
    assert info.status == "acked"
    assert runs == [1]


# -- the worker's life ----------------------------------------------------------------------------


def test_run_stops_from_a_handler_and_gives_back_the_rest(
    open_session: Callable[..., Session],
) -> None:
    session = open_session()

    @on_event(Ordered, id="first")
    def first(ctx: HandlerContext[Ordered]) -> None:
        session.stop()

    session.emit([Ordered(n=n) for n in range(5)])
    assert counted(session.run([first])) == (1, 0, 0)

    @on_event(Ordered, id="first")
    def rest_of_them(ctx: HandlerContext[Ordered]) -> None: ...

    assert counted(open_session().drain([rest_of_them])) == (4, 0, 0)


def test_max_iterations(open_session: Callable[..., Session]) -> None:
    @on_event(Ordered)
    def one(ctx: HandlerContext[Ordered]) -> None: ...

    session = open_session(event_claim_limit=2)
    session.emit([Ordered(n=n) for n in range(5)])

    assert [session.run([one], max_iterations=1).handled for _ in range(4)] == [2, 2, 1, 0]


def test_a_running_worker_is_a_session_and_leaves_none_behind(
    open_session: Callable[..., Session],
) -> None:
    seen: list[Any] = []
    session = open_session()
    store = internals(session).worker.store

    @on_event(Ordered, id="look")
    def look(ctx: HandlerContext[Ordered]) -> None:
        seen.extend(store.list_sessions("default", 60_000))

    session.emit(Ordered(n=1))
    session.drain([look])

    (worker,) = seen
    assert not worker.is_dead
    assert worker.metadata["pid"] == os.getpid()
    assert worker.metadata["handlers"] == ["look"]
    assert store.list_sessions("default", 60_000) == []


def test_an_exception_that_ends_the_worker_gives_back(open_session: Callable[..., Session]) -> None:
    @on_event(Ordered, id="x")
    def interrupted(ctx: HandlerContext[Ordered]) -> None:
        raise KeyboardInterrupt

    @on_event(Ordered, id="x")
    def fine(ctx: HandlerContext[Ordered]) -> None: ...

    session = open_session()
    session.emit([Ordered(n=1), Ordered(n=2)])
    with pytest.raises(KeyboardInterrupt):
        session.run([interrupted])

    assert counted(open_session().drain([fine])) == (2, 0, 0)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Bus]:
    """Threads and signals need a clock that runs by itself."""
    with made_bus(f"file://{tmp_path}/real") as bus:
        yield bus


@pytest.fixture
def simulated() -> Iterator[Bus]:
    """A clock that is moved."""
    with made_bus(f"memory://sessions-{uuid.uuid4().hex}") as bus:
        yield bus


def test_the_lease_of_a_long_handler_is_extended(real: Bus) -> None:
    runs: list[str] = []

    @on_event(Ordered, id="slow")
    def slow(ctx: HandlerContext[Ordered]) -> None:
        runs.append("slow")
        time.sleep(2.5)

    # It is extended three times in a lease, of which a busy machine may miss two.
    config = real.config(event_lease_ms=2_000, event_poll_interval_ms=100)
    with Session(real.uri, config=config) as session, Session(real.uri, config=config) as other:
        session.emit(Ordered(n=1))
        worker = threading.Thread(target=lambda: session.drain([slow]))
        worker.start()
        while not runs:
            time.sleep(0.01)
        while worker.is_alive():
            assert counted(other.run([slow], max_iterations=5)) == (0, 0, 0)
        worker.join()
    assert runs == ["slow"]


def test_sigterm_ends_a_worker_in_order(real: Bus) -> None:
    @on_event(Ordered, id="x")
    def kill(ctx: HandlerContext[Ordered]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)

    before = signal.getsignal(signal.SIGTERM)
    with Session(real.uri, config=real.config(**FAST)) as session:
        session.emit([Ordered(n=n) for n in range(3)])
        assert counted(session.run([kill])) == (1, 0, 0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_session_runs_once_at_a_time_and_is_not_closed_meanwhile(real: Bus) -> None:
    problems: list[Exception] = []
    with Session(real.uri) as session:

        @on_event(Ordered, id="x")
        def inner(ctx: HandlerContext[Ordered]) -> None:
            for act in (lambda: session.drain([inner]), session.close):
                try:
                    act()
                except ConfigurationError as error:
                    problems.append(error)

        session.emit(Ordered(n=1))
        session.drain([inner])
    assert len(problems) == 2


# -- schedules ------------------------------------------------------------------------------------


def test_a_schedule_fires_once_for_several_workers(simulated: Bus) -> None:
    bus = simulated
    fired: list[Any] = []

    @on_event(Ordered, id="tick")
    def tick(ctx: HandlerContext[Ordered]) -> None:
        fired.append(ctx.event.created_at)

    def schedule() -> Schedule:
        return Schedule(event=Ordered(n=7), cron="*/5 * * * *")

    config = bus.config(event_poll_interval_ms=1_000)
    with Session(bus.uri, config=config) as one, Session(bus.uri, config=config) as two:
        for _ in range(100):
            for session in (one, two):
                session.run([tick], schedules=[schedule()], max_iterations=1)
            internals(one).worker.store.sleep(10)
        assert len(fired) == len(set(fired)) == 4  # 100 rounds of 12 s
        assert all(at.minute % 5 == 0 and at.second == 0 for at in fired)


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: on_event(), "at least one Event class"),
        (lambda: on_event(Invoice), "takes Event classes"),  # type: ignore[type-var]
        (lambda: on_event(Ordered, priority="high"), "must be an int"),  # type: ignore[arg-type]
        (lambda: on_event(Ordered)(lambda: None), "must take one argument"),  # type: ignore[misc, arg-type]
        (lambda: on_event(Ordered)(Invoice), "decorates a function"),  # type: ignore[arg-type]
        (lambda: on_event(Ordered, id="x" * 300)(lambda ctx: None), "up to 150 letters"),
    ],
    ids=["none", "entity", "priority", "arguments", "class", "id"],
)
def test_bad_handlers_are_refused_when_declared(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(HandlerError, match=said):
        make()


def test_coroutines_are_refused() -> None:
    with pytest.raises(HandlerError, match="coroutine"):

        @on_event(Ordered)  # type: ignore[arg-type]
        async def later(ctx: HandlerContext[Ordered]) -> None: ...


def test_bad_lists_of_handlers_are_refused() -> None:
    @on_event(Ordered, id="same")
    def one(ctx: HandlerContext[Ordered]) -> None: ...

    @on_event(Ordered, id="same")
    def two(ctx: HandlerContext[Ordered]) -> None: ...

    with Session(":memory:") as session:
        for given, said in [
            ([], "no handlers"),
            (one, "as a list"),
            ([test_coroutines_are_refused], "decorate it"),
            ([one, two], "two handlers have the id same"),
        ]:
            with pytest.raises(HandlerError, match=said):
                session.run(given)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="max_iterations"):
            session.run([one], max_iterations=0)
        with pytest.raises(ConfigurationError, match="Schedule"):
            session.run([one], schedules=["* * * * *"])  # type: ignore[list-item]
        with pytest.raises(ConfigurationError, match="emit takes Event objects"):
            session.emit(Invoice(id="x", n=1))  # type: ignore[arg-type]
        with pytest.raises(ValidationError, match="too long"):
            session.emit(Ordered(n=1, id="x" * 151))


def test_notes_are_kept_once_and_not_without_end() -> None:
    totals = Totals()
    for n in range(30):
        totals.note([f"note {n}", "note 0"])
    assert totals.notes == [f"note {n}" for n in range(20)]
    assert totals.more_notes == 10


# -- what a handler says of itself ----------------------------------------------------------------


def test_what_handlers_do_beyond_their_declaration_is_done_and_noted(
    open_session: Callable[..., Session],
) -> None:
    @on_event(Ordered, writes=[Invoice], emits=[Billed])
    def faithful(ctx: HandlerContext[Ordered]) -> None:
        ctx.ensure(Invoice(id=f"a{ctx.event.n}", n=ctx.event.n))
        ctx.emit(Billed(n=1))

    @on_event(Ordered, writes=[], emits=(), id="silent")
    def silent(ctx: HandlerContext[Ordered]) -> None:
        if ctx.event.n == 2:
            raise ValueError("no paper")
        ctx.ensure(Invoice(id=f"b{ctx.event.n}", n=ctx.event.n))
        ctx.emit(Billed(n=2))

    @on_event(Ordered)  # it says nothing
    def free(ctx: HandlerContext[Ordered]) -> None:
        ctx.ensure(Invoice(id="c", n=0))

    assert (faithful.writes, faithful.emits) == ((Invoice,), (Billed,))
    assert (silent.writes, silent.emits, free.writes, free.emits) == ((), (), None, None)
    session = open_session(event_backoff_base_ms=60_000)
    session.emit([Ordered(n=1, id="o1"), Ordered(n=2, id="o2")])
    runs: list[HandlerRun] = []
    totals = session.drain([faithful, silent, free], observe=runs.append, meta={"run": "r1"})

    assert totals.notes == [
        "silent: it wrote Invoice, which @on_event(..., writes=[...]) does not name",
        "silent: it sent Billed, which @on_event(..., emits=[...]) does not name",
    ]
    assert session.query().entities(Invoice).count() == 4
    by_run = {(run.handler_id.rpartition(".")[2], run.event_id): run for run in runs}
    assert len(by_run) == len(runs) == 6
    failed = by_run["silent", "o2"]
    assert (failed.commit, failed.emitted, failed.error) == (None, (), "ValueError: no paper")
    done = by_run["silent", "o1"]
    assert (done.event_type, done.emitted, done.error) == ("Ordered", ("Billed",), None)
    assert done.commit is not None
    assert [(c.type_name, c.inserted) for c in done.commit.changes] == [("Invoice", 1)]
    # The second to write c wrote nothing new: it was handled without a commit.
    assert sorted(by_run["free", n].commit is None for n in ("o1", "o2")) == [False, True]
    commits = session.list_commits()
    assert {run.commit.commit_id for run in runs if run.commit} == {c["id"] for c in commits}
    assert [commit["metadata"] for commit in commits] == [{"run": "r1"}] * 4
    session.ensure(Invoice(id="d", n=9))
    session.commit()
    assert session.list_commits(limit=1)[0]["metadata"] == {}  # of the session's own commits none


class Base(Entity, abstract=True):
    id: Field[str] = Field(primary_key=True)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"writes": Invoice}, r"writes takes a list: writes=\[Invoice\]"),
        ({"writes": "Invoice"}, "writes takes a list"),
        ({"writes": [Billed]}, "writes takes Entity and Relation classes, not .*Billed"),
        ({"writes": ["Invoice"]}, "writes takes Entity and Relation classes, not 'Invoice'"),
        ({"writes": [Entity]}, "writes takes Entity and Relation classes"),
        ({"writes": [Base]}, "writes names Base, which is not stored"),
        ({"emits": [Invoice]}, "emits takes Event classes, not .*Invoice"),
        ({"emits": [Event]}, "emits takes Event classes"),
        ({"emits": 7}, r"emits takes a list: emits=\[7\]"),
    ],
)
def test_a_wrong_declaration_of_a_handler_is_refused(stated: dict[str, Any], said: str) -> None:
    with pytest.raises(HandlerError, match=said):
        on_event(Ordered, **stated)
