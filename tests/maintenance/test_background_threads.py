"""Storages that keep themselves compact where time passes by itself: sessions on a directory."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_engine import OntologiaConfig, Session, initialize_storage
from storage_engine.commitlog import layout, state
from storage_engine.maintenance.compaction import background
from storage_engine.maintenance.compaction.background import BackgroundMerges
from storage_engine.maintenance.compaction.build import LocalBuild
from storage_engine.maintenance.compaction.plan import TierPolicy
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository.object.engine import ObjectRepository
from tests.engines import Customer

POLICY = TierPolicy(tail=4)


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(background, "TierPolicy", lambda: POLICY)
    storage = str(tmp_path / "onto")
    initialize_storage(storage)
    yield storage
    left = [p.name for p in (tmp_path / "onto" / layout.ATTEMPTS).rglob("*.json")]
    assert left == []


def put(session: Session, first: int, last: int) -> None:
    for n in range(first, last + 1):
        session.ensure(Customer(id=f"k{n % 7}", name="Ann", age=n))
        assert session.commit() is not None


def objects(session: Session) -> ObjectRepository:
    repository = session.repository.objects
    assert repository is not None
    return repository


def snapshots(session: Session) -> int:
    chain = objects(session).chain
    entries = state.current_checkpoint(chain, chain.read_head().head).entries
    return sum(e.is_snapshot for e in entries["entity", "Customer"])


def ages(uri: str) -> dict[str, int | None]:
    with Session(uri, entity_types=[Customer]) as session:
        assert verify_storage(session.repository).findings == []
        rows = session.query().entities(Customer).collect()
        return {row.id: row.age for row in rows}


def expected(last: int) -> dict[str, int | None]:
    return {f"k{n % 7}": n for n in range(max(1, last - 6), last + 1)}


def test_a_session_that_goes_on_committing_stays_compact(uri: str) -> None:
    with Session(uri) as session:
        put(session, 1, 40)
        session.flush()
        assert snapshots(session) > 0
    assert ages(uri) == expected(40)


def test_a_session_that_falls_idle_publishes_what_it_merged(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "IDLE_S", 0.0)
    with Session(uri) as session:
        put(session, 1, 6)
        merges = objects(session).upkeep
        assert isinstance(merges, BackgroundMerges)
        with merges._condition:
            assert merges._condition.wait_for(lambda: not merges._busy, timeout=120)
        assert snapshots(session) == 1
    assert ages(uri) == expected(6)


def test_a_process_that_commits_once_merges_before_it_ends(uri: str) -> None:
    for n in range(1, 7):
        with Session(uri) as session:
            put(session, n, n)
    with Session(uri) as session:
        assert snapshots(session) >= 1
    assert ages(uri) == expected(6)


def test_close_does_not_wait_for_ever_for_a_merge(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a while, and the merge is given up at its next step."""
    monkeypatch.setattr(background, "PATIENCE_S", 0.05)
    begun, closing = threading.Event(), threading.Event()
    build = LocalBuild.__call__

    def slow(self: LocalBuild, *args: object, **kwargs: object) -> object:
        begun.set()
        assert closing.wait(120)
        return build(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalBuild, "__call__", slow)
    session = Session(uri)
    put(session, 1, 6)
    assert begun.wait(120)
    merges = objects(session).upkeep
    assert isinstance(merges, BackgroundMerges)
    flush = merges.flush

    def flush_then_go_on() -> None:
        flush()
        merges._abandoned = True
        closing.set()

    monkeypatch.setattr(merges, "flush", flush_then_go_on)
    session.close()
    assert ages(uri) == expected(6)
    with Session(uri) as again:
        assert snapshots(again) == 0


def test_the_setting_turns_it_off(uri: str) -> None:
    with Session(uri, config=OntologiaConfig(auto_compact=False)) as session:
        put(session, 1, 12)
        session.flush()
        assert snapshots(session) == 0
        assert objects(session).upkeep is None


def test_several_threads_and_sessions_lose_nothing(uri: str) -> None:
    def work(name: str) -> None:
        with Session(uri, config=OntologiaConfig(s3_lock_timeout_ms=60_000)) as session:
            for n in range(12):
                session.ensure(Customer(id=f"{name}-{n}", name="Ann", age=n))
                assert session.commit() is not None

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ages(uri)) == sorted(f"{name}-{n}" for name in "abc" for n in range(12))


def test_a_process_that_ends_without_close_ends_and_harms_nothing(tmp_path: Path) -> None:
    storage = tmp_path / "onto"
    initialize_storage(str(storage))
    program = """
        import sys
        import time
        from storage_engine import Session
        from storage_engine.maintenance.compaction import background
        from storage_engine.maintenance.compaction.plan import TierPolicy
        from tests.engines import Customer
        background.TierPolicy = lambda: TierPolicy(tail=4)
        background.IDLE_S = 3600.0
        session = Session(sys.argv[1])
        merges, n = session.repository.objects.upkeep, 0
        while merges._waiting is None:  # until a snapshot waits for a commit that does not come
            n += 1
            session.ensure(Customer(id=f"k{n % 7}", name="Ann", age=n))
            session.commit()
            time.sleep(0.1)
        print(n)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(storage)],
        cwd=Path(__file__).parents[2],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert ages(str(storage)) == expected(int(done.stdout))


def _in_child(repository: ObjectRepository, results: object) -> None:
    merges = repository.upkeep
    assert isinstance(merges, BackgroundMerges)
    merges.flush()
    with merges.carry() as snapshot:
        results.put(snapshot is None)  # type: ignore[attr-defined]


def test_a_forked_child_leaves_the_parents_merge_alone(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "IDLE_S", 3600.0)
    with Session(uri) as session:
        put(session, 1, 6)
        merges = objects(session).upkeep
        assert isinstance(merges, BackgroundMerges)
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=_in_child, args=(objects(session), results))
        child.start()
        assert results.get(timeout=120) is True
        child.join(120)
        session.flush()
        assert snapshots(session) == 1
    assert ages(uri) == expected(6)
