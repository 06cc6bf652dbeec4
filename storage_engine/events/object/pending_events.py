"""Which events there are for some handlers to look at, found with few requests.

Event keys sort by time, so a handler lists from its watermark on: up to there everything is
finished. Clocks differ and writes arrive late, so the watermark stays HOLD_BACK behind the store's
clock, and events beyond it that are finished are kept by name. Events of commits are also found by
walking the log from the last commit looked at, whatever their time; one whose object is missing is
projected then. What is kept between workers is advisory: without it, more is read.
"""

from __future__ import annotations

import logging
import random
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import Head, from_json
from storage_engine.errors import IntegrityError, StorageBackendError
from storage_engine.events.object.peers import EventsOfOthers, Peers
from storage_engine.events.object.positions import (
    Position,
    Positions,
    project,
    read_projected,
    sent_events,
    write_projected,
)
from storage_engine.events.protocol import Subscription
from storage_engine.events.records import Envelope, is_for, parse_envelope
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.repository.object.outbox import HOLD_BACK

log = logging.getLogger(__name__)

OUTBOX_INTERVAL = timedelta(seconds=30)
# With more than one page of events to look through, late arrivals are looked for this often.
SWEEP_INTERVAL = timedelta(seconds=10)
RECENT = timedelta(minutes=1)  # where a glance looks for the newest events
_ONE_PAGE = 900  # names taken from one listing: fewer than a store gives at once
_SWEPT = 10_000  # and less often when there are more than so many
_BACKLOG = 2_000  # names of events at hand, not yet read: enough, listing waits
_NAMED = 50_000  # finished events that a position names at most


@dataclass(slots=True, eq=False)
class PendingEvent:
    """An event, and the handlers that have yet to finish it."""

    key: str
    event_id: str
    open: set[str]
    passed: set[str]  # finished as far as a position can tell
    envelope: Envelope | None = None
    commit_id: int | None = None  # that sent it, if that is known
    queued: bool = False  # waits to be read
    owner: str | None = None  # the other worker that is to take it
    left_at: datetime | None = None  # to that worker
    passed_on: int = 0  # how often a worker that should have taken it did not
    claimed: bool = False  # by this worker, at some time
    offered: set[str] = field(default_factory=set)  # handlers whose turn it has become

    def __lt__(self, other: PendingEvent) -> bool:
        return self.key < other.key


@dataclass(frozen=True, slots=True)
class EventFetches:
    """Events that are being read."""

    events: Sequence[PendingEvent]
    fetches: Sequence[Callable[[], Envelope | None]]


@dataclass(slots=True)
class _Walk:
    """Names listed one after the other, over several looks where there are many."""

    at: str  # the last name seen
    started: datetime
    at_once: bool = False  # all of it in one look, as far as there is room


@dataclass(slots=True)
class _Listing:
    """What is known of the names, and which walks over them are under way."""

    sweep: _Walk | None = None  # from the floor on, for late arrivals
    recent: _Walk | None = None  # from the tail on
    swept_at: datetime | None = None  # when the last finished sweep began
    tail: str = ""  # every name up to here has been seen, late arrivals apart
    quiet: bool = False  # nothing new came at the tail
    turn: bool = False  # whose turn it is while all is quiet: the sweep's, else the tail's


