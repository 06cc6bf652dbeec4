"""The demo's parts, without Spark: deliveries, corrections, alarms that are told once, handlers,
definitions, homes, and what killed processes leave behind."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from datetime import date
from fnmatch import fnmatch
from pathlib import Path

import dagster as dg
import pytest

from ontologia_dagster.declaration import INGEST_POOL
from ontologia_dagster.demo import events, local_s3
from ontologia_dagster.demo.definitions import demo_definitions
from ontologia_dagster.demo.events import HANDLERS, SEVERE_DELAY
from ontologia_dagster.demo.instance import (
    OWN_RUN,
    RUN,
    UI,
    choose_home,
    dagster_home,
    demo_storage_uri,
    end_dead_runs,
    hold,
    landing_folder,
    open_instance,
    prepare_instance,
)
from ontologia_dagster.demo.ontology import Airport, Disruption, Flight, Incident, Plane
from ontologia_dagster.demo.run import MeteredOntology, corrections, requests
from ontologia_dagster.demo.source import deliver
from ontologia_dagster.resources.environments import Environments
from ontologia_dagster.resources.ontology import OntologyResource
from storage_engine import OntologiaConfig, Session, initialize_storage
from storage_engine.errors import ConfigurationError

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
    return events.tell(session, SEVERE_DELAY, events.severe_delays(session)).sent


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
    [event] = events.disrupted_days(session)
    assert (event.origin, event.flights, event.late) == ("JFK", 3, 1)
    events.tell(session, "disrupted_days", [event])
    session.drain(HANDLERS)
    [stored] = session.query().entities(Disruption).collect()
    assert (stored.id, stored.worst_gust_mph) == ("JFK/2013-01-01", None)


def test_a_notice_about_nobody_dies_until_the_airport_is_there(session: Session) -> None:
    [event] = events.notices(session)
    assert event.faa == "LAX"  # flights go there, and it is not stored
    events.tell(session, "notices", [event])
    assert session.drain(HANDLERS).dead_lettered == 1

    session.ensure([Airport(faa="LAX"), Airport(faa="SJU")])
    session.commit()

    assert events.notices(session) == []
    assert session.query().entities(Incident).count() == 0


def test_the_location_loads_without_a_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONTOLOGIA_DEMO_STORAGE_URI", "s3://no-such-bucket/nowhere")
    monkeypatch.setenv("ONTOLOGIA_HOME", str(tmp_path / "nowhere"))

    definitions = demo_definitions()

    dg.Definitions.validate_loadable(definitions)
    keys = {spec.key.to_user_string() for spec in definitions.resolve_all_asset_specs()}
    assert keys >= {"flight_data", "flight", "observed_at", "severe_delays", "airline_punctuality"}
    assert list(tmp_path.iterdir()) == []


def test_corrections_are_known_by_history_whatever_came_first(session: Session) -> None:
    session.ensure([Plane(tailnum="N1", manufacturer="AIRBUS INDUSTRIE"), flight(5, 1)])
    session.ensure(flight(6, 1).replace(departure=2400))
    session.commit()
    assert corrections(session).first_commit is None  # only wrong so far

    session.ensure(flight(6, 1).replace(departure=0))
    first = session.commit()
    session.ensure([Plane(tailnum="N1", manufacturer="AIRBUS"), Plane(tailnum="N9", stub=True)])
    session.commit()
    again = flight(6, 1)
    for departure in (2400, 0):  # wrong once more, and mended: still one flight
        session.ensure(again.replace(departure=departure))
        last = session.commit()

    done = corrections(session)
    assert (done.makers_wrong, done.makers_unified) == (1, 1)
    assert (done.times_wrong, done.times_mended) == (1, 1)
    assert (done.airports_added, done.planes_added) == (0, 1)
    assert first is not None
    assert last is not None
    assert first < done.first_commit < last  # type: ignore[operator]


def test_each_storage_has_a_home_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = {}
    for name, uri, local in (
        ("run", None, False),
        ("run, said", str(tmp_path / "flights"), False),
        ("run-s3", None, True),
        ("bucket", "s3://mine/flights", False),
        ("another", "s3://mine-flights/", False),
    ):
        monkeypatch.setenv("ONTOLOGIA_HOME", str(tmp_path))
        monkeypatch.setenv("ONTOLOGIA_STORAGE_URI", uri or "")
        monkeypatch.setenv("ONTOLOGIA_DEMO_STORAGE_URI", "")
        choose_home(local_s3=local)
        homes[name] = (dagster_home(), landing_folder())
        assert demo_storage_uri() == uri or uri is None
        # The location that `make ui` opens beside it is somewhere else.
        other = Environments.load().current.uri
        assert other == str(dagster_home().parent / "store")
        if not local:  # what a child process, or a second call, makes of it
            choose_home()
            assert homes[name] == (dagster_home(), landing_folder())
            assert demo_storage_uri() == uri or uri is None

    assert homes["run"] == homes["run, said"] == (tmp_path / "dagster", tmp_path / "landing")
    assert homes["run-s3"][0] == tmp_path / "s3" / "dagster"
    assert len(set(homes.values())) == 4


def test_runs_of_killed_processes_are_ended_and_their_places_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))  # set back at the end
    place = prepare_instance(tmp_path)
    job = demo_definitions().resolve_job_def("flights_compact")
    with open_instance(place) as instance:
        storage = instance.event_log_storage

        def started(tags: dict[str, str]) -> str:
            run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=tags)
            return run.run_id

        def status(run_id: str) -> dg.DagsterRunStatus:
            run = instance.get_run_by_id(run_id)
            assert run is not None
            return run.status

        ours, theirs = started(OWN_RUN), started({})
        assert storage.claim_concurrency_slot(INGEST_POOL, ours, "flight").is_claimed
        assert not storage.claim_concurrency_slot(INGEST_POOL, theirs, "flight").is_claimed

        with hold(place, RUN), hold(place, UI):
            assert end_dead_runs(instance, place, RUN) == 1
        assert status(ours) == dg.DagsterRunStatus.FAILURE
        assert status(theirs) == dg.DagsterRunStatus.STARTED  # the UI that has it is alive
        assert storage.claim_concurrency_slot(INGEST_POOL, theirs, "flight").is_claimed

        with hold(place, RUN):
            assert end_dead_runs(instance, place, RUN) == 1
        assert status(theirs) == dg.DagsterRunStatus.FAILURE
        assert storage.claim_concurrency_slot(INGEST_POOL, "new", "flight").is_claimed

    with (
        hold(place, RUN),
        pytest.raises(ConfigurationError, match=f"in use .run, process {os.getpid()}."),
        hold(place, RUN),
    ):
        pass


def test_a_storage_is_made_where_there_is_none_and_all_requests_to_it_are_counted(
    tmp_path: Path,
) -> None:
    uri = str(tmp_path / "store")
    ontology = MeteredOntology.of(OntologyResource(storage_uri=uri, creates_storage=True))
    with ontology.repository() as repository:
        assert repository.head_commit_id() == 0
    before = requests()

    with ontology.session(entity_types=[Airport]) as session:
        session.ensure(Airport(faa="JFK"))
    with ontology.repository() as repository:
        assert repository.head_commit_id() == 1

    made = requests() - before
    assert made["GET"] > 0
    assert made["PUT"] + made["PUT_IF"] > 0


def test_the_wheel_has_every_file_that_packages_need() -> None:
    root = Path(__file__).parents[2]
    stated = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns: dict[str, list[str]] = stated["package-data"]
    for package in ("storage_engine", "ontologia_dagster", "jobs"):
        for file in (root / package).rglob("*"):
            if file.is_dir() or file.suffix in {".py", ".pyc"}:
                continue
            if file.is_relative_to(root / "ontologia_dagster" / "defs"):
                continue  # the example, which is the checkout's
            parts = file.relative_to(root).parts
            packed = any(
                fnmatch("/".join(parts[depth:]), pattern)
                for depth in range(1, len(parts))
                for pattern in (*patterns["*"], *patterns.get(".".join(parts[:depth]), ()))
            )
            assert packed, f"{file} is not packed"


def test_ports_of_servers_are_none_that_outgoing_connections_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of those may be taken again between the moment it is chosen and the server's start."""
    told = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(local_s3, "_OUTGOING", told)
    told.write_text("32768\t60999\n")
    found = local_s3.free_ports(50)
    assert len(set(found)) == 50
    assert all(10_000 <= port < 32_768 for port in found)
    for unusual in ("1024 65535\n", ""):  # all are given away; the system does not tell
        told.write_text(unusual)
        assert len(set(local_s3.free_ports(8))) == 8
