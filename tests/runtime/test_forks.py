"""Sessions and `fork()`: a child never hangs, never touches what is the parent's, and is told."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage_engine import Ontology, Session, initialize_storage, process
from storage_engine.commitlog import layout
from storage_engine.config import OntologiaConfig
from storage_engine.errors import ForkedSessionError
from storage_engine.objectstore.local import DirectoryStore
from storage_engine.objectstore.open import memory_backend
from storage_engine.repository.sqlite import control_tables
from tests.runtime.support import OrderPlaced, make_storage
from tests.servers import S3Server
from tests.shop import Customer

CONFIG = OntologiaConfig(s3_lease_ttl_ms=60_000, s3_lock_timeout_ms=60_000)

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # fork with threads, as users do it
]


def in_child(work: Callable[[], object]) -> None:
    """Do it in a fork, which must come to its end by itself."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends it where nothing else would
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:  # noqa: BLE001 - told, then the child ends
            sys.stderr.write(f"in the child: {error!r}\n")
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"


def refused(work: Callable[[], object]) -> None:
    with pytest.raises(ForkedSessionError, match="Open a session of its own in the child"):
        work()


@pytest.fixture(params=["directory", "memory"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = request.node.name.replace("[", "-").replace("]", "")
    uri = f"file://{tmp_path}/store" if request.param == "directory" else f"memory://{name}"
    initialize_storage(uri)
    return uri


def seed(session: Session) -> None:
    session.ensure(Customer(id="a", name="a"))
    session.commit()
    assert session.query().entities(Customer).count() == 1


def test_every_use_in_the_child_is_refused_at_once(uri: str) -> None:
    with Session(uri, config=CONFIG) as session:
        seed(session)
        query = session.query().entities(Customer)

        def use() -> None:
            refused(query.collect)
            refused(lambda: session.query().entities(Customer).count())
            refused(lambda: session.sql("select * from Customer").collect())
            refused(session.list_commits)
            session.ensure(Customer(id="b", name="b"))
            refused(session.commit)
            session.discard()
            session.flush()
            session.close()

        in_child(use)
        session.ensure(Customer(id="c", name="c"))
        assert session.commit() == 2


def test_a_session_of_its_own_works_in_the_child(uri: str) -> None:
    with Session(uri, config=CONFIG) as session:
        seed(session)

        def work() -> None:
            with Session(uri, config=CONFIG) as own:
                own.ensure(Customer(id="b", name="b"))
                assert own.commit() == 2
                assert own.query().entities(Customer).count() == 2
                assert len(own.sql("select * from Customer").collect()) == 2

        in_child(work)
        # What is in memory is the child's own from the fork on.
        assert session.query().entities(Customer).count() == (1 if "memory" in uri else 2)


def test_a_program_that_forks_by_itself_ends(tmp_path: Path) -> None:
    """Its child ends as any program: destructors run, and DuckDB's wait for their threads."""
    import subprocess

    uri = f"file://{tmp_path}/store"
    initialize_storage(uri)
    program = f"""
import os, sys
from storage_engine import Session
from tests.shop import Customer

session = Session({uri!r})
session.ensure(Customer(id="a", name="a"))
session.commit()
session.query().entities(Customer).count()
child = os.fork()
if child == 0:
    with Session({uri!r}) as own:
        own.ensure(Customer(id="b", name="b"))
        own.commit()
        own.query().entities(Customer).count()
    sys.exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""
    run = subprocess.run([sys.executable, "-c", program], timeout=120, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()


def test_the_parent_in_the_middle_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread has the session, the lock and the lease; the child neither waits for it nor
    gives its lock away, and waits for the lock as any other process does."""
    uri = f"file://{tmp_path}/store"
    initialize_storage(uri)
    create, reached, go_on = DirectoryStore.put_if_absent, threading.Event(), threading.Event()

    def held(store: DirectoryStore, key: str, data: bytes, *, write_id: str) -> str:
        if layout.is_manifest(key):
            reached.set()
            assert go_on.wait(240)
        return create(store, key, data, write_id=write_id)

    monkeypatch.setattr(DirectoryStore, "put_if_absent", held)
    session = Session(uri, config=CONFIG)
    session.ensure(Customer(id="a", name="a"))
    worker = threading.Thread(target=session.commit)
    worker.start()
    assert reached.wait(240)
    lock = tmp_path / "store" / layout.LOCK

    def use() -> None:
        refused(session.list_commits)
        session.ensure(Customer(id="z", name="z"))
        refused(session.commit)
        session.close()

    in_child(use)
    assert lock.exists(), "the child gave the parent's lock back"
    go_on.set()
    worker.join(240)
    assert session.last_commit is not None
    session.close()
    assert not lock.exists()


@pytest.mark.parametrize("engine", ["sqlite-v1", "sqlite-v2"])
def test_sqlite_works_on_in_the_child(tmp_path: Path, engine: str) -> None:
    uri = make_storage(tmp_path, engine)
    with Session(uri) as session:
        seed(session)
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            core = session._core
            with core.use("query"):
                entered.set()
                leave.wait(240)

        worker = threading.Thread(target=hold)
        worker.start()
        assert entered.wait(240)

        def work() -> None:
            session.ensure(Customer(id="b", name="b"))
            assert session.commit() == 2
            session.close()

        in_child(work)
        leave.set()
        worker.join(240)
        assert session.query().entities(Customer).count() == 2


def wait_for_a_fork() -> None:
    """Until a fork waits for us."""
    deadline = time.monotonic() + 240
    while process._fork.thread is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("engine", ["sqlite-v1", "sqlite-v2"])
def test_what_a_child_commits_outlives_the_parents_connections(tmp_path: Path, engine: str) -> None:
    """The last connection of a process takes the log along when it is closed, unless others have
    it: a child that believed the parent's locks to be its own wrote to a deleted file."""
    uri = make_storage(tmp_path, engine)
    session = Session(uri)
    seed(session)
    committed, closed = os.pipe(), os.pipe()

    def work() -> None:
        with Session(uri) as own:
            own.ensure(Customer(id="b", name="b"))
            assert own.commit() == 2
            os.write(committed[1], b"x")
            os.read(closed[0], 1)
            own.ensure(Customer(id="c", name="c"))
            assert own.commit() == 3

    def close() -> None:
        os.read(committed[0], 1)
        session.close()
        os.write(closed[1], b"x")

    closer = threading.Thread(target=close)
    closer.start()
    in_child(work)
    closer.join(240)
    with Session(uri) as session:
        assert session.query().entities(Customer).count() == 3


def test_a_fork_waits_for_a_sqlite_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the child has the lock's mark without the lock, and waits for itself."""
    uri = make_storage(tmp_path, "sqlite-v2")
    with Session(uri) as session, Session(uri) as other:
        seed(session)
        insert, entered = control_tables.insert_commit, threading.Event()

        def slow(*args: Any, **kwargs: Any) -> None:
            entered.set()
            wait_for_a_fork()
            insert(*args, **kwargs)

        other.ensure(Customer(id="b", name="b"))
        worker = threading.Thread(target=other.commit)
        with monkeypatch.context() as patch:
            patch.setattr(control_tables, "insert_commit", slow)
            worker.start()
            assert entered.wait(240)

            def work() -> None:
                patch.undo()
                session.ensure(Customer(id="c", name="c"))
                assert session.commit() == 3

            in_child(work)
        worker.join(240)
        assert session.query().entities(Customer).count() == 3


def test_a_child_refuses_sqlite_that_was_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this thread: that file. By another one, for longer than a fork waits: all of them."""
    monkeypatch.setattr(process, "FORK_WAIT_S", 0.05)
    uri = make_storage(tmp_path, "sqlite-v2")
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"
    with Session(uri) as session:
        ids = [f"{n:05}" for n in range(20_000)]
        session.ingest(Customer, pa.table({"id": ids, "name": ids}))
        session.commit()
        rows = iter(session.query().entities(Customer).batches())
        next(rows)

        def in_use(work: Callable[[], object]) -> None:
            with pytest.raises(ForkedSessionError, match="was in use in the parent"):
                work()

        def other_files_only() -> None:
            in_use(session.list_commits)
            in_use(lambda: Session(uri))
            in_use(lambda: list(rows))
            with Session(elsewhere) as own:
                seed(own)
            session.close()

        in_child(other_files_only)
        forker = threading.Thread(
            target=in_child, args=[lambda: in_use(lambda: Session(elsewhere))]
        )
        forker.start()
        forker.join(240)
        assert sum(batch.num_rows for batch in rows) < 20_000
        in_child(lambda: Session(uri).close())


def test_a_fork_waits_for_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module's lock belongs to a thread that a child does not have."""
    import storage_engine

    (tmp_path / "late.py").write_text(
        "from tests.runtime import test_forks as t\nt.importing.set()\nt.wait_for_a_fork()\n"
    )
    monkeypatch.setattr(storage_engine, "__path__", [*storage_engine.__path__, str(tmp_path)])
    importing.clear()
    worker = threading.Thread(target=importlib.import_module, args=["storage_engine.late"])
    worker.start()
    assert importing.wait(240)

    def work() -> None:
        from storage_engine import late  # type: ignore[attr-defined]  # noqa: F401

    in_child(work)
    worker.join(240)


importing = threading.Event()


def test_a_parent_killed_inside_a_write_leaves_no_lock_to_its_child(tmp_path: Path) -> None:
    """A lock of the kernel is held until the last copy of its handle is closed."""
    uri = f"file://{tmp_path}/store"
    initialize_storage(uri)
    program = f"""
import os, signal, threading
from storage_engine import Session
from storage_engine.objectstore.local import DirectoryStore
from tests.shop import Customer

require, reached = DirectoryStore._require, threading.Event()

def held(*args):
    reached.set()
    threading.Event().wait()

session = Session({uri!r})
session.ensure(Customer(id="a", name="a"))
DirectoryStore._require = held
threading.Thread(target=session.commit, daemon=True).start()
assert reached.wait(240)
child = os.fork()
if child == 0:
    os.read(0, 1)  # until the test is over
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    import subprocess

    run = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], stdin=subprocess.PIPE)
    try:
        assert run.wait(240) == -signal.SIGKILL

        def work() -> None:
            with Session(uri, config=CONFIG) as session:
                session.ensure(Customer(id="b", name="b"))
                session.commit()

        in_child(work)
    finally:
        assert run.stdin is not None
        run.stdin.close()


def test_an_in_memory_storage_is_refused_in_the_child() -> None:
    with Session(":memory:") as session:
        seed(session)
        in_child(lambda: refused(session.list_commits))
        assert len(session.list_commits()) == 1


def test_an_ontology_is_refused_in_the_child(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    initialize_storage(uri)
    with Ontology(storage_uri=uri) as ontology:

        def use() -> None:
            refused(ontology.list_commits)
            ontology.close()

        in_child(use)
        assert ontology.list_commits() == []


def commit_and_return(uri: str, kept: bool) -> None:
    session = Session(uri, config=CONFIG)
    session.ensure(Customer(id=str(os.getpid()), name="child"))
    session.commit()
    if kept:
        _kept.append(session)


_kept: list[Any] = []


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_multiprocessing_child_that_does_not_close(
    tmp_path: Path, method: str, kept: bool
) -> None:
    uri = f"file://{tmp_path}/store"
    initialize_storage(uri)
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=commit_and_return, args=(uri, kept))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert not (tmp_path / "store" / layout.LOCK).exists(), "the lock is left"


def test_memory_backends_are_separate(tmp_path: Path) -> None:
    initialize_storage("memory://apart")
    with memory_backend("apart").lock:  # in use at the fork

        def work() -> None:
            with Session("memory://apart") as own:
                own.ensure(Customer(id="a", name="a"))
                assert own.commit() == 1

        worker = threading.Thread(target=in_child, args=(work,))
        worker.start()
        worker.join(240)
    with Session("memory://apart") as session:
        assert session.list_commits() == []


@pytest.mark.s3
def test_on_s3(seaweedfs_s3: S3Server) -> None:
    """Connections are the parent's, and obstore's threads, which a child cannot make again."""
    config = seaweedfs_s3.config()
    uri = f"s3://{seaweedfs_s3.make_bucket()}/store"
    initialize_storage(uri, config=config)
    with Session(uri, config=config) as session:
        seed(session)
        session.emit(OrderPlaced(order_id="1"))  # by obstore
        bulk = session._core.repository.objects.store.bulk  # type: ignore[union-attr]
        bulk.get(layout.HEAD)

        def work() -> None:
            session.ensure(Customer(id="z", name="z"))
            refused(session.commit)
            refused(session.list_commits)
            refused(lambda: bulk.get(layout.HEAD))
            session.close()
            with Session(uri, config=config) as own:
                own.ensure(Customer(id="b", name="b"))
                assert own.commit(event=OrderPlaced(order_id="2")) == 2
                assert own.query().entities(Customer).count() == 2
                assert own._core.repository.objects.store.bulk.get(layout.HEAD)  # type: ignore[union-attr]

        in_child(work)
        session.ensure(Customer(id="c", name="c"))
        assert session.commit() == 3
        assert session.query().entities(Customer).count() == 3


def test_a_session_is_not_handed_to_a_spawned_process() -> None:
    with Session(":memory:") as session, pytest.raises(TypeError, match="open a session there"):
        pickle.dumps(session)
