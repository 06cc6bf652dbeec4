"""The real daemon and webserver over the demo's location, and a browser that looks at them.

One test, so that all of it is started once. Screenshots for the docs are written when
UPDATE_SCREENSHOTS=1 is set.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from ontologia_dagster.demo.definitions import ALARM_JOB, demo_definitions
from ontologia_dagster.demo.handlers import file_notice
from ontologia_dagster.demo.instance import open_instance
from ontologia_dagster.demo.types import (
    Airline,
    Airport,
    AirportNotice,
    Flight,
    Incident,
    ObservedAt,
    Operates,
    Plane,
    WeatherObservation,
)
from storage_engine import Session, initialize_storage
from tests.e2e.platform import dagster_ui, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
_PATIENCE_MS = 90_000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONTOLOGIA_HOME", str(tmp_path))
    monkeypatch.setenv("ONTOLOGIA_STORAGE_URI", str(tmp_path / "store"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.delenv("ONTOLOGIA_ENV", raising=False)
    return tmp_path


def flight(number: int, destination: str, delay: int) -> Flight:
    day = date(2013, 1, 1)
    return Flight(
        left_key="JFK",
        right_key=destination,
        flight=f"{day}/UA/{number}",
        day=day,
        carrier="UA",
        number=number,
        scheduled_departure=800,
        departure_delay=delay,
        scheduled_arrival=1200,
        distance_mi=100,
    )


def everything_else() -> list[object]:
    """One of each, so that every asset has something to show."""
    noon = datetime(2013, 1, 1, 12, tzinfo=UTC)
    return [
        Airline(carrier="UA", name="United"),
        Airport(faa="JFK"),
        Plane(tailnum="N1"),
        WeatherObservation(id="JFK/1", observed_at=noon),
        ObservedAt(left_key="JFK/1", right_key="JFK"),
        Operates(left_key="UA", right_key="N1"),
    ]


def some_history(home: Path) -> None:
    """A small storage with a relation to nowhere, asked about twice and deeply verified once."""
    initialize_storage(home / "store")
    definitions = demo_definitions()
    with open_instance() as instance:
        for number, delay in ((1, 10), (2, 50)):
            with Session(home / "store") as session:
                session.ensure(everything_else())
                session.ensure(flight(number, "SJU", delay))
            run(definitions, ALARM_JOB, instance)
        result = run(definitions, "ontology_deep_verify", instance)
    failed = [one.check_name for one in result.get_asset_check_evaluations() if not one.passed]
    assert failed == ["deep_verify_flight"]


def run(
    definitions: dg.Definitions, job: str, instance: dg.DagsterInstance
) -> dg.ExecuteInProcessResult:
    return definitions.resolve_job_def(job).execute_in_process(instance=instance)


@pytest.mark.timeout(600)
def test_the_sensor_sees_an_event_and_people_see_the_platform(home: Path) -> None:
    some_history(home)
    with dagster_ui(home / "ui.log") as address:
        event = AirportNotice(faa="JFK", remark="fog")
        with Session(home / "store") as session:
            session.emit(event)

        incident = until(lambda: handled(home), "the handler has committed")

        assert incident is not None
        assert incident.remark == "fog"
        with Session(home / "store") as session:
            commit = session.get_commit(incident.meta().commit_id)
        assert commit is not None
        assert commit["metadata"]["handler"] == file_notice.id
        until(lambda: acked(home, event.id), "the event is acked")
        if CHROMIUM is None:
            pytest.skip("there is no Chromium: what a browser shows was not looked at")
        with browser() as page:
            people_see(page, address)


def handled(home: Path) -> Incident | None:
    with Session(home / "store") as session:
        notice = Incident.id == "notice/JFK"
        return session.query().entities(Incident).where(notice).first()


def acked(home: Path, event_id: str) -> bool:
    from ontologia_dagster.resources import OntologyResource

    with OntologyResource(storage_uri=str(home / "store")).bus() as bus:
        [info] = bus.inspect_event(event_id)
    return info.status == "acked"


# -- in the browser -------------------------------------------------------------------------------


@contextmanager
def browser() -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        # High enough for the whole graph: what is out of sight is not on the page.
        page = started.new_page(viewport={"width": 1600, "height": 1900}, device_scale_factor=0.6)
        page.set_default_timeout(_PATIENCE_MS)
        yield page
        started.close()


def people_see(page: Page, address: str) -> None:
    page.goto(f"{address}/locations/flights/asset-groups/flights/lineage")
    sees(page, "flight_data", "weather_observation", "observed_at", "airline_punctuality")
    sees(page, "Materialized")  # what is known of them has come, too
    keep(page, "asset-graph", height=1900)

    page.goto(f"{address}/assets/airline_punctuality")
    sees(page, "worst_average_delay", "as_of_commit", "How late each airline's flights left")
    page.get_by_text("Plots", exact=True).first.click()
    page.locator("canvas").first.wait_for(state="visible")
    sees(page, "worst_average_delay")
    keep(page, "materialisation")

    page.goto(f"{address}/assets/ontology/log?view=checks&checkDetail=deep_verify_flight")
    sees(page, "Failed", "missing_endpoint", "1 right keys have no Airport: SJU (2 relations)")
    assert page.locator("button", has_text="Execute").first.is_enabled()
    keep(page, "failed-check")

    page.goto(f"{address}/locations/flights/sensors/ontology_events")
    sees(page, "ontology_drain_events", "View logs", "1 run requested")
    keep(page, "sensor")


def sees(page: Page, *texts: str) -> None:
    for text in texts:
        page.get_by_text(text, exact=False).first.wait_for(state="visible")


def keep(page: Page, name: str, *, height: int = 1300) -> None:
    """Where asked, a picture for the docs."""
    from playwright.sync_api import FloatRect

    if os.environ.get("UPDATE_SCREENSHOTS") == "1":
        IMAGES.mkdir(parents=True, exist_ok=True)
        page.wait_for_timeout(2_000)  # until nothing moves any more
        shown = FloatRect(x=0, y=0, width=1600, height=height)
        page.screenshot(path=IMAGES / f"{name}.png", clip=shown)
