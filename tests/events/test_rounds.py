"""Commits of handlers go out together while the next handlers run, and each counts by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from storage_engine import (
    CommitStateUnknownError,
    Entity,
    Event,
    Field,
    HandlerContext,
    Session,
    on_event,
)
from storage_engine.events import publications
from storage_engine.events.outcomes import Totals
from storage_engine.repository.protocol import CommitRequest, Repository
from storage_engine.runtime.core import internals
from storage_engine.runtime.worker import HandlerRun
from tests.events.support import Bus
from tests.events.test_sessions import real, simulated

__all__ = ["real", "simulated"]

FAST = {
    "event_backoff_base_ms": 0,
    "event_poll_interval_ms": 10,
    "s3_lock_timeout_ms": 120_000,  # the machine may be busy
}


class Ordered(Event):
    n: Field[int]


class Invoice(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


@pytest.fixture
def session(bus: Bus) -> Iterator[Session]:
    with Session(bus.uri, config=bus.config(**FAST)) as session:
        yield session


def send(session: Session, count: int, **fields: Any) -> None:
    session.emit([Ordered(id=f"o{n}", n=n, **fields) for n in range(count)])


def counted(totals: Totals) -> tuple[int, int, int]:
    return totals.handled, totals.failed, totals.dropped


def commits(session: Session) -> list[dict[str, Any]]:
    return session.list_commits(limit=1000)[::-1]


def statuses(session: Session) -> set[str]:
    return {info.status for info in internals(session).worker.store.list_events("default", 1000)}


@contextmanager
def submitting(
    repository: Repository, submit: Callable[[Any, CommitRequest], Any]
) -> Iterator[None]:
    """With another way to submit, which is given the real one."""
    original = repository.submit
    with mock.patch.object(
        type(repository), "submit", lambda self, request: submit(original, request)
    ):
        yield


class Held:
    """A commit that lands when it is let go."""

    def __init__(self, submit: Callable[[CommitRequest], Any], request: CommitRequest) -> None:
        self._submit, self._request = submit, request
        self.may_land = threading.Event()
        self._mutex = threading.Lock()
        self._pending: Any = None
        self.size, self.alone = 1, False

    def result(self) -> Any:
        assert self.may_land.wait(60)
        with self._mutex:
            self._pending = self._pending or self._submit(self._request)
        return self._pending.result()


# -- one after another, as far as anybody can see -------------------------------------------------


@on_event(Ordered, id="bill")
def bill(ctx: HandlerContext[Ordered]) -> None:
    ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))


def test_every_handler_has_a_commit_of_its_own_in_the_order_of_events(session: Session) -> None:
    send(session, 30)
    runs: list[HandlerRun] = []
    totals = session.drain([bill], observe=runs.append)

    assert counted(totals) == (30, 0, 0)
    assert [run.event_id for run in runs] == [f"o{n}" for n in range(30)]
    assert [run.commit.commit_id for run in runs if run.commit] == list(range(1, 31))
    rows = session.query().entities(Invoice).collect()
    assert {row.id: row.meta().commit_id for row in rows} == {f"o{n}": n + 1 for n in range(30)}
    assert statuses(session) == {"acked"}
    assert counted(session.drain([bill])) == (0, 0, 0)


def reads(ctx: HandlerContext[Ordered]) -> list[Callable[[], int]]:
    """Ways to look at how many invoices there are."""
    session = ctx.session
    return [
        lambda: session.query().entities(Invoice).count(),
        lambda: len(session.query().entities(Invoice).collect()),
        lambda: session.sql("select id from Invoice").to_arrow().num_rows,
        lambda: session.snapshot,
        lambda: len(session.list_commits(limit=100)),
        lambda: max(change["commit_id"] for change in session.changes(0)),
        lambda: session.at(session.snapshot).query().entities(Invoice).count(),
        lambda: session.repository.head_commit_id(),
        lambda: session.storage_info()["head_commit_id"],
    ]


def test_a_handler_that_reads_sees_what_those_before_it_have_left(session: Session) -> None:
    """Whichever way it looks; every third looks, by another way each."""
    seen: list[int] = []

    @on_event(Ordered, id="look")
    def look(ctx: HandlerContext[Ordered]) -> None:
        if ctx.event.n % 3 == 2:
            seen.append(reads(ctx)[ctx.event.n // 3]())
        ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))

    send(session, 27)
    session.drain([look])
    assert seen == list(range(2, 27, 3))


def test_the_session_that_runs_the_worker_sees_it_too(session: Session) -> None:
    seen: list[int] = []

    @on_event(Ordered, id="look")
    def look(ctx: HandlerContext[Ordered]) -> None:
        ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))
        if ctx.event.n == 4:
            seen.append(session.query().entities(Invoice).count())

    send(session, 6)
    session.drain([look])
    assert seen == [4]


def test_writing_handlers_ask_nothing_of_the_store(simulated: Bus) -> None:
    """They state and end: what they cost is the publish of all of them."""
    with Session(simulated.uri, config=simulated.config(**FAST)) as session:
        requests = session.repository.requests
        spent: list[int] = []

        @on_event(Ordered, id="bill")
        def bill(ctx: HandlerContext[Ordered]) -> None:
            before = requests()["total"]
            ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))
            spent.append(requests()["total"] - before)

        send(session, 20)
        session.drain([bill])
        assert spent == [0] * 20


def test_a_handler_that_commits_by_itself_comes_after_those_before_it(session: Session) -> None:
    @on_event(Ordered, id="both")
    def both(ctx: HandlerContext[Ordered]) -> None:
        ctx.session.ensure(Invoice(id="counter", n=ctx.event.n))
        ctx.session.commit(meta={"own": str(ctx.event.n)})
        ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))

    send(session, 4)
    assert counted(session.drain([both])) == (4, 0, 0)
    assert [c["metadata"].get("own") for c in commits(session)] == [
        own for n in range(4) for own in (str(n), None)
    ]


def test_a_bulk_source_is_read_in_the_thread_of_its_handler(session: Session) -> None:
    threads: list[tuple[int, int]] = []

    @on_event(Ordered, id="load")
    def load(ctx: HandlerContext[Ordered]) -> None:
        handler = threading.get_ident()
        schema = pa.schema({"id": pa.string(), "n": pa.int64()})

        def batches() -> Iterator[pa.RecordBatch]:
            threads.append((handler, threading.get_ident()))
            yield pa.record_batch({"id": [ctx.event.id], "n": [ctx.event.n]}, schema=schema)

        ctx.ingest(Invoice, pa.RecordBatchReader.from_batches(schema, batches()))

    send(session, 3)
    assert counted(session.drain([load])) == (3, 0, 0)
    assert len(threads) == 3
    assert all(handler == reader for handler, reader in threads)
    assert session.query().entities(Invoice).count() == 3


# -- failures -------------------------------------------------------------------------------------


def test_a_commit_that_fails_is_the_failure_of_its_handler_alone(session: Session) -> None:
    """Refused by what is stored, in the middle of others that are not."""

    @on_event(Ordered, id="bill")
    def bill(ctx: HandlerContext[Ordered]) -> None:
        ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))
        if ctx.event.n == 3:
            ctx.commit(expect={Invoice: 99})
        if ctx.event.n == 5:
            raise ValueError("no such luck")

    session.ensure(Invoice(id="first", n=0))
    session.commit()
    send(session, 8)
    runs: list[HandlerRun] = []
    totals = session.drain([bill], observe=runs.append)

    failed = {run.event_id: run.error for run in runs if run.error}
    assert set(failed) == {"o3", "o5"}
    assert "ExpectedVersionMismatchError" in (failed["o3"] or "")
    assert failed["o5"] == "ValueError: no such luck"
    assert totals.handled == 6
    stored = {row.id for row in session.query().entities(Invoice).collect()}
    assert stored == {"first", *(f"o{n}" for n in (0, 1, 2, 4, 6, 7))}


def test_a_commit_of_unknown_outcome_is_dropped_and_the_others_count(session: Session) -> None:
    class Unknown:
        size, alone = 1, False

        def result(self) -> Any:
            raise CommitStateUnknownError(commit_id=1, manifest_path="m", write_id="w")

    def submit(original: Any, request: CommitRequest) -> Any:
        return Unknown() if request.acks[0].event_id == "o2" else original(request)

    send(session, 5)
    with submitting(session.repository, submit):
        totals = session.drain([bill])
    assert counted(totals) == (4, 0, 1)
    claims = {
        info.envelope["id"]: info.claims[0]
        for info in internals(session).worker.store.list_events("default", 10)
    }
    assert claims["o2"].ack_at is None
    assert claims["o2"].attempts == 0  # it may have been made: the lease decides when to look


# -- bounds, and how it ends ----------------------------------------------------------------------


def test_so_many_commits_may_be_on_their_way_and_no_more(
    real: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publications, "MOST", 3)
    held: list[Held] = []
    started: list[int] = []

    def submit(original: Any, request: CommitRequest) -> Any:
        held.append(Held(original, request))
        return held[-1]

    @on_event(Ordered, id="bill")
    def bill(ctx: HandlerContext[Ordered]) -> None:
        started.append(ctx.event.n)
        ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))

    with Session(real.uri, config=real.config(**FAST)) as session:
        send(session, 8)
        with submitting(session.repository, submit):
            worker = threading.Thread(target=lambda: session.drain([bill]))
            worker.start()
            wait_until(lambda: len(held) == 3)
            held[0].may_land.set()
            wait_until(lambda: len(held) == 4)
            assert started == [0, 1, 2, 3]
            while worker.is_alive():
                for commit in list(held):
                    commit.may_land.set()
                worker.join(0.01)
        assert len(commits(session)) == 8


def test_bytes_are_bounded_too(real: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publications, "MOST_BYTES", 1)
    on_their_way: list[int] = []

    def submit(original: Any, request: CommitRequest) -> Any:
        pending = original(request)
        dispatcher = internals(opened).worker._dispatcher
        assert dispatcher is not None
        on_their_way.append(len(dispatcher._publications))
        return pending

    with Session(real.uri, config=real.config(**FAST)) as opened:
        send(opened, 5)
        with submitting(opened.repository, submit):
            assert counted(opened.drain([bill])) == (5, 0, 0)
    assert on_their_way == [0] * 5  # each row is more than a byte


def test_a_long_handler_does_not_hold_back_those_before_it(real: Bus) -> None:
    """They are published, acked and told of while it runs."""
    told: list[str] = []
    seen = threading.Event()

    @on_event(Ordered, id="bill")
    def bill(ctx: HandlerContext[Ordered]) -> None:
        if ctx.event.n == 2:
            assert seen.wait(60)
        ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))

    config = real.config(**FAST)
    with Session(real.uri, config=config) as session, Session(real.uri, config=config) as other:
        send(session, 4)
        worker = threading.Thread(
            target=lambda: session.drain([bill], observe=lambda run: told.append(run.event_id))
        )
        worker.start()
        store = internals(other).worker.store
        wait_until(lambda: [i.status for i in store.list_events("default", 10)].count("acked") == 2)
        assert other.query().entities(Invoice).count() == 2
        assert told == ["o0", "o1"]
        seen.set()
        worker.join()
        assert other.query().entities(Invoice).count() == 4


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("end", ["stop", "interrupt", "observe", "progress"])
def test_whatever_ends_the_worker_what_was_submitted_counts(session: Session, end: str) -> None:
    @on_event(Ordered, id="bill")
    def bill(ctx: HandlerContext[Ordered]) -> None:
        ran.append(ctx.event.id)
        if ctx.event.n == 4 and end == "stop":
            session.stop()
        if ctx.event.n == 4 and end == "interrupt":
            raise KeyboardInterrupt
        ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))

    def observe(run: HandlerRun) -> None:
        if end == "observe" and run.event_id == "o4":
            raise ZeroDivisionError

    def progress(totals: Totals) -> None:
        if end == "progress":
            raise ZeroDivisionError

    ran: list[str] = []
    send(session, 9)
    try:
        session.drain([bill], observe=observe, progress=progress)
    except (KeyboardInterrupt, ZeroDivisionError):
        assert end != "stop"
    else:
        assert end == "stop"
    stored = {row.id for row in session.query().entities(Invoice).collect()}
    assert stored == set(ran) - ({"o4"} if end == "interrupt" else set())
    assert len(stored) >= 4
    # The rest was given back at once, and what was published does not run again.
    before, ran[:] = set(stored), []
    end = ""
    assert session.drain([bill]).handled == 9 - len(before)
    assert not before & set(ran)
    assert [t.name for t in threading.enumerate() if t.name.startswith("onto-publ")] == []
