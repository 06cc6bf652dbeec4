"""The demo's parts, without Spark: deliveries, alarms that are told once, handlers, definitions."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path

import dagster as dg
import pytest

from ontologia_dagster.demo import alarms
from ontologia_dagster.demo.definitions import demo_definitions
from ontologia_dagster.demo.handlers import HANDLERS, SEVERE_DELAY
from ontologia_dagster.demo.source import deliver
from ontologia_dagster.demo.types import Airport, Disruption, Flight, Incident
from storage_engine import OntologiaConfig, Session, initialize_storage

FILES = {
    "airlines": "carrier,name\nUA,United\n",
    "airports": "faa,name,lat\nJFK,Kennedy,40.6\n",
    "planes": "tailnum,manufacturer\nN1,AIRBUS INDUSTRIE\nN2,BOEING\n",
    "weather": "origin,time_hour\nJFK,2013-01-01T06:00:00Z\n",
    "flights": "year,month,dep_time,arr_time,tailnum,dest\n"
    "2013,1,2400,NA,N1,JFK\n2013,1,517,2400,N9,SJU\n2013,12,NA,NA,NA,JFK\n",
}


@pytest.fixture
def landing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for name, text in FILES.items():
        (source / f"{name}.csv").write_text(text)
    monkeypatch.setenv("ONTOLOGIA_DEMO_SOURCE", str(source))
    return tmp_path / "landing"


def test_a_corrected_delivery_changes_only_what_was_wrong(landing: Path) -> None:
    first = deliver(landing, corrected=False)
    assert first.rows["flights/2013-01-01.csv"] == 2
    assert len(first.changed) == len(first.rows) == 6
    assert deliver(landing, corrected=False).changed == ()

    then = deliver(landing, corrected=True)

    assert then.changed == ("airports.csv", "planes.csv", "flights/2013-01-01.csv")
    assert (landing / "airports.csv").read_text().splitlines()[-1] == "SJU,NA,NA"
    planes = (landing / "planes.csv").read_text().splitlines()
    assert planes == ["tailnum,manufacturer", "N1,AIRBUS", "N2,BOEING", "N9,NA"]
    january = (landing / "flights/2013-01-01.csv").read_text().splitlines()
    assert january[1:] == ["2013,1,0,NA,N1,JFK", "2013,1,517,0,N9,SJU"]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    initialize_storage(tmp_path / "store")
    config = OntologiaConfig(event_max_attempts=1)
    with Session(tmp_path / "store", config=config) as opened:
        opened.ensure([Airport(faa="JFK"), flight(1, 700), flight(2, 5), flight(3, 5, "SJU")])
        opened.commit()
        yield opened


def flight(number: int, delay: int, destination: str = "LAX") -> Flight:
    return Flight(
        left_key="JFK",
        right_key=destination,
        flight=f"2013-01-01/UA/{number}",
        day=date(2013, 1, 1),
        carrier="UA",
        number=number,
        scheduled_departure=800,
        departure_delay=delay,
        scheduled_arrival=1200,
        distance_mi=100,
    )


def told(session: Session) -> int:
    return alarms.tell(session, SEVERE_DELAY, alarms.severe_delays(session)).sent


def test_trouble_is_told_once(session: Session) -> None:
    assert told(session) == 1
    assert told(session) == 0  # nobody has handled it yet, and it is still not told again
    assert session.drain(HANDLERS).handled == 1
    assert told(session) == 0
    assert session.query().entities(Incident).count() == 1

    session.ensure(flight(4, 601))
    session.commit()

    assert told(session) == 1  # the new one alone
    assert session.drain(HANDLERS).handled == 1
    assert session.query().entities(Incident).count() == 2


def test_a_third_of_the_flights_late_is_a_disrupted_day(session: Session) -> None:
    [event] = alarms.disrupted_days(session)
    assert (event.origin, event.flights, event.late) == ("JFK", 3, 1)
    alarms.tell(session, "disrupted_days", [event])
    session.drain(HANDLERS)
    [stored] = session.query().entities(Disruption).collect()
    assert (stored.id, stored.worst_gust_mph) == ("JFK/2013-01-01", None)


def test_a_notice_about_nobody_dies_until_the_airport_is_there(session: Session) -> None:
    [event] = alarms.notices(session)
    assert event.faa == "LAX"  # flights go there, and it is not stored
    alarms.tell(session, "notices", [event])
    assert session.drain(HANDLERS).dead_lettered == 1

    session.ensure([Airport(faa="LAX"), Airport(faa="SJU")])
    session.commit()

    assert alarms.notices(session) == []
    assert session.query().entities(Incident).count() == 0


def test_the_location_loads_without_a_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONTOLOGIA_STORAGE_URI", "s3://no-such-bucket/nowhere")
    monkeypatch.setenv("ONTOLOGIA_HOME", str(tmp_path / "nowhere"))

    definitions = demo_definitions()

    dg.Definitions.validate_loadable(definitions)
    keys = {spec.key.to_user_string() for spec in definitions.resolve_all_asset_specs()}
    assert keys >= {"flight_data", "flight", "observed_at", "severe_delays", "airline_punctuality"}
    assert list(tmp_path.iterdir()) == []
