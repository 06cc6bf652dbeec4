"""A large location on a directory: how long it loads, and how long its sensors take.

200 declared types, every tenth cut into days, 10,000 commits of one type each since the last look,
and 10,000 pending events. Loading is what a code server does beyond its imports: declarations,
definitions, the repository and what Dagster's other processes ask of it. Every tick is a process's
first look at the storage; what it tells goes into a Dagster instance on disk, and that time is part
of the tick. At the end every type and partition must be known at the version of its last commit,
told once, or the run is void.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import dagster as dg

from benchmarks.harness import Report, measure, sized, timed
from ontologia_dagster import (
    Notifier,
    OntologyAsset,
    OntologyResource,
    PartitionSpec,
    SourceSpec,
    SparkResource,
    build_platform,
)
from storage_engine import (
    Entity,
    Event,
    Field,
    HandlerContext,
    Session,
    initialize_storage,
    on_event,
)

TYPES = sized(200, 10, "BENCH_LOCATION_TYPES")
COMMITS = sized(10_000, 100, "BENCH_LOCATION_COMMITS")
EVENTS = sized(10_000, 100, "BENCH_LOCATION_EVENTS")
RUNS = sized(3, 1, "BENCH_LOCATION_RUNS")
DAYS = 50
FILES = 200  # of the source that a sensor watches
TICK_S, LOAD_S = 2.0, 3.0
FIRST_DAY = date(2024, 1, 1)


def _type(number: int) -> type[Entity]:
    members = {
        "__module__": __name__,
        "__annotations__": {"id": Field[str], "day": Field[date], "n": Field[int]},
        "id": Field(primary_key=True),
    }
    return type(f"Kind{number:03}", (Entity,), members)


MODELS = [_type(number) for number in range(TYPES)]
globals().update({model.__name__: model for model in MODELS})


class Knock(Event):
    n: Field[int]


@on_event(Knock, id="bench.knock")
def nothing(ctx: HandlerContext[Knock]) -> None:
    """As empty as a handler can be."""


def _is_cut(number: int) -> bool:
    return number % 10 == 0


def declarations(folder: str) -> list[OntologyAsset]:
    end = (FIRST_DAY + timedelta(days=DAYS)).isoformat()
    cut = PartitionSpec(kind="daily", field="day", start=FIRST_DAY.isoformat(), end=end)
    return [
        OntologyAsset(
            type=model.__name__,
            models=__name__,
            source=SourceSpec(paths=[f"{folder}/source/*.csv"]),
            partitions=cut if _is_cut(number) else None,
            schedule="0 6 * * *",
            watch_source=True,
        )
        for number, model in enumerate(MODELS)
    ]


def run() -> Report:
    report = Report("location")
    filled = os.environ.get("BENCH_LOCATION_STORE")  # by an earlier run: writing takes the longest
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as temporary:
        folder = filled or temporary
        report.steps.append(measure(f"load {TYPES} types", load, folder, runs=RUNS))
        if filled is None:
            name = f"write {COMMITS:,} commits and {EVENTS:,} events"
            report.steps.append(measure(name, fill, folder))
        for name, begin in (
            ("first look", -1),
            (f"{COMMITS - 1:,} commits since the last look", 1),
        ):
            report.steps.append(measure(f"log tail, {name}", follow, folder, begin))
        begin = max(1, COMMITS - 200)
        report.steps.append(
            measure("log tail, 200 commits since the last look", follow, folder, begin)
        )
        for sensor in ("ontology_events", "ontology_conditions", "ontology_kind001_source"):
            report.steps.append(measure(f"{sensor}, one tick", tick, folder, sensor, runs=RUNS))
        report.steps.append(measure("log tail, idle", tick, folder, "ontology_log_tail", runs=RUNS))
    loading = report.seconds(f"load {TYPES} types")
    longest = max(step.facts.get("longest tick", 0.0) for step in report.steps)
    busiest = max(step.facts.get("of a processor", 0.0) for step in report.steps)
    report.verdicts = {
        f"loading within {LOAD_S:g} s beyond imports": f"{loading:.2f} s, of a processor "
        f"{report.steps[0].facts['of a processor']:.2f} s",
        f"no tick over {TICK_S:g} s": f"{longest:.2f} s, of a processor {busiest:.2f} s",
        "load of the machine (1, 5 and 15 minutes)": " ".join(f"{n:.1f}" for n in os.getloadavg()),
    }
    return report


# -- the storage ----------------------------------------------------------------------------------


def day_of(commit_id: int) -> date:
    return FIRST_DAY + timedelta(days=commit_id // TYPES % DAYS)


def fill(folder: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    source = Path(folder) / "source"
    source.mkdir()
    for number in range(FILES):
        (source / f"{number}.csv").write_text("id,day,n\n")
    with timed(outcome):
        initialize_storage(folder)
        with Session(folder, entity_types=MODELS) as session:
            for commit_id in range(1, COMMITS + 1):
                model = MODELS[commit_id % TYPES]
                session.ensure(model(id=str(commit_id), day=day_of(commit_id), n=commit_id))
                assert session.commit() == commit_id
            for start in range(0, EVENTS, 1_000):
                session.emit([Knock(n=n) for n in range(start, min(start + 1_000, EVENTS))])
    return outcome


def last_versions(begin: int) -> dict[tuple[str, str | None], str]:
    """What must be known at the end, of each type or partition that changed after `begin`."""
    versions: dict[tuple[str, str | None], str] = {}
    for commit_id in range(max(begin, 0) + 1, COMMITS + 1):
        number = commit_id % TYPES
        key = day_of(commit_id).isoformat() if _is_cut(number) else None
        versions[f"kind{number:03}", key] = str(commit_id)
    return versions


# -- loading --------------------------------------------------------------------------------------


def _platform(folder: str) -> tuple[dg.Definitions, dict[str, Any]]:
    resources = {
        "ontology": OntologyResource(storage_uri=folder),
        "spark": SparkResource(),
        "notifier": Notifier(),
    }
    platform = build_platform(declarations(folder), handlers=[__name__])
    return dg.Definitions.merge(platform, dg.Definitions(resources=resources)), resources


def load(folder: str) -> dict[str, Any]:
    """Up to what a code server hands out; imports are done, which is the rest of its start."""
    from dagster._core.remote_representation.external_data import RepositorySnap

    outcome: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with timed(outcome):
            began, used = time.perf_counter(), time.process_time()
            definitions, _ = _platform(folder)
            built = time.perf_counter() - began
            repository = definitions.get_repository_def()
            resolved = time.perf_counter() - began
            RepositorySnap.from_def(repository)
            used = time.process_time() - used
    return {
        **outcome,
        "of a processor": round(used, 2),
        "assets": len(repository.asset_graph.get_all_asset_keys()),
        "jobs": len(repository.job_names),
        "definitions after": round(built, 2),
        "repository after": round(resolved, 2),
    }


# -- ticks ----------------------------------------------------------------------------------------


class LocalDaemon:
    """Evaluates, and does what it is told, as Dagster's own does."""

    def __init__(self, folder: str, home: str) -> None:
        self.whole, self.resources = _platform(folder)
        self.repository = self.whole.get_repository_def()
        self.instance = dg.DagsterInstance.local_temp(home)
        self.cursor: str | None = None
        self.seconds: list[float] = []
        self.used: list[float] = []
        self.told: list[tuple[str, str | None, str]] = []

    def tick(self, sensor: str) -> Any:
        began, used = time.perf_counter(), time.process_time()
        definition = next(each for each in self.repository.sensor_defs if each.name == sensor)
        with dg.build_sensor_context(
            instance=self.instance,
            definitions=self.whole,
            resources=self.resources,
            cursor=self.cursor,
        ) as context:
            data = definition.evaluate_tick(context)
        for event in data.asset_events:
            self.instance.report_runless_asset_event(event)
            if not isinstance(event, dg.AssetMaterialization):
                continue  # figures of an event type
            version = (event.tags or {})["dagster/data_version"]
            self.told.append((event.asset_key.to_user_string(), event.partition, version))
        self.cursor = data.cursor
        self.seconds.append(time.perf_counter() - began)
        self.used.append(time.process_time() - used)
        return data

    def facts(self) -> dict[str, Any]:
        return {
            "ticks": len(self.seconds),
            "longest tick": round(max(self.seconds), 2),
            "of a processor": round(max(self.used), 2),
        }


