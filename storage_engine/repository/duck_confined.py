"""The DuckDB for SQL of users: it can open the storage's files, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from storage_engine.process import leave_to_parent
from storage_engine.query.dialects import literal
from storage_engine.repository.duck import REMOTE_THREADS, Duck, unmasked
from storage_engine.repository.duck_s3 import create_secret, load_httpfs
from storage_engine.repository.sql_functions import bounding_macros

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")


class ConfinedDuck(Duck):
    """For SQL of users: an instance of its own, which can open files below `folders` and nothing
    else, load nothing, and be set to nothing else.

    That is decided when it is opened and holds for its life. So where S3 must be reached, or
    memory asks for fewer threads, another one takes its place; who uses the old one may go on.
    """

    def __init__(
        self,
        *,
        uri: str,
        memory_limit: str,
        secret: Callable[[], Mapping[str, Any]] | None = None,
        folders: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        super().__init__(uri=uri, memory_limit=memory_limit, secret=secret)
        self._folders = folders
        self._remote = False
        self._threads: int | None = None
        self._replaced: list[duckdb.DuckDBPyConnection] = []  # still used by whoever has a cursor

    def reach_s3(self) -> None:
        secret = self._secret() if self._secret is not None else {}
        with self._mutex:
            if not self._remote:
                self._remote = True
                self._replace()
            connection = self._connected()
            if secret != self._current_secret:
                create_secret(connection, secret)
                self._current_secret = secret

    def run(
        self,
        cursor: duckdb.DuckDBPyConnection,
        work: Callable[[], T],
        *,
        columns: int = 0,
        frugal: Callable[[], T] | None = None,
    ) -> T:
        """Whoever runs out of memory begins anew, as `reopen_with_room` asks for."""
        self._owner.check()
        return unmasked(cursor, work)

    def reopen_with_room(self, columns: int) -> bool:
        """Where memory did not suffice for so many columns: whether it is worth trying again,
        with a new cursor."""
        with self._mutex:
            fewer = self._fewer_threads(self._connected())
            if fewer is not None:
                self._threads = fewer
            elif not self._note_columns(columns):
                return False
            self._replace()
            return True

    def reopen(self) -> None:
        """After a failure of DuckDB itself: that instance does not work from then on. Another
        thread may have replaced it meanwhile; one that works stays."""
        import duckdb

        with self._mutex:
            if self._connection is None:
                return
            try:
                self._connection.execute("SELECT 1")
            except duckdb.Error:
                self._connection.close()
                self._connection = None
                self._current_secret = None

    def after_fork(self) -> None:
        super().after_fork()
        for connection in self._replaced:
            leave_to_parent(connection)

    def close(self) -> None:
        super().close()
        if self._owner.elsewhere:
            return
        with self._mutex:
            while self._replaced:
                self._replaced.pop().close()

    def _extension_settings(self) -> dict[str, str]:
        return {}  # statements of users are run here: what is signed, and only that

    def _replace(self) -> None:
        """The next cursor is of a new instance. To close the old one would end its cursors."""
        if self._connection is not None:
            self._replaced.append(self._connection)
        self._connection = None
        self._current_secret = None

    def _open(self) -> duckdb.DuckDBPyConnection:
        connection = super()._open()
        connection.execute("SET GLOBAL allow_persistent_secrets = false")
        connection.execute("SET GLOBAL autoload_known_extensions = false")
        if self._remote:
            load_httpfs(connection)
            connection.execute("SET GLOBAL enable_http_metadata_cache = true")
            self._threads = self._threads or max(REMOTE_THREADS, os.cpu_count() or 1)
            self._current_secret = self._secret() if self._secret is not None else {}
            create_secret(connection, self._current_secret)
        if self._threads is not None:
            connection.execute(f"SET GLOBAL threads = {self._threads}")
        if self._room_for:
            self._set_memory_limit(connection)
        for macro in bounding_macros():
            connection.execute(macro)
        folders = ", ".join(literal(folder) for folder in self._folders())
        connection.execute(f"SET GLOBAL allowed_directories = [{folders}]")
        connection.execute("SET GLOBAL enable_external_access = false")
        connection.execute("SET GLOBAL lock_configuration = true")
        return connection
