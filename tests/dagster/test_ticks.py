"""Every schedule and sensor of the platform and of the demo is evaluated, as the daemon does it:
they are taken from the definitions, so that a new one cannot be forgotten."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import dagster as dg
import pytest

from ontologia_dagster.declaration import OntologyAsset, PartitionSpec, SourceSpec
from ontologia_dagster.demo.definitions import demo_definitions
from ontologia_dagster.ingestion.asset import build_type
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.storage.storage_defs import build_platform
from tests.dagster import shop
from tests.dagster.world import MODELS, customers, orders, resources, storage

BERLIN = "Europe/Berlin"
CUTS = {
    "hourly": PartitionSpec(kind="hourly", field="at", start="2013-01-01", timezone=BERLIN),
    "daily": PartitionSpec(kind="daily", field="day", start="2013-01-01", timezone=BERLIN),
    "weekly": PartitionSpec(kind="weekly", field="day", start="2013-01-01"),
    "monthly": PartitionSpec(kind="monthly", field="day", start="2013-01-01", end="2030-01-01"),
    "static": PartitionSpec(kind="static", field="id", keys=["north", "south", "o'east"]),
}


def cut(kind: str, folder: Path, **more: Any) -> OntologyAsset:
    return OntologyAsset(
        type="Order",
        name=f"{kind}_orders",
        models=MODELS,
        source=SourceSpec(paths=[f"{folder}/{kind}/{{partition_key}}.csv"]),
        partitions=CUTS[kind],
        schedule="30 6 * * *",
        watch_source=True,
        **more,
    )


def everything(folder: Path, ontology: OntologyResource) -> dg.Definitions:
    """A platform with a type of each kind of partitions, that are scheduled and watched."""
    declared = [
        customers(folder, schedule="0 6 * * *", watch_source=True),
        *(cut(kind, folder) for kind in CUTS),
        cut("static", folder, backfill="single_run").model_copy(update={"name": "ranged"}),
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
    assert {"ontology_log_tail", "ontology_conditions", "ontology_events"} <= evaluated
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
