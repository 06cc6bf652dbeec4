"""The expression tree of queries, and the kinds of values that it is checked against.

A tree says what a filter means, apart from how an engine asks it. Nodes are immutable, hashable,
and read as they were written. Their values have been checked against the declared types when the
query was built, so that a misspelt key or a text compared with a number is an error at the line
that has it, not an empty result, and whoever walks a tree need not doubt them.

A kind is what a comparison can tell apart in every storage: the scalars as they are stored (so that
a UUID or an enum is a text), `list` and `dict`. Decimals have a kind for each precision and scale;
a value alone is "decimal" (`base_kind`). None is not a kind: any place may turn out to be NULL or
missing.

What the nodes mean is written down in docs/queries.md and done by `testing.evaluator`; the SQL
compilers in `query` mean the same.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Literal, NoReturn

from pydantic_core import PydanticCustomError

from storage_engine.model.canonical import leaf
from storage_engine.model.field_types import describe, is_uuid, scalar_storage
from storage_engine.model.scalars import listed, lowered, read_time, read_uuid
from storage_engine.model.spec import FieldSpec
from storage_engine.model.validation import INT64_MAX, INT64_MIN, to_utc, unknown_name

NUMBERS = frozenset({"int", "float"})
ORDERED = frozenset({"str", "int", "float", "decimal", "datetime", "date", "time", "bytes"})
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
    time: "time",
    bytes: "bytes",
    Decimal: "decimal",
}


def base_kind(kind: str) -> str:
    """The kind without what a declaration adds: "decimal" of "decimal(12,2)"."""
    return kind.partition("(")[0]


def base_kinds(kinds: Iterable[str]) -> frozenset[str]:
    return frozenset(map(base_kind, kinds))


@dataclass(frozen=True, eq=False)
class TypePlace:
    """The declared alternatives at one place, each with the TypedDicts that enclose it."""

    members: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]

    @classmethod
    def of(cls, type_spec: Mapping[str, Any]) -> TypePlace:
        return cls(tuple(_flatten(type_spec, {})))

    @property
    def kinds(self) -> frozenset[str]:
        names: set[str] = set()
        for spec, _ in self.members:
            scalar = scalar_storage(spec)
            if scalar is not None:
                names.add(scalar)
            elif spec["kind"] != "primitive":
                names.add("list" if spec["kind"] == "list" else "dict")
            elif spec["name"] == "Any":
                names |= _ANY
        return frozenset(names)

    @property
    def holds_text(self) -> bool:
        """Whether parts of a text can be asked for; a UUID has none that mean anything."""
        return "str" in self.kinds and not any(is_uuid(spec) for spec, _ in self.members)

    def lower(self, value: Any, where: str) -> Any:
        """A value as it is stored here: that of an enum member, the text of a UUID."""
        for spec, _ in self.members:
            if is_uuid(spec) and not isinstance(value, bool | int | float):
                try:
                    return str(read_uuid(value))
                except ValueError as error:
                    raise TypeError(f"{where} is {self.describe()}; {value!r} {error}") from None
            if spec["kind"] == "literal":
                return lowered(value)
        return value

    def check_member(self, value: Any, where: str) -> None:
        """ValueError for a value that an enum or `Literal` does not have: no row ever has it."""
        of_kind = [
            spec["values"]
            for spec, _ in self.members
            if spec["kind"] == "literal" and type(spec["values"][0]) is type(value)
        ]
        if of_kind and value not in of_kind[0]:
            near = unknown_name(str(value), map(str, of_kind[0]), what="value")
            raise ValueError(f"{where}: {near} (it has {listed(of_kind[0])})")

    def describe(self) -> str:
        return " | ".join(dict.fromkeys(describe(spec) for spec, _ in self.members))

    def key(self, key: str, where: str) -> TypePlace:
        """The place under a key; ValueError when no value here can have it."""
        members: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        keys: set[str] = set()
        for spec, env in self.members:
            match spec["kind"]:
                case "primitive" if spec["name"] == "Any":
                    members.append((spec, env))
                case "dict":
                    members += _flatten(spec["value"], env)
                case "typed_dict":
                    keys.update(spec["fields"])
                    if key in spec["fields"]:
                        inner = {**env, spec["name"]: spec}
                        members += _flatten(spec["fields"][key]["type"], inner)
        if members:
            return TypePlace(tuple(members))
        if keys:
            raise ValueError(f"{where}: {unknown_name(key, sorted(keys), what='key')}")
        if "list" in self.kinds:
            raise ValueError(
                f"{where} is {self.describe()}: a list has no keys; use any_path({key!r}) to ask "
                "for some element"
            )
        raise ValueError(f"{where} is {self.describe()}, which has no keys")

    def items(self, where: str) -> TypePlace:
        """The place of a list's elements; ValueError when no value here can be a list."""
        members: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        for spec, env in self.members:
            if spec["kind"] == "list":
                members += _flatten(spec["item"], env)
            elif spec.get("name") == "Any":
                members.append((spec, env))
        if not members:
            raise ValueError(f"{where} is {self.describe()}, not a list")
        return TypePlace(tuple(members))


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
    exact = _PRIMITIVE_KINDS.get(type(value))
    if exact is not None:
        return exact
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
    if isinstance(value, bool) and "bool" in kinds:
        raise TypeError(
            f"{where} cannot be compared with {value}; use {where}.is_true() or .is_false()"
        )
    return plain(kinds, value, where, described)


