"""Several workers on one namespace: nobody falls over another, and the work is divided."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
)
from storage_engine.events.dispatcher import Totals
from tests.commitlog.support import made_world
from tests.events.turns import Turns
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
@pytest.mark.parametrize("count", [2, 4, 8])
def test_workers_whose_handlers_write(slow_s3: tuple[str, str], count: int) -> None:
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
    events = [Ordered(id=f"order-{n:02d}", n=n) for n in range(24)]
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
        leftover = session.drain([on_event(Ordered, id="bill")(lambda ctx: None)])
    assert sorted(row.id for row in rows) == [event.id for event in events]
    assert ran == Counter(event.id for event in events)
    assert sum(done.handled for done in totals) == len(events)
    assert leftover.handled == 0


# -- requests -------------------------------------------------------------------------------------


def drained(workers: int, events: int = 300, **settings: Any) -> tuple[Counter[str], Counter[str]]:
    """Requests of all workers by kind, and how often each event was handled."""
    with made_world("v2") as world:
        turns = Turns(world)
        world.open("sender")
        turns.worker("sender").session.emit([Ordered(id=f"o-{n}", n=n) for n in range(events)])
        ran: Counter[str] = Counter()

        @on_event(Ordered, id="count")
        def count(ctx: HandlerContext[Ordered]) -> None:
            ran[ctx.event.id] += 1

        crew = [
            turns.worker(f"worker-{n}", event_claim_limit=10, **settings) for n in range(workers)
        ]
        turns.run({w.name: lambda w=w: w.session.drain([count]) for w in crew})
        return sum((Counter(w.requests) for w in crew), Counter[str]()), ran
