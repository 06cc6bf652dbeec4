"""The line of commits: who leads, who waits, and what becomes of those whose thread goes away."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Ontology, Session
from storage_engine.config import OntologiaConfig
from storage_engine.errors import ForkedSessionError, OntologiaError
from storage_engine.objectstore.local import DirectoryStore
from storage_engine.repository import Repository, initialize_storage, open_repository
from storage_engine.repository.commit_queue import CommitQueue, PendingCommit, Turn
from storage_engine.repository.protocol import CommitRequest, CommitResult, TypeInput
from tests.engines import CUSTOMER, customer, put, rows_of
from tests.shop import Customer

CONFIG = OntologiaConfig(s3_lock_timeout_ms=60_000)
PATIENCE_S = 60  # the machine may be busy


def request(key: str = "a") -> CommitRequest:
    return CommitRequest([rows_of(CUSTOMER, customer(key))])


class Engine:
    """Publishes when it is let, and notes who went together."""

    def __init__(self) -> None:
        self.queue = CommitQueue(self.publish)
        self.turns: list[int] = []
        self.began, self.go_on = threading.Event(), threading.Event()

    def publish(self, turn: Turn) -> None:
        taken = turn.take()
        self.began.set()
        assert self.go_on.wait(PATIENCE_S)
        taken = turn.take() if len(self.turns) % 2 else taken
        self.turns.append(len(taken))
        for number, pending in enumerate(taken):
            pending.succeed(CommitResult(100 * len(self.turns) + number))


def started(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_who_comes_meanwhile_is_published_next_and_together() -> None:
    engine = Engine()
    answers: list[CommitResult | None] = []
    first = started(lambda: answers.append(engine.queue.commit(request())))
    assert engine.began.wait(PATIENCE_S)
    others = [started(lambda: answers.append(engine.queue.commit(request()))) for _ in range(5)]
    wait_until(lambda: len(engine.queue._line) == 6)
    engine.go_on.set()
    for thread in [first, *others]:
        thread.join(PATIENCE_S)
    assert engine.turns == [1, 5]
    assert sorted(a.commit_id for a in answers if a) == [100, 200, 201, 202, 203, 204]
    assert engine.queue._leader is None
    assert not engine.queue._line


def test_nothing_is_published_before_somebody_waits() -> None:
    engine = Engine()
    engine.go_on.set()
    pending = [engine.queue.submit(request()) for _ in range(3)]
    assert engine.turns == []
    assert [each.result() for each in reversed(pending)] == [
        CommitResult(102),
        CommitResult(101),
        CommitResult(100),
    ]
    assert engine.turns == [3]


def test_ctrl_c_in_a_follower_takes_its_commit_back() -> None:
    engine = Engine()
    leader = started(lambda: engine.queue.commit(request()))
    assert engine.began.wait(PATIENCE_S)

    def interrupt() -> None:
        wait_until(lambda: any(pending.waiters for pending in list(engine.queue._line)[1:]))
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)

    interrupting = started(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.queue.commit(request("mine"))
    interrupting.join(PATIENCE_S)
    assert len(engine.queue._line) == 1
    engine.go_on.set()
    leader.join(PATIENCE_S)
    assert engine.turns == [1]


def test_a_leader_that_raises_answers_for_all_it_took_and_the_next_one_leads() -> None:
    calls: list[int] = []

    def failing(turn: Turn) -> None:
        taken = turn.take()
        calls.append(len(taken))
        if len(calls) == 1:
            raise OntologiaError("the disk is gone")
        for pending in taken:
            pending.succeed(None)

    queue = CommitQueue(failing)
    pending = [queue.submit(request()) for _ in range(3)]
    errors = []
    for each in pending:
        with pytest.raises(OntologiaError, match="the disk is gone") as caught:
            each.result()
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3
    assert queue.commit(request()) is None
    assert calls == [3, 1]


def test_rows_that_only_one_thread_may_read_are_read_by_it(tmp_path: Path) -> None:
    """A generator over a cursor of SQLite, for one, refuses other threads."""
    repository = opened(tmp_path)
    put(repository, customer("first"))
    readers: dict[str, int] = {}

    def bulk(key: str) -> CommitRequest:
        def rows() -> Any:
            readers[key] = threading.get_ident()
            table = rows_of(CUSTOMER, customer(key)).table
            assert table is not None
            yield from table.to_batches()

        return CommitRequest([TypeInput(CUSTOMER, stream=rows())])

    threads: dict[str, int] = {}

    def work(key: str) -> None:
        threads[key] = threading.get_ident()
        assert repository.commit(bulk(key) if key.startswith("b") else request(key)) is not None

    running = [started(lambda k=f"{kind}{n}": work(k)) for n in range(4) for kind in "bt"]  # type: ignore[misc]
    for thread in running:
        thread.join(PATIENCE_S)
    assert readers == {key: ident for key, ident in threads.items() if key.startswith("b")}
    assert repository.head_commit_id() == 9
    repository.close()


def test_after_a_fork_the_line_is_the_parents(tmp_path: Path) -> None:
    repository = opened(tmp_path)
    pending = repository.submit(request())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pending.result()
        except ForkedSessionError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert pending.result() is not None
    repository.close()


def test_closing_publishes_what_was_submitted(tmp_path: Path) -> None:
    repository = opened(tmp_path)
    pending = [repository.submit(request(key)) for key in "ab"]
    repository.close()
    assert [answer(each).commit_id for each in pending] == [1, 2]


def test_sessions_of_many_threads_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one swap of head is on its way, seven sessions queue; then there is one more swap."""
    uri = f"file://{tmp_path}/store"
    initialize_storage(uri)
    swaps: list[str] = []
    under_way, go_on = threading.Event(), threading.Event()
    original = DirectoryStore.put_if_match

    def slow(self: DirectoryStore, key: str, data: bytes, etag: str, *, write_id: str) -> str:
        if key.endswith("head.json"):
            swaps.append(key)
            if len(swaps) == 2:
                under_way.set()
                assert go_on.wait(PATIENCE_S)
        return original(self, key, data, etag, write_id=write_id)

    monkeypatch.setattr(DirectoryStore, "put_if_match", slow)
    results: dict[int, int | None] = {}
    with Ontology(storage_uri=uri, config=CONFIG, entity_types=[Customer]) as ontology:
        with ontology.session() as session:
            session.ensure(Customer(id="first", name="Ann"))
            session.commit(meta={"by": "first"})

        def work(number: int) -> None:
            with ontology.session() as session:
                session.ensure(Customer(id=f"c{number}", name="Ann"))
                results[number] = session.commit(meta={"by": str(number)})
                assert session.last_commit is not None
                assert session.last_commit.commit_id == results[number]

        lone = started(lambda: work(0))
        assert under_way.wait(PATIENCE_S)
        crowd = [started(lambda n=n: work(n)) for n in range(1, 8)]  # type: ignore[misc]
        queue = internals_queue(ontology)
        wait_until(lambda: len(queue._line) == 8)
        go_on.set()
        for thread in [lone, *crowd]:
            thread.join(PATIENCE_S)
        assert sorted(results.values()) == list(range(2, 10))  # type: ignore[type-var]
        assert len(swaps) == 3
        commits = {c["id"]: c["metadata"]["by"] for c in ontology.list_commits(20)}
        assert all(commits[commit] == str(n) for n, commit in results.items() if commit)
    with Session(uri, config=CONFIG, entity_types=[Customer]) as reader:
        assert reader.query().entities(Customer).count() == 9


def internals_queue(ontology: Ontology) -> CommitQueue:
    queue = ontology._repository._queue  # type: ignore[attr-defined]
    assert isinstance(queue, CommitQueue)
    return queue


def opened(folder: Path) -> Repository:
    uri = f"file://{folder}/store"
    initialize_storage(uri)
    return open_repository(uri, CONFIG)


def answer(pending: PendingCommit) -> CommitResult:
    result = pending.result()
    assert result is not None
    return result
