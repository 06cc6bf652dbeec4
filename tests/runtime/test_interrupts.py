"""Ctrl-C, SIGTERM, cancelled tasks and `close()` from elsewhere, while a commit is on its way.

Whatever is stopped leaves no thread that renews a lease, no lock beyond its lease, and a storage on
which others go on. KeyboardInterrupt is raised at every line of the publish, one run for each.
"""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

from storage_engine import Session, initialize_storage
from storage_engine.commitlog import layout
from storage_engine.config import OntologiaConfig
from storage_engine.errors import ClosedError, LeaseExpiredError
from storage_engine.objectstore.local import DirectoryStore
from storage_engine.repository import Repository, open_repository
from storage_engine.repository.duck import interruptible
from storage_engine.repository.protocol import CommitRequest, TypeInput
from tests.engines import CUSTOMER, commit, customer, rows_of
from tests.shop import Customer

LEASE_MS = 600
CONFIG = OntologiaConfig(s3_lease_ttl_ms=LEASE_MS, s3_lock_timeout_ms=20_000)
SHARES = 8
MODULES = (
    "commitlog/publisher.py",
    "commitlog/swap.py",
    "commitlog/lock.py",
    "commitlog/lease_keeper.py",
)
BEATS = ("commitlog/heartbeat.py", "write/staged_write.py", "write/commit.py")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    uri = f"file://{tmp_path}/store"
    initialize_storage(uri)
    return uri


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    yield
    sys.settrace(None)


class Interrupts:
    """Raises at the `nth` line that this thread runs in the modules that publish."""

    def __init__(
        self,
        nth: int,
        error: type[BaseException] = KeyboardInterrupt,
        modules: tuple[str, ...] = MODULES,
    ) -> None:
        self.nth = nth
        self._modules = modules
        self.seen = 0
        self._error = error
        self._lines: dict[FrameType, int] = {}

    def during(self, work: Callable[[], object]) -> BaseException | None:
        sys.settrace(self._enter)
        try:
            work()
        except self._error as error:
            return error
        finally:
            sys.settrace(None)
        return None

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.endswith(self._modules) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self._leaves_with(frame):
            self.seen += 1
            if self.seen == self.nth:
                raise self._error
        return self._line

    def _leaves_with(self, frame: FrameType) -> bool:
        """The line of a `with` comes again when it is left, before a lock is given back: a trace
        may raise there, a signal is not looked at."""
        before, self._lines[frame] = self._lines.get(frame, 0), frame.f_lineno
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        return source.startswith("with ") and before > frame.f_lineno


def renewing(name: str = "onto-lease") -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == name and t.is_alive()]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """What happens by itself, in a moment; minutes, as the machine may be busy."""
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@pytest.mark.parametrize("first", range(1, SHARES + 1))
def test_ctrl_c_at_every_line_of_a_publish(uri: str, first: int) -> None:
    """In shares: every line is in one of them."""
    repository, other = open_repository(uri, CONFIG), open_repository(uri, CONFIG)
    number = first
    while stopped_at(number, repository, other):
        number += SHARES
    assert number > 60, "the trace saw the publish"
    repository.close()
    other.close()


def stopped_at(number: int, repository: Repository, other: Repository) -> bool:
    """Whether a commit runs that many lines; if so, it is stopped there."""
    put(repository, "a", 2 * number)
    if number % 2:
        repository.flush()  # else the lease of the first commit is on offer
    stopped = Interrupts(number).during(lambda: put(repository, "a", 2 * number + 1))
    wait_until(lambda: not renewing(), f"a lease is renewed after an interrupt at {number}")
    put(other, "b", number)
    other.flush()
    return stopped is not None


def put(repository: Repository, key: str, age: int) -> None:
    """On a busy machine a lease this short may run out before the swap: then again."""
    while True:
        try:
            assert commit(repository, rows_of(CUSTOMER, customer(key, age=age))) is not None
            return
        except LeaseExpiredError:
            continue


