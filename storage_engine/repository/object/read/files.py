"""Turns the files of a type into one DuckDB relation, wherever the files are.

Files that DuckDB can open (a directory store's paths, large S3 objects through httpfs) are scanned
in place; small remote ones are fetched whole and in parallel, which is one request each instead of
several in a row, and kept in the immutable cache.

Rows of small files are decoded once and kept in memory while there is room: a type that is written
in many small commits has many small files until it is compacted, and opening each of them again
for every query costs more than all the rest. Files never change.

What is read whole is compared with the hash that the log has of it: fetched content each time,
copies in the cache by the cache, small files of a directory once in the life of this process.
Larger files are read in pieces, by what Parquet knows of them; `verify` reads all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.config import KIB, MIB
from storage_engine.errors import IntegrityError, MigrationError
from storage_engine.model.arrow import row_schema, table_from_fields_json
from storage_engine.model.columns import arrow_type
from storage_engine.model.spec import FieldSpec, TypeSpec
from storage_engine.objectstore.cache import ImmutableCache, damaged
from storage_engine.objectstore.local import is_there, path_errors
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.query.dialects import literal, quoted
from storage_engine.repository.duck import Duck
from storage_engine.schema.forward import forward, not_forward, refusal

if TYPE_CHECKING:
    import duckdb

SMALL_FILE = 128 * KIB
MANY_FILES = 16  # fewer are scanned where they are, with what Parquet knows of them
_KEPT_BYTES = 64 * MIB
_REMEMBERED = 100_000

Key = tuple[str, tuple[str, ...]]  # path, columns


class DecodedFiles:
    """Least recently used first out. Safe to use from several threads."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._limit = kept_bytes
        self._tables: OrderedDict[Key, pa.Table] = OrderedDict()
        self._bytes = 0
        self._mutex = threading.Lock()

    def get(self, path: str, columns: tuple[str, ...]) -> pa.Table | None:
        with self._mutex:
            table = self._tables.get((path, columns))
            if table is not None:
                self._tables.move_to_end((path, columns))
            return table

    def keep(self, path: str, columns: tuple[str, ...], rows: pa.Table) -> None:
        with self._mutex:
            if (path, columns) in self._tables:
                return
            self._tables[path, columns] = rows
            self._bytes += rows.get_total_buffer_size()
            while self._bytes > self._limit:
                _, oldest = self._tables.popitem(last=False)
                self._bytes -= oldest.get_total_buffer_size()


FETCH_WHOLE = 8 * MIB
_PAYLOAD = "fields_json"  # of a row of engine v1, whole
_GLOB = re.compile(r"[*?\[]")  # DuckDB would take such a path for a pattern
_UNITED = 8  # commits whose files are united with their ids as constants; more are joined


class MissingFileError(IntegrityError):
    """A file is named, by the log or by an index, but it is not in the store."""


Brought = dict[str, str | pa.Table]  # by path: a name that DuckDB opens, or the rows


STAGED_PART_URL = layout.STAGED_PART_URL  # for readers that know files by their URLs


def attempt_in_url(attempt: str) -> str:
    """What the URLs of an attempt's staged parts contain, and no others."""
    return f"/{layout.staged_prefix(attempt)}/"


class DataFile(NamedTuple):
    """A file with the entry that names it, which may give its rows their commit id. Of an older
    schema version (v1) with the type as it was then, to be brought forward."""

    entry: Entry
    file: CommitFile
    stored: TypeSpec | None = None

    @property
    def attempt(self) -> str:
        """Of a staged part: the attempt that staged it."""
        return layout.staged_attempt(self.file.path)


def versioned_schema(spec: TypeSpec) -> pa.Schema:
    """Row schema with the leading commit_id that reads return."""
    return pa.schema([pa.field("commit_id", pa.int64(), nullable=False), *row_schema(spec)])


def files_of(entries: Iterable[Entry]) -> list[DataFile]:
    return [DataFile(entry, file) for entry in entries for file in entry.files]


