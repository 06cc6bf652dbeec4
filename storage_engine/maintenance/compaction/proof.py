"""The proof that a merge lost, changed and invented nothing: without it nothing is published.

Rows are digested as they are decoded, before anything is done with them: how many, and a sum of
their hashes, which does not depend on order. The encoded outputs, as DuckDB reads them, must have
the same digest. So whatever went wrong in between (sorting, spilling, merging, splitting, encoding)
is noticed, however it was done.

The `current` files must have exactly the newest row of each identity, because latest reads open
nothing else. As all rows are there, this is a matter of the outputs alone: no identity is in
`current` twice, and each superseded row has one there that is not older.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage_engine.errors import IntegrityError
from storage_engine.maintenance.compaction.inputs import CURRENT, SUPERSEDED
from storage_engine.maintenance.compaction.workspace import Workspace
from storage_engine.query.dialects import quoted
from storage_engine.repository.object.read.files import parquet
from storage_engine.wording import counted

NEWEST = "the newest rows by identity"


@dataclass(frozen=True, slots=True)
class Digest:
    """Of a multiset of rows."""

    rows: int
    content: int

    def __str__(self) -> str:
        return f"{counted(self.rows, 'row')} (content {self.content:x})"


class InputDigest:
    """Of all rows that went into a merge, as they come. Safe to use from several threads."""

    def __init__(self, workspace: Workspace, columns: Sequence[str]) -> None:
        self._workspace = workspace
        self._columns = columns
        self._lock = threading.Lock()
        self.total = Digest(0, 0)

    def add(self, rows: pa.Table) -> None:
        added = _digest(self._workspace, "FROM told_rows", self._columns, rows)
        with self._lock:
            total = self.total
            self.total = Digest(total.rows + added.rows, total.content + added.content)


def prove(
    workspace: Workspace,
    inputs: Digest,
    outputs: Mapping[str | None, Sequence[Path]],
    *,
    columns: Sequence[str],
    identity: Sequence[str],
    constants: Mapping[str, Any],
) -> None:
    """Raises IntegrityError unless the files, by role, have the rows of the inputs, each where it
    belongs. v1 has one file without a role. `constants`: what is not in the digest of the inputs,
    and must be everywhere."""
    files = [path for paths in outputs.values() for path in paths]
    demand(
        inputs,
        _digest(workspace, f"FROM {_files(files)}", columns) if files else Digest(0, 0),
        "the rows of the inputs and of the snapshot",
    )
    if files and constants:
        _prove_constants(workspace, files, constants)
    if None in outputs:
        return
    current, superseded = outputs.get(CURRENT, ()), outputs.get(SUPERSEDED, ())
    exact = ", ".join(quoted(name) for name in identity)
    # By hashes of the identities, which is several times as fast: these may collide, so that it is
    # looked at again where something seems to be wrong.
    for keys in (f"hash({exact})", f"({exact})"):
        repeated, newer = _misplaced(workspace, keys, current, superseded)
        if not repeated and not newer:
            return
    raise IntegrityError(
        f"compaction is refused: {NEWEST} are not what the snapshot has as current, {repeated} are "
        f"there again and {newer} others are newer; nothing was published"
    )


def _prove_constants(
    workspace: Workspace, files: Sequence[Path], constants: Mapping[str, Any]
) -> None:
    others = " OR ".join(f"{quoted(name)} IS DISTINCT FROM ?" for name in constants)
    with workspace.cursor() as cursor:
        [(count,)] = cursor.execute(
            f"SELECT count(*) FROM {_files(files)} WHERE {others}", list(constants.values())
        ).fetchall()
    if count:
        raise IntegrityError(
            f"compaction is refused: {count} rows of the snapshot do not have "
            f"{', '.join(f'{name} {value!r}' for name, value in constants.items())}, as all rows "
            "of the inputs; nothing was published"
        )


def _misplaced(
    workspace: Workspace, keys: str, current: Sequence[Path], superseded: Sequence[Path]
) -> tuple[int, int]:
    """How many rows are current though their identity is so already, and how many are
    superseded though nothing current is newer."""
    newest = _keyed(current, keys)
    repeated = f"SELECT count(*) - count(DISTINCT key) FROM ({newest})"
    newer = (
        f"SELECT count(*) FROM ({_keyed(superseded, keys)}) o "
        f"LEFT JOIN ({newest}) n ON n.key = o.key "
        "WHERE n.commit_id IS NULL OR n.commit_id < o.commit_id"
    )
    with workspace.cursor() as cursor:
        [counts] = cursor.execute(f"SELECT ({repeated}), ({newer})").fetchall()
    return int(counts[0]), int(counts[1])


def _keyed(files: Sequence[Path], keys: str) -> str:
    if not files:
        return "SELECT NULL AS key, 0 AS commit_id WHERE false"
    return f"SELECT {keys} AS key, commit_id FROM {_files(files)}"


def demand(before: Digest, after: Digest, what: str) -> None:
    """Raises IntegrityError when the digests differ."""
    if before != after:
        raise IntegrityError(
            f"compaction is refused: {what} differ, {before} before and {after} after; "
            "nothing was published"
        )


def _files(paths: Sequence[Path]) -> str:
    return parquet([str(path) for path in paths])


def _digest(
    workspace: Workspace, rows: str, columns: Sequence[str], told: pa.Table | None = None
) -> Digest:
    hashed = ", ".join(quoted(name) for name in columns)
    statement = f"SELECT count(*), coalesce(sum(hash({hashed})::HUGEINT), 0) {rows}"
    with workspace.cursor() as cursor:
        if told is not None:
            cursor.register("told_rows", told)
        [(count, content)] = cursor.execute(statement).fetchall()
    return Digest(int(count), int(content))
