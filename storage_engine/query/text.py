"""Filters written as text, for command lines: a path, an operator and a JSON value.

    filter_from_text(spec, "profile.address.city", "==", '"Bern"')

A path begins with a field; `left.` and `right.` begin paths of a relation's endpoints (given as
`endpoints`), and `field[].key` asks for some element of a list. Everything wrong is a ValueError
that says what would be right.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any

import orjson

from storage_engine.model.expressions import Filter
from storage_engine.model.field import FieldRef
from storage_engine.model.relation import Side
from storage_engine.model.spec import TypeSpec
from storage_engine.model.validation import unknown_name

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

    Datetimes and dates are JSON strings in ISO 8601, bytes are base64.
    """
    op = operator.strip().lower()
    if op == "=":
        op = "=="
    if op not in OPERATORS:
        known = unknown_name(operator, OPERATORS, what="operator")
        raise ValueError(f"{known} (the operators are {' '.join(OPERATORS)})")
    ref = field_from_text(spec, path, endpoints=endpoints)
    try:
        if op in TESTS:
            if value is not None:
                raise ValueError(f"{path} {op}: takes no value")
            made: Filter = getattr(ref, op)()
            return made
        return _with_value(ref, op, _parsed(f"{path} {operator}", value))
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


def _parsed(where: str, value: str | None) -> Any:
    if value is None:
        raise ValueError(f"{where}: needs a value, written as JSON")
    try:
        return orjson.loads(value)
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
        if "bytes" in kinds:
            return b64decode(value, validate=True)
    except ValueError:
        raise ValueError(f"{ref!r} is {ref.operand.declared}; {value!r} is not one") from None
    return value


def _plain(message: str) -> str:
    """Advice about Python methods, in words of the command line."""
    return message.replace("is_not_null()", "is_not_null").replace("is_null()", "is_null")
