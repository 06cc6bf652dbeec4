"""What sessions read with: queries, SQL, and views of one commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa

from storage_engine.query.builder import Query
from storage_engine.query.executor import Parameters, Plan, Rows, SqlExecutor, Traversal
from storage_engine.query.reference import Reference, checked_reference
from storage_engine.query.spec import QuerySpec
from storage_engine.repository.protocol import Repository
from storage_engine.runtime import history
from storage_engine.runtime.arguments import BoundTypes


class OpenExecutor:
    """Answers for as long as the session or ontology it came from is open.

    The storage underneath may outlive them: queries that were begun and rows that are still being
    read end here.
    """

    def __init__(self, executor: SqlExecutor, check_open: Callable[[str], None]) -> None:
        self._executor = executor
        self._check_open = check_open

    def rows(self, spec: QuerySpec) -> Rows:
        self._check_open("query")
        return self._while_open(self._executor.rows(spec))

    def aggregate(self, spec: QuerySpec) -> pa.Table:
        self._check_open("query")
        return self._executor.aggregate(spec)

    def traverse(self, spec: QuerySpec) -> Traversal:
        self._check_open("query")
        return self._executor.traverse(spec)

    def endpoints(
        self, spec: QuerySpec, side: Literal["left", "right"], keys: pa.Array
    ) -> pa.Table:
        self._check_open("query")
        return self._executor.endpoints(spec, side, keys)

    def explain(self, spec: QuerySpec) -> Plan:
        self._check_open("query")
        return self._executor.explain(spec)

    def sql(self, statement: str, parameters: Parameters | None = None) -> Rows:
        self._check_open("sql")
        return self._while_open(self._executor.sql(statement, parameters))

    def _while_open(self, rows: Rows) -> Rows:
        return replace(rows, batches=self._checked(rows.batches))

    def _checked(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self._check_open("query")
        for batch in batches:
            yield batch
            self._check_open("query")


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

    def query(self) -> Query:
        """Begin a query; its latest state is that of this view's commit."""
        return Query(self.executor, self.types.bind)

    def sql(self, statement: str, parameters: Parameters | None = None) -> SqlQuery:
        """SQL over the types as of this view's commit."""
        return SqlQuery(self.executor, statement, parameters)


class Reads:
    """What sessions and ontologies read. It sees what is committed."""

    def __init__(
        self, repository: Repository, types: BoundTypes, check_open: Callable[[str], None]
    ) -> None:
        self._repository = repository
        self._types = types
        self._check_open = check_open

    def query(self) -> Query:
        return Query(self._executor(), self._types.bind)

    def sql(self, statement: str, parameters: Parameters | None) -> SqlQuery:
        return SqlQuery(self._executor(), statement, parameters)

    def at(self, reference: Reference) -> View:
        commit_id = self._commit_at(reference, "at")
        return View(commit_id, self._executor(commit_id), self._types)

    def diff(self, before: Reference, after: Reference) -> list[history.Change]:
        older, newer = (self._commit_at(reference, "diff") for reference in (before, after))
        return history.diff(self._repository, older, newer)

    def changes(self, since: int | str, limit: int) -> history.Changes:
        return history.changes(self._repository, since, limit)

    def list_commits(self, limit: int, since_commit_id: int | None) -> list[dict[str, Any]]:
        records = self._repository.list_commits(limit, since_commit_id)
        return [record.as_dict() for record in records]

    def get_commit(self, commit_id: int) -> dict[str, Any] | None:
        record = self._repository.get_commit(commit_id)
        return record.as_dict() if record is not None else None

    def _commit_at(self, reference: Reference, call: str) -> int:
        return self._repository.commit_at(checked_reference(reference, call))

    def _executor(self, pinned: int | None = None) -> OpenExecutor:
        return OpenExecutor(self._repository.executor(pinned), self._check_open)
