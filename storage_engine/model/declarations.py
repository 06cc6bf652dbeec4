"""The classes that a model is declared with.

`Entity` is a thing with one key of its own, `Relation[L, R]` a directed edge between two entities,
identified by their keys, and `Event` something that happened, carried by the event bus to
handlers. Entities and relations are stored: they have a type spec, and metadata once read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    Self,
    TypeVar,
    get_args,
    get_origin,
)
from uuid import uuid4

from pydantic_core import ValidationError as PydanticError
from pydantic_core import core_schema

from storage_engine.errors import MetadataUnavailableError, TypeDeclarationError, ValidationError
from storage_engine.model.canonical import decode, encode, leaf
from storage_engine.model.field import FieldRef
from storage_engine.model.record import (
    Declaration,
    Record,
    RecordPlan,
    declare,
    finished,
    hydrate,
    make_plan,
    statement_frame,
)
from storage_engine.model.spec import TypeSpec
from storage_engine.model.validation import INT64_MAX, INT64_MIN, KEY_SCHEMA, explain, to_utc


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
    given: object = cls  # callers without a type checker pass anything
    spec = finished(cls).spec if isinstance(given, type) and issubclass(given, Stored) else None
    if spec is None:
        raise TypeDeclarationError(f"{cls!r} is not an Entity or Relation class", type=str(cls))
    return spec


def _described(declaration: Declaration) -> dict[str, Any]:
    names = ("description", "owners", "tags", "sensitive")
    return {name: getattr(declaration, name) for name in names}


class Entity(Stored):
    """Derive from it to declare an entity type:

        class Customer(Entity):
            id: Field[str] = Field(primary_key=True)
            name: Field[str]

    Class options: `name="..."` sets the stored name; `abstract=True` makes a base that only gives
    its fields to the types derived from it; `renamed_from="..."` is the stored name that the type
    had before, whose rows a migration brings here. For people, and no part of the schema:
    `owners=["team:sales"]`, `tags={"domain": "sales"}`, and `sensitive=True` where no row is to be
    shown beside the data; the docstring describes the type.
    """

    __slots__ = ()

    def __init_subclass__(
        cls,
        *,
        name: str | None = None,
        abstract: bool = False,
        renamed_from: str | None = None,
        owners: Sequence[str] = (),
        tags: Mapping[str, str] | None = None,
        sensitive: bool = False,
    ) -> None:
        super().__init_subclass__()
        declare(
            Declaration(
                cls,
                kind="entity",
                name=name,
                abstract=abstract,
                renamed_from=renamed_from,
                owners=owners,
                tags=tags,
                sensitive=sensitive,
                reserved={n for n in dir(Entity) if not n.startswith("_")},
                frame=statement_frame(sys._getframe(1)),
            )
        )

    @classmethod
    def __finish__(cls) -> RecordPlan:
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
        spec = TypeSpec(
            "entity",
            declaration.name,
            fields,
            primary_key=key,
            python_class=cls,
            renamed_from=declaration.renamed_from,
            sensitive_columns=declaration.sensitive_columns(),
            **_described(declaration),
        )
        return make_plan(spec.name, fields, keys=[key], spec=spec)

    def meta(self) -> EntityMeta:
        """The commit that wrote this version, type and key; only on objects from a storage."""
        spec = spec_of(type(self))
        assert spec.primary_key is not None
        return EntityMeta(self._stored_by(), spec.name, vars(self)[spec.primary_key])


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

    def __init_subclass__(
        cls,
        *,
        name: str | None = None,
        abstract: bool = False,
        renamed_from: str | None = None,
        owners: Sequence[str] = (),
        tags: Mapping[str, str] | None = None,
        sensitive: bool = False,
    ) -> None:
        super().__init_subclass__()
        declaration = Declaration(
            cls,
            kind="relation",
            name=name,
            abstract=abstract,
            renamed_from=renamed_from,
            owners=owners,
            tags=tags,
            sensitive=sensitive,
            reserved={n for n in dir(Relation) if not n.startswith("_")},
            frame=statement_frame(sys._getframe(1)),
        )
        cls.__endpoints__ = _endpoints(cls, declaration)
        declare(declaration)

    @classmethod
    def __finish__(cls) -> RecordPlan:
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
            renamed_from=declaration.renamed_from,
            sensitive_columns=declaration.sensitive_columns() | _sensitive_ends(cls),
            instance_key_description=declaration.fields()[key].description if key else None,
            **_described(declaration),
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


def _sensitive_ends(cls: type[Relation[Any, Any]]) -> frozenset[str]:
    """Keys that must not be shown because the entities of that end hide them."""
    ends = zip(("left_key", "right_key"), cls.__endpoints__, strict=True)
    return frozenset(column for column, end in ends if _hides_key(end.__declaration__))


def _hides_key(entity: Declaration) -> bool:
    keys = (field.sensitive for field in entity.fields().values() if field.primary_key)
    return entity.sensitive or any(keys)


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


DEFAULT_PRIORITY = 100

_ENVELOPE = ("id", "created_at", "priority", "root_event_id", "chain_depth")


class Event(Record):
    """Derive from it to declare an event type:

        class OrderPlaced(Event):
            order_id: Field[str]

    Class options: `name="order.placed"` sets the event type (the class name otherwise),
    `priority=` the default priority (higher runs first), `ordering_key="order_id"` names a field:
    a worker gives events of one value to a handler one at a time, the oldest first.
    `abstract=True` makes a base; `owners`, `tags` and `sensitive` are those of Entity. Beside its
    fields an event has `id`, `created_at`, `priority`, `root_event_id` (the event that began the
    chain, itself by default) and `chain_depth`; all can be given to the constructor. Two events
    with equal fields are equal only if these are too: each event is an occurrence.
    """

    __slots__ = ()

    event_type: ClassVar[str] = ""
    """The stored name of the event type."""
    default_priority: ClassVar[int] = DEFAULT_PRIORITY
    ordering_key: ClassVar[str | None] = None
    """The field whose value keeps events in order."""

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
        cls,
        *,
        name: str | None = None,
        priority: int | None = None,
        ordering_key: str | None = None,
        abstract: bool = False,
        owners: Sequence[str] = (),
        tags: Mapping[str, str] | None = None,
        sensitive: bool = False,
    ) -> None:
        super().__init_subclass__()
        declaration = Declaration(
            cls,
            kind="event",
            name=name,
            abstract=abstract,
            owners=owners,
            tags=tags,
            sensitive=sensitive,
            reserved={*_ENVELOPE, *(n for n in dir(Event) if not n.startswith("_"))},
            frame=statement_frame(sys._getframe(1)),
        )
        if priority is not None:
            if type(priority) is not int:
                declaration.fail("", f"priority must be an int, not {priority!r}")
            cls.default_priority = priority
        if ordering_key is not None:
            _check_ordering_key(declaration, ordering_key)
            cls.ordering_key = ordering_key
        cls.event_type = declaration.name
        declare(declaration)

    @classmethod
    def __finish__(cls) -> RecordPlan:
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
        declared = {f.name: f for f in finished(cls).fields}
        try:
            given = {name: envelope[name] for name in _ENVELOPE}
            for name, value in envelope["payload"].items():
                given[name] = decode(declared[name].type_spec, value) if name in declared else value
        except KeyError as missing:
            raise ValidationError(
                f"{cls.event_type}: the envelope has no {missing}", type=cls.event_type
            ) from None
        except PydanticError as error:
            raise explain(
                error, type_name=cls.event_type, identity=None, arguments=(), within=(name,)
            ) from None
        return cls(**given)


def _check_ordering_key(declaration: Declaration, given: Any) -> None:
    names = ", ".join(declaration.fields()) or "none"
    if not isinstance(given, str):
        declaration.fail("", f"ordering_key takes the name of a field, not {given!r}")
    if given not in declaration.fields():
        declaration.fail("", f"ordering_key names {given!r}, and its fields are {names}")


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
