"""Rows to Parquet and back: the files of a commit, with what a planner wants to know of them."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.commitlog.records import CommitFile, timestamp
from storage_engine.config import KIB, MIB, OntologiaConfig, size_in_bytes
from storage_engine.errors import StorageBackendError
from storage_engine.model.arrow import fields_json, parquet_schema
from storage_engine.model.canonical import leaf
from storage_engine.model.columns import EngineVersion
from storage_engine.model.spec import SYSTEM_COLUMNS, TypeSpec
from storage_engine.objectstore.local import advice, is_retryable

_ROW_GROUP_ROWS = 256 * 1024
_ROW_GROUP_BYTES = 64 * MIB  # as Arrow data: what a writer holds before it encodes
_TINY_TABLE = 1024  # bytes: dictionaries and compression cost four times the rest, and save nothing
_LARGE_FILE = 64 * MIB  # from here on pages are sized for range requests
_SMALL_PAGE = MIB
_SMALL_PAGE_ROWS = 20_000
# DuckDB holds some pages per column and thread. Measured: to sort 2.3 million rows of 7 columns
# with 2 threads in 256 MB works with pages of 2 MiB and does not with 4 MiB.
_PAGES_IN_MEMORY = 128
_KEY_COLUMNS = ("entity_key", "left_key", "right_key")
_BLOOM_ROWS = 50_000  # of a part in no order, where ranges of keys tell nothing: from here on
_BLOOM_FPP = 0.01
# Of small tables: what zstd needs for itself for each column costs more than it compresses.
_SNAPPY_BYTES = 64 * KIB
_STAT_TEXT = 64  # longer text is cut: a bound may be loose, never wrong
_STAT_COLUMNS = 64
_HASH_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """An encoded file, in memory or on local disk, ready to be uploaded and described."""

    content: bytes | Path
    rows: int
    size: int
    sha256: str
    stats: Mapping[str, Sequence[Any]]
    key_range: Mapping[str, Sequence[Any]]

    def describe(
        self,
        spec: TypeSpec,
        path: str,
        *,
        schema_version_id: int,
        part: int | None,
        inserted: int,
        commit_id_source: str = "column",
    ) -> CommitFile:
        return CommitFile(
            kind=spec.kind,
            type_name=spec.name,
            path=path,
            row_count=self.rows,
            schema_version_id=schema_version_id,
            content_sha256=self.sha256,
            bytes=self.size,
            part=part,
            commit_id_source=commit_id_source,
            inserted=inserted,
            updated=self.rows - inserted,
            stats=self.stats,
            key_range=self.key_range,
        )


def stored_table(
    spec: TypeSpec,
    rows: pa.Table,
    *,
    engine_version: EngineVersion,
    schema_version_id: int,
    commit_id: int | None,
) -> pa.Table:
    """Row-schema rows with the system columns around them; no commit_id column for None."""
    schema = parquet_schema(
        spec, engine_version=engine_version, with_commit_id=commit_id is not None
    )
    constants: dict[str, Any] = {
        "commit_id": commit_id,
        spec.type_column: spec.name,
        "schema_version_id": schema_version_id,
    }
    columns = []
    for field in schema:
        if field.name in constants:
            value = pa.scalar(constants[field.name], type=field.type)
            columns.append(pa.repeat(value, rows.num_rows))
        elif field.name == "fields_json" and engine_version == "v1":
            columns.append(fields_json(spec, rows))
        else:
            columns.append(rows.column(field.name))
    return pa.Table.from_arrays(columns, schema=schema)


def encode_bytes(spec: TypeSpec, table: pa.Table) -> EncodedPart:
    sink = pa.BufferOutputStream()
    metadata = _write(sink, table)
    data = sink.getvalue().to_pybytes()
    return _part(spec, data, len(data), hashlib.sha256(data).hexdigest(), metadata)


def encode_file(spec: TypeSpec, table: pa.Table, path: Path) -> EncodedPart:
    """Encode to a local file, hashed while it is written."""
    with _scratch_errors(path) as failures, path.open("wb") as raw:
        sink = _HashingSink(raw, failures)
        metadata = _write(sink, table)
    return _part(spec, path, sink.size, sink.hexdigest(), metadata)


def scratch_folder(prefix: str) -> Path:
    """A new folder for files that are uploaded from there; StorageBackendError if there is none."""
    with _scratch_errors(f"a folder {prefix}*"):
        return Path(tempfile.mkdtemp(prefix=prefix))


@contextmanager
def _scratch_errors(
    path: Path | str, failures: list[OSError] | None = None
) -> Iterator[list[OSError]]:
    """What the disk refuses, as an error of ours. Whatever a writer of Parquet says of it is its
    own confusion, so that the sink notes in `failures` what it was told."""
    failures = failures if failures is not None else []
    try:
        yield failures
    except Exception as error:
        failure = failures[0] if failures else error
        if not isinstance(failure, OSError):
            raise
        raise StorageBackendError(
            f"write {path}: {advice(failure)}; TMPDIR names another directory for scratch files",
            operation="write",
            key=str(path),
            retryable=is_retryable(failure),
        ) from failure


class _HashingSink(io.RawIOBase):
    """Passes bytes on and hashes them, so that no file is read back for its hash."""

    def __init__(self, raw: io.BufferedWriter, failures: list[OSError]) -> None:
        self._raw = raw
        self._failures = failures
        self._hash = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._hash.update(data)
        try:
            self._raw.write(data)
        except OSError as error:
            self._failures.append(error)
            raise
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _write(sink: Any, table: pa.Table) -> pq.FileMetaData:
    collected: list[pq.FileMetaData] = []
    blooms = None
    if table.num_rows >= _BLOOM_ROWS:
        values = min(table.num_rows, _ROW_GROUP_ROWS)
        blooms = _blooms(table.column_names, values, _BLOOM_FPP)
    tiny = table.nbytes <= _TINY_TABLE
    pq.write_table(
        table,
        sink,
        **_codec(table, level=1),
        row_group_size=_ROW_GROUP_ROWS,
        write_page_index=True,
        # Keys and other near-unique text gain nothing from a dictionary and pay for building it.
        use_dictionary=False if tiny else _repetitive(table),
        bloom_filter_options=blooms,
        metadata_collector=collected,
        store_schema=True,
    )
    return collected[0]


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """How compaction lays out its files: few, large, and cheap to look into over a network."""

    part_bytes: int
    row_group_rows: int
    page_bytes: int
    bloom_fpp: float  # 0: no Bloom filters

    @classmethod
    def of(cls, config: OntologiaConfig) -> SnapshotSettings:
        limit = size_in_bytes(config.s3_duckdb_memory_limit)
        return cls(
            config.snapshot_part_bytes,
            config.snapshot_row_group_rows,
            min(config.snapshot_page_bytes, max(_SMALL_PAGE, limit // _PAGES_IN_MEMORY)),
            config.snapshot_bloom_fpp,
        )


class SnapshotPart:
    """One file written as a stream: rows are held until they fill a row group."""

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        *,
        identity: Sequence[str],
        settings: SnapshotSettings,
        expected_rows: int,
        expected_bytes: int,
    ) -> None:
        """What is expected bounds the size of Bloom filters and decides on the page size."""
        self.path = path
        self._schema = schema
        self._identity = identity
        self._settings = settings
        self._expected_rows = expected_rows
        self._large = expected_bytes >= _LARGE_FILE
        self._failures: list[OSError] = []
        with _scratch_errors(path, self._failures):
            self._raw = path.open("wb")
        self._sink = _HashingSink(self._raw, self._failures)
        self._writer: pq.ParquetWriter | None = None
        self._collected: list[pq.FileMetaData] = []
        self._held: list[pa.Table] = []
        self._held_rows = 0
        self._held_bytes = 0

    @property
    def full(self) -> bool:
        """Whether what is encoded has reached the target size."""
        return self._sink.size >= self._settings.part_bytes

    def write(self, rows: pa.Table) -> None:
        room = self._settings.row_group_rows
        while rows.num_rows:
            taken = rows.slice(0, room - self._held_rows)
            rows = rows.slice(taken.num_rows)
            self._held.append(taken)
            self._held_rows += taken.num_rows
            self._held_bytes += taken.nbytes
            if self._held_rows >= room or self._held_bytes >= _ROW_GROUP_BYTES:
                self._flush()

    def close(self) -> EncodedPart:
        if self._held_rows or self._writer is None:
            self._flush()
        assert self._writer is not None
        with _scratch_errors(self.path, self._failures):
            self._writer.close()
            self._raw.close()
        fields = [name for name in self._schema.names if name not in SYSTEM_COLUMNS]
        return _described(
            self.path,
            self._sink.size,
            self._sink.hexdigest(),
            self._collected[0],
            self._identity,
            fields,
        )

    def abort(self) -> None:
        with suppress(OSError):  # what is still to be written does not fit either
            self._raw.close()

    def _flush(self) -> None:
        table = pa.concat_tables(self._held) if self._held else self._schema.empty_table()
        self._held, self._held_rows, self._held_bytes = [], 0, 0
        with _scratch_errors(self.path, self._failures):
            if self._writer is None:
                self._writer = self._open(table)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def _open(self, first: pa.Table) -> pq.ParquetWriter:
        settings = self._settings
        blooms = None
        if settings.bloom_fpp:
            values = max(1, min(self._expected_rows, settings.row_group_rows))
            blooms = _blooms(self._identity, values, settings.bloom_fpp)
        return pq.ParquetWriter(
            self._sink,
            self._schema,
            **_codec(first, level=3),
            use_dictionary=_repetitive(first),
            write_page_index=True,
            data_page_size=settings.page_bytes if self._large else _SMALL_PAGE,
            max_rows_per_page=settings.row_group_rows if self._large else _SMALL_PAGE_ROWS,
            bloom_filter_options=blooms,
            metadata_collector=self._collected,
            store_schema=True,
        )


def _codec(table: pa.Table, *, level: int) -> dict[str, Any]:
    """Of a file that begins with these rows."""
    if table.nbytes <= _TINY_TABLE:
        return {"compression": "none"}
    if table.nbytes <= _SNAPPY_BYTES:
        return {"compression": "snappy"}
    return {"compression": "zstd", "compression_level": level}


def _blooms(names: Sequence[str], values: int, fpp: float) -> dict[str, Any]:
    """Bloom filters of the keys among some columns, of so many values in a row group."""
    return {name: {"ndv": values, "fpp": fpp} for name in names if name in _KEY_COLUMNS}


def _repetitive(table: pa.Table) -> list[str]:
    """Columns whose first rows repeat values: worth a dictionary."""
    names = []
    sample = table.slice(0, 10_000)
    for name in table.column_names:
        kind = table.schema.field(name).type
        if pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            continue
        column = sample.column(name)
        if len(column) < 100 or len(column.unique()) <= len(column) // 2:
            names.append(name)
    return names


def _part(
    spec: TypeSpec, content: bytes | Path, size: int, sha256: str, metadata: pq.FileMetaData
) -> EncodedPart:
    fields = [f.name for f in spec.fields]
    return _described(content, size, sha256, metadata, spec.identity, fields)


def _described(
    content: bytes | Path,
    size: int,
    sha256: str,
    metadata: pq.FileMetaData,
    identity: Sequence[str],
    fields: Sequence[str],
) -> EncodedPart:
    stats = column_stats(metadata, [*identity, *fields])
    key_range = {name: stats.pop(name)[:2] for name in identity if name in stats}
    return EncodedPart(content, metadata.num_rows, size, sha256, stats, key_range)


def column_stats(metadata: pq.FileMetaData, names: Sequence[str]) -> dict[str, list[Any]]:
    """[min, max, null count] per column, over all row groups; bounds are None when unknown."""
    schema = metadata.schema
    position = {schema.column(i).name: i for i in range(len(schema))}
    result: dict[str, list[Any]] = {}
    for name in names[:_STAT_COLUMNS]:
        low, high, nulls, complete = None, None, 0, True
        for group in range(metadata.num_row_groups):
            stats = metadata.row_group(group).column(position[name]).statistics
            if stats is None:
                complete = False
                break
            nulls += stats.null_count or 0
            if not stats.has_min_max:
                complete = complete and metadata.row_group(group).num_rows == (
                    stats.null_count or 0
                )
                continue
            low = stats.min if low is None else min(low, stats.min)
            high = stats.max if high is None else max(high, stats.max)
        if metadata.num_rows and complete:
            result[name] = [_bound(low, upper=False), _bound(high, upper=True), nulls]
    return result


def _bound(value: Any, *, upper: bool) -> Any:
    if isinstance(value, datetime):
        return timestamp(value)
    if isinstance(value, date | time | Decimal):
        return leaf(value)
    if isinstance(value, bytes):
        return None
    if isinstance(value, str) and len(value) > _STAT_TEXT:
        return None if upper else value[:_STAT_TEXT]
    return value
