"""The SQLite repository: everything that the two engines have in common.

Intents are loaded into temporary tables before the write lock is taken, then one transaction
checks, reconciles with one join per type, and publishes. Whatever fails rolls all of it back.
Reads work on one snapshot and never write, not even to create an absent file.
"""

from __future__ import annotations

import itertools
import os
import socket
import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import pyarrow as pa

from storage_engine.commitlog.layout import MAIN
from storage_engine.commitlog.records import TypeRef, timestamp
from storage_engine.commitlog.tags import Tag
from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    ExpectedVersionMismatchError,
    IntegrityError,
    SchemaOutdatedError,
)
from storage_engine.model.spec import TypeSpec
from storage_engine.query.compiler import Statement
from storage_engine.query.conditions import Shape
from storage_engine.query.reference import Reference, check_tag
from storage_engine.query.results import SqlExecutor
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.commit_queue import CommitQueue, PendingCommit, Turn
from storage_engine.repository.duck_confined import ConfinedDuck
from storage_engine.repository.protocol import (
    AppliedUnit,
    CommitRecord,
    CommitRequest,
    CommitResult,
    Idempotency,
    ReadWindow,
    Snapshot,
    TypeChange,
    check_metadata,
    checked_commit,
    distinct_values,
    end_notes,
    labels,
    no_staging,
    overtaken_note,
    repetition_note,
)
from storage_engine.repository.sqlite import (
    control_tables,
    data_table,
    event_tables,
    tags,
    type_histories,
)
from storage_engine.repository.sqlite.connection import (
    Connections,
    ask,
    batches,
    begin_write,
    rollback,
    snapshot,
)
from storage_engine.repository.sqlite.control_tables import FileStamp
from storage_engine.repository.sqlite.data_table import (
    DataTable,
    KeySet,
    StagedType,
    TableColumn,
    checked_rows,
    encode,
    read_schema,
    rows_of,
)
from storage_engine.repository.sqlite.executor import SqliteExecutor
from storage_engine.repository.sqlite.group import SqliteGroup, is_void
from storage_engine.repository.sqlite.history import SqliteHistory
from storage_engine.repository.sqlite.migration import SqliteMigration
from storage_engine.repository.sqlite.stored import UNREADABLE, StoredRow
from storage_engine.repository.sqlite.visible import LAST_ID, named
from storage_engine.schema.history import TypeHistory
from storage_engine.schema.migration import MigrationOutcome, MigrationRequest


