"""The lock object as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self, TypeVar

from storage_engine.commitlog.records import from_json, parse_timestamp, timestamp
from storage_engine.errors import IntegrityError
from storage_engine.objectstore.protocol import StoredObject

T = TypeVar("T")

_LONGEST_LEASE_MS = 1000 * 60 * 60 * 24 * 366


@dataclass(frozen=True, slots=True)
class LineNotes:
    """What the lock object tells of the line, where somebody handed it over.

    `waiting`: the tokens of those who waited behind the holder when somebody `listed` them, first
    come first; `tickets`: the names of their tickets, so that the holder need not list them again;
    `turn_ms`: how long a turn takes of late; `head_commit_id`: the commit that head named when this
    turn began, so that a later one is the holder's; `head` and `head_etag`: all of that head, as
    the holder before wrote it.
    """

    waiting: tuple[str, ...] = ()
    listed_at: datetime | None = None
    turn_ms: int = 0
    head_commit_id: int | None = None
    tickets: tuple[str, ...] = ()
    head: str = ""
    head_etag: str = ""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        commit_id = raw.get("head_commit_id")
        if commit_id is not None and type(commit_id) is not int:
            raise TypeError(f"{commit_id!r} is no commit id")
        listed_at = raw.get("listed_at")
        return cls(
            waiting=_texts(raw.get("waiting", [])),
            tickets=_texts(raw.get("tickets", [])),
            listed_at=parse_timestamp(_checked(listed_at, str)) if listed_at is not None else None,
            turn_ms=_milliseconds(raw.get("turn_ms", 0)),
            head_commit_id=commit_id,
            head=_checked(raw.get("head", ""), str),
            head_etag=_checked(raw.get("head_etag", ""), str),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "waiting": list(self.waiting),
            "tickets": list(self.tickets),
            "listed_at": timestamp(self.listed_at) if self.listed_at is not None else None,
            "turn_ms": self.turn_ms,
            "head_commit_id": self.head_commit_id,
            "head": self.head,
            "head_etag": self.head_etag,
        }


@dataclass(frozen=True, slots=True)
class LockState:
    """What the lock object says. `offered`: the holder before wrote it, for who was next in line;
    it is a lease like any other, of a second, and the next one's first renewal accepts it."""

    owner_id: str
    acquired_at: str
    expires_at: datetime
    lease_ttl_ms: int
    token: str
    holder: Mapping[str, Any]
    etag: str
    offered: bool = False
    line: LineNotes | None = None

    @classmethod
    def parse(cls, stored: StoredObject, *, key: str) -> Self:
        """Raises IntegrityError when it is no lock object: who wrote it cannot be waited for."""
        try:
            raw = from_json(stored.data, key=key)
            line = raw.get("line")
            return cls(
                owner_id=_checked(raw["owner_id"], str),
                acquired_at=_checked(raw["acquired_at"], str),
                expires_at=parse_timestamp(_checked(raw["expires_at"], str)),
                lease_ttl_ms=_milliseconds(raw["lease_ttl_ms"]),
                token=_checked(raw.get("token", ""), str),
                holder=_checked(raw.get("holder", {}), dict),
                etag=stored.etag,
                offered=_checked(raw.get("offered", False), bool),
                line=LineNotes.parse(_checked(line, dict)) if line is not None else None,
            )
        except (IntegrityError, KeyError, TypeError, ValueError, OverflowError) as error:
            problem = str(error) if isinstance(error, IntegrityError) else repr(error)
            raise IntegrityError(
                f"{key} is not a lock object ({problem}): nobody can tell whose it is and when it "
                "ends. If no writer is active, remove it with `onto lock break`",
                key=key,
            ) from error

    def held_for(self, now: datetime) -> float:
        """Seconds since it was acquired or offered; 0 where it does not say."""
        try:
            return max(0.0, (now - parse_timestamp(self.acquired_at)).total_seconds())
        except ValueError:
            return 0.0


def _checked(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_checked(text, str) for text in _checked(value, list))


def _milliseconds(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LONGEST_LEASE_MS:
        raise ValueError(f"{value!r} is no length of a lease")
    return value
