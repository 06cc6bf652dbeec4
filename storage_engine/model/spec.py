"""What a declared type is, as data: its name, identity, fields and canonical schema.

A `TypeSpec` is all that engines know of a user's class. Promise: `TypeSpec.from_schema_dict`
restores from a stored schema everything needed to read and write the type, without the class.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, Literal
from uuid import UUID

from storage_engine.errors import UnsupportedTypeError
from storage_engine.model.canonical import canonical_json
from storage_engine.model.field_types import (
    Storage,
    build_type_spec,
    classify,
    describe,
    is_uuid,
    scalar_spec,
    unknown_storage,
    unordered,
)
from storage_engine.model.scalars import Reviver

__all__ = [
    "FIRST_FIELD_ID",
    "MISSING",
    "SYSTEM_COLUMNS",
    "FieldSpec",
    "Kind",
    "Missing",
    "Storage",
    "TypeSpec",
    "build_type_spec",
    "classify",
]

Kind = Literal["entity", "relation"]

SYSTEM_COLUMNS = frozenset(
    {
        "commit_id",
        "entity_key",
        "left_key",
        "right_key",
        "instance_key",
        "schema_version_id",
        "fields_json",
        "entity_type",
        "relation_type",
    }
)

FIRST_FIELD_ID = 1001  # lower ids belong to system columns


class Missing(Enum):
    """The type of MISSING: an enum, so that type checkers can narrow on `is MISSING`."""

    MISSING = "missing"

    def __repr__(self) -> str:
        return "MISSING"


MISSING = Missing.MISSING
"""Marks "no default", which None cannot: None is a default that users write."""


@dataclass(frozen=True)
class FieldSpec:
    """One field. `default` is in its JSON form; a factory's result cannot be known beforehand."""

    name: str
    type_spec: Mapping[str, Any]
    storage: Storage
    nullable: bool
    index: bool
    field_id: int
    required: bool
    default: Any = MISSING
    default_factory: Callable[[], Any] | None = field(default=None, compare=False, repr=False)
    renamed_from: str | None = field(default=None, compare=False, repr=False)  # never stored
    revive: Reviver | None = field(default=None, compare=False, repr=False)  # to enum members
    description: str | None = field(default=None, compare=False, repr=False)  # never stored
    sensitive: bool = field(default=False, compare=False, repr=False)  # never stored

    @cached_property
    def logical(self) -> Literal["uuid", "literal"] | None:
        """What the values of a text or int column are beyond that."""
        scalar = scalar_spec(self.type_spec)
        if scalar["kind"] == "literal":
            return "literal"
        return "uuid" if is_uuid(scalar) else None

    @property
    def column_type(self) -> str:
        """For people: how it is stored, or what an enum, a Literal or a UUID is beyond that."""
        return self.storage if self.logical is None else describe(scalar_spec(self.type_spec))

    def restored(self, value: Any) -> Any:
        """The value that a stored scalar, or decoded JSON, stands for in Python."""
        if value is None:
            return None
        if self.logical == "uuid":
            value = UUID(value)
        return value if self.revive is None else self.revive(value)

    def __hash__(self) -> int:
        return hash((self.name, self.field_id, self.storage))  # type_spec is a dict

    def schema_dict(self) -> dict[str, Any]:
        described = {
            "id": self.field_id,
            "name": self.name,
            "type_spec": self.type_spec,
            "storage": self.storage,
            "nullable": self.nullable,
            "index": self.index,
            "required": self.required,
        }
        return described if self.default is MISSING else {**described, "default": self.default}

    @classmethod
    def from_schema_dict(cls, stored: Mapping[str, Any]) -> FieldSpec:
        """UnsupportedTypeError where a newer program has stored a type that this one lacks."""
        type_spec = _of_type(dict, stored, "type_spec")
        storage = _of_type(str, stored, "storage")
        name = _of_type(str, stored, "name")
        stranger = unknown_storage(type_spec, storage)
        if stranger is not None:
            raise UnsupportedTypeError(field=name, kind=stranger)
        return cls(
            name=name,
            type_spec=type_spec,
            storage=storage,
            nullable=_of_type(bool, stored, "nullable"),
            index=_of_type(bool, stored, "index"),
            field_id=_of_type(int, stored, "id"),
            required=_of_type(bool, stored, "required"),
            default=stored.get("default", MISSING),
        )

    def aligned(self, stored: Mapping[str, Any]) -> FieldSpec:
        """This field with the id of a stored one, and its order of unions: Python itself takes
        `Field[int | str]` for `Field[str | int]` once either was written anywhere."""
        same = unordered(self.type_spec) == unordered(stored["type_spec"])
        return replace(
            self,
            field_id=stored["id"],
            type_spec=stored["type_spec"] if same else self.type_spec,
        )


