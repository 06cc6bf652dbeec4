"""The demo in this process, stopped twice on its way, run to its end and once more; then the real
daemon and webserver over what it left, and a browser that looks at them.

One test, so that all of it is started once. With UPDATE_SCREENSHOTS=1 it takes the whole source,
and writes pictures for the docs.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ontologia_dagster.demo.definitions import demo_definitions
from ontologia_dagster.demo.events import SEVERE_DELAY, file_notice
from ontologia_dagster.demo.expected import Expected, expected
from ontologia_dagster.demo.instance import landing_folder, open_instance
from ontologia_dagster.demo.narrator import Narrator
from ontologia_dagster.demo.ontology import (
    Airport,
    AirportNotice,
    Disruption,
    Flight,
    Incident,
    Operates,
    Plane,
    WeatherObservation,
)
from ontologia_dagster.demo.program import STOPPED, main
from ontologia_dagster.demo.source import NOT_MIDNIGHT, deliver
from ontologia_dagster.resources.ontology import OntologyResource
from storage_engine import Session
from tests.e2e.browser import UPDATE, browser, keep, sees, sees_all, sees_no
from tests.e2e.part_of_source import write_part
from tests.e2e.platform import dagster_knows_all_of_it, dagster_ui, until

if TYPE_CHECKING:
    from playwright.sync_api import Page
    from pyspark.sql import SparkSession

INGESTED = 7


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not UPDATE:
        monkeypatch.setenv("ONTOLOGIA_DEMO_SOURCE", str(write_part(tmp_path / "source")))
    monkeypatch.setenv("ONTOLOGIA_HOME", str(tmp_path))
    monkeypatch.setenv("ONTOLOGIA_STORAGE_URI", str(tmp_path / "store"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.delenv("ONTOLOGIA_ENV", raising=False)
    return tmp_path


@pytest.mark.spark
@pytest.mark.timeout(3000 if UPDATE else 900)
def test_the_demo_stopped_run_repeated_and_looked_at(
    home: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    source = expected()
    stopped_before_the_corrections()
    stopped_amid_the_corrections()

    assert main(["run"]) == 0, capsys.readouterr().out
    head = the_storage_is_right(home, source)
    with open_instance(home / "dagster") as instance:
        dagster_knows_all_of_it(instance, source)

    capsys.readouterr()
    assert main(["run"]) == 0
    said = capsys.readouterr().out
    assert f"still commit {head}" in said
    assert set(re.findall(r"(\d+) events sent", said)) == {"0"}
    assert the_storage_is_right(home, source) == head

    with dagster_ui(home / "ui.log") as address, browser() as page:
        event = AirportNotice(faa="JFK", remark="fog")
        with Session(home / "store") as session:
            session.emit(event)
        if page is not None:  # while the sensor has yet to look
            people_see_a_healthy_demo(page, address)
        an_event_is_handled(home, event)
        with ThreadPoolExecutor(1) as apart:  # the browser's event loop has this thread
            apart.submit(flights_to_nowhere, home).result()
        if page is None:
            pytest.skip("there is no Chromium: what a browser shows was not looked at")
        people_see_trouble(page, address)


# -- the demo -------------------------------------------------------------------------------------


def stopped_before_the_corrections() -> None:
    with pytest.MonkeyPatch.context() as patch:
        chapter = Narrator.chapter

        def stop(self: Narrator, title: str) -> object:
            if title.startswith("Corrections"):
                raise KeyboardInterrupt
            return chapter(self, title)

        patch.setattr(Narrator, "chapter", stop)
        assert main(["run"]) == STOPPED


def stopped_amid_the_corrections() -> None:
    """The corrected files are there, and one type of seven has them."""
    deliver(landing_folder(), corrected=True)
    with open_instance() as instance:
        job = demo_definitions().resolve_job_def("ingest_plane")
        assert job.execute_in_process(instance=instance).success


def the_storage_is_right(home: Path, source: Expected) -> int:
    """By questions of the test's own; the head commit."""
    with Session(home / "store") as session:
        query = session.query()
        assert query.entities(Airport).count() == source.airports_then
        assert query.entities(Plane).count() == source.planes_then
        assert query.entities(WeatherObservation).count() == source.weather
        assert query.relations(Flight).count() == source.flights
        assert query.relations(Operates).count() == source.operates
        severe = query.entities(Incident).where(Incident.kind == SEVERE_DELAY)
        assert severe.count() == source.severe_delays > 0
        assert query.entities(Disruption).count() == source.disrupted_days > 0
        unknown = query.entities(Airport).where(Airport.stub.is_true()).collect()
        assert tuple(sorted(one.faa for one in unknown)) == source.unknown_airports
        stubs = query.entities(Plane).where(Plane.stub.is_true()).collect()
        before = min(one.meta().commit_id for one in stubs) - 1
        makers = query.entities(Plane).as_of(before).where(Plane.manufacturer == "AIRBUS INDUSTRIE")
        assert makers.count() == source.makers_first["AIRBUS INDUSTRIE"]
        assert query.entities(Airport).as_of(before).count() == source.airports_first
        late = (Flight.departure == int(NOT_MIDNIGHT)) | (Flight.arrival == int(NOT_MIDNIGHT))
        assert query.relations(Flight).where(late).count() == 0
        assert query.relations(Flight).as_of(before).where(late).count() == source.times_mended
        return session.snapshot


