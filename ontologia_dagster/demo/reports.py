"""Questions to the demo's ontology, in typed Python, about now or any commit before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ontologia_dagster.demo.types import Airline, Flight
from storage_engine import Session
from storage_engine.maintenance.references import parse_reference
from storage_engine.query import avg, count

_BAR = 30


@dataclass(frozen=True)
class Punctuality:
    """Of one airline: flights that left, and how late on average, in minutes."""

    carrier: str
    name: str
    departed: int
    average_delay: float


def punctuality(session: Session, as_of: str | None = None) -> tuple[int, list[Punctuality]]:
    """Every airline by its average delay, the worst first; and the commit that this is of."""
    view = session.at(parse_reference(as_of) if as_of else session.snapshot)
    names = {one.carrier: one.name for one in view.query().entities(Airline).collect()}
    grouped = (
        view.query()
        .relations(Flight)
        .where(Flight.departure_delay.is_not_null())
        .group_by(Flight.carrier)
        .agg(departed=count(), late=avg(Flight.departure_delay))
    )
    found = [
        Punctuality(
            carrier=row["carrier"],
            name=names.get(row["carrier"], row["carrier"]),
            departed=row["departed"],
            average_delay=round(row["late"], 2),
        )
        for row in grouped.to_pylist()
    ]
    return view.commit_id, sorted(found, key=lambda row: -row.average_delay)


def as_markdown(rows: Sequence[Punctuality]) -> str:
    """A table with bars."""
    most = max((row.average_delay for row in rows), default=1.0)
    lines = ["| airline | flights | average delay, min | |", "| --- | ---: | ---: | --- |"]
    for row in rows:
        bar = "█" * max(0, round(_BAR * row.average_delay / most))
        lines.append(f"| {row.name} | {row.departed:,} | {row.average_delay:.1f} | {bar} |")
    return "\n".join(lines)
