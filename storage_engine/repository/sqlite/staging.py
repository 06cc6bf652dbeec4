"""Intents on their way into a commit: loaded into temporary tables before the lock is taken.

A slow stream therefore keeps no other writer waiting, and memory holds one batch at a time (the
tables live in a temporary file). Rows keep the order of intent, so that the last one can win.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from storage_engine.model.spec import TypeSpec
from storage_engine.repository.protocol import TypeInput
from storage_engine.repository.sqlite.connection import rollback
from storage_engine.repository.sqlite.layout import Column, Staged

ToRows = Callable[[TypeSpec, pa.Table | pa.RecordBatch], Iterator[Any]]
Payload = Callable[[TypeSpec], Sequence[Column]]

_numbers = itertools.count(1)  # in memory, a stream may commit to the storage that it feeds


@dataclass(frozen=True, slots=True)
class StagedType:
    """One type's intents, in the order in which they were stated."""

    spec: TypeSpec
    staged: Staged


@contextmanager
def staged_inputs(
    connection: sqlite3.Connection, inputs: Sequence[TypeInput], to_rows: ToRows, payload: Payload
) -> Iterator[list[StagedType]]:
    """Load the inputs, one temporary table per type, for as long as the context lasts."""
    types: dict[tuple[str, str], StagedType] = {}
    try:
        for one in inputs:
            part = types.get(one.spec.ref)
            if part is None:
                name = f"intents_{next(_numbers)}"
                staged = Staged(name, len(one.spec.identity), payload(one.spec))
                part = types[one.spec.ref] = StagedType(one.spec, staged)
                for statement in staged.create():
                    connection.execute(statement)
            for batch in _batches(one):
                _load(connection, part.staged, to_rows(one.spec, batch))
        yield list(types.values())
    finally:
        for part in types.values():
            for statement in part.staged.drop():
                connection.execute(statement)


def _batches(one: TypeInput) -> Iterable[pa.Table | pa.RecordBatch]:
    if one.table is not None:
        yield one.table
    if one.stream is not None:
        yield from one.stream


def _load(connection: sqlite3.Connection, staged: Staged, rows: Iterator[Any]) -> None:
    connection.execute("BEGIN")  # touches the temporary database only, so it takes no lock
    try:
        connection.executemany(staged.insert(), rows)
        connection.execute("COMMIT")
    finally:
        rollback(connection)
