"""Commits that are published together, while the store fails and rivals come first.

One swap of head publishes all or none. What a draft learned from one before it is told only when
both stand; whatever goes wrong, everybody is told what is so, and nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from storage_engine.commitlog import layout, series, state
from storage_engine.commitlog.json_object import ATTEMPTS
from storage_engine.commitlog.publisher import Publisher
from storage_engine.commitlog.records import AckedTogether
from storage_engine.commitlog.series import Draft
from storage_engine.commitlog.swap import Swap
from storage_engine.errors import (
    CommitStateUnknownError,
    ConcurrentWriteError,
    ExpectedVersionMismatchError,
    HeadMismatchError,
    LeaseExpiredError,
    LockContentionError,
    StorageBackendError,
)
from storage_engine.maintenance.compaction.plan import TierPolicy
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository import commit_queue
from storage_engine.repository.commit_queue import PendingCommit
from storage_engine.repository.object.write.commit import CommitRun
from storage_engine.repository.object.write.group import GroupRows
from storage_engine.repository.protocol import (
    Ack,
    ClaimLost,
    CommitRequest,
    Idempotency,
    ReadWindow,
    Snapshot,
)
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, Writer, at
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of
from tests.events.support import order


def submit(writer: Writer, key: str, age: int, **request: Any) -> PendingCommit:
    metadata = {"mark": f"{key}{age}"}
    rows = rows_of(CUSTOMER, customer(key, age=age))
    return writer.repo.submit(CommitRequest([rows], metadata=metadata, **request))


def outcome(pending: PendingCommit) -> int | type[Exception] | None:
    try:
        result = pending.result()
    except Exception as error:  # noqa: BLE001 - compared
        return type(error)
    return result.commit_id if result is not None else None


def rival_commits(world: World, rival: Writer, key: str, age: int) -> Callable[[], None]:
    def act() -> None:
        world.pass_lease()
        rival.put(customer(key, age=age), metadata={"mark": "rival"})

    return act


def started(world: World, **settings: Any) -> Writer:
    ours = world.open("ours", **settings)
    ours.put(customer("a", age=1), metadata={"mark": "first"})
    ours.repo.flush()
    return ours


# -- lost and unknown -----------------------------------------------------------------------------


def test_after_a_lost_cas_all_are_drafted_again(either_world: World) -> None:
    """And learn what is so now: of the rival and of one another."""
    world = either_world
    ours, rival = started(world), world.open("rival")
    pending = {
        "written": submit(ours, "a", 2),
        "same as the one before": submit(ours, "a", 2),
        "refused at first": submit(ours, "d", 1, expect={CUSTOMER.ref: 3}),
        "what the rival does too": submit(ours, "r", 7),
        "new unless the rival was there": submit(ours, "r", 8, snapshot=Snapshot(1)),
        "expects the first": submit(ours, "b", 1, expect={CUSTOMER.ref: 1}),
        "expects what came of it": submit(ours, "c", 1, expect={CUSTOMER.ref: 4}),
    }
    at(ours.store, "PUT_IF", layout.HEAD, rival_commits(world, rival, "r", 7))
    assert {name: outcome(each) for name, each in pending.items()} == {
        "written": 3,
        "same as the one before": None,
        "refused at first": 4,
        "what the rival does too": None,
        "new unless the rival was there": ConcurrentWriteError,
        "expects the first": ExpectedVersionMismatchError,
        "expects what came of it": 5,
    }
    assert world.marks() == ["first", "rival", "a2", "d1", "c1"]
    assert pending["written"].result().attempts == 2  # type: ignore[union-attr]
    assert world.open().history() == [
        (1, "a", 1),
        (2, "r", 7),
        (3, "a", 2),
        (4, "d", 1),
        (5, "c", 1),
    ]
    assert world.orphans() == []


def test_losing_every_time_is_told_to_all(world: World) -> None:
    ours, rival = started(world, commit_max_attempts=2), world.open("rival")
    ages = iter(range(100))
    at(
        ours.store,
        "PUT_IF",
        layout.HEAD,
        lambda: rival_commits(world, rival, "r", next(ages))(),
        times=None,
    )
    pending = [submit(ours, key, 2) for key in "abc"]
    ours.repo.flush()
    errors = []
    for each in pending:
        with pytest.raises(HeadMismatchError) as caught:
            each.result()
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3, "each may add to its own"
    assert {error.attempts for error in errors} == {2}
    assert world.orphans() == []


@pytest.mark.parametrize("landed", [True, False])
def test_an_unknown_swap_is_unknown_to_all_that_rest_on_it(world: World, landed: bool) -> None:
    ours = started(world)
    early = submit(ours, "a", 9, expect={CUSTOMER.ref: 7})
    drafted = [submit(ours, "a", 2), submit(ours, "b", 2)]
    resting = [submit(ours, "a", 2), submit(ours, "c", 1, expect={CUSTOMER.ref: 1})]
    fault = FaultKind.RESPONSE_LOST if landed else FaultKind.TIMEOUT
    ours.fail(fault, "PUT_IF", layout.HEAD, times=None)
    at(
        ours.store,
        "PUT_IF",
        layout.HEAD,
        lambda: ours.fail(FaultKind.UNAVAILABLE, "GET", layout.HEAD, times=None),
    )
    assert outcome(early) is ExpectedVersionMismatchError, "nothing was drafted before it"
    for commit_id, each in zip((2, 3), drafted, strict=True):
        with pytest.raises(CommitStateUnknownError) as caught:
            each.result()
        assert caught.value.commit_id == commit_id
        manifest = world.document(caught.value.manifest_path)
        assert manifest["write_id"] == caught.value.write_id
        assert all(file["path"] in world.stored_keys() for file in manifest["files"])
    assert [outcome(each) for each in resting] == [CommitStateUnknownError] * 2
    ours.heal()
    assert world.marks() == (["first", "a2", "b2"] if landed else ["first"])
    assert ours.put(customer("z")).commit_id == (4 if landed else 2)


def test_a_lost_answer_is_found_to_have_won(either_world: World) -> None:
    ours = started(either_world)
    ours.fail(FaultKind.RESPONSE_LOST, "PUT_IF", layout.HEAD)
    pending = [submit(ours, "a", 2), submit(ours, "a", 3)]
    assert [outcome(each) for each in pending] == [2, 3]
    assert either_world.marks() == ["first", "a2", "a3"]


def test_others_that_have_built_on_it_prove_that_it_has_won(world: World) -> None:
    ours, rival = started(world), world.open("rival")
    ours.fail(FaultKind.RESPONSE_LOST, "PUT_IF", layout.HEAD)
    build = rival_commits(world, rival, "r", 1)
    at(ours.store, "PUT_IF", layout.HEAD, lambda: at(ours.store, "GET", layout.HEAD, build))
    pending = [submit(ours, "a", 2), submit(ours, "b", 3)]
    assert [outcome(each) for each in pending] == [2, 3]
    assert world.marks() == ["first", "a2", "b3", "rival"]


def test_what_fails_after_the_swap_denies_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the storage is closed by another thread, so that nothing can be started any more."""
    ours = started(world)

    def broken(*_: Any) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(Publisher, "_finish", broken)
    pending = [submit(ours, "a", 2), submit(ours, "a", 2), submit(ours, "b", 2)]
    assert [outcome(each) for each in pending] == [2, None, 3]
    assert world.marks() == ["first", "a2", "b2"]