class SqliteRepository(ABC):
    """A storage in one SQLite file (or in memory, for as long as the repository is open)."""

    backend: str = control_tables.BACKEND
    branch: str = MAIN
    engine_version: str
    objects: None = None
    shape: ClassVar[Shape]  # of its data tables, for compiled queries
    _temporary: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self, path: str | Path, config: OntologiaConfig, *, uri: str) -> None:
        self.uri = uri
        self.path = str(path)
        self._config = config
        self._connections = Connections(path, config.s3_lock_timeout_ms)
        # For SQL of users, on tables in memory: it can open no file at all.
        self.duck = ConfinedDuck(uri=uri, memory_limit=config.s3_duckdb_memory_limit)
        self.in_memory = self._connections.in_memory
        self.history = SqliteHistory(self)
        self._queue = CommitQueue(self._publish_turn)
        self._tally: tuple[str, int, Counter[tuple[str, str]]] = ("", 0, Counter())
        with self.reading("open"):
            pass  # refuse a file of another engine or a newer format now, not at the first use

    @property
    def database(self) -> Self:
        return self

    @property
    def lock_timeout_ms(self) -> int:
        return self._config.s3_lock_timeout_ms

    # --- what the engines differ in -------------------------------------------------------------

    @classmethod
    @abstractmethod
    def _create_data_tables(cls, connection: sqlite3.Connection) -> None:
        """Create, where missing, what a storage needs besides the control tables."""

    @abstractmethod
    def add_table(
        self, connection: sqlite3.Connection, spec: TypeSpec, version: int, commit_id: int, now: str
    ) -> DataTable:
        """The table for a schema version that its first commit is about to write."""

    @abstractmethod
    def current_table(
        self, connection: sqlite3.Connection, kind: str, name: str
    ) -> DataTable | None:
        """The table that typed reads see, None for an unknown type."""

    @abstractmethod
    def version_table(
        self, connection: sqlite3.Connection, kind: str, name: str, version: int
    ) -> DataTable | None:
        """The table with the rows of one schema version, None when there is none."""

    @abstractmethod
    def rows_at(
        self, connection: sqlite3.Connection, kind: str, name: str, version: int
    ) -> DataTable | None:
        """The table that typed reads see, as it is while that schema version is current."""

    @abstractmethod
    def end_type(
        self, connection: sqlite3.Connection, kind: str, name: str, *, purge: bool
    ) -> None:
        """Nothing of a type is current any more; with `purge`, its rows are taken away."""

    @abstractmethod
    def all_tables(
        self, connection: sqlite3.Connection, kind: str, name: str
    ) -> Sequence[DataTable]:
        """Every table that has rows of a type, of older schema versions too."""

    @abstractmethod
    def payload(self, spec: TypeSpec) -> Sequence[TableColumn]:
        """The columns besides commit and identity."""

    @abstractmethod
    def _encode(self, spec: TypeSpec, table: pa.Table) -> list[list[Any]]:
        """Rows as values of the payload columns."""

    @abstractmethod
    def _decode(self, spec: TypeSpec, identity: pa.Table, payload: Sequence[Any]) -> pa.Table:
        """Values of the payload columns as rows in the type's row schema."""

    # --- writing --------------------------------------------------------------------------------

    def commit(self, request: CommitRequest) -> CommitResult | None:
        check_metadata(request.metadata, self._config.max_commit_metadata_bytes)
        if any(given.table is None for given in request.inputs):
            # To read the rows may take long, and others need not wait for it.
            self._queue.flush()
            return CommitQueue(self._publish_turn).commit(request)
        return self._queue.commit(request)

    def submit(self, request: CommitRequest) -> PendingCommit:
        check_metadata(request.metadata, self._config.max_commit_metadata_bytes)
        return self._queue.submit(request)

    def _publish_turn(self, turn: Turn) -> None:
        if not self._connections.exists():
            for pending in turn.take():
                if not is_void(pending.request):
                    break
                pending.succeed(None)
            else:
                return
        group = SqliteGroup(self, turn)
        with group, group:  # twice: Ctrl-C may come at the first instruction of leaving
            group.run(partial(self._connections.use, "commit", create=True, lasting=True))

    def migrate(self, request: MigrationRequest) -> MigrationOutcome:
        return SqliteMigration(self, request).run()

    def applied(self, unit: Idempotency) -> AppliedUnit | None:
        with self.reading("look up a unit of work") as connection:
            return control_tables.applied(connection, unit) if connection else None

    def begin_staged(self, spec: TypeSpec, **_: Any) -> NoReturn:
        raise no_staging(self.uri, backend=self.backend, engine_version=self.engine_version)

    def publish_on(
        self,
        connection: sqlite3.Connection,
        request: CommitRequest,
        staged: Sequence[StagedType],
        waited_ms: float,
    ) -> tuple[CommitResult | None, bool]:
        """All that happens under the write lock; and whether something was written, so that the
        caller commits, or else rolls back."""
        self.prepare(connection)
        if request.idempotency is not None:
            applied = control_tables.applied(connection, request.idempotency)
            if applied is not None:
                return applied.result(lock_wait_ms=waited_ms), False
        head, head_created_at = control_tables.head(connection)
        self._check_expected(connection, request.expect)
        deltas = []
        for part in staged:
            delta = self._reconcile(connection, part, request.snapshot)
            if delta[0].inserted or delta[0].updated:
                deltas.append((part, *delta))
        if not deltas and not request.events:
            if request.idempotency is not None:
                control_tables.record_unit(connection, request.idempotency, head)
            return None, request.idempotency is not None
        commit_id = head + 1
        now = control_tables.utc_text(datetime.now(UTC))
        for part, _, version in deltas:
            self._write_rows(connection, part, version, commit_id, now)
        changes = [change for _, change, _ in deltas]
        control_tables.insert_commit(
            connection,
            commit_id,
            created_at=max(now, head_created_at),
            runtime_id=self._config.runtime_id,
            metadata=control_tables.to_json(dict(request.metadata)),
            events=control_tables.to_json([dict(event) for event in request.events]),
            changes=changes,
            idempotency=request.idempotency,
        )
        event_tables.publish(connection, request.events, request.acks, timestamp(datetime.now(UTC)))
        holder = {"host": socket.gethostname(), "pid": os.getpid(), **request.holder}
        control_tables.record_lock(connection, self._config.runtime_id, holder, now)
        notes = self._notes(connection, request, [part for part, _, _ in deltas], head)
        return CommitResult(commit_id, changes, lock_wait_ms=waited_ms, notes=notes), True

    def _notes(
        self,
        connection: sqlite3.Connection,
        request: CommitRequest,
        written: Sequence[StagedType],
        head: int,
    ) -> list[str]:
        snapshot = request.snapshot
        bulk = {given.spec.ref for given in request.inputs if given.stream is not None}
        notes = []
        for part in written:
            if part.spec.ref in bulk:
                (repeated,) = connection.execute(data_table.count_repeated(part.staged)).fetchone()
                if repeated:
                    notes.append(repetition_note(part.spec, repeated))
            elif snapshot is not None and snapshot.concerns(part.spec.ref, head):
                since = {"snapshot": snapshot.since(part.spec.ref)}
                later = connection.execute(data_table.overtaken(part.staged), since)
                rows = ((row[:-1], row[-1]) for row in later)
                if changed := list(snapshot.changed(part.spec.ref, rows)):
                    notes.append(overtaken_note(part.spec, changed))
        for part in written:
            notes += end_notes(
                part.spec, lambda ref: bool(control_tables.known_types(connection, ref))
            )
        return notes

    def _reconcile(
        self, connection: sqlite3.Connection, part: StagedType, snapshot: Snapshot | None
    ) -> tuple[TypeChange, int | None]:
        """How the intents of one type differ from its latest state, and its schema version."""
        spec, staged = part.spec, part.staged
        if (ending := type_histories.ending_of(connection, *spec.ref)) is not None:
            raise ending.refusal()
        stored = control_tables.check_schema(connection, spec)
        table = self.current_table(connection, *spec.ref) if stored else None
        if table is not None and snapshot is not None and snapshot.refuses:
            later = connection.execute(
                data_table.changed_since(table, staged),
                {**table.parameters, "snapshot": snapshot.since(spec.ref)},
            )
            snapshot.check(spec.ref, ((row[:-1], row[-1]) for row in later))
        connection.execute(
            data_table.reconcile(table, staged), table.parameters if table is not None else {}
        )
        rows, updated = connection.execute(data_table.count_delta(staged)).fetchone()
        change = TypeChange(spec.kind, spec.name, inserted=rows - updated, updated=updated)
        return change, stored.version if stored else None

    def _write_rows(
        self,
        connection: sqlite3.Connection,
        part: StagedType,
        version: int | None,
        commit_id: int,
        now: str,
    ) -> None:
        table = self.current_table(connection, *part.spec.ref) if version else None
        if version is None or table is None:
            version = 1
            control_tables.register(connection, part.spec, version, commit_id, now)
            table = self.add_table(connection, part.spec, version, commit_id, now)
        connection.execute(
            data_table.publish(table, part.staged),
            {**table.parameters, "commit_id": commit_id, "version": version},
        )
        if table.kind == "relation":
            connection.execute(data_table.index_right_keys(table))

    def _check_expected(
        self, connection: sqlite3.Connection, expect: Mapping[tuple[str, str], int]
    ) -> None:
        for (kind, name), expected in expect.items():
            actual = self._type_head(connection, kind, name)
            if actual != expected:
                raise ExpectedVersionMismatchError(type=name, expected=expected, actual=actual)

    def to_rows(self, spec: TypeSpec, rows: pa.Table | pa.RecordBatch) -> Iterator[Any]:
        table = checked_rows(spec, rows)
        return rows_of([*encode(spec, table, spec.identity), *self._encode(spec, table)])

    def prepare(self, connection: sqlite3.Connection) -> None:
        """Make the storage writable, inside the transaction that writes."""
        stamp = self._stamp(connection)
        if stamp is None:
            self.create_tables(connection)
            return
        if stamp.format < control_tables.FORMAT:
            control_tables.migrate_format(connection, stamp)
            self._create_data_tables(connection)

    @classmethod
    def create_tables(cls, connection: sqlite3.Connection) -> None:
        """Everything that an empty storage of this engine has, stamp included."""
        control_tables.create_tables(connection, cls.engine_version)
        control_tables.name_log(connection, cls.engine_version)
        cls._create_data_tables(connection)

    # --- reading --------------------------------------------------------------------------------

    def head_commit_id(self) -> int:
        with self.reading("read head") as connection:
            return control_tables.head(connection)[0] if connection else 0

    def read(
        self, spec: TypeSpec, window: ReadWindow = ReadWindow(), *, keys: pa.Table | None = None
    ) -> pa.Table:
        with self.reading("read") as connection:
            return self.read_on(connection, spec, window, keys)

    def read_on(
        self,
        connection: sqlite3.Connection | None,
        spec: TypeSpec,
        window: ReadWindow,
        keys: pa.Table | None,
    ) -> pa.Table:
        """`read`, as part of what happens on a snapshot."""
        parts = [read_schema(spec).empty_table()]
        table = self.table_on(connection, spec)
        if connection is None or table is None:
            return parts[0]
        key_set = self._load_keys(connection, spec, keys) if keys is not None else None
        statement = Statement(
            data_table.select(table, self.payload_names(spec), window, key_set),
            {**table.parameters, "upto": window.as_of, "since": window.since},
        )
        parts += [self.to_arrow(spec, columns) for columns in batches(ask(connection, statement))]
        return pa.concat_tables(parts)

    def table_on(
        self,
        connection: sqlite3.Connection | None,
        spec: TypeSpec,
        schema_version: int | None = None,
    ) -> DataTable | None:
        """Where the rows of a type are, None when nothing of it is stored, or it was dropped.
        Refuses a class that differs from the stored schema, unless a version is asked for, whose
        schema the caller has."""
        if connection is None:
            return None
        if schema_version is not None:
            return self.version_table(connection, *spec.ref, schema_version)
        if type_histories.ending_of(connection, *spec.ref) is not None:
            return None
        if control_tables.check_schema(connection, spec) is None:
            return None
        return self.current_table(connection, *spec.ref)

    def payload_names(self, spec: TypeSpec) -> list[str]:
        return [column.name for column in self.payload(spec)]

    def to_arrow(self, spec: TypeSpec, columns: Sequence[Sequence[Any]]) -> pa.Table:
        """Rows as SQLite gave them, in columns. IntegrityError names a row that is not ours."""
        try:
            return self._to_arrow(spec, columns)
        except (IntegrityError, *UNREADABLE, pa.ArrowException):
            for number in range(len(columns[0])):
                row = [column[number] for column in columns]
                self._check_row(spec, row)
            raise

    def _check_row(self, spec: TypeSpec, row: Sequence[Any]) -> None:
        try:
            self._to_arrow(spec, [(value,) for value in row])
        except (IntegrityError, *UNREADABLE, pa.ArrowException) as error:
            commit_id, *identity = row[: 1 + len(spec.identity)]
            table = f"of {spec.kind} {spec.name}"
            raise StoredRow(table, (*identity, commit_id)).damaged(str(error)) from error

    def _to_arrow(self, spec: TypeSpec, columns: Sequence[Sequence[Any]]) -> pa.Table:
        width = 1 + len(spec.identity)
        identity = pa.table(
            [pa.array(column, pa.string()) for column in columns[1:width]], names=spec.identity
        )
        rows = self._decode(spec, identity, columns[width:])
        for field in spec.fields:
            if rows.column(field.name).null_count and not field.nullable:
                raise ValueError(f"{field.name} is null and may not be")
        return pa.Table.from_arrays(
            [pa.array(columns[0], pa.int64()), *rows.columns], schema=read_schema(spec)
        )

    def _load_keys(self, connection: sqlite3.Connection, spec: TypeSpec, keys: pa.Table) -> KeySet:
        """A temporary table, gone with the read's transaction."""
        key_set = KeySet(self.temporary_name("keys"), len(spec.identity))
        connection.execute(key_set.create())
        connection.executemany(key_set.insert(), rows_of(encode(spec, keys, spec.identity)))
        return key_set

    def temporary_name(self, use: str) -> str:
        """A new one: in memory, all temporary tables are in one connection."""
        return f"{use}_{next(self._temporary)}"

    def executor(
        self, pinned: int | None = None, *, on_head: Callable[[int], None] | None = None
    ) -> SqlExecutor:
        head = self.head_commit_id() if pinned is not None else 0
        if pinned is not None and not 0 <= pinned <= head:
            raise ValueError(f"commit {pinned} cannot be pinned: the storage is at commit {head}")
        return SqliteExecutor(self, pinned, on_head)

    def key_splits(self, spec: TypeSpec, when: When) -> Sequence[str]:
        """None: rows lie in the order of keys."""
        return ()

    def commit_at(self, reference: Reference) -> int:
        with self.reading("resolve a reference") as connection:
            return self.commit_on(connection, reference)

    def commit_on(self, connection: sqlite3.Connection | None, reference: Reference) -> int:
        """`commit_at`, as part of what happens on a snapshot."""
        if isinstance(reference, str):
            return named(reference, self._tags(connection))
        if isinstance(reference, datetime):
            return control_tables.commit_at(connection, reference) if connection else 0
        return min(max(reference, 0), control_tables.head(connection)[0] if connection else 0)

    def _tags(self, connection: sqlite3.Connection | None) -> Mapping[str, int]:
        """The commits that have names."""
        if connection is None:
            return {}
        return {tag.name: tag.commit_id for tag in tags.stored_tags(connection)}

    def require_commit(self, reference: Reference) -> int:
        with self.reading("resolve a reference") as connection:
            head = control_tables.head(connection)[0] if connection else 0
            return checked_commit(reference, self.commit_on(connection, reference), head)

    def list_tags(self) -> list[Tag]:
        return tags.list_tags(self)

    def resolve_tag(self, name: str) -> Tag:
        return tags.resolve_tag(self, name)

    def create_tag(self, name: str, commit_id: int | None = None) -> Tag:
        check_tag(name)
        return tags.create_tag(self, name, commit_id)

    def delete_tag(self, name: str) -> Tag:
        return tags.delete_tag(self, name)

    def type_head(self, spec: TypeSpec) -> int:
        with self.reading("read type head") as connection:
            return self._type_head(connection, *spec.ref) if connection else 0

    def _type_head(self, connection: sqlite3.Connection, kind: str, name: str) -> int:
        """The last commit that wrote rows of a type, or gave it a schema version."""
        head = type_histories.last_activation(connection, (kind, name))
        for table in self.all_tables(connection, kind, name)[-1:]:
            sql = data_table.head_of(table)
            head = max(head, connection.execute(sql, table.parameters).fetchone()[0])
        return head

    def row_counts(self) -> dict[TypeRef, tuple[int, int]]:
        """Of each type its identities, and all their versions, in the current schema version."""
        counts: dict[TypeRef, tuple[int, int]] = {}
        with self.reading("count rows") as connection:
            if connection is None:
                return counts
            for _, spec in control_tables.known_types(connection):
                for table in self.all_tables(connection, *spec.ref)[-1:]:
                    counts[spec.ref] = connection.execute(
                        data_table.count_rows(table), table.parameters
                    ).fetchone()
        return counts

    def list_commits(
        self, limit: int = 10, since_commit_id: int | None = None
    ) -> list[CommitRecord]:
        limit, since_commit_id = min(limit, LAST_ID), min(since_commit_id or 0, LAST_ID)
        with self.reading("list commits") as connection:
            if connection is None:
                return []
            return control_tables.commits(
                connection, since=since_commit_id or 0, limit=max(limit, 0)
            )

    def get_commit(self, commit_id: int) -> CommitRecord | None:
        if commit_id > LAST_ID:
            return None
        with self.reading("read commit") as connection:
            return control_tables.commit(connection, commit_id) if connection else None

    def sent_events(self, commit_id: int) -> Sequence[Mapping[str, Any]]:
        with self.reading("read commit") as connection:
            if connection is None or commit_id > LAST_ID:
                return []
            return control_tables.sent_events(connection, commit_id)

    def identity_counts(self) -> dict[tuple[str, str], int | None]:
        with self.reading("count rows") as connection:
            if connection is None:
                return {}
            inserted = self._inserted_rows(connection)
            return {
                ref: inserted[ref] if history.unbroken else None
                for ref, history in type_histories.histories(connection).items()
                if history.current is not None
            }

    def _inserted_rows(self, connection: sqlite3.Connection) -> Counter[tuple[str, str]]:
        """What all commits inserted; only those since the last call are looked at."""
        log_id = control_tables.meta(connection).get(control_tables.LOG_ID, "")
        head = control_tables.head(connection)[0]
        log_before, upto, totals = self._tally
        if log_before != log_id or upto > head:  # another storage in its place
            upto, totals = 0, Counter()
        if upto < head:
            totals = totals + control_tables.inserted_rows(connection, upto)
            self._tally = (log_id, head, totals)
        return totals

    def commits_between(self, since: int, upto: int) -> list[CommitRecord]:
        with self.reading("list commits") as connection:
            if connection is None:
                return []
            return control_tables.commits_between(
                connection, max(since, 0), min(max(upto, 0), LAST_ID)
            )

    def written_values(
        self,
        spec: TypeSpec,
        field: str,
        *,
        since: int,
        upto: int,
        alike: Callable[[Any, Any], bool] = eq,
    ) -> Iterator[tuple[int, Any]]:
        executor = self.executor(min(upto, self.head_commit_id()))
        when = When(history=True, since=since)
        try:
            for batch in executor.rows(QuerySpec(spec, when=when)).batches:
                yield from distinct_values(batch.select(["commit_id", field]), alike)
        except SchemaOutdatedError:
            # Rows of v1 that do not become the current class: what they have come to was written
            # again by the migration. A class that differs from the storage is refused again.
            with self.reading("read schema") as connection:
                stored = control_tables.check_schema(connection, spec) if connection else None
            current = stored.version if stored is not None else None
            asked = QuerySpec(spec, when=replace(when, schema_version=current))
            for batch in executor.rows(asked).batches:
                yield from distinct_values(batch.select(["commit_id", field]), alike)

    def list_commit_changes(self, commit_id: int) -> list[dict[str, Any]]:
        changes: list[dict[str, Any]] = []
        with self.reading("list commit changes") as connection:
            if connection is None or commit_id > LAST_ID:
                return changes
            for kind, name in control_tables.touched_types(connection, commit_id):
                columns = ("key",) if kind == "entity" else data_table.identity_columns(kind)
                tables = self.all_tables(connection, kind, name)
                ends = type_histories.endings(connection, (kind, name))
                if not tables and any(ending.purged for ending in ends):
                    continue
                if not tables:
                    problem = f"types names the {kind} {name}, which has no table"
                    raise StoredRow("commits", commit_id).damaged(problem)
                sql = data_table.changes(tables)
                after = max((e.commit_id for e in ends if e.commit_id < commit_id), default=0)
                parameters = {"type": name, "commit_id": commit_id, "after": after}
                for *identity, earlier in connection.execute(sql, parameters):
                    changes.append(
                        {"kind": kind, "type_name": name}
                        | dict(zip(columns, identity, strict=True))
                        | {"operation": "update" if earlier else "insert"}
                    )
        return changes

    def known_types(self) -> list[TypeSpec]:
        """The types that this storage has, from their stored schemas; no classes needed."""
        with self.reading("read schema") as connection:
            return (
                [spec for _, spec in control_tables.known_types(connection)] if connection else []
            )

    def type_refs(self) -> list[tuple[str, str]]:
        with self.reading("read schema") as connection:
            return control_tables.type_refs(connection) if connection else []

    def stored_types(self, refs: Sequence[tuple[str, str]]) -> list[TypeSpec]:
        with self.reading("read schema") as connection:
            if connection is None:
                return []
            return [spec for ref in refs for _, spec in control_tables.known_types(connection, ref)]

    def type_histories(
        self, refs: Sequence[tuple[str, str]] | None = None
    ) -> dict[tuple[str, str], TypeHistory]:
        with self.reading("read schema") as connection:
            return type_histories.histories(connection, refs) if connection else {}

    def storage_info(self) -> dict[str, Any]:
        with self.reading("read storage info") as connection:
            info: dict[str, Any] = {
                "backend": self.backend,
                "engine_version": self.engine_version,
                "db_path": self.path,
                "uri": self.uri,
                "format": control_tables.FORMAT,
                "head_commit_id": 0,
                "types": {},
            }
            if connection is not None:
                stamp = control_tables.inspect(connection, self.path)
                info["format"] = stamp.format if stamp else control_tables.FORMAT
                info["head_commit_id"] = control_tables.head(connection)[0]
                types = control_tables.known_types(connection)
                names = labels([spec.ref for _, spec in types])
                for name, (version, spec) in zip(names, types, strict=True):
                    info["types"][name] = {
                        "type_kind": spec.kind,
                        "schema_version_id": version,
                        "last_commit_id": self._type_head(connection, *spec.ref),
                    }
            return info | self._engine_info(connection)

    def layout_problems(self, connection: sqlite3.Connection) -> list[str]:
        """Where the tables of types and what is said of them contradict each other."""
        return []

    def requests(self) -> dict[str, int]:
        """None: a file is not asked over a network."""
        return {}

    def _engine_info(self, connection: sqlite3.Connection | None) -> dict[str, Any]:
        """What `storage_info` says besides."""
        return {}

    @contextmanager
    def reading(
        self, operation: str, *, lasting: bool = False
    ) -> Iterator[sqlite3.Connection | None]:
        """A snapshot to read from, None when there is no storage yet; `lasting` where rows are
        handed out while it is held."""
        if not self._connections.exists():
            yield None
            return
        use = self._connections.use(operation, lasting=lasting)
        with use as connection, snapshot(connection):
            yield connection if self.has_tables(connection) else None

    def has_tables(self, connection: sqlite3.Connection) -> bool:
        return self._stamp(connection) is not None

    def _stamp(self, connection: sqlite3.Connection) -> FileStamp | None:
        """None for an empty database; refuses what this engine cannot work with."""
        stamp = control_tables.inspect(connection, self.path)
        if stamp is not None:
            control_tables.check_engine(stamp, self.engine_version, self.path)
            self.check_shape(connection, stamp, self.path)
        return stamp

    @classmethod
    def check_shape(cls, connection: sqlite3.Connection, stamp: FileStamp, path: str) -> None:
        """Refuse tables that another implementation has made otherwise."""
        if stamp.format == 0:
            ours, data_tables = cls._own_shape()
            control_tables.check_shape(connection, ours, data_tables, stamp, path)

    @classmethod
    def _own_shape(cls) -> tuple[control_tables.Shape, list[str]]:
        """Every table that this engine makes, and which of them are for rows."""
        with closing(sqlite3.connect(":memory:")) as connection:
            cls._create_data_tables(connection)
            data_tables = list(control_tables.shape_of(connection))
            cls.create_tables(connection)
            event_tables.ensure_tables(connection, "")
            tags.ensure_table(connection)
            return control_tables.shape_of(connection), data_tables

    # --- for the event store --------------------------------------------------------------------

    @contextmanager
    def writing(self, operation: str) -> Iterator[sqlite3.Connection]:
        """A write transaction on a storage that is made ready for it; rolled back on failure."""
        with self._connections.use(operation, create=True) as connection:
            begin_write(connection, self._config.s3_lock_timeout_ms)
            try:
                self.prepare(connection)
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                rollback(connection)
                raise

    # --- lifetime -------------------------------------------------------------------------------

    def flush(self) -> None:
        """A commit is complete when it is answered: only what was submitted is waited for."""
        self._queue.flush()

    def close(self) -> None:
        """Close the connections. Closing again does nothing."""
        self._queue.flush()
        self._connections.close()
        self.duck.close()
