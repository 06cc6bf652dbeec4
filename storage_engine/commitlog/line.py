"""The line before the write lock: tickets of those who wait, first come first.

Who finds the lock taken leaves a ticket: a small object, created once, whose name sorts by the
store's time and tells all that a holder has to know of who waits (see `layout.Ticket`), so that one
listing shows the whole line. A ticket goes when its owner gets the lock or gives up. One that a
dead process has left goes when a holder comes upon it: known dead on the same machine, elsewhere
when its patience is over, or when an offer to it was not accepted.

The line makes waiting fair and short; it decides nothing. Whoever has a lease holds the lock, and
a writer that knows of no line (an older version) waits beside it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.layout import Ticket
from storage_engine.commitlog.records import timestamp, to_json
from storage_engine.errors import PROCESS_FACTS, OntologiaError
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectStore,
    ObjectStoreError,
    OutcomeUnknown,
    PreconditionFailed,
)
from storage_engine.process import identity, is_gone

log = logging.getLogger(__name__)

_SLACK = timedelta(seconds=2)  # a waiter may be that late to see that its patience is over
_LONGEST = timedelta(days=1)
_ON_A_MACHINE = ("host", "boot_id", "pid_namespace")  # what processes share that see one another


@dataclass(slots=True)
class Place:
    """A ticket of ours. `standing` until it was taken away."""

    ticket: Ticket
    etag: str = ""
    standing: bool = False


class TicketLine:
    """Those who wait for one lock."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def place(self, token: str, *, owner_id: str, patience_ms: int) -> Place:
        """Where somebody who comes now would stand."""
        now = self._store.now()
        until = now + min(timedelta(milliseconds=patience_ms), _LONGEST) + _SLACK
        ours = identity()
        is_telling = _is_telling(ours)
        ticket = Ticket(
            since=now,
            until=until,
            token=token,
            machine=_machine(ours) if is_telling else "",
            pid=ours["pid"] if is_telling else 0,
            started=ours["pid_started"] if is_telling else 0,
            owner=owner_id,
        )
        return Place(ticket)

    def join(self, place: Place, *, owner_id: str, holder: Mapping[str, Any]) -> None:
        """Leave the ticket, unless it is there: again, where somebody took it for a dead one's.
        Where the store does not take it, one waits without: never raises."""
        ticket = place.ticket
        body = {
            "owner_id": owner_id,
            "token": ticket.token,
            "since": timestamp(ticket.since),
            "expires_at": timestamp(ticket.until),
            "holder": dict(holder),
        }
        key = layout.ticket(self._prefix, ticket)
        try:
            place.etag = self._store.put_if_absent(key, to_json(body), write_id=ticket.token)
        except PreconditionFailed:
            pass  # it is there
        except (ConditionalConflict, OutcomeUnknown, OntologiaError) as error:
            log.info("no ticket was left at the write lock: %s", error)
        finally:
            place.standing = True  # also where nobody answers: it may be there

    def leave(self, place: Place) -> None:
        """Take our ticket away. Never raises: one that stays is found dead."""
        if not place.standing:
            return
        key = layout.ticket(self._prefix, place.ticket)
        try:
            if place.etag:
                self._store.delete_if_match(key, place.etag)
            else:
                self._store.delete_many([key])
            place.standing = False
        except PreconditionFailed:
            place.standing = False
        except (ObjectStoreError, OntologiaError) as error:
            log.info("a ticket at the write lock stays: %s", error)

    def waiting(
        self, *, ours: str = "", without: Collection[str] = (), remove: bool = True
    ) -> list[Ticket]:
        """Who waits, in order, but for ourselves. Tickets of the dead, and of tokens in `without`,
        do not count, and are taken away (`remove`)."""
        now, here = self._store.now(), identity()
        tickets, dead = [], []
        for info in self._store.list(self._prefix):
            ticket = layout.parse_ticket(info.key, prefix=self._prefix)
            if ticket is None or ticket.token == ours:
                continue
            if ticket.token in without or ticket.until < now or gone(ticket, here):
                dead.append(info.key)
            else:
                tickets.append(ticket)
        if dead and remove:
            try:
                self._store.delete_many(dead)
            except OntologiaError as error:
                log.info("tickets of the dead stay: %s", error)
        return tickets

    def named(self, names: Iterable[str], *, ours: str) -> list[Ticket]:
        """Those who waited when somebody listed them, and may still do, but for ourselves."""
        now, here = self._store.now(), identity()
        read = (layout.parse_ticket(self._prefix + name, prefix=self._prefix) for name in names)
        return [
            ticket
            for ticket in read
            if ticket and ticket.token != ours and ticket.until >= now and not gone(ticket, here)
        ]

    def name(self, ticket: Ticket) -> str:
        return layout.ticket(self._prefix, ticket).removeprefix(self._prefix)

    def place_of(self, token: str) -> tuple[int, int] | None:
        """The place in line from 1, and how many wait."""
        tokens = tokens_of(self.waiting(remove=False))
        return (tokens.index(token) + 1, len(tokens)) if token in tokens else None


def holder_of(ticket: Ticket, ours: Mapping[str, Any]) -> dict[str, Any]:
    """The process that waits, as a lock object tells it: as far as its ticket's name does."""
    if not ticket.pid:
        return {}
    facts = {"pid": ticket.pid, "pid_started": ticket.started}
    if _is_telling(ours) and ticket.machine == _machine(ours):
        return {**{name: ours[name] for name in _ON_A_MACHINE}, **facts}
    return {"pid": ticket.pid}


def gone(ticket: Ticket, ours: Mapping[str, Any]) -> bool:
    """Whether its process has certainly ended, on this machine."""
    return is_gone(holder_of(ticket, ours))


def tokens_of(tickets: Sequence[Ticket]) -> tuple[str, ...]:
    return tuple(ticket.token for ticket in tickets)


def _is_telling(facts: Mapping[str, Any]) -> bool:
    return all(name in facts for name in PROCESS_FACTS)


def _machine(facts: Mapping[str, Any]) -> str:
    text = "|".join(str(facts.get(name)) for name in _ON_A_MACHINE)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
