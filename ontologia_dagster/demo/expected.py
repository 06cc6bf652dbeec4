"""What the demo must come to, computed from the package's files by other means than the demo's.

Arrow reads and counts here, where the demo reads with Spark, stores in the ontology and asks it:
a figure that both agree on went through all of it unharmed. No figure is written down.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from ontologia_dagster.demo.ontology import HOUR_LATE, SEVERE_MINUTES, disrupted
from ontologia_dagster.demo.source import NOT_MIDNIGHT, NULL, SAME_MAKER, TIMES, text_of

_FLIGHT = ("year", "month", "day", "carrier", "flight", "origin", "dest")


@dataclass(frozen=True)
class Expected:
    """Figures by name; `first` are those of the first pass, `then` those after corrections."""

    airlines: int
    airports_first: int
    airports_then: int
    planes_first: int
    planes_then: int
    weather: int
    flights: int
    flights_by_month: dict[str, int]
    operates: int
    observed_at: int
    flights_to_unknown_airports: int
    unknown_airports: tuple[str, ...]
    unknown_planes: int
    makers_unified: int
    makers_first: dict[str, int]
    times_mended: int
    severe_delays: int
    disrupted_days: int


def expected() -> Expected:
    """Computed from the source's files as they are."""
    airlines, airports, planes, weather, flights = (
        _table(name) for name in ("airlines", "airports", "planes", "weather", "flights")
    )
    to_unknown = flights.filter(_not_in(flights["dest"], airports["faa"]))
    unknown_airports = sorted(pc.unique(to_unknown["dest"]).to_pylist())
    flown = flights.filter(pc.is_valid(flights["tailnum"]))
    unknown = pc.unique(flown.filter(_not_in(flown["tailnum"], planes["tailnum"]))["tailnum"])
    makers = _counts(planes, "manufacturer")
    return Expected(
        airlines=_distinct(airlines, "carrier"),
        airports_first=_distinct(airports, "faa"),
        airports_then=_distinct(airports, "faa") + len(unknown_airports),
        planes_first=_distinct(planes, "tailnum"),
        planes_then=_distinct(planes, "tailnum") + len(unknown),
        weather=_distinct(weather, "origin", "time_hour"),
        flights=_distinct(flights, *_FLIGHT),
        flights_by_month=_by_month(flights),
        operates=_distinct(flown, "carrier", "tailnum"),
        observed_at=_distinct(weather, "origin", "time_hour"),
        flights_to_unknown_airports=to_unknown.num_rows,
        unknown_airports=tuple(unknown_airports),
        unknown_planes=len(unknown),
        makers_unified=sum(makers.get(name, 0) for name in SAME_MAKER),
        makers_first=makers,
        times_mended=_any_time_is(flights, int(NOT_MIDNIGHT)),
        severe_delays=_count(pc.greater(flights["dep_delay"], SEVERE_MINUTES)),
        disrupted_days=_disrupted_days(flights),
    )


def _table(name: str) -> pa.Table:
    return pcsv.read_csv(
        io.BytesIO(text_of(name).encode()),
        convert_options=pcsv.ConvertOptions(null_values=[NULL], strings_can_be_null=True),
    )


def _distinct(table: pa.Table, *columns: str) -> int:
    return int(table.group_by(list(columns)).aggregate([]).num_rows)


def _counts(table: pa.Table, column: str) -> dict[str, int]:
    counted = table.group_by(column).aggregate([(column, "count")]).to_pylist()
    return {row[column]: row[f"{column}_count"] for row in counted}


def _by_month(flights: pa.Table) -> dict[str, int]:
    months = flights.group_by(["year", "month"]).aggregate([("year", "count")]).to_pylist()
    return {f"{row['year']}-{row['month']:02}-01": row["year_count"] for row in months}


def _not_in(values: pa.ChunkedArray, members: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.invert(pc.is_in(values, value_set=members))


def _count(mask: pa.ChunkedArray) -> int:
    return int(pc.sum(mask).as_py() or 0)


def _any_time_is(flights: pa.Table, time: int) -> int:
    masks = [pc.fill_null(pc.equal(flights[name], time), False) for name in TIMES]
    return _count(pc.or_(*masks))


def _disrupted_days(flights: pa.Table) -> int:
    late = pc.fill_null(pc.greater(flights["dep_delay"], HOUR_LATE), False)
    counted = (
        flights.append_column("late", pc.cast(late, pa.int64()))
        .group_by(["origin", "year", "month", "day"])
        .aggregate([("late", "sum"), ("late", "count")])
        .to_pylist()
    )
    return sum(disrupted(row["late_count"], row["late_sum"]) for row in counted)
