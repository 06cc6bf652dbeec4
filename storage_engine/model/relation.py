"""`Relation[L, R]`: a directed edge between two entities, identified by their keys."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin

from storage_engine.errors import MetadataUnavailableError
from storage_engine.model.declare import Declaration
from storage_engine.model.entity import Entity
from storage_engine.model.record import Plan, declare, make_plan
from storage_engine.model.spec import TypeSpec
from storage_engine.model.stored import RelationMeta, Stored, spec_of

L = TypeVar("L", bound=Entity)
R = TypeVar("R", bound=Entity)

Side = Literal["left", "right"]
EndpointLoader = Callable[["Relation[Any, Any]", Side], Entity]


class Relation(Stored, Generic[L, R]):
    """Derive from `Relation[Left, Right]` to declare a relation type:

        class Employment(Relation[Person, Company]):
            stint: Field[str] = Field(instance_key=True)
            role: Field[str]

    Objects are made with `left_key`, `right_key`, the instance key by its own name if there is
    one, and the fields. Without an instance key a pair has at most one such relation. Class
    options are those of Entity.
    """

    __slots__ = ("_load_endpoint",)

    __endpoints__: ClassVar[tuple[Any, ...]] = ()

    if TYPE_CHECKING:
        left_key: str
        right_key: str

    def __init_subclass__(cls, *, name: str | None = None, abstract: bool = False) -> None:
        super().__init_subclass__()
        declaration = Declaration(
            cls,
            kind="relation",
            name=name,
            abstract=abstract,
            reserved={n for n in dir(Relation) if not n.startswith("_")},
            frame=sys._getframe(1),
        )
        cls.__endpoints__ = _endpoints(cls, declaration)
        declare(declaration)

    @classmethod
    def __finish__(cls) -> Plan:
        declaration = cls.__declaration__
        specs = declaration.type_specs()
        declaration.refuse_role(
            "primary_key",
            "a relation has no primary key: its endpoints identify it, with an instance_key "
            "where there can be several per pair",
        )
        key = declaration.key_field("instance_key", specs)
        fields = declaration.field_specs(specs, without=key)
        left, right = (end.__declaration__.name for end in cls.__endpoints__)
        spec = TypeSpec(
            "relation",
            declaration.name,
            fields,
            instance_key=key,
            left=left,
            right=right,
            python_class=cls,
        )
        keys = ["left_key", "right_key", *([key] if key else [])]
        return make_plan(spec.name, fields, keys=keys, spec=spec)

    @property
    def instance_key(self) -> str:
        """What tells this relation from others of its pair; "" when the type has no such key."""
        name = spec_of(type(self)).instance_key
        return "" if name is None else str(vars(self)[name])

    @property
    def left(self) -> L:
        """The left entity, on relations that a session returned."""
        return self._endpoint("left")  # type: ignore[return-value]

    @property
    def right(self) -> R:
        """The right entity, on relations that a session returned."""
        return self._endpoint("right")  # type: ignore[return-value]

    def meta(self) -> RelationMeta:
        """The commit that wrote this version, type and keys; only on objects from a storage."""
        return RelationMeta(
            self._stored_by(),
            spec_of(type(self)).name,
            self.left_key,
            self.right_key,
            self.instance_key,
        )

    def _attach_endpoints(self, load: EndpointLoader) -> None:
        """Let `.left` and `.right` ask `load`, which can fetch a whole result's at once."""
        object.__setattr__(self, "_load_endpoint", load)

    def _endpoint(self, side: Side) -> Entity:
        load: EndpointLoader | None = getattr(self, "_load_endpoint", None)
        if load is None:
            raise MetadataUnavailableError(
                f"this {type(self).__name__} did not come out of a session, so its {side} entity "
                f"is not known; {side}_key is"
            )
        return load(self, side)


def _endpoints(cls: type[Relation[Any, Any]], declaration: Declaration) -> tuple[Any, Any]:
    """The endpoint classes, through any generic bases between the class and Relation."""
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin = get_origin(base) or base
        if not (isinstance(origin, type) and issubclass(origin, Relation)):
            continue
        parameters = origin.__parameters__  # type: ignore[attr-defined]
        given = dict(zip(parameters, get_args(base), strict=False))
        ends = origin.__endpoints__ or parameters  # Relation itself: its type variables
        left, right = (given.get(end, end) for end in ends)
        for side, end in (("left", left), ("right", right)):
            _check_endpoint(side, end, declaration)
        return left, right
    raise AssertionError("a relation class has a relation base")


def _check_endpoint(side: str, end: Any, declaration: Declaration) -> None:
    if isinstance(end, TypeVar):
        if declaration.abstract:
            return
        declaration.fail("", "does not say what it relates; derive from Relation[Left, Right]")
    if not (isinstance(end, type) and issubclass(end, Entity)):
        shown = end.__name__ if isinstance(end, type) else repr(end)
        declaration.fail("", f"the {side} endpoint {shown} is not an Entity class declared before")
    if end is Entity or end.__declaration__.abstract:
        declaration.fail("", f"the {side} endpoint {end.__name__} is abstract, it has no objects")
