"""A migration of a SQLite storage: rows rewritten ahead, then one transaction for everything.

The latest rows are read as of one commit, a page of keys at a time, rewritten and put into
temporary tables; no transaction is open while upgraders run, and memory holds one page. Where the
change is simple enough, engine v2 leaves a page to SQLite (`copied_rows`). Then what
other commits have changed meanwhile is rewritten too. Only what changes after that is left for the
write lock, under which the new tables are filled in one statement per type.
"""

from __future__ import annotations

import itertools
import os
import socket
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from storage_engine.errors import ConfigurationError, IntegrityError
from storage_engine.model.canonical import canonical_json
from storage_engine.model.spec import TypeSpec
from storage_engine.process import unforked
from storage_engine.query.compiler import Statement
from storage_engine.repository.protocol import TypeChange, check_metadata
from storage_engine.repository.sqlite import control_tables, type_histories
from storage_engine.repository.sqlite.connection import (
    BATCH_ROWS,
    ask,
    batches,
    begin_write,
    rollback,
    snapshot,
)
from storage_engine.repository.sqlite.copied_rows import EXACT, CopiedFields, copied_fields
from storage_engine.repository.sqlite.data_table import (
    DataTable,
    TableColumn,
    index_right_keys,
    quoted,
)
from storage_engine.repository.sqlite.type_histories import Ending
from storage_engine.schema.migration import (
    MigrationOutcome,
    MigrationRequest,
    TypeDrop,
    TypeMigration,
    metadata_of,
)
from storage_engine.schema.rewrite import Rewrite

if TYPE_CHECKING:
    from storage_engine.repository.sqlite.engine import SqliteRepository

COPIED_ROWS = 131_072  # that SQLite copies at a time; then a signal has its turn
CATCH_UPS = 3  # before the lock is taken; what is left after them is rewritten under it

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RewrittenTable:
    """A temporary table of rewritten rows, one per identity: k0.., payload p0.."""

    name: str
    identity: int
    payload: Sequence[TableColumn]

    @property
    def keys(self) -> list[str]:
        return [f"k{n}" for n in range(self.identity)]

    @property
    def values(self) -> list[str]:
        return [f"p{n}" for n in range(len(self.payload))]

    def create(self) -> str:
        """In the order of identities, which is that of the table that it will be copied into."""
        keys = [f"{key} TEXT NOT NULL" for key in self.keys]
        values = [
            f"{name} {column.sql_type}"
            for name, column in zip(self.values, self.payload, strict=True)
        ]
        primary = f"PRIMARY KEY ({', '.join(self.keys)})"
        return (
            f"CREATE TEMP TABLE {self.name} ({', '.join([*keys, *values, primary])}) WITHOUT ROWID"
        )

    def drop(self) -> str:
        return f"DROP TABLE IF EXISTS temp.{self.name}"

    def copy(self, select: str) -> str:
        """Rows that a statement gives, with their commit before them."""
        columns = ", ".join([*self.keys, *self.values])
        return f"INSERT INTO temp.{self.name} SELECT {columns} FROM ({select})"

    def exceeds(self, place: int) -> str:
        """Whether a number is as large as the parameter."""
        return f"SELECT 1 FROM temp.{self.name} WHERE abs(p{place}) >= ? LIMIT 1"

    def clear(self) -> str:
        return f"DELETE FROM temp.{self.name}"

    def last(self) -> str:
        """The highest identity."""
        order = ", ".join(f"{key} DESC" for key in self.keys)
        return f"SELECT {', '.join(self.keys)} FROM temp.{self.name} ORDER BY {order} LIMIT 1"

    def insert(self) -> str:
        marks = ", ".join("?" * (self.identity + len(self.payload)))
        return f"INSERT OR REPLACE INTO temp.{self.name} VALUES ({marks})"

    def publish(self, table: DataTable) -> str:
        """All of its rows as versions of commit :commit_id."""
        names = ["commit_id", "schema_version_id"]
        values = [":commit_id", ":version"]
        if table.type_column:
            names.append(table.type_column)
            values.append(":type")
        names += [*table.identity, *(column.name for column in self.payload)]
        values += [*self.keys, *self.values]
        return (
            f"INSERT INTO main.{quoted(table.name)} ({', '.join(map(quoted, names))}) "
            f"SELECT {', '.join(values)} FROM temp.{self.name} ORDER BY {', '.join(self.keys)}"
        )


