"""The event side of the graph: who sends an event, who handles it, and what comes of that.

    source -> entities -> relations -> findings -> events -> handlers -> types

Handlers say what they write and send (`@on_event(..., writes=[...], emits=[...])`), assets of
one's own what they send (`metadata=emits(SevereDelay)`). Events and handlers are assets that
nobody materialises: runs and sensors leave observations of them. The types that handlers write
are materialised by the run that handles events.

Dagster's graph has no circles, and a bus may: what an event leads to may send it again. Then the
edge from the sender is left out, and the event's metadata names it.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.declaration import (
    EMITS_METADATA,
    EVENT_METADATA,
    MODELS_METADATA,
    STORAGE_METADATA,
    TYPE_METADATA,
    WRITTEN_BY_METADATA,
    TypeAsset,
    snake_case,
)
from ontologia_dagster.downstream.metadata import column_schema
from storage_engine.model.declarations import spec_of

if TYPE_CHECKING:
    from storage_engine.model.declarations import Event
    from storage_engine.runtime.arguments import StoredClass
    from storage_engine.runtime.handlers import Handler

DEFAULT_STORAGE = "ontology"
DEFAULT_GROUP = "ontologia"


def emits(*events: type[Event] | str, storage: str = DEFAULT_STORAGE) -> dict[str, Any]:
    """Metadata for an asset of one's own that sends events: `@dg.asset(metadata=emits(Late))`."""
    names = [event if isinstance(event, str) else event.event_type for event in events]
    return {EMITS_METADATA: {"events": names, "storage": storage}}


@dataclass(frozen=True)
class EventNode:
    """An event type as an asset, and those who handle it."""

    key: dg.AssetKey
    name: str
    description: str | None
    handlers: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenType:
    """A type that handlers write and nothing ingests, as an asset."""

    key: dg.AssetKey
    cls: StoredClass
    handlers: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.cls.__declaration__.name


