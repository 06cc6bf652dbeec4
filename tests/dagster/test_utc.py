"""A time without a zone is in UTC, wherever the machine that reads it stands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster.declaration import PartitionSpec
from ontologia_dagster.downstream.queries import query_asset, reference
from ontologia_dagster.ingestion import partitions
from ontologia_dagster.ingestion.asset import build_type
from ontologia_dagster.storage.events import age_s, is_past
from tests.dagster.shop import Customer
from tests.dagster.world import facts, materialisations, orders, resources, storage

HOURLY = PartitionSpec(kind="hourly", field="at", start="2013-01-01", end="2013-01-03")
DAILY = PartitionSpec(kind="daily", field="at", start="2013-01-01", end="2013-02-01")


@pytest.fixture(params=["America/New_York", "Asia/Tokyo"], autouse=True)
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process stands in another zone."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", request.param)
        time.tzset()
        assert datetime(2013, 7, 1).astimezone().utcoffset() != timedelta()
        yield
    time.tzset()


def test_a_reference_without_a_zone_is_in_utc() -> None:
    meant = datetime(2013, 7, 1, 12, tzinfo=UTC)
    for text in ("2013-07-01T12:00:00", "2013-07-01 12:00", "2013-07-01T12:00:00Z"):
        assert reference(text, head=9) == meant, text
    assert reference("2013-07-01T14:00:00+02:00", head=9) == meant
    assert reference("2013-07-01", head=9) == datetime(2013, 7, 1, tzinfo=UTC)
    assert [reference(text, head=9) for text in (None, " ", " 7 ", "release")] == [
        9,
        9,
        7,
        "release",
    ]


def test_a_query_asset_travels_to_the_instant_that_is_meant(tmp_path: Path) -> None:
    ontology = storage(tmp_path)
    for visits in (3, 5):
        with ontology.session() as session:
            session.ensure([Customer(id="c1", name="Ada", visits=visits)])
    with ontology.repository() as repository:
        first = repository.get_commit(1)
        assert first is not None

    def asked(as_of: str) -> Any:
        asset = query_asset("seen", "select visits from Customer", plot={"visits": "visits"})
        [made] = materialisations(
            dg.materialize(
                [asset],
                resources={"ontology": ontology},
                run_config={"ops": {"seen": {"config": {"as_of": as_of}}}},
            )
        )
        return facts(made.metadata)["as_of_commit"]

    assert asked(first.created_at.astimezone(UTC).replace(tzinfo=None).isoformat()) == 1
    assert asked(first.created_at.isoformat()) == 1


def test_rows_are_in_the_partition_that_utc_says() -> None:
    naive, aware = datetime(2013, 1, 1, 23, 30), datetime(2013, 1, 1, 23, 30, tzinfo=UTC)  # noqa: DTZ001
    for moment in (naive, aware):
        assert partitions.key_of(HOURLY, moment) == "2013-01-01-23:00"
        assert partitions.key_of(DAILY, moment) == "2013-01-01"
    assert partitions.key_of(DAILY, date(2013, 1, 2)) == "2013-01-02"
    [span] = partitions.slices(DAILY, ["2013-01-02"])
    assert (span.start, span.end) == (
        datetime(2013, 1, 2, tzinfo=UTC),
        datetime(2013, 1, 3, tzinfo=UTC),
    )


def test_a_schedule_takes_the_partition_that_is_complete_in_utc(tmp_path: Path) -> None:
    defs = build_type(orders(tmp_path, schedule="30 0 1 * *"))
    [schedule] = defs.schedules or ()
    assert isinstance(schedule, dg.ScheduleDefinition)
    moment = datetime(2013, 3, 1, 0, 30, tzinfo=UTC)
    bound = resources(storage(tmp_path))
    whole = dg.Definitions.merge(defs, dg.Definitions(resources=bound))
    context = dg.build_schedule_context(
        scheduled_execution_time=moment, repository_def=whole.get_repository_def()
    )
    data = whole.get_schedule_def(schedule.name).evaluate_tick(context)
    assert [request.partition_key for request in data.run_requests or ()] == ["2013-02-01"]


def test_ages_are_counted_in_utc() -> None:
    moment = datetime.now(UTC) - timedelta(minutes=10)
    assert 590 < age_s(moment) < 700
    assert is_past(moment, timedelta(minutes=9))
    assert not is_past(moment, timedelta(minutes=12))
