"""The demo from end to end, on a part of its source, as a user starts it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from rich.console import Console

from ontologia_dagster.demo.definitions import demo_definitions
from ontologia_dagster.demo.expected import Expected, expected
from ontologia_dagster.demo.handlers import SEVERE_DELAY
from ontologia_dagster.demo.instance import open_instance
from ontologia_dagster.demo.source import NOT_MIDNIGHT
from ontologia_dagster.demo.summary import Figure, verdict
from ontologia_dagster.demo.types import (
    Airport,
    Disruption,
    Flight,
    Incident,
    Operates,
    Plane,
    WeatherObservation,
)
from storage_engine import Session
from tests.e2e.part_of_source import write_part


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, with a part of the source."""
    part = write_part(tmp_path / "source")
    monkeypatch.setenv("ONTOLOGIA_DEMO_SOURCE", str(part))
    monkeypatch.setenv("ONTOLOGIA_HOME", str(tmp_path / "home"))
    for name in ("ONTOLOGIA_STORAGE_URI", "ONTOLOGIA_ENV", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def run_demo() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ontologia_dagster.demo", "run"],
        env={**os.environ, "COLUMNS": "150"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_the_demo_comes_to_the_figures_of_its_source(world: Path) -> None:
    source = expected()
    first = run_demo()
    assert first.returncode == 0, first.stdout + first.stderr
    assert "✗" not in first.stdout.split("Found, beside what the source says")[1]
    assert f"({source.flights_to_unknown_airports} relations)" in first.stdout
    assert f"{source.unknown_planes} right keys have no Plane" in first.stdout
    assert "make ui" in first.stdout
    head = the_storage_is_right(world, source)
    dagster_knows_all_of_it(world, source)

    again = run_demo()
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"still commit {head}" in again.stdout
    sent = re.findall(r"(\d+) events sent", again.stdout)
    assert sent
    assert set(sent) == {"0"}
    assert the_storage_is_right(world, source) == head


def the_storage_is_right(world: Path, source: Expected) -> int:
    """By questions of the test's own; the head commit."""
    with Session(world / "store") as session:
        query = session.query()
        assert query.entities(Airport).count() == source.airports_then
        assert query.entities(Plane).count() == source.planes_then
        assert query.entities(WeatherObservation).count() == source.weather
        assert query.relations(Flight).count() == source.flights
        assert query.relations(Operates).count() == source.operates
        severe = query.entities(Incident).where(Incident.kind == SEVERE_DELAY)
        assert severe.count() == source.severe_delays
        assert query.entities(Disruption).count() == source.disrupted_days
        unknown = query.entities(Airport).where(Airport.stub.is_true()).collect()
        assert tuple(sorted(one.faa for one in unknown)) == source.unknown_airports
        before = min(one.meta().commit_id for one in unknown) - 1
        makers = query.entities(Plane).as_of(before).where(Plane.manufacturer == "AIRBUS INDUSTRIE")
        assert makers.count() == source.makers_first["AIRBUS INDUSTRIE"]
        assert query.entities(Airport).as_of(before).count() == source.airports_first
        late = (Flight.departure == int(NOT_MIDNIGHT)) | (Flight.arrival == int(NOT_MIDNIGHT))
        assert query.relations(Flight).where(late).count() == 0
        assert query.relations(Flight).as_of(before).where(late).count() == source.times_mended
        return session.snapshot


def dagster_knows_all_of_it(world: Path, source: Expected) -> None:
    """Every month of flights has its rows, and versions are commits."""
    with open_instance(world / "dagster") as instance:
        flights = dg.AssetKey("flight")
        months = instance.get_materialized_partitions(flights)
        assert months == set(source.flights_by_month)
        for month, rows in source.flights_by_month.items():
            records = instance.fetch_materializations(
                dg.AssetRecordsFilter(flights, asset_partitions=[month]), limit=1
            ).records
            told = records[0].asset_materialization
            assert told is not None
            assert told.metadata["dagster/partition_row_count"].value == rows
        runs = instance.get_runs()
        assert {run.status for run in runs} == {dg.DagsterRunStatus.SUCCESS}
        jobs = {one.name for one in demo_definitions().resolve_all_job_defs()}
        assert {run.job_name for run in runs} <= jobs


def test_a_wrong_figure_is_named() -> None:
    console = Console(record=True, width=100, file=io.StringIO())

    assert not verdict(console, [Figure("Airline", 15, 16), Figure("Airport", 4, 4)])

    said = console.export_text()
    assert "1 figures are not what the source says" in said
    assert "Airline: found 15, the source has 16" in said
    assert "Airport" not in said