# -- in the UI ------------------------------------------------------------------------------------


def an_event_is_handled(home: Path, event: AirportNotice) -> None:
    """Seen by the sensor, handled by a run that the daemon started, with a commit and an ack."""

    def handled() -> Incident | None:
        with Session(home / "store") as session:
            notice = Incident.id == f"notice/{event.faa}"
            return session.query().entities(Incident).where(notice).first()

    def acked() -> bool:
        with OntologyResource(storage_uri=str(home / "store")).bus() as bus:
            [info] = bus.inspect_event(event.id)
        return info.status == "acked"

    incident = until(handled, "the handler has committed")
    assert incident is not None
    assert incident.remark == event.remark
    with Session(home / "store") as session:
        commit = session.get_commit(incident.meta().commit_id)
    assert commit is not None
    assert commit["metadata"]["handler"] == file_notice.id
    until(acked, "the event is acked")


def flights_to_nowhere(home: Path) -> None:
    """Two of them, so that deep verification finds something."""
    with Session(home / "store") as session:
        session.ensure([a_flight(number, "XXX") for number in (1, 2)])
    with open_instance() as instance:
        job = demo_definitions().resolve_job_def("ontology_deep_verify")
        result = job.execute_in_process(instance=instance)
    failed = [one.check_name for one in result.get_asset_check_evaluations() if not one.passed]
    assert failed == ["deep_verify_flight"]


def a_flight(number: int, destination: str) -> Flight:
    day = date(2013, 1, 1)
    return Flight(
        left_key="JFK",
        right_key=destination,
        flight=f"{day}/ZZ/{number}",
        day=day,
        carrier="ZZ",
        number=number,
        scheduled_departure=800,
        scheduled_arrival=1200,
        distance_mi=100,
    )


def people_see_a_healthy_demo(page: Page, address: str) -> None:
    page.goto(f"{address}/locations/flights/asset-groups/flights/lineage")
    sees(page, "flight_data", "weather_observation", "observed_at", "airline_punctuality")
    sees_all(page, "2 / 2 Passed", INGESTED)
    sees(page, "100% filled")
    sees_no(page, "Loading", "Never materialized", "Unsynced")
    keep(page, "asset-graph", height=1900)

    page.goto(f"{address}/assets/plane")
    sees(page, "rows_inserted", "rows_changed", "type_commit", "price_estimate_usd")
    page.get_by_text("Plots", exact=True).first.click()
    page.locator("canvas").first.wait_for(state="visible")
    sees(page, "rows_inserted")
    keep(page, "ingestion", height=1900)

    page.goto(f"{address}/assets/airline_punctuality")
    sees(page, "worst_average_delay", "as_of_commit", "How late each airline's flights left")
    page.get_by_text("Plots", exact=True).first.click()
    page.locator("canvas").first.wait_for(state="visible")
    sees(page, "worst_average_delay")
    keep(page, "materialisation")


def people_see_trouble(page: Page, address: str) -> None:
    page.goto(f"{address}/assets/ontology/log?view=checks&checkDetail=deep_verify_flight")
    sees(page, "Failed", "missing_endpoint", "1 right keys have no Airport: XXX (2 relations)")
    assert page.locator("button", has_text="Execute").first.is_enabled()
    keep(page, "failed-check")

    page.goto(f"{address}/locations/flights/sensors/ontology_events")
    sees(page, "ontology_drain_events", "View logs", "1 run requested")
    keep(page, "sensor", height=860)
