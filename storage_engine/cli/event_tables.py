"""How events, claims and dead letters are shown, to people and to programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from storage_engine.cli.output import Output, one_line

if TYPE_CHECKING:
    from storage_engine.events.protocol import DeadLetter, EventInfo
    from storage_engine.events.records import ClaimRecord


def event_document(info: EventInfo) -> dict[str, Any]:
    claims = [{**claim.as_dict(), "state": claim_state(claim)} for claim in info.claims]
    return {**info.envelope, "status": info.status, "claims": claims}


def claim_state(claim: ClaimRecord) -> str:
    if claim.redriven_as is not None:
        return "redriven"
    if claim.dead_lettered_at is not None:
        return "dead_lettered"
    if claim.ack_at is not None:
        return "acked"
    return f"failed {claim.attempts} times" if claim.attempts else "claimed"


def show_letters(output: Output, letters: Sequence[DeadLetter]) -> None:
    output.table(
        ["event", "type", "handler", "failed", "attempts", "last error"],
        [
            (
                letter.event_id,
                letter.event_type,
                letter.handler_id,
                datetime.fromisoformat(letter.failed_at),
                letter.attempts,
                one_line(letter.last_error or ""),
            )
            for letter in letters
        ],
    )


def show_event(output: Output, info: EventInfo) -> None:
    envelope = info.envelope
    output.facts(
        [
            ("event", envelope["id"]),
            ("type", envelope["type"]),
            ("namespace", envelope.get("namespace")),
            ("created", datetime.fromisoformat(envelope["created_at"])),
            ("priority", envelope["priority"]),
            ("chain", f"number {envelope['chain_depth']} after {envelope['root_event_id']}"),
            ("only for", envelope.get("handler_id")),
            ("status", info.status),
            ("payload", json.dumps(envelope["payload"], ensure_ascii=False)),
        ]
    )
    output.line()
    if not info.claims:
        output.line("No handler has claimed it.")
        return
    output.table(
        ["handler", "state", "attempts", "deliveries", "claimed", "lease until", "last error"],
        [
            (
                claim.handler_id,
                claim_state(claim),
                claim.attempts,
                claim.deliveries,
                claim.claimed_at,
                claim.lease_until,
                one_line(claim.last_error or "") or None,
            )
            for claim in info.claims
        ],
    )
