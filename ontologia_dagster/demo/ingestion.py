"""How the delivered files become the demo's types: one declaration each, expressions in SQL."""

from __future__ import annotations

from ontologia_dagster.declaration import (
    OntologyAsset,
    PartitionSpec,
    SourceSpec,
    on_new_data,
)
from ontologia_dagster.demo.places import DELIVERY, GROUP, landing_folder
from ontologia_dagster.demo.source import NULL

MODELS = "ontologia_dagster.demo.types"

_AIRLINES = "carrier STRING, name STRING"
_AIRPORTS = (
    "faa STRING, name STRING, lat DOUBLE, lon DOUBLE, alt INT, tz INT, dst STRING, tzone STRING"
)
_PLANES = (
    "tailnum STRING, year INT, type STRING, manufacturer STRING, model STRING, engines INT, "
    "seats INT, speed INT, engine STRING"
)
_WEATHER = (
    "origin STRING, year INT, month INT, day INT, hour INT, temp DOUBLE, dewp DOUBLE, "
    "humid DOUBLE, wind_dir INT, wind_speed DOUBLE, wind_gust DOUBLE, precip DOUBLE, "
    "pressure DOUBLE, visib DOUBLE, time_hour TIMESTAMP"
)
_FLIGHTS = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, "
    "sched_arr_time INT, arr_delay INT, carrier STRING, flight INT, tailnum STRING, "
    "origin STRING, dest STRING, air_time INT, distance INT, hour INT, minute INT, "
    "time_hour TIMESTAMP"
)
_DAY = "make_date(year, month, day)"
_HOUR = "concat(origin, '/', date_format(time_hour, \"yyyy-MM-dd'T'HH:mm:ss'Z'\"))"


def declarations() -> list[OntologyAsset]:
    """All ingested types. The folder is asked for now, so that tests can have their own."""
    return [
        _declared(
            "Airline",
            _delivered("airlines.csv", _AIRLINES),
            description="Who flies.",
            expectations=[{"not_null": "name"}],
        ),
        _declared(
            "Airport",
            _delivered("airports.csv", _AIRPORTS),
            description="Where flights go. Stubs are named by flights and missing in the list.",
            columns={
                "latitude": "lat",
                "longitude": "lon",
                "altitude_ft": "alt",
                "timezone": "tzone",
                "stub": "lat is null",
            },
            expectations=[{"range": {"column": "latitude", "min": -90, "max": 90}}],
        ),
        _declared(
            "Plane",
            _delivered("planes.csv", _PLANES),
            description="What flies. Stubs are named by flights and missing in the register.",
            columns={"category": "type", "stub": "manufacturer is null"},
        ),
        _declared(
            "WeatherObservation",
            _delivered("weather.csv", _WEATHER),
            description="The weather at the three airports of New York, by the hour.",
            columns={
                "id": _HOUR,
                "observed_at": "time_hour",
                "temperature_f": "temp",
                "humidity": "humid",
                "wind_mph": "wind_speed",
                "gust_mph": "wind_gust",
                "precipitation_in": "precip",
                "visibility_mi": "visib",
            },
        ),
        _declared(
            "ObservedAt",
            _delivered("weather.csv", _WEATHER),
            description="Which airport an observation is of.",
            columns={"left_key": _HOUR, "right_key": "origin"},
        ),
        _declared(
            "Flight",
            _delivered("flights/{partition_key}.csv", _FLIGHTS),
            description="Every flight from New York in 2013, by local month.",
            columns={
                "left_key": "origin",
                "right_key": "dest",
                "flight": f"concat_ws('/', {_DAY}, carrier, flight)",
                "day": _DAY,
                "number": "flight",
                "scheduled_departure": "sched_dep_time",
                "departure": "dep_time",
                "departure_delay": "dep_delay",
                "scheduled_arrival": "sched_arr_time",
                "arrival": "arr_time",
                "arrival_delay": "arr_delay",
                "air_minutes": "air_time",
                "distance_mi": "distance",
            },
            partitions=PartitionSpec(
                kind="monthly", field="day", start="2013-01-01", end="2014-01-01"
            ),
            backfill="single_run",
            expectations=[{"range": {"column": "distance_mi", "min": 1}}],
        ),
        _declared(
            "Operates",
            _delivered("flights/*.csv", _FLIGHTS),
            description="Which airline flew which plane.",
            columns={"left_key": "carrier", "right_key": "tailnum"},
            where="tailnum is not null",
            distinct=True,
        ),
    ]


def _declared(type_name: str, source: SourceSpec, **members: object) -> OntologyAsset:
    return OntologyAsset.model_validate(
        {
            "type": type_name,
            "models": MODELS,
            "source": source,
            "deps": [DELIVERY],
            "group": GROUP,
            "automation": on_new_data(),
            **members,
        }
    )


def _delivered(name: str, schema: str) -> SourceSpec:
    return SourceSpec(
        format="csv",
        paths=[str(landing_folder() / name)],
        row_schema=schema,
        null_value=NULL,
    )
