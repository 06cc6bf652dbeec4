"""The demo in this process, stopped twice on its way, run to its end and once more; then the real
daemon and webserver over what it left and over the location beside it, and a browser that looks at
every page that people use.

One test, so that all of it is started once. With UPDATE_SCREENSHOTS=1 it takes the whole source,
and writes pictures for the docs; with UPDATE_SCREENSHOTS=part it does so with its own source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
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
from tests.dagster.test_alerts import Hook
from tests.e2e import pages
from tests.e2e.browser import UPDATE, WHOLE, browser
from tests.e2e.part_of_source import write_part
from tests.e2e.platform import dagster_knows_all_of_it, dagster_ui, until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


NOWHERE = "notice/of-an-airport-that-is-not-there"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not WHOLE:
        monkeypatch.setenv("ONTOLOGIA_DEMO_SOURCE", str(write_part(tmp_path / "source")))
    monkeypatch.setenv("ONTOLOGIA_HOME", str(tmp_path))
    monkeypatch.setenv("ONTOLOGIA_DEMO_STORAGE_URI", str(tmp_path / "flights"))
    monkeypatch.setenv("ONTOLOGIA_STORAGE_URI", str(tmp_path / "store"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.delenv("ONTOLOGIA_ENV", raising=False)
    return tmp_path


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    """Whoever is told of trouble."""
    made = Hook()
    monkeypatch.setenv("ONTOLOGIA_WEBHOOK_URL", made.url)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.spark
@pytest.mark.timeout(3000 if UPDATE else 900)
def test_the_demo_stopped_run_repeated_and_looked_at(
    home: Path, spark: SparkSession, hook: Hook, capsys: pytest.CaptureFixture[str]
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
        if page is not None:  # which takes its time, while the rest is looked at
            pages.people_materialise_the_example(page, address)
        event = AirportNotice(faa="JFK", remark="fog")
        with Session(home / "flights") as session:
            session.emit(event)
        if page is not None:  # while the sensor has yet to look
            pages.people_see_a_healthy_demo(page, address)
            pages.people_see_what_ran(page, address)
            pages.people_find_launchpads_to_choose_in(page, address)
        an_event_is_handled(home, event)
        with ThreadPoolExecutor(1) as apart:  # the browser's event loop has this thread
            apart.submit(flights_to_nowhere, home).result()
        if page is None:
            pytest.skip("there is no Chromium: what a browser shows was not looked at")
        pages.people_see_trouble(page, address)
        pages.people_see_the_example(page, address)
        run_id = a_handler_gives_up(home, hook)
        pages.people_see_a_dead_letter(page, address, run_id)
        the_cause_is_mended(home)
        pages.people_send_it_again(page, address)
        until(lambda: is_acked(home, NOWHERE), "what was sent again is acked")
        pages.people_see_that_all_is_well(page, address)


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
        job = demo_definitions().resolve_job_def("flights_ingest_plane")
        assert job.execute_in_process(instance=instance).success


def the_storage_is_right(home: Path, source: Expected) -> int:
    """By questions of the test's own; the head commit."""
    with Session(home / "flights") as session:
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
        with Session(home / "flights") as session:
            notice = Incident.id == f"notice/{event.faa}"
            return session.query().entities(Incident).where(notice).first()

    incident = until(handled, "the handler has committed")
    assert incident is not None
    assert incident.remark == event.remark
    with Session(home / "flights") as session:
        commit = session.get_commit(incident.meta().commit_id)
    assert commit is not None
    assert commit["metadata"]["handler"] == file_notice.id
    until(lambda: is_acked(home, event.id), "the event is acked")


def is_acked(home: Path, event_id: str) -> bool:
    """By its handler, whether at once or sent again."""
    with OntologyResource(storage_uri=str(home / "flights")).bus() as bus:
        return any(info.status == "acked" for info in bus.inspect_event(event_id))


def a_handler_gives_up(home: Path, hook: Hook) -> str:
    """The run that left a dead letter, once people were told of that."""
    with Session(home / "flights") as session:
        session.emit(AirportNotice(id=NOWHERE, faa="XXX", remark="closed"))

    def told() -> bool:
        return any("airport XXX is not in the ontology" in str(alert) for alert in hook.told)

    def dead() -> bool:
        with OntologyResource(storage_uri=str(home / "flights")).bus() as bus:
            return any(letter.event_id == NOWHERE for letter in bus.list_dead_letters("default", 9))

    until(dead, "the handler has given up")
    until(told, "people are told")
    with open_instance() as instance:
        failed = instance.get_runs(dg.RunsFilter(job_name="flights_drain_events"), limit=1)
    return failed[0].run_id


def the_cause_is_mended(home: Path) -> None:
    with Session(home / "flights") as session:
        session.ensure(Airport(faa="XXX", stub=True))


def flights_to_nowhere(home: Path) -> None:
    """Two of them, so that deep verification finds something."""
    with Session(home / "flights") as session:
        session.ensure([a_flight(number, "XXX") for number in (1, 2)])
    with open_instance() as instance:
        job = demo_definitions().resolve_job_def("flights_deep_verify")
        result = job.execute_in_process(instance=instance)
    failed = [each for each in result.get_asset_check_evaluations() if not each.passed]
    assert [each.asset_check_key.to_user_string() for each in failed] == ["flight:deep_verify"]


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