# -- before the swap ------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["*/entities/*", "*manifest*"])
def test_one_whose_upload_fails_leaves_the_others_alone(world: World, what: str) -> None:
    """They are drafted again without it: what they learned from it was not so."""
    ours = started(world)
    first, failing = submit(ours, "b", 1), submit(ours, "a", 2)
    back, same = submit(ours, "a", 1), submit(ours, "c", 1, expect={CUSTOMER.ref: 2})
    ours.fail(FaultKind.UNAVAILABLE, "PUT_IF", f"commits/3-{what}", times=ATTEMPTS)
    assert outcome(first) == 2
    with pytest.raises(StorageBackendError):
        failing.result()
    assert outcome(back) is None, "nobody has changed it"
    assert outcome(same) == 3
    assert world.marks() == ["first", "b1", "c1"]
    assert world.orphans() == []


def test_a_store_that_takes_nothing_is_told_to_all(world: World) -> None:
    ours = started(world)
    ours.fail(FaultKind.UNAVAILABLE, "PUT_IF", "commits/*", times=None)
    pending = [submit(ours, key, 2) for key in "abc"]
    for each in pending:
        with pytest.raises(StorageBackendError):
            each.result()
    ours.heal()
    assert [outcome(submit(ours, key, 2)) for key in "ab"] == [2, 3]


