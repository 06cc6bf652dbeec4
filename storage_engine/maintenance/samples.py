"""A few rows of a type to look at, for the price of one small file.

They are rows that the commit has written which last changed the type: those are latest rows, and
the log tells where they are. No row is looked for, none is sorted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage_engine.config import MIB
from storage_engine.query.spec import QuerySpec, When

if TYPE_CHECKING:
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository.object.engine import ObjectRepository
    from storage_engine.repository.protocol import Repository

FAR_BYTES = 32 * MIB  # of a file that is not on this machine: more is not fetched for a look


@dataclass(frozen=True)
class RowSample:
    """Rows by the declared names of their columns; `why_none` where there are none to show."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    why_none: str | None = None


def sample_rows(repository: Repository, spec: TypeSpec, commit_id: int, limit: int) -> RowSample:
    """Up to `limit` rows that `commit_id`, the last one to change the type, has written."""
    stored = _stored_columns(spec)
    empty = RowSample(tuple(stored))
    if commit_id < 1:
        return replace(empty, why_none="nothing is stored yet")
    when = When(as_of=commit_id, history=True, since=commit_id - 1)
    if (objects := repository.objects) is not None:
        return _of_file(objects, spec, when, stored, limit, empty)
    answer = repository.executor().rows(QuerySpec(spec, when=when, limit=limit))
    return replace(empty, rows=_taken(answer.batches, stored, limit))


def _of_file(
    repository: ObjectRepository,
    spec: TypeSpec,
    when: When,
    stored: dict[str, str],
    limit: int,
    empty: RowSample,
) -> RowSample:
    executor = repository.executor()
    plan = executor.plan(spec, when)
    if not plan.rows:
        return replace(empty, why_none="the files of the commit are merged with others")
    smallest = min(plan.rows, key=lambda item: item.file.bytes)
    path, size = smallest.file.path, smallest.file.bytes
    if size > FAR_BYTES and repository.store.local_path(path) is None:
        return replace(
            empty, why_none=f"the smallest file of the commit has {size // MIB} MiB to fetch"
        )
    answer = executor.scan(replace(plan, rows=(smallest,)), stored, list(stored))
    shown = {name: name for name in stored}
    return replace(empty, rows=_taken(answer.batches, shown, limit))


def _stored_columns(spec: TypeSpec) -> dict[str, str]:
    """Declared names, with the columns that hold them."""
    keys: dict[str, str] = {}
    if spec.kind == "relation":
        keys = {"left_key": "left_key", "right_key": "right_key"}
        if spec.instance_key is not None:
            keys[spec.instance_key] = "instance_key"
    return keys | {each.name: each.name for each in spec.fields}


def _taken(
    batches: Iterator[pa.RecordBatch], columns: dict[str, str], limit: int
) -> list[tuple[Any, ...]]:
    """The first rows; what comes after them is not read."""
    rows: list[tuple[Any, ...]] = []
    for batch in batches:
        wanted = batch.slice(0, limit - len(rows))
        values = [wanted.column(name).to_pylist() for name in columns.values()]
        rows += zip(*values, strict=True)
        if len(rows) >= limit:
            break
    return rows
