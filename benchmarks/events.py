"""Draining the event bus behind S3's latency: empty handlers, with and without a long history.

One consumer at claim limit 100 drains events that another process sent. The history is older
events that the handler has acked, written as a worker would have left them: the event, its claim,
and the handler's position. Every event must be handled once, or the run is void.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from benchmarks.harness import Report, measure, seaweedfs, timed
from benchmarks.latency_proxy import LATENCY_MS, latency_proxy
from storage_engine import (
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
from storage_engine.events.records import Policy
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.port import ObjectStore, bulk_of
from tests.servers import REGION

EVENTS = int(os.environ.get("BENCH_EVENTS", "5000"))
HISTORY = int(os.environ.get("BENCH_EVENT_HISTORY", "100000"))
CLAIM_LIMIT = 100
POLLS = 20
PROMISED = 250  # events a second
RUNS = 3


class Ping(Event):
    n: Field[int]


@on_event(Ping, id="bench.nothing")
def nothing(ctx: HandlerContext[Ping]) -> None:
    """As empty as a handler can be."""
    HANDLED.append(ctx.event.n)


HANDLED: list[int] = []


def run() -> Report:
    report = Report("events")
    with seaweedfs() as (server, bucket), latency_proxy(server.endpoint) as proxy:
        drained = {}
        for older in (0, HISTORY):
            uri = f"s3://{bucket}/events-{older}"
            initialize_storage(uri, config=config(server.endpoint))
            if older:
                measure(f"{older:,} older events", fill, uri, server.endpoint, older)
            name = f"drain {EVENTS:,} events, {older:,} older acked ones"
            rounds = []
            for _ in range(RUNS):
                measure("send", send, uri, server.endpoint, EVENTS)
                proxy.reset()
                rounds.append(measure(name, drain, uri, proxy.endpoint, EVENTS))
                rounds[-1].facts["requests"] = proxy.counts().total
            rounds.sort(key=lambda step: step.seconds)
            middle = rounds[len(rounds) // 2]
            drained[older] = middle.facts["events a second"] = round(EVENTS / middle.seconds)
            report.steps.append(middle)
        proxy.reset()
        report.steps.append(measure(f"{POLLS} idle polls", idle, uri, proxy.endpoint))
        requests = dict(proxy.counts().requests)
        report.steps[-1].facts["requests"] = requests
    report.verdicts = {
        f"at least {PROMISED} events a second": f"{drained[0]}",
        f"no slower with {HISTORY:,} older ones": f"{drained[HISTORY]}",
        "requests of an idle poll": f"{requests.get('LIST', 0)} listings for {POLLS} polls",
        "latency": ", ".join(f"{kind} {ms:g} ms" for kind, ms in LATENCY_MS.items()),
    }
    return report


def config(endpoint: str) -> OntologiaConfig:
    return OntologiaConfig(
        s3_endpoint_url=endpoint,
        s3_region=REGION,
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
        with timed(outcome):
            totals = session.drain([nothing])
        outcome["own requests"] = session.storage_info()["requests"]["total"]
    assert totals.handled == count, totals
    assert sorted(HANDLED) == list(range(count)), "events were lost or handled twice"
    return outcome


def idle(uri: str, endpoint: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    with Session(uri, config=config(endpoint)) as session, timed(outcome):
        totals = session.run([nothing], max_iterations=POLLS)
    assert totals.handled == 0
    return outcome


# -- history --------------------------------------------------------------------------------------


def fill(uri: str, endpoint: str, count: int) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    store = bulk_of(open_store(uri, config(endpoint)))
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
    import json

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