class Scanner:
    """Opens files of one storage for DuckDB."""

    def __init__(self, store: ObjectStore, duck: Duck, cache: ImmutableCache | None = None) -> None:
        self._store = store
        self._bulk = store.bulk
        self._duck = duck
        self._cache = cache
        self._decoded = DecodedFiles()
        self._checked: dict[str, tuple[int, ...]] = {}  # local files whose content is right
        self._names = itertools.count()
        self._secret = secrets.token_hex(16)  # no statement of a user can name such a table

    @property
    def duck(self) -> Duck:
        """What the cursors of `versions` are cursors of."""
        return self._duck

    def open_ahead(self) -> None:
        """Have DuckDB opened while the log is asked what to read."""
        self._duck.open_ahead()

    @contextmanager
    def versions(
        self, spec: TypeSpec, entries: Sequence[Entry], **tables: pa.Table
    ) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor with a view `versions` (commit_id and row columns) over the entries' files,
        and `tables` registered under their names."""
        with self._duck.cursor() as cursor, self._duck.errors():
            for name, table in tables.items():
                cursor.register(name, table)
            source = self.source(cursor, spec, files_of(entries))
            cursor.execute(f"CREATE TEMP VIEW versions AS {source}")
            yield cursor

    def table(self, spec: TypeSpec, entries: Sequence[Entry]) -> pa.Table:
        """All rows of the entries, in memory."""
        files = files_of(entries)
        contents = self._bulk.parallel.map(self._content, [item.file for item in files])
        tables = [decode(spec, data, i) for data, i in zip(contents, files, strict=True)]
        return pa.concat_tables(tables) if tables else versioned_schema(spec).empty_table()

    def source(
        self,
        cursor: duckdb.DuckDBPyConnection,
        spec: TypeSpec,
        files: Sequence[DataFile],
        *,
        brought: Brought | None = None,
        keys_only: bool = False,
    ) -> str:
        """A query of all rows of the files: commit_id and row columns, or identity columns only.

        It works on this cursor: rows that DuckDB cannot open as a file are registered with it.
        """
        schema = versioned_schema(spec)
        if keys_only:
            schema = pa.schema([schema.field(name) for name in ("commit_id", *spec.identity)])
        at_hand = self.bring([(spec, item) for item in files]) if brought is None else brought
        sources = [(at_hand[item.file.path], item) for item in files]
        parts = _parquet_selects(schema.names, [(n, i) for n, i in sources if isinstance(n, str)])
        tables = [rows.select(schema.names) for rows, _ in sources if isinstance(rows, pa.Table)]
        if tables or not parts:
            name = f"fetched_{next(self._names)}_{self._secret}"
            rows = pa.concat_tables(tables).combine_chunks() if tables else schema.empty_table()
            cursor.register(name, rows)
            parts.append(f"SELECT {_columns(schema.names)} FROM {name}")
        return " UNION ALL ".join(parts)

    def lacks(self, spec: TypeSpec, entries: Iterable[Entry]) -> bool:
        """Whether a file is missing; found out by fetching it where it is not local."""
        try:
            self.bring([(spec, item) for item in files_of(entries)])
        except MissingFileError:
            return True
        return False

    def has(self, files: Iterable[DataFile]) -> bool:
        """Whether all are there; found out without reading them."""

        def there(path: str) -> bool:
            local = self._store.local_path(path)
            if local is not None:
                return is_there(local)
            return any(info.key == path for info in self._store.list(path))

        return all(self._bulk.parallel.map(there, {item.file.path: None for item in files}))

    def bring(self, files: Iterable[tuple[TypeSpec, DataFile]]) -> Brought:
        """By path, what DuckDB can open a file by, or its rows; all fetched together.

        Many small files are brought as rows, which are kept for the next query.
        """
        unique = {item.file.path: (spec, item) for spec, item in files}
        small = [path for path, (_, i) in unique.items() if 0 < i.file.bytes <= SMALL_FILE]
        as_rows = set(small) if len(small) > MANY_FILES else set()
        as_rows |= {path for path, (spec, i) in unique.items() if self._is_foreign(spec, i.file)}
        as_rows |= {path for path, (_, i) in unique.items() if i.stored is not None}
        brought: Brought = {}
        for path, (_, item) in unique.items():
            if path not in as_rows and (name := self._name(item.file)) is not None:
                brought[path] = name
        rest = [(spec, i) for path, (spec, i) in unique.items() if path not in brought]
        columns: dict[tuple[int, bool], tuple[str, ...]] = {}  # one type, or few, and many files
        for spec, item in rest:
            kind = (id(spec), item.stored is None)
            if kind not in columns:
                columns[kind] = _columns_of(spec, item)
            decoded = self._decoded.get(item.file.path, columns[kind])
            if decoded is not None:
                brought[item.file.path] = decoded
        rest = [(spec, item) for spec, item in rest if item.file.path not in brought]
        contents = self._bulk.parallel.map(
            lambda file: self._content(file) if file.path in as_rows else self._copy(file),
            [item.file for _, item in rest],
        )
        # Decoded here: threads would only wait for one another.
        for (spec, item), content in zip(rest, contents, strict=True):
            if isinstance(content, bytes):
                brought[item.file.path] = self._rows(spec, item, content, keep=as_rows)
            else:
                brought[item.file.path] = content
        return brought

    def _rows(
        self, spec: TypeSpec, item: DataFile, content: bytes, *, keep: Collection[str]
    ) -> pa.Table:
        rows = decode(spec, content, item)
        if item.file.path in keep:
            self._decoded.keep(item.file.path, _columns_of(spec, item), rows)
        return rows

    def _is_foreign(self, spec: TypeSpec, file: CommitFile) -> bool:
        """Whether the file must be read through its payloads, or may have to be.

        Another implementation wrote it if the log does not say how large it is. What its columns
        hold is in its footer, which is at hand where the file is."""
        if file.bytes:
            return False
        path = self._store.local_path(file.path)
        return path is None or (is_there(path) and _is_canonical_elsewhere(spec, _footer(path)))

    def _name(self, file: CommitFile) -> str | None:
        """What DuckDB can open the file by; None when its content must be brought first."""
        path = self._store.local_path(file.path)
        if path is not None:
            self._check_local(file, path)
        if path is not None and not _GLOB.search(str(path)):
            return str(path)
        if file.bytes <= FETCH_WHOLE:
            return None
        url = self._store.duckdb_url(file.path)
        if url is not None:
            self._duck.reach_s3()
        return url

    def _copy(self, file: CommitFile) -> str | bytes:
        """The path of the file's copy in the cache; its content where there is none."""
        if self._cache is None or self._store.local_path(file.path) is not None:
            return self._get(file)
        copy = self._cache.obtain(**self._wanted(file))
        if isinstance(copy, Path) and _GLOB.search(str(copy)):
            return self._cache.get(**self._wanted(file))
        return str(copy) if isinstance(copy, Path) else copy

    def _content(self, file: CommitFile) -> bytes:
        if self._cache is None or self._store.local_path(file.path) is not None:
            return self._get(file)
        return self._cache.get(**self._wanted(file))

    def _wanted(self, file: CommitFile) -> dict[str, Any]:
        """A file as the cache knows it."""
        return {
            "namespace": self._store.uri,
            "key": file.path,
            "size": file.bytes or None,
            "sha256": file.content_sha256,
            "fetch": lambda: self._fetched(file),
        }

    def _get(self, file: CommitFile) -> bytes:
        data = self._fetched(file)
        _check_content(file, data)
        return data

    def _fetched(self, file: CommitFile) -> bytes:
        try:
            return self._bulk.get(file.path).data
        except ObjectNotFound:
            raise self._missing(file) from None

    def _check_local(self, file: CommitFile, path: Path) -> None:
        """Of a file that DuckDB opens: that it is there and, of a small one, that it is right."""
        with path_errors(path, "open"):
            self._check_status(file, path)

    def _check_status(self, file: CommitFile, path: Path) -> None:
        try:
            status = os.stat(path)
            if file.bytes not in (0, status.st_size):
                raise damaged(file.path, f"{status.st_size} bytes", str(file.bytes))
            if not 0 < file.bytes <= SMALL_FILE:
                return
            identity = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if self._checked.get(file.path) == identity:
                return
            _check_content(file, path.read_bytes())
        except FileNotFoundError:
            raise self._missing(file) from None
        if len(self._checked) >= _REMEMBERED:
            self._checked.clear()
        self._checked[file.path] = identity

    def _missing(self, file: CommitFile) -> MissingFileError:
        return MissingFileError(
            f"{file.path} is named by the log but missing from {self._store.uri}", key=file.path
        )


