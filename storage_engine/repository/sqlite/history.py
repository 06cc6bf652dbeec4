"""The history of a SQLite storage: told to another, or taken over from one, a transaction for each
run of commits.

What was taken over last, and from which log, is in `storage_meta`, written in that transaction: so
commits that were made here since are told from it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage_engine.commitlog.records import TypeRef, UnitVersion
from storage_engine.commitlog.tags import Tag
from storage_engine.errors import CopyRefusedError, SchemaMetadataError
from storage_engine.model.spec import TypeSpec
from storage_engine.query.compiler import Statement
from storage_engine.repository.history import (
    AdoptedRows,
    RecordedChange,
    RecordedCommit,
    drops,
    registration,
    registrations,
)
from storage_engine.repository.protocol import Idempotency, ReadWindow, TypeChange
from storage_engine.repository.sqlite import control_tables, data_table, tags, type_histories
from storage_engine.repository.sqlite.connection import ask, batches
from storage_engine.repository.sqlite.data_table import DataTable
from storage_engine.repository.sqlite.stored import StoredRow
from storage_engine.repository.sqlite.type_histories import Ending
from storage_engine.schema.migration import drop_record

if TYPE_CHECKING:
    from storage_engine.repository.sqlite.engine import SqliteRepository

_ORIGIN, _UPTO = "copied_from", "copied_upto"


class SqliteHistory:
    """See `RecordedHistory`."""

    def __init__(self, repository: SqliteRepository) -> None:
        self._repository = repository

    # -- told ---------------------------------------------------------------------------------

    def identity(self) -> str:
        """A file from before there were log ids is known by its first commit."""
        with self._repository.reading("read history") as connection:
            if connection is None:
                return ""
            log_id = control_tables.meta(connection).get(control_tables.LOG_ID)
            if log_id is not None:
                return log_id
            row = connection.execute(
                "SELECT created_at, runtime_id, kind, metadata, types FROM commits WHERE id = 1"
            ).fetchone()
        if row is None:
            return ""
        digest = hashlib.sha256("\x1f".join(map(str, row)).encode()).hexdigest()
        return f"log-{digest[:32]}"

    def commits(self, since: int, upto: int) -> list[RecordedCommit]:
        with self._repository.reading("read history") as connection:
            if connection is None:
                return []
            past = _RecordedBeside(
                _versions(connection), type_histories.endings(connection), _marks(connection)
            )
            rows = connection.execute(
                "SELECT id, created_at, runtime_id, kind, metadata, types, idempotency_app, "
                "idempotency FROM commits WHERE id > ? AND id <= ? ORDER BY id",
                (since, upto),
            )
            return [_recorded(row, past) for row in rows]

    def schema(self, ref: TypeRef, schema_version_id: int) -> TypeSpec:
        with self._repository.reading("read schema") as connection:
            row = None
            if connection is not None:
                row = connection.execute(
                    "SELECT schema_json, schema_sha256 FROM schema_versions WHERE type_kind = ? "
                    "AND type_name = ? AND schema_version_id = ?",
                    (*ref, schema_version_id),
                ).fetchone()
        if row is None:
            kind, name = ref
            raise SchemaMetadataError(
                f"{self._repository.uri} has no schema version {schema_version_id} of the {kind} "
                f"{name}: `onto verify` tells more"
            )
        return StoredRow("schema_versions", (*ref, schema_version_id)).schema(*row)

    def rows(
        self, spec: TypeSpec, schema_version_id: int, *, since: int, upto: int
    ) -> Iterator[pa.RecordBatch]:
        repository = self._repository
        with repository.reading("read history", lasting=True) as connection:
            if connection is None:
                return
            table = repository.version_table(connection, *spec.ref, schema_version_id)
            if table is None:
                return
            window = ReadWindow(history=True, since=since, as_of=upto)
            statement = Statement(
                data_table.select(table, repository.payload_names(spec), window, None),
                {**table.parameters, "upto": upto, "since": since},
            )
            for columns in batches(ask(connection, statement)):
                yield from repository.to_arrow(spec, columns).to_batches()

    def units(self) -> Mapping[str, UnitVersion]:
        """The newest of each application decides, be it a commit or not."""
        with self._repository.reading("read history") as connection:
            if connection is None:
                return {}
            newest = dict(
                connection.execute(
                    "SELECT idempotency_app, max(id) FROM commits "
                    "WHERE idempotency_app IS NOT NULL GROUP BY idempotency_app"
                ).fetchall()
            )
            return {
                app_id: version
                for after, units in _marks(connection).items()
                for app_id, version in units.items()
                if newest.get(app_id, 0) <= after
            }

    # -- taken over ---------------------------------------------------------------------------

    def origin(self) -> str:
        with self._repository.reading("read history") as connection:
            if connection is None:
                return ""
            meta = control_tables.meta(connection)
            head, _ = control_tables.head(connection)
        return meta.get(_ORIGIN, "") if meta.get(_UPTO) == str(head) else ""

    def adopt(
        self, commits: Sequence[RecordedCommit], rows: Sequence[AdoptedRows], *, origin: str
    ) -> None:
        with self._repository.writing("copy commits") as connection:
            head, _ = control_tables.head(connection)
            if head != commits[0].id - 1:
                raise CopyRefusedError(
                    f"{self._repository.uri} is at commit {head} and was at {commits[0].id - 1} a "
                    "moment ago: another copy or writer is at work on it; let one of them end, "
                    "then run the copy again, which goes on from where the storage stands",
                    target=self._repository.uri,
                )
            for commit in commits:
                self._change_schema(connection, commit)
            counts: dict[tuple[int, TypeRef], int] = {}
            for given in rows:
                self._insert(connection, given, counts)
            for commit in commits:
                self._record(connection, commit, counts)
            connection.executemany(
                "INSERT INTO storage_meta (key, value) VALUES (?, ?) "
                "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                [(_ORIGIN, origin), (_UPTO, str(commits[-1].id))],
            )

    def adopt_tag(self, tag: Tag) -> None:
        tags.create_tag(
            self._repository,
            tag.name,
            tag.commit_id,
            created_at=tag.created_at,
            runtime_id=tag.runtime_id,
        )

    def adopt_units(self, units: Mapping[str, UnitVersion]) -> None:
        if not units:
            return
        with self._repository.writing("copy units of work") as connection:
            head, _ = control_tables.head(connection)
            for app_id, version in units.items():
                unit = Idempotency(app_id, version)
                if control_tables.applied(connection, unit) is None:
                    control_tables.record_unit(connection, unit, head)

    def _change_schema(self, connection: sqlite3.Connection, commit: RecordedCommit) -> None:
        now = control_tables.utc_text(commit.created_at)
        for record in registrations(commit):
            spec = TypeSpec.from_schema_dict(record["schema"])
            version = record["schema_version_id"]
            control_tables.register(connection, spec, version, commit.id, now)
            table = self._repository.add_table(connection, spec, version, commit.id, now)
            if spec.kind == "relation":
                connection.execute(data_table.index_right_keys(table))
        for record in drops(commit):
            kind, name, purge = record["kind"], record["type_name"], bool(record.get("purge"))
            self._repository.end_type(connection, kind, name, purge=purge)
            ending = Ending(kind, name, commit.id, purge, record.get("renamed_to"))
            type_histories.record_ending(connection, ending)

    def _insert(
        self,
        connection: sqlite3.Connection,
        given: AdoptedRows,
        counts: dict[tuple[int, TypeRef], int],
    ) -> None:
        repository, spec = self._repository, given.spec
        table = repository.version_table(connection, *spec.ref, given.schema_version_id)
        if table is None:
            return  # it was purged within the same run: then there are no rows either
        sql = _insertion(table, repository.payload_names(spec))
        constants = {table.type_column: spec.name} if table.type_column else {}
        for commit_id, piece in given.by_commit():
            place = commit_id, spec.ref
            counts[place] = counts.get(place, 0) + piece.num_rows
            fixed = (commit_id, given.schema_version_id, *constants.values())
            connection.executemany(sql, ((*fixed, *row) for row in repository.to_rows(spec, piece)))

    def _record(
        self,
        connection: sqlite3.Connection,
        commit: RecordedCommit,
        counts: dict[tuple[int, TypeRef], int],
    ) -> None:
        changes = []
        for change in commit.changes:
            rows = counts.pop((commit.id, change.ref), 0)
            change.check(commit.id, rows)
            if change.rows is not None:
                rows = change.rows  # as it was, also where rows were purged since
            inserted = rows if change.inserted is None else change.inserted
            changes.append(TypeChange(*change.ref, inserted=inserted, updated=rows - inserted))
        written = {change.ref for change in commit.changes}
        for record in [*registrations(commit), *drops(commit)]:
            ref = record["kind"], record["type_name"]
            if ref not in written:
                changes.append(TypeChange(*ref, inserted=0, updated=0))
                written.add(ref)
        for app_id, version in commit.marks.items():
            control_tables.record_unit(connection, Idempotency(app_id, version), commit.id - 1)
        control_tables.insert_commit(
            connection,
            commit.id,
            created_at=control_tables.utc_text(commit.created_at),
            runtime_id=commit.runtime_id,
            kind=commit.kind,
            metadata=control_tables.to_json(dict(commit.metadata)),
            events="[]",
            changes=changes,
            idempotency=commit.idempotency,
        )
        for app_id, versions in commit.merged_marks.items():
            numbers = [version for version in versions if isinstance(version, int)]
            newest = max(numbers) if numbers else versions[0]
            control_tables.record_unit(connection, Idempotency(app_id, newest), commit.id)


def _insertion(table: DataTable, payload: Sequence[str]) -> str:
    names = ["commit_id", "schema_version_id"]
    names += [table.type_column] if table.type_column else []
    names += [*table.identity, *payload]
    listed = ", ".join(map(data_table.quoted, names))
    marks = ", ".join("?" * len(names))
    return f"INSERT INTO main.{data_table.quoted(table.name)} ({listed}) VALUES ({marks})"


Versions = Mapping[TypeRef, Sequence[tuple[int, int, str, str]]]  # number, commit, schema, hash


@dataclass(frozen=True, slots=True)
class _RecordedBeside:
    """What is recorded beside the commits, of all of them."""

    versions: Versions
    endings: Sequence[Ending]
    marks: Mapping[int, Mapping[str, UnitVersion]]  # by the commit after which they came

    def schema(self, commit_id: int) -> dict[str, Any]:
        """As a manifest has it."""
        ended = [ending for ending in self.endings if ending.commit_id == commit_id]
        before = {(e.kind, e.renamed_to): e.name for e in ended if e.renamed_to is not None}
        registered = []
        for ref, numbered in self.versions.items():
            for number, activated, text, digest in numbered:
                if activated == commit_id:
                    spec = StoredRow("schema_versions", (*ref, number)).schema(text, digest)
                    record = registration(spec, number)
                    if ref in before:
                        record["renamed_from"] = before[ref]
                    registered.append(record)
        dropped = [
            drop_record((e.kind, e.name), renamed_to=e.renamed_to, purge=e.purged) for e in ended
        ]
        named = {"registered": registered, "dropped": dropped}
        return {name: records for name, records in named.items() if records}

    def version(self, ref: TypeRef, commit_id: int) -> int:
        """The one under which a commit wrote rows."""
        numbers = [n for n, activated, *_ in self.versions.get(ref, ()) if activated <= commit_id]
        return max(numbers, default=1)

    def is_purged(self, ref: TypeRef, commit_id: int) -> bool:
        return any(
            (e.kind, e.name) == ref and e.purged and commit_id <= e.commit_id for e in self.endings
        )


def _versions(connection: sqlite3.Connection) -> Versions:
    """The schema versions of each type, oldest first."""
    versions: dict[TypeRef, list[tuple[int, int, str, str]]] = {}
    for kind, name, *rest in connection.execute(
        "SELECT type_kind, type_name, schema_version_id, commit_id, schema_json, schema_sha256 "
        "FROM schema_versions ORDER BY schema_version_id"
    ):
        versions.setdefault((kind, name), []).append(tuple(rest))
    return versions


def _recorded(row: Sequence[Any], past: _RecordedBeside) -> RecordedCommit:
    commit_id, created_at, runtime_id, kind, metadata, types, app_id, unit = row
    place = StoredRow("commits", commit_id)
    return RecordedCommit(
        id=commit_id,
        created_at=place.instant("created_at", created_at),
        runtime_id=place.text("runtime_id", runtime_id),
        kind=place.text("kind", kind),
        metadata=place.texts("metadata", metadata),
        changes=tuple(
            _change(change, past, commit_id)
            for change in place.changes("types", types)
            if change.inserted or change.updated
        ),
        schema=past.schema(commit_id),
        idempotency=(
            Idempotency(app_id, control_tables.unit_version(place, "idempotency", unit))
            if app_id is not None
            else None
        ),
        marks=past.marks.get(commit_id - 1, {}),
    )


def _change(change: TypeChange, past: _RecordedBeside, commit_id: int) -> RecordedChange:
    ref = (change.kind, change.type_name)
    return RecordedChange(
        *ref,
        schema_version_id=past.version(ref, commit_id),
        rows=change.inserted + change.updated,
        inserted=change.inserted,
        purged=past.is_purged(ref, commit_id),
    )


def _marks(connection: sqlite3.Connection) -> dict[int, dict[str, UnitVersion]]:
    """Units that changed nothing, by the commit after which they came."""
    marks: dict[int, dict[str, UnitVersion]] = {}
    if not control_tables.has_table(connection, "applied_units"):
        return marks
    for app_id, text, after in connection.execute(
        "SELECT app_id, version, after_commit_id FROM applied_units"
    ):
        place = StoredRow("applied_units", app_id)
        version = control_tables.unit_version(place, "version", text)
        marks.setdefault(place.integer("after_commit_id", after), {})[app_id] = version
    return marks
