"""The schema versions of each type as a SQLite file has them, and the types that have ended.

A type has ended while its last marker in `dropped_types` is younger than its last version: it was
dropped, or renamed. Created anew it goes on with the next version, and the marker stays, so that
rows from before it are never taken for the new type's.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from storage_engine.errors import TypeDroppedError
from storage_engine.repository.sqlite.stored import StoredRow
from storage_engine.schema.history import SchemaVersion, TypeHistory, TypeRef
from storage_engine.schema.migration import StoredState

DROPPED_TYPES = """
    CREATE TABLE IF NOT EXISTS dropped_types (
        type_kind          TEXT NOT NULL,
        type_name          TEXT NOT NULL,
        dropped_commit_id  INTEGER NOT NULL,
        purged             INTEGER NOT NULL DEFAULT 0,
        renamed_to         TEXT,
        PRIMARY KEY (type_kind, type_name, dropped_commit_id)
    )
    """


@dataclass(frozen=True, slots=True)
class Ending:
    """The commit that ended a type."""

    kind: str
    name: str
    commit_id: int
    purged: bool = False
    renamed_to: str | None = None

    def refusal(self) -> TypeDroppedError:
        return TypeDroppedError(
            type=self.name, dropped_commit_id=self.commit_id, renamed_to=self.renamed_to
        )


def endings(connection: sqlite3.Connection, ref: TypeRef | None = None) -> list[Ending]:
    """Of all types, or of one, oldest first; those that were created anew since included."""
    if not _has_endings(connection):
        return []
    only = "WHERE type_kind = ? AND type_name = ? " if ref is not None else ""
    rows = connection.execute(
        "SELECT type_kind, type_name, dropped_commit_id, purged, renamed_to FROM dropped_types "
        f"{only}ORDER BY dropped_commit_id, type_kind, type_name",
        ref or (),
    )
    return [_ending(*row) for row in rows]


def ended(connection: sqlite3.Connection, ref: TypeRef | None = None) -> dict[TypeRef, Ending]:
    """The types that are not there any more, or that one if it is."""
    last = {(ending.kind, ending.name): ending for ending in endings(connection, ref)}
    return {
        ref: ending
        for ref, ending in last.items()
        if last_activation(connection, ref) <= ending.commit_id
    }


def ending_of(connection: sqlite3.Connection, kind: str, name: str) -> Ending | None:
    """How a type ended; None for one that has not, or was never there."""
    return ended(connection, (kind, name)).get((kind, name))


def last_ending(connection: sqlite3.Connection, kind: str, name: str) -> int:
    """The last commit that ended the type, whatever came after; 0 when none did."""
    return max((ending.commit_id for ending in endings(connection, (kind, name))), default=0)


def last_activation(connection: sqlite3.Connection, ref: TypeRef) -> int:
    """The commit of a type's newest version, 0 for one that was never there."""
    (commit_id,) = connection.execute(
        "SELECT COALESCE(MAX(commit_id), 0) FROM schema_versions "
        "WHERE type_kind = ? AND type_name = ?",
        ref,
    ).fetchone()
    return StoredRow("schema_versions", ref).integer("commit_id", commit_id)


def record_ending(connection: sqlite3.Connection, ending: Ending) -> None:
    connection.execute(
        "INSERT INTO dropped_types (type_kind, type_name, dropped_commit_id, purged, renamed_to) "
        "VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET purged = excluded.purged",
        (ending.kind, ending.name, ending.commit_id, int(ending.purged), ending.renamed_to),
    )


def newest(connection: sqlite3.Connection, ref: TypeRef) -> StoredState | None:
    """A type's newest version, for whoever planned on it."""
    history = histories(connection, [ref]).get(ref)
    if history is None:
        return None
    last = history.last
    return StoredState(last.version, last.schema_sha256, dropped=history.current is None)


def histories(
    connection: sqlite3.Connection, refs: Sequence[TypeRef] | None = None
) -> dict[TypeRef, TypeHistory]:
    """Of these types, or of all, by kind and name."""
    rows: list[Any] = []
    sql = (
        "SELECT type_kind, type_name, schema_version_id, schema_json, schema_sha256, commit_id, "
        "created_at FROM schema_versions"
    )
    if refs is None:
        rows += connection.execute(sql)
    else:
        for ref in dict.fromkeys(refs):
            rows += connection.execute(f"{sql} WHERE type_kind = ? AND type_name = ?", ref)
    versions: dict[TypeRef, list[SchemaVersion]] = defaultdict(list)
    for kind, name, *stored in sorted(rows, key=lambda row: row[:3]):
        versions[kind, name].append(_version(kind, name, *stored))
    ends = endings(connection) if versions else []
    return {ref: _history(ref, stored, ends) for ref, stored in versions.items()}


def _history(
    ref: TypeRef, versions: Sequence[SchemaVersion], ends: Sequence[Ending]
) -> TypeHistory:
    own = [ending for ending in ends if (ending.kind, ending.name) == ref]
    changes = sorted([v.activation_commit_id for v in versions] + [e.commit_id for e in own])
    before = {
        e.commit_id: e.name for e in ends if (e.kind, e.renamed_to) == ref and e.name != ref[1]
    }
    purged = max((e.commit_id for e in own if e.purged), default=0)
    bounded = tuple(
        SchemaVersion(
            version.version,
            version.spec,
            version.schema_sha256,
            version.activation_commit_id,
            next((c for c in changes if c > version.activation_commit_id), None),
            version.created_at,
            before.get(version.activation_commit_id),
            purged if version.activation_commit_id <= purged else None,
        )
        for version in versions
    )
    activations = {version.activation_commit_id for version in versions}
    last = own[-1] if own and own[-1].commit_id >= max(activations) else None
    return TypeHistory(
        *ref,
        bounded,
        dropped_commit_id=last.commit_id if last else None,
        renamed_to=last.renamed_to if last else None,
    )


def _version(
    kind: str, name: str, version: Any, schema: Any, sha256: Any, commit_id: Any, created_at: Any
) -> SchemaVersion:
    place = StoredRow("schema_versions", (kind, name, version))
    spec = place.schema(schema, sha256)
    if spec.ref != (kind, name):
        raise place.damaged(f"has the schema of {spec.ref}")
    return SchemaVersion(
        place.integer("schema_version_id", version, least=1),
        spec,
        sha256,
        place.integer("commit_id", commit_id),
        created_at=place.text("created_at", created_at),
    )


def _ending(kind: Any, name: Any, commit_id: Any, purged: Any, renamed_to: Any) -> Ending:
    place = StoredRow("dropped_types", (kind, name, commit_id))
    return Ending(
        place.text("type_kind", kind),
        place.text("type_name", name),
        place.integer("dropped_commit_id", commit_id, least=1),
        bool(place.integer("purged", purged)),
        None if renamed_to is None else place.text("renamed_to", renamed_to),
    )


def _has_endings(connection: sqlite3.Connection) -> bool:
    """A file of an earlier format gets the table with its next commit."""
    sql = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'dropped_types'"
    return connection.execute(sql).fetchone() is not None