@dataclass(frozen=True)
class EventLineage:
    """What the handlers of a storage are between. `events` by type, `handler_keys` by id,
    `written` and `ingested` types by stored name."""

    storage: str
    group: str | None
    key_prefix: Sequence[str]
    handlers: Sequence[Handler[Any]]
    handler_keys: Mapping[str, dg.AssetKey] = field(default_factory=dict)
    events: Mapping[str, EventNode] = field(default_factory=dict)
    written: Mapping[str, WrittenType] = field(default_factory=dict)
    ingested: Mapping[str, TypeAsset] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        storage: str,
        handlers: Sequence[Handler[Any]],
        *,
        ingested: Iterable[TypeAsset] = (),
        key_prefix: Sequence[str] = (),
        group: str | None = None,
    ) -> EventLineage:
        """`ingested` are types that have an asset already."""
        others: dict[str, TypeAsset] = {}
        for asset in ingested:
            others.setdefault(asset.type_name, asset)
        return cls(
            storage,
            group,
            key_prefix,
            handlers,
            _handler_keys(handlers, key_prefix),
            _event_nodes(handlers, key_prefix),
            _written_types(handlers, others.keys(), key_prefix),
            others,
        )

    def type_assets(self) -> list[TypeAsset]:
        return [
            TypeAsset(
                written.key,
                written.name,
                models=written.cls.__module__,
                storage=self.storage,
                is_ingested=False,
            )
            for written in self.written.values()
        ]

    def written_specs(self, beside: Sequence[dg.AssetSpec]) -> list[dg.AssetSpec]:
        """What the run that handles events materialises, if something was written."""
        groups = self._groups(beside)
        kept, _ = self._without_circles(beside, self._senders(beside))
        return [
            self._written_spec(written, groups[written.key], self._senders_before(written, kept))
            for written in self.written.values()
        ]

    def _senders_before(
        self, written: WrittenType, kept: Mapping[str, Sequence[dg.AssetKey]]
    ) -> list[dg.AssetKey]:
        """The assets that send what leads to a written type, also through other handlers. Nobody
        runs events and handlers, so that between these and the type a run would know no order:
        events would be handled before they are sent."""
        handlers = {self.handler_keys[handler.id]: handler for handler in self.handlers}
        waiting = [self.handler_keys[handler] for handler in written.handlers]
        seen, senders = {*waiting}, set()
        while waiting:
            for name in handlers[waiting.pop()].event_types:
                for key in kept.get(name, ()):
                    if key not in handlers:
                        senders.add(key)
                    elif key not in seen:
                        seen.add(key)
                        waiting.append(key)
        return sorted(senders)

    def _written_spec(
        self, written: WrittenType, group: str, senders: Sequence[dg.AssetKey]
    ) -> dg.AssetSpec:
        spec = spec_of(written.cls)
        return dg.AssetSpec(
            written.key,
            deps=[*(self.handler_keys[handler] for handler in written.handlers), *senders],
            description=spec.description or f"{written.name}, as handlers write it.",
            owners=list(spec.owners),
            tags=dict(spec.tags),
            group_name=group,
            kinds={spec.kind, "parquet"},
            code_version="1",  # the handlers' own code is not known by one
            skippable=True,
            metadata={
                TYPE_METADATA: written.name,
                MODELS_METADATA: written.cls.__module__,
                STORAGE_METADATA: self.storage,
                WRITTEN_BY_METADATA: list(written.handlers),
                "dagster/table_name": written.name,
                "dagster/column_schema": column_schema(spec),
            },
        )

    def node_specs(self, beside: Sequence[dg.AssetSpec]) -> list[dg.AssetSpec]:
        """Events and handlers. `beside` are all other assets of the location, as far as they are
        told: those among them that send events come before these."""
        senders = self._senders(beside)
        kept, left_out = self._without_circles(beside, senders)
        groups = self._groups(beside)
        unhandled = [
            EventNode(event_key(name, self.key_prefix), name, None)
            for name in sorted(senders.keys() - self.events.keys())
        ]
        return [
            *(
                self._event_spec(event, kept, left_out, groups)
                for event in [*self.events.values(), *unhandled]
            ),
            *(self._handler_spec(handler, groups) for handler in self.handlers),
        ]

    def _groups(self, beside: Sequence[dg.AssetSpec]) -> defaultdict[dg.AssetKey, str]:
        """Each is where what comes before it is, unless told otherwise."""
        groups: defaultdict[dg.AssetKey, str] = defaultdict(lambda: self.group or DEFAULT_GROUP)
        if self.group is not None:
            return groups
        groups |= {spec.key: spec.group_name for spec in beside if spec.group_name is not None}
        kept, _ = self._without_circles(beside, self._senders(beside))
        before: dict[dg.AssetKey, list[dg.AssetKey]] = {
            event_key(name, self.key_prefix): keys for name, keys in kept.items()
        }
        for handler in self.handlers:
            events = [self.events[name].key for name in sorted(handler.event_types)]
            before[self.handler_keys[handler.id]] = events
        for written in self.written.values():
            before[written.key] = [self.handler_keys[handler] for handler in written.handlers]
        for _ in before:  # a chain is no longer than that
            for key, upstream in before.items():
                placed = [groups[other] for other in upstream if other in groups]
                if key not in groups and placed:
                    groups[key] = placed[0]
        return groups

    def _event_spec(
        self,
        event: EventNode,
        kept: Mapping[str, Sequence[dg.AssetKey]],
        left_out: Mapping[str, Sequence[dg.AssetKey]],
        groups: Mapping[dg.AssetKey, str],
    ) -> dg.AssetSpec:
        metadata: dict[str, Any] = {EVENT_METADATA: event.name, STORAGE_METADATA: self.storage}
        if circles := left_out.get(event.name):
            names = ", ".join(key.to_user_string() for key in circles)
            metadata["sent_in_a_circle_by"] = names
        return dg.AssetSpec(
            event.key,
            deps=list(kept.get(event.name, ())),
            description=event.description or f"{event.name}, an event.",
            group_name=groups[event.key],
            kinds={"event"},
            metadata=metadata,
        )

    def _handler_spec(
        self, handler: Handler[Any], groups: Mapping[dg.AssetKey, str]
    ) -> dg.AssetSpec:
        return dg.AssetSpec(
            self.handler_keys[handler.id],
            deps=[self.events[name].key for name in sorted(handler.event_types)],
            description=_docstring(handler) or f"Handles {', '.join(sorted(handler.event_types))}.",
            group_name=groups[self.handler_keys[handler.id]],
            kinds={"handler"},
            metadata={"ontologia/handler": handler.id, STORAGE_METADATA: self.storage},
        )

    # -- who sends --------------------------------------------------------------------------------

    def _senders(self, beside: Sequence[dg.AssetSpec]) -> dict[str, list[dg.AssetKey]]:
        """By event type: assets of one's own, then handlers."""
        senders: dict[str, list[dg.AssetKey]] = {name: [] for name in self.events}
        for spec in beside:
            stated = spec.metadata.get(EMITS_METADATA)
            raw = stated.value if isinstance(stated, dg.MetadataValue) else stated
            if isinstance(raw, Mapping) and raw.get("storage") == self.storage:
                for name in raw.get("events", ()):
                    senders.setdefault(name, []).append(spec.key)
        for handler in self.handlers:
            for event in handler.emits or ():
                senders[event.event_type].append(self.handler_keys[handler.id])
        return senders

    def _without_circles(
        self, beside: Sequence[dg.AssetSpec], senders: Mapping[str, Sequence[dg.AssetKey]]
    ) -> tuple[dict[str, list[dg.AssetKey]], dict[str, list[dg.AssetKey]]]:
        """The senders of each event that can come before it, and those that cannot."""
        after: dict[dg.AssetKey, set[dg.AssetKey]] = {}
        for spec in beside:
            for dep in spec.deps:
                after.setdefault(dep.asset_key, set()).add(spec.key)
        for handler in self.handlers:
            key = self.handler_keys[handler.id]
            for name in handler.event_types:
                after.setdefault(self.events[name].key, set()).add(key)
        for written in self.written.values():
            for handler_id in written.handlers:
                after.setdefault(self.handler_keys[handler_id], set()).add(written.key)
        kept: dict[str, list[dg.AssetKey]] = {}
        left_out: dict[str, list[dg.AssetKey]] = {}
        for name in senders:
            key = event_key(name, self.key_prefix)
            for sender in dict.fromkeys(senders[name]):
                if _leads_to(after, key, sender):
                    left_out.setdefault(name, []).append(sender)
                else:
                    after.setdefault(sender, set()).add(key)
                    kept.setdefault(name, []).append(sender)
        return kept, left_out


