"""Every schedule and sensor of the platform and of the demo is evaluated, as the daemon does it:
they are taken from the definitions, so that a new one cannot be forgotten."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.sensor_definition import SensorType
from dagster._core.remote_origin import RemoteInstigatorOrigin
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    InstigatorType,
    ScheduleInstigatorData,
    SensorInstigatorData,
    TickStatus,
)

from ontologia_dagster.declaration import OntologyAsset, PartitionSpec, SourceSpec
from ontologia_dagster.demo.definitions import demo_definitions
from ontologia_dagster.ingestion.asset import build_type
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage.storage_defs import build_platform
from tests.dagster import shop
from tests.dagster.world import MODELS, customers, orders, remote_job, resources, storage

T = TypeVar("T")
BERLIN = "Europe/Berlin"
CUTS = {
    "hourly": PartitionSpec(kind="hourly", field="at", start="2013-01-01", timezone=BERLIN),
    "daily": PartitionSpec(kind="daily", field="day", start="2013-01-01", timezone=BERLIN),
    "weekly": PartitionSpec(kind="weekly", field="day", start="2013-01-01"),
    "monthly": PartitionSpec(kind="monthly", field="day", start="2013-01-01", end="2030-01-01"),
    "static": PartitionSpec(kind="static", field="id", keys=["north", "south", "o'east"]),
}


def cut(kind: str, folder: Path, cron: str = "30 6 * * *", **more: Any) -> OntologyAsset:
    return OntologyAsset(
        type="Order",
        name=f"{kind}_orders",
        models=MODELS,
        source=SourceSpec(paths=[f"{folder}/{kind}/{{partition_key}}.csv"]),
        partitions=CUTS[kind],
        schedule=cron,
        watch_source=True,
        **more,
    )


def everything(
    folder: Path, ontology: OntologyResource, cron: str = "30 6 * * *"
) -> dg.Definitions:
    """A platform with a type of each kind of partitions, that are scheduled and watched."""
    declared = [
        customers(folder, schedule=cron, watch_source=True),
        *(cut(kind, folder, cron) for kind in CUTS),
        cut("static", folder, cron, backfill="single_run").model_copy(update={"name": "ranged"}),
    ]
    platform = build_platform(declared, handlers=[shop.__name__], running=True)
    return dg.Definitions.merge(platform, dg.Definitions(resources=resources(ontology)))


@pytest.fixture(params=["platform", "demo"])
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> dg.Definitions:
    ontology = storage(tmp_path)
    with ontology.session() as session:
        session.emit(shop.OrderPlaced(order_id="1"))
        session.ensure([shop.Customer(id="c1", name="Ada")])
    if request.param == "platform":
        return everything(tmp_path, ontology)
    return demo_definitions(ontology)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield dg.DagsterInstance.ephemeral()


MOMENTS = [
    datetime(2026, 11, 17, 6, 30, tzinfo=UTC),
    # The nights in which the clocks of Berlin are put forward and back.
    datetime(2026, 3, 29, 6, 30, tzinfo=ZoneInfo(BERLIN)),
    datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo(BERLIN), fold=1),
]


def test_every_schedule_asks_for_runs(whole: dg.Definitions, instance: dg.DagsterInstance) -> None:
    location = whole.get_repository_def()
    for schedule in location.schedule_defs:
        for moment in MOMENTS:
            with dg.build_schedule_context(
                instance=instance, scheduled_execution_time=moment, repository_def=location
            ) as context:
                data = schedule.evaluate_tick(context)
            assert data.run_requests, (schedule.name, data.skip_message)
            keys = [request.run_key for request in data.run_requests]
            assert len(keys) == 1 or len(set(keys)) == len(keys), schedule.name
    assert location.schedule_defs


def test_every_sensor_answers(whole: dg.Definitions, instance: dg.DagsterInstance) -> None:
    location = whole.get_repository_def()
    evaluated = set()
    for sensor in location.sensor_defs:
        if isinstance(sensor, dg.AutomationConditionSensorDefinition):
            continue  # the daemon evaluates conditions by itself
        with dg.build_sensor_context(
            instance=instance, definitions=whole, resources=dict(whole.resources or {})
        ) as context:
            data = sensor.evaluate_tick(context)
        answered = data.skip_message, data.run_requests, data.asset_events
        assert any(answered) or isinstance(sensor, dg.RunStatusSensorDefinition), sensor.name
        evaluated.add(sensor.name)
    named = {name.partition("_")[2] for name in evaluated}  # behind the storage's name
    assert {"log_tail", "conditions", "events"} <= named
    result = dg.evaluate_automation_conditions(
        [
            asset
            for asset in location.assets_defs_by_key.values()
            if asset.automation_conditions_by_key
        ],
        instance,
    )
    assert result.cursor is not None


def asked(declared: OntologyAsset, folder: Path, moment: datetime) -> list[Any]:
    """Partitions, or both ends of ranges of them, that the schedule of a type asks for."""
    bound = resources(OntologyResource(storage_uri=str(folder / "store")))
    whole = dg.Definitions.merge(build_type(declared), dg.Definitions(resources=bound))
    repository = whole.get_repository_def()
    [schedule] = repository.schedule_defs
    with dg.build_schedule_context(
        scheduled_execution_time=moment, repository_def=repository
    ) as context:
        data = schedule.evaluate_tick(context)
    if not data.run_requests:
        return [data.skip_message]
    ends = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
    return [
        request.partition_key or tuple(request.tags[end] for end in ends)
        for request in data.run_requests
    ]


@pytest.mark.parametrize(
    ("kind", "moment", "key"),
    [
        ("hourly", datetime(2026, 7, 1, 0, 5, tzinfo=UTC), "2026-07-01-01:00"),
        # 02:30 in Berlin comes twice: at the second time the first 02:00 is complete.
        ("hourly", datetime(2026, 10, 25, 1, 5, tzinfo=UTC), "2026-10-25-02:00"),
        ("hourly", datetime(2026, 3, 29, 1, 5, tzinfo=UTC), "2026-03-29-01:00"),
        ("daily", datetime(2026, 6, 30, 22, 5, tzinfo=UTC), "2026-06-30"),
        ("daily", datetime(2026, 6, 30, 21, 55, tzinfo=UTC), "2026-06-29"),
        ("daily", datetime(2026, 3, 29, 22, 5, tzinfo=UTC), "2026-03-29"),
        ("daily", datetime(2026, 10, 25, 22, 5, tzinfo=UTC), "2026-10-24"),
        ("weekly", datetime(2026, 11, 17, 6, 30, tzinfo=UTC), "2026-11-08"),
        ("monthly", datetime(2026, 11, 1, 0, 0, tzinfo=UTC), "2026-10-01"),
        ("monthly", datetime(2035, 1, 1, tzinfo=UTC), "2029-12-01"),
        ("monthly", datetime(2013, 1, 20, tzinfo=UTC), "no partition is complete yet"),
    ],
)
def test_a_schedule_takes_the_latest_complete_span(
    tmp_path: Path, kind: str, moment: datetime, key: str
) -> None:
    assert asked(cut(kind, tmp_path), tmp_path, moment) == [key]


def test_static_partitions_are_all_asked_for_in_runs_of_their_own_or_in_one(
    tmp_path: Path,
) -> None:
    every = ["north", "south", "o'east"]
    assert asked(cut("static", tmp_path), tmp_path, MOMENTS[0]) == every
    ranged = cut("static", tmp_path, backfill="single_run")
    assert asked(ranged, tmp_path, MOMENTS[0]) == [("north", "o'east")]
    single = ranged.model_copy(
        update={"partitions": PartitionSpec(kind="static", field="id", keys=["north"])}
    )
    assert asked(single, tmp_path, MOMENTS[0]) == ["north"]
    assert asked(orders(tmp_path, schedule="@daily"), tmp_path, MOMENTS[0]) == ["2013-04-01"]


LOCATION = """
from pathlib import Path
from ontologia_dagster.resources.ontology import OntologyResource
from tests.dagster.test_ticks import everything

