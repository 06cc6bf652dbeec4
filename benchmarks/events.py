"""Draining the event bus behind S3's latency: empty handlers, with and without a long history,
and by several workers at once.

One consumer at claim limit 100 drains events that another process sent. The history is older
events that the handler has acked, written as a worker would have left them: the event, its claim,
and the handler's position. Every event must be handled once, or the run is void.

Then one, two, four and eight workers, each a process, share a bus in small batches. Their time is
that from the first claim until the last event was handled; their requests are all of them, until
the last worker has seen that nothing is left.

Last, handlers that each commit one entity, one worker and four, with one handler at a time and
with eight. Their time ends when the last commit was told of. `BENCH_EVENTS_PART=written` takes
these alone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pyarrow as pa

from benchmarks.harness import (
    Measured,
    Report,
    measure,
    processor_seconds,
    seaweedfs,
    sized,
    timed,
)
from benchmarks.latency_proxy import LATENCY_MS, LatencyProxy, latency_proxy
from storage_engine import (
    Entity,
    Event,
    Field,
    HandlerContext,
    OntologiaConfig,
    Session,
    initialize_storage,
    on_event,
)
from storage_engine.commitlog import layout
from storage_engine.commitlog.records import to_json
from storage_engine.events import records
from storage_engine.events.outcomes import Totals
from storage_engine.events.records import Policy
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.runtime.worker import HandlerRun
from tests.servers import REGION, S3Server

EVENTS = sized(3_000, 100, "BENCH_EVENTS")
HISTORY = sized(100_000, 500, "BENCH_EVENT_HISTORY")
CLAIM_LIMIT = 100
POLLS = sized(20, 3)
PROMISED = 250  # events a second
RUNS = sized(3, 1)
CREWS = (1, 2, 4, 8)
CREW_EVENTS = sized(900, 40, "BENCH_CREW_EVENTS")
CREW_LIMIT = 10  # small batches, in which workers would get in one another's way
WRITERS = ((1, 1), (1, 8), (4, 1), (4, 8))  # workers, and handlers at once in each
WRITTEN_EVENTS = int(os.environ.get("BENCH_WRITTEN_EVENTS", "1500"))
WRITTEN_PROMISED = {1: 100, 4: 150}  # events a second, by workers
ONLY_WRITTEN = os.environ.get("BENCH_EVENTS_PART") == "written"


class Ping(Event):
    n: Field[int]


@on_event(Ping, id="bench.nothing")
def nothing(ctx: HandlerContext[Ping]) -> None:
    """As empty as a handler can be."""
    HANDLED.append(ctx.event.n)
    AT.append(time.monotonic())


class Invoice(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


@on_event(Ping, id="bench.bill")
def bill(ctx: HandlerContext[Ping]) -> None:
    """One entity each, as a commit of its own."""
    HANDLED.append(ctx.event.n)
    ctx.ensure(Invoice(id=str(ctx.event.n), n=ctx.event.n))


HANDLED: list[int] = []
AT: list[float] = []  # on Linux, the same clock for all processes


def run() -> Report:
    if ONLY_WRITTEN:
        return run_written()
    report = Report("events")
    with seaweedfs() as (server, bucket), latency_proxy(server.endpoint) as proxy:
        uris = {older: f"s3://{bucket}/events-{older}" for older in (0, HISTORY)}
        for older, uri in uris.items():
            initialize_storage(uri, config=config(server.endpoint))
            if older:
                filled = measure(f"write {older:,} older events", fill, uri, server.endpoint, older)
                report.steps.append(filled)
        # By turns, so that whatever else the machine does falls on both alike.
        rounds: dict[int, list[Measured]] = {older: [] for older in uris}
        for _ in range(RUNS):
            for older, uri in uris.items():
                measure("send", send, uri, server.endpoint, EVENTS)
                proxy.reset()
                name = f"drain {EVENTS:,} events, {older:,} older acked ones"
                step = measure(name, drain, uri, proxy.endpoint, EVENTS)
                step.facts["requests"] = proxy.counts().total
                step.facts["events a second"] = round(EVENTS / step.seconds)
                rounds[older].append(step)
        for steps in rounds.values():
            report.steps.append(sorted(steps, key=lambda step: step.seconds)[RUNS // 2])
        report.steps.append(measure(f"{POLLS} idle polls", idle, uris[HISTORY], proxy.endpoint))
        requests = report.steps[-1].facts["requests"]
        crews = [
            drain_together(f"s3://{bucket}/crew-{n}", server.endpoint, proxy, n) for n in CREWS
        ]
        report.steps += crews
        written = write_all(server, bucket, proxy)
        report.steps += written.values()
    alone = crews[0].facts
    report.verdicts = {
        f"at least {PROMISED} events a second": _speeds(rounds[0]),
        f"no slower with {HISTORY:,} older ones": _speeds(rounds[HISTORY]),
        f"requests of {POLLS} idle polls, just after {RUNS * EVENTS:,} events": f"{requests}",
        "requests an event of 2, 4 and 8 workers, of one's (at most 1.3)": ", ".join(
            f"{step.facts['requests'] / alone['requests']:.2f}" for step in crews[1:]
        ),
        "events a second of 2, 4 and 8 workers, of one's (at least 1)": ", ".join(
            f"{step.facts['events a second'] / alone['events a second']:.2f}" for step in crews[1:]
        ),
        **_written_verdicts(written),
        **_circumstances(),
    }
    return report


def run_written() -> Report:
    """Handlers that commit, alone; the figures of all are left as they are."""
    report = Report("events_written")
    with seaweedfs() as (server, bucket), latency_proxy(server.endpoint) as proxy:
        written = write_all(server, bucket, proxy)
    report.steps += written.values()
    report.verdicts = {**_written_verdicts(written), **_circumstances()}
    return report


def _written_verdicts(written: Mapping[tuple[int, int], Measured]) -> dict[str, str]:
    return {
        f"at least {promised} events a second, each with a commit, by {workers} "
        f"worker{'s' if workers > 1 else ''}": ", ".join(
            f"{step.facts['events a second']} ({at_once} at once)"
            for (n, at_once), step in written.items()
            if n == workers
        )
        for workers, promised in WRITTEN_PROMISED.items()
    }


def _circumstances() -> dict[str, str]:
    return {
        "latency": ", ".join(f"{kind} {ms:g} ms" for kind, ms in LATENCY_MS.items()),
        "load of the machine (1, 5 and 15 minutes)": " ".join(f"{n:.1f}" for n in os.getloadavg()),
    }


def _speeds(steps: Sequence[Measured]) -> str:
    found = sorted(step.facts["events a second"] for step in steps)
    return f"{found[len(found) // 2]} ({', '.join(map(str, found))})"


def config(endpoint: str) -> OntologiaConfig:
    return OntologiaConfig(
        s3_endpoint_url=endpoint,
        s3_region=REGION,
        s3_lock_timeout_ms=120_000,
        event_claim_limit=CLAIM_LIMIT,
        event_poll_interval_ms=1,
    )


def send(uri: str, endpoint: str, count: int) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    with Session(uri, config=config(endpoint)) as session, timed(outcome):
        for start in range(0, count, 1000):
            session.emit([Ping(n=n) for n in range(start, min(start + 1000, count))])
    return outcome


def drain(uri: str, endpoint: str, count: int) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    with Session(uri, config=config(endpoint)) as session:
        before = time.process_time()
        with timed(outcome):
            totals = session.drain([nothing])
        spent = time.process_time() - before
        outcome["own processor ms an event"] = round(spent / count * 1000, 2)
    assert totals.handled == count, totals
    assert sorted(HANDLED) == list(range(count)), "events were lost or handled twice"
    return outcome


# -- several workers ------------------------------------------------------------------------------


def drain_together(uri: str, endpoint: str, proxy: LatencyProxy, workers: int) -> Measured:
    name = f"{workers} worker{'s' if workers > 1 else ''}, {CREW_EVENTS:,} events"
    return _together(name, uri, endpoint, proxy, CREW_EVENTS, [(work, ())] * workers)


def write_all(
    server: S3Server, bucket: str, proxy: LatencyProxy
) -> dict[tuple[int, int], Measured]:
    """By workers, and handlers at once in each."""
    written = {}
    others = {"server": server.pid, "proxy": proxy.pid}
    for n, at_once in WRITERS:
        before = {name: processor_seconds(pid) for name, pid in others.items()}
        uri = f"s3://{bucket}/written-{n}-{at_once}"
        step = written[n, at_once] = write_together(uri, server.endpoint, proxy, n, at_once)
        for name, pid in others.items():  # what sends the events, and looks at the end, is in it
            spent = processor_seconds(pid) - before[name]
            step.facts[f"CPU ms an event, {name}"] = round(1000 * spent / WRITTEN_EVENTS, 1)
    return written


def write_together(
    uri: str, endpoint: str, proxy: LatencyProxy, workers: int, at_once: int
) -> Measured:
    name = f"{workers} worker{'s' if workers > 1 else ''}, {at_once} at once, commits"
    made = _together(name, uri, endpoint, proxy, WRITTEN_EVENTS, [(write, (at_once,))] * workers)
    with Session(uri, config=config(endpoint)) as session:
        assert session.query().entities(Invoice).count() == WRITTEN_EVENTS
        assert session.snapshot == WRITTEN_EVENTS, "a commit an event"
    return made


def _together(
    name: str,
    uri: str,
    endpoint: str,
    proxy: LatencyProxy,
    events: int,
    crew: Sequence[tuple[Any, tuple[Any, ...]]],
) -> Measured:
    initialize_storage(uri, config=config(endpoint))
    measure("send", send, uri, endpoint, events)
    context = multiprocessing.get_context("spawn")
    gate, outcomes = context.Barrier(len(crew) + 1), context.SimpleQueue()
    processes = [
        context.Process(target=target, args=(uri, proxy.endpoint, gate, outcomes, *given))
        for target, given in crew
    ]
    for process in processes:
        process.start()
    gate.wait()
    proxy.reset()
    started = time.monotonic()
    parts = [outcomes.get() for _ in processes]
    for process in processes:
        process.join()
    handled = Counter(n for numbers, *_ in parts for n in numbers)
    assert handled == Counter(range(events)), "events were lost or handled twice"
    seconds = max(last for _, last, _ in parts) - started
    facts = {
        "requests": proxy.counts().total,
        "events a second": round(events / seconds),
        "handled": sorted(len(numbers) for numbers, *_ in parts),
        "CPU ms an event, workers": round(1000 * sum(cpu for *_, cpu in parts) / events, 1),
    }
    return Measured(name, seconds, [round(seconds, 3)], 0, facts)


def work(uri: str, endpoint: str, gate: Any, outcomes: Any) -> None:
    settings = config(endpoint).model_copy(update={"event_claim_limit": CREW_LIMIT})
    with Session(uri, config=settings) as session:
        gate.wait()
        before = time.process_time()
        session.drain([nothing])
        spent = time.process_time() - before
    outcomes.put((HANDLED, AT[-1] if AT else 0.0, spent))


def write(uri: str, endpoint: str, gate: Any, outcomes: Any, at_once: int) -> None:
    def told(run: HandlerRun) -> None:
        assert run.commit is not None, run
        (change,) = run.commit.changes
        assert change.inserted == 1
        AT.append(time.monotonic())

    pa.array([""])  # where pandas is installed, the first one imports it: nobody's to be measured
    with Session(uri, config=config(endpoint)) as session:
        gate.wait()
        before = time.process_time()
        session.drain([bill], concurrency=at_once, observe=told)
        spent = time.process_time() - before
    outcomes.put((HANDLED, AT[-1] if AT else 0.0, spent))


def idle(uri: str, endpoint: str) -> dict[str, Any]:
    """Polls of a worker that has looked around: the first poll lists what may have come late."""
    outcome: dict[str, Any] = {}
    proxy = LatencyProxy(endpoint, 0)
    counted: dict[int, Counter[str]] = {}

    def progress(totals: Totals) -> None:
        counted.setdefault(totals.iterations, proxy.reset().requests)  # the end is no poll

    with Session(uri, config=config(endpoint)) as session, timed(outcome):
        totals = session.run([nothing], max_iterations=1 + POLLS, progress=progress)
    assert totals.handled == 0
    outcome["requests"] = dict(sum((counted[n] for n in range(2, 2 + POLLS)), Counter[str]()))
    return outcome


# -- history --------------------------------------------------------------------------------------


def fill(uri: str, endpoint: str, count: int) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    store = open_store(uri, config(endpoint)).bulk
    policy, begin = Policy.of(config(endpoint)), datetime.now(UTC) - timedelta(days=1)
    with timed(outcome):
        for start in range(0, count, 1000):
            numbers = range(start, min(start + 1000, count))
            write_acked(store, policy, [begin + timedelta(milliseconds=n) for n in numbers])
        write_position(store)
    return outcome


def write_acked(store: ObjectStore, policy: Policy, moments: Sequence[datetime]) -> None:
    writes = []
    for moment in moments:
        event = Ping(n=-1, id=str(uuid.uuid4()), created_at=moment)
        claim = records.first_claim(event.id, nothing.id, "before", moment, policy, 0)
        acked = {**records.ack(claim, moment).as_dict(), "write_id": layout.new_write_id()}
        key = layout.event("default", moment, event.id)
        writes.append(partial(store.put, key, to_json(event.envelope("default"))))
        key = layout.claim("default", event.id, nothing.id)
        writes.append(partial(store.put, key, to_json(acked)))
    store.parallel.gather(writes)


def write_position(store: ObjectStore) -> None:
    """What a worker keeps that has found nothing to do."""
    head = json.loads(store.get(layout.HEAD).data)
    past = datetime.now(UTC) - timedelta(hours=1)
    body = {
        "handler_id": nothing.id,
        "types": [Ping.event_type],
        "watermark": f"{layout.events('default')}{layout.event_time(past)}_",
        "commit_id": head["commit_id"],
        "finished": [],
        "log_id": head["log_id"],
        "write_id": layout.new_write_id(),
    }
    store.put(layout.position("default", nothing.id), to_json(body))
