"""What a command line asks for, as a `QuerySpec`: types by name, filters, order and time as text.

Nothing that is typed becomes a part of a statement: names are looked up among the declared ones,
values are parsed and travel as parameters. Everything wrong is a ValueError or TypeError that says
what would be right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any, Literal

import orjson

from storage_engine.model.expressions import Filter
from storage_engine.model.relation import Side
from storage_engine.model.spec import Kind, TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.query.aggregates import own_place
from storage_engine.query.builder import checked_reference
from storage_engine.query.spec import Order, Reference, all_of
from storage_engine.query.sql import value_kind
from storage_engine.query.text import TESTS, field_from_text, filter_from_text
from storage_engine.repository.endpoints import endpoint_spec

MAX_INT = 2**63 - 1  # what every storage can compare with; there are no commits beyond
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
_NUMBER = re.compile(r"[+-]?[0-9]+")
_TIME = re.compile(r"\d{4}-\d\d-\d\d([T ].*)?")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Types:
    """Types by name: those of `--models` first, then those that the storage has."""

    def __init__(
        self,
        declared: Mapping[tuple[str, str], TypeSpec],
        stored: Callable[[], Sequence[TypeSpec]],
    ) -> None:
        self._declared = declared
        self._ask = stored
        self._stored: dict[tuple[str, str], TypeSpec] | None = None

    def find(self, kind: Kind, name: str) -> TypeSpec:
        found = self._declared.get((kind, name)) or self._known().get((kind, name))
        if found is not None:
            return found
        refs = sorted({*self._declared, *self._known()})
        other: Kind = "relation" if kind == "entity" else "entity"
        if (other, name) in refs:
            raise ValueError(f"{name} is {_ARTICLE[other]} type, not {_ARTICLE[kind]} type")
        names = [known for of, known in refs if of == kind]
        if not names:
            raise ValueError(f"unknown {kind} type {name!r}: the storage has no {kind} types yet")
        unknown = unknown_name(name, names, what=f"{kind} type")
        raise ValueError(f"{unknown} {_there_are(names)}")

    def endpoint(self, relation: TypeSpec, side: Side) -> TypeSpec:
        return endpoint_spec(relation, side, lambda: self._known().values())

    def _known(self) -> Mapping[tuple[str, str], TypeSpec]:
        if self._stored is None:
            self._stored = {spec.ref: spec for spec in self._ask()}
        return self._stored


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
    known = [field.name for field in spec.fields]
    known += [spec.instance_key] if spec.instance_key is not None else []
    if name in known:
        return
    ends = ""
    if spec.kind == "relation":
        ends = "; fields of its ends begin with left. or right."
    unknown = unknown_name(name, known)
    raise ValueError(f"{spec.name}: {unknown} {_there_are(known) if known else ''}{ends}")


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


# --- time -------------------------------------------------------------------------------------


def reference(text: str) -> Reference:
    """Digits are a commit, ISO 8601 is an instant, anything else is the name of a tag."""
    if _NUMBER.fullmatch(text):
        return min(int(text[:32]), MAX_INT)
    if _TIME.fullmatch(text):
        try:
            return checked_reference(datetime.fromisoformat(text), "--as-of")
        except ValueError:
            raise ValueError(
                f"--as-of {text}: not a time in ISO 8601, such as 2026-01-31T12:00:00Z"
            ) from None
    return checked_reference(text, "--as-of")


# --- columns and parameters -------------------------------------------------------------------


def row_columns(spec: TypeSpec) -> list[tuple[str, str]]:
    """Columns as users know them, and as batches have them: identities by their own names."""
    named = [("commit_id", "commit_id")]
    if spec.kind == "relation":
        named += [("left_key", "left_key"), ("right_key", "right_key")]
        if spec.instance_key is not None:
            named.append((spec.instance_key, "instance_key"))
    return named + [(field.name, field.name) for field in spec.fields]


def chosen(given: Sequence[str], known: Sequence[str]) -> list[str]:
    """The names of `--columns A,B`, in that order; all when there are none."""
    names = [name.strip() for text in given for name in text.split(",")]
    for place, name in enumerate(names):
        if name not in known:
            raise ValueError(
                f"--columns: {unknown_name(name, known, what='column')} {_there_are(known)}"
            )
        if name in names[:place]:
            raise ValueError(f"--columns: {name} is given twice")
    return names or list(known)


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
