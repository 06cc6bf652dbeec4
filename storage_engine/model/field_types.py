"""The JSON-able description of a field's type, and where a value of it is stored.

`build_type_spec` turns an annotation into plain dicts that a storage can keep, `classify` maps
such a description to a column (RFC 0009 section 5.1). Promise: whatever `build_type_spec` accepts
can be stored and read back without loss; anything else is refused here, at declaration.

    {"kind": "primitive", "name": "str"}            also NoneType and Any
    {"kind": "union", "members": [...]}             flat, without repetition
    {"kind": "list", "item": ...}
    {"kind": "dict", "value": ...}                  keys are always str
    {"kind": "typed_dict", "name": ..., "fields": {key: {"type": ..., "required": bool}}}
    {"kind": "ref", "name": ...}                    an enclosing typed_dict, by name
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from functools import partial
from typing import (
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

from typing_extensions import ReadOnly, get_type_hints, is_typeddict

Storage = Literal["str", "int", "float", "bool", "datetime", "date", "bytes", "json"]

_SCALARS: dict[type, Storage] = {
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    datetime: "datetime",
    date: "date",
    bytes: "bytes",
}
_SCALAR_NAMES: dict[str, Storage] = {name: name for name in _SCALARS.values()}

# JSON has no such values: they are written as strings and need the declared type to come back.
_ENCODED = frozenset({"datetime", "date", "bytes"})

_NONE = {"kind": "primitive", "name": "NoneType"}


class AnnotationError(TypeError):
    """An annotation that no storage can hold; the declaration adds class and field to it."""


def build_type_spec(annotation: Any, *, localns: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe an annotation. `localns` resolves forward references inside TypedDicts.

    A forward reference to something that does not exist yet raises NameError.
    """
    spec = _build(annotation, (), dict(localns or {}))
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
    if len(rest) == 1 and is_primitive(rest[0]) and rest[0]["name"] in _SCALAR_NAMES:
        return _SCALAR_NAMES[rest[0]["name"]], nullable
    return "json", nullable


def is_primitive(type_spec: Mapping[str, Any]) -> bool:
    return bool(type_spec["kind"] == "primitive")


def takes_strings(type_spec: Mapping[str, Any]) -> bool:
    """Whether a plain `str` is itself a value of a declared member (`str`, `str | int`)."""
    return any(m.get("name") == "str" for m in _members(type_spec) if is_primitive(m))


def has_encoded_leaves(type_spec: Mapping[str, Any]) -> bool:
    """Whether a value can contain what JSON has no notation for (datetime, date, bytes)."""
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
            return "None" if type_spec["name"] == "NoneType" else str(type_spec["name"])
        case "union":
            return " | ".join(describe(m) for m in type_spec["members"])
        case "list":
            return f"list[{describe(type_spec['item'])}]"
        case "dict":
            return f"dict[str, {describe(type_spec['value'])}]"
        case _:
            return str(type_spec["name"])


def _members(type_spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(type_spec["members"]) if type_spec["kind"] == "union" else [type_spec]


def _build(annotation: Any, enclosing: tuple[Any, ...], localns: dict[str, Any]) -> dict[str, Any]:
    if annotation is Any:
        return {"kind": "primitive", "name": "Any"}
    if annotation is None or annotation is type(None):
        return dict(_NONE)
    if isinstance(annotation, type) and annotation in _SCALARS:
        return {"kind": "primitive", "name": _SCALARS[annotation]}
    if is_typeddict(annotation):
        return _build_typed_dict(annotation, enclosing, localns)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _build_union(args, enclosing, localns)
    if origin is list:
        return {"kind": "list", "item": _build(args[0], enclosing, localns)}
    if origin is dict:
        if args[0] is not str:
            raise AnnotationError(f"dict keys must be str, not {_show(args[0])}")
        return {"kind": "dict", "value": _build(args[1], enclosing, localns)}
    raise AnnotationError(_unsupported(annotation))


def _build_union(
    args: tuple[Any, ...], enclosing: tuple[Any, ...], localns: dict[str, Any]
) -> dict[str, Any]:
    members: list[dict[str, Any]] = []
    for arg in args:
        built = _build(arg, enclosing, localns)
        for member in built["members"] if built["kind"] == "union" else [built]:
            if member not in members:
                members.append(member)
    return members[0] if len(members) == 1 else {"kind": "union", "members": members}


def _build_typed_dict(
    cls: Any, enclosing: tuple[Any, ...], localns: dict[str, Any]
) -> dict[str, Any]:
    if cls in enclosing:
        return {"kind": "ref", "name": cls.__name__}
    if any(outer.__name__ == cls.__name__ for outer in enclosing):
        raise AnnotationError(
            f"two different TypedDicts named {cls.__name__} inside each other; rename one, "
            "since references between them go by name"
        )
    # A TypedDict declared in a function is not in its module: it must still find itself.
    hints = get_type_hints(cls, localns={**localns, cls.__name__: cls}, include_extras=True)
    fields: dict[str, Any] = {}
    for key, hint in hints.items():
        inner, required = _unwrap(hint, key in cls.__required_keys__)
        built = _build(inner, (*enclosing, cls), localns)
        fields[key] = {"type": built, "required": required}
    return {"kind": "typed_dict", "name": cls.__name__, "fields": fields}


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
        "bytes, Any, T | None, list[T], dict[str, T], a TypedDict or a union of these"
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
    "bytes": "string",
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
            if len(alike) > 1 and any(_encoded(m, inner, frozenset()) for m in alike):
                names = " and ".join(describe(m) for m in alike)
                raise AnnotationError(
                    f"{names} cannot be told apart once stored as JSON; keep one of them, or "
                    "wrap them in TypedDicts under different keys"
                )
    for child in _children(spec):
        _check_unions(child, inner)


def _shapes(spec: Mapping[str, Any]) -> set[str]:
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
