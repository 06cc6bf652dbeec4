"""Random schemas: entity and relation classes with random fields."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from storage_engine.model import Entity, Field, Relation, TypeSpec
from storage_engine.model.declarations import spec_of
from storage_engine.query import left, right
from tests.comparison.values import EXACT, KINDS, WILD, Kind, Pool, Ref

# Words of SQL, and names that the engines give to tables and columns of their own.
_ENTITY_NAMES = ["Thing", "Order", "Select", "asked", "visible"]
_RELATION_NAMES = ["Link", "Group", "PartOf", "step_1", "left_entities"]
_FIELD_NAMES = ["a", "b", "order", "rowid", "Value", "newest", "n", "from", "row", "fields", "q"]
_KEY_NAMES = ["id", "key", "name"]


@dataclass(frozen=True)
class Type:
    """A declared class and the kinds of its fields."""

    cls: Any
    kinds: dict[str, Kind]

    @property
    def spec(self) -> TypeSpec:
        return spec_of(self.cls)

    @property
    def ends(self) -> tuple[Any, Any]:
        """The classes at a relation's ends."""
        found: tuple[Any, Any] = self.cls.__endpoints__
        return found

    def __repr__(self) -> str:
        spec = self.spec
        ends = f", {spec.left} -> {spec.right}" if spec.kind == "relation" else ""
        key = f", key {spec.primary_key or spec.instance_key}"
        return f"{spec.name}({self.kinds!r}{key}{ends})"


@dataclass(frozen=True)
class Schema:
    entities: tuple[Type, ...]
    relations: tuple[Type, ...]
    pool: Pool

    def __repr__(self) -> str:
        return f"Schema({[*self.entities, *self.relations]!r})"

    @property
    def types(self) -> tuple[Type, ...]:
        return (*self.entities, *self.relations)

    def of(self, cls: Any) -> Type:
        return next(one for one in self.types if one.cls is cls)

    def own_places(self, one: Type) -> list[Ref]:
        """Every place of a type's own rows that a filter can ask about."""
        return list(_places(one, one.cls, any_path=True))

    def places(self, one: Type) -> list[Ref]:
        """The same with those of the entities at a relation's ends."""
        found = self.own_places(one)
        if one.spec.kind == "relation":
            for side, end in zip((left, right), one.ends, strict=True):
                found += _places(self.of(end), side(one.cls), any_path=False)
        return found


def _places(one: Type, holder: Any, *, any_path: bool) -> Iterator[Ref]:
    key = one.spec.primary_key or (one.spec.instance_key if any_path else None)
    if key is not None:
        yield getattr(holder, key)
    for name, kind in one.kinds.items():
        yield getattr(holder, name)
        for place in kind.places:
            try:
                ref: Ref = place(getattr(holder, name))
            except ValueError:  # any_path, which endpoints have not
                if any_path:
                    raise
                continue
            yield ref


@st.composite
def schemas(draw: st.DrawFn, *, relations: int = 0, kinds: Sequence[Kind] = KINDS) -> Schema:
    """`relations`: at least so many. `kinds`: of fields, to choose from."""
    pool = EXACT if draw(st.booleans()) else WILD
    of = st.sampled_from(kinds)
    entities = tuple(
        _declare(draw, name, Entity, of, primary_key=draw(st.sampled_from(_KEY_NAMES)))
        for name in draw(_names(_ENTITY_NAMES, 1, 2))
    )
    ends = st.sampled_from([one.cls for one in entities])
    made = tuple(
        _declare(
            draw,
            name,
            Relation.__class_getitem__((draw(ends), draw(ends))),  # type: ignore[attr-defined]
            of,
            instance_key=draw(st.sampled_from([None, *_KEY_NAMES])),
        )
        for name in draw(_names(_RELATION_NAMES, relations, 2))
    )
    return Schema(entities, made, pool)


def _names(names: list[str], least: int, most: int) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), min_size=least, max_size=most, unique=True)


def _declare(
    draw: st.DrawFn, name: str, base: Any, of: st.SearchStrategy[Kind], **keys: str | None
) -> Type:
    names = draw(_names(_FIELD_NAMES, 0 if "instance_key" in keys else 1, 4))
    kinds = {field: draw(of) for field in names}
    indexed = draw(st.sampled_from([None, *names]))
    body: dict[str, Any] = {"__annotations__": {}, "__module__": __name__}
    for role, field in keys.items():
        if field is not None:
            body["__annotations__"][field] = Field[str]
            options: dict[str, Any] = {role: True}
            body[field] = Field(**options)
    for field, kind in kinds.items():
        body["__annotations__"][field] = Field[kind.annotation]  # type: ignore[name-defined]
        body[field] = Field(index=field == indexed)
    cls = types.new_class(name, (base,), {}, lambda space: space.update(body))
    return Type(cls, kinds)
