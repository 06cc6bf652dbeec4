"""`Entity`: a thing with one key of its own."""

from __future__ import annotations

import sys

from storage_engine.model.declare import Declaration
from storage_engine.model.record import Plan, declare, make_plan
from storage_engine.model.spec import TypeSpec
from storage_engine.model.stored import EntityMeta, Stored, spec_of


class Entity(Stored):
    """Derive from it to declare an entity type:

        class Customer(Entity):
            id: Field[str] = Field(primary_key=True)
            name: Field[str]

    Class options: `name="..."` sets the stored name; `abstract=True` makes a base that only gives
    its fields to the types derived from it.
    """

    __slots__ = ()

    def __init_subclass__(cls, *, name: str | None = None, abstract: bool = False) -> None:
        super().__init_subclass__()
        declare(
            Declaration(
                cls,
                kind="entity",
                name=name,
                abstract=abstract,
                reserved={n for n in dir(Entity) if not n.startswith("_")},
                frame=sys._getframe(1),
            )
        )

    @classmethod
    def __finish__(cls) -> Plan:
        declaration = cls.__declaration__
        specs = declaration.type_specs()
        declaration.refuse_role("instance_key", "an entity has no instance key, relations do")
        key = declaration.key_field("primary_key", specs)
        if key is None:
            declaration.fail(
                "",
                "has no primary key; declare one field as Field[str] = Field(primary_key=True), "
                "or the class with abstract=True if it is only a base",
            )
        fields = declaration.field_specs(specs)
        spec = TypeSpec("entity", declaration.name, fields, primary_key=key, python_class=cls)
        return make_plan(spec.name, fields, keys=[key], spec=spec)

    def meta(self) -> EntityMeta:
        """The commit that wrote this version, type and key; only on objects from a storage."""
        spec = spec_of(type(self))
        assert spec.primary_key is not None
        return EntityMeta(self._stored_by(), spec.name, vars(self)[spec.primary_key])
