"""Rows of a type as JSON lines, CSV or Parquet, written as they come.

Promise: the same rows give the same bytes, whatever storage they come from and however they were
divided into batches.

    jsonl    {"type": ..., "key": ..., "fields": {...}}; relations have left_key, right_key and,
             where they are keyed, instance_key; fields are in canonical JSON
    csv      a column for each field, after the keys of a relation; RFC 4180, NULL is an empty cell
             and the empty text a quoted one; lists, dicts and unions are JSON
    parquet  the same columns, in the types of Arrow; lists, dicts and unions are of the JSON type

What each has more with metadata is `commit_id`: the commit that wrote the version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, Protocol

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.model.arrow import column_texts, fields_json
from storage_engine.model.columns import arrow_type
from storage_engine.model.csv_text import quoted_cell
from storage_engine.model.spec import FieldSpec, TypeSpec
from storage_engine.runtime.exchange.summary import FileFormat

_GROUP_ROWS = 10_000  # of a Parquet row group: fixed, as the bytes depend on it
_LINES_AT_ONCE = 4_096


class HashedSink:
    """A binary file that counts and hashes what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._digest.update(view)
        self.bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """What is underneath is closed by whoever opened it."""
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class RowWriter(Protocol):
    """Writes the rows of one type; `close` writes what has to come at the end."""

    def write(self, rows: pa.Table) -> None: ...

    def close(self) -> None: ...


def open_writer(
    file_format: FileFormat, spec: TypeSpec, sink: HashedSink, *, with_metadata: bool
) -> RowWriter:
    match file_format:
        case "jsonl":
            return _JsonLines(spec, sink, with_metadata=with_metadata)
        case "csv":
            return _Csv(spec, sink, with_metadata=with_metadata)
        case "parquet":
            return _Parquet(spec, sink, with_metadata=with_metadata)


def user_columns(spec: TypeSpec) -> list[tuple[str, str, FieldSpec | None]]:
    """The columns that users know, the columns of rows that they are, and their fields."""
    keys = []
    if spec.kind == "relation":
        keys = [("left_key", "left_key"), ("right_key", "right_key")]
        if spec.instance_key is not None:
            keys.append((spec.instance_key, "instance_key"))
    return [
        *((name, source, None) for name, source in keys),
        *((field.name, field.name, field) for field in spec.fields),
    ]


class _JsonLines:
    def __init__(self, spec: TypeSpec, sink: HashedSink, *, with_metadata: bool) -> None:
        self._spec = spec
        self._sink = sink
        self._with_metadata = with_metadata
        names = {"entity_key": "key"}
        columns = [c for c in spec.identity if c != "instance_key" or spec.instance_key]
        self._keys = [(column, f',"{names.get(column, column)}":') for column in columns]

    def write(self, rows: pa.Table) -> None:
        for start in range(0, rows.num_rows, _LINES_AT_ONCE):
            self._write(rows.slice(start, _LINES_AT_ONCE))

    def _write(self, rows: pa.Table) -> None:
        begin = f'{{"type":"{self._spec.name}"'
        parts = [
            [member + orjson.dumps(value).decode() for value in rows.column(column).to_pylist()]
            for column, member in self._keys
        ]
        parts.append([f',"fields":{text}' for text in fields_json(self._spec, rows).to_pylist()])
        if self._with_metadata:
            parts.append([f',"commit_id":{n}' for n in rows.column("commit_id").to_pylist()])
        lines = [begin + "".join(row) + "}\n" for row in zip(*parts, strict=True)]
        self._sink.write("".join(lines).encode())

    def close(self) -> None:
        """A line says nothing of those after it."""


class _Csv:
    def __init__(self, spec: TypeSpec, sink: HashedSink, *, with_metadata: bool) -> None:
        self._columns = user_columns(spec)
        self._sink = sink
        self._with_metadata = with_metadata
        names = [name for name, _, _ in self._columns]
        header = ["commit_id", *names] if with_metadata else names
        sink.write((",".join(map(quoted_cell, header)) + "\n").encode())

    def write(self, rows: pa.Table) -> None:
        columns = [str_cells(rows.column("commit_id").to_pylist())] if self._with_metadata else []
        for _, source, field in self._columns:
            column = rows.column(source)
            texts = column.to_pylist() if field is None else column_texts(field, column)
            columns.append([quoted_cell(text) for text in texts])
        lines = [",".join(row) or '""' for row in zip(*columns, strict=True)]
        if lines:
            self._sink.write(("\n".join(lines) + "\n").encode())

    def close(self) -> None:
        """A record says nothing of those after it."""


def str_cells(values: Iterable[Any]) -> list[str]:
    return [str(value) for value in values]


class _Parquet:
    def __init__(self, spec: TypeSpec, sink: HashedSink, *, with_metadata: bool) -> None:
        self._columns = user_columns(spec)
        fields = [pa.field("commit_id", pa.int64(), nullable=False)] if with_metadata else []
        self._schema = pa.schema([*fields, *map(_parquet_field, self._columns)])
        self._with_metadata = with_metadata
        self._held: list[pa.Table] = []
        self._rows = 0
        self._writer = pq.ParquetWriter(
            pa.PythonFile(sink, mode="w"), self._schema, compression="zstd"
        )

    def write(self, rows: pa.Table) -> None:
        self._held.append(self._made(rows))
        self._rows += rows.num_rows
        if self._rows >= _GROUP_ROWS:
            for group in self._groups():
                self._write(group)

    def close(self) -> None:
        if self._rows:
            self._write(pa.concat_tables(self._held))
        self._writer.close()

    def _groups(self) -> Iterator[pa.Table]:
        table = pa.concat_tables(self._held)
        whole = table.num_rows - table.num_rows % _GROUP_ROWS
        self._held, self._rows = [table.slice(whole)], table.num_rows - whole
        for start in range(0, whole, _GROUP_ROWS):
            yield table.slice(start, _GROUP_ROWS)

    def _write(self, group: pa.Table) -> None:
        self._writer.write_table(group.combine_chunks(), row_group_size=_GROUP_ROWS)

    def _made(self, rows: pa.Table) -> pa.Table:
        arrays = [rows.column("commit_id")] if self._with_metadata else []
        for _, source, field in self._columns:
            column = rows.column(source)
            if field is not None and field.storage == "json":
                column = _as_json(column)
            elif field is not None and field.storage == "float":
                column = pa.compute.add(column, 0.0)  # -0.0 equals 0.0, so they have one form
            arrays.append(column)
        return pa.Table.from_arrays(arrays, schema=self._schema)


def _parquet_field(column: tuple[str, str, FieldSpec | None]) -> pa.Field:
    name, _, field = column
    if field is None:
        return pa.field(name, pa.string(), nullable=False)
    json = field.storage == "json"
    type_ = pa.json_(pa.string()) if json else arrow_type(field.storage)
    return pa.field(name, type_, nullable=field.nullable)


def _as_json(column: pa.ChunkedArray) -> pa.ChunkedArray:
    type_ = pa.json_(pa.string())
    chunks = [pa.ExtensionArray.from_storage(type_, chunk) for chunk in column.chunks]
    return pa.chunked_array(chunks, type_)
