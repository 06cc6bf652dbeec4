"""Commits as they go from one storage to another: as they were, not as they would be made now.

A source tells them, a target takes them over, whichever engine either has (`RecordedHistory`, which
every repository has). Nothing is reconciled: rows, times, schema
versions and units of work are written as the source recorded them. Events and acks of commits are
not among it: what of the bus is not done goes by the event stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog.records import TypeRef, UnitVersion
from storage_engine.errors import IntegrityError
from storage_engine.model.columns import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.protocol import Idempotency

if TYPE_CHECKING:
    from storage_engine.commitlog.tags import Tag


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """What a commit says that it wrote of one type. Logs of other implementations do not tell how
    many rows (None), nor how many of them were new. Of a type that was `purged` since, none are
    left."""

    kind: str
    type_name: str
    schema_version_id: int
    rows: int | None
    inserted: int | None = None
    bytes: int = 0  # as stored, 0 where that is not known
    purged: bool = False

    @property
    def ref(self) -> TypeRef:
        return (self.kind, self.type_name)

    def check(self, commit_id: int, rows: int) -> None:
        """IntegrityError unless so many rows are what can be left of it."""
        recorded = 0 if self.purged else self.rows
        if recorded not in (None, rows):
            raise IntegrityError(
                f"commit {commit_id} of the source says that it wrote {recorded} rows of "
                f"{self.type_name}, and {rows} are there: `onto verify --deep` on the source tells "
                "more"
            )


@dataclass(frozen=True, slots=True)
class RecordedCommit:
    """A commit with everything that it recorded but its rows.

    `schema` is what the log keeps of schemas that came with it (`registered`, `dropped`: lists of
    records, as in manifests); of types that only these name there are no changes. `marks` are the
    units of work between its parent and it that changed nothing, `merged_marks` those that a merge
    has brought (where a storage keeps one for each application, the newest of them).
    """

    id: int
    created_at: datetime
    runtime_id: str
    kind: str
    metadata: Mapping[str, str]
    changes: tuple[RecordedChange, ...]
    schema: Mapping[str, Any] = field(default_factory=dict)
    idempotency: Idempotency | None = None
    marks: Mapping[str, UnitVersion] = field(default_factory=dict)
    merged_marks: Mapping[str, Sequence[UnitVersion]] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """What must be the same wherever the commit stands; rows are compared by themselves."""
        return {
            "created_at": self.created_at,
            "runtime_id": self.runtime_id,
            "kind": self.kind,
            "metadata": dict(self.metadata),
            "types": sorted({change.ref for change in self.changes}),
            "idempotency": self.idempotency,
        }


@dataclass(frozen=True, slots=True)
class AdoptedRows:
    """Rows of one type and schema version of a run of commits: `commit_id` and the row schema, in
    the order of commits."""

    spec: TypeSpec
    schema_version_id: int
    batches: Iterable[pa.RecordBatch]

    def by_commit(self) -> Iterator[tuple[int, pa.Table]]:
        """Pieces of rows of one commit each, in order; a commit may have several."""
        names = row_schema(self.spec).names
        for batch in self.batches:
            commits = batch.column(0)
            at = 0
            while at < batch.num_rows:
                commit_id = commits[at].as_py()
                end = at + _run_length(commits.slice(at), commit_id)
                rows = pa.Table.from_batches([batch.slice(at, end - at)])
                yield commit_id, rows.select(names)
                at = end


def _run_length(commits: pa.Array, commit_id: int) -> int:
    """How many of the first are equal to the first; they are sorted."""
    if commits[len(commits) - 1].as_py() == commit_id:
        return len(commits)
    return int(pc.index(pc.greater(commits, commit_id), True).as_py())


def registrations(commit: RecordedCommit) -> Sequence[Mapping[str, Any]]:
    """The schema versions that came with a commit."""
    records: Sequence[Mapping[str, Any]] = commit.schema.get("registered", ())
    return records


def drops(commit: RecordedCommit) -> Sequence[Mapping[str, Any]]:
    """The types that ended with a commit."""
    records: Sequence[Mapping[str, Any]] = commit.schema.get("dropped", ())
    return records


def registration(spec: TypeSpec, schema_version_id: int) -> dict[str, Any]:
    """The record of a schema version, as a log keeps it."""
    return {
        "kind": spec.kind,
        "type_name": spec.name,
        "schema_version_id": schema_version_id,
        "schema_sha256": spec.schema_sha256,
        "schema": spec.schema_dict(),
    }


class RecordedHistory(Protocol):
    """The history of a storage, to be told to another or taken over from one."""

    def identity(self) -> str:
        """Which log it is, the same for as long as that goes on; "" when there is none yet."""

    def commits(self, since: int, upto: int) -> list[RecordedCommit]:
        """Commits after `since`, up to `upto`, oldest first."""

    def schema(self, ref: TypeRef, schema_version_id: int) -> TypeSpec:
        """A type as one of its schema versions has it."""

    def rows(
        self, spec: TypeSpec, schema_version_id: int, *, since: int, upto: int
    ) -> Iterator[pa.RecordBatch]:
        """Every version that commits after `since`, up to `upto`, wrote of a type under a schema
        version: `commit_id` and the row schema, by commit and identity."""

    def units(self) -> Mapping[str, UnitVersion]:
        """Applications whose newest unit of work changed nothing, with that unit."""

    def origin(self) -> str:
        """The identity of the log from which the newest commit was taken over; "" when it was
        made here, or there is none."""

    def adopt(
        self, commits: Sequence[RecordedCommit], rows: Sequence[AdoptedRows], *, origin: str
    ) -> None:
        """Take over the commits after head, all of them or none. CopyRefusedError when others
        have written meanwhile."""

    def adopt_tag(self, tag: Tag) -> None:
        """Name the commit of the same id as the tag of another storage does, with its time and
        author. The same again is no error; another commit: TagExistsError."""

    def adopt_units(self, units: Mapping[str, UnitVersion]) -> None:
        """Record units of work that changed nothing, unless they are."""
