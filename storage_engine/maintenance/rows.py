"""Rows for maintenance: a type's versions as one DuckDB view, and types from stored schemas."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pyarrow as pa

from storage_engine.commitlog import state
from storage_engine.commitlog.records import Entry, Head
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.object.stored_schema import recorded_spec

if TYPE_CHECKING:
    import duckdb


def versions_of(
    repository: ObjectRepository, spec: TypeSpec, entries: Sequence[Entry], **tables: pa.Table
) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
    """A cursor with the view `versions` over these entries, and `tables` under their names."""
    return repository._versions.scan(spec, entries, **tables)


def stored_types(repository: ObjectRepository, head: Head) -> list[TypeSpec]:
    """The types of the log by their current schemas, by kind and name. Types of logs that never
    recorded schemas (the first implementation's) are not among them."""
    specs = []
    for ref, top in sorted(repository.chain.type_heads_at(head).items()):
        if top.is_dropped:
            continue
        record = state.schema_record(repository.chain, head, ref, top)
        if record is not None:
            specs.append(recorded_spec(ref, top, record))
    return specs


def current_entries(repository: ObjectRepository, head: Head, spec: TypeSpec) -> list[Entry]:
    """From the log alone, those of the current schema version: all latest rows are in them."""
    top = repository.chain.type_heads_at(head).get(spec.ref)
    entries = state.entries(repository.chain, head, spec.ref, top=top)
    if top is None or (repository.engine_version == "v1" and not top.past_versions):
        return entries
    return [e for e in entries if e.schema_version_id == top.schema_version_id]
