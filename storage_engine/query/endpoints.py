"""`left(Subscription).tier`: fields of the entities that a relation connects."""

from __future__ import annotations

from typing import Any, TypeVar

from storage_engine.model.entity import Entity
from storage_engine.model.field import FieldRef
from storage_engine.model.relation import Relation, Side
from storage_engine.model.spec import TypeSpec
from storage_engine.model.stored import spec_of
from storage_engine.model.validation import unknown_name

E = TypeVar("E", bound=Entity)


def left(relation: type[Relation[E, Any]]) -> type[E]:
    """The left entity of a relation in a filter: `left(Subscription).tier == "Gold"`.

    Type checkers see the entity class, so that its fields are known; all that works with the
    result is to take fields from it.
    """
    return _Endpoint(relation, "left")  # type: ignore[return-value]


def right(relation: type[Relation[Any, E]]) -> type[E]:
    """The right entity of a relation in a filter."""
    return _Endpoint(relation, "right")  # type: ignore[return-value]


class _Endpoint:
    def __init__(self, relation: type[Relation[Any, Any]], side: Side) -> None:
        spec = spec_of(relation)
        if spec.kind != "relation":
            raise TypeError(f"{side}(...) takes a relation class; {spec.name} is an entity")
        entity = relation.__endpoints__[0 if side == "left" else 1]
        self._spec: TypeSpec = spec_of(entity)
        self._side: Side = side
        self._relation = spec.name

    def __repr__(self) -> str:
        return f"{self._side}({self._relation})"

    def __getattr__(self, name: str) -> FieldRef[Any]:
        spec = self._spec
        if name.startswith("__") or name not in {f.name for f in spec.fields}:
            known = [f.name for f in spec.fields]
            raise AttributeError(f"{self!r} is a {spec.name}: {unknown_name(name, known)}")
        return FieldRef(spec, name, source=self._side, relation=self._relation)