folder = Path({folder!r})
defs = everything(folder, OntologyResource(storage_uri=str(folder / "store")), {cron!r})
"""
# Runs are asked for and wait: what they do is other tests' matter.
INSTANCE = {
    "concurrency": {"runs": {"max_concurrent_runs": 0}},
    "telemetry": {"enabled": False},
}


def test_the_daemon_evaluates_schedules_and_sensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a code server of its own, as in production: each kind of schedule has a tick that it
    had missed, each sensor its first."""
    ontology = storage(tmp_path)
    with ontology.session() as session:
        session.ensure([shop.Customer(id="c1", name="Ada")])
        session.emit(shop.OrderPlaced(order_id="1"))
    # About half a day ago, in UTC and in Berlin alike: one tick within the last day.
    cron = f"30 {(datetime.now(UTC).hour + 12) % 24} * * *"
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text(yaml.safe_dump(INSTANCE))
    (tmp_path / "location.py").write_text(LOCATION.format(folder=str(tmp_path), cron=cron))
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    names = [f"ontology_ingest_{kind}_orders_schedule" for kind in CUTS] + [
        "ontology_ingest_customer_schedule"
    ]
    with dg.DagsterInstance.get() as instance:
        for name in names:
            instance.add_instigator_state(running(name, cron))
        instance.add_instigator_state(running("ontology_customer_source", cron))
        sensors = ["log_tail", "conditions", "events"]
        names += [f"ontology_{name}" for name in sensors] + ["ontology_customer_source"]
        with daemon(tmp_path):
            ticks = until(lambda: last_ticks(instance, names), "all have ticked", tmp_path)
        runs = Counter(run.job_name for run in instance.get_runs())
        runs.pop("ontology_metrics", None)  # every five minutes: maybe just now
        told = instance.get_latest_materialization_event(dg.AssetKey("customer"))

    failed = {name: tick.error for name, tick in ticks.items() if tick.status.value == "FAILURE"}
    assert not failed
    assert told is not None
    assert runs == {
        **{f"ontology_ingest_{kind}_orders": 1 for kind in CUTS},
        "ontology_ingest_static_orders": 3,
        "ontology_ingest_customer": 2,  # by its schedule and by its sensor
        "ontology_drain_events": 1,
    }


