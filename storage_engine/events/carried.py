"""What of a bus goes along when its storage is copied: events that are not done, and how far they
are.

An event is done when every handler that is known to take its type has finished it; one that nobody
has claimed yet is not. What a handler has finished stays finished in the copy, so that it is not
run again; what it only held is open again, as its worker does not work there. Dead letters go with
the claims that died.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from storage_engine.commitlog.records import parse_timestamp
from storage_engine.events.protocol import DeadLetter
from storage_engine.events.records import TARGET, ClaimRecord, Envelope


@dataclass(frozen=True, slots=True)
class CarriedEvent:
    """An event with the claims that have ended. `enqueued_at`: its place in the order of arrival;
    `letters`: of handlers that gave it up. One that is `done` is only told of where an earlier
    copy has it still open; one that is `gone` was cleaned up, and left its letters."""

    envelope: Envelope
    enqueued_at: datetime
    finished: tuple[ClaimRecord, ...] = ()
    letters: tuple[DeadLetter, ...] = ()
    done: bool = False
    gone: bool = False

    @property
    def name(self) -> tuple[str, str]:
        return self.envelope["namespace"], self.envelope["id"]

    @property
    def pending(self) -> bool:
        return not (self.done or self.gone)


Handlers = Mapping[str, frozenset[str]]  # by type of event: who takes it


def handlers_of(claims: Iterable[tuple[str, str]]) -> Handlers:
    """From the types of events and the handlers that have claimed some."""
    handlers: dict[str, set[str]] = {}
    for event_type, handler_id in claims:
        handlers.setdefault(event_type, set()).add(handler_id)
    return {event_type: frozenset(ids) for event_type, ids in handlers.items()}


def judged(events: Iterable[CarriedEvent], handlers: Handlers) -> Iterator[CarriedEvent]:
    """Events of a namespace, with those marked that are done."""
    for event in events:
        target = event.envelope.get(TARGET)
        takers: Sequence[str] = (
            [target] if target is not None else sorted(handlers.get(event.envelope["type"], ()))
        )
        finished = {record.handler_id for record in event.finished}
        done = bool(takers) and finished.issuperset(takers) and not event.letters
        yield replace(event, done=done)


def left_letters(
    letters: Mapping[str, Sequence[DeadLetter]], events: Iterable[CarriedEvent]
) -> Iterator[CarriedEvent]:
    """Of a namespace, the dead letters by event whose events have been cleaned up."""
    there = {event.envelope["id"] for event in events}
    for event_id, left in letters.items():
        if event_id not in there:
            first = left[0]
            named = {"namespace": first.namespace, "id": event_id, "type": first.event_type}
            moment = parse_timestamp(first.failed_at)
            yield CarriedEvent(first.event or named, moment, letters=tuple(left), gone=True)