def test_a_lease_that_ran_out_is_told_to_all(world: World) -> None:
    ours = started(world)
    at(ours.store, "PUT_IF", "commits/*", world.pass_lease)
    pending = [submit(ours, key, 2) for key in "ab"]
    assert [outcome(each) for each in pending] == [LeaseExpiredError] * 2
    assert world.orphans() == []
    assert [outcome(submit(ours, key, 2)) for key in "ab"] == [2, 3]


def test_each_waits_for_the_lock_as_long_as_it_may(world: World) -> None:
    """Who came while the first one waited, on its behalf too, gives up at its own time."""
    holder = world.open("holder")
    ours = world.open("ours", s3_lock_timeout_ms=1000)
    holder.put(customer("a", age=1))
    holder.repo.flush()
    lease = holder.repo.lock.acquire()
    clock = world.backend.clock
    first, late = [submit(ours, "b", 1)], []

    def arrive() -> None:
        clock.sleep(0.4)
        late.append(submit(ours, "c", 1))

    at(ours.store, "GET", layout.LOCK, arrive)
    began = clock.now()
    with pytest.raises(LockContentionError) as caught:
        first[0].result()
    assert 1000 <= caught.value.waited_ms < 1500
    assert outcome(late[0]) is LockContentionError
    assert 1.3 < (clock.now() - began).total_seconds() < 1.8
    lease.release()
    assert [outcome(submit(ours, key, 1)) for key in "bc"] == [2, 3]


# -- what rides with commits ----------------------------------------------------------------------


def test_events_and_acks_of_each_are_its_own(either_world: World) -> None:
    world = either_world
    ours = started(world)

    def ack(event: str, since: int = 1) -> Ack:
        return Ack("shop", event, "bill", "token", since)

    pending = [
        submit(ours, "a", 2, events=[order(1)], acks=[ack("e1")]),
        submit(ours, "b", 2),
        submit(ours, "c", 2, acks=[ack("e2")]),
        submit(ours, "d", 2, acks=[ack("e1")]),  # handled by the first of them
        submit(ours, "e", 2, events=[order(2), order(3)]),
    ]
    assert [outcome(each) for each in pending] == [2, 3, 4, ClaimLost, 5]
    chain = world.chain()
    assert [[e["id"] for e in m.events] for m in chain[1:]] == [
        ["order-1"],
        [],
        [],
        ["order-2", "order-3"],
    ]
    assert [[a["event_id"] for a in m.acks] for m in chain[1:]] == [["e1"], [], ["e2"], []]
    ours.repo.flush()
    sent = [key for key in world.stored_keys("events/shop/") if "order-" in key]
    assert len(sent) == 3
    fresh = world.open()
    head = fresh.repo.chain.read_head().head
    assert state.acked_since(fresh.repo.chain, head, 1) == {
        ("shop", "e1", "bill"),
        ("shop", "e2", "bill"),
    }
    carriers = state.carriers(fresh.repo.chain, head, "events", above=0)
    assert [link.commit_id for link, _ in carriers] == [5, 2]


def test_marks_between_commits_are_carried_by_the_next(world: World) -> None:
    ours = started(world)
    pending = [
        submit(ours, "a", 1, idempotency=Idempotency("x", 1)),
        submit(ours, "a", 2),
        submit(ours, "a", 2, idempotency=Idempotency("y", 1)),
        submit(ours, "a", 2, idempotency=Idempotency("x", 2)),
    ]
    assert [outcome(each) for each in pending] == [None, 2, None, None]
    assert dict(world.chain()[1].marks) == {"x": 1}
    assert dict(world.head().marks) == {"x": 2, "y": 1}
    assert outcome(submit(ours, "a", 3)) == 3
    assert dict(world.chain()[2].marks) == {"x": 2, "y": 1}
    assert world.head().marks == {}


