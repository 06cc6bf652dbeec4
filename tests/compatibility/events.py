"""What `onto events` says of a stored shop's bus, without what depends on when it is asked.

Only what every version tells is kept: later ones may tell more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

NAMESPACES = ("archive", "default")
_EVENT = ("id", "type", "payload", "priority", "root_event_id", "chain_depth", "status")
_CLAIM = ("handler_id", "attempts", "deliveries", "last_error")
_LETTER = ("event_id", "handler_id", "attempts", "last_error", "event_type")

Onto = Callable[..., Any]  # runs a command, and returns its JSON


def listed(onto: Onto) -> dict[str, Any]:
    """Events of each namespace, dead letters, and the workers that never said goodbye."""
    letters = onto("events", "dead-letters", "--limit", "1000")["dead_letters"]
    sessions = onto("events", "sessions")["sessions"]
    return {
        **{name: _events(onto, name) for name in NAMESPACES},
        "dead_letters": [
            {**_only(_LETTER, letter), "event": _only(_EVENT[:-1], letter["event"])}
            for letter in letters
        ],
        "sessions": [
            {
                "session_id": session["session_id"],
                "started_at": _moment(session["started_at"]),
                "handlers": session["metadata"]["handlers"],
            }
            for session in sessions
        ],
    }


def counts(onto: Onto) -> dict[str, tuple[int, int]]:
    """By namespace: how many events and dead letters there are."""
    found = onto("events", "list-namespaces")["namespaces"]
    return {space["namespace"]: (space["events"], space["dead_letters"]) for space in found}


def _events(onto: Onto, namespace: str) -> list[dict[str, Any]]:
    shown = onto("events", "show", "--limit", "1000", "--namespace", namespace)["events"]
    return sorted((_event(event) for event in shown), key=lambda event: str(event["id"]))


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    claims = [
        {
            **_only(_CLAIM, claim),
            "acked": claim["ack_at"] is not None,
            "dead": claim["dead_lettered_at"] is not None,
        }
        for claim in event["claims"]
    ]
    return {
        **_only(_EVENT, event),
        "created_at": _moment(event["created_at"]),
        "claims": sorted(claims, key=lambda claim: str(claim["handler_id"])),
    }


def _only(names: tuple[str, ...], document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in names}


def _moment(text: str) -> str:
    return datetime.fromisoformat(text).isoformat()
