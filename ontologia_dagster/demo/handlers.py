"""What the demo does about its events. Each handler's commit is also its ack."""

from __future__ import annotations

from ontologia_dagster.demo.types import (
    Airport,
    AirportNotice,
    DisruptedDay,
    Disruption,
    Incident,
    SevereDelay,
    WeatherObservation,
)
from storage_engine import HandlerContext, on_event

SEVERE_DELAY = "severe_delay"
NOTICE = "notice"


@on_event(SevereDelay, id="demo.record_incident")
def record_incident(ctx: HandlerContext[SevereDelay]) -> None:
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


@on_event(DisruptedDay, id="demo.record_disruption")
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


@on_event(AirportNotice, id="demo.file_notice")
def file_notice(ctx: HandlerContext[AirportNotice]) -> None:
    """Fails as long as the airport is not known, so that nothing is filed under no airport."""
    event = ctx.event
    known = ctx.session.query().entities(Airport).where(Airport.faa == event.faa).first()
    if known is None:
        raise LookupError(f"airport {event.faa} is not in the ontology")
    ctx.ensure(
        Incident(id=f"{NOTICE}/{event.faa}", kind=NOTICE, subject=event.faa, remark=event.remark)
    )
    ctx.commit(meta={"handler": file_notice.id})


HANDLERS = (record_incident, record_disruption, file_notice)
