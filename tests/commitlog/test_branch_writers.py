"""Many writers of one branch: they wait in a line of their own, and publish together."""

from __future__ import annotations

from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.commitlog.lock import WriteLock
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.objectstore.memory import MemoryStore
from storage_engine.repository.object.merge import MergeTerms
from storage_engine.repository.protocol import CommitRequest, Idempotency
from tests.commitlog.support import World, Writer, at
from tests.engines import CUSTOMER, customer, rows_of


@pytest.fixture
def forked(world: World) -> World:
    main = world.open("main")
    main.put(customer("a", age=1))
    main.repo.branches.create("run")
    main.repo.flush()
    return world


def lock_of(world: World, owner: str, key: str) -> WriteLock:
    return WriteLock(
        world.backend.client(owner),
        owner_id=owner,
        lease_ttl_ms=30_000,
        timeout_ms=10_000,
        keep_alive=False,
        key=key,
    )


def tickets(world: World) -> list[str]:
    return world.stored_keys(layout.LINES)


def test_writers_of_a_branch_stand_in_a_line_of_their_own(forked: World) -> None:
    """Who waited hands the lock to the next; main's line is another."""
    key = forked.open(branch="run").repo.lock.key
    assert layout.branch_of(key) is not None
    first = lock_of(forked, "first", key).acquire()
    on_main = lock_of(forked, "main", layout.LOCK).acquire()
    second, third = (lock_of(forked, name, key) for name in ("second", "third"))
    assert isinstance(second.store, MemoryStore)
    assert isinstance(third.store, MemoryStore)
    at(second.store, "GET", key, first.release)
    lease = second.acquire()
    assert lease.contended
    seen: list[str] = []

    def release() -> None:
        seen.extend(tickets(forked))
        lease.release()
        assert forked.document(key)["offered"], "handed over, not deleted"

    at(third.store, "GET", key, release)
    ours = third.acquire()
    assert any("third" in each for each in seen)
    assert all(each.startswith(layout.line_of(key) or "none") for each in seen)
    assert layout.line_of(key) != layout.line_of(layout.LOCK)
    ours.release()
    on_main.release()
    assert tickets(forked) == []
    assert not forked.stored_keys(layout.LOCKS)


def test_a_ticket_that_a_dead_writer_of_a_branch_left_is_collected(forked: World) -> None:
    branch = forked.open(branch="run")
    prefix = layout.line_of(branch.repo.lock.key)
    lock = branch.repo.lock
    assert lock.line is not None
    place = lock.line.place("0" * 32, owner_id="dead", patience_ms=1000)
    lock.line.join(place, owner_id="dead", holder={})
    assert [key for key in tickets(forked) if key.startswith(prefix or "none")]
    forked.backend.clock.sleep(90 * 24 * 3600)
    main = forked.open().repo
    sweep(main, plan_gc(main))
    assert tickets(forked) == []


def submit(writer: Writer, key: str, age: int, **request: Any) -> Any:
    return writer.repo.submit(CommitRequest([rows_of(CUSTOMER, customer(key, age=age))], **request))


def test_commits_of_a_branch_are_published_together(forked: World) -> None:
    """One swap of the branch's head; each keeps its id, unit of work and place in history."""
    branch = forked.open("ours", branch="run")
    branch.put(customer("warm"))
    branch.repo.flush()
    swaps: list[str] = []
    head = layout.branch_head("run")
    branch.store.on_request(
        lambda kind, key: swaps.append(key) if kind == "PUT_IF" and key == head else None
    )
    pending = [submit(branch, "a", age, idempotency=Idempotency("app", age)) for age in range(2, 6)]
    assert [each.result().commit_id for each in pending] == [3, 4, 5, 6]
    assert len(swaps) == 1
    assert [row for row in branch.history() if row[1] == "a"] == [
        (1, "a", 1),
        *((age + 1, "a", age) for age in range(2, 6)),
    ]
    main = forked.open("main")
    assert main.ages() == {"a": 1}
    report = main.repo.branches.merge("run", MergeTerms())
    assert (report.commit_id, report.types[0].updated) == (2, 1)
    assert main.ages() == {"a": 5, "warm": 1}
    assert main.repo.applied(Idempotency("app", 5)) is not None
    for name in ("main", "run"):
        assert verify_storage(forked.open(branch=name).repo, deep=True).findings == []


def test_a_group_on_a_branch_that_is_deleted_meanwhile(forked: World) -> None:
    """All are told; nothing of it is left, and main is as it was."""
    branch = forked.open("ours", branch="run")
    branch.put(customer("warm"))
    branch.repo.flush()
    other = forked.open("other")

    def gone() -> None:
        forked.pass_lease()
        other.repo.branches.delete("run")

    pending = [submit(branch, "a", age) for age in (2, 3)]
    at(branch.store, "PUT_IF", layout.branch_head("run"), gone)
    for each in pending:
        with pytest.raises(Exception, match=r"deleted|unknown|lease"):
            each.result()
    assert other.ages() == {"a": 1}
    sweep(other.repo, plan_gc(other.repo))
    assert verify_storage(forked.open().repo, deep=True).findings == []
