"""Turns the files of a type into one DuckDB relation, wherever the files are.

Files that DuckDB can open (a directory store's paths, large S3 objects through httpfs) are scanned
in place; small remote ones are fetched whole and in parallel, which is one request each instead
of several in a row.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.config import MIB
from storage_engine.errors import IntegrityError
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.port import ObjectNotFound, ObjectStore
from storage_engine.repository.object.duck import Duck, literal, quoted

if TYPE_CHECKING:
    import duckdb

_FETCH_WHOLE = 8 * MIB
_GLOB = re.compile(r"[*?\[]")  # DuckDB would take such a path for a pattern


class RemoteFiles(Protocol):
    """A store whose objects DuckDB can range-read itself."""

    def duckdb_url(self, key: str) -> str: ...


def versioned_schema(spec: TypeSpec) -> pa.Schema:
    """Row schema with the leading commit_id that reads return."""
    return pa.schema([pa.field("commit_id", pa.int64(), nullable=False), *row_schema(spec)])


class Scanner:
    """Opens entries of one storage for DuckDB."""

    def __init__(self, store: ObjectStore, duck: Duck) -> None:
        self._store = store
        self._duck = duck

    @contextmanager
    def versions(
        self, spec: TypeSpec, entries: Sequence[Entry], **tables: pa.Table
    ) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor with a view `versions` (commit_id and row columns) over the entries' files,
        and `tables` registered under their names."""
        cursor = self._duck.cursor()
        try:
            for name, table in tables.items():
                cursor.register(name, table)
            cursor.execute(f"CREATE TEMP VIEW versions AS {self._union(cursor, spec, entries)}")
            yield cursor
        finally:
            cursor.close()

    def table(self, spec: TypeSpec, entries: Sequence[Entry]) -> pa.Table:
        """All rows of the entries, in memory."""
        files = [(entry, file) for entry in entries for file in entry.files]
        tables = self._store.parallel.map(lambda item: self._fetch(spec, *item), files)
        schema = versioned_schema(spec)
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def _union(
        self, cursor: duckdb.DuckDBPyConnection, spec: TypeSpec, entries: Sequence[Entry]
    ) -> str:
        in_place: list[tuple[str, Entry, CommitFile]] = []
        fetched: list[tuple[Entry, CommitFile]] = []
        for entry in entries:
            for file in entry.files:
                location = self._location(file)
                if location is None:
                    fetched.append((entry, file))
                else:
                    in_place.append((location, entry, file))
        parts = []
        if in_place:
            parts.append(_parquet_select(spec, in_place))
        if fetched or not parts:
            tables = self._store.parallel.map(lambda item: self._fetch(spec, *item), fetched)
            table = pa.concat_tables(tables) if tables else versioned_schema(spec).empty_table()
            cursor.register("fetched_rows", table)
            parts.append(f"SELECT {_columns(spec)} FROM fetched_rows")
        return " UNION ALL ".join(parts)

    def _location(self, file: CommitFile) -> str | None:
        path = self._store.local_path(file.path)
        if path is not None and not _GLOB.search(str(path)):
            return str(path)
        if self._store.kind == "s3" and file.bytes > _FETCH_WHOLE:
            remote: RemoteFiles = self._store  # type: ignore[assignment]
            return remote.duckdb_url(file.path)
        return None

    def _fetch(self, spec: TypeSpec, entry: Entry, file: CommitFile) -> pa.Table:
        try:
            data = self._store.get(file.path).data
        except ObjectNotFound:
            raise IntegrityError(
                f"{file.path} is named by the log but missing from {self._store.uri}",
                key=file.path,
            ) from None
        return decode(spec, data, entry, file)


def decode(spec: TypeSpec, data: bytes, entry: Entry, file: CommitFile) -> pa.Table:
    """A file's rows in `versioned_schema`."""
    schema = versioned_schema(spec)
    names = schema.names if file.commit_id_source == "column" else schema.names[1:]
    table = pq.read_table(io.BytesIO(data), columns=names, use_threads=False)
    if file.commit_id_source != "column":
        commit_ids = pa.repeat(pa.scalar(entry.max_commit_id, pa.int64()), table.num_rows)
        table = table.add_column(0, "commit_id", commit_ids)
    return table.select(schema.names).cast(schema)


def _parquet_select(spec: TypeSpec, files: Sequence[tuple[str, Entry, CommitFile]]) -> str:
    own = [location for location, _, file in files if file.commit_id_source == "column"]
    given = [
        (location, entry.max_commit_id)
        for location, entry, file in files
        if file.commit_id_source != "column"
    ]
    parts = []
    if own:
        parts.append(f"SELECT {_columns(spec)} FROM {parquet(own)}")
    if given:
        # The manifest gives these rows their commit id: joined by file name.
        values = ", ".join(f"({literal(name)}, {commit}::BIGINT)" for name, commit in given)
        rows = ", ".join(f"f.{quoted(c)}" for c in row_schema(spec).names)
        parts.append(
            f"SELECT m.commit_id, {rows} "
            f"FROM {parquet([name for name, _ in given], 'filename = true')} f "
            f"JOIN (VALUES {values}) m(filename, commit_id) USING (filename)"
        )
    return " UNION ALL ".join(parts)


def _columns(spec: TypeSpec) -> str:
    return ", ".join(quoted(name) for name in versioned_schema(spec).names)


def parquet(files: Sequence[str], *options: str) -> str:
    """A scan of exactly these files. A folder named `tier=Gold` above them is no column."""
    listed = ", ".join(literal(name) for name in files)
    return f"read_parquet({', '.join([f'[{listed}]', 'hive_partitioning = false', *options])})"
