"""Events by the clock: each due time of a schedule fires once, however many workers run it.

The event of a due time has an id and a key that follow from the schedule and the time, and its
object is only ever created. A worker that comes late, or restarts, fires what was due within the
last minute; what is older is missed, as by any cron.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from storage_engine.errors import ConfigurationError
from storage_engine.events.envelopes import check_id, derived_id
from storage_engine.events.protocol import EventStore
from storage_engine.events.records import Envelope
from storage_engine.model.canonical import dumps
from storage_engine.model.declarations import Event

log = logging.getLogger(__name__)

GRACE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Send an event at the times of a cron expression.

        Schedule(event=CloseDay(), cron="0 18 * * mon-fri", timezone="Europe/Vienna")

    `event` is an event whose fields each firing has, an Event class without required fields, or a
    function from the due time to an event; then a `name` is needed. Workers that share a
    schedule's name share its firings.
    """

    event: Event | type[Event] | Callable[[datetime], Event]
    cron: str
    timezone: str = "UTC"
    name: str = ""
    _zone: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_cron(self.cron)
        try:
            zone = ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, TypeError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"schedule: the time zone {self.timezone!r} is unknown; give one such as "
                "'Europe/Vienna'"
            ) from error
        object.__setattr__(self, "_zone", zone)
        try:
            self.next_due(datetime.now(UTC))
        except ValueError:
            raise ConfigurationError(
                f"schedule: {self.cron!r} is never due: no year has such a day"
            ) from None
        template = isinstance(self.event, Event)
        declared = isinstance(self.event, type) and issubclass(self.event, Event)
        if not (template or declared or callable(self.event)):
            raise ConfigurationError(
                f"schedule: event takes an Event, an Event class or a function, not {self.event!r}"
            )
        if not self.name:
            if not (template or declared):
                raise ConfigurationError("schedule: give a name when the event is a function")
            made = self._made(datetime.now(UTC)).envelope("")
            parts = (made["type"], dumps(made["payload"]), self.cron, self.timezone)
            object.__setattr__(self, "name", derived_id("schedule", *parts))

    def due_times(self, after: datetime, upto: datetime) -> list[datetime]:
        """The due times beyond `after` up to `upto`, in UTC."""
        moments: list[datetime] = []
        for due in self._times(after):
            if due > upto:
                break
            moments.append(due)
        return moments

    def next_due(self, after: datetime) -> datetime:
        return next(self._times(after))

    def _times(self, after: datetime) -> Iterator[datetime]:
        """As cron has it where the clock is changed. What is due at a time of day is due once:
        when that comes for the first time, or where the gap ends in which it would have been.
        What goes by every hour or minute is due whenever the clock shows it."""
        from croniter import croniter

        once = _is_by_time_of_day(self.cron)
        times = croniter(self.cron, after.astimezone(self._zone))
        last = after
        while True:
            due = times.get_next(datetime).astimezone(UTC)
            local = due.astimezone(self._zone)
            if due > last and (
                not local.fold if once else croniter.match(self.cron, local.replace(tzinfo=None))
            ):
                last = due
                yield due

    def firing(self, due: datetime, namespace: str) -> Envelope:
        """The event of a due time: the same one on every worker."""
        event_id = derived_id("firing", namespace, self.name, due.isoformat())
        envelope = self._made(due).envelope(namespace)
        return check_id(
            {
                **envelope,
                "id": event_id,
                "created_at": due.isoformat(timespec="microseconds"),
                "root_event_id": event_id,
                "chain_depth": 0,
            }
        )

    def _made(self, due: datetime) -> Event:
        if isinstance(self.event, Event):
            return self.event
        made = self.event() if isinstance(self.event, type) else self.event(due)
        if not isinstance(made, Event):
            raise ConfigurationError(f"schedule {self.name}: {made!r} is no Event")
        return made


def _is_by_time_of_day(cron: str) -> bool:
    """Whether it names hours and minutes, rather than every so many of them."""
    minute, *rest = cron.split()
    if not rest:
        return minute.lower() != "@hourly"
    return not (minute.startswith("*") or rest[0].startswith("*"))


def _check_cron(cron: Any) -> None:
    """Five fields; the library would take a sixth as seconds, and a seventh as years."""
    from croniter import croniter

    fields = len(cron.split()) if isinstance(cron, str) else 0
    if fields > 1 and fields != 5:
        raise ConfigurationError(
            f"schedule: {cron!r} is no cron expression: it has {fields} fields, and five are "
            "expected (minute, hour, day of the month, month, day of the week)"
        )
    if fields and any(re.match(r"r(\W|$)", part) for part in re.split(r"[\s,]+", cron.lower())):
        raise ConfigurationError(
            f"schedule: {cron!r} has R for a random time, which would be another one at every look"
        )
    if not fields or not croniter.is_valid(cron):
        raise ConfigurationError(
            f"schedule: {cron!r} is no cron expression; five fields are expected, such as "
            "'0 * * * *' for every full hour"
        )


class Scheduler:
    """Fires the schedules of one worker. Not for use by two threads at once."""

    def __init__(self, store: EventStore, namespace: str, schedules: Sequence[Schedule]) -> None:
        self._store = store
        self._namespace = namespace
        self._schedules = schedules
        self._fired_upto: datetime | None = None

    def fire(self) -> int:
        """Send what has become due; how many events this worker was the one to send."""
        if not self._schedules:
            return 0
        now = self._store.now()
        after = self._fired_upto or now - GRACE
        if after < now - GRACE:
            log.warning(
                "schedules were not looked at from %s to %s: due times in between are missed",
                after.isoformat(),
                (now - GRACE).isoformat(),
            )
            after = now - GRACE
        sent = 0
        for schedule in self._schedules:
            for due in schedule.due_times(after, now):
                sent += self._store.enqueue_once(schedule.firing(due, self._namespace))
        self._fired_upto = now
        return sent

    def next_due(self) -> datetime | None:
        if not self._schedules:
            return None
        after = self._fired_upto or self._store.now()
        return min(schedule.next_due(after) for schedule in self._schedules)
