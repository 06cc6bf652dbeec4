"""Events: defaults, envelope and back."""

import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from storage_engine.errors import ValidationError
from storage_engine.model import Event, Field, canonical_json


class OrderPlaced(Event, name="order.placed", priority=200):
    order_id: Field[str]
    at: Field[datetime | None] = Field(default=None)
    raw: Field[bytes] = Field(default=b"")
    entity_key: Field[str] = Field(default="")  # system columns are no concern of events


class Plain(Event):
    pass


def test_defaults():
    before = datetime.now(UTC)
    event = Plain()
    assert str(uuid.UUID(event.id)) == event.id
    assert event.id != Plain().id
    assert timedelta(0) <= event.created_at - before < timedelta(minutes=1)
    assert event.created_at.tzinfo is UTC
    assert (event.priority, event.root_event_id, event.chain_depth) == (100, event.id, 0)
    assert (Plain.event_type, OrderPlaced.event_type) == ("Plain", "order.placed")
    assert OrderPlaced(order_id="o").priority == 200


def test_envelope_is_the_stored_shape():
    at = datetime(2026, 2, 11, 12, tzinfo=UTC)
    event = OrderPlaced(
        order_id="o1",
        at=at,
        raw=b"hi",
        id="e2",
        created_at=at,
        priority=5,
        root_event_id="e1",
        chain_depth=1,
    )
    envelope = event.envelope("default")
    assert envelope == {
        "id": "e2",
        "namespace": "default",
        "type": "order.placed",
        "payload": {
            "order_id": "o1",
            "at": "2026-02-11T12:00:00.000000+00:00",
            "raw": "aGk=",
            "entity_key": "",
        },
        "created_at": "2026-02-11T12:00:00.000000+00:00",
        "priority": 5,
        "root_event_id": "e1",
        "chain_depth": 1,
    }
    assert OrderPlaced.from_envelope(json.loads(canonical_json(envelope))) == event


def test_envelope_of_another_type():
    with pytest.raises(ValidationError, match=r"order\.placed: the envelope is of type 'Plain'"):
        OrderPlaced.from_envelope(Plain().envelope("default"))


def test_payload_with_an_unknown_field():
    envelope = OrderPlaced(order_id="o").envelope("default")
    envelope["payload"]["ordr_id"] = 1
    with pytest.raises(ValidationError, match="unknown field 'ordr_id', did you mean 'order_id'"):
        OrderPlaced.from_envelope(envelope)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"id": ""}, "id: must not be empty"),
        ({"chain_depth": -1}, "chain_depth: Input should be greater than -1"),
        ({"priority": "x"}, "priority: Input should be a valid integer"),
        ({"order_id": 3}, "order_id: Input should be a valid string"),
    ],
)
def test_bad_events(given: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=f"^order.placed: {said}"):
        OrderPlaced(**{"order_id": "o", **given})


def test_follow_up_keeps_the_chain():
    first = OrderPlaced(order_id="o")
    second = Plain().replace(root_event_id=first.root_event_id, chain_depth=first.chain_depth + 1)
    assert (second.root_event_id, second.chain_depth) == (first.id, 1)


def test_dump_is_the_payload():
    assert Plain().model_dump() == {}
    assert OrderPlaced(order_id="o").model_dump()["order_id"] == "o"


def test_event_fields_are_not_queried():
    with pytest.raises(AttributeError, match="events are not queried"):
        _ = OrderPlaced.order_id


def test_broken_envelopes():
    envelope = OrderPlaced(order_id="o").envelope("default")
    with pytest.raises(ValidationError, match="the envelope has no 'priority'"):
        OrderPlaced.from_envelope({k: v for k, v in envelope.items() if k != "priority"})
    envelope["payload"]["raw"] = "?"
    with pytest.raises(ValidationError, match="raw: Data should be valid base64"):
        OrderPlaced.from_envelope(envelope)