def test_what_was_asked_for_when_ctrl_c_came_is_not_kept(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is asked for by another thread, which goes on when the main thread has left."""
    create = DirectoryStore.put_if_absent
    asked, answer = threading.Event(), threading.Event()

    def slow(self: DirectoryStore, key: str, data: bytes, *, write_id: str) -> str:
        if key == layout.LOCK:
            asked.set()
            assert answer.wait(240)
        return create(self, key, data, write_id=write_id)

    repository = open_repository(uri, CONFIG)
    monkeypatch.setattr(DirectoryStore, "put_if_absent", slow)

    def interrupt() -> None:
        assert asked.wait(240)
        import _thread

        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        commit(repository, rows_of(CUSTOMER, customer("a")))
    answer.set()
    monkeypatch.undo()
    other = open_repository(uri, CONFIG)
    assert commit(other, rows_of(CUSTOMER, customer("b"))) is not None
    other.close()
    wait_until(lambda: not renewing(), "the lock that came late is renewed")
    assert commit(repository, rows_of(CUSTOMER, customer("c"))) is not None
    repository.close()


def test_ctrl_c_in_the_heartbeat_of_a_bulk_load(uri: str) -> None:
    """At every line that begins or ends it, and at the first of every `finally` around it."""
    repository = open_repository(uri, CONFIG)
    number, stopped = 0, True
    while stopped:
        number += 1
        table = rows_of(CUSTOMER, customer("a", age=number)).table
        assert table is not None
        rows = pa.RecordBatchReader.from_batches(table.schema, table.to_batches())
        request = CommitRequest([TypeInput(CUSTOMER, stream=rows)])
        interrupts = Interrupts(number, modules=BEATS)
        stopped = interrupts.during(lambda r=request: repository.commit(r)) is not None  # type: ignore[misc]
        wait_until(lambda: not renewing("onto-attempt"), f"beats go on after line {number}")
    assert number > 60, "the trace saw the bulk load"
    repository.close()


def test_ctrl_c_in_a_write_whose_parts_others_stage(uri: str) -> None:
    """At every line: no beats go on, and what a commit names is there."""
    repository, reader = open_repository(uri, CONFIG), open_repository(uri, CONFIG)
    number, stopped = 0, True
    while stopped:
        number += 1
        table = rows_of(CUSTOMER, customer("a", age=number), customer(f"n{number}")).table
        assert table is not None

        def write(rows: pa.Table = table) -> None:
            attempt = repository.begin_staged(CUSTOMER)
            with attempt, attempt:
                attempt.stage(rows, inserted=1)
                repository.commit(CommitRequest([attempt.as_input()]))

        before = repository.head_commit_id()
        stopped = Interrupts(number, modules=BEATS).during(write) is not None
        wait_until(lambda: not renewing("onto-attempt"), f"beats go on after line {number}")
        repository.flush()
        after = repository.head_commit_id()
        ages = {r["entity_key"]: r["age"] for r in reader.read(CUSTOMER).to_pylist()}
        assert (ages.get("a") == number) is (after > before), f"line {number}"
    assert number > 60, "the trace saw the write"
    repository.close()
    reader.close()


class LockedForGood:
    """Ctrl-C inside a condition's own `with`, between taking its lock and what gives it back."""

    def __init__(self) -> None:
        self.seen = 0

    def during(self, work: Callable[[], object]) -> None:
        sys.settrace(self._enter)
        try:
            work()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_name == "__enter__" and code.co_filename == threading.__file__:
            caller = frame.f_back
            if caller is not None and caller.f_code.co_name == "result":
                return self._leave
        return None

    def _leave(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self.seen += 1
            raise KeyboardInterrupt
        return self._leave


@pytest.mark.timeout(60)
def test_ctrl_c_while_a_query_is_waited_for(uri: str) -> None:
    """Whatever is waited on must not stay locked: the query's thread would never end."""
    import duckdb

    with duckdb.connect() as connection:
        interrupts = LockedForGood()
        answer: list[object] = []
        try:
            interrupts.during(
                lambda: answer.append(
                    interruptible(connection, lambda: connection.sql("select 1").fetchall())
                )
            )
        except KeyboardInterrupt:
            pass
        else:
            assert answer == [[(1,)]]
        wait_until(lambda: not renewing("onto-query"), "the query's thread is still there")


@pytest.mark.parametrize("nth", [1, 12, 30, 45])
def test_a_handler_that_exits_on_sigterm(uri: str, nth: int) -> None:
    def ended() -> None:
        with Session(uri, config=CONFIG) as session:
            session.ensure(Customer(id="a", name="a"))
            error = Interrupts(nth, SystemExit).during(session.commit)
            assert error is not None
            raise error

    with pytest.raises(SystemExit):
        ended()
    wait_until(lambda: not renewing(), "a lease is renewed")
    with Session(uri, config=CONFIG) as session:
        session.ensure(Customer(id="b", name="b"))
        assert session.commit() is not None


class Gate:
    """Holds the upload of a commit's manifest until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        create = DirectoryStore.put_if_absent

        def held(store: DirectoryStore, key: str, data: bytes, *, write_id: str) -> str:
            if layout.is_manifest(key):
                self.reached.set()
                assert self.open.wait(240)
            return create(store, key, data, write_id=write_id)

        monkeypatch.setattr(DirectoryStore, "put_if_absent", held)


def test_a_cancelled_task_and_close(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the commit cannot be stopped; `close` waits for it, and all is as it says."""
    gate = Gate(monkeypatch)
    session = Session(uri, config=CONFIG)
    session.ensure(Customer(id="a", name="a"))

    async def run() -> None:
        task = asyncio.create_task(asyncio.to_thread(session.commit))
        assert await asyncio.to_thread(gate.reached.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        closing = asyncio.create_task(asyncio.to_thread(session.close))
        gate.open.set()
        await closing

    asyncio.run(run())
    assert not renewing()
    with Session(uri, config=CONFIG) as other:
        assert other.query().entities(Customer).count() == 1


def test_close_from_another_thread(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    session = Session(uri, config=CONFIG)
    session.ensure(Customer(id="a", name="a"))
    commits: list[int | None] = []
    worker = threading.Thread(target=lambda: commits.append(session.commit()))
    worker.start()
    assert gate.reached.wait(240)
    closer = threading.Thread(target=session.close)
    closer.start()
    gate.open.set()
    worker.join(240)
    closer.join(240)
    assert commits == [1]
    assert not renewing()
    with pytest.raises(ClosedError):
        session.ensure(Customer(id="b", name="b"))
    with Session(uri, config=CONFIG) as other:
        other.ensure(Customer(id="b", name="b"))
        assert other.commit() == 2
