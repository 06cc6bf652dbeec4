"""Ticks of the platform's sensors and schedules behind S3's latency, as the daemon makes them.

20 types, 10 of them cut into days, 5,000 commits of one type each and 10,000 pending events. Every
tick is a process's first look at the storage, as a code server opens it anew each time; what it
tells goes into a Dagster instance on disk, and that time is part of the tick. The log tail is
asked three times, each time with an event log that knows nothing: for its first look, far behind
(from the first commit on), and commit by commit (the last 1,000). At the end every type and
partition must be known at the version of its last commit, or the run is void.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Any

import dagster as dg
from dagster_aws.s3 import S3Resource

from benchmarks.harness import Report, measure, seaweedfs, sized, timed
from benchmarks.latency_proxy import LATENCY_MS, LatencyProxy, latency_proxy
from ontologia_dagster import (
    Notifier,
    OntologyAsset,
    OntologyResource,
    PartitionSpec,
    SourceSpec,
    SparkResource,
    build_platform,
)
from ontologia_dagster.storage.log_tail import TailPosition
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
from storage_engine.objectstore.open import open_store
from tests.servers import REGION

COMMITS = sized(5_000, 100, "BENCH_SENSOR_COMMITS")
EVENTS = sized(10_000, 100, "BENCH_SENSOR_EVENTS")
TYPES = 20
DAYS = 100
FOLLOWED = sized(1_000, 50)
PROMISED_S = 20.0
FIRST_DAY = date(2024, 1, 1)


def _type(number: int) -> type[Entity]:
    members = {
        "__module__": __name__,
        "__annotations__": {"id": Field[str], "day": Field[date], "n": Field[int]},
        "id": Field(primary_key=True),
    }
    return type(f"Type{number:02}", (Entity,), members)


MODELS = [_type(number) for number in range(TYPES)]
globals().update({model.__name__: model for model in MODELS})


class Ping(Event):
    n: Field[int]


@on_event(Ping, id="bench.nothing")
def nothing(ctx: HandlerContext[Ping]) -> None:
    """As empty as a handler can be."""


def declarations() -> list[OntologyAsset]:
    """Of the types, the even ones cut into days."""
    end = (FIRST_DAY + timedelta(days=DAYS)).isoformat()
    cut = PartitionSpec(kind="daily", field="day", start=FIRST_DAY.isoformat(), end=end)
    return [
        OntologyAsset(
            type=model.__name__,
            models=__name__,
            source=SourceSpec(paths=["data.csv"]),
            partitions=cut if number % 2 == 0 else None,
            schedule="0 6 * * *",
        )
        for number, model in enumerate(MODELS)
    ]


def run() -> Report:
    report = Report("sensors")
    with seaweedfs() as (server, bucket), latency_proxy(server.endpoint) as proxy:
        uri = f"s3://{bucket}/sensors"
        name = f"write {COMMITS:,} commits and {EVENTS:,} events"
        report.steps.append(measure(name, fill, uri, server.endpoint))
        for name, begin in (
            ("log tail, first look", -1),
            ("log tail, from the first commit on", 1),
            (f"log tail, the last {FOLLOWED:,} commits", max(1, COMMITS - FOLLOWED)),
        ):
            report.steps.append(measure(name, follow, uri, proxy.endpoint, begin))
        for sensor in ("events", "conditions", "log_tail"):
            name = (
                f"{sensor}, {EVENTS:,} events pending" if sensor != "log_tail" else "log tail, idle"
            )
            report.steps.append(measure(name, tick, uri, proxy.endpoint, f"ontology_{sensor}"))
        report.steps.append(measure("all schedules", schedules, uri, proxy.endpoint))
    longest = max(step.facts["longest tick"] for step in report.steps[1:])
    report.verdicts = {
        f"no tick over {PROMISED_S:g} s": f"{longest:.1f} s",
        "latency": ", ".join(f"{kind} {ms:g} ms" for kind, ms in LATENCY_MS.items()),
        "load of the machine (1, 5 and 15 minutes)": " ".join(f"{n:.1f}" for n in os.getloadavg()),
    }
    return report


# -- the storage ----------------------------------------------------------------------------------


def config(endpoint: str) -> OntologiaConfig:
    return OntologiaConfig(s3_endpoint_url=endpoint, s3_region=REGION)


def day_of(commit_id: int) -> date:
    """Each commit of a type is of another day, up to all of them."""
    return FIRST_DAY + timedelta(days=commit_id // TYPES * 7 % DAYS)


def fill(uri: str, endpoint: str) -> dict[str, Any]:
    """In a directory, which takes a fifth of the time, and then copied."""
    outcome: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, timed(outcome):
        initialize_storage(folder)
        with Session(folder, entity_types=MODELS) as session:
            for commit_id in range(1, COMMITS + 1):
                model = MODELS[commit_id % TYPES]
                day = day_of(commit_id)
                session.ensure(model(id=str(commit_id), day=day, n=commit_id))
                assert session.commit() == commit_id
        source, target = open_store(folder, OntologiaConfig()), open_store(uri, config(endpoint))
        keys = [info.key for info in source.list("")]
        bulk = target.bulk
        bulk.parallel.map(lambda key: bulk.put(key, source.get(key).data), keys)
        with Session(uri, config=config(endpoint)) as session:
            for start in range(0, EVENTS, 1_000):
                session.emit([Ping(n=n) for n in range(start, min(start + 1_000, EVENTS))])
    outcome["objects"] = len(keys)
    return outcome


def last_versions() -> dict[tuple[str, str | None], str]:
    """What must be known at the end, of each type or partition."""
    versions: dict[tuple[str, str | None], str] = {}
    for commit_id in range(1, COMMITS + 1):
        number = commit_id % TYPES
        key = day_of(commit_id).isoformat() if number % 2 == 0 else None
        versions[f"type{number:02}", key] = str(commit_id)
    return versions


# -- ticks ----------------------------------------------------------------------------------------


class Daemon:
    """Evaluates, and does what it is told, as Dagster's own does."""

    def __init__(self, uri: str, endpoint: str, folder: str) -> None:
        s3 = S3Resource(endpoint_url=endpoint, region_name=REGION)
        self.resources = {
            "ontology": OntologyResource(storage_uri=uri, s3=s3),
            "spark": SparkResource(),
            "notifier": Notifier(),
        }
        platform = build_platform(declarations(), handlers=[__name__])
        self.whole = dg.Definitions.merge(platform, dg.Definitions(resources=self.resources))
        self.repository = self.whole.get_repository_def()
        self.instance = dg.DagsterInstance.local_temp(folder)
        self.proxy = LatencyProxy(endpoint, 0)
        self.cursor: str | None = None
        self.seconds: list[float] = []
        self.evaluated: list[float] = []
        self.requests: list[int] = []
        self.told: dict[tuple[str, str | None], str] = {}

    def tick(self, sensor: str) -> Any:
        self.proxy.reset()
        began = time.perf_counter()
        definition = next(each for each in self.repository.sensor_defs if each.name == sensor)
        with dg.build_sensor_context(
            instance=self.instance,
            definitions=self.whole,
            resources=self.resources,
            cursor=self.cursor,
        ) as context:
            data = definition.evaluate_tick(context)
        self.evaluated.append(time.perf_counter() - began)
        for event in data.asset_events:
            self.instance.report_runless_asset_event(event)
            assert isinstance(event, dg.AssetMaterialization)
            name = event.asset_key.to_user_string()
            self.told[name, event.partition] = (event.tags or {})["dagster/data_version"]
        self.cursor = data.cursor
        self.seconds.append(time.perf_counter() - began)
        self.requests.append(self.proxy.counts().total)
        return data

    def facts(self) -> dict[str, Any]:
        return {
            "ticks": len(self.seconds),
            "longest tick": round(max(self.seconds), 2),
            "of which evaluation": round(max(self.evaluated, default=0.0), 2),
            "requests": sum(self.requests),
        }


