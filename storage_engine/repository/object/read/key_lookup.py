"""Rows of Parquet files by their identities.

No more of a file is read than these can be in. From coarse to fine: files by the key ranges in the
log, row groups by the statistics in their footers and, where these are smaller than the keys, by
Bloom filters; then the keys themselves, compared exactly, and the other columns of row groups in
which a key was found. Whoever wants to know only whether rows differ from those that he has says
so: then columns are read, the smallest first, until all rows of a row group are known to differ.

Promise: ranges and filters only ever leave out what certainly has none of the identities. What is
unknown, cut or of another kind leaves nothing out. Keys are compared as bytes, which is the order
of Parquet's statistics, of the log's key ranges and of Python's texts.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage_engine.commitlog.records import CommitFile
from storage_engine.model.columns import distinct_from
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.repository.object.read.bloom import BloomFilter, xxh64
from storage_engine.repository.object.read.files import (
    FETCH_WHOLE,
    SMALL_FILE,
    MissingFileError,
)

# A filter excludes a row group only if it excludes every key: with more it hardly ever does.
_FEW_KEYS = 64
_PLACE = "__place"

Bounds = tuple[bytes | None, bytes | None]


class WantedKeys:
    """Identities that rows are looked for by: distinct, sorted, as bytes. Can be pickled."""

    def __init__(self, keys: pa.Table, rows: pa.Table | None = None) -> None:
        """`keys`: one binary column for each identity column, without nulls. `rows`: what is stated
        of them, row by row, by those who want to know only which stored rows differ from it."""
        names = keys.column_names
        distinct = keys.group_by(names).aggregate([])
        self.table = distinct.sort_by([(name, "ascending") for name in names]).combine_chunks()
        self.identity: tuple[str, ...] = tuple(names)
        self.stated: StatedRows | None = None
        if rows is not None and len(names) == 1 and len(self) == keys.num_rows:
            self.stated = StatedRows(keys.column(0).combine_chunks(), rows.combine_chunks())

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table, "identity": self.identity, "stated": self.stated}

    @cached_property
    def _leading(self) -> list[bytes]:
        return self.table.column(0).to_pylist()  # type: ignore[no-any-return]

    def within(self, bounds: Mapping[str, Bounds]) -> pa.Table:
        """Those that can be where identity columns have these bounds; None is no bound."""
        low, high = bounds.get(self.identity[0], (None, None))
        first = 0 if low is None else bisect_left(self._leading, low)
        last = len(self) if high is None else bisect_right(self._leading, high)
        some = self.table.slice(first, max(0, last - first))
        for name in self.identity[1:]:
            low, high = bounds.get(name, (None, None))
            if low is not None:
                some = some.filter(pc.greater_equal(some.column(name), pa.scalar(low)))
            if high is not None:
                some = some.filter(pc.less_equal(some.column(name), pa.scalar(high)))
        return some

    def in_file(self, file: CommitFile) -> bool:
        """Whether a file can hold one of them, as far as the log tells."""
        bounds = {}
        for name in self.identity:
            low, high = file.keys(name)
            bounds[name] = (_encoded(low), _encoded(high))
        return bool(self.within(bounds).num_rows)


@dataclass(frozen=True)
class StatedRows:
    """What somebody states of identities, each once: to be compared with what is stored."""

    keys: pa.Array
    rows: pa.Table

    def at(self, keys: pa.ChunkedArray) -> pa.Table:
        return self.rows.take(pc.index_in(keys, self.keys))


def _encoded(bound: str | None) -> bytes | None:
    try:
        return None if bound is None else bound.encode()
    except UnicodeEncodeError:  # a lone surrogate: written by someone else
        return None


@dataclass
class Effort:
    """What looking up has cost."""

    bytes_read: int = 0
    row_groups: int = 0
    row_groups_left_out: int = 0


def look_up(
    store: ObjectStore,
    path: str,
    size: int,
    wanted: WantedKeys,
    columns: Sequence[str],
    effort: Effort,
) -> Iterator[pa.Table]:
    """The rows of a file that have one of the identities: `columns`, which may be among them.

    With rows that are stated of the identities: a row that differs from what is stated of it does
    so in what is returned, too, but may have other columns as they are stated to be."""
    with closing(_opened(store, path, size, effort)) as source:
        metadata = pq.read_metadata(source)
        repetitive = [name for name in columns if _has_dictionary(metadata, name)]
        # Columns of a remote file are fetched as one where they stand together.
        remote = store.local_path(path) is None
        file = pq.ParquetFile(
            source, metadata=metadata, pre_buffer=remote, read_dictionary=repetitive
        )
        for group in range(file.num_row_groups):
            effort.row_groups += 1
            asked = _in_group(source, file.metadata.row_group(group), wanted)
            rows = _rows(file, group, asked, columns, wanted.stated) if asked.num_rows else None
            if rows is None:
                effort.row_groups_left_out += not asked.num_rows
            else:
                yield rows


def _has_dictionary(metadata: pq.FileMetaData, name: str) -> bool:
    """Whether texts can be read without a copy of each for every row that has it."""
    if not metadata.num_row_groups:
        return False
    group = metadata.row_group(0)
    chunks = (group.column(place) for place in range(group.num_columns))
    return any(chunk.path_in_schema == name and chunk.has_dictionary_page for chunk in chunks)


def _in_group(source: Any, group: pq.RowGroupMetaData, wanted: WantedKeys) -> pa.Table:
    """The identities that statistics and Bloom filters of a row group do not exclude."""
    chunks = {
        chunk.path_in_schema: chunk
        for chunk in (group.column(place) for place in range(group.num_columns))
        if chunk.path_in_schema in wanted.identity
    }
    asked = wanted.within({name: _bounds(chunk) for name, chunk in chunks.items()})
    if not 0 < asked.num_rows <= _FEW_KEYS:
        return asked
    for name, chunk in chunks.items():
        bloom = _bloom(source, chunk)
        if bloom is not None:
            held = [bloom.may_hold(xxh64(key)) for key in asked.column(name).to_pylist()]
            asked = asked.filter(pa.array(held, pa.bool_()))
            if not asked.num_rows:
                break
    return asked


def _bounds(chunk: pq.ColumnChunkMetaData) -> Bounds:
    stats = chunk.statistics
    if stats is None or not stats.has_min_max:
        return None, None
    low, high = stats.min_raw, stats.max_raw
    are_bytes = isinstance(low, bytes) and isinstance(high, bytes)
    return (low, high) if are_bytes else (None, None)


def _bloom(source: Any, chunk: pq.ColumnChunkMetaData) -> BloomFilter | None:
    """Of a column, where reading it is less than reading the column."""
    at, size = chunk.bloom_filter_offset, chunk.bloom_filter_length
    if at is None or size is None or size >= chunk.total_compressed_size:
        return None
    source.seek(at)
    return BloomFilter.parse(bytes(source.read(size)))


def _rows(
    file: pq.ParquetFile,
    group: int,
    asked: pa.Table,
    columns: Sequence[str],
    stated: StatedRows | None,
) -> pa.Table | None:
    """Of a row group, the rows with one of the identities; None where there is none."""
    identity = asked.column_names
    places: Any = None
    columns_met: dict[str, pa.ChunkedArray] = {}
    for name in identity:
        texts = _plain(file.read_row_group(group, columns=[name], use_threads=False).column(name))
        if places is not None:
            texts = texts.take(places)
        hits = pc.indices_nonzero(pc.is_in(_bytes(texts), asked.column(name)))
        if not len(hits):
            return None
        columns_met = {other: column.take(hits) for other, column in columns_met.items()}
        columns_met[name] = texts.take(hits)
        places = hits if places is None else places.take(hits)
    if len(identity) > 1:  # each part was asked for, perhaps not together
        met = pa.table({name: _bytes(column) for name, column in columns_met.items()})
        numbered = met.append_column(_PLACE, pa.array(range(met.num_rows), pa.int64()))
        joined = numbered.join(asked, identity, join_type="left semi", use_threads=False)
        hits = joined.column(_PLACE).combine_chunks().sort()
        if not len(hits):
            return None
        columns_met = {name: column.take(hits) for name, column in columns_met.items()}
        places = places.take(hits)
    others = [name for name in columns if name not in columns_met]
    if stated is not None:
        theirs = stated.at(_bytes(columns_met[identity[0]]))
        columns_met |= _until_different(file, group, places, others, theirs)
    elif others:
        rest = file.read_row_group(group, columns=others, use_threads=False).take(places)
        columns_met |= {name: _plain(rest.column(name)) for name in others}
    return pa.table({name: columns_met[name] for name in columns})


def _until_different(
    file: pq.ParquetFile, group: int, places: pa.Array, names: Sequence[str], stated: pa.Table
) -> dict[str, pa.ChunkedArray]:
    """The columns of some rows, as they are stated to be from where all of them are known to differ
    from that. What nothing is stated of is always read."""
    metadata = file.metadata.row_group(group)
    sizes = {
        chunk.path_in_schema: chunk.total_compressed_size
        for chunk in (metadata.column(place) for place in range(metadata.num_columns))
    }
    columns_met: dict[str, pa.ChunkedArray] = {}
    differs = pa.repeat(False, len(places))
    for name in sorted(names, key=lambda name: (name in stated.column_names, sizes[name])):
        if name in stated.column_names and pc.all(differs).as_py():
            columns_met[name] = stated.column(name)
            continue
        column = file.read_row_group(group, columns=[name], use_threads=False).column(name)
        columns_met[name] = _plain(column.take(places))
        if name in stated.column_names:
            ours = columns_met[name].cast(stated.schema.field(name).type)
            differs = pc.or_(differs, distinct_from(ours, stated.column(name)))
    return columns_met


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_dictionary(column.type):
        return column
    return column.cast(column.type.value_type)


def _bytes(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    return keys.cast(pa.binary())


def _opened(store: ObjectStore, path: str, size: int, effort: Effort) -> Any:
    """An object as a file that counts what is read of it."""
    local = store.local_path(path)
    if local is not None:
        try:
            if size > SMALL_FILE:
                return _Counted(local.open("rb"), effort)
            data = local.read_bytes()
            effort.bytes_read += len(data)
            return io.BytesIO(data)
        except FileNotFoundError:
            raise missing_file(store, path) from None
    try:
        if size <= FETCH_WHOLE:
            data = store.bulk.get(path).data
            effort.bytes_read += len(data)
            return io.BytesIO(data)
        return _Counted(_Ranges(store.bulk, path, size), effort)
    except ObjectNotFound:
        raise missing_file(store, path) from None


def missing_file(store: ObjectStore, path: str) -> MissingFileError:
    """A file that was named when a plan was made, and is gone."""
    return MissingFileError(
        f"{path} was named by the log when this DataFrame was made, and is now missing from "
        f"{store.uri}: garbage collection has purged it; make the DataFrame again",
        key=path,
    )


class _Counted(io.RawIOBase):
    def __init__(self, inner: Any, effort: Effort) -> None:
        self._inner = inner
        self._effort = effort

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data: bytes = self._inner.read(size)
        self._effort.bytes_read += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return int(self._inner.seek(offset, whence))

    def tell(self) -> int:
        return int(self._inner.tell())

    def close(self) -> None:
        self._inner.close()
        super().close()


class _Ranges(io.RawIOBase):
    """A large object that is read in ranges, one request each."""

    def __init__(self, store: ObjectStore, path: str, size: int) -> None:
        self._store = store
        self._path = path
        self._size = size
        self._at = 0

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size < 0 else min(size, left)
        try:
            data = self._store.get_range(self._path, self._at, wanted) if wanted else b""
        except ObjectNotFound:
            raise missing_file(self._store, self._path) from None
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at
