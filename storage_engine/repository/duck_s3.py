"""How a DuckDB reaches S3: the extension that reads it, and a secret with the credentials."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage_engine.errors import ConfigurationError
from storage_engine.query.dialects import literal
from storage_engine.wording import first_line

if TYPE_CHECKING:
    import duckdb

_HTTPFS = "httpfs.duckdb_extension"


def load_httpfs(connection: duckdb.DuckDBPyConnection) -> None:
    """From the packaged extension where it is installed, else DuckDB's own download."""
    packaged = packaged_httpfs()
    if packaged is not None:
        _load_packaged(connection, packaged)
        return
    connection.execute("INSTALL httpfs")
    connection.execute("LOAD httpfs")


@cache
def packaged_httpfs() -> Path | None:
    package = importlib.util.find_spec("duckdb_extension_httpfs")
    folders = package.submodule_search_locations if package is not None else None
    files = (file for folder in folders or () for file in Path(folder).rglob(_HTTPFS))
    return next(files, None)


def _load_packaged(connection: duckdb.DuckDBPyConnection, file: Path) -> None:
    """An extension is built for one release of DuckDB, and no other takes it."""
    import duckdb

    try:
        connection.execute(f"LOAD {literal(str(file))}")
    except duckdb.Error as error:
        raise ConfigurationError(
            f"DuckDB {duckdb.__version__} cannot load the packaged extension that reads S3: both "
            f"packages must be of one release, pip install duckdb-extension-httpfs=="
            f"{duckdb.__version__} ({first_line(error)})"
        ) from error


def create_secret(connection: duckdb.DuckDBPyConnection, secret: Mapping[str, Any]) -> None:
    parts = ", ".join(
        f"{name} {str(value).lower() if isinstance(value, bool) else literal(str(value))}"
        for name, value in secret.items()
        if value is not None
    )
    connection.execute(f"CREATE OR REPLACE SECRET ontologia (TYPE s3, {parts})")
