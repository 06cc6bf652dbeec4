"""Finds trouble in what is stored, and tells of it once.

The events of one kind go out with one commit, under an idempotency key that names exactly these
events: as long as the same troubles are found, nothing is sent again. When others are found, only
those without an incident or disruption yet are sent; ids follow from what they are about, so that
an event that is still on the bus is not handled twice either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ontologia_dagster.demo.handlers import NOTICE, SEVERE_DELAY
from ontologia_dagster.demo.rules import HOUR_LATE, SEVERE_MINUTES, disrupted
from ontologia_dagster.demo.types import (
    AirportNotice,
    DisruptedDay,
    Disruption,
    Flight,
    Incident,
    SevereDelay,
)
from storage_engine import Event, Session

APP = "demo/alarms"
DISRUPTED_DAY = "disrupted_day"


@dataclass(frozen=True)
class Sent:
    """What a look came to: troubles found, and how many of them were told of now."""

    found: int
    sent: int
    commit_id: int | None


def severe_delays(session: Session) -> list[SevereDelay]:
    query = session.query().relations(Flight).where(Flight.departure_delay > SEVERE_MINUTES)
    return [
        SevereDelay(
            id=f"{SEVERE_DELAY}/{flight.flight}/{flight.left_key}/{flight.right_key}",
            flight=flight.flight,
            origin=flight.left_key,
            destination=flight.right_key,
            minutes=int(flight.departure_delay or 0),
        )
        for flight in query.order_by(Flight.flight).collect()
    ]


def disrupted_days(session: Session) -> list[DisruptedDay]:
    counted = session.sql(
        "select left_key as origin, day, count(*) as flights, "
        "count(*) filter (departure_delay > $late) as late from Flight group by all order by all",
        {"late": HOUR_LATE},
    )
    return [
        DisruptedDay(id=f"{DISRUPTED_DAY}/{row['origin']}/{row['day'].isoformat()}", **row)
        for row in counted.collect()
        if disrupted(row["flights"], row["late"])
    ]


def notices(session: Session) -> list[AirportNotice]:
    """The planted one: about the first airport that flights name and nobody knows, so that its
    handler must fail. Once all are known there is none."""
    known = "select faa from Airport"
    named = session.sql(
        f"select min(right_key) as faa from Flight where right_key not in ({known})"
    ).collect()
    faa = named[0]["faa"]
    if faa is None:
        return []
    return [AirportNotice(id=f"{NOTICE}/{faa}", faa=faa, remark="flights go here")]


def tell(session: Session, kind: str, events: Sequence[Event]) -> Sent:
    """Send what was not told before, with one commit that says so."""
    ids = sorted(event.id for event in events)
    version = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16]
    handled = handled_ids(session)
    new = [event for event in events if event.id not in handled]
    if not new:
        return Sent(len(events), 0, None)
    commit_id = session.commit(
        event=new,
        idempotency=(f"{APP}/{kind}", version),
        meta={"alarm": kind, "events": str(len(new))},
    )
    done = session.last_commit
    repeated = done is None or done.already_applied
    return Sent(len(events), 0 if repeated else len(new), commit_id)


def handled_ids(session: Session) -> set[str]:
    """Ids of events that incidents and disruptions came of."""
    incidents = session.query().entities(Incident).collect()
    days = session.query().entities(Disruption).collect()
    return {one.id for one in incidents} | {f"{DISRUPTED_DAY}/{one.id}" for one in days}
