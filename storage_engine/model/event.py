"""`Event`: something that happened, carried by the event bus to handlers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Self
from uuid import uuid4

from pydantic_core import ValidationError as PydanticError
from pydantic_core import core_schema

from storage_engine.errors import ValidationError
from storage_engine.model.canonical import decode, encode, leaf
from storage_engine.model.declare import Declaration
from storage_engine.model.field import FieldRef
from storage_engine.model.record import Plan, Record, declare, finished, make_plan
from storage_engine.model.validation import INT64_MAX, INT64_MIN, KEY_SCHEMA, explain, to_utc

DEFAULT_PRIORITY = 100

_ENVELOPE = ("id", "created_at", "priority", "root_event_id", "chain_depth")


class Event(Record):
    """Derive from it to declare an event type:

        class OrderPlaced(Event):
            order_id: Field[str]

    Class options: `name="order.placed"` sets the event type (the class name otherwise),
    `priority=` the default priority (higher runs first), `abstract=True` makes a base. Beside its
    fields an event has `id`, `created_at`, `priority`, `root_event_id` (the event that began the
    chain, itself by default) and `chain_depth`; all can be given to the constructor. Two events
    with equal fields are equal only if these are too: each event is an occurrence.
    """

    __slots__ = ()

    event_type: ClassVar[str] = ""
    """The stored name of the event type."""
    default_priority: ClassVar[int] = DEFAULT_PRIORITY

    if TYPE_CHECKING:
        id: str = ""
        created_at: datetime = datetime.min.replace(tzinfo=UTC)
        priority: int = DEFAULT_PRIORITY
        root_event_id: str = ""
        chain_depth: int = 0

    def __init__(self, **values: Any) -> None:
        values.setdefault("id", str(uuid4()))
        values.setdefault("root_event_id", values["id"])
        super().__init__(**values)

    def __init_subclass__(
        cls, *, name: str | None = None, priority: int | None = None, abstract: bool = False
    ) -> None:
        super().__init_subclass__()
        declaration = Declaration(
            cls,
            kind="event",
            name=name,
            abstract=abstract,
            reserved={*_ENVELOPE, *(n for n in dir(Event) if not n.startswith("_"))},
            frame=sys._getframe(1),
        )
        if priority is not None:
            if type(priority) is not int:
                declaration.fail("", f"priority must be an int, not {priority!r}")
            cls.default_priority = priority
        cls.event_type = declaration.name
        declare(declaration)

    @classmethod
    def __finish__(cls) -> Plan:
        declaration = cls.__declaration__
        specs = declaration.type_specs()
        declaration.refuse_role("primary_key", "an event has no primary key, it has an id")
        declaration.refuse_role("instance_key", "an event has no instance key, it has an id")
        fields = declaration.field_specs(specs)
        return make_plan(declaration.name, fields, keys=(), extra=_envelope(cls.default_priority))

    @classmethod
    def __field_ref__(cls, name: str) -> FieldRef[Any]:
        raise AttributeError(
            f"{cls.__name__}.{name} is a field of an event; events are not queried"
        )

    def envelope(self, namespace: str) -> dict[str, Any]:
        """The event as the bus stores it: plain JSON values."""
        values = vars(self)
        return {
            "id": self.id,
            "namespace": namespace,
            "type": self.event_type,
            "payload": {
                f.name: encode(f.type_spec, values[f.name]) for f in finished(type(self)).fields
            },
            "created_at": leaf(self.created_at),
            "priority": self.priority,
            "root_event_id": self.root_event_id,
            "chain_depth": self.chain_depth,
        }

    @classmethod
    def from_envelope(cls, envelope: Mapping[str, Any]) -> Self:
        """The event that an envelope of this type holds."""
        if envelope.get("type") != cls.event_type:
            raise ValidationError(
                f"{cls.event_type}: the envelope is of type {envelope.get('type')!r}",
                type=cls.event_type,
            )
        known = {f.name: f for f in finished(cls).fields}
        try:
            given = {name: envelope[name] for name in _ENVELOPE}
            for name, value in envelope["payload"].items():
                given[name] = decode(known[name].type_spec, value) if name in known else value
        except KeyError as missing:
            raise ValidationError(
                f"{cls.event_type}: the envelope has no {missing}", type=cls.event_type
            ) from None
        except PydanticError as error:
            raise explain(
                error, type_name=cls.event_type, identity=None, known=(), within=(name,)
            ) from None
        return cls(**given)


def _envelope(priority: int) -> dict[str, core_schema.CoreSchema]:
    number = core_schema.int_schema(ge=INT64_MIN, le=INT64_MAX)
    instant = core_schema.no_info_after_validator_function(to_utc, core_schema.datetime_schema())
    return {
        "id": KEY_SCHEMA,
        "created_at": core_schema.with_default_schema(
            instant, default_factory=lambda: datetime.now(UTC)
        ),
        "priority": core_schema.with_default_schema(number, default=priority),
        "root_event_id": KEY_SCHEMA,
        "chain_depth": core_schema.with_default_schema(core_schema.int_schema(gt=-1), default=0),
    }