@dataclass(frozen=True)
class TypeSpec:
    """One entity or relation type.

    `fields` of an entity include its primary key; those of a relation exclude the instance key,
    which is identity only.

    What the class says for people (`description` and what follows it) is never stored: a spec of a
    stored schema has none of it, and specs that differ in it alone are equal.
    """

    kind: Kind
    name: str
    fields: tuple[FieldSpec, ...]
    primary_key: str | None = None
    instance_key: str | None = None
    left: str | None = None
    right: str | None = None
    python_class: type | None = field(default=None, compare=False, repr=False)
    renamed_from: str | None = field(default=None, compare=False, repr=False)  # never stored
    description: str | None = field(default=None, compare=False, repr=False)
    owners: tuple[str, ...] = field(default=(), compare=False, repr=False)
    tags: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    sensitive: bool = field(default=False, compare=False, repr=False)  # no row is to be shown
    sensitive_columns: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    instance_key_description: str | None = field(default=None, compare=False, repr=False)

    @property
    def identity(self) -> tuple[str, ...]:
        """The identity columns. Unkeyed relations have "" as instance_key in every row."""
        if self.kind == "entity":
            return ("entity_key",)
        return ("left_key", "right_key", "instance_key")

    @property
    def type_column(self) -> str:
        return f"{self.kind}_type"

    @property
    def folder(self) -> str:
        return "entities" if self.kind == "entity" else "relations"

    def without_class(self) -> TypeSpec:
        """Without anything of the user's code, which another process may not be able to import;
        rows are written and read the same, but no objects are made of them."""
        fields = tuple(replace(f, revive=None) for f in self.fields)
        return replace(self, fields=fields, python_class=None)

    @property
    def ref(self) -> tuple[str, str]:
        return (self.kind, self.name)

    def field(self, name: str) -> FieldSpec:
        """The field of that name; KeyError when there is none."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, FieldSpec]:
        return {f.name: f for f in self.fields}

    def schema_dict(self) -> dict[str, Any]:
        """The canonical schema: what a storage keeps of the type."""
        return {
            "kind": self.kind,
            "name": self.name,
            "fields": [f.schema_dict() for f in self.fields],
            "primary_key": self.primary_key,
            "instance_key": self.instance_key,
            "left": self.left,
            "right": self.right,
        }

    @cached_property
    def schema_sha256(self) -> str:
        """Hash of the canonical JSON of `schema_dict`, blind to field order and ids.

        Moving a line in a class changes no row, so it must not look like a schema change.
        """
        schema = self.schema_dict()
        schema["fields"] = sorted(
            ({k: v for k, v in f.items() if k != "id"} for f in schema["fields"]),
            key=lambda f: str(f["name"]),
        )
        return hashlib.sha256(canonical_json(schema).encode()).hexdigest()

    @cached_property
    def layout_sha256(self) -> str:
        """The same with field order and ids: of how files are written."""
        return hashlib.sha256(canonical_json(self.schema_dict()).encode()).hexdigest()

    def aligned(self, stored: Mapping[str, Any]) -> TypeSpec:
        """This type with the field order, ids and order of unions of a stored schema; new fields
        come last.

        Ids are never reused: a new field's id is above all that the stored schema has.
        """
        ids: dict[str, int] = {f["name"]: f["id"] for f in stored["fields"]}
        highest = max([*ids.values(), FIRST_FIELD_ID - 1])
        kept = [
            self.field(f["name"]).aligned(f) for f in stored["fields"] if f["name"] in self._by_name
        ]
        new = [f for f in self.fields if f.name not in ids]
        added = [replace(f, field_id=highest + n) for n, f in enumerate(new, start=1)]
        return replace(self, fields=(*kept, *added))

    @classmethod
    def from_schema_dict(cls, stored: Mapping[str, Any]) -> TypeSpec:
        optional = (str, type(None))
        return cls(
            kind=_of_type(str, stored, "kind"),
            name=_of_type(str, stored, "name"),
            fields=tuple(FieldSpec.from_schema_dict(f) for f in stored["fields"]),
            primary_key=_of_type(optional, stored, "primary_key"),
            instance_key=_of_type(optional, stored, "instance_key"),
            left=_of_type(optional, stored, "left"),
            right=_of_type(optional, stored, "right"),
        )


def _of_type(kinds: type | tuple[type, ...], stored: Mapping[str, Any], name: str) -> Any:
    value = stored[name]
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value
