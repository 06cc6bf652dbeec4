"""What entities and relations have beyond events: a stored type, and metadata once read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from storage_engine.errors import MetadataUnavailableError, TypeDeclarationError
from storage_engine.model.field import FieldRef
from storage_engine.model.record import Record, finished, hydrate
from storage_engine.model.spec import TypeSpec


@dataclass(frozen=True, slots=True)
class EntityMeta:
    """Where an entity object came from."""

    commit_id: int
    type_name: str
    key: str


@dataclass(frozen=True, slots=True)
class RelationMeta:
    """Where a relation object came from."""

    commit_id: int
    type_name: str
    left_key: str
    right_key: str
    instance_key: str


class Stored(Record):
    """Base of Entity and Relation; not for direct use."""

    __slots__ = ("_commit_id",)

    @classmethod
    def __field_ref__(cls, name: str) -> FieldRef[Any]:
        return FieldRef(spec_of(cls), name)

    def _attach_meta(self, commit_id: int) -> None:
        object.__setattr__(self, "_commit_id", commit_id)

    def _stored_by(self) -> int:
        commit_id: int | None = getattr(self, "_commit_id", None)
        if commit_id is None:
            raise MetadataUnavailableError(
                f"this {type(self).__name__} did not come out of a storage, so it has no "
                "metadata; objects returned by queries have"
            )
        return commit_id

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _restore, (type(self), dict(vars(self)), getattr(self, "_commit_id", None))


def _restore(cls: type[Stored], values: dict[str, Any], commit_id: int | None) -> Any:
    made: Stored = hydrate(cls, values)
    if commit_id is not None:
        made._attach_meta(commit_id)
    return made


def spec_of(cls: type[Any]) -> TypeSpec:
    """The type spec of an Entity or Relation class."""
    known: object = cls  # callers without a type checker pass anything
    spec = finished(cls).spec if isinstance(known, type) and issubclass(known, Stored) else None
    if spec is None:
        raise TypeDeclarationError(f"{cls!r} is not an Entity or Relation class", type=str(cls))
    return spec