@dataclass(slots=True)
class PendingEvents:
    """Those that some handlers have yet to finish, as far as they are known.

    Used by one thread at a time, except `finish`, which its owner guards.
    """

    store: ObjectStore
    chain: Chain
    namespace: str
    subscriptions: Sequence[Subscription]
    peers: Peers | None = None  # none: all events are ours
    events: dict[str, PendingEvent] = field(default_factory=dict)
    malformed: set[str] = field(default_factory=set)  # keys of objects that were set aside
    has_news: bool = False  # something was finished since the last exchange
    _positions: Positions = field(init=False)
    _others: EventsOfOthers = field(init=False)
    _unread: list[PendingEvent] = field(default_factory=list)
    _listing: _Listing = field(default_factory=_Listing)
    _walked: int | None = None
    _walked_path: str = ""  # the manifest of that commit
    _outbox_at: datetime | None = None
    _head: Head | None = None

    def __post_init__(self) -> None:
        self._positions = Positions(self.store, self.chain, self.namespace, self.subscriptions)
        self._others = EventsOfOthers(self.store, self.peers)

    @property
    def unread(self) -> int:
        return len(self._unread)

    @property
    def oldest_unread(self) -> datetime | None:
        """When the oldest event that is not yet read was sent, by its name."""
        return layout.event_moment(self._unread[0].key) if self._unread else None

    @property
    def unlisted(self) -> bool:
        """Whether a listing of all events has not come to its end."""
        sweep = self._listing.sweep
        return sweep is not None and sweep.at_once

    @property
    def head_commit(self) -> int:
        """The latest commit that is known to stand."""
        version = self.chain.known_head()
        return version.head.commit_id if version is not None else 0

    # -- finding ------------------------------------------------------------------------------

    def look(self, *, whole: bool = False) -> None:
        """Find events that have come since: one request when there are none, and every 30 s one
        for the log."""
        if not self._positions.is_open:
            self._open()
        self._list(whole)
        now = self.store.now()
        if self._outbox_at is None or now - self._outbox_at >= OUTBOX_INTERVAL:
            self._outbox_at = now
            self._walk()

    def glance(self) -> bool:
        """Find the oldest events and the newest, a page of names of each; whether these are all.
        The log is not looked at."""
        if not self._positions.is_open:
            self._open()
        now = self.store.now()
        if self._go_on(_Walk(self._positions.floor, now)):
            return True
        self._go_on(_Walk(self._place(now - RECENT), now))
        return False

    def glance_at_log(self) -> None:
        """Find events of commits as well that are not under `events/` yet, or not where they
        would be looked for."""
        if self._walked is None:
            self._walk(must_write=False)

    def read(self, count: int) -> list[PendingEvent]:
        """The oldest `count` events that are not yet read, those that concern nobody left out."""
        return self._read(self.begin_read(count))

    def read_some(self, count: int) -> list[PendingEvent]:
        """As `read`, but the oldest, the newest and, of those in between, any."""
        ends = max(count // 4, 1)
        middle = self._unread[ends:-ends]
        if len(self._unread) <= count or not middle:
            return self.read(count)
        taken = [*self._unread[:ends], *self._unread[-ends:]]
        taken += random.sample(middle, min(max(count - len(taken), 0), len(middle)))
        for event in taken:
            self._unread.remove(event)
        return self._read(EventFetches(taken, [partial(self._fetch, event) for event in taken]))

    def _read(self, reading: EventFetches) -> list[PendingEvent]:
        envelopes = self.store.parallel.gather_outcomes(reading.fetches)
        return self.end_read(reading, envelopes)

    def begin_read(self, count: int) -> EventFetches:
        """The same in two steps, for requests that go out together with others."""
        taken, self._unread = self._unread[:count], self._unread[count:]
        return EventFetches(taken, [partial(self._fetch, event) for event in taken])

    def end_read(
        self, reading: EventFetches, envelopes: Sequence[Envelope | BaseException | None]
    ) -> list[PendingEvent]:
        concerning: list[PendingEvent] = []
        failure: BaseException | None = None
        for event, envelope in zip(reading.events, envelopes, strict=True):
            event.queued = False
            if isinstance(envelope, BaseException):
                self._queue(event)
                failure = failure or envelope
            elif envelope is None:
                event.open.clear()
            else:
                event.envelope = envelope
                event.open -= {s.handler_id for s in self.subscriptions if not _wants(s, envelope)}
                self.has_news |= not event.open
                if event.open:
                    concerning.append(event)
        if failure is not None and not (concerning and isinstance(failure, StorageBackendError)):
            for event in concerning:
                self._queue(event)
            raise failure
        return concerning

    def finish(self, event: PendingEvent, handler_id: str) -> None:
        event.open.discard(handler_id)
        self.has_news = True
        if not event.open:
            event.envelope = None

    def _open(self) -> None:
        head = self._positions.open()
        if self._positions.commit_id(projected=0) == head.commit_id:
            self._walked, self._outbox_at = head.commit_id, self.store.now()
            self._walked_path = head.manifest_path or ""
        else:
            self._head = head

    def _fetch(self, event: PendingEvent) -> Envelope | None:
        """None for one that was cleaned up, or that is malformed."""
        if event.envelope is not None:
            return event.envelope
        try:
            raw = from_json(self.store.get(event.key).data, key=event.key)
            return parse_envelope(raw, self.namespace, key=event.key, name=event.event_id)
        except ObjectNotFound:
            return None
        except IntegrityError as error:
            self.set_aside(error)
            return None

    def set_aside(self, error: IntegrityError) -> None:
        """Something is malformed: say so once, count it, and go on with the others."""
        if error.key not in self.malformed:
            self.malformed.add(error.key)
            log.warning("set aside (`onto events show --malformed` lists such): %s", error)

    # -- with other workers -------------------------------------------------------------------

    @property
    def left(self) -> int:
        """How many are left to other workers."""
        return len(self._others)

    def share(self) -> None:
        """Divide anew, after workers have come or gone."""
        events = sorted([*self._unread, *self._others.take_all()])
        self._unread = []
        for event in events:
            event.queued = False
            self._queue(event)

    def overdue(self, patience: timedelta) -> bool:
        return bool(self._others.overdue(patience))

    def pass_on(self, patience: timedelta, *, probes: bool) -> None:
        """Let the next in line take what other workers did not get to for so long; `probes`: a few
        of them first."""
        if self._others.pass_on(patience, probed=probes):
            self.share()
        for event in self._others.probe(patience) if probes else ():
            self._queue(event)

    def help_others(self, count: int, patience: timedelta) -> None:
        for event in self._others.take_some(count, patience):
            self._queue(event)

    def exchange(self) -> None:
        """Keep what is finished here, and learn what other workers have finished."""
        if not self._positions.is_open:
            return
        self.has_news = False
        moved = self._save()
        self._positions.reload(
            [s.handler_id for s in self.subscriptions if s.handler_id not in moved]
        )
        learned = []
        for event in list(self.events.values()):
            for handler_id in list(event.open):
                position = self._positions.by_handler[handler_id]
                if event.event_id in position.finished or not _is_open(
                    event.key, event.commit_id, position
                ):
                    event.open.discard(handler_id)
                    learned.append(event)
            if not event.open:
                event.envelope = None
        self._others.note_finished(learned)
        self._unread = [event for event in self._unread if event.open]

    # -- by listing ---------------------------------------------------------------------------

    def _list(self, whole: bool) -> None:
        """One request where nothing new has come: what a page cannot hold is swept in turns."""
        if len(self._unread) >= _BACKLOG:
            return
        listing, now = self._listing, self.store.now()
        sweep = listing.sweep
        if whole and not (sweep is not None and sweep.at_once):
            sweep = listing.sweep = _Walk(self._positions.floor, now, at_once=True)
        elif sweep is None and self._sweep_is_due(now):
            sweep = listing.sweep = _Walk(
                self._positions.floor, now, at_once=listing.swept_at is None
            )
        if sweep is not None and (sweep.at_once or len(self.events) < _ONE_PAGE):
            self._sweep(sweep)  # comes by the tail as well
            return
        both = not listing.quiet
        listing.turn = sweep is not None and not listing.turn
        if sweep is not None and (both or listing.turn):
            self._sweep(sweep)
        if both or not listing.turn:
            before = len(self.events)
            recent = listing.recent = listing.recent or _Walk(listing.tail, now)
            if ended := self._go_on(recent):
                listing.recent = None
            listing.quiet = ended and len(self.events) == before

    def _sweep(self, sweep: _Walk) -> None:
        before = len(self.events)
        sweep.at = max(sweep.at, self._positions.floor)
        if self._go_on(sweep):
            self._listing.sweep = None
            self._listing.swept_at = sweep.started
        if len(self.events) != before:
            self._listing.quiet = False

    def _go_on(self, walk: _Walk) -> bool:
        """List from where the walk has come to; whether it reached the end."""
        prefix = layout.events(self.namespace)
        for listed, info in enumerate(self.store.list(prefix, start_after=walk.at), 1):
            if layout.is_beside_events(info.key):
                break  # our own objects: no events after them
            walk.at = info.key
            if info.key not in self.events:
                self._add_listed(info.key)
            if listed % _ONE_PAGE == 0 and not (walk.at_once and len(self._unread) < _BACKLOG):
                return False  # what the request has brought is used up
        # A producer whose clock is ahead must not hide what others send now.
        seen = min(walk.at, self._place(walk.started))
        self._listing.tail = max(self._listing.tail, seen)
        return True

    def _sweep_is_due(self, now: datetime) -> bool:
        swept = self._listing.swept_at
        if swept is None or len(self.events) < _ONE_PAGE:
            return True
        return now - swept >= SWEEP_INTERVAL * max(1.0, len(self.events) / _SWEPT)

    def _place(self, moment: datetime) -> str:
        """Where events of that time begin. The end is no letter or digit, see `just_before`."""
        return f"{layout.events(self.namespace)}{layout.event_time(moment)}_"

    def _add_listed(self, key: str) -> None:
        try:
            self._add(key, check_event_key(key))
        except IntegrityError as error:
            self.set_aside(error)

    def _add(
        self,
        key: str,
        name: str,
        commit_id: int | None = None,
        envelope: Envelope | None = None,
    ) -> None:
        event = PendingEvent(key, name, set(), set(), envelope, commit_id)
        for handler_id, position in self._positions.by_handler.items():
            if event.event_id in position.finished:
                continue
            if _is_open(key, commit_id, position):
                event.open.add(handler_id)
            else:
                event.passed.add(handler_id)
        self.events[key] = event
        if event.open:
            self._queue(event)

    def _queue(self, event: PendingEvent) -> None:
        if self._others.leave(event):
            return
        event.queued = True
        if not self._unread or self._unread[-1] < event:
            self._unread.append(event)
        else:
            insort(self._unread, event)

    # -- by the log ---------------------------------------------------------------------------

    def _walk(self, *, must_write: bool = True) -> None:
        """Look at the commits since: their events may be missing, or of any time."""
        if self._head is not None:
            head, self._head = self._head, None  # just read
        else:
            head = self.chain.read_head().head
        if self._walked is not None and (head.manifest_path or "") == self._walked_path:
            return
        if self._walked_path and not self.chain.has(head, self._walked_path):
            self._begin_anew()  # erased and begun anew, or put back to an older commit
        projected = read_projected(self.store, self.chain, self.namespace, head)
        floor = self._walked
        if floor is None:
            floor = self._positions.commit_id(projected.value)
        missing = []
        for link, manifest in reversed(state.carriers(self.chain, head, "events", above=floor)):
            for sent in sent_events(manifest, link.path, self.namespace):
                if isinstance(sent, IntegrityError):
                    self.set_aside(sent)
                    continue
                key, envelope = sent
                event, name = self.events.get(key), layout.segment(envelope["id"])
                if event is None:
                    if manifest.commit_id > projected.value:
                        missing.append((key, envelope))
                        self._add(key, name, manifest.commit_id, envelope)
                    else:
                        self._add(key, name, manifest.commit_id)  # gone if it was cleaned up
                else:
                    self._reopen(event, manifest.commit_id)
        try:
            project(self.store, self.namespace, missing)
            write_projected(self.store, self.chain, self.namespace, head, projected)
        except StorageBackendError as error:
            if must_write or error.retryable:
                raise  # who only looks, and may only read, has found them in the log
        self._walked, self._walked_path = head.commit_id, head.manifest_path or ""

    def _begin_anew(self) -> None:
        """The log is another one than before: what was finished is found out again."""
        log.warning(
            "the log of %s is another one now: all events are looked through", self.store.uri
        )
        self._walked = 0
        self._positions.forget()
        self.events = {key: event for key, event in self.events.items() if event.open}
        self._listing = _Listing()

    def _reopen(self, event: PendingEvent, commit_id: int) -> None:
        """Its key is below a watermark, but its commit came after."""
        event.commit_id = commit_id
        late = {
            h for h in event.passed if commit_id > (self._positions.by_handler[h].commit_id or 0)
        }
        if late:
            event.passed -= late
            event.open |= late
            if not event.queued:
                self._queue(event)

    # -- positions ----------------------------------------------------------------------------

    def save(self) -> None:
        """Move the watermarks up to what is finished, here and in the store."""
        self._save()

    def _save(self) -> Collection[str]:
        """The handlers whose positions have moved."""
        listing, horizon = self._listing, ""
        if not self._positions.is_open:
            return ()
        if listing.swept_at is not None and self._walked is not None:
            horizon = self._place(listing.swept_at - HOLD_BACK)
        elif self.peers is None or self.peers.alone:
            return ()
        ordered = sorted(self.events)
        moved = {}
        for subscription in self.subscriptions:
            position = self._advanced(subscription.handler_id, ordered, horizon)
            if position is not None:
                moved[subscription.handler_id] = position
        self._positions.save(moved)
        floor = self._positions.floor
        for key in ordered:
            if key > floor:
                break
            if not self.events[key].open:
                del self.events[key]
        return moved.keys()

    def _advanced(self, handler_id: str, ordered: Iterable[str], horizon: str) -> Position | None:
        position = self._positions.by_handler[handler_id]
        watermark, commit_id, blocked = position.watermark, self._walked, False
        finished: list[str] = []
        path = self._walked_path
        if not horizon:  # not everything was looked through: only say what is finished
            commit_id, finished = position.commit_id, list(position.finished)
            path = position.manifest_path
        for key in ordered:
            event = self.events[key]
            blocked = blocked or handler_id in event.open
            if key <= position.watermark:
                if handler_id in event.open and event.commit_id is not None:
                    # Only the walk over the log leads to it.
                    commit_id = min(commit_id or 0, event.commit_id - 1)
                continue
            if not blocked and key <= horizon:
                watermark = key
            elif handler_id not in event.open and len(finished) < _NAMED:
                finished.append(event.event_id)
        if not blocked:
            watermark = max(watermark, horizon)
        moved = replace(
            position,
            watermark=watermark,
            commit_id=commit_id,
            finished=frozenset(finished),
            manifest_path=path,
        )
        return moved if moved != position else None


def _is_open(key: str, commit_id: int | None, position: Position) -> bool:
    """Whether an event is beyond what a position says is finished, its names apart."""
    return key > position.watermark or (
        commit_id is not None and commit_id > (position.commit_id or 0)
    )


def _wants(subscription: Subscription, envelope: Envelope) -> bool:
    subscribed = envelope["type"] in subscription.event_types
    return subscribed and is_for(envelope, subscription.handler_id)


def check_event_key(key: str) -> str:
    """The name of the event whose key it is."""
    name = layout.event_name(key)
    if name is None:
        message = f"{key} is not a valid event: its name is not {{time}}_{{id}}.json"
        raise IntegrityError(message, key=key)
    return name
