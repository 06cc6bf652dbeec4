"""What sessions read with: queries, SQL, and views of one commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from storage_engine.errors import ConfigurationError
from storage_engine.model.spec import Kind, TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.query.builder import Query
from storage_engine.query.reference import Reference, checked_reference
from storage_engine.query.results import (
    Executor,
    Parameters,
    Plan,
    Rows,
    SqlExecutor,
    StoredVersions,
    Traversal,
)
from storage_engine.query.spec import QuerySpec
from storage_engine.repository.protocol import Repository
from storage_engine.repository.upgraded import UpgradedExecutor
from storage_engine.runtime import history
from storage_engine.runtime.arguments import BoundTypes
from storage_engine.runtime.stage_rows import Change
from storage_engine.schema.history import SchemaVersion, TypeHistory
from storage_engine.schema.upgraders import (
    Upgrader,
    UpgraderKey,
    UpgraderSource,
    resolve_upgraders,
)

if TYPE_CHECKING:
    from storage_engine.runtime.core import ReadSet


_NAMES_SHOWN = 20


class OpenExecutor:
    """Answers for as long as the session or ontology it came from is open.

    The storage underneath may outlive them: queries that were begun and rows that are still being
    read end here. What is read of the latest state is told to `reads`.
    """

    def __init__(
        self,
        repository: Repository,
        check_open: Callable[[str], None],
        pinned: int | None = None,
        reads: ReadSet | None = None,
        upgraders: Mapping[UpgraderKey, Upgrader] | None = None,
    ) -> None:
        """With `upgraders`, the past is read in all schema versions."""
        self._repository = repository
        self._check_open = check_open
        self._pinned = pinned
        self._reads = reads
        self._plain = repository.executor(pinned)
        self._past: Executor = self._plain
        if upgraders is not None:
            self._past = UpgradedExecutor(repository, self._plain, upgraders, pinned)

    def rows(self, spec: QuerySpec) -> Rows:
        self._check_open("query")
        executor, heads = self._begin(spec)
        rows = executor.rows(spec)
        self._note_types(spec, heads)
        return replace(rows, batches=self._checked(rows.batches, spec.type, heads))

    def aggregate(self, spec: QuerySpec) -> pa.Table:
        self._check_open("query")
        executor, heads = self._begin(spec)
        table = executor.aggregate(spec)
        self._note_types(spec, heads)
        return table

    def traverse(self, spec: QuerySpec) -> Traversal:
        self._check_open("query")
        executor, heads = self._begin(spec)
        traversal = executor.traverse(spec)
        self._note_types(spec, heads)
        self._note_rows(spec.type, heads, traversal.sources)
        for relation, table in zip(spec.via, traversal.relations, strict=True):
            self._note_rows(relation, heads, table)
        return traversal

    def endpoints(
        self, spec: QuerySpec, side: Literal["left", "right"], keys: pa.Array
    ) -> pa.Table:
        self._check_open("query")
        executor, heads = self._begin(spec)
        table = executor.endpoints(spec, side, keys)
        name = spec.type.left if side == "left" else spec.type.right
        self._note_rows(TypeSpec(kind="entity", name=name or "", fields=()), heads, table)
        return table

    def explain(self, spec: QuerySpec) -> Plan:
        self._check_open("query")
        return self._past.explain(spec)

    def sql(self, statement: str, parameters: Parameters | None = None) -> Rows:
        self._check_open("sql")
        heads: list[int] = []
        executor = self._plain
        if self._reads is not None and self._pinned is None:
            executor = self._repository.executor(on_head=heads.append)
        rows = executor.sql(statement, parameters)
        if self._reads is not None and heads:
            self._reads.add_everything(heads[0])
        return replace(rows, batches=self._checked(rows.batches))

    def _begin(self, spec: QuerySpec) -> tuple[Executor, list[int]]:
        """An executor, and the list to which it adds the head that its answer is of; nothing is
        added where the latest state is not what is asked for."""
        past = not spec.when.latest or spec.when.schema_version is not None
        if self._reads is None or self._pinned is not None or past:
            return self._past, []
        heads: list[int] = []
        return self._repository.executor(on_head=heads.append), heads

    def _note_types(self, spec: QuerySpec, heads: Sequence[int]) -> None:
        if self._reads is None or not heads:
            return
        self._reads.add_type(spec.type.ref, heads[0])
        for name, asked in ((spec.type.left, spec.left), (spec.type.right, spec.right)):
            if asked and name:
                self._reads.add_type(("entity", name), heads[0])

    def _note_rows(
        self, spec: TypeSpec, heads: Sequence[int], rows: pa.Table | pa.RecordBatch
    ) -> None:
        if self._reads is not None and heads:
            self._reads.add_type(spec.ref, heads[0])
            self._reads.add_rows(spec, heads[0], rows)

    def _checked(
        self,
        batches: Iterator[pa.RecordBatch],
        spec: TypeSpec | None = None,
        heads: Sequence[int] = (),
    ) -> Iterator[pa.RecordBatch]:
        self._check_open("query")
        for batch in batches:
            if spec is not None:
                self._note_rows(spec, heads, batch)
            yield batch
            self._check_open("query")


@dataclass(frozen=True)
class _OlderVersions:
    """Reaches older schema versions of a storage, for queries."""

    repository: Repository
    executor: Callable[[Mapping[UpgraderKey, Upgrader]], Executor]

    def stored(
        self, name: str, schema_version: int | None, kind: Kind | None
    ) -> tuple[TypeSpec, int]:
        version = stored_version(self.repository, name, schema_version, kind)
        return version.spec, version.version

    def upgraded(self, upgraders: UpgraderSource | None) -> Executor:
        return self.executor(resolve_upgraders(upgraders))


def stored_history(repository: Repository, name: str, kind: Kind | None = None) -> TypeHistory:
    """The versions of a stored type; ConfigurationError names the types that there are."""
    given: object = name  # callers without a type checker pass a class
    if not isinstance(given, str):
        raise ConfigurationError(
            f"a stored type is asked for by its name, such as 'Customer', not by {given!r}"
        )
    histories = repository.type_histories()
    named = [h for h in histories.values() if h.name == name and kind in (None, h.kind)]
    if len(named) == 1:
        return named[0]
    if named:
        raise ConfigurationError(
            f"{name!r} is an entity type and a relation type; say which: kind='entity' or "
            "kind='relation'"
        )
    if not histories:
        raise ConfigurationError(f"no type {name!r}: nothing is stored yet")
    names = sorted({h.name for h in histories.values() if kind in (None, h.kind)})
    listed = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    unknown = unknown_name(name, names, what="type").removesuffix("?")
    raise ConfigurationError(f"{unknown}: the storage has {listed}")


def stored_version(
    repository: Repository, name: str, number: int | None, kind: Kind | None = None
) -> SchemaVersion:
    """A version of a stored type, the newest unless told; ConfigurationError names those that
    there are."""
    history = stored_history(repository, name, kind)
    version = history.last if number is None else history.version(number)
    if version is None:
        numbers = ", ".join(str(v.version) for v in history.versions)
        raise ConfigurationError(
            f"{name} has no schema version {number!r}: the storage has {numbers}"
        )
    return version


@dataclass(frozen=True)
class SqlQuery:
    """A statement, run anew by each of the methods."""

    executor: SqlExecutor
    statement: str
    parameters: Parameters | None = None

    def collect(self) -> list[dict[str, Any]]:
        """All rows, as dicts."""
        rows: list[dict[str, Any]] = self.to_arrow().to_pylist()
        return rows

    def to_arrow(self) -> pa.Table:
        """All rows, as an Arrow table."""
        rows = self.executor.sql(self.statement, self.parameters)
        return pa.Table.from_batches(rows.batches, schema=rows.schema)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Arrow record batches as they come, in bounded memory."""
        return self.executor.sql(self.statement, self.parameters).batches

    def explain(self) -> str:
        """How DuckDB answers; `print` it."""
        rows = self.executor.sql(f"EXPLAIN {self.statement}", self.parameters)
        return "\n".join(text for batch in rows.batches for text in batch.column(1).to_pylist())


