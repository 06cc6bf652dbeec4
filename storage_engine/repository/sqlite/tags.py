"""Tags of a SQLite storage: a table that the first tag creates."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from storage_engine.commitlog.records import timestamp
from storage_engine.commitlog.tags import Tag, check_name, unknown
from storage_engine.errors import ConfigurationError, TagExistsError
from storage_engine.repository.sqlite.connection import begin_write, rollback
from storage_engine.repository.sqlite.stored import StoredRow

if TYPE_CHECKING:
    from storage_engine.repository.sqlite.engine import SqliteRepository

_CREATE = """
    CREATE TABLE IF NOT EXISTS tags (
        name        TEXT PRIMARY KEY,
        commit_id   INTEGER NOT NULL,
        created_at  TEXT NOT NULL,
        runtime_id  TEXT NOT NULL
    )
"""
_SELECT = "SELECT name, commit_id, created_at, runtime_id FROM tags"


def list_tags(repository: SqliteRepository) -> list[Tag]:
    """By name."""
    with repository.reading("list tags") as connection:
        return stored_tags(connection) if connection is not None else []


def resolve_tag(repository: SqliteRepository, name: str) -> Tag:
    """UnknownTagError (a ValueError) names the nearest."""
    tags = list_tags(repository)
    for tag in tags:
        if tag.name == name:
            return tag
    raise unknown(name, [tag.name for tag in tags])


def create_tag(
    repository: SqliteRepository,
    name: str,
    commit_id: int | None,
    *,
    created_at: str | None = None,
    runtime_id: str | None = None,
) -> Tag:
    """Name a commit (None: head). The same again is no error; another commit: TagExistsError."""
    check_name(name)
    head = repository.head_commit_id()
    wanted = head if commit_id is None else commit_id
    if not 1 <= wanted <= head:
        there = f"1 to {head} are there" if head else "there are none yet"
        raise ConfigurationError(f"no commit {wanted} to tag: {there}")
    with _writing(repository, "create tag") as connection:
        ensure_table(connection)
        existing = {tag.name: tag for tag in stored_tags(connection)}.get(name)
        if existing is not None and existing.commit_id != wanted:
            raise TagExistsError(name, commit_id=existing.commit_id, asked=wanted)
        if existing is not None:
            return existing
        now = created_at or timestamp(datetime.now(UTC))
        tag = Tag(name, wanted, now, runtime_id or repository._config.runtime_id)
        connection.execute(
            "INSERT INTO tags VALUES (?, ?, ?, ?)",
            (tag.name, tag.commit_id, tag.created_at, tag.runtime_id),
        )
        connection.execute("COMMIT")
        return tag


def delete_tag(repository: SqliteRepository, name: str) -> Tag:
    """Take the name away; the commit stays."""
    tag = resolve_tag(repository, name)
    with _writing(repository, "delete tag") as connection:
        connection.execute("DELETE FROM tags WHERE name = ?", (name,))
        connection.execute("COMMIT")
    return tag


def ensure_table(connection: sqlite3.Connection) -> None:
    connection.execute(_CREATE)


def stored_tags(connection: sqlite3.Connection) -> list[Tag]:
    """By name, on a connection at hand."""
    there = connection.execute(
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'tags'"
    ).fetchone()
    if there is None:
        return []
    return [_tag(row) for row in connection.execute(f"{_SELECT} ORDER BY name")]


def _tag(row: Sequence[Any]) -> Tag:
    """Earlier versions wrote times with `Z`."""
    place = StoredRow("tags", row[0])
    return Tag(
        place.text("name", row[0]),
        place.integer("commit_id", row[1], least=1),
        timestamp(place.instant("created_at", row[2])),
        place.text("runtime_id", row[3]),
    )


@contextmanager
def _writing(repository: SqliteRepository, operation: str) -> Iterator[sqlite3.Connection]:
    """A transaction that is rolled back unless it was committed."""
    with repository._connections.use(operation) as connection:
        begin_write(connection, repository._config.s3_lock_timeout_ms)
        try:
            yield connection
        finally:
            rollback(connection)
