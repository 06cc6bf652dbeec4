"""Several workers on one namespace: nobody falls over another, and the work is divided."""

from __future__ import annotations

import itertools
import json
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.latency_proxy import latency_proxy
from storage_engine import (
    Entity,
    Event,
    Field,
    HandlerContext,
    OntologiaConfig,
    Session,
    initialize_storage,
    on_event,
    process,
)
from storage_engine.commitlog import layout
from storage_engine.errors import StorageBackendError
from storage_engine.events.object.consumer import LONG_PATIENCE, PATIENCE
from storage_engine.events.outcomes import Totals
from storage_engine.events.protocol import open_event_store
from storage_engine.runtime import worker as worker_module
from tests.commitlog.support import World, made_world
from tests.events.turns import Turns, Worker
from tests.servers import REGION, S3Server


class Ordered(Event):
    n: Field[int]


class Invoice(Entity):
    id: Field[str] = Field(primary_key=True)
    worker: Field[str]


# -- on a real server -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_s3(seaweedfs_s3: S3Server) -> Iterator[tuple[str, str]]:
    """A bucket, and the endpoint through which it is as far away as S3."""
    with latency_proxy(seaweedfs_s3.endpoint) as proxy:
        yield seaweedfs_s3.make_bucket(), proxy.endpoint


@pytest.mark.s3
def test_workers_whose_handlers_write(slow_s3: tuple[str, str]) -> None:
    """Two, four and eight, each crew on a bus of its own and all at once, as most is waiting."""
    with ThreadPoolExecutor(3) as pool:
        for crew in [pool.submit(check_writing_workers, slow_s3, count) for count in (2, 4, 8)]:
            crew.result()


def check_writing_workers(slow_s3: tuple[str, str], count: int) -> None:
    bucket, endpoint = slow_s3
    uri = f"s3://{bucket}/{uuid.uuid4().hex[:12]}"
    config = OntologiaConfig(
        s3_endpoint_url=endpoint,
        s3_region=REGION,
        s3_lock_timeout_ms=120_000,
        event_claim_limit=4,
        event_poll_interval_ms=50,
    )
    initialize_storage(uri, config=config)
    events = [Ordered(id=f"order-{n:02d}", n=n) for n in range(16)]
    ran: Counter[str] = Counter()

    def work(name: str) -> Totals:
        @on_event(Ordered, id="bill")
        def bill(ctx: HandlerContext[Ordered]) -> None:
            ran[ctx.event.id] += 1
            ctx.ensure(Invoice(id=ctx.event.id, worker=name))

        with Session(uri, config=config) as session:
            return session.drain([bill])

    with Session(uri, config=config) as session:
        session.emit(events)
    with ThreadPoolExecutor(count) as pool:
        totals = list(pool.map(work, [f"worker-{n}" for n in range(count)]))

    with Session(uri, config=config) as session:
        rows = session.query().entities(Invoice).collect()
        leftover = session.drain([on_event(Ordered, id="bill")(lambda _: None)])
    assert sorted(row.id for row in rows) == [event.id for event in events]
    assert set(ran) == {event.id for event in events}
    assert sum(done.handled for done in totals) == len(events)
    assert leftover.handled == 0


# -- requests -------------------------------------------------------------------------------------


@dataclass
class Crew:
    """Workers in simulated time on a bus with events, and what became of these."""

    world: World
    turns: Turns
    workers: list[Worker] = field(default_factory=list)
    ran: Counter[str] = field(default_factory=Counter)
    by: dict[str, str] = field(default_factory=dict)  # event -> the worker that ran it last
    at: dict[str, float] = field(default_factory=dict)  # event -> when that was

    def send(self, count: int, **fields: Any) -> None:
        sender = self.turns.worker("sender")
        begin = sender.now()
        sender.session.emit(
            [
                Ordered(id=f"o-{n}", n=n, created_at=begin + timedelta(milliseconds=n), **fields)
                for n in range(count)
            ]
        )

    def hire(self, name: str, **settings: Any) -> Worker:
        given = {"event_claim_limit": 10, **settings}
        self.workers.append(self.turns.worker(name, **given))
        return self.workers[-1]

    def handler(self, worker: Worker, seconds: float = 0.0, id: str = "count") -> Any:
        @on_event(Ordered, id=id)
        def count(ctx: HandlerContext[Ordered]) -> None:
            name = ctx.event.id if id == "count" else f"{id} {ctx.event.id}"
            self.ran[name] += 1
            self.by[name], self.at[name] = worker.name, self.now
            worker.sleep(seconds)

        return count

    def drain(self, worker: Worker, seconds: float = 0.0) -> Callable[[], Totals]:
        return lambda: worker.session.drain([self.handler(worker, seconds)])

    @property
    def now(self) -> float:
        return self.world.backend.clock.now().timestamp()

    @property
    def requests(self) -> Counter[str]:
        return sum((Counter(worker.requests) for worker in self.workers), Counter[str]())

    @property
    def claims(self) -> list[dict[str, Any]]:
        objects = self.world.backend.objects()
        return [json.loads(data) for key, data in objects.items() if key.startswith("claims/")]


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """Names of sessions decide who takes what: here they are the same in every run."""
    numbers = itertools.count(1)
    ids = SimpleNamespace(uuid4=lambda: f"session-{next(numbers)}")
    monkeypatch.setattr(worker_module, "uuid", ids)
    with made_world("v2") as world:
        yield Crew(world, Turns(world))