@dataclass(frozen=True, slots=True)
class RewrittenType:
    """One type's share of a migration. Without a source there is nothing to rewrite."""

    migration: TypeMigration
    rewrite: Rewrite | None
    staged: RewrittenTable
    copied: CopiedFields | None  # where SQLite can make the rows by itself


class SqliteMigration:
    """Part of `SqliteRepository`, which knows where its types are and how their rows read."""

    def __init__(self, repository: SqliteRepository, request: MigrationRequest) -> None:
        self._repository = repository
        self._request = request
        self._drops = _all_drops(request)
        if not request.migrations and not self._drops:
            raise ConfigurationError("a migration needs a type that changes or is dropped")

    def run(self) -> MigrationOutcome:
        repository, request = self._repository, self._request
        limit = repository._config.max_commit_metadata_bytes
        check_metadata(request.metadata, limit)
        with (
            ExitStack() as until_given_back,
            repository._connections.use("migrate", create=True, lasting=True) as connection,
            self._tables(connection) as types,
        ):
            upto = self._stage(connection, types)
            until_given_back.enter_context(unforked())
            waited = begin_write(connection, repository._config.s3_lock_timeout_ms)
            try:
                outcome = self._publish(connection, types, upto, waited)
                connection.execute("COMMIT")
            except BaseException:
                rollback(connection)
                raise
        return outcome

    @contextmanager
    def _tables(self, connection: sqlite3.Connection) -> Iterator[list[RewrittenType]]:
        types = []
        try:
            for migration in self._request.migrations:
                spec = migration.spec
                staged = RewrittenTable(
                    f"rewritten_{next(_numbers)}",
                    len(spec.identity),
                    self._repository.payload(spec),
                )
                rewrite = migration.rewrite() if migration.source is not None else None
                by_itself = self._repository.shape == "columns"
                copied = copied_fields(migration) if by_itself else None
                types.append(RewrittenType(migration, rewrite, staged, copied))
                connection.execute(staged.create())
            yield types
        finally:
            for part in types:
                connection.execute(part.staged.drop())

    # --- ahead of the lock ----------------------------------------------------------------------

    def _stage(self, connection: sqlite3.Connection, types: Sequence[RewrittenType]) -> int:
        """Rewrite the latest rows; the commit up to which that was done."""
        staged = 0
        for _ in range(1 + CATCH_UPS):
            with snapshot(connection):
                if not self._repository.has_tables(connection):
                    break
                self._check_unmoved(connection)
                head = control_tables.head(connection)[0]
            if head == staged:
                break
            try:
                self._rewrite(connection, types, staged, head)
            except (sqlite3.OperationalError, IntegrityError):
                with snapshot(connection):
                    self._check_unmoved(connection)  # the table of a type may be gone by now
                raise
            staged = head
        return staged

    def _rewrite(
        self, connection: sqlite3.Connection, types: Sequence[RewrittenType], since: int, upto: int
    ) -> None:
        """Stage what was written after a commit, in place of what it replaces."""
        for part in types:
            table = self._source(connection, part)
            if table is None or (since == 0 and self._copy(connection, part, table, upto)):
                continue
            for columns in self._pages(connection, part, table, since, upto):
                self._load(connection, part, columns)

    def _pages(
        self,
        connection: sqlite3.Connection,
        part: RewrittenType,
        table: DataTable,
        since: int,
        upto: int,
    ) -> Iterator[Sequence[Sequence[Any]]]:
        """The rows as of a commit that were written after another, in columns, by identity.
        Nothing is open between two pages, unless the write lock is held."""
        columns = [table.value("h", c) for c in self._repository.payload_names(_source_spec(part))]
        last: Sequence[str] | None = None
        while True:
            statement = _page(table, columns, since, upto, last, BATCH_ROWS)
            with nullcontext() if connection.in_transaction else snapshot(connection):
                pages = list(batches(ask(connection, statement)))
            if not pages:
                return
            yield pages[0]
            last = [column[-1] for column in pages[0][1 : 1 + len(table.identity)]]

    def _load(
        self,
        connection: sqlite3.Connection,
        part: RewrittenType,
        columns: Sequence[Sequence[Any]],
    ) -> None:
        bound = list(self._rewritten(part, columns))
        with _loading(connection):
            connection.executemany(part.staged.insert(), bound)
        self._tell(part, len(bound))

    def _rewritten(
        self, part: RewrittenType, columns: Sequence[Sequence[Any]]
    ) -> Iterator[Sequence[Any]]:
        """Rows of the source as they will be stored: identity and payload."""
        assert part.rewrite is not None
        rows = self._repository.to_arrow(_source_spec(part), columns)
        made = part.rewrite(rows.drop_columns(["commit_id"]))
        return self._repository.to_rows(part.migration.spec, made)

    def _copy(
        self, connection: sqlite3.Connection, part: RewrittenType, table: DataTable, upto: int
    ) -> bool:
        """Let SQLite stage the rows as of a commit, if it can."""
        if part.copied is None:
            return False
        first = next(self._pages(connection, part, table, 0, upto), None)
        if first is None:
            return True  # there are none
        example = next(iter(self._rewritten(part, [column[:1] for column in first])))
        payload = example[len(table.identity) :]
        constants = {f"constant{n}": payload[n] for n in part.copied.constants}
        last: Sequence[str] | None = None
        while True:
            page = _page(table, part.copied.columns(), 0, upto, last, COPIED_ROWS)
            with _loading(connection):
                statement = Statement(part.staged.copy(page.sql), {**page.parameters, **constants})
                count = ask(connection, statement).rowcount
                last = connection.execute(part.staged.last()).fetchone()
            if count <= 0:
                break
            self._tell(part, count)
        if any(
            connection.execute(part.staged.exceeds(place), (EXACT,)).fetchone()
            for place in part.copied.widened
        ):
            connection.execute(part.staged.clear())
            return False
        return True

    def _tell(self, part: RewrittenType, rows: int) -> None:
        if self._request.progress is not None:
            self._request.progress(part.migration.spec.name, rows)

    # --- under the lock -------------------------------------------------------------------------

    def _publish(
        self,
        connection: sqlite3.Connection,
        types: Sequence[RewrittenType],
        upto: int,
        waited_ms: float,
    ) -> MigrationOutcome:
        repository, request = self._repository, self._request
        repository.prepare(connection)
        self._check_unmoved(connection)
        head, head_created_at = control_tables.head(connection)
        if head > upto:
            self._rewrite(connection, types, upto, head)
        commit_id = head + 1
        now = control_tables.utc_text(datetime.now(UTC))
        rows = {part.migration.ref: self._fill(connection, part, commit_id, now) for part in types}
        for drop in self._drops:
            self._drop(connection, drop, commit_id)
        changes = [TypeChange(*ref, inserted=0, updated=n) for ref, n in rows.items() if n]
        metadata = dict(request.metadata)
        if request.migrations:
            metadata |= metadata_of(request.migrations, rows)
        else:
            dropped = [{"type_kind": d.kind, "type_name": d.type_name} for d in self._drops]
            metadata |= {"kind": request.kind, "dropped_types": canonical_json(dropped)}
        control_tables.insert_commit(
            connection,
            commit_id,
            created_at=max(now, head_created_at),
            runtime_id=repository._config.runtime_id,
            metadata=control_tables.to_json(metadata),
            events=control_tables.to_json([]),
            changes=changes,
            kind=request.kind,
        )
        holder = {"host": socket.gethostname(), "pid": os.getpid(), **request.holder}
        control_tables.record_lock(connection, repository._config.runtime_id, holder, now)
        return MigrationOutcome(commit_id, rows, lock_wait_ms=waited_ms)

    def _fill(
        self, connection: sqlite3.Connection, part: RewrittenType, commit_id: int, now: str
    ) -> int:
        """Make the new version current and write its rows; how many there are."""
        spec, version = part.migration.spec, part.migration.version
        control_tables.register(connection, spec, version, commit_id, now)
        table = self._repository.add_table(connection, spec, version, commit_id, now)
        if part.migration.source is None:
            return 0
        statement = Statement(
            part.staged.publish(table),
            {**table.parameters, "commit_id": commit_id, "version": version},
        )
        written = ask(connection, statement).rowcount
        if table.kind == "relation":
            connection.execute(index_right_keys(table))
        return written

    def _drop(self, connection: sqlite3.Connection, drop: TypeDrop, commit_id: int) -> None:
        self._repository.end_type(connection, *drop.ref, purge=drop.purge)
        before = type_histories.ending_of(connection, *drop.ref)
        if before is None:
            before = Ending(*drop.ref, commit_id, renamed_to=drop.renamed_to)
        ending = replace(before, purged=before.purged or drop.purge)
        type_histories.record_ending(connection, ending)

    # --- both -----------------------------------------------------------------------------------

    def _check_unmoved(self, connection: sqlite3.Connection) -> None:
        self._request.check_unmoved(lambda ref: type_histories.newest(connection, ref))

    def _source(self, connection: sqlite3.Connection, part: RewrittenType) -> DataTable | None:
        if part.migration.source is None:
            return None
        version = part.migration.source.version
        return self._repository.rows_at(connection, *part.migration.source_ref, version)


