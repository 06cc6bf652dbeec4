"""What the bus keeps: events as they are stored, and claims, with the only ways in which they may
change.

A claim is one handler's hold on one event. Every transition is a pure function from one record
to the next, so that all event stores follow the same rules; a store adds that the record it
replaces is still the one that stands.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, Self

from storage_engine.commitlog.layout import segment
from storage_engine.commitlog.parsing import (
    LARGEST_INT,
    FieldError,
    optional_int,
    optional_text,
    parsing,
    require_int,
    require_object,
    require_text,
    require_time,
)
from storage_engine.commitlog.records import parse_timestamp, timestamp
from storage_engine.config import OntologiaConfig
from storage_engine.errors import ValidationError
from storage_engine.repository.protocol import Ack
from storage_engine.wording import counted

Envelope = Mapping[str, Any]

TARGET = "handler_id"  # in an envelope: only this handler may have it
MAX_NAME = 150  # characters of an id, as it stands in a key
JITTER_MS = 100
# Deliveries that nobody answered, after which an event is handled alone: whoever kills its
# process must not take others with it time and again.
SUSPECT_AFTER = 2


@dataclass(frozen=True, slots=True)
class Policy:
    """How long a claim holds, and when to try again or give up."""

    lease: timedelta
    max_attempts: int
    backoff_base_ms: int
    backoff_max_ms: int
    max_chain_depth: int
    session_ttl: timedelta

    @classmethod
    def of(cls, config: OntologiaConfig) -> Self:
        return cls(
            lease=timedelta(milliseconds=config.event_lease_ms),
            max_attempts=config.event_max_attempts,
            backoff_base_ms=config.event_backoff_base_ms,
            backoff_max_ms=config.event_backoff_max_ms,
            max_chain_depth=config.max_event_chain_depth,
            session_ttl=timedelta(milliseconds=config.session_ttl_ms),
        )

    def backoff(self, attempts: int) -> timedelta:
        longest = min(self.backoff_base_ms * 2 ** min(attempts, 60), self.backoff_max_ms)
        return timedelta(milliseconds=longest + random.uniform(0, JITTER_MS))


def require_moment(raw: Mapping[str, Any], field: str) -> datetime:
    """A point in time that can be reckoned with."""
    text = require_time(raw, field)
    try:
        moment = parse_timestamp(text)
    except OverflowError:  # the first or last hours of the calendar, in another zone
        raise FieldError(field, "a time within the calendar", text) from None
    if not 1 < moment.year < 9999:
        raise FieldError(field, "a time within the calendar", text)
    return moment


def _optional_moment(raw: Mapping[str, Any], field: str) -> datetime | None:
    return None if raw.get(field) is None else require_moment(raw, field)


# -- events ---------------------------------------------------------------------------------------


def check_id(envelope: Envelope) -> Envelope:
    """Ids become parts of object keys."""
    if len(segment(envelope["id"])) > MAX_NAME:
        raise ValidationError(
            f"{envelope['type']}: the id {envelope['id'][:40]!r}... is too long; it may have "
            f"{MAX_NAME} letters and digits (others count as three or more)",
            type=envelope["type"],
            identity=envelope["id"],
            field="id",
        )
    return envelope


def is_for(envelope: Envelope, handler_id: str) -> bool:
    return envelope.get(TARGET) in (None, handler_id)


def parse_envelope(
    raw: Mapping[str, Any], namespace: str, *, key: str, name: str | None = None
) -> Envelope:
    """An event as it is stored; `name` is the id in its key. Other implementations may leave out
    lineage and what the key says."""
    with parsing(key, "event"):
        event_id = require_text(raw, "id")
        quoted = segment(event_id)
        if name not in (None, event_id, quoted):
            raise FieldError("id", f"{name} as in its key", event_id)
        if len(quoted) > MAX_NAME:
            raise FieldError("id", f"a text of at most {MAX_NAME} letters", event_id)
        require_text(raw, "type")
        require_object(raw, "payload")
        require_moment(raw, "created_at")
        require_int(raw, "priority", minimum=-LARGEST_INT)
        optional_text(raw, TARGET)
        if optional_text(raw, "namespace", namespace) != namespace:
            raise FieldError("namespace", f"{namespace} as in its key", raw["namespace"])
        lineage = {
            "namespace": namespace,
            "root_event_id": optional_text(raw, "root_event_id") or event_id,
            "chain_depth": optional_int(raw, "chain_depth", 0),
        }
    return {**raw, **lineage}


# -- claims ---------------------------------------------------------------------------------------

_MOST = 2**31  # attempts or deliveries that anybody can have counted
_MOMENTS = ("claimed_at", "lease_until", "ack_at", "available_at", "dead_lettered_at")


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """A claim as it is stored. `token` is new per claim: who has it may ack, release, extend."""

    event_id: str
    handler_id: str
    session_id: str
    claimed_at: datetime
    lease_until: datetime
    available_at: datetime
    ack_at: datetime | None = None
    attempts: int = 0  # that failed
    last_error: str | None = None
    dead_lettered_at: datetime | None = None
    token: str = ""
    deliveries: int = 0  # claims that were not given back
    head_commit: int = 0  # when it was claimed: an ack in the log comes later
    redriven_as: str | None = None  # the event that carries on for a dead one

    @property
    def finished(self) -> bool:
        """Nothing is left to do, apart from the dead letter of a dead one."""
        return self.ack_at is not None or self.dead_lettered_at is not None

    @property
    def state(self) -> str:
        """What became of it, in a word or three."""
        if self.redriven_as is not None:
            return "redriven"
        if self.dead_lettered_at is not None:
            return "dead_lettered"
        if self.ack_at is not None:
            return "acked"
        return f"failed {counted(self.attempts, 'time')}" if self.attempts else "claimed"

    @property
    def not_before(self) -> datetime:
        """When it may be claimed again."""
        return max(self.lease_until, self.available_at)

    def is_suspect(self, policy: Policy) -> bool:
        """Whether its handler may be killing its process."""
        unanswered = self.deliveries - self.attempts
        return unanswered >= min(SUSPECT_AFTER, policy.max_attempts - 1) > 0

    def as_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = dict(zip(_NAMES, _VALUES(self), strict=True))
        for name in _MOMENTS:
            if values[name] is not None:
                values[name] = timestamp(values[name])
        return values

    @classmethod
    def parse(cls, raw: Mapping[str, Any], *, key: str) -> Self:
        """Fields that the specification does not have may be missing."""
        with parsing(key, "claim"):
            return cls(
                event_id=require_text(raw, "event_id"),
                handler_id=require_text(raw, "handler_id"),
                session_id=require_text(raw, "session_id"),
                claimed_at=require_moment(raw, "claimed_at"),
                lease_until=require_moment(raw, "lease_until"),
                available_at=require_moment(raw, "available_at"),
                ack_at=_optional_moment(raw, "ack_at"),
                attempts=optional_int(raw, "attempts", 0, maximum=_MOST),
                last_error=optional_text(raw, "last_error"),
                dead_lettered_at=_optional_moment(raw, "dead_lettered_at"),
                token=optional_text(raw, "token", ""),
                deliveries=optional_int(raw, "deliveries", 0, maximum=_MOST),
                head_commit=optional_int(raw, "head_commit", 0),
                redriven_as=optional_text(raw, "redriven_as"),
            )


_NAMES = tuple(f.name for f in fields(ClaimRecord))
_VALUES = attrgetter(*_NAMES)

# -- transitions ----------------------------------------------------------------------------------


def first_claim(
    event_id: str, handler_id: str, session_id: str, now: datetime, policy: Policy, head: int
) -> ClaimRecord:
    return ClaimRecord(
        event_id=event_id,
        handler_id=handler_id,
        session_id=session_id,
        claimed_at=now,
        lease_until=now + policy.lease,
        available_at=now,
        token=new_token(),
        deliveries=1,
        head_commit=head,
    )


def reclaim(
    record: ClaimRecord, session_id: str, now: datetime, policy: Policy, head: int
) -> ClaimRecord:
    """Take over a claim that was released, or whose lease ran out."""
    return replace(
        record,
        session_id=session_id,
        claimed_at=now,
        lease_until=now + policy.lease,
        ack_at=None,
        last_error=None,
        dead_lettered_at=None,
        token=new_token(),
        deliveries=max(record.deliveries, record.attempts) + 1,
        head_commit=head,
    )


def is_worn_out(record: ClaimRecord, policy: Policy) -> bool:
    """Delivered as often as is allowed, and never answered in the end."""
    return max(record.deliveries, record.attempts) >= policy.max_attempts


def extend(record: ClaimRecord, now: datetime, policy: Policy) -> ClaimRecord:
    return replace(record, lease_until=now + policy.lease)


def ack(record: ClaimRecord, now: datetime) -> ClaimRecord:
    return replace(record, ack_at=now)


def release(
    record: ClaimRecord, now: datetime, policy: Policy, error: str, *, retry: bool = True
) -> ClaimRecord:
    """After a failure: try again later, or dead at the limit (or at once, without `retry`)."""
    failed = replace(
        record,
        attempts=record.attempts + 1,
        last_error=error or "handler failure",
        lease_until=now,
    )
    if not retry or failed.attempts >= policy.max_attempts:
        return replace(failed, dead_lettered_at=now)
    return replace(failed, available_at=now + policy.backoff(failed.attempts))


def give_back(record: ClaimRecord, now: datetime) -> ClaimRecord:
    """Unhandled, as when the worker stops: this was no delivery."""
    return replace(record, lease_until=now, deliveries=max(record.deliveries - 1, 0))


def wear_out(record: ClaimRecord, now: datetime) -> ClaimRecord:
    """Dead, because it was delivered too often without an answer."""
    unanswered = max(record.deliveries - record.attempts, 0)
    error = f"delivered {record.deliveries} times, {unanswered} of them without an answer: its "
    return replace(
        record,
        last_error=f"{error}handler seems to end its process"
        + (f"; last error: {record.last_error}" if record.last_error else ""),
        lease_until=now,
        dead_lettered_at=now,
    )


def new_token() -> str:
    return secrets.token_hex(8)


# -- as a worker holds them -----------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Claim:
    """A claim that this worker holds, or held: look at `lost`."""

    namespace: str
    envelope: Envelope
    record: ClaimRecord
    suspect: bool = False  # handle it alone
    etag: str = ""
    lost: bool = False
    settled: bool = False  # acked, released or given back: no more to extend
    guard: threading.Lock = field(default_factory=threading.Lock, repr=False)
    entry: Any = None  # the store's own

    @property
    def event_id(self) -> str:
        return self.record.event_id

    @property
    def handler_id(self) -> str:
        return self.record.handler_id

    def as_ack(self) -> Ack:
        """For the commit that handles the event."""
        record = self.record
        return Ack(
            namespace=self.namespace,
            event_id=record.event_id,
            handler_id=record.handler_id,
            token=record.token,
            since=record.head_commit,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """A claim whose handler failed. Without `retry` it is dead at once."""

    claim: Claim
    error: str
    retry: bool = True


def released(
    failures: Sequence[Failure], now: datetime, policy: Policy
) -> Callable[[Claim], ClaimRecord]:
    """What becomes of the claims of these failures, whatever is known of them by then."""
    by_claim = {id(failure.claim): failure for failure in failures}

    def change(claim: Claim) -> ClaimRecord:
        failure = by_claim[id(claim)]
        return release(claim.record, now, policy, failure.error, retry=failure.retry)

    return change
