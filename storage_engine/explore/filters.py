"""What the form of a table of objects asks for, and what its address says.

    ?filter=tier == "Gold"&filter=age gt 30     as `onto query --filter` has them
    ?prefix=c1                                  keys that begin so
    ?left=JFK                                   relations of this entity, by its key; right= too

The form has a field, an operator and a value as people type it: a text needs no quotes there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

from storage_engine.errors import SchemaMetadataError
from storage_engine.explore.links import parse_segment
from storage_engine.explore.rows import identity_column
from storage_engine.explore.view import PageError, ShownType
from storage_engine.model.expressions import Comparison, Filter, TextTest
from storage_engine.model.spec import TypeSpec

OPERATORS = {
    "==": "is",
    "!=": "is not",
    "<": "is less than",
    "<=": "is at most",
    ">": "is greater than",
    ">=": "is at least",
    "contains": "contains",
    "startswith": "starts with",
    "endswith": "ends with",
    "in": "is one of",
    "is_null": "is null",
    "is_not_null": "is not null",
    "is_true": "is true",
    "is_false": "is false",
}
TESTS = ("is_null", "is_not_null", "is_true", "is_false")
_TEXTS = ("str", "datetime", "date", "time", "bytes")


def terms(text: str) -> list[str]:
    """`age gt 30` as path, operator and JSON."""
    return text.strip().split(None, 2)


def typed_filter(spec: TypeSpec, path: str, operator: str, value: str) -> str:
    """What was typed into the form, as a filter of an address."""
    path, operator = path.strip(), operator.strip()
    if operator in TESTS:
        return f"{path} {operator}"
    return f"{path} {operator} {_json(spec, path, operator, value.strip())}"


def _json(spec: TypeSpec, path: str, operator: str, value: str) -> str:
    """A value as JSON: as it is where it can only be meant so, else as a text."""
    try:
        parsed = json.loads(value)
    except ValueError:
        if operator == "in":
            return json.dumps([part.strip() for part in value.split(",")], ensure_ascii=False)
        return json.dumps(value, ensure_ascii=False)
    storages = {field.name: field.storage for field in spec.fields}
    is_text = storages.get(path) in _TEXTS or path == spec.instance_key
    if operator == "in" and not isinstance(parsed, list):
        return json.dumps([value if is_text and not isinstance(parsed, str) else parsed])
    if is_text and operator != "in" and not isinstance(parsed, str):
        return json.dumps(value, ensure_ascii=False)
    return value


@dataclass(frozen=True, slots=True)
class TableQuery:
    """Which objects of a type a table shows."""

    filters: Sequence[str] = ()
    prefix: str | None = None
    left: str | None = None
    right: str | None = None

    @property
    def parameters(self) -> list[tuple[str, str | None]]:
        """As an address has them."""
        named = [("prefix", self.prefix), ("left", self.left), ("right", self.right)]
        return [*(("filter", text) for text in self.filters), *named]

    @property
    def is_everything(self) -> bool:
        return not self.filters and self.prefix is None and self.left is self.right is None

    def condition(self, shown: ShownType) -> Filter | None:
        """PageError says what is wrong with it."""
        spec = shown.spec
        parts: list[Filter] = []
        try:
            read = shown.view.storage.read_filters
            typed = read(shown.view.repository, spec, [terms(text) for text in self.filters])
            parts += [typed] if typed is not None else []
            for side, text in (("left", self.left), ("right", self.right)):
                if text is not None:
                    parts.append(self._end(shown, side, text))
        except (ValueError, TypeError, SchemaMetadataError) as error:
            raise PageError(str(error)) from None
        if self.prefix is not None:
            parts.append(
                TextTest(identity_column(spec, spec.identity[0]), "startswith", self.prefix)
            )
        return reduce(and_, parts) if parts else None

    def _end(self, shown: ShownType, side: str, text: str) -> Filter:
        spec = shown.spec
        if spec.kind != "relation":
            raise ValueError(f"{shown.name} is an entity type: it has no {side} end")
        name = parse_segment(text)
        if isinstance(name, str):
            return Comparison(identity_column(spec, f"{side}_key"), "==", name)
        end = shown.view.shown(("entity", (spec.left if side == "left" else spec.right) or ""))
        (key,) = end.identity([name])
        return Comparison(identity_column(spec, f"{side}_key"), "==", key)