@dataclass(frozen=True)
class View:
    """A storage as of one commit, for reading. It stays the same, whatever is committed after."""

    commit_id: int
    executor: SqlExecutor
    types: BoundTypes
    versions: StoredVersions

    def query(self) -> Query:
        """Begin a query; its latest state is that of this view's commit."""
        return Query(self.executor, self.types.bind, self.versions)

    def sql(self, statement: str, parameters: Parameters | None = None) -> SqlQuery:
        """SQL over the types as of this view's commit."""
        return SqlQuery(self.executor, statement, parameters)


class Reads:
    """What sessions and ontologies read. It sees what is committed."""

    def __init__(
        self,
        repository: Repository,
        types: BoundTypes,
        check_open: Callable[[str], None],
        read_set: ReadSet | None = None,
    ) -> None:
        """`read_set` is told what is read of the latest state."""
        self._repository = repository
        self._types = types
        self._check_open = check_open
        self._read_set = read_set

    def query(self) -> Query:
        return Query(self._executor(), self._types.bind, self._versions())

    def sql(self, statement: str, parameters: Parameters | None) -> SqlQuery:
        return SqlQuery(self._executor(), statement, parameters)

    def at(self, reference: Reference) -> View:
        reference = checked_reference(reference, "at")
        other = self._on_other_branch(reference)
        if other is not None:
            return other.at(reference)
        commit_id = self._repository.commit_at(reference)
        versions = self._versions(commit_id)
        return View(commit_id, self._executor(commit_id), self._types, versions)

    def _on_other_branch(self, reference: Reference) -> Reads | None:
        """For `branch@commit`, where that is another branch than is read here."""
        objects = self._repository.objects
        if not isinstance(reference, str) or "@" not in reference or objects is None:
            return None
        from storage_engine.runtime.branches import named_elsewhere

        name = named_elsewhere(self._repository, reference)
        if name is None:
            return None
        return Reads(objects.branches.kept_open(name), self._types, self._check_open)

    def diff(
        self, before: Reference, after: Reference, upgraders: UpgraderSource | None
    ) -> list[Change]:
        before, after = (checked_reference(given, "diff") for given in (before, after))
        texts = [r for r in (before, after) if isinstance(r, str)]
        if texts and self._repository.objects is not None:
            from storage_engine.runtime.branches import diff_branches, names_branch

            if any(names_branch(self._repository, text) for text in texts):
                return diff_branches(self._repository, before, after)
        older, newer = (self._repository.commit_at(reference) for reference in (before, after))
        ways = resolve_upgraders(upgraders)
        return history.diff(self._repository, older, newer, self._types.by_ref, ways)

    def changes(
        self, since: int | str, limit: int, upgraders: UpgraderSource | None
    ) -> history.Changes:
        ways = resolve_upgraders(upgraders)
        return history.changes(self._repository, since, limit, self._types.by_ref, ways)

    def list_commits(self, limit: int, since_commit_id: int | None) -> list[dict[str, Any]]:
        records = self._repository.list_commits(limit, since_commit_id)
        return [record.as_dict() for record in records]

    def get_commit(self, commit_id: int) -> dict[str, Any] | None:
        record = self._repository.get_commit(commit_id)
        return record.as_dict() if record is not None else None

    def _executor(
        self,
        pinned: int | None = None,
        upgraders: Mapping[UpgraderKey, Upgrader] | None = None,
    ) -> OpenExecutor:
        return OpenExecutor(self._repository, self._check_open, pinned, self._read_set, upgraders)

    def _versions(self, pinned: int | None = None) -> StoredVersions:
        return _OlderVersions(self._repository, lambda upgraders: self._executor(pinned, upgraders))