def plain(kinds: frozenset[str], value: Any, where: str, described: str) -> Any:
    """`literal` for places that take booleans too, such as the elements of a list."""
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    kind = kind_of(value)
    bases = base_kinds(kinds)
    if "decimal" in bases and kind in ("int", "float"):
        if kind == "float":
            raise TypeError(
                f"{where} is {described}; a float is not exact, write Decimal('{value!r}')"
            )
        value, kind = Decimal(int(value)), "decimal"
    allowed = bases | NUMBERS if bases & NUMBERS else bases
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
        case "decimal":
            if not value.is_finite():
                raise ValueError(f"{where}: {value} is not finite, stored numbers are")
            return value
        case "time":
            try:
                return read_time(value)
            except ValueError as error:
                raise ValueError(f"{where}: {value!r} {error}") from None
        case "datetime":
            try:
                return to_utc(value)
            except PydanticCustomError as error:
                raise ValueError(f"{where}: {value!r} {error.message()}") from None
        case _:
            return value


Source = Literal["self", "left", "right"]
CompareOp = Literal["==", "!=", "<", "<=", ">", ">="]
TextOp = Literal["startswith", "endswith"]
TestOp = Literal["is_null", "is_not_null", "is_true", "is_false"]


@dataclass(frozen=True)
class Operand:
    """A place in a row.

    `owner` is the (kind, name) of the type whose field it is. `path` leads into the field,
    `item_path` into some element of the list found there (any_path). `source` says whose row:
    the queried one, or an endpoint of the queried relation, which `relation` names. `identity` is
    the system column that holds a key. `cast` is set when the user said the type of a place that
    is not declared: values of other kinds then count as missing.
    """

    owner: tuple[str, str]
    name: str
    kinds: frozenset[str]
    path: tuple[str, ...] = ()
    item_path: tuple[str, ...] | None = None
    source: Source = "self"
    relation: str | None = None
    identity: str | None = None
    cast: bool = False
    declared: str = field(default="", compare=False)
    spec: FieldSpec | None = field(default=None, compare=False, repr=False)

    @property
    def existential(self) -> bool:
        return self.item_path is not None

    def __repr__(self) -> str:
        start = self.owner[1] if self.source == "self" else f"{self.source}({self.relation})"
        keys = "".join(f"[{key!r}]" for key in self.path)
        some = "" if self.item_path is None else f".any_path({'.'.join(self.item_path)!r})"
        return f"{start}.{self.name}{keys}{some}"

    def as_json(self) -> dict[str, Any]:
        described: dict[str, Any] = {"type": self.owner[1], "field": self.name}
        if self.source != "self":
            described |= {"source": self.source, "relation": self.relation}
        if self.path:
            described["path"] = list(self.path)
        if self.item_path is not None:
            described["any_path"] = list(self.item_path)
        return described


class Condition(ABC):
    """Something that is true, false or unknown; combined with `&`, `|` and `~`."""

    __slots__ = ()

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """For `explain`: plain JSON values."""

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} is a condition for the storage, not a truth value: combine conditions "
            "with & | ~ (each in parentheses) instead of and, or, not, and write "
            "(1 < x) & (x < 5) instead of 1 < x < 5"
        )


class Filter(Condition):
    """A condition on rows, as `where` takes it."""

    __slots__ = ()

    def __and__(self, other: Filter) -> Filter:
        return And((*_parts(And, self), *_parts(And, other))) if _is(other) else NotImplemented

    def __or__(self, other: Filter) -> Filter:
        return Or((*_parts(Or, self), *_parts(Or, other))) if _is(other) else NotImplemented

    def __invert__(self) -> Filter:
        return Not(self)

    @abstractmethod
    def operands(self) -> Iterator[Operand]:
        """Every place that the condition looks at, in the order of writing."""


