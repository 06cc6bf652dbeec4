"""The entity types at a relation's ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from storage_engine.errors import SchemaMetadataError
from storage_engine.model.declarations import spec_of
from storage_engine.model.spec import TypeSpec


def endpoint_spec(
    relation: TypeSpec,
    side: Literal["left", "right"],
    known_types: Callable[[], Iterable[TypeSpec]],
) -> TypeSpec:
    """As the relation's class has it; as the storage has it where there is no class."""
    cls = relation.python_class
    if cls is not None:
        return spec_of(cls.__endpoints__[0 if side == "left" else 1])  # type: ignore[attr-defined]
    name = relation.left if side == "left" else relation.right
    for spec in known_types():
        if spec.ref == ("entity", name):
            return spec
    raise SchemaMetadataError(
        f"{relation.name} has {name} at its {side} end, of which nothing is stored yet"
    )
