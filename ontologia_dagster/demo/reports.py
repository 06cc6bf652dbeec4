"""Questions to the demo's ontology, in typed Python, about now or any commit before."""

from __future__ import annotations

from typing import Any

from ontologia_dagster.demo.types import Airline, Flight
from storage_engine import View
from storage_engine.query import avg, count

_BAR = 20


def punctuality(view: View) -> list[dict[str, Any]]:
    """How late each airline's flights left on average, in minutes; the latest first."""
    names = {one.carrier: one.name for one in view.query().entities(Airline).collect()}
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