@contextmanager
def daemon(uri: str, endpoint: str) -> Iterator[Daemon]:
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        yield Daemon(uri, endpoint, folder)


def follow(uri: str, endpoint: str, begin: int) -> dict[str, Any]:
    """Until nothing is left; each tick must come further than the one before."""
    outcome: dict[str, Any] = {}
    with daemon(uri, endpoint) as running:
        if begin >= 0:
            running.cursor = json.dumps({"commit": begin, "held": []})
        with timed(outcome):
            while True:
                before = running.cursor, len(running.told)
                data = running.tick("ontology_log_tail")
                if "behind" not in str(data.skip_message) and "caught" not in str(
                    data.skip_message
                ):
                    break
                assert (running.cursor, len(running.told)) != before, data.skip_message
        expected = {of: n for of, n in last_versions().items() if int(n) > begin}
        assert {of: running.told.get(of) for of in expected} == expected, "something was not told"
        position = TailPosition.parse(running.cursor, ())
        assert position is not None
        assert position.commit == COMMITS
        return {**outcome, **running.facts(), "changes told": len(running.told)}


def tick(uri: str, endpoint: str, sensor: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    with daemon(uri, endpoint) as running:
        if sensor == "ontology_log_tail":
            running.cursor = json.dumps({"commit": COMMITS, "held": []})
        with timed(outcome):
            data = running.tick(sensor)
        summary = data.skip_message or f"{len(data.run_requests)} runs asked for"
        if sensor == "ontology_events":
            assert data.run_requests, summary
        return {**outcome, **running.facts(), "outcome": summary}


def schedules(uri: str, endpoint: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    with daemon(uri, endpoint) as running:
        running.proxy.reset()
        with timed(outcome):
            for schedule in running.repository.schedule_defs:
                began = time.perf_counter()
                with dg.build_schedule_context(
                    instance=running.instance,
                    scheduled_execution_time=datetime.now(UTC),
                    repository_def=running.repository,
                ) as context:
                    assert schedule.evaluate_tick(context).run_requests, schedule.name
                running.seconds.append(time.perf_counter() - began)
        running.requests.append(running.proxy.counts().total)
        return {**outcome, **running.facts()}
