"""What kinds of values a place can hold: a field, or a path into it.

Queries are checked against declared types when they are built, so that a misspelt key or a text
compared with a number is an error at the line that has it, not an empty result.

A kind is what a comparison can tell apart in every storage: the seven scalars, `list` and `dict`.
None is not a kind: any place may turn out to be NULL or missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from pydantic_core import PydanticCustomError

from storage_engine.model.type_spec import describe
from storage_engine.model.validation import INT64_MAX, INT64_MIN, to_utc, unknown_name

NUMBERS = frozenset({"int", "float"})
ORDERED = frozenset({"str", "int", "float", "datetime", "date", "bytes"})
SCALARS = ORDERED | {"bool"}
_ANY = frozenset({"str", "int", "float", "bool", "list", "dict"})

_SEGMENT = re.compile(r"[^\s.\[\]'$*]+")
_PRIMITIVE_KINDS: dict[type, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    datetime: "datetime",
    date: "date",
    bytes: "bytes",
}


@dataclass(frozen=True, eq=False)
class Place:
    """The declared alternatives at one place, each with the TypedDicts that enclose it."""

    members: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]

    @classmethod
    def of(cls, type_spec: Mapping[str, Any]) -> Place:
        return cls(tuple(_flatten(type_spec, {})))

    @property
    def kinds(self) -> frozenset[str]:
        found: set[str] = set()
        for spec, _ in self.members:
            if spec["kind"] == "primitive":
                name = spec["name"]
                found |= _ANY if name == "Any" else {name} - {"NoneType"}
            else:
                found.add("list" if spec["kind"] == "list" else "dict")
        return frozenset(found)

    def describe(self) -> str:
        return " | ".join(dict.fromkeys(describe(spec) for spec, _ in self.members))

    def key(self, key: str, where: str) -> Place:
        """The place under a key; ValueError when no value here can have it."""
        found: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        known: set[str] = set()
        for spec, env in self.members:
            match spec["kind"]:
                case "primitive" if spec["name"] == "Any":
                    found.append((spec, env))
                case "dict":
                    found += _flatten(spec["value"], env)
                case "typed_dict":
                    known.update(spec["fields"])
                    if key in spec["fields"]:
                        inner = {**env, spec["name"]: spec}
                        found += _flatten(spec["fields"][key]["type"], inner)
        if found:
            return Place(tuple(found))
        if known:
            raise ValueError(f"{where}: {unknown_name(key, sorted(known), what='key')}")
        if "list" in self.kinds:
            raise ValueError(
                f"{where} is {self.describe()}: a list has no keys; use any_path({key!r}) to ask "
                "for some element"
            )
        raise ValueError(f"{where} is {self.describe()}, which has no keys")

    def items(self, where: str) -> Place:
        """The place of a list's elements; ValueError when no value here can be a list."""
        found: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        for spec, env in self.members:
            if spec["kind"] == "list":
                found += _flatten(spec["item"], env)
            elif spec.get("name") == "Any":
                found.append((spec, env))
        if not found:
            raise ValueError(f"{where} is {self.describe()}, not a list")
        return Place(tuple(found))


def _flatten(
    spec: Mapping[str, Any], env: Mapping[str, Any]
) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    if spec["kind"] == "union":
        for member in spec["members"]:
            yield from _flatten(member, env)
    elif spec["kind"] == "ref":
        yield env[spec["name"]], env
    else:
        yield spec, env


# --- paths ------------------------------------------------------------------------------------


def split_path(path: object) -> tuple[str, ...]:
    """`"address.city"` as keys; ValueError for anything that is not such a path."""
    if not isinstance(path, str):
        raise TypeError(f"a path is a str such as 'address.city', not {type(path).__name__}")
    parts = path.split(".")
    for part in parts:
        if not _SEGMENT.fullmatch(part):
            raise ValueError(
                f"bad path {path!r}: write keys with dots between, such as 'address.city'; other "
                "keys go in brackets, one at a time: ['two words']"
            )
    return tuple(check_key(part) for part in parts)


def check_key(key: object) -> str:
    """A key as given in brackets. What no JSON path of every engine can name is refused."""
    if isinstance(key, int):
        raise TypeError("list elements have no path; use any_path(...) or contains(...)")
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {type(key).__name__}")
    if not key:
        raise ValueError("bad path: a key is empty")
    if key == "*" or any(c in '"\\' or c < " " or "\ud800" <= c <= "\udfff" for c in key):
        raise ValueError(
            f"bad path: the key {key!r} cannot be searched by (a quote, a backslash, a control "
            "character or a lone '*')"
        )
    return key


# --- values -----------------------------------------------------------------------------------


def kind_of(value: Any) -> str:
    """The kind of a Python value; "null" for None, "other" for what no field holds."""
    if value is None:
        return "null"
    found = _PRIMITIVE_KINDS.get(type(value))
    if found is not None:
        return found
    for base, kind in _PRIMITIVE_KINDS.items():
        if isinstance(value, base):
            return kind
    return "list" if isinstance(value, list) else "dict" if isinstance(value, dict) else "other"


def literal(kinds: frozenset[str], value: Any, where: str, described: str) -> Any:
    """The value in the form in which it is compared, or why it cannot be."""
    if value is None:
        raise TypeError(
            f"{where} cannot be compared with None; use {where}.is_null() or .is_not_null()"
        )
    if isinstance(value, bool):
        raise TypeError(
            f"{where} cannot be compared with {value}; use {where}.is_true() or .is_false()"
        )
    return plain(kinds, value, where, described)


def plain(kinds: frozenset[str], value: Any, where: str, described: str) -> Any:
    """`literal` for places that take booleans too, such as the elements of a list."""
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    kind = kind_of(value)
    allowed = kinds | NUMBERS if kinds & NUMBERS else kinds
    if kind not in allowed or kind not in SCALARS:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise TypeError(
            f"{where} is {described}; it cannot be compared with {shown} ({type(value).__name__})"
        )
    match kind:
        case "str":
            if any("\ud800" <= c <= "\udfff" for c in value):
                raise ValueError(f"{where}: {value!r} contains a lone surrogate, no text does")
            return str.__str__(value)
        case "int":
            if not INT64_MIN <= value <= INT64_MAX:
                raise ValueError(f"{where}: {value} is beyond 64 bits (int64)")
            return int(value)
        case "float":
            if value - value != 0.0:
                raise ValueError(f"{where}: {value} is not finite, stored numbers are")
            return float(value)
        case "datetime":
            try:
                return to_utc(value)
            except PydanticCustomError as error:
                raise ValueError(f"{where}: {value!r} {error.message()}") from None
        case _:
            return value