@pytest.mark.parametrize(
    ("count", "requests"),
    [
        (1, {"GET": 304, "LIST": 12, "PUT": 1, "PUT_IF": 601, "DELETE": 1}),
        (2, {"GET": 315, "LIST": 19, "PUT": 2, "PUT_IF": 613, "DELETE": 2}),
        (4, {"GET": 340, "LIST": 30, "PUT": 4, "PUT_IF": 622, "DELETE": 4}),
        (8, {"GET": 413, "LIST": 55, "PUT": 8, "PUT_IF": 641, "DELETE": 8}),
    ],
)
def test_workers_divide_the_work(crew: Crew, count: int, requests: dict[str, int]) -> None:
    """Requests for 300 events, exactly: at most 1.3 times those of one worker, and no slower."""
    crew.send(300)
    started = crew.now
    crew.turns.run({f"w{n}": crew.drain(crew.hire(f"w{n}")) for n in range(count)})

    assert crew.ran == Counter(f"o-{n}" for n in range(300))
    assert crew.requests == requests
    assert crew.requests.total() <= 1.3 * 919
    assert len(set(crew.by.values())) == count
    assert crew.now - started <= 9.2  # of one worker, whose requests take 10 ms each


# -- a worker that others count on, and that does not come ----------------------------------------


def registered(crew: Crew, *names: str, handlers: Sequence[str] = ("count",)) -> None:
    """Workers that say that they live, and do nothing."""
    store = open_event_store(crew.turns.worker("idle").repository, OntologiaConfig())
    for name in names:
        store.register_session("default", name, {"handlers": list(handlers)})