def origin(name: str) -> RemoteInstigatorOrigin:
    repository = remote_job("location.py", "").repository_origin
    return RemoteInstigatorOrigin(repository, name)


def running(name: str, cron: str) -> InstigatorState:
    """As if somebody had turned it on a day ago."""
    day_ago = time.time() - 86_400
    if name.endswith("_schedule"):
        kind, data = InstigatorType.SCHEDULE, ScheduleInstigatorData(cron, day_ago)
        return InstigatorState(origin(name), kind, InstigatorStatus.RUNNING, data)
    sensor = SensorInstigatorData(sensor_type=SensorType.STANDARD)
    return InstigatorState(origin(name), InstigatorType.SENSOR, InstigatorStatus.RUNNING, sensor)


def last_ticks(instance: dg.DagsterInstance, names: list[str]) -> dict[str, Any] | None:
    """Of each the last tick that has ended; None before all have one."""
    ticks: dict[str, Any] = {}
    ended = [TickStatus.SUCCESS, TickStatus.SKIPPED, TickStatus.FAILURE]
    for name in names:
        place = origin(name)
        for tick in instance.get_ticks(
            place.get_id(), place.get_selector().get_id(), limit=1, statuses=ended
        ):
            ticks[name] = tick
    return ticks if len(ticks) == len(names) else None


@contextmanager
def daemon(folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "dagster._daemon", "run", "-f", "location.py"]
    with open(folder / "daemon.log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(240)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until(answer: Callable[[], T | None], what: str, folder: Path) -> T:
    deadline = time.monotonic() + 240
    while (value := answer()) is None:
        assert time.monotonic() < deadline, f"{what}: {(folder / 'daemon.log').read_text()}"
        time.sleep(0.3)
    return value
