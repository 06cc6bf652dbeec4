"""Many writers at once behind S3's latency: commits a second and how long each takes.

Threads of one process, each with a session on one `Ontology`, commit one row at a time for a while,
each its own entity. Nothing is put aside for them: every commit has its own id, manifest and file,
and is acknowledged when head names it. The run is void unless ids have no gaps and every
acknowledged row is there.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Report, measure, processor_seconds, seaweedfs
from benchmarks.latency_proxy import LATENCY_MS, latency_proxy
from storage_engine import Entity, Field, OntologiaConfig, Ontology, initialize_storage
from tests.servers import REGION

THREADS = (1, 8, 64, 256)
SECONDS = float(os.environ.get("BENCH_WRITERS_SECONDS", "10"))
PROMISED = 200  # commits a second of 256 threads


class Reading(Entity):
    sensor: Field[str] = Field(primary_key=True)
    value: Field[int]


def run() -> Report:
    report = Report("writers")
    with seaweedfs() as (server, bucket), latency_proxy(server.endpoint) as proxy:
        for count in THREADS:
            uri = f"s3://{bucket}/threads-{count}"
            initialize_storage(uri, config=config(server.endpoint))
            proxy.reset()
            others = {"server": server.pid, "proxy": proxy.pid}
            before = {name: processor_seconds(pid) for name, pid in others.items()}
            step = measure(f"{count} threads of one process", threads, uri, proxy.endpoint, count)
            commits = step.facts["commits"]
            step.facts["requests a commit"] = round(proxy.counts().total / commits, 2)
            for name, pid in others.items():
                spent = processor_seconds(pid) - before[name]
                step.facts[f"CPU ms a commit, {name}"] = round(1000 * spent / commits, 1)
            report.steps.append(step)
    speeds = [str(step.facts["commits a second"]) for step in report.steps]
    report.verdicts = {
        f"commits a second of {', '.join(map(str, THREADS))} threads": ", ".join(speeds),
        f"{THREADS[-1]} threads: at least {PROMISED}": speeds[-1],
        "latency": ", ".join(f"{kind} {ms:g} ms" for kind, ms in LATENCY_MS.items()),
        "load of the machine (1, 5 and 15 minutes)": " ".join(f"{n:.1f}" for n in os.getloadavg()),
    }
    return report


def config(endpoint: str) -> OntologiaConfig:
    return OntologiaConfig(
        s3_endpoint_url=endpoint,
        s3_region=REGION,
        s3_lock_timeout_ms=60_000,
        s3_lease_ttl_ms=60_000,
    )


def threads(uri: str, endpoint: str, count: int) -> dict[str, Any]:
    with Ontology(storage_uri=uri, config=config(endpoint), entity_types=[Reading]) as ontology:
        with ontology.session() as session:
            session.ensure(Reading(sensor="first", value=0))
        spent = time.process_time()
        started, waits = together(count, lambda number: writer(ontology, number))
        seconds, spent = time.monotonic() - started, time.process_time() - spent
        commits = sum(map(len, waits))
        check(ontology, commits, count)
    cpu = {"CPU ms a commit": round(1000 * spent / commits, 1)}
    return {"seconds": seconds, **described([w for each in waits for w in each], seconds), **cpu}


def writer(ontology: Ontology, number: int) -> list[float]:
    """How long each commit took, of one thread."""
    waits: list[float] = []
    deadline = time.monotonic() + SECONDS
    with ontology.session() as session:
        while time.monotonic() < deadline:
            session.ensure(Reading(sensor=f"s{number}", value=len(waits) + 1))
            began = time.monotonic()
            assert session.commit() is not None
            waits.append(time.monotonic() - began)
    return waits


def together(count: int, work: Callable[[int], list[float]]) -> tuple[float, list[list[float]]]:
    """Run so many threads; when they began, and what each returned."""
    results: list[list[float]] = [[] for _ in range(count)]
    failures: list[BaseException] = []
    ready = threading.Barrier(count + 1)

    def lane(number: int) -> None:
        ready.wait()
        try:
            results[number] = work(number)
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    lanes = [threading.Thread(target=lane, args=(n,)) for n in range(count)]
    for each in lanes:
        each.start()
    ready.wait()
    started = time.monotonic()
    for each in lanes:
        each.join()
    if failures:
        raise failures[0]
    return started, results


def check(ontology: Ontology, commits: int, count: int) -> None:
    found = ontology.list_commits(limit=commits + 10)
    assert [c["id"] for c in found] == list(range(commits + 1, 0, -1)), "ids have gaps"
    assert ontology.query().entities(Reading).count() == count + 1


def described(waits: list[float], seconds: float) -> dict[str, Any]:
    ordered = sorted(waits)
    return {
        "commits": len(ordered),
        "commits a second": round(len(ordered) / seconds, 1),
        "p50 ms": round(1000 * statistics.median(ordered)),
        "p95 ms": round(1000 * ordered[int(0.95 * (len(ordered) - 1))]),
        "longest ms": round(1000 * ordered[-1]),
    }