def _all_drops(request: MigrationRequest) -> list[TypeDrop]:
    """Those that are asked for, and the types that others take the place of."""
    drops = {drop.ref: drop for drop in request.drops}
    for migration in request.migrations:
        if (ref := migration.rename) is not None and migration.source is not None:
            source = migration.source
            drops.setdefault(
                ref,
                TypeDrop(
                    *ref, source.version, source.schema_sha256, renamed_to=migration.spec.name
                ),
            )
    return [drops[ref] for ref in sorted(drops)]


def _source_spec(part: RewrittenType) -> TypeSpec:
    assert part.migration.source is not None
    return part.migration.source.spec


@contextmanager
def _loading(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that writes to the temporary database only: it takes no lock. Under the write
    lock it is that of the migration."""
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        rollback(connection)


def _page(
    table: DataTable,
    columns: Sequence[str],
    since: int,
    upto: int,
    last: Sequence[str] | None,
    limit: int,
) -> Statement:
    """The newest versions as of a commit, of what was written after another, in the order of
    identities, after an identity: commit, identity and these columns."""
    ids = table.ids("h")
    # The plus keeps SQLite on the clustered order, which gives the groups without sorting.
    conditions = [table.of_type("h"), "+h.commit_id <= :upto"]
    parameters: dict[str, Any] = {**table.parameters, "upto": upto}
    if since:
        conditions.append("h.commit_id > :since")
        parameters["since"] = since
    if last is not None:
        marks = ", ".join(f":last{n}" for n in range(len(last)))
        conditions.append(f"({ids}) > ({marks})")
        parameters |= {f"last{n}": value for n, value in enumerate(last)}
    listed = [
        "MAX(h.commit_id) AS c",
        *(f"h.{quoted(name)} AS k{n}" for n, name in enumerate(table.identity)),
        *(f"{column} AS p{n}" for n, column in enumerate(columns)),
    ]
    return Statement(
        f"SELECT {', '.join(listed)} FROM main.{quoted(table.name)} AS h "
        f"WHERE {' AND '.join(conditions)} GROUP BY {ids} ORDER BY {ids} LIMIT {limit}",
        parameters,
    )