def _leads_to(
    after: Mapping[dg.AssetKey, set[dg.AssetKey]], first: dg.AssetKey, last: dg.AssetKey
) -> bool:
    reached, waiting = {first}, [first]
    while waiting:
        for key in after.get(waiting.pop(), ()):
            if key not in reached:
                reached.add(key)
                waiting.append(key)
    return last in reached


def _event_nodes(handlers: Sequence[Handler[Any]], prefix: Sequence[str]) -> dict[str, EventNode]:
    classes: dict[str, type[Event]] = {}
    for handler in handlers:
        classes |= handler.event_types
        classes |= {cls.event_type: cls for cls in handler.emits or ()}
    return {
        name: EventNode(
            event_key(name, prefix),
            name,
            _docstring(classes[name]),
            tuple(handler.id for handler in handlers if name in handler.event_types),
        )
        for name in sorted(classes)
    }


def event_key(name: str, prefix: Sequence[str] = ()) -> dg.AssetKey:
    return dg.AssetKey([*prefix, "events", _identifier(snake_case(name))])


def _handler_keys(
    handlers: Sequence[Handler[Any]], prefix: Sequence[str]
) -> dict[str, dg.AssetKey]:
    """By the last part of their ids, where that is enough to tell them apart."""
    short = {handler.id: _identifier(handler.id.rpartition(".")[2]) for handler in handlers}
    names = list(short.values())
    return {
        handler_id: dg.AssetKey(
            [*prefix, "handlers", name if names.count(name) == 1 else _identifier(handler_id)]
        )
        for handler_id, name in short.items()
    }


def _written_types(
    handlers: Sequence[Handler[Any]], ingested: Container[str], prefix: Sequence[str]
) -> dict[str, WrittenType]:
    classes: dict[str, StoredClass] = {}
    writers: dict[str, list[str]] = {}
    for handler in handlers:
        for cls in handler.writes or ():
            name = cls.__declaration__.name
            if name not in ingested:
                classes.setdefault(name, cls)
                writers.setdefault(name, []).append(handler.id)
    return {
        name: WrittenType(
            dg.AssetKey([*prefix, _identifier(snake_case(name))]), cls, tuple(writers[name])
        )
        for name, cls in sorted(classes.items())
    }


def _identifier(name: str) -> str:
    """What Dagster takes as part of a name."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


def _docstring(of: Any) -> str | None:
    text = inspect.getdoc(of) if of.__doc__ else None
    return text or None
