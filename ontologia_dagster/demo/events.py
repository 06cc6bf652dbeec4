"""The demo's events: trouble is found in what is stored, told once, and handled.

The events of one kind go out with one commit, under an idempotency key that names exactly these
events: as long as the same troubles are found, nothing is sent again. When others are found, only
those without an incident or disruption yet are sent; ids follow from what they are about, so that
an event that is still on the bus is not handled twice either. Each handler's commit is also its
ack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ontologia_dagster.demo.ontology import (
    HOUR_LATE,
    SEVERE_MINUTES,
    Airport,
    AirportNotice,
    DisruptedDay,
    Disruption,
    Flight,
    Incident,
    SevereDelay,
    WeatherObservation,
    disrupted,
)
from storage_engine import Event, HandlerContext, Session, on_event

APP = "demo/alarms"
SEVERE_DELAY = "severe_delay"
DISRUPTED_DAY = "disrupted_day"
NOTICE = "notice"


# -- found and told -------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlarmResult:
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
    airports = "select faa from Airport"
    named = session.sql(
        f"select min(right_key) as faa from Flight where right_key not in ({airports})"
    ).collect()
    faa = named[0]["faa"]
    if faa is None:
        return []
    return [AirportNotice(id=f"{NOTICE}/{faa}", faa=faa, remark="flights go here")]


def tell(session: Session, kind: str, events: Sequence[Event]) -> AlarmResult:
    """Send what was not told before, with one commit that says so."""
    ids = sorted(event.id for event in events)
    version = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16]
    handled = handled_ids(session)
    new = [event for event in events if event.id not in handled]
    if not new:
        return AlarmResult(len(events), 0, None)
    commit_id = session.commit(
        event=new,
        idempotency=(f"{APP}/{kind}", version),
        meta={"alarm": kind, "events": str(len(new))},
    )
    done = session.last_commit
    repeated = done is None or done.already_applied
    return AlarmResult(len(events), 0 if repeated else len(new), commit_id)


def handled_ids(session: Session) -> set[str]:
    """Ids of events that incidents and disruptions came of."""
    incidents = session.query().entities(Incident).collect()
    days = session.query().entities(Disruption).collect()
    return {incident.id for incident in incidents} | {f"{DISRUPTED_DAY}/{day.id}" for day in days}


# -- handled --------------------------------------------------------------------------------------


@on_event(SevereDelay, id="demo.record_incident", writes=[Incident], emits=[])
def record_incident(ctx: HandlerContext[SevereDelay]) -> None:
    """An incident for each flight that left far too late."""
    event = ctx.event
    hours, minutes = divmod(event.minutes, 60)
    ctx.ensure(
        Incident(
            id=f"{SEVERE_DELAY}/{event.flight}/{event.origin}/{event.destination}",
            kind=SEVERE_DELAY,
            subject=event.flight,
            delay_minutes=event.minutes,
            remark=f"{event.origin} to {event.destination}, {hours} h {minutes:02} min late",
        )
    )
    ctx.commit(meta={"handler": record_incident.id})


@on_event(DisruptedDay, id="demo.record_disruption", writes=[Disruption], emits=[])
def record_disruption(ctx: HandlerContext[DisruptedDay]) -> None:
    """With the strongest gust that was measured at the airport on that day (UTC)."""
    event = ctx.event
    ctx.ensure(
        Disruption(
            id=f"{event.origin}/{event.day.isoformat()}",
            origin=event.origin,
            day=event.day,
            flights=event.flights,
            late=event.late,
            worst_gust_mph=_worst_gust(ctx, event),
        )
    )
    ctx.commit(meta={"handler": record_disruption.id})


def _worst_gust(ctx: HandlerContext[DisruptedDay], event: DisruptedDay) -> float | None:
    that_day = WeatherObservation.id.startswith(f"{event.origin}/{event.day.isoformat()}")
    weather = ctx.session.query().entities(WeatherObservation).where(that_day)
    gust: float | None = weather.max(WeatherObservation.gust_mph)
    return gust


@on_event(AirportNotice, id="demo.file_notice", writes=[Incident], emits=[])
def file_notice(ctx: HandlerContext[AirportNotice]) -> None:
    """Fails as long as the airport is not known, so that nothing is filed under no airport."""
    event = ctx.event
    airport = ctx.session.query().entities(Airport).where(Airport.faa == event.faa).first()
    if airport is None:
        raise LookupError(f"airport {event.faa} is not in the ontology")
    ctx.ensure(
        Incident(id=f"{NOTICE}/{event.faa}", kind=NOTICE, subject=event.faa, remark=event.remark)
    )
    ctx.commit(meta={"handler": file_notice.id})


HANDLERS = (record_incident, record_disruption, file_notice)