def _check_content(file: CommitFile, data: bytes) -> None:
    if file.bytes not in (0, len(data)):
        raise damaged(file.path, f"{len(data)} bytes", str(file.bytes))
    if file.content_sha256:  # the first implementation's indices do not tell
        actual = hashlib.sha256(data).hexdigest()
        if actual != file.content_sha256:
            raise damaged(file.path, f"sha256 {actual}", file.content_sha256)


def _columns_of(spec: TypeSpec, item: DataFile) -> tuple[str, ...]:
    """What the decoded rows of a file are kept by."""
    names = tuple(versioned_schema(spec).names)
    return names if item.stored is None else (*names, spec.schema_sha256)


def decode(spec: TypeSpec, data: bytes, item: DataFile) -> pa.Table:
    """A file's rows in `versioned_schema`."""
    entry, file, stored = item
    if stored is not None:
        return _brought_forward(spec, stored, decode(stored, data, DataFile(entry, file)), file)
    schema = versioned_schema(spec)
    names = schema.names if file.commit_id_source == "column" else schema.names[1:]
    # Not `read_table`, whose machinery for datasets costs more than a small file itself.
    with pq.ParquetFile(pa.BufferReader(data)) as opened:
        if not file.bytes and _is_canonical_elsewhere(spec, opened.schema_arrow):
            return _from_payloads(spec, opened)
        table = opened.read(columns=names, use_threads=False)
    if file.commit_id_source != "column":
        commit_ids = pa.repeat(pa.scalar(entry.max_commit_id, pa.int64()), table.num_rows)
        table = table.add_column(0, "commit_id", commit_ids)
    if file.upto is not None:
        table = table.filter(pc.less_equal(table.column("commit_id"), file.upto))
    return table.select(schema.names).cast(schema)


