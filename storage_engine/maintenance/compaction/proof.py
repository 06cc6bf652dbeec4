"""The proof that a merge lost, changed and invented nothing, without which none is published.

It looks at the inputs and at the encoded outputs, not at how one became the other: as many rows,
the same multiset of rows (a sum of row hashes does not depend on order), and in the `current`
files exactly the newest row of each identity, because latest reads open nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from storage_engine.errors import IntegrityError
from storage_engine.maintenance.compaction.inputs import Inputs
from storage_engine.maintenance.compaction.merge import CURRENT, IDENTITY, Output
from storage_engine.maintenance.compaction.workspace import Workspace
from storage_engine.repository.duck import quoted
from storage_engine.repository.object.scan import parquet


@dataclass(frozen=True, slots=True)
class Digest:
    """Of a multiset of rows."""

    rows: int
    content: int

    def __str__(self) -> str:
        return f"{self.rows} rows (content {self.content:x})"


def prove(workspace: Workspace, kind: str, inputs: Inputs, outputs: Sequence[Output]) -> Digest:
    """The digest that inputs and outputs share. Raises IntegrityError when they do not."""
    columns = inputs.names
    keys = [*IDENTITY[kind], "commit_id"]
    before = _digest(workspace, inputs.sql(), columns)
    after = _digest(workspace, _files(outputs), columns)
    demand(before, after, "the rows of the inputs and of the snapshot")
    current = [output for output in outputs if output.role == CURRENT]
    if current:
        identity = ", ".join(quoted(name) for name in IDENTITY[kind])
        newest = (
            f"SELECT {identity}, max(commit_id) AS commit_id FROM ({inputs.sql()}) "
            f"GROUP BY {identity}"
        )
        expected = _digest(workspace, newest, keys)
        demand(expected, _digest(workspace, _files(current), keys), "the newest rows by identity")
    return before


def _files(outputs: Sequence[Output]) -> str:
    return f"FROM {parquet([str(output.path) for output in outputs])}"


def _digest(workspace: Workspace, rows: str, columns: Sequence[str]) -> Digest:
    hashed = ", ".join(quoted(name) for name in columns)
    cursor = workspace.cursor()
    try:
        found = cursor.execute(
            f"SELECT count(*), coalesce(sum(hash({hashed})::HUGEINT), 0) FROM ({rows})"
        ).fetchone()
    finally:
        cursor.close()
    assert found is not None
    return Digest(int(found[0]), int(found[1]))


def demand(before: Digest, after: Digest, what: str) -> None:
    """Raises IntegrityError when the digests differ."""
    if before != after:
        raise IntegrityError(
            f"compaction is refused: {what} differ, {before} before and {after} after; "
            "nothing was published"
        )
