"""The JSON-able description of a field's type, and where a value of it is stored.

`build_type_spec` turns an annotation into plain dicts that a storage can keep, `classify` maps
such a description to a column (RFC 0009 section 5.1). Promise: whatever `build_type_spec` accepts
can be stored and read back without loss; anything else is refused here, at declaration.

    {"kind": "primitive", "name": "str"}            also NoneType and Any
    {"kind": "decimal", "precision": 12, "scale": 2}
    {"kind": "literal", "values": ["open", "paid"]} all str or all int, sorted: a `Literal` or the
                                                    values of an enum, whatever its class is called
    {"kind": "union", "members": [...]}             flat, without repetition
    {"kind": "list", "item": ...}
    {"kind": "dict", "value": ...}                  keys are always str
    {"kind": "typed_dict", "name": ..., "fields": {key: {"type": ..., "required": bool}}}
    {"kind": "ref", "name": ...}                    an enclosing typed_dict, by name
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum, Flag
from functools import partial
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
)
from uuid import UUID

from typing_extensions import ReadOnly, get_type_hints, is_typeddict

from storage_engine.model.decimals import Precision, decimal_type
from storage_engine.model.scalars import is_enum, listed

Storage = str
"""The kind of a column: one of `STORAGES`, or a decimal such as "decimal(12,2)"."""

STORAGES = frozenset({"str", "int", "float", "bool", "datetime", "date", "time", "bytes", "json"})

_SCALARS: dict[type, str] = {
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    datetime: "datetime",
    date: "date",
    time: "time",
    bytes: "bytes",
    UUID: "uuid",
}
_SCALAR_NAMES: dict[str, Storage] = {**{n: n for n in _SCALARS.values()}, "uuid": "str"}

# JSON has no such values: they are written as strings and need the declared type to come back.
_ENCODED = frozenset({"datetime", "date", "time", "bytes", "uuid"})
_INT64 = range(-(2**63), 2**63)

_NONE = {"kind": "primitive", "name": "NoneType"}


class AnnotationError(TypeError):
    """An annotation that no storage can hold; the declaration adds class and field to it."""


def build_type_spec(
    annotation: Any,
    *,
    localns: Mapping[str, Any] | None = None,
    decimals: Precision | None = None,
) -> dict[str, Any]:
    """Describe an annotation. `localns` resolves forward references inside TypedDicts, `decimals`
    is what a Decimal has that does not say it itself.

    A forward reference to something that does not exist yet raises NameError.
    """
    spec = _Builder(dict(localns or {}), decimals).build(annotation, ())
    _check_unions(spec, {})
    return spec


def classify(type_spec: Mapping[str, Any]) -> tuple[Storage, bool]:
    """The column that holds such values, and whether it may hold NULL.

    A typed column only when a value is always one scalar (or None); all else is JSON. `Any` can
    be None, so it is nullable.
    """
    members = _members(type_spec)
    nullable = any(m.get("name") in ("NoneType", "Any") for m in members if is_primitive(m))
    rest = [m for m in members if m != _NONE]
    storage = scalar_storage(rest[0]) if len(rest) == 1 else None
    return storage or "json", nullable


def scalar_storage(type_spec: Mapping[str, Any]) -> Storage | None:
    """The column of one scalar type; None for what is none."""
    match type_spec["kind"]:
        case "primitive":
            return _SCALAR_NAMES.get(type_spec["name"])
        case "decimal":
            return precision_of(type_spec).kind
        case "literal":
            return "str" if isinstance(type_spec["values"][0], str) else "int"
    return None


def precision_of(type_spec: Mapping[str, Any]) -> Precision:
    return Precision(type_spec["precision"], type_spec["scale"])


def scalar_spec(type_spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """`T` of `T` and `T | None`; the description itself where it is another union."""
    rest = [m for m in _members(type_spec) if m != _NONE]
    return rest[0] if len(rest) == 1 else type_spec


def is_uuid(type_spec: Mapping[str, Any]) -> bool:
    return type_spec.get("name") == "uuid" and is_primitive(type_spec)


def has_literals(type_spec: Mapping[str, Any]) -> bool:
    return type_spec["kind"] == "literal" or any(map(has_literals, _children(type_spec)))


def has_decimals(type_spec: Mapping[str, Any]) -> bool:
    return type_spec["kind"] == "decimal" or any(map(has_decimals, _children(type_spec)))


def unknown_storage(type_spec: Any, storage: str) -> str | None:
    """What in a stored description this program does not know; None when it knows all."""
    if storage not in STORAGES and decimal_type(storage) is None:
        return storage
    return _unknown_kind(type_spec)


def _unknown_kind(spec: Mapping[str, Any]) -> str | None:
    if spec["kind"] not in _KINDS:
        return str(spec["kind"])
    if is_primitive(spec) and spec["name"] not in (*_SCALAR_NAMES, "NoneType", "Any"):
        return str(spec["name"])
    return next(filter(None, map(_unknown_kind, _children(spec))), None)


_KINDS = frozenset(
    {"primitive", "union", "list", "dict", "typed_dict", "ref", "decimal", "literal"}
)


def is_primitive(type_spec: Mapping[str, Any]) -> bool:
    return bool(type_spec["kind"] == "primitive")


def takes_strings(type_spec: Mapping[str, Any]) -> bool:
    """Whether a plain `str` is itself a value of a declared member (`str`, `str | int`)."""
    return any(m.get("name") == "str" for m in _members(type_spec) if is_primitive(m))


def has_encoded_leaves(type_spec: Mapping[str, Any]) -> bool:
    """Whether a value can contain what JSON has no notation for, such as a datetime."""
    return _encoded(type_spec, {}, frozenset())


def unordered(type_spec: Any) -> Any:
    """A type description in which unions have one order, to compare: `int | str` is `str | int`."""
    if isinstance(type_spec, Mapping):
        plain = {name: unordered(value) for name, value in type_spec.items()}
        if plain.get("kind") == "union":
            plain["members"] = sorted(plain["members"], key=partial(json.dumps, sort_keys=True))
        return plain
    if isinstance(type_spec, list | tuple):
        return [unordered(item) for item in type_spec]
    return type_spec


def describe(type_spec: Mapping[str, Any]) -> str:
    """A type description as a person would write it: `list[str | None]`."""
    match type_spec["kind"]:
        case "primitive":
            name = str(type_spec["name"])
            return {"NoneType": "None", "uuid": "UUID"}.get(name, name)
        case "union":
            return " | ".join(describe(m) for m in type_spec["members"])
        case "list":
            return f"list[{describe(type_spec['item'])}]"
        case "dict":
            return f"dict[str, {describe(type_spec['value'])}]"
        case "decimal":
            return f"Decimal({type_spec['precision']}, {type_spec['scale']})"
        case "literal":
            return f"Literal[{listed(type_spec['values'])}]"
        case _:
            return str(type_spec["name"])


def _members(type_spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(type_spec["members"]) if type_spec["kind"] == "union" else [type_spec]


class _Builder:
    def __init__(self, localns: dict[str, Any], decimals: Precision | None) -> None:
        self._localns = localns
        self._decimals = decimals

    def build(self, annotation: Any, enclosing: tuple[Any, ...]) -> dict[str, Any]:
        if annotation is Any:
            return {"kind": "primitive", "name": "Any"}
        if annotation is None or annotation is type(None):
            return dict(_NONE)
        if isinstance(annotation, type) and annotation in _SCALARS:
            return {"kind": "primitive", "name": _SCALARS[annotation]}
        if is_typeddict(annotation):
            return self._typed_dict(annotation, enclosing)
        if is_enum(annotation):
            return _enum(annotation)
        origin, args = get_origin(annotation), get_args(annotation)
        if annotation is Decimal or (origin is Annotated and args[0] is Decimal):
            return self._decimal(args[1:])
        if origin is Literal:
            return _literal(annotation, args)
        if origin in (Union, types.UnionType):
            return self._union(args, enclosing)
        if origin is list:
            return {"kind": "list", "item": self.build(args[0], enclosing)}
        if origin is dict:
            if args[0] is not str:
                raise AnnotationError(f"dict keys must be str, not {_show(args[0])}")
            return {"kind": "dict", "value": self.build(args[1], enclosing)}
        raise AnnotationError(_unsupported(annotation))

    def _decimal(self, metadata: tuple[Any, ...]) -> dict[str, Any]:
        own = [mark for mark in metadata if isinstance(mark, Precision)]
        if len(own) > 1:
            raise AnnotationError("has more than one Precision; keep one")
        precision = own[0] if own else self._decimals
        if precision is None:
            raise AnnotationError(
                "Decimal does not say how many digits it has; write for example "
                "Field(precision=12, scale=2), or Annotated[Decimal, Precision(12, 2)] inside a "
                "TypedDict"
            )
        return {"kind": "decimal", "precision": precision.precision, "scale": precision.scale}

    def _union(self, args: tuple[Any, ...], enclosing: tuple[Any, ...]) -> dict[str, Any]:
        return _union([self.build(arg, enclosing) for arg in args])

    def _typed_dict(self, cls: Any, enclosing: tuple[Any, ...]) -> dict[str, Any]:
        if cls in enclosing:
            return {"kind": "ref", "name": cls.__name__}
        if any(outer.__name__ == cls.__name__ for outer in enclosing):
            raise AnnotationError(
                f"two different TypedDicts named {cls.__name__} inside each other; rename one, "
                "since references between them go by name"
            )
        # A TypedDict declared in a function is not in its module: it must still find itself.
        names = {**self._localns, cls.__name__: cls}
        hints = get_type_hints(cls, localns=names, include_extras=True)
        fields: dict[str, Any] = {}
        for key, hint in hints.items():
            inner, required = _unwrap(hint, key in cls.__required_keys__)
            built = self.build(inner, (*enclosing, cls))
            fields[key] = {"type": built, "required": required}
        return {"kind": "typed_dict", "name": cls.__name__, "fields": fields}


def _union(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    members: list[dict[str, Any]] = []
    for built in parts:
        for member in built["members"] if built["kind"] == "union" else [built]:
            if member not in members:
                members.append(member)
    return members[0] if len(members) == 1 else {"kind": "union", "members": members}


def _enum(cls: type[Enum]) -> dict[str, Any]:
    if issubclass(cls, Flag):
        raise AnnotationError(f"{cls.__name__} is a Flag, whose members combine; store an int")
    return _literal(cls, tuple(member.value for member in cls))


def _literal(annotation: Any, values: tuple[Any, ...]) -> dict[str, Any]:
    """`Literal` may have None among its values, which is that of `T | None`."""
    plain = {v.value if isinstance(v, Enum) else v for v in values if v is not None}
    if {type(v) for v in plain} not in ({str}, {int}):
        raise AnnotationError(
            f"the values of {_show(annotation)} must be all str or all int: they are what is stored"
        )
    for value in plain:
        if isinstance(value, int) and value not in _INT64:
            raise AnnotationError(f"{value} of {_show(annotation)} is beyond 64 bits (int64)")
        if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            raise AnnotationError(f"{value!r} of {_show(annotation)} contains a lone surrogate")
    made: dict[str, Any] = {"kind": "literal", "values": sorted(plain)}
    return _union([made, dict(_NONE)]) if None in values else made


def _unwrap(hint: Any, required: bool) -> tuple[Any, bool]:
    """The type inside Required[...] and NotRequired[...], and whether the key is required.

    Under postponed annotations __required_keys__ is wrong; the evaluated marker is right.
    """
    marker: Any = get_origin(hint)
    if marker in (Required, NotRequired, ReadOnly):
        return _unwrap(get_args(hint)[0], required if marker is ReadOnly else marker is Required)
    return hint, required


def _unsupported(annotation: Any) -> str:
    shown = _show(annotation)
    if annotation in (list, dict):
        inner = "str" if annotation is list else "str, int"
        return f"{shown} does not say what it holds; write for example {shown}[{inner}], or Any"
    if isinstance(annotation, TypeVar | ForwardRef | str):
        return f"{shown} is not a type that can be stored"
    if annotation in (tuple, set, frozenset) or get_origin(annotation) in (tuple, set, frozenset):
        return f"{shown} has no JSON form; use list[...]"
    return (
        f"{shown} is not a type that can be stored; use str, int, float, bool, datetime, date, "
        "time, bytes, Decimal, UUID, an enum, Literal, Any, T | None, list[T], dict[str, T], a "
        "TypedDict or a union of these"
    )


def _show(annotation: Any) -> str:
    if isinstance(annotation, ForwardRef):
        return repr(annotation.__forward_arg__)
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation.__name__
    return str(annotation).replace("typing.", "")


# --- unions must be readable back -------------------------------------------------------------

_SHAPES = {
    "NoneType": "null",
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "str": "string",
    "datetime": "string",
    "date": "string",
    "time": "string",
    "bytes": "string",
    "uuid": "string",
}


def _check_unions(spec: Mapping[str, Any], env: Mapping[str, Any]) -> None:
    """Refuse unions whose members look alike in JSON while one of them needs decoding.

    Members without encoded leaves may look alike (`list[int] | list[str]`): what JSON gives back
    is then the value itself, whichever member it came from.
    """
    inner = _bind(spec, env)
    if spec["kind"] == "union":
        by_shape: dict[str, list[Mapping[str, Any]]] = {}
        for member in spec["members"]:
            for shape in _shapes(member):
                by_shape.setdefault(shape, []).append(member)
        for alike in by_shape.values():
            if len(alike) > 1 and any(_needs_type(m, inner) for m in alike):
                names = " and ".join(describe(m) for m in alike)
                raise AnnotationError(
                    f"{names} cannot be told apart once stored as JSON; keep one of them, or "
                    "wrap them in TypedDicts under different keys"
                )
    for child in _children(spec):
        _check_unions(child, inner)


def _needs_type(spec: Mapping[str, Any], env: Mapping[str, Any]) -> bool:
    """Whether what JSON gives back is not the value itself, or not any value of its shape."""
    return spec["kind"] == "literal" or _encoded(spec, env, frozenset())


def _shapes(spec: Mapping[str, Any]) -> set[str]:
    if spec["kind"] == "literal":
        return {"string"} if isinstance(spec["values"][0], str) else {"integer", "number"}
    if spec["kind"] == "decimal":
        return {"string", "integer", "number", "boolean"}  # an int would be one or the other
    if is_primitive(spec):
        return {_SHAPES[spec["name"]]} if spec["name"] != "Any" else {*_SHAPES.values(), *_NESTED}
    return {"array" if spec["kind"] == "list" else "object"}


_NESTED = ("array", "object")


def _children(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    match spec["kind"]:
        case "union":
            yield from spec["members"]
        case "list":
            yield spec["item"]
        case "dict":
            yield spec["value"]
        case "typed_dict":
            yield from (field["type"] for field in spec["fields"].values())


def _bind(spec: Mapping[str, Any], env: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**env, spec["name"]: spec} if spec["kind"] == "typed_dict" else env


def _encoded(spec: Mapping[str, Any], env: Mapping[str, Any], seen: frozenset[str]) -> bool:
    if spec["kind"] == "decimal":
        return True
    if is_primitive(spec):
        return spec["name"] in _ENCODED
    if spec["kind"] == "ref":
        # A reference whose target is not at hand is to a TypedDict that the caller is inside of
        # and looks at anyway.
        name = spec["name"]
        return name in env and name not in seen and _encoded(env[name], env, seen | {name})
    inner = _bind(spec, env)
    if spec["kind"] == "typed_dict":
        seen |= {spec["name"]}
    return any(_encoded(child, inner, seen) for child in _children(spec))
