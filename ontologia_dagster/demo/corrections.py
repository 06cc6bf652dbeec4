"""What the corrections did, read from the storage's history: it is true whichever run did it."""

from __future__ import annotations

from dataclasses import dataclass

from ontologia_dagster.demo.source import NOT_MIDNIGHT, SAME_MAKER
from ontologia_dagster.demo.types import Airport, Flight, Plane
from storage_engine import Session

_MIDNIGHT = int(NOT_MIDNIGHT)


@dataclass(frozen=True)
class Corrections:
    """Rows that are corrected, those that were ever stored wrong, and the earliest commit that
    corrected one of them (None: none is)."""

    airports_added: int
    planes_added: int
    makers_wrong: int
    makers_unified: int
    times_wrong: int
    times_mended: int
    first_commit: int | None


def corrections(session: Session) -> Corrections:
    airports = session.query().entities(Airport).where(Airport.stub.is_true()).collect()
    planes = session.query().entities(Plane).where(Plane.stub.is_true()).collect()
    makers = _makers_ever_wrong(session)
    unified = [one for one in makers if one.manufacturer not in SAME_MAKER]
    flights = _times_ever_wrong(session)
    mended = [one for one in flights if _MIDNIGHT not in (one.departure, one.arrival)]
    corrected: list[Airport | Plane | Flight] = [*airports, *planes, *unified, *mended]
    return Corrections(
        airports_added=len(airports),
        planes_added=len(planes),
        makers_wrong=len(makers),
        makers_unified=len(unified),
        times_wrong=len(flights),
        times_mended=len(mended),
        first_commit=min((one.meta().commit_id for one in corrected), default=None),
    )


def _makers_ever_wrong(session: Session) -> list[Plane]:
    """Planes whose maker has or had another name, as they are now."""
    planes = session.query().entities(Plane)
    found = planes.with_history().where(Plane.manufacturer.in_(list(SAME_MAKER))).collect()
    known = sorted({one.tailnum for one in found})
    return planes.where(Plane.tailnum.in_(known)).collect() if known else []


def _times_ever_wrong(session: Session) -> list[Flight]:
    """Flights that leave or come, or once did, at 24:00, as they are now."""
    flights = session.query().relations(Flight)
    wrong = (Flight.departure == _MIDNIGHT) | (Flight.arrival == _MIDNIGHT)
    found = flights.with_history().where(wrong).collect()
    known = {_identity(one) for one in found}
    names = sorted({one.flight for one in found})
    now = flights.where(Flight.flight.in_(names)).collect() if names else []
    return [one for one in now if _identity(one) in known]


def _identity(flight: Flight) -> tuple[str, str, str]:
    return flight.flight, flight.left_key, flight.right_key
