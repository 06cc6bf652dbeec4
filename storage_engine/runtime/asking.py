"""What a session can read: queries, views of the past, differences, the log of commits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from storage_engine.query.builder import Query
from storage_engine.query.executor import Parameters
from storage_engine.query.reference import Reference, checked_reference
from storage_engine.repository.protocol import Repository
from storage_engine.runtime import history
from storage_engine.runtime.bound_types import BoundTypes
from storage_engine.runtime.reads import OpenExecutor, SqlQuery, View, executor_of


class Reading(ABC):
    """The reading side of `Session`, which has the rest. It sees what is committed."""

    _repository: Repository
    _types: BoundTypes

    @abstractmethod
    def _use(self, operation: str) -> AbstractContextManager[None]:
        """Refuse a session that is closed or busy."""

    @abstractmethod
    def _check_open(self, operation: str) -> None:
        """Refuse a session that is closed."""

    def query(self) -> Query:
        """Begin a query: `session.query().entities(Customer).where(...).collect()`.

        Queries see what is committed, not the intents of this session.
        """
        with self._use("query"):
            return Query(self._executor(), self._types.bind)

    def sql(self, statement: str, parameters: Parameters | None = None) -> SqlQuery:
        """Read-only SQL over the latest rows of every stored type, through DuckDB.

            session.sql("select tier, count(*) as n from Customer group by tier").collect()

        Values go into `parameters`: a list for `?`, a dict for `$name`.
        """
        with self._use("sql"):
            return SqlQuery(self._executor(), statement, parameters)

    def at(self, reference: Reference) -> View:
        """The storage as of a commit id, an instant or a tag, for reading; it stays the same."""
        with self._use("at"):
            commit_id = self._repository.commit_at(checked_reference(reference, "at"))
            return View(commit_id, self._executor(commit_id), self._types)

    def diff(self, before: Reference, after: Reference) -> list[dict[str, Any]]:
        """What differs between two commits: kind, type_name, identity, commit_id (the last that
        changed it), operation, and the fields that differ, `before` (None: insert) and `after`."""
        with self._use("diff"):
            a, b = (
                self._repository.commit_at(checked_reference(reference, "diff"))
                for reference in (before, after)
            )
            return history.diff(self._repository, a, b)

    def changes(self, since: int | str = 0, limit: int = 1000) -> history.Changes:
        """The change feed: the oldest changes after a commit id or a cursor, at most `limit`.

        Each is a dict: commit_id, kind, type_name, identity, fields, operation (insert or
        update). The page's `cursor` is where to go on; it is a text that can be kept.
        """
        with self._use("changes"):
            return history.changes(self._repository, since, limit)

    def list_commits(
        self, limit: int = 10, since_commit_id: int | None = None
    ) -> list[dict[str, Any]]:
        """The latest commits, newest first; with `since_commit_id`, only later ones."""
        with self._use("list_commits"):
            found = self._repository.list_commits(limit, since_commit_id)
            return [record.as_dict() for record in found]

    def get_commit(self, commit_id: int) -> dict[str, Any] | None:
        """One commit, None when there is none of that id."""
        with self._use("get_commit"):
            record = self._repository.get_commit(commit_id)
            return record.as_dict() if record is not None else None

    def list_commit_changes(self, commit_id: int) -> list[dict[str, Any]]:
        """What a commit wrote: kind, type_name, identity and operation (insert or update)."""
        with self._use("list_commit_changes"):
            return self._repository.list_commit_changes(commit_id)

    def _executor(self, pinned: int | None = None) -> OpenExecutor:
        return executor_of(self._repository, self._check_open, pinned)