def test_more_marks_than_head_may_have(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_engine.commitlog.series._MARKS_IN_HEAD", 3)
    ours = started(world)
    units = [Idempotency(f"app-{n}", n) for n in range(5)]
    pending = [submit(ours, "a", 2), *(submit(ours, "a", 2, idempotency=u) for u in units)]
    assert [outcome(each) for each in pending] == [2, *[None] * 5]
    head = world.head()
    assert head.marks == {}
    assert head.checkpoint is not None
    fresh = world.open()
    assert all(fresh.repo.applied(unit) is not None for unit in units)
    assert fresh.put(customer("a", age=3)).commit_id == 3


# -- checkpoints, buckets, snapshots --------------------------------------------------------------


def test_buckets_as_if_they_came_one_by_one_and_a_checkpoint_at_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one type in the manifest at most. A checkpoint is due after every third commit: those
    that are published together have one, with the last, so that the next writer reads no other."""
    monkeypatch.setattr("storage_engine.commitlog.type_heads.INLINE_TYPES", 1)
    monkeypatch.setattr(state, "PAGE_COMMITS", 4)
    ours = started(world, checkpoint_interval=3)
    pending = []
    for n in range(2, 12):
        pending.append(submit(ours, "a", n, idempotency=Idempotency("app", n)))
        rows = rows_of(PRODUCT, product("p", float(n)))
        pending.append(ours.repo.submit(CommitRequest([rows], metadata={"mark": str(n)})))
    assert [outcome(each) for each in pending] == list(range(2, 22))
    chain = world.chain()
    assert all(m.type_head_buckets is not None for m in chain[2:])
    assert [m.checkpoint.commit_id if m.checkpoint else 0 for m in chain] == [0] * 20 + [21]
    fresh = world.open()
    assert fresh.history() == [(1, "a", 1), *((2 * n - 2, "a", n) for n in range(2, 12))]
    assert verify_storage(fresh.repo, deep=True).findings == []
    assert fresh.repo.applied(Idempotency("app", 5)) is not None
    assert ours.put(customer("a", age=50)).commit_id == 22
    assert verify_storage(ours.repo, deep=True).findings == []


def test_the_next_writer_of_a_checkpoint_reads_none_of_a_group_but_its_last(world: World) -> None:
    ours = started(world, checkpoint_interval=10)
    pending = [submit(ours, "a", n) for n in range(2, 20)]
    assert outcome(pending[-1]) == 19
    ours.repo.flush()
    other = world.open("other", checkpoint_interval=10)
    keys: list[str] = []
    other.store.on_request(lambda _, key: keys.append(key))
    assert other.put(customer("b")).commit_id == 20
    attempts = [layout.commit_attempt(key) for key in keys if layout.is_manifest(key)]
    assert {attempt.commit_id for attempt in attempts if attempt is not None} == {19, 20}
    assert [m.checkpoint.commit_id for m in world.chain()[18:] if m.checkpoint] == [19, 20]
    as_of = world.open().rows(window=ReadWindow(as_of=7))
    assert [(row["entity_key"], row["age"]) for row in as_of] == [("a", 7)]
    assert verify_storage(other.repo, deep=True).findings == []


def test_the_first_carries_the_snapshot_that_waits(world: World) -> None:
    ours = world.open("ours", merges=TierPolicy(tail=4))
    age = 0
    for _ in range(6):
        pending = [submit(ours, "a", age := age + 1) for _ in range(4)]
        assert all(isinstance(outcome(each), int) for each in pending)
        ours.repo.publisher.flush()
    ours.repo.flush()
    head = ours.repo.chain.read_head().head
    entries = state.current_checkpoint(ours.repo.chain, head).entries[CUSTOMER.ref]
    assert any(entry.is_snapshot for entry in entries)
    fresh = world.open()
    assert fresh.history() == [(n, "a", n) for n in range(1, age + 1)]
    assert fresh.repo.index_warnings() == []
    assert verify_storage(fresh.repo, deep=True).findings == []


# -- planted defects ------------------------------------------------------------------------------


def test_planted_a_draft_that_sees_nothing_of_the_one_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupRows, "of", lambda self, ref: None)
    with pytest.raises(AssertionError):
        test_after_a_lost_cas_all_are_drafted_again(world)


def acked(event: str) -> dict[str, Any]:
    return {"acks": [Ack("shop", event, "bill", "token", 1)]}


def acked_by(writer: Writer, above: int = 0) -> list[str]:
    head = writer.repo.chain.read_head().head
    return sorted(event for _, event, _ in state.acked_since(writer.repo.chain, head, above))


def test_the_last_of_a_group_tells_what_all_have_acked(either_world: World) -> None:
    """Who looks for acks, as every worker does under the lock, reads one manifest for a group."""
    world = either_world
    ours = started(world)
    outcome(submit(ours, "a", 2, **acked("e0")))
    for group in (("e1", "e2", "e3"), ("e4", "e5")):
        pending = [submit(ours, event, 2, **acked(event)) for event in group]
        pending.append(submit(ours, f"none {group}", 2))
        assert all(isinstance(outcome(each), int) for each in pending)
    ours.repo.flush()
    together = [m.acked_together for m in world.chain()]
    assert [len(t.acks) if t is not None else 0 for t in together] == [0, 0, 0, 0, 0, 3, 0, 0, 2]
    fresh = world.open("fresh")
    before = len(world.backend.log)
    assert acked_by(fresh) == ["e0", "e1", "e2", "e3", "e4", "e5"]
    manifests = [r.key for r in world.backend.log[before:] if r.key.startswith("commits/")]
    assert len(manifests) <= 3, "one for each swap"
    assert acked_by(world.open("later"), above=4) == ["e3", "e4", "e5"]
    assert verify_storage(ours.repo).ok


def test_acks_of_one_that_left_the_group_are_not_told(world: World) -> None:
    """The last one fails by itself: what it was told of the others, another tells."""
    ours = started(world)
    pending = [submit(ours, event, 2, **acked(event)) for event in ("e1", "e2", "e3")]
    ours.fail(FaultKind.UNAVAILABLE, "PUT_IF", "commits/4-*/manifest.json", times=ATTEMPTS)
    assert [outcome(each) for each in pending[:2]] == [2, 3]
    with pytest.raises(StorageBackendError):
        pending[2].result()
    assert acked_by(world.open("fresh")) == ["e1", "e2"]
    assert [m.acked_together is not None for m in world.chain()] == [False, False, True]


def test_planted_a_group_that_forgets_an_ack(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    original = AckedTogether

    def forgetful(acks: Any, before: Any) -> AckedTogether:
        return original(acks[1:], before)

    monkeypatch.setattr(series, "AckedTogether", forgetful)
    with pytest.raises(AssertionError):
        test_the_last_of_a_group_tells_what_all_have_acked(world)


def test_planted_an_ack_that_rides_without_its_commit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the commit before its own."""
    draft = CommitRun.draft
    acks = [Ack("shop", event, "bill", "token", 1).as_dict() for event in ("e1", "e2")]

    def early(self: CommitRun, base: Any, drafted: Any) -> Any:
        made = draft(self, base, drafted)
        if not isinstance(made, Draft):
            return made
        return replace(made, acks=acks if drafted is None else ())

    monkeypatch.setattr(CommitRun, "draft", early)
    with pytest.raises(AssertionError):
        test_events_and_acks_of_each_are_its_own(world)


def test_planted_an_answer_before_the_swap(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned from a draft that is then lost."""
    original = Swap._draft

    def hasty(self: Swap, committer: Any, carried: Any) -> None:
        original(self, committer, carried)
        answer = self._answers[-1]
        if answer.commit is None:
            committer.decide(answer.outcome)

    monkeypatch.setattr(Swap, "_draft", hasty)
    with pytest.raises(AssertionError):
        test_after_a_lost_cas_all_are_drafted_again(world)


def test_groups_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_queue, "MOST_TOGETHER", 3)
    ours = started(world)
    swaps: list[str] = []
    ours.store.on_request(lambda kind, key: swaps.append(key) if kind == "PUT_IF" else None)
    pending = [submit(ours, f"k{n}", n) for n in range(8)]
    assert outcome(pending[-1]) == 9
    assert swaps.count(layout.HEAD) == 3
    monkeypatch.setattr(commit_queue, "MOST_BYTES", 1)
    pending = [submit(ours, f"k{n}", -1) for n in range(2)]
    assert [outcome(each) for each in pending] == [10, 11]
    assert swaps.count(layout.HEAD) == 5
