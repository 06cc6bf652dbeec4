"""Conditions on identities, and rows as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce
from operator import and_
from typing import Any, overload

import pyarrow as pa

from storage_engine.explore.values import plain
from storage_engine.model.expressions import Comparison, Filter, Operand, Or
from storage_engine.model.spec import TypeSpec

Identity = tuple[str, ...]
Row = dict[str, Any]  # identity, commit_id, fields: all as JSON


# --- conditions on identities -------------------------------------------------------------------


def identity_column(spec: TypeSpec, column: str) -> Operand:
    return Operand(spec.ref, column, frozenset({"str"}), identity=column, declared="str")


def is_identity(spec: TypeSpec, identity: Identity) -> Filter:
    columns = zip(spec.identity, identity, strict=True)
    return reduce(and_, [Comparison(identity_column(spec, c), "==", key) for c, key in columns])


def following(spec: TypeSpec, identity: Identity) -> Filter:
    """Identities after this one, in the order of pages."""
    columns = [identity_column(spec, name) for name in spec.identity]
    ways: list[Filter] = []
    for number, (column, key) in enumerate(zip(columns, identity, strict=True)):
        same: list[Filter] = [
            Comparison(c, "==", k) for c, k in zip(columns[:number], identity, strict=False)
        ]
        ways.append(reduce(and_, [*same, Comparison(column, ">", key)]))
    if len(ways) == 1:
        return ways[0]
    # What the first column must be, said alone, leaves out files and row groups.
    return Comparison(columns[0], ">=", identity[0]) & Or(tuple(ways))


@overload
def both(first: Filter | None, second: Filter) -> Filter: ...


@overload
def both(first: Filter | None, second: Filter | None) -> Filter | None: ...


def both(first: Filter | None, second: Filter | None) -> Filter | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


# --- rows as JSON -------------------------------------------------------------------------------


def described(spec: TypeSpec, batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    nested = {field.name for field in spec.fields if field.storage == "json"}
    for batch in batches:
        for row in batch.to_pylist():
            yield {
                "identity": [row[column] for column in spec.identity],
                "commit_id": row["commit_id"],
                "fields": {
                    field.name: _value(row[field.name], nested=field.name in nested)
                    for field in spec.fields
                },
            }


def _value(value: Any, *, nested: bool) -> Any:
    if not nested or value is None:
        return plain(value)
    try:
        return json.loads(value)
    except RecursionError:  # nested as deep as nobody reads
        return value
