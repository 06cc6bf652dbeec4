"""Going back, forwards: a new commit that makes the state of an older one the latest.

Each identity whose latest row differs from its row back then gets the old row as a new version.
History stays, and identities that came later stay too, because nothing is ever deleted; a plan
names them. Rows stream through the ordinary commit, so memory is bounded and a crash leaves a
whole commit or none; done again, nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from storage_engine.errors import ExpectedVersionMismatchError, SchemaOutdatedError
from storage_engine.maintenance.references import commit_of
from storage_engine.maintenance.restore_rows import ObjectRows, SqliteRows
from storage_engine.model.spec import TypeSpec
from storage_engine.query.spec import Reference
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.protocol import CommitRequest, Repository, TypeInput
from storage_engine.repository.sqlite.base import SqliteRepository

_ATTEMPTS = 5
EXAMPLES = 20


@dataclass(frozen=True, slots=True)
class TypeRestore:
    """What restoring does to one type."""

    kind: str
    type_name: str
    restored: int  # identities that get their old row back
    created_after: int  # identities that came later, and stay
    examples: tuple[tuple[str, ...], ...] = ()  # of the latter, by identity

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "type_name": self.type_name,
            "restored": self.restored,
            "created_after": self.created_after,
            "examples": [list(identity) for identity in self.examples],
        }


@dataclass(frozen=True, slots=True)
class Restore:
    """A plan, or (with `applied`) what was done; `new_commit_id` is None when nothing differed."""

    uri: str
    reference: str
    commit_id: int
    head_commit_id: int
    types: tuple[TypeRestore, ...]
    applied: bool = False
    new_commit_id: int | None = None

    @property
    def restored(self) -> int:
        return sum(one.restored for one in self.types)

    @property
    def created_after(self) -> int:
        return sum(one.created_after for one in self.types)

    def as_dict(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "reference": self.reference,
            "commit_id": self.commit_id,
            "head_commit_id": self.head_commit_id,
            "applied": self.applied,
            "new_commit_id": self.new_commit_id,
            "restored": self.restored,
            "created_after": self.created_after,
            "types": [one.as_dict() for one in self.types],
        }


class Rows(Protocol):
    """The rows of a storage as of one head, as restoring needs them."""

    head_commit_id: int

    def types(self) -> list[tuple[TypeSpec, int]]:
        """Every type with the commit that last changed it."""

    def differing(self, spec: TypeSpec, commit_id: int) -> int:
        """How many identities have another row now than as of the commit."""

    def created_after(
        self, spec: TypeSpec, commit_id: int, limit: int
    ) -> tuple[int, list[tuple[str, ...]]]:
        """How many identities came later, and the first of them."""

    def old_rows(
        self, spec: TypeSpec, commit_id: int
    ) -> AbstractContextManager[Iterator[pa.RecordBatch]]:
        """Those rows as they were."""


def restore(
    repository: Repository,
    reference: Reference,
    *,
    apply: bool = False,
    examples: int = EXAMPLES,
) -> Restore:
    """Plan what a restore would do, or do it.

    Raises UnknownTagError or ConfigurationError for a reference that means no commit, and
    SchemaOutdatedError when a type has been migrated to another schema version since.
    """
    commit_id = commit_of(repository, reference)
    for attempt in range(1, _ATTEMPTS + 1):
        with _rows(repository) as rows:
            _check_versions(repository, commit_id)
            plan = _plan(repository, rows, reference, commit_id, examples)
            if not apply:
                return plan
            try:
                made = _commit(repository, rows, plan, reference)
            except ExpectedVersionMismatchError:
                if attempt == _ATTEMPTS:
                    raise
                continue  # another commit came first: look again at what differs
        return Restore(
            plan.uri,
            plan.reference,
            plan.commit_id,
            plan.head_commit_id,
            plan.types,
            applied=True,
            new_commit_id=made,
        )
    raise AssertionError("unreachable")


def _plan(
    repository: Repository, rows: Rows, reference: Reference, commit_id: int, examples: int
) -> Restore:
    found = []
    for spec, last in rows.types():
        if last <= commit_id:
            continue  # nothing of it changed since
        count, shown = rows.created_after(spec, commit_id, examples)
        differing = rows.differing(spec, commit_id)
        if count or differing:
            found.append(TypeRestore(*spec.ref, differing, count, tuple(shown)))
    return Restore(repository.uri, str(reference), commit_id, rows.head_commit_id, tuple(found))


def _commit(repository: Repository, rows: Rows, plan: Restore, reference: Reference) -> int | None:
    touched = {(one.kind, one.type_name) for one in plan.types if one.restored}
    if not touched:
        return None
    types = rows.types()
    metadata = {"restored_from": str(plan.commit_id)}
    if not isinstance(reference, int):
        metadata["restored_ref"] = str(reference)
    inputs = [
        TypeInput(spec, stream=_stream(rows, spec, plan.commit_id))
        for spec, _ in types
        if spec.ref in touched
    ]
    # All types are expected to stand as they were looked at, those that need nothing as well.
    expect = {spec.ref: last for spec, last in types}
    result = repository.commit(
        CommitRequest(inputs, metadata=metadata, expect=expect, holder={"operation": "restore"})
    )
    return result.commit_id if result is not None else None


def _stream(rows: Rows, spec: TypeSpec, commit_id: int) -> Iterator[pa.RecordBatch]:
    with rows.old_rows(spec, commit_id) as batches:
        yield from batches


@contextmanager
def _rows(repository: Repository) -> Iterator[Rows]:
    if isinstance(repository, ObjectRepository):
        repository.flush()
        yield ObjectRows(repository)
    else:
        assert isinstance(repository, SqliteRepository)
        yield SqliteRows(repository)


def _check_versions(repository: Repository, commit_id: int) -> None:
    """v2 keeps the rows of older schema versions apart: they cannot be compared with the new."""
    layouts: dict[str, dict[str, Any]] = repository.storage_info().get("type_layouts", {})
    names: Sequence[str] = [
        label
        for label, facts in layouts.items()
        if facts["current_schema_version_id"] > 1 and facts["activation_commit_id"] > commit_id
    ]
    if names:
        facts = layouts[names[0]]
        raise SchemaOutdatedError(
            f"{', '.join(names)} changed schema after commit {commit_id} (at commit "
            f"{facts['activation_commit_id']}), so its rows of then have other columns: restore "
            "to a commit since, or write the old values with the new class",
            type=names[0],
            stored_version=facts["current_schema_version_id"],
        )
