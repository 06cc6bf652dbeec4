"""The event bus as it stands: namespaces, workers, events and dead letters."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from storage_engine.commitlog.records import timestamp
from storage_engine.events.protocol import (
    DeadLetter,
    EventInfo,
    EventStore,
    NamespaceInfo,
    WorkerSession,
    open_event_store,
)
from storage_engine.events.records import ClaimRecord
from storage_engine.explore.links import event_path, namespace_path
from storage_engine.explore.values import plain
from storage_engine.explore.view import NothingThere, Storage

EVENTS = 50
DEAD_LETTERS = 50
SESSIONS = 100
STATUSES = ("pending", "claimed", "acked", "dead_lettered")


def _store(storage: Storage) -> EventStore:
    return open_event_store(storage.repository, storage.config)


def namespace_infos(storage: Storage) -> list[NamespaceInfo]:
    return _store(storage).list_namespaces(storage.config.session_ttl_ms)


def namespaces(storage: Storage) -> list[dict[str, Any]]:
    return [
        {
            "namespace": info.namespace,
            "url": namespace_path(info.namespace),
            "events": info.events,
            "sessions": info.sessions,
            "dead_sessions": info.dead_sessions,
            "dead_letters": info.dead_letters,
            "oldest": _moment(info.oldest),
        }
        for info in namespace_infos(storage)
    ]


def namespace(storage: Storage, name: str, status: str | None, type: str | None) -> dict[str, Any]:
    """One namespace: its latest events, workers and dead letters."""
    store = _store(storage)
    if all(info["namespace"] != name for info in namespaces(storage)):
        raise NothingThere(
            f"there is no namespace {name}", "The page of events lists those that there are."
        )
    events = store.list_events(name, EVENTS + 1, status=status, type=type)
    letters = store.list_dead_letters(name, DEAD_LETTERS + 1)
    sessions = store.list_sessions(name, storage.config.session_ttl_ms)
    return {
        "namespace": name,
        "status": status,
        "event_type": type,
        "events": [_event(info, name) for info in events[:EVENTS]],
        "more_events": len(events) > EVENTS,
        "dead_letters": [_letter(letter) for letter in letters[:DEAD_LETTERS]],
        "more_dead_letters": len(letters) > DEAD_LETTERS,
        "dead_letters_by_handler": store.count_dead_letters(name),
        "sessions": [_session(session) for session in sessions[:SESSIONS]],
        "sessions_total": len(sessions),
    }


def event(storage: Storage, name: str, event_id: str) -> dict[str, Any]:
    """One event: what it says, where it comes from, and what its handlers made of it."""
    infos = _store(storage).inspect_event(event_id, name)
    if not infos:
        raise NothingThere(
            f"there is no event {event_id} in namespace {name}",
            "Old events are deleted by `onto events cleanup`.",
        )
    info = infos[0]
    envelope = {k: plain(v) for k, v in info.envelope.items()}
    root = envelope.get("root_event_id")
    return {
        **_event(info, name),
        "envelope": envelope,
        "payload": envelope.get("payload"),
        "root_url": event_path(name, str(root)) if root and root != event_id else None,
        "claims": [_claim(claim) for claim in info.claims],
        "malformed": [{"key": bad.key, "error": bad.error} for bad in info.malformed],
    }


def _event(info: EventInfo, namespace: str) -> dict[str, Any]:
    envelope = info.envelope
    return {
        "id": envelope["id"],
        "url": event_path(namespace, str(envelope["id"])),
        "namespace": namespace,
        "type": envelope["type"],
        "created_at": envelope["created_at"],
        "priority": envelope.get("priority"),
        "status": info.status,
        "handlers": [f"{claim.handler_id}: {claim.state}" for claim in info.claims],
    }


def _claim(claim: ClaimRecord) -> dict[str, Any]:
    moments = {"claimed_at": claim.claimed_at, "lease_until": claim.lease_until}
    return {
        "handler_id": claim.handler_id,
        "state": claim.state,
        "attempts": claim.attempts,
        "deliveries": claim.deliveries,
        "last_error": claim.last_error,
        **{name: _moment(value) for name, value in moments.items()},
    }


def _letter(letter: DeadLetter) -> dict[str, Any]:
    return {
        "event_id": letter.event_id,
        "url": event_path(letter.namespace, letter.event_id),
        "event_type": letter.event_type,
        "handler_id": letter.handler_id,
        "failed_at": letter.failed_at,
        "attempts": letter.attempts,
        "last_error": letter.last_error,
    }


def _session(session: WorkerSession) -> dict[str, Any]:
    about: Mapping[str, Any] = {k: v for k, v in session.metadata.items() if k != "process"}
    return {
        "session_id": session.session_id,
        "started_at": timestamp(session.started_at),
        "last_heartbeat": timestamp(session.last_heartbeat),
        "is_dead": session.is_dead,
        "malformed": session.malformed,
        "about": plain(about),
    }


def _moment(value: datetime | None) -> str | None:
    return None if value is None else timestamp(value.astimezone(UTC))