@pytest.mark.parametrize("paused", [1, 7])
def test_events_of_paused_workers_are_taken_by_one_that_has_nothing_to_do(
    crew: Crew, paused: int
) -> None:
    crew.send(40)
    registered(crew, *(f"paused-{n}" for n in range(paused)))
    worker, started = crew.hire("w"), crew.now

    crew.turns.run({"w": crew.drain(worker)})

    assert crew.ran == Counter(f"o-{n}" for n in range(40))
    waited = [at - started for at in crew.at.values()]
    assert sorted(waited)[40 // (paused + 1) - 5] < 2  # its own part at once
    assert max(waited) < PATIENCE.total_seconds() + 4


def test_events_of_a_paused_worker_are_taken_even_by_a_busy_one(crew: Crew) -> None:
    """It has claimed its own for some time ahead; then the oldest come first again."""
    crew.send(100)
    registered(crew, "paused")
    worker, started = crew.hire("w", event_claim_limit=4), crew.now

    crew.turns.run({"w": crew.drain(worker, seconds=3.0)})

    assert crew.ran == Counter(f"o-{n}" for n in range(100))
    order = [int(name.removeprefix("o-")) for name in sorted(crew.at, key=crew.at.__getitem__)]
    taken = next(place for place, number in enumerate(order) if number < max(order[:place] or [0]))
    waited = crew.at[f"o-{order[taken]}"] - started
    assert LONG_PATIENCE.total_seconds() < waited < LONG_PATIENCE.total_seconds() + 3 * 4 * 3.0
    assert order[taken + 12 :] == sorted(order[taken + 12 :])


@pytest.mark.parametrize("fast", [1, 3])
def test_a_slow_worker_is_helped_by_those_that_are_done(crew: Crew, fast: int) -> None:
    """It goes on all the time, so nobody counts it out; still it does not keep its whole part."""
    crew.send(120)
    started = crew.now
    slow, *others = [crew.hire(f"w{n}", event_claim_limit=2) for n in range(fast + 1)]
    jobs = {w.name: crew.drain(w) for w in others}
    crew.turns.run({slow.name: crew.drain(slow, seconds=2.0), **jobs})

    assert crew.ran == Counter(f"o-{n}" for n in range(120))
    assert crew.now - started < 45  # alone with its part it would take a minute or two
    assert crew.requests.total() < 2 * 3 * 120


def test_events_that_a_worker_holds_are_not_tried_for_all_over_again(crew: Crew) -> None:
    """It has claimed its whole part and finishes nothing for a while, as when it waits for its turn
    to commit: one that is done tries three of them, and leaves it the rest."""
    crew.send(80)
    slow, done = (crew.hire(name, event_claim_limit=40) for name in ("slow", "done"))
    pauses = iter([PATIENCE.total_seconds() + 3])

    @on_event(Ordered, id="count")
    def count(ctx: HandlerContext[Ordered]) -> None:
        crew.ran[ctx.event.id] += 1
        slow.sleep(next(pauses, 0.0))

    crew.turns.run(
        {"slow": lambda: slow.session.drain([count]), "done": crew.drain(done)},
    )

    assert crew.ran == Counter(f"o-{n}" for n in range(80))
    assert len(crew.claims) == 80
    tried = done.requests["PUT_IF"] - 2 * len(crew.by)
    assert tried < 12, done.requests


def test_one_that_ended_on_this_machine_is_not_waited_for(crew: Crew) -> None:
    crew.send(40)
    child = subprocess.Popen(["true"])
    child.wait()
    facts = {**process.identity(), "pid": child.pid, "pid_started": 1}
    store = open_event_store(crew.turns.worker("idle").repository, OntologiaConfig())
    store.register_session("default", "gone", {"handlers": ["count"], "process": facts})
    worker, started = crew.hire("w"), crew.now

    crew.turns.run({"w": crew.drain(worker)})

    assert max(crew.at.values()) - started < 2


@pytest.mark.parametrize("at", [*range(1, 60, 4), 90, 140])
def test_a_worker_that_dies_at_any_request_is_replaced_by_the_others(crew: Crew, at: int) -> None:
    """What it held comes again when its lease has run out, what it did not within seconds."""
    crew.send(60)
    first, *others = [crew.hire(f"w{n}", event_lease_ms=10_000) for n in range(3)]
    left = itertools.count(1)

    def crash(_kind: str, _key: str) -> None:
        if next(left) == at:
            first.store.crashed = True

    first.store.on_request(crash)
    crew.turns.run({w.name: crew.drain(w) for w in [first, *others]})
    crew.world.backend.clock.sleep(11)
    crew.turns.run({"late": crew.drain(crew.hire("late"))})

    assert set(crew.ran) == {f"o-{n}" for n in range(60)}
    assert all(claim["ack_at"] for claim in crew.claims)
    assert len(crew.claims) == 60


def test_workers_come_and_go(crew: Crew) -> None:
    crew.send(300)
    workers = [crew.hire(f"w{n}") for n in range(4)]

    def later(worker: Worker, number: int) -> Callable[[], object]:
        def work() -> None:
            worker.sleep(number * 0.7)
            worker.session.run([crew.handler(worker)], max_iterations=6)

        return work

    crew.turns.run({w.name: later(w, n) for n, w in enumerate(workers)})
    crew.turns.run({"last": crew.drain(crew.hire("last"))})

    assert crew.ran == Counter(f"o-{n}" for n in range(300))
    assert crew.requests.total() < 1.6 * 919


def test_workers_with_different_handlers(crew: Crew) -> None:
    crew.send(60)
    one, two, both = (crew.hire(name) for name in ("one", "two", "both"))

    def work(worker: Worker, *names: str) -> Callable[[], object]:
        return lambda: worker.session.drain([crew.handler(worker, id=name) for name in names])

    crew.turns.run(
        {"one": work(one, "bill"), "two": work(two, "ship"), "both": work(both, "bill", "ship")}
    )

    names = [f"{handler} o-{n}" for n in range(60) for handler in ("bill", "ship")]
    assert crew.ran == Counter(names)
    assert set(crew.by.values()) == {"one", "two", "both"}


def test_attempts_and_dead_letters_are_counted_once_for_all_workers(crew: Crew) -> None:
    crew.send(20)
    settings = {"event_max_attempts": 3, "event_backoff_base_ms": 500}
    workers = [crew.hire(f"w{n}", **settings) for n in range(4)]

    def fails(worker: Worker) -> Any:
        @on_event(Ordered, id="count")
        def fail(ctx: HandlerContext[Ordered]) -> None:
            crew.ran[ctx.event.id] += 1
            raise ValueError("never")

        return fail

    for _ in range(4):
        crew.turns.run(
            {w.name: lambda w=w: w.session.drain([fails(w)]) for w in workers}  # type: ignore[misc]
        )
        crew.world.backend.clock.sleep(6)

    assert crew.ran == Counter({f"o-{n}": 3 for n in range(20)})
    assert len(crew.world.stored_keys("dead_letters/")) == 20
    assert all(claim["attempts"] == 3 for claim in crew.claims)


@pytest.mark.parametrize("skew", [-110.0, -20.0, 20.0, 110.0])
def test_a_worker_whose_clock_is_wrong(crew: Crew, skew: float) -> None:
    """Whatever the clocks say, everything is handled, and commits of handlers are made once."""
    crew.send(40)
    workers = [crew.hire("right"), crew.hire("wrong", skew=skew)]

    def bills(worker: Worker) -> Any:
        @on_event(Ordered, id="count")
        def bill(ctx: HandlerContext[Ordered]) -> None:
            ctx.ensure(Invoice(id=ctx.event.id, worker=worker.name))

        return bill

    crew.turns.run(
        {w.name: lambda w=w: w.session.drain([bills(w)]) for w in workers}  # type: ignore[misc]
    )

    acks = Counter(ack["event_id"] for m in crew.world.chain() for ack in m.acks)
    assert acks == Counter(f"o-{n}" for n in range(40))
    assert all(claim["ack_at"] for claim in crew.claims)


def test_priority_decides_within_a_workers_part(crew: Crew) -> None:
    crew.send(30, priority=1)
    sender = crew.turns.worker("sender")
    sender.session.emit([Ordered(id=f"urgent-{n}", n=n, priority=9) for n in range(20)])
    workers = [crew.hire(f"w{n}", event_claim_limit=50) for n in range(2)]

    crew.turns.run({w.name: crew.drain(w) for w in workers})

    for worker in workers:
        own = sorted((n for n, w in crew.by.items() if w == worker.name), key=crew.at.__getitem__)
        assert [n.startswith("urgent") for n in own] == sorted(
            (n.startswith("urgent") for n in own), reverse=True
        )


def test_an_idle_poll_beside_others_is_one_request(crew: Crew) -> None:
    crew.send(20)
    workers = [crew.hire(f"w{n}") for n in range(3)]
    crew.turns.run({w.name: crew.drain(w) for w in workers})
    before = crew.requests.total()

    def idle(worker: Worker) -> Callable[[], object]:
        return lambda: worker.session.run([crew.handler(worker)], max_iterations=30)

    crew.turns.run({w.name: idle(w) for w in workers})
    # Thirty listings each; a start, the sessions every 20 s, heartbeats, the log, the end.
    assert crew.requests.total() - before <= 3 * (30 + 20)


def test_sessions_that_cannot_be_read_take_no_part(crew: Crew) -> None:
    crew.send(30)
    for number, data in enumerate([b"", b"[]", b'{"session_id": 7}', b"\xff"]):
        crew.world.backend.write(layout.event_session("default", f"odd-{number}"), data)
    registered(crew, "none", handlers=())
    registered(crew, "other", handlers=["other"])
    started = crew.now

    crew.turns.run({"w": crew.drain(crew.hire("w"))})

    assert crew.ran == Counter(f"o-{n}" for n in range(30))
    assert crew.now - started < 3


def test_division_does_not_depend_on_the_storage_answering(crew: Crew) -> None:
    """Sessions cannot be listed, positions neither read nor written: claims decide as ever."""
    crew.send(60)
    workers = [crew.hire(f"w{n}") for n in range(3)]

    def refuse(kind: str, key: str) -> None:
        if (kind == "LIST" and key.startswith("sessions/")) or (
            "_positions/" in key and kind == "PUT_IF"
        ):
            raise StorageBackendError("no", operation=kind, key=key, retryable=True)

    for worker in workers:
        worker.store.on_request(refuse)
    crew.turns.run({w.name: crew.drain(w) for w in workers})

    assert crew.ran == Counter(f"o-{n}" for n in range(60))
