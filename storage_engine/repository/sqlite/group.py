"""Requests that are published together: one transaction, each a commit of its own, or nothing.

Rows are loaded before the write lock is taken. One that fails is rolled back to its savepoint, and
the others go on as if it had not been; what a request finds of those before it is told only when
the transaction has ended.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from storage_engine.process import unforked
from storage_engine.repository.commit_queue import PendingCommit, Turn
from storage_engine.repository.protocol import CommitRequest, CommitResult
from storage_engine.repository.sqlite import control_tables
from storage_engine.repository.sqlite.connection import begin_write, errors_of, rollback
from storage_engine.repository.sqlite.data_table import StagedType, staged_inputs

if TYPE_CHECKING:
    from storage_engine.repository.sqlite.engine import SqliteRepository


@dataclass(slots=True)
class _LoadedRequest:
    """A request of the group. `outcome` is told once the transaction has ended."""

    pending: PendingCommit
    staged: Sequence[StagedType]
    outcome: CommitResult | Exception | None = None

    def tell(self) -> None:
        if self.pending.done:
            return
        if isinstance(self.outcome, Exception):
            self.pending.fail(self.outcome)
        else:
            self.pending.succeed(self.outcome)


class SqliteGroup:
    """Carries out what one turn of the queue takes. Use once, and leave it: whoever is not
    answered then is asked for by the next turn."""

    def __init__(self, repository: SqliteRepository, turn: Turn) -> None:
        self._repository = repository
        self._turn = turn
        self._members: list[_LoadedRequest] = []
        self._ended = False  # the transaction, and what it wrote stands

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Also when Ctrl-C came right after the end of the transaction."""
        if self._ended:
            for member in self._members:
                member.tell()

    def run(self, connections: Callable[[], AbstractContextManager[sqlite3.Connection]]) -> None:
        taken = self._turn.take()
        with ExitStack() as until_given_back, connections() as connection, ExitStack() as loaded:
            if len(taken) == 1 and self._is_applied(connection, taken[0]):
                return  # spares reading a stream; looked up again under the lock
            for pending in taken:
                self._load(connection, pending, loaded)
            if self._members:
                until_given_back.enter_context(unforked())
                self._publish(connection)

    def _is_applied(self, connection: sqlite3.Connection, pending: PendingCommit) -> bool:
        unit = pending.request.idempotency
        if unit is None or not self._repository.has_tables(connection):
            return False
        applied = control_tables.applied(connection, unit)
        if applied is None:
            return False
        pending.succeed(applied.result())
        return True

    def _load(
        self, connection: sqlite3.Connection, pending: PendingCommit, loaded: ExitStack
    ) -> None:
        repository = self._repository
        inputs = pending.request.inputs
        try:
            with errors_of(repository.path, "commit"):
                staged = loaded.enter_context(
                    staged_inputs(connection, inputs, repository.to_rows, repository.payload)
                )
        except Exception as error:  # noqa: BLE001 - its own
            pending.fail(error)
        else:
            self._members.append(_LoadedRequest(pending, staged))

    def _publish(self, connection: sqlite3.Connection) -> None:
        waited = self._begin(connection)
        ending = False
        try:
            wrote = [self._commit(connection, member, waited) for member in self._members]
            ending = True
            connection.execute("COMMIT" if any(wrote) else "ROLLBACK")
            self._ended = True
        except BaseException as error:
            # Ctrl-C is looked at when the statement has ended the transaction.
            self._ended = (
                ending and not connection.in_transaction and not isinstance(error, sqlite3.Error)
            )
            rollback(connection)
            raise

    def _begin(self, connection: sqlite3.Connection) -> float:
        """What others have waited for the leader counts."""
        patience_ms = self._repository.lock_timeout_ms
        if not self._turn.waited_s:
            return begin_write(connection, patience_ms)
        left_ms = max(0, patience_ms - round(self._turn.waited_s * 1000))
        connection.execute(f"PRAGMA busy_timeout={left_ms}")
        try:
            return begin_write(connection, left_ms)
        finally:
            connection.execute(f"PRAGMA busy_timeout={patience_ms}")

    def _commit(
        self, connection: sqlite3.Connection, member: _LoadedRequest, waited_ms: float
    ) -> bool:
        """Whether something was written."""
        request, staged = member.pending.request, member.staged
        if len(self._members) == 1:  # what fails is all there is
            member.outcome, wrote = self._repository.publish_on(
                connection, request, staged, waited_ms
            )
            return wrote
        connection.execute("SAVEPOINT request")
        try:
            with errors_of(self._repository.path, "commit"):
                member.outcome, wrote = self._repository.publish_on(
                    connection, request, staged, waited_ms
                )
            connection.execute("RELEASE request")
        except Exception as error:
            if not connection.in_transaction:
                raise  # SQLite has ended it, for all
            connection.execute("ROLLBACK TO request")
            connection.execute("RELEASE request")
            member.outcome = error
            return False
        return wrote


def is_void(request: CommitRequest) -> bool:
    """Nothing is stated, so that an absent file need not come into being."""
    return not (
        request.events
        or request.expect
        or request.idempotency
        or any(i.stream is not None for i in request.inputs)
        or any(i.table is not None and i.table.num_rows for i in request.inputs)
    )