def _brought_forward(
    spec: TypeSpec, stored: TypeSpec, rows: pa.Table, file: CommitFile
) -> pa.Table:
    why = refusal(stored, spec)
    version = file.schema_version_id
    if why is not None:
        raise not_forward(spec, stored, version, why)
    try:
        made = forward(stored, spec)(rows.select(row_schema(stored).names))
    except MigrationError as error:
        raise not_forward(spec, stored, version, str(error)) from error
    return made.add_column(0, rows.schema.field(0), rows.column(0)).cast(versioned_schema(spec))


def _footer(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise IntegrityError(f"{path} is no Parquet file: {error}", key=str(path)) from error


def _is_canonical_elsewhere(spec: TypeSpec, stored: pa.Schema) -> bool:
    """Whether a file of another implementation has some values right in `fields_json` alone."""
    return _PAYLOAD in stored.names and any(not _has(stored, field) for field in spec.fields)


def _has(stored: pa.Schema, field: FieldSpec) -> bool:
    """Whether a column is there and of a kind that we would write. Where that is JSON, the texts
    of others may be anything."""
    return (
        field.storage != "json"
        and field.name in stored.names
        and same_values(arrow_type(field.storage), stored.field(field.name).type)
    )


def same_values(ours: pa.DataType, theirs: pa.DataType) -> bool:
    """Whether all values of a type are values of one of ours."""
    if pa.types.is_dictionary(theirs):
        return same_values(ours, theirs.value_type)
    if pa.types.is_timestamp(ours):
        return pa.types.is_timestamp(theirs) and theirs.tz is not None
    wider = {
        pa.int64(): (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16(), pa.uint32()),
        pa.float64(): (pa.float16(), pa.float32()),
        pa.string(): (pa.large_string(), pa.string_view()),
        pa.binary(): (pa.large_binary(), pa.binary_view()),
    }
    return theirs == ours or theirs in wider.get(ours, ())


def _from_payloads(spec: TypeSpec, opened: pq.ParquetFile) -> pa.Table:
    own = [field for field in spec.fields if _has(opened.schema_arrow, field)]
    others = replace(spec, fields=tuple(field for field in spec.fields if field not in own))
    columns = ["commit_id", *spec.identity, _PAYLOAD, *(field.name for field in own)]
    table = opened.read(columns=columns, use_threads=False)
    try:
        rows = table_from_fields_json(others, table, table.column(_PAYLOAD))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise IntegrityError(
            f"{spec.name}: what a payload says does not fit the type: {error}; declare the class "
            "as it was when the storage was written"
        ) from error
    for name in ("commit_id", *(field.name for field in own)):
        rows = rows.append_column(name, table.column(name))
    schema = versioned_schema(spec)
    return rows.select(schema.names).cast(schema)


def _parquet_selects(names: Sequence[str], sources: Sequence[tuple[str, DataFile]]) -> list[str]:
    own: dict[int | None, list[str]] = {}  # by the commit after which rows do not count
    for path, item in sources:
        if item.file.commit_id_source == "column":
            own.setdefault(item.file.upto, []).append(path)
    given: dict[int, list[str]] = {}  # staged parts: their manifest gives the commit id
    for path, item in sources:
        if item.file.commit_id_source != "column":
            given.setdefault(item.entry.max_commit_id, []).append(path)
    parts = [
        f"SELECT {_columns(names)} FROM {parquet(paths)}"
        + ("" if upto is None else f" WHERE commit_id <= {upto:d}")
        for upto, paths in own.items()
    ]
    rows = names[1:]
    if len(given) <= _UNITED:
        parts += [
            f"SELECT {commit_id}::BIGINT AS commit_id, {_columns(rows)} FROM {parquet(paths)}"
            for commit_id, paths in given.items()
        ]
    else:
        pairs = [(path, commit_id) for commit_id, paths in given.items() for path in paths]
        values = ", ".join(f"({literal(path)}, {commit}::BIGINT)" for path, commit in pairs)
        listed = ", ".join(f"f.{quoted(name)}" for name in rows)
        parts.append(
            f"SELECT m.commit_id, {listed} "
            f"FROM {parquet([path for path, _ in pairs], 'filename = true')} f "
            f"JOIN (VALUES {values}) m(filename, commit_id) USING (filename)"
        )
    return parts


def _columns(names: Iterable[str]) -> str:
    return ", ".join(quoted(name) for name in names)


def parquet(files: Sequence[str], *options: str) -> str:
    """A scan of exactly these files. A folder named `tier=Gold` above them is no column."""
    listed = ", ".join(literal(name) for name in files)
    return f"read_parquet({', '.join([f'[{listed}]', 'hive_partitioning = false', *options])})"
