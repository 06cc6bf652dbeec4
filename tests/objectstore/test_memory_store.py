"""The simulated store: every fault does what it says, and a seed replays a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.memory import (
    MemoryBackend,
    MemoryStore,
    SimulatedCrash,
    VirtualClock,
)
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectNotFound,
    OutcomeUnknown,
    PreconditionFailed,
)
from storage_engine.testing.faults import Fault, FaultKind, FaultPlan, FaultRule


def client_with(backend: MemoryBackend, *rules: FaultRule) -> MemoryStore:
    return backend.client(faults=FaultPlan(rules))


def at_writes(kind: FaultKind, **details: object) -> FaultRule:
    return FaultRule(Fault(kind, **details), kind="WRITE")  # type: ignore[arg-type]


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.mark.parametrize(
    ("kind", "landed"), [(FaultKind.CRASH_BEFORE, False), (FaultKind.CRASH_AFTER, True)]
)
def test_crashes_kill_the_client_for_good(
    backend: MemoryBackend, kind: FaultKind, landed: bool
) -> None:
    client = client_with(backend, at_writes(kind))
    with pytest.raises(SimulatedCrash):
        client.put_if_absent("k", b"1", write_id="w")
    assert ("k" in backend.objects()) is landed
    for attempt in (lambda: client.get("k"), lambda: client.put("other", b"")):
        with pytest.raises(SimulatedCrash):
            attempt()
    assert "other" not in backend.objects()
    assert backend.client().put_if_absent("next", b"", write_id="w")


def test_a_crash_is_no_exception_that_code_could_swallow(backend: MemoryBackend) -> None:
    client = client_with(backend, at_writes(FaultKind.CRASH_AFTER))
    assert not issubclass(SimulatedCrash, Exception)
    with pytest.raises(SimulatedCrash):
        client.put("k", b"1")


def test_a_crash_stops_the_rest_of_a_gather(backend: MemoryBackend) -> None:
    rule = FaultRule(Fault(FaultKind.CRASH_AFTER), kind="WRITE", nth=2)
    client = client_with(backend, rule)
    with pytest.raises(SimulatedCrash):
        client.parallel.map(lambda n: client.put(f"k{n}", b""), range(4))
    assert list(backend.objects()) == ["k0", "k1"]


@pytest.mark.parametrize(
    ("kind", "landed"), [(FaultKind.RESPONSE_LOST, True), (FaultKind.TIMEOUT, False)]
)
def test_lost_answers(backend: MemoryBackend, kind: FaultKind, landed: bool) -> None:
    client = client_with(backend, at_writes(kind))
    with pytest.raises(OutcomeUnknown):
        client.put_if_absent("k", b"1", write_id="w")
    assert ("k" in backend.objects()) is landed
    assert not client.crashed


def test_a_lost_answer_may_have_been_a_refusal(backend: MemoryBackend) -> None:
    backend.client().put("k", b"theirs")
    client = client_with(backend, at_writes(FaultKind.RESPONSE_LOST))
    with pytest.raises(OutcomeUnknown):
        client.put_if_absent("k", b"ours", write_id="w")
    assert backend.objects() == {"k": b"theirs"}


def test_a_delayed_write_lands_when_time_has_passed(backend: MemoryBackend) -> None:
    client = client_with(backend, at_writes(FaultKind.DELAYED, seconds=10.0))
    with pytest.raises(OutcomeUnknown):
        client.put_if_absent("k", b"late", write_id="w")
    client.sleep(9)
    assert backend.objects() == {}
    assert backend.pending == 1
    client.sleep(1)
    assert client.get("k").data == b"late"
    assert backend.pending == 0


def test_a_delayed_write_lands_after_so_many_requests(backend: MemoryBackend) -> None:
    client = client_with(backend, at_writes(FaultKind.DELAYED, requests=2))
    with pytest.raises(OutcomeUnknown):
        client.put_if_absent("k", b"late", write_id="w")
    for _ in range(2):
        with pytest.raises(ObjectNotFound):
            client.get("k")
    assert client.get("k").data == b"late"


def test_a_delayed_condition_is_judged_at_landing(backend: MemoryBackend) -> None:
    client = client_with(
        backend, FaultRule(Fault(FaultKind.DELAYED, seconds=5), kind="put_if_match")
    )
    first = client.put_if_absent("head", b"1", write_id="w1")
    with pytest.raises(OutcomeUnknown):
        client.put_if_match("head", b"late", first, write_id="w2")
    client.put_if_match("head", b"2", first, write_id="w3")
    client.sleep(60)
    assert client.get("head").data == b"2"

    other = client_with(backend, at_writes(FaultKind.DELAYED, seconds=5))
    with pytest.raises(OutcomeUnknown):
        other.delete_if_match("head", client.get("head").etag)
    backend.land_all()
    assert backend.objects() == {}


def test_delayed_writes_outlive_their_client(backend: MemoryBackend) -> None:
    client = client_with(
        backend,
        at_writes(FaultKind.DELAYED, seconds=5),
        FaultRule(Fault(FaultKind.CRASH_BEFORE), kind="GET"),
    )
    with pytest.raises(OutcomeUnknown):
        client.put_if_absent("k", b"late", write_id="w")
    with pytest.raises(SimulatedCrash):
        client.get("k")
    backend.clock.sleep(5)
    assert backend.objects() == {"k": b"late"}


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize(
    ("kind", "signal"),
    [
        (FaultKind.CONFLICT, ConditionalConflict),
        (FaultKind.PRECONDITION, PreconditionFailed),
        (FaultKind.SERVER_ERROR, OutcomeUnknown),
        (FaultKind.UNAVAILABLE, OutcomeUnknown),
    ],
)
def test_answers_to_conditional_writes(
    backend: MemoryBackend, kind: FaultKind, signal: type[Exception], applied: bool
) -> None:
    backend.client().put("there", b"1")
    etag = backend.client().get("there").etag
    attempts: list[Callable[[MemoryStore], object]] = [
        lambda c: c.put_if_absent("new", b"", write_id="w"),
        lambda c: c.put_if_match("there", b"2", etag, write_id="w"),
        lambda c: c.delete_if_match("there", backend.client().get("there").etag),
    ]
    for attempt in attempts:
        with pytest.raises(signal):
            attempt(client_with(backend, at_writes(kind, applied=applied)))
    assert backend.objects() == ({"new": b""} if applied else {"there": b"1"})


@pytest.mark.parametrize(
    "kind",
    [
        FaultKind.SERVER_ERROR,
        FaultKind.UNAVAILABLE,
        FaultKind.TIMEOUT,
        FaultKind.RESPONSE_LOST,
        FaultKind.DELAYED,
    ],
)
def test_reads_and_repeatable_writes_may_be_tried_again(
    backend: MemoryBackend, kind: FaultKind
) -> None:
    attempts: list[Callable[[MemoryStore], object]] = [
        lambda c: c.get("k"),
        lambda c: c.get_if_changed("k", "e"),
        lambda c: c.get_range("k", 0, 1),
        lambda c: list(c.list("")),
        lambda c: c.put("k", b""),
        lambda c: c.delete_many(["k"]),
    ]
    for attempt in attempts:
        client = client_with(backend, FaultRule(Fault(kind, seconds=5.0)))
        with pytest.raises(StorageBackendError) as caught:
            attempt(client)
        assert caught.value.retryable
    assert backend.pending == (2 if kind is FaultKind.DELAYED else 0)


def test_conflicts_happen_to_conditional_writes_only(backend: MemoryBackend) -> None:
    client = client_with(backend, FaultRule(Fault(FaultKind.CONFLICT)))
    client.put("k", b"")
    client.get("k")
    with pytest.raises(ConditionalConflict):
        client.put_if_absent("n", b"", write_id="w")


def test_slow_requests_take_virtual_time(backend: MemoryBackend) -> None:
    client = client_with(backend, FaultRule(Fault(FaultKind.SLOW, seconds=45.0)))
    before = client.now()
    client.put("k", b"")
    assert client.now() - before == timedelta(seconds=45)


def test_clocks(backend: MemoryBackend) -> None:
    ahead = backend.client(skew=90.0)
    jumping = client_with(backend, FaultRule(Fault(FaultKind.SKEW, seconds=-30.0), nth=2))
    apart = backend.client(clock=VirtualClock())
    start = backend.clock.now()
    assert ahead.now() - start == timedelta(seconds=90)
    jumping.put("a", b"")
    assert jumping.now() == start
    jumping.put("b", b"")
    assert jumping.now() - start == timedelta(seconds=-30)
    apart.sleep(5)
    assert backend.clock.now() == start
    ahead.sleep(5)
    assert backend.clock.now() - start == timedelta(seconds=5)
    assert next(iter(backend.client().list("a"))).modified == start


def test_rules_count_what_fits_them(backend: MemoryBackend) -> None:
    client = client_with(
        backend,
        FaultRule(Fault(FaultKind.TIMEOUT), kind="PUT_IF", key="meta/*", nth=2, times=2),
        FaultRule(Fault(FaultKind.UNAVAILABLE), kind="get", key="data/?", times=None),
    )
    outcomes = []
    for n in range(4):
        client.put_if_absent(f"data/{n}", b"", write_id="w")
        try:
            client.put_if_absent(f"meta/{n}/x", b"", write_id="w")
            outcomes.append("ok")
        except OutcomeUnknown:
            outcomes.append("unknown")
    assert outcomes == ["ok", "unknown", "unknown", "ok"]
    for n in range(3):
        with pytest.raises(StorageBackendError):
            client.get(f"data/{n}")
    assert client.get("meta/0/x").data == b""


def run_workload(backend: MemoryBackend, plan: FaultPlan) -> None:
    client = backend.client("w", faults=plan)
    for n in range(200):
        try:
            client.put_if_absent(f"k/{n % 40}", str(n).encode(), write_id=str(n))
            client.delete_if_match(f"k/{n % 40}", client.get(f"k/{n % 40}").etag)
        except (
            PreconditionFailed,
            ConditionalConflict,
            OutcomeUnknown,
            ObjectNotFound,
            StorageBackendError,
        ):
            continue


CHANCES = {kind: 0.05 for kind in FaultKind if "crash" not in kind.value}


def test_a_seed_replays_a_run() -> None:
    backends = [MemoryBackend() for _ in range(3)]
    plans = [FaultPlan(seed=seed, probabilities=CHANCES, limit=100) for seed in (7, 7, 8)]
    for backend, plan in zip(backends, plans, strict=True):
        run_workload(backend, plan)
    assert backends[0].log == backends[1].log
    assert backends[0].objects() == backends[1].objects()
    assert plans[0].fired == plans[1].fired
    assert backends[0].log != backends[2].log
    assert len(plans[0].fired) == 100
    assert {fired.fault.kind for fired in plans[0].fired} == set(CHANCES)


def test_fired_faults_replay_a_run_without_the_seed() -> None:
    random_run, replay = MemoryBackend(), MemoryBackend()
    plan = FaultPlan(seed=3, probabilities=CHANCES, limit=40)
    run_workload(random_run, plan)
    run_workload(replay, FaultPlan.replay(plan.fired))
    assert replay.log == random_run.log
    assert replay.objects() == random_run.objects()


def test_random_faults_need_a_seed() -> None:
    with pytest.raises(ValueError, match="seed"):
        FaultPlan(probabilities={FaultKind.TIMEOUT: 0.1})
    with pytest.raises(ValueError, match="more than 1"):
        FaultPlan(seed=1, probabilities={FaultKind.TIMEOUT: 0.7, FaultKind.SLOW: 0.7})


def test_hooks_interleave_another_writer_at_an_exact_step(backend: MemoryBackend) -> None:
    one, two = backend.client("one"), backend.client("two")
    etag = one.put_if_absent("head", b"1", write_id="w")

    def overtake(kind: str, key: str) -> None:
        two.put_if_match("head", b"2", etag, write_id="w2")

    remove = one.on_request(overtake)
    with pytest.raises(PreconditionFailed):
        one.put_if_match("head", b"3", etag, write_id="w3")
    remove()
    remove()
    one.put_if_match("head", b"4", one.get("head").etag, write_id="w4")
    assert backend.objects() == {"head": b"4"}


def test_hooks_after_a_request_see_it_applied(backend: MemoryBackend) -> None:
    client = backend.client()
    seen: list[tuple[str, str, bool]] = []
    client.on_request(lambda kind, key: seen.append((kind, key, key in backend.objects())))
    client.on_request(
        lambda kind, key: seen.append((kind, key, key in backend.objects())), when="after"
    )
    client.put("k", b"")
    assert seen == [("PUT", "k", False), ("PUT", "k", True)]


def test_a_hook_can_pause_a_writer(backend: MemoryBackend) -> None:
    writer, reached, go_on = backend.client(), threading.Event(), threading.Event()

    def pause(kind: str, key: str) -> None:
        reached.set()
        assert go_on.wait(240)

    writer.on_request(pause)
    thread = threading.Thread(target=writer.put, args=("k", b"paused"))
    thread.start()
    assert reached.wait(240)
    assert backend.objects() == {}
    backend.client().put("k", b"meanwhile")
    go_on.set()
    thread.join()
    assert backend.objects() == {"k": b"paused"}


def test_the_log_tells_who_did_what(backend: MemoryBackend) -> None:
    one = backend.client("one", faults=FaultPlan([at_writes(FaultKind.TIMEOUT)]))
    two = backend.client()
    with pytest.raises(OutcomeUnknown):
        one.put_if_absent("k", b"", write_id="w")
    two.put("k", b"")
    with pytest.raises(PreconditionFailed):
        one.put_if_absent("k", b"", write_id="w")
    entries = [(r.number, r.client, r.kind, r.operation, r.key, r.outcome) for r in backend.log]
    assert entries == [
        (1, "one", "PUT_IF", "put_if_absent", "k", "timeout: OutcomeUnknown"),
        (2, "client-2", "PUT", "put", "k", "ok"),
        (3, "one", "PUT_IF", "put_if_absent", "k", "PreconditionFailed"),
    ]


def test_pages_and_meters_are_each_clients_own(backend: MemoryBackend) -> None:
    small, normal = backend.client(page_size=2), backend.client()
    for n in range(5):
        normal.put(f"k{n}", b"")
    assert [info.key for info in small.list("")] == [f"k{n}" for n in range(5)]
    assert small.meter.snapshot()["LIST"] == 3
    assert "LIST" not in normal.meter.snapshot()
