"""The demo's assets: the delivery of files, the types that are ingested from them (one declaration
each, expressions in SQL), alarms that look for trouble, and a report about now or any past commit.
"""

# No `from __future__ import annotations`: Dagster reads annotations of assets as objects.

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg
from pydantic import Field

from ontologia_dagster import (
    EVENTS_POOL,
    OntologyAsset,
    OntologyResource,
    PartitionSpec,
    SourceSpec,
    emits,
    on_new_data,
    query_asset,
    report_failures,
)
from ontologia_dagster.demo import events as demo_events
from ontologia_dagster.demo.instance import DELIVERY, GROUP, STORAGE, landing_folder
from ontologia_dagster.demo.ontology import (
    ENTITIES,
    RELATIONS,
    Airline,
    AirportNotice,
    DisruptedDay,
    Flight,
    SevereDelay,
)
from ontologia_dagster.demo.source import NULL, PACKAGE, deliver
from ontologia_dagster.downstream.metadata import request_metadata, table
from storage_engine import Event, Session, View
from storage_engine.query import avg, count
from storage_engine.wording import counted

MODELS = "ontologia_dagster.demo.ontology"
DESTINATIONS_KNOWN = "destinations_known"
_BAR = 20
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


# -- the delivery ---------------------------------------------------------------------------------


class DeliveryConfig(dg.Config):
    corrected: bool = Field(
        default=True,
        description="false: the files as the package has them, with all their mistakes",
    )
    flawed: bool = Field(
        default=False,
        description="true: with a flight to nowhere in the first month, for an audited run to stop",
    )


@dg.asset(
    name=DELIVERY,
    group_name=GROUP,
    kinds={"csv"},
    description=f"The CSV files of the package {PACKAGE}, as a supplier would deliver them. "
    "Run it with `corrected: false` first to see deep checks fail, then with `true`.",
)
def flight_data(config: DeliveryConfig) -> dg.MaterializeResult[None]:
    done = deliver(landing_folder(), corrected=config.corrected, flawed=config.flawed)
    state = hashlib.sha256()
    for name in sorted(done.rows):
        state.update((done.folder / name).read_bytes())
    return dg.MaterializeResult(
        data_version=dg.DataVersion(state.hexdigest()[:16]),
        metadata={
            "dagster/uri": str(done.folder),
            "corrected": done.corrected,
            "rows": sum(done.rows.values()),
            "files": table(
                ["file", "rows", "changed"],
                [(name, rows, name in done.changed) for name, rows in done.rows.items()],
            ),
            "files_changed": len(done.changed),
        },
    )


# -- the types ------------------------------------------------------------------------------------


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
            "storage": STORAGE,
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


# -- the audit ------------------------------------------------------------------------------------


@dg.asset_check(
    asset="flight",
    name=DESTINATIONS_KNOWN,
    blocking=True,
    description="Every flight goes to an airport that is there. Stops a run that is published "
    "audited; of others it only warns, as everybody sees their rows already.",
    required_resource_keys={STORAGE},
)
def destinations_known(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    ontology: OntologyResource = getattr(context.resources, STORAGE)
    with report_failures(context.instance), open_session(ontology) as session:
        audited = session.branch != ontology.home
        lost = session.sql(
            "select instance_key, right_key from Flight "
            "where right_key not in (select faa from Airport) order by instance_key"
        ).collect()
    shown = ", ".join(f"{row['instance_key']} to {row['right_key']}" for row in lost[:3])
    return dg.AssetCheckResult(
        passed=not lost,
        severity=dg.AssetCheckSeverity.ERROR if audited else dg.AssetCheckSeverity.WARN,
        description=f"{counted(len(lost), 'flight')} to airports that are not there: {shown}"
        if lost
        else None,
        metadata={"flights_to_nowhere": len(lost)},
    )


CHECKS = (destinations_known,)


# -- alarms ---------------------------------------------------------------------------------------


def _alarm(
    name: str,
    find: Callable[[Session], Sequence[Event]],
    deps: Sequence[str],
    sends: type[Event],
    description: str,
) -> dg.AssetsDefinition:
    @dg.asset(
        name=name,
        group_name=GROUP,
        deps=list(deps),
        kinds={"duckdb"},
        metadata=emits(sends, storage=STORAGE),
        pool=EVENTS_POOL,
        automation_condition=on_new_data(),
        description=description,
    )
    def alarm(
        context: dg.AssetExecutionContext, flights: OntologyResource
    ) -> dg.MaterializeResult[None]:
        with report_failures(context.instance), open_session(flights) as session:
            events = find(session)
            told = demo_events.tell(session, name, events)
            requests = session.storage_info().get("requests", {})
        context.log.info("%d found, %d events sent", told.found, told.sent)
        metadata: dict[str, Any] = {
            "found": told.found,
            "events_sent": told.sent,
            **request_metadata(requests),
            "events": table(
                ["id", *_fields(events)],
                [(event.id, *event.model_dump().values()) for event in events],
            ),
        }
        if told.commit_id is not None:
            metadata["commit"] = told.commit_id
        version = hashlib.sha256("\n".join(sorted(event.id for event in events)).encode())
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version.hexdigest()[:16]), metadata=metadata
        )

    return alarm


def _fields(events: Sequence[Event]) -> list[str]:
    return list(events[0].model_dump()) if events else []


severe_delays = _alarm(
    "severe_delays",
    demo_events.severe_delays,
    ["flight"],
    SevereDelay,
    "Flights that left more than ten hours late. Each is told once, as a SevereDelay.",
)
disrupted_days = _alarm(
    "disrupted_days",
    demo_events.disrupted_days,
    ["flight", "weather_observation"],
    DisruptedDay,
    "Days on which a quarter of an airport's flights left over an hour late, as a DisruptedDay.",
)
airport_notices = _alarm(
    "airport_notices",
    demo_events.notices,
    ["flight", "airport"],
    AirportNotice,
    "A notice about an airport that nobody knows: its handler fails until the airport is there.",
)


# -- the report -----------------------------------------------------------------------------------


def punctuality(view: View) -> list[dict[str, Any]]:
    """How late each airline's flights left on average, in minutes; the latest first."""
    names = {airline.carrier: airline.name for airline in view.query().entities(Airline).collect()}
    grouped = (
        view.query()
        .relations(Flight)
        .where(Flight.departure_delay.is_not_null())
        .group_by(Flight.carrier)
        .agg(departed=count(), late=avg(Flight.departure_delay))
    )
    rows = sorted(grouped.to_pylist(), key=lambda row: -row["late"])
    most = max((row["late"] for row in rows), default=0.0) or 1.0
    return [
        {
            "airline": names.get(row["carrier"], row["carrier"]),
            "flights": row["departed"],
            "average_delay": row["late"],
            "chart": "█" * max(0, round(_BAR * row["late"] / most)),
        }
        for row in rows
    ]


airline_punctuality = query_asset(
    "airline_punctuality",
    punctuality,
    deps=["flight", "airline"],
    storage=STORAGE,
    group=GROUP,
    description="How late each airline's flights left, as of any commit.",
    plot={"worst_average_delay": "average_delay"},
)


def open_session(ontology: OntologyResource) -> Session:
    return ontology.session(entity_types=ENTITIES, relation_types=RELATIONS)


ASSETS = (flight_data, severe_delays, disrupted_days, airport_notices, airline_punctuality)
