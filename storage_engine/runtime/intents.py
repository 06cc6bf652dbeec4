"""What a session intends to write: objects and bulk sources, in the order they were stated.

The last statement about an identity wins, whether it came as an object or as a row of a source.
Promise: reading the intents does not use them up (except sources that can be read only once), so
a commit that failed can be tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from storage_engine.errors import BatchSizeExceededError, ValidationError
from storage_engine.model.arrow import objects_to_table
from storage_engine.model.declarations import Event, Stored
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.protocol import TypeInput
from storage_engine.runtime.arguments import BoundTypes
from storage_engine.runtime.sources import MAX_BATCH_ROWS, BulkSource

Objects = dict[tuple[str, ...], Any]  # by identity


@dataclass(slots=True)
class _TypeIntents:
    """One type's intents: objects stated one after the other, or a source, in turns."""

    spec: TypeSpec
    stated: list[Objects | BulkSource] = field(default_factory=list)

    def ensure(self, item: Any) -> None:
        if not self.stated or isinstance(self.stated[-1], BulkSource):
            self.stated.append({})
        last = self.stated[-1]
        assert isinstance(last, dict)
        last[_identity(self.spec, item)] = item

    def identities(self) -> int:
        """How many objects there are, repetitions not counted."""
        objects = [part for part in self.stated if isinstance(part, dict)]
        return len(objects[0]) if len(objects) == 1 else len(set().union(*objects))

    def input(self) -> TypeInput:
        parts = [
            part
            if isinstance(part, BulkSource)
            else objects_to_table(self.spec, list(part.values()))
            for part in self.stated
        ]
        if len(parts) == 1 and isinstance(parts[0], pa.Table):
            return TypeInput(self.spec, table=parts[0])
        return TypeInput(self.spec, stream=_stream(parts))


class Intents:
    """The intents of a session since its last commit."""

    def __init__(self, types: BoundTypes) -> None:
        self._types = types
        self._intents: dict[tuple[str, str], _TypeIntents] = {}

    def __bool__(self) -> bool:
        return bool(self._intents)

    def ensure(self, objects: Any) -> None:
        """Add an object, or all of an iterable; when one does not fit, none is added."""
        bound = [(self._spec(item), item) for item in _items(objects)]
        for spec, item in bound:
            self._of(spec).ensure(item)

    def ingest(self, spec: TypeSpec, source: BulkSource) -> None:
        self._of(spec).stated.append(source)

    def inputs(self, *, limit: int) -> list[TypeInput]:
        """The intents as a commit takes them; refuses more than `limit` objects."""
        size = sum(intents.identities() for intents in self._intents.values())
        if size > limit:
            raise BatchSizeExceededError(size=size, limit=limit)
        return [intents.input() for intents in self._intents.values()]

    @property
    def notes(self) -> list[str]:
        """What may surprise in what was stated."""
        sources = [s for i in self._intents.values() for s in i.stated if isinstance(s, BulkSource)]
        return list(dict.fromkeys(note for source in sources for note in source.notes))

    @property
    def type_names(self) -> list[str]:
        return [intents.spec.name for intents in self._intents.values()]

    def clear(self) -> None:
        self._intents.clear()

    def _of(self, spec: TypeSpec) -> _TypeIntents:
        return self._intents.setdefault(spec.ref, _TypeIntents(spec))

    def _spec(self, item: Any) -> TypeSpec:
        if not isinstance(item, Stored):
            raise ValidationError(_not_an_object(item))
        return self._types.bind(type(item))


def _identity(spec: TypeSpec, item: Any) -> tuple[str, ...]:
    values = vars(item)
    if spec.primary_key is not None:
        return (values[spec.primary_key],)
    key = values[spec.instance_key] if spec.instance_key else ""
    return (values["left_key"], values["right_key"], key)


def _stream(parts: Iterable[pa.Table | BulkSource]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        if isinstance(part, BulkSource):
            yield from part.batches()
        else:
            yield from part.to_batches(max_chunksize=MAX_BATCH_ROWS)


def _items(objects: Any) -> list[Any]:
    """One object as a list of one; what cannot be objects is left for `_spec` to refuse."""
    whole = isinstance(objects, Stored | type | str | bytes | Mapping)
    if whole or not isinstance(objects, Iterable) or hasattr(objects, "__arrow_c_stream__"):
        return [objects]
    return list(objects)


def _not_an_object(item: Any) -> str:
    takes = "ensure takes Entity and Relation objects"
    if isinstance(item, Event):
        return f"{takes}; an event goes with commit(event=...)"
    if isinstance(item, type) and issubclass(item, Stored):
        return f"{takes}, not classes; make an object first: {item.__name__}(...)"
    if hasattr(item, "__arrow_c_stream__"):
        return f"{takes}; a table goes to ingest(Type, table)"
    shown = repr(item)
    return f"{takes}, not {type(item).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