@contextmanager
def daemon(folder: str) -> Iterator[LocalDaemon]:
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as home:
        warnings.simplefilter("ignore")
        yield LocalDaemon(folder, home)


def follow(folder: str, begin: int) -> dict[str, Any]:
    """Until nothing is left; each tick must come further than the one before."""
    outcome: dict[str, Any] = {}
    with daemon(folder) as running:
        if begin >= 0:
            running.cursor = json.dumps({"commit": begin, "held": []})
        with timed(outcome):
            while True:
                before = running.cursor, len(running.told)
                text = str(running.tick("ontology_log_tail").skip_message)
                if "behind" not in text and "caught" not in text:
                    break
                assert (running.cursor, len(running.told)) != before, text
        known = {(name, key): version for name, key, version in running.told}
        expected = last_versions(begin)
        assert {of: known.get(of) for of in expected} == expected, "something was not told"
        repeated = [of for of, count in Counter(running.told).items() if count > 1]
        assert not repeated, f"told twice: {repeated[:3]}"
        return {**outcome, **running.facts(), "changes told": len(running.told)}


def tick(folder: str, sensor: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    with daemon(folder) as running:
        if sensor == "ontology_log_tail":
            running.cursor = json.dumps({"commit": COMMITS, "held": []})
        with timed(outcome):
            data = running.tick(sensor)
        summary = data.skip_message or f"{len(data.run_requests)} runs asked for"
        return {**outcome, **running.facts(), "outcome": summary}
