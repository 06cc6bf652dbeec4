"""The DuckDB connection of an opened storage: one per repository, a cursor per use."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb


class Duck:
    """Opened on first use. Spills to a directory of its own, removed on close."""

    def __init__(
        self, *, memory_limit: str, secret: Callable[[], Mapping[str, Any]] | None
    ) -> None:
        """`secret` is asked for S3 credentials when the connection is opened."""
        self._memory_limit = memory_limit
        self._secret = secret
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._spill: Path | None = None
        self._mutex = threading.Lock()

    def cursor(self) -> duckdb.DuckDBPyConnection:
        with self._mutex:
            if self._connection is None:
                self._connection = self._open()
            return self._connection.cursor()

    def close(self) -> None:
        with self._mutex:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._spill is not None:
                shutil.rmtree(self._spill, ignore_errors=True)
                self._spill = None

    def _open(self) -> duckdb.DuckDBPyConnection:
        import duckdb  # here: importing storage_engine stays light

        self._spill = Path(tempfile.mkdtemp(prefix="ontologia-duckdb-"))
        connection = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": self._memory_limit,
                "temp_directory": str(self._spill),
                "preserve_insertion_order": "false",
                "autoinstall_known_extensions": "false",
            },
        )
        connection.execute("SET GLOBAL TimeZone = 'UTC'")
        connection.execute("SET enable_progress_bar = false")  # a library prints nothing
        if self._secret is not None:
            load_httpfs(connection)
            create_secret(connection, self._secret())
        return connection


def load_httpfs(connection: duckdb.DuckDBPyConnection) -> None:
    """From the packaged extension where it is installed, else DuckDB's own download."""
    package = importlib.util.find_spec("duckdb_extension_httpfs")
    if package is not None and package.submodule_search_locations:
        for folder in package.submodule_search_locations:
            for file in Path(folder).rglob("httpfs.duckdb_extension"):
                connection.execute(f"LOAD {literal(str(file))}")
                return
    connection.execute("INSTALL httpfs")
    connection.execute("LOAD httpfs")


def create_secret(connection: duckdb.DuckDBPyConnection, secret: Mapping[str, Any]) -> None:
    parts = ", ".join(
        f"{name} {str(value).lower() if isinstance(value, bool) else literal(str(value))}"
        for name, value in secret.items()
        if value is not None
    )
    connection.execute(f"CREATE OR REPLACE SECRET ontologia (TYPE s3, {parts})")


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