def _is(other: object) -> bool:
    if isinstance(other, Filter):
        return True
    raise TypeError(
        f"{other!r} is not a condition and cannot be combined with one; if it was meant as a part "
        "of a comparison, put each comparison in parentheses: (a == 1) & (b == 2)"
    )


def _parts(kind: type[And | Or], node: Filter) -> tuple[Filter, ...]:
    return node.parts if isinstance(node, And | Or) and type(node) is kind else (node,)


class Leaf(Filter):
    """A condition on one place."""

    __slots__ = ()

    operand: Operand

    def operands(self) -> Iterator[Operand]:
        yield self.operand


@dataclass(frozen=True, repr=False)
class Comparison(Leaf):
    """`Customer.age > 30`."""

    operand: Operand
    op: CompareOp
    value: Any

    def __repr__(self) -> str:
        return f"{self.operand!r} {self.op} {self.value!r}"

    def as_json(self) -> dict[str, Any]:
        return {"op": self.op, "operand": self.operand.as_json(), "value": json_form(self.value)}


@dataclass(frozen=True, repr=False)
class In(Leaf):
    """`Customer.tier.in_(["Gold", "Silver"])`."""

    operand: Operand
    values: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"{self.operand!r}.in_({list(self.values)!r})"

    def as_json(self) -> dict[str, Any]:
        values = [json_form(value) for value in self.values]
        return {"op": "in", "operand": self.operand.as_json(), "value": values}


@dataclass(frozen=True, repr=False)
class TextTest(Leaf):
    """`Customer.name.startswith("A")`, literally: no character is a wildcard."""

    operand: Operand
    op: TextOp
    value: str

    def __repr__(self) -> str:
        return f"{self.operand!r}.{self.op}({self.value!r})"

    def as_json(self) -> dict[str, Any]:
        return {"op": self.op, "operand": self.operand.as_json(), "value": self.value}


@dataclass(frozen=True, repr=False)
class Contains(Leaf):
    """`Customer.name.contains("nn")`, a part of a text; `Customer.tags.contains("vip")`, an
    element of a list."""

    operand: Operand
    value: Any
    element_kinds: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"{self.operand!r}.contains({self.value!r})"

    def as_json(self) -> dict[str, Any]:
        value = json_form(self.value)
        return {"op": "contains", "operand": self.operand.as_json(), "value": value}


@dataclass(frozen=True, repr=False)
class Test(Leaf):
    """`Customer.email.is_null()` and the like, which are never unknown."""

    operand: Operand
    op: TestOp

    __test__ = False  # not a test class, whatever pytest thinks of its name

    def __repr__(self) -> str:
        return f"{self.operand!r}.{self.op}()"

    def as_json(self) -> dict[str, Any]:
        return {"op": self.op, "operand": self.operand.as_json()}


@dataclass(frozen=True, repr=False)
class _Several(Filter):
    parts: tuple[Filter, ...]

    def operands(self) -> Iterator[Operand]:
        for part in self.parts:
            yield from part.operands()


@dataclass(frozen=True, repr=False)
class And(_Several):
    """All of several conditions."""

    def __repr__(self) -> str:
        return f"({' & '.join(_inner(p) for p in self.parts)})"

    def as_json(self) -> dict[str, Any]:
        return {"op": "and", "parts": [part.as_json() for part in self.parts]}


@dataclass(frozen=True, repr=False)
class Or(_Several):
    """Some of several conditions."""

    def __repr__(self) -> str:
        return f"({' | '.join(_inner(p) for p in self.parts)})"

    def as_json(self) -> dict[str, Any]:
        return {"op": "or", "parts": [part.as_json() for part in self.parts]}


@dataclass(frozen=True, repr=False)
class Not(Filter):
    """The opposite of a condition; of an unknown one, unknown."""

    part: Filter

    def __repr__(self) -> str:
        return f"~{_inner(self.part)}"

    def as_json(self) -> dict[str, Any]:
        return {"op": "not", "part": self.part.as_json()}

    def operands(self) -> Iterator[Operand]:
        yield from self.part.operands()


def _inner(part: Filter) -> str:
    return f"({part!r})" if isinstance(part, Comparison) else repr(part)


def json_form(value: Any) -> Any:
    """A compared value as JSON has it."""
    return value if isinstance(value, str | int | float) else leaf(value)
