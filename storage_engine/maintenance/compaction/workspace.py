"""Where a merge happens: a scratch folder and a DuckDB of its own, in bounded memory.

Not the repository's DuckDB: a merge must not take the memory of queries, and with a thread for
each core of a large machine it would not fit into the limit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from storage_engine.errors import ConfigurationError, StorageBackendError

if TYPE_CHECKING:
    import duckdb

_THREADS = 2


class Workspace:
    """A folder for files, and cursors that spill into it."""

    def __init__(self, folder: Path, connection: duckdb.DuckDBPyConnection) -> None:
        self.folder = folder
        self._connection = connection

    def cursor(self) -> duckdb.DuckDBPyConnection:
        return self._connection.cursor()


@contextmanager
def open_workspace(memory_limit: str) -> Iterator[Workspace]:
    """Gone with all its files at the end. What DuckDB cannot do for want of memory or disk is
    raised as an error that says so."""
    import duckdb  # here: importing storage_engine stays light

    with tempfile.TemporaryDirectory(prefix="ontologia-compact-") as folder:
        connection = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": memory_limit,
                "temp_directory": f"{folder}/spill",
                "threads": _THREADS,
                "preserve_insertion_order": "false",
                "autoinstall_known_extensions": "false",
            },
        )
        try:
            connection.execute("SET GLOBAL TimeZone = 'UTC'")
            connection.execute("SET enable_progress_bar = false")
            yield Workspace(Path(folder), connection)
        except duckdb.OutOfMemoryException as error:
            raise ConfigurationError(
                f"the merge does not fit into s3_duckdb_memory_limit ({memory_limit}), raise it; "
                f"nothing was published: {_first_line(error)}"
            ) from error
        except (duckdb.IOException, OSError) as error:
            raise StorageBackendError(
                f"the merge failed in {tempfile.gettempdir()}, where temporary files are; nothing "
                f"was published: {_first_line(error)}",
                operation="compact",
                retryable=True,
            ) from error
        finally:
            connection.close()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
