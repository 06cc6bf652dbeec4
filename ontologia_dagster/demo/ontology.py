"""The demo's ontology: what flew, where, by whom, in what weather, and what came of it.

What counts as trouble stands here too: these figures are definitions, not results.
"""

from __future__ import annotations

from datetime import date, datetime

from storage_engine import Entity, Event, Field, Relation

SEVERE_MINUTES = 600
HOUR_LATE = 60
DISRUPTED_SHARE = 0.25


def disrupted(flights: int, late: int) -> bool:
    """Whether a day with so many flights, and so many of them over an hour late, was disrupted."""
    return late >= flights * DISRUPTED_SHARE


class Airline(Entity):
    carrier: Field[str] = Field(primary_key=True)
    name: Field[str]


class Airport(Entity):
    """A stub is an airport that flights name and the source's list lacks."""

    faa: Field[str] = Field(primary_key=True)
    name: Field[str | None] = Field(default=None)
    latitude: Field[float | None] = Field(default=None)
    longitude: Field[float | None] = Field(default=None)
    altitude_ft: Field[int | None] = Field(default=None)
    timezone: Field[str | None] = Field(default=None)
    stub: Field[bool] = Field(default=False)


class Plane(Entity):
    """A stub is a plane that flights name and the source's register lacks."""

    tailnum: Field[str] = Field(primary_key=True)
    year: Field[int | None] = Field(default=None)
    category: Field[str | None] = Field(default=None)
    manufacturer: Field[str | None] = Field(default=None, index=True)
    model: Field[str | None] = Field(default=None)
    engines: Field[int | None] = Field(default=None)
    seats: Field[int | None] = Field(default=None)
    engine: Field[str | None] = Field(default=None)
    stub: Field[bool] = Field(default=False)


class WeatherObservation(Entity):
    """By the hour, in UTC: the local hour comes twice when the clocks go back."""

    id: Field[str] = Field(primary_key=True)  # JFK/2013-01-01T06:00:00Z
    observed_at: Field[datetime]
    temperature_f: Field[float | None] = Field(default=None)
    humidity: Field[float | None] = Field(default=None)
    wind_mph: Field[float | None] = Field(default=None)
    gust_mph: Field[float | None] = Field(default=None)
    precipitation_in: Field[float | None] = Field(default=None)
    visibility_mi: Field[float | None] = Field(default=None)


class Flight(Relation[Airport, Airport]):
    """Times are local, as on the clock: 517 is 5:17. A flight without departure was cancelled."""

    flight: Field[str] = Field(instance_key=True)  # 2013-01-31/UA/1545
    day: Field[date]
    carrier: Field[str] = Field(index=True)
    number: Field[int]
    tailnum: Field[str | None] = Field(default=None)
    scheduled_departure: Field[int]
    departure: Field[int | None] = Field(default=None)
    departure_delay: Field[int | None] = Field(default=None)
    scheduled_arrival: Field[int]
    arrival: Field[int | None] = Field(default=None)
    arrival_delay: Field[int | None] = Field(default=None)
    air_minutes: Field[int | None] = Field(default=None)
    distance_mi: Field[int]


class Operates(Relation[Airline, Plane]):
    """The airline flew the plane at least once."""


class ObservedAt(Relation[WeatherObservation, Airport]):
    pass


class Incident(Entity):
    """What a handler made of an event about one flight or one airport."""

    id: Field[str] = Field(primary_key=True)
    kind: Field[str] = Field(index=True)
    subject: Field[str]
    delay_minutes: Field[int | None] = Field(default=None)
    remark: Field[str]


class Disruption(Entity):
    """A day on which an airport was in trouble, and the worst weather of that day."""

    id: Field[str] = Field(primary_key=True)  # JFK/2013-03-08
    origin: Field[str]
    day: Field[date]
    flights: Field[int]
    late: Field[int]
    worst_gust_mph: Field[float | None] = Field(default=None)


class SevereDelay(Event):
    """A flight left more than ten hours late."""

    flight: Field[str]
    origin: Field[str]
    destination: Field[str]
    minutes: Field[int]


class DisruptedDay(Event):
    """At one airport, a quarter of a day's flights left over an hour late, or more."""

    origin: Field[str]
    day: Field[date]
    flights: Field[int]
    late: Field[int]


class AirportNotice(Event):
    """Somebody says something about an airport, which has to be known for it to be filed."""

    faa: Field[str]
    remark: Field[str]


ENTITIES = (Airline, Airport, Plane, WeatherObservation, Incident, Disruption)
RELATIONS = (Flight, Operates, ObservedAt)
