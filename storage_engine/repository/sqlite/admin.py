"""What is done to a SQLite file from outside a repository: detect, create, describe, erase."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    AlreadyInitializedError,
    MigrationTokenError,
    UnsupportedEngineError,
)
from storage_engine.repository.sqlite import control_tables
from storage_engine.repository.sqlite.connection import (
    Connections,
    begin_write,
    is_busy,
    rollback,
    snapshot,
)
from storage_engine.repository.sqlite.data_table import quoted
from storage_engine.repository.sqlite.engine import SqliteRepository
from storage_engine.repository.sqlite.versions import SqliteRepositoryV1, SqliteRepositoryV2

ENGINES: Mapping[str, type[SqliteRepository]] = {
    "v1": SqliteRepositoryV1,
    "v2": SqliteRepositoryV2,
}


def detect(path: str | Path, config: OntologiaConfig | None = None) -> tuple[str, int] | None:
    """Engine version and format of a file, None when it is absent or an empty database.

    Raises UnsupportedEngineError for an engine or a format that is newer than this code, and
    StorageBackendError for a file that is something else. Never writes.
    """
    with closing(_connections(path, config)) as connections:
        if connections.in_memory or not connections.exists():
            return None
        with connections.use("open") as connection:
            stamp = control_tables.inspect(connection, str(path))
            if stamp is not None:
                ENGINES[stamp.engine_version].check_shape(connection, stamp, str(path))
    return (stamp.engine_version, stamp.format) if stamp else None


def create(path: str | Path, engine_version: str, config: OntologiaConfig) -> None:
    """Make an empty storage; AlreadyInitializedError when there is one."""
    if engine_version not in ENGINES:
        raise UnsupportedEngineError(
            f"unknown engine version {engine_version!r} for {control_tables.BACKEND}: "
            f"choose one of {', '.join(ENGINES)}",
            backend=control_tables.BACKEND,
            engine_version=engine_version,
            format=control_tables.FORMAT,
        )
    detect(path, config)  # refuses a file that is something else before it is opened for writing
    with (
        closing(_connections(path, config)) as connections,
        connections.use("init", create=True) as connection,
    ):
        begin_write(connection, config.s3_lock_timeout_ms)
        try:
            if control_tables.inspect(connection, str(path)) is not None:
                raise AlreadyInitializedError(str(path), control_tables.head(connection)[0])
            ENGINES[engine_version].create_tables(connection)
            connection.execute("COMMIT")
        finally:
            rollback(connection)


def describe(path: str | Path, config: OntologiaConfig | None = None) -> dict[str, Any]:
    """What `erase` would take away: engine, head commit and the rows of every table."""
    with closing(_connections(path, config)) as connections:
        if not connections.exists():
            return _description(None, str(path))
        with connections.use("describe") as connection, snapshot(connection):
            return _description(connection, str(path))


def erase(
    path: str | Path,
    config: OntologiaConfig | None = None,
    *,
    expect: Mapping[str, Any] | None = None,
) -> None:
    """Take everything out of a storage, in one transaction; an empty database remains.

    With `expect`, an earlier `describe`, nothing is erased if anything changed since.
    """
    with closing(_connections(path, config)) as connections:
        if not connections.exists():
            return
        with connections.use("erase") as connection:
            begin_write(connection, connections.timeout_ms)
            try:
                description = _description(connection, str(path))
                if expect is not None and description != dict(expect):
                    raise MigrationTokenError(
                        f"{path} changed since the preview (head was at commit "
                        f"{expect['head_commit_id']}, is at {description['head_commit_id']}): "
                        "nothing was erased, look at a new preview"
                    )
                _drop_everything(connection)
                connection.execute("COMMIT")
            finally:
                rollback(connection)
            _give_space_back(connection)


def _connections(path: str | Path, config: OntologiaConfig | None) -> Connections:
    return Connections(path, (config or OntologiaConfig()).s3_lock_timeout_ms)


def _description(connection: sqlite3.Connection | None, path: str) -> dict[str, Any]:
    stamp = control_tables.inspect(connection, path) if connection else None
    if connection is None or stamp is None:
        return {"engine_version": None, "format": None, "head_commit_id": 0, "tables": {}}
    return {
        "engine_version": stamp.engine_version,
        "format": stamp.format,
        "head_commit_id": control_tables.head(connection)[0],
        "tables": {
            name: connection.execute(f"SELECT COUNT(*) FROM {quoted(name)}").fetchone()[0]
            for name in _names(connection, "table")
        },
    }


def _drop_everything(connection: sqlite3.Connection) -> None:
    for kind in ("view", "trigger", "table"):  # indexes go with their tables
        for name in _names(connection, kind):
            connection.execute(f"DROP {kind} {quoted(name)}")


def _names(connection: sqlite3.Connection, kind: str) -> list[str]:
    rows = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = ? AND substr(name, 1, 7) <> 'sqlite_' "
        "ORDER BY name",
        (kind,),
    )
    return [name for (name,) in rows.fetchall()]


def _give_space_back(connection: sqlite3.Connection) -> None:
    """Shrink the file. Someone who reads at this moment prevents it; the space is reused then."""
    try:
        connection.execute("VACUUM")
    except sqlite3.OperationalError as error:
        if not is_busy(error):
            raise
