"""What a command line asks for, as parts of a `QuerySpec`: types, filters and order as text.

    filter_from_text(spec, "profile.address.city", "==", '"Bern"')

A path begins with a field; `left.` and `right.` begin paths of a relation's endpoints (given as
`endpoints`), and `field[].key` asks for some element of a list. Nothing that is typed becomes a
part of a statement: names are looked up among the declared ones, values are parsed and travel as
parameters. Everything wrong is a ValueError or TypeError that says what would be right.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from itertools import takewhile
from typing import Any, Literal

import orjson

from storage_engine.model.decimals import exact_number
from storage_engine.model.declarations import Side
from storage_engine.model.expressions import Filter, base_kinds
from storage_engine.model.field import FieldRef
from storage_engine.model.scalars import read_time
from storage_engine.model.spec import Kind, TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.query.aggregates import own_place
from storage_engine.query.conditions import value_kind
from storage_engine.query.results import endpoint_spec
from storage_engine.query.spec import Order, all_of

_WORDS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "lte": "<=",
    "gt": ">",
    "ge": ">=",
    "gte": ">=",
}
_SHOWN = 20  # names in a message
_END = re.compile(r"^(left|right)\.\$\.")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Types:
    """Types by name: those of `--models` first, then those that the storage has."""

    def __init__(
        self,
        declared: Mapping[tuple[str, str], TypeSpec],
        refs: Callable[[], Sequence[tuple[str, str]]],
        stored: Callable[[Sequence[tuple[str, str]]], Sequence[TypeSpec]],
    ) -> None:
        """`refs` lists the stored types, `stored` looks some of them up."""
        self._declared = declared
        self._refs = refs
        self._stored = stored

    def find(self, kind: Kind, name: str) -> TypeSpec:
        if (kind, name) in self._declared:
            return self._declared[kind, name]
        for spec in self._stored([(kind, name)]):
            return spec
        refs = sorted({*self._declared, *self._refs()})
        other: Kind = "relation" if kind == "entity" else "entity"
        if (other, name) in refs:
            raise ValueError(f"{name} is {_ARTICLE[other]} type, not {_ARTICLE[kind]} type")
        names = [name_of for of, name_of in refs if of == kind]
        if not names:
            raise ValueError(f"unknown {kind} type {name!r}: the storage has no {kind} types yet")
        unknown = unknown_name(name, names, what=f"{kind} type")
        raise ValueError(f"{unknown} {_there_are(names)}")

    def endpoint(self, relation: TypeSpec, side: Side) -> TypeSpec:
        return endpoint_spec(relation, side, lambda ref: self._stored([ref]))


_ARTICLE: dict[Kind, str] = {"entity": "an entity", "relation": "a relation"}


def _there_are(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"(there are {', '.join(names[:_SHOWN])}{more})"


# --- filters and order ------------------------------------------------------------------------


def join_filters(args: Sequence[str], takes_value: Callable[[str], bool]) -> list[str]:
    """A command line in which each `--filter PATH OP JSON` has become one option with one value.

    A test such as `is_null` takes no JSON, so the number of values depends on the operator.
    """
    made: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            return [*made, arg, *rest]
        made.append(arg)
        if arg.startswith("--filter="):
            raise ValueError("write --filter PATH OP JSON, without =")
        if arg == "--filter":
            count = 2 if len(rest) > 1 and _operator(rest[1]) in TESTS else 3
            # No path, operator or JSON begins so: a value that was forgotten is not an option.
            given = list(takewhile(lambda value: not value.startswith("--"), rest[:count]))
            rest = rest[len(given) :]
            made.append(json.dumps(given))
        elif takes_value(arg) and rest:
            made.append(rest.pop(0))
    return made


def condition(types: Types, spec: TypeSpec, texts: Sequence[str]) -> Filter | None:
    """All the filters of a line, joined by `and`."""
    made = tuple(_filter(types, spec, json.loads(text)) for text in texts)
    return all_of(made) if made else None


def _filter(types: Types, spec: TypeSpec, given: Sequence[str]) -> Filter:
    if len(given) < 2:
        raise ValueError(
            f"--filter {' '.join(given)}: takes PATH OP JSON, such as --filter age gt 30; the "
            "shell takes < and > for itself unless they are quoted"
        )
    path, operator, *value = given
    path = _path(path)
    if spec.kind == "relation":  # `left.$.tier`, as the specification writes it
        path = _END.sub(r"\1.", path)
    ends = _endpoints(types, spec, path)
    if ends is None:
        _check_field(spec, path)
    try:
        return filter_from_text(spec, path, _operator(operator), *value, endpoints=ends)
    except ValueError as error:
        raise ValueError(str(error).replace("()", "")) from None  # methods are for Python


def order_keys(spec: TypeSpec, texts: Sequence[str]) -> tuple[Order, ...]:
    """`FIELD`, `FIELD:asc` or `FIELD:desc`, each."""
    return tuple(_order_key(spec, text) for text in texts)


def _order_key(spec: TypeSpec, text: str) -> Order:
    name, colon, direction = text.rpartition(":")
    if not colon:
        name, direction = text, "asc"
    if direction not in ("asc", "desc"):
        raise ValueError(f"--order-by {text}: after the colon comes asc or desc")
    if spec.kind == "relation" and name.partition(".")[0] in ("left", "right"):
        raise ValueError(f"--order-by {text}: fields of endpoints can be used in --filter only")
    if "[]" in name:
        raise ValueError(f"--order-by {text}: elements of lists can be used in --filter only")
    _check_field(spec, _path(name))
    operand = own_place(field_from_text(spec, _path(name)), "--order-by")
    value_kind(operand)
    return Order(operand, direction == "desc")


def _check_field(spec: TypeSpec, path: str) -> None:
    """The parser says so too, but not what there is: that is in a class, which people lack here."""
    name = path.partition(".")[0].removesuffix("[]")
    names = [field.name for field in spec.fields]
    names += [spec.instance_key] if spec.instance_key is not None else []
    if name in names:
        return
    ends = ""
    if spec.kind == "relation":
        ends = "; fields of its ends begin with left. or right."
    unknown = unknown_name(name, names)
    raise ValueError(f"{spec.name}: {unknown} {_there_are(names) if names else ''}{ends}")


def _endpoints(types: Types, spec: TypeSpec, path: str) -> Mapping[Side, TypeSpec] | None:
    """What `left.` and `right.` mean; looked up only where the path begins so."""
    first = path.partition(".")[0]
    side: Literal["left", "right"] | None = (
        "left" if first == "left" else "right" if first == "right" else None
    )
    if spec.kind != "relation" or side is None:
        return None
    return {side: types.endpoint(spec, side)}


def _path(text: str) -> str:
    return text.removeprefix("$.")


def _operator(text: str) -> str:
    op = text.strip().lower()
    return _WORDS.get(op, op)


# --- columns and parameters -------------------------------------------------------------------


def row_columns(spec: TypeSpec) -> list[tuple[str, str]]:
    """Columns as users know them, and as batches have them: identities by their own names."""
    named = [("commit_id", "commit_id")]
    if spec.kind == "relation":
        named += [("left_key", "left_key"), ("right_key", "right_key")]
        if spec.instance_key is not None:
            named.append((spec.instance_key, "instance_key"))
    return named + [(field.name, field.name) for field in spec.fields]


def chosen(given: Sequence[str], every: Sequence[str]) -> list[str]:
    """The names of `--columns A,B`, in that order; all when there are none."""
    names = [name.strip() for text in given for name in text.split(",")]
    for place, name in enumerate(names):
        if name not in every:
            raise ValueError(
                f"--columns: {unknown_name(name, every, what='column')} {_there_are(every)}"
            )
        if name in names[:place]:
            raise ValueError(f"--columns: {name} is given twice")
    return names or list(every)


def parameters(texts: Sequence[str]) -> dict[str, Any]:
    """The values of `--param NAME=JSON`."""
    made: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not _PARAMETER.fullmatch(name):
            raise ValueError(f"--param {text}: write NAME=JSON, such as --param age=30")
        if name in made:
            raise ValueError(f"--param {name} is given twice")
        try:
            made[name] = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise ValueError(
                f"--param {text}: the value is not JSON; a text needs quotes: '{name}=\"{value}\"'"
            ) from None
    return made


METHODS = ("in", "startswith", "endswith", "contains")
TESTS = ("is_null", "is_not_null", "is_true", "is_false")
OPERATORS = ("==", "!=", "<", "<=", ">", ">=", *METHODS, *TESTS)


def filter_from_text(
    spec: TypeSpec,
    path: str,
    operator: str,
    value: str | None = None,
    *,
    endpoints: Mapping[Side, TypeSpec] | None = None,
) -> Filter:
    """The filter that a user typed; `value` is JSON, and left out for tests such as `is_null`.

    Datetimes, dates and times are JSON strings in ISO 8601, bytes are base64, decimals are strings
    or numbers, which are taken digit by digit.
    """
    op = operator.strip().lower()
    if op == "=":
        op = "=="
    if op not in OPERATORS:
        unknown = unknown_name(operator, OPERATORS, what="operator")
        raise ValueError(f"{unknown} (the operators are {' '.join(OPERATORS)})")
    ref = field_from_text(spec, path, endpoints=endpoints)
    try:
        if op in TESTS:
            if value is not None:
                raise ValueError(f"{path} {op}: takes no value")
            made: Filter = getattr(ref, op)()
            return made
        return _with_value(ref, op, _parsed(f"{path} {operator}", value, ref))
    except TypeError as error:
        raise ValueError(_plain(str(error))) from None


def field_from_text(
    spec: TypeSpec, path: str, *, endpoints: Mapping[Side, TypeSpec] | None = None
) -> FieldRef[Any]:
    """The place that a user typed; unknown names are answered with the nearest."""
    first, _, rest = path.partition(".")
    ref: FieldRef[Any]
    side: Side | None = "left" if first == "left" else "right" if first == "right" else None
    if side is not None and endpoints is not None and side in endpoints:
        first, _, rest = rest.partition(".")
        if not first:
            raise ValueError(f"bad path {path!r}: name a field, such as {side}.name")
        ref = FieldRef(endpoints[side], first.removesuffix("[]"), source=side, relation=spec.name)
    else:
        ref = FieldRef(spec, first.removesuffix("[]"))
    some = first.endswith("[]")
    _ = ref.operand  # an unknown field is reported here
    while rest and not some:
        key, _, rest = rest.partition(".")
        some = key.endswith("[]")
        ref = ref.path(key.removesuffix("[]"))
    if some:
        if not rest:
            raise ValueError(f"bad path {path!r}: name a key of the elements, such as {path}.kind")
        return ref.any_path(rest)
    if path.endswith("."):
        raise ValueError(f"bad path {path!r}: it ends in a dot")
    return ref


def _parsed(where: str, value: str | None, ref: FieldRef[Any]) -> Any:
    if value is None:
        raise ValueError(f"{where}: needs a value, written as JSON")
    kinds = ref.operand.kinds
    inner = ref.place.items(repr(ref)).kinds if "list" in kinds else frozenset()
    try:
        parsed = orjson.loads(value)
        if "decimal" in base_kinds(kinds | inner):
            return json.loads(value, parse_float=Decimal)
        return parsed
    except orjson.JSONDecodeError:
        raise ValueError(
            f"{where} {value}: the value is not JSON; a text needs quotes: '\"{value}\"'"
        ) from None


def _with_value(ref: FieldRef[Any], op: str, value: Any) -> Filter:
    kinds = ref.operand.kinds
    if op == "in":
        if not isinstance(value, list):
            raise ValueError(f"{ref!r} in: needs a JSON list, such as [1, 2]")
        return ref.in_([_decoded(kinds, item, ref) for item in value])
    if op in ("startswith", "endswith"):
        made: Filter = getattr(ref, op)(value)
        return made
    if op == "contains":
        inner = ref.place.items(repr(ref)).kinds if "list" in kinds else kinds
        return ref.contains(_decoded(inner, value, ref))
    return _COMPARE[op](ref, _decoded(kinds, value, ref))


_COMPARE: dict[str, Callable[[FieldRef[Any], Any], Filter]] = {
    "==": FieldRef.__eq__,
    "!=": FieldRef.__ne__,
    "<": FieldRef.__lt__,
    "<=": FieldRef.__le__,
    ">": FieldRef.__gt__,
    ">=": FieldRef.__ge__,
}


def _decoded(kinds: frozenset[str], value: Any, ref: FieldRef[Any]) -> Any:
    """A JSON string as the value that it stands for at this place."""
    if not isinstance(value, str) or "str" in kinds:
        return value
    try:
        if "datetime" in kinds:
            return datetime.fromisoformat(value)
        if "date" in kinds:
            return date.fromisoformat(value)
        if "time" in kinds:
            return read_time(value)
        if "decimal" in base_kinds(kinds):
            return exact_number(value)
        if "bytes" in kinds:
            return b64decode(value, validate=True)
    except ValueError:
        raise ValueError(f"{ref!r} is {ref.operand.declared}; {value!r} is not one") from None
    return value


def _plain(message: str) -> str:
    """Advice about Python methods, in words of the command line."""
    return message.replace("is_not_null()", "is_not_null").replace("is_null()", "is_null")
