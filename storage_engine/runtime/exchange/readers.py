"""The rows of input files, checked against their types: all that is wrong, with file and line.

Rows arrive in batches. A batch that fits costs one conversion of its columns; one that does not is
halved until the rows at fault stand alone.
"""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage_engine.errors import ValidationError
from storage_engine.model.columns import arrow_type
from storage_engine.model.conform import Conformer, conform, zone_notes
from storage_engine.model.csv_text import ADVICE, CsvDialect, CsvRows, same_names, shown
from storage_engine.model.spec import FieldSpec, Kind, TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.runtime.exchange.inputs import (
    ImportTypes,
    InputFile,
    InputProblem,
    Problems,
)
from storage_engine.runtime.exchange.summary import FIRST_LINE, LAST_LINE, ExportSummary
from storage_engine.runtime.text_files import (
    JsonColumns,
    from_text,
    parsed_json,
    source_fields,
)

LONGEST_LINE = 64 * 1024 * 1024
_BATCH_ROWS = 8_192
_BATCH_BYTES = 4 * 1024 * 1024
_PENDING_BYTES = 16 * 1024 * 1024
_BLOCK_BYTES = 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_TEXT_SHOWN = 80
_DIALECT = CsvDialect(quoted_nulls=False)
_ROW = re.compile(r" in 1 row \(row \d+\)")
_MEMBERS = ("type", "key", "left_key", "right_key", "instance_key", "fields", "commit_id")
_RECORD = '{"type": ..., "key": ..., "fields": {...}}'


class RowSink(Protocol):
    """Takes the rows that fit, in the row schema of their type."""

    def add(self, spec: TypeSpec, rows: pa.RecordBatch) -> None: ...


Convert = Callable[[int, int], pa.RecordBatch]  # rows from, to
Report = Callable[[int, str], None]  # a row and what is wrong with it


def sift(count: int, convert: Convert, report: Report) -> Iterator[pa.RecordBatch]:
    """The rows that convert, and a report of each that does not."""
    pending = [(0, count)]
    while pending:
        start, stop = pending.pop()
        try:
            yield convert(start, stop)
        except ValidationError as error:
            if stop - start == 1:
                report(start, _plain(error))
                continue
            middle = (start + stop) // 2
            pending += [(middle, stop), (start, middle)]


def _plain(error: ValidationError) -> str:
    """Without what a single row's report says otherwise."""
    message = _ROW.sub("", str(error))
    return message.removeprefix(f"{error.type}: ") if error.type else message


def read_rows(file: InputFile, types: ImportTypes, problems: Problems, sink: RowSink) -> int:
    """Read a file to its end; how many rows it has."""
    match file.file_format:
        case "jsonl":
            return _JsonLinesInput(file, types, problems, sink).read()
        case "csv":
            return _CsvInput(file, types, problems, sink).read()
        case "parquet":
            return _read_parquet(file, types, problems, sink)


# --- JSON lines -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pending:
    """Records of one type that are not converted yet, and their lines."""

    spec: TypeSpec
    columns: JsonColumns
    conformer: Conformer
    records: list[dict[str, Any]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    size: int = 0


class _JsonLinesInput:
    """Records of any types, in any order."""

    def __init__(
        self, file: InputFile, types: ImportTypes, problems: Problems, sink: RowSink
    ) -> None:
        self._file = file
        self._types = types
        self._problems = problems
        self._sink = sink
        self._pending: dict[tuple[str, str], _Pending] = {}
        self._unknown: set[tuple[str, str]] = set()
        self._rows = 0
        self._size = 0  # of all that is pending
        self._announced = False
        self._ended = False

    def read(self) -> int:
        line = 0
        with self._file.path.open("rb") as file:
            for line, raw in enumerate(_lines(file), start=1):
                if raw is None:
                    self._add(line, f"is longer than {LONGEST_LINE // 2**20} MiB")
                    continue
                text = raw.removeprefix(_BOM).strip()
                if text:
                    self._take(line, text)
        for pending in self._pending.values():
            self._flush(pending)
        if self._announced and not self._ended:
            self._add(line, "the export breaks off here: its last line is missing; export again")
        return self._rows

    def _take(self, line: int, text: bytes) -> None:
        try:
            record = parsed_json(text)
        except ValueError as error:
            self._add(line, _not_json(text, error))
            return
        if not isinstance(record, dict):
            self._add(line, f"is not a JSON object: a record is {_RECORD}")
        elif self._ended:
            self._add(line, "comes after the last line of an export")
        elif record.keys() == {FIRST_LINE} and not self._announced and not self._rows:
            self._announced = True
            self._types.tell(ExportSummary.from_dict(record[FIRST_LINE], self._file.label))
        elif record.keys() == {LAST_LINE} and self._announced:
            self._end(line, record[LAST_LINE])
        else:
            self._rows += 1
            self._keep(line, record, len(text))

    def _end(self, line: int, told: Any) -> None:
        self._ended = True
        rows = told.get("rows") if isinstance(told, dict) else None
        if rows != self._rows:
            self._add(line, f"the export had {rows} records, and there are {self._rows}")

    def _keep(self, line: int, record: dict[str, Any], size: int) -> None:
        wrong = _malformed(record)
        if wrong is not None:
            self._add(line, wrong)
            return
        kind: Kind = "entity" if "key" in record else "relation"
        name = record["type"]
        pending = self._of(line, kind, name)
        if pending is None:
            return
        flat, wrong = _flattened(pending.spec, pending.columns.fields, record)
        if wrong is not None:
            self._add(line, wrong, name)
            return
        pending.records.append(flat)
        pending.lines.append(line)
        pending.size += size
        self._size += size
        if len(pending.records) >= _BATCH_ROWS or pending.size >= _BATCH_BYTES:
            self._flush(pending)
        elif self._size >= _PENDING_BYTES:  # many types, of each a little
            for each in self._pending.values():
                self._flush(each)

    def _of(self, line: int, kind: Kind, name: str) -> _Pending | None:
        ref = (kind, name)
        if ref in self._unknown:
            return None  # was told at its first record
        if ref not in self._pending:
            spec = self._types.get(kind, name)
            if spec is None:
                self._unknown.add(ref)
                self._add(line, self._types.unknown(kind, name), name)
                return None
            columns = JsonColumns(spec)
            self._pending[ref] = _Pending(spec, columns, conform(spec, columns.schema))
        return self._pending[ref]

    def _flush(self, pending: _Pending) -> None:
        records, lines = pending.records, pending.lines

        def convert(start: int, stop: int) -> pa.RecordBatch:
            return pending.conformer.batch(pending.columns.batch(records[start:stop]))

        def report(row: int, wrong: str) -> None:
            self._add(lines[row], wrong, pending.spec.name)

        for batch in sift(len(records), convert, report) if records else ():
            self._sink.add(pending.spec, batch)
        self._size -= pending.size
        pending.records, pending.lines, pending.size = [], [], 0

    def _add(self, line: int, wrong: str, type_name: str | None = None) -> None:
        self._problems.add(
            InputProblem(self._file.label, wrong, line=line or None, type_name=type_name)
        )


def _lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Lines; None for one that is too long, of which no more is read into memory."""
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := file.readline(_BLOCK_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield None
        else:
            yield line


def _not_json(text: bytes, error: ValueError) -> str:
    try:
        text.decode()
    except UnicodeDecodeError as wrong:
        return f"is not UTF-8: byte 0x{text[wrong.start]:02x} at {wrong.start + 1}"
    return f"is not JSON ({error})"


def _malformed(record: dict[str, Any]) -> str | None:
    """What keeps an object from being a record at all."""
    strangers = [name for name in record if name not in _MEMBERS]
    if strangers:
        return f"{unknown_name(strangers[0], _MEMBERS, what='member')} (a record is {_RECORD})"
    if type(record.get("type")) is not str:
        return f"has no type: a record is {_RECORD}"
    if "key" in record:
        names: Sequence[str] = ("key",)
        if {"left_key", "right_key", "instance_key"} & record.keys():
            return "has key and left_key or right_key: an entity has one, a relation the others"
    else:
        names = ("left_key", "right_key")
        if not record.keys() & {*names}:
            return "has neither key, as entities have, nor left_key and right_key, as relations do"
    if "instance_key" in record:
        names = (*names, "instance_key")
    for name in names:
        value = record.get(name)
        if type(value) is not str or not value:
            return f"{name} {'is missing' if name not in record else 'must be a non-empty text'}"
    if not isinstance(record.get("fields", {}), dict):
        return "fields is not a JSON object"
    return None


def _flattened(
    spec: TypeSpec, fields: dict[str, FieldSpec], record: dict[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """A record by the names that a constructor takes, or what is wrong with it."""
    flat: dict[str, Any] = record.get("fields", {})
    strangers = [name for name in flat if name not in fields]
    if strangers:
        return flat, "; ".join(unknown_name(name, fields) for name in strangers[:3])
    keys = {"left_key": "left_key", "right_key": "right_key"}
    if spec.kind == "entity":
        keys = {"key": spec.primary_key or ""}
    if spec.instance_key is not None:
        if "instance_key" not in record:
            return (
                flat,
                f"instance_key is missing: {spec.name} is told apart by {spec.instance_key}",
            )
        keys["instance_key"] = spec.instance_key
    elif "instance_key" in record:
        return flat, f"has an instance_key, which {spec.name} does not have"
    for member, name in keys.items():
        value = flat.setdefault(name, record[member])
        if value != record[member]:
            return flat, f"{member} is {record[member]!r}, but {name} in fields is {value!r}"
    return flat, None


# --- CSV --------------------------------------------------------------------------------------


class _CsvInput:
    """Rows of one type, with a header. A cell of a list, dict or union is JSON."""

    def __init__(
        self, file: InputFile, types: ImportTypes, problems: Problems, sink: RowSink
    ) -> None:
        self._file = file
        self._types = types
        self._problems = problems
        self._sink = sink
        self._rows = 0
        self._faulty: dict[int, str] = {}  # by row, from 0

    def read(self) -> int:
        rows = CsvRows(_DIALECT, "")
        try:
            columns: _CsvColumns | None = None
            with self._file.path.open("rb") as file:
                while data := file.read(_BLOCK_BYTES):
                    for table in rows.feed(data):
                        columns = columns or self._columns(rows.names or [])
                        self._take(table, columns)
            for table in rows.close():
                columns = columns or self._columns(rows.names or [])
                self._take(table, columns)
            if not rows.names:
                raise ValidationError("the first line must name the columns")
            if columns is None:
                self._columns(rows.names)
        except ValidationError as error:
            wrong = _plain(error).replace(ADVICE, "convert it to UTF-8")
            self._add(None, wrong)
            return self._rows
        self._tell(rows)
        return self._rows

    def _columns(self, names: list[str]) -> _CsvColumns:
        if same := same_names(names):
            raise ValidationError(same)
        assert self._file.type_name is not None
        spec = self._types.named(self._file.type_name, names, self._file.kind)
        if spec is None:
            kind: Kind = "relation" if "left_key" in names else "entity"
            told = self._types.unknown(self._file.kind or kind, self._file.type_name)
            raise ValidationError(told)
        return _CsvColumns(spec, names)

    def _take(self, table: pa.Table, columns: _CsvColumns) -> None:
        for start in range(0, table.num_rows, _BATCH_ROWS):
            part = table.slice(start, _BATCH_ROWS)
            first = self._rows

            def report(row: int, wrong: str, first: int = first) -> None:
                self._faulty[first + row] = wrong
                if len(self._faulty) >= self._problems.limit:
                    self._tell(None)

            def convert(begin: int, end: int, part: pa.Table = part) -> pa.RecordBatch:
                return columns.batch(part.slice(begin, end - begin))

            for batch in sift(part.num_rows, convert, report):
                self._sink.add(columns.spec, batch)
            self._rows += part.num_rows

    def _tell(self, rows: CsvRows | None) -> None:
        """Where rows and records are is looked up only for those that something is wrong with."""
        bad = rows.bad if rows is not None else []
        if not bad and not self._faulty:
            return
        placed = [(r.line, f"{r.fault}: {_cut(shown(r.raw))!r}") for r in bad if r.line]
        if any(not record.line for record in bad):
            placed += list(self._misplaced())
        lines = self._lines_of(self._faulty)
        placed += [(lines.get(row, 0), wrong) for row, wrong in self._faulty.items()]
        for line, wrong in sorted(placed):
            self._add(line, wrong)

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Records that are not blank, with the lines on which they begin."""
        with self._file.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as f:
            csv.field_size_limit(LONGEST_LINE)
            reader = csv.reader(f)
            begins = 1
            with contextlib.suppress(csv.Error):  # what comes after has no place of its own
                for record in reader:
                    if record:
                        yield begins, record
                    begins = reader.line_num + 1

    def _misplaced(self) -> Iterator[tuple[int, str]]:
        width = 0
        for line, record in self._records():
            width = width or len(record)
            if len(record) != width:
                yield line, f"has {len(record)} values, and there are {width} columns"
            elif any(map(_surrogate, record)):
                yield line, "is not UTF-8"

    def _lines_of(self, wanted: dict[int, str]) -> dict[int, int]:
        if not wanted:
            return {}
        lines: dict[int, int] = {}
        row, width = -1, 0  # the header is no row
        for line, record in self._records():
            width = width or len(record)
            if len(record) != width or any(map(_surrogate, record)):
                continue
            if row in wanted:
                lines[row] = line
            row += 1
        return lines

    def _add(self, line: int | None, wrong: str) -> None:
        self._problems.add(
            InputProblem(self._file.label, wrong, line=line or None, type_name=self._file.type_name)
        )


def _surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}..."


class _CsvColumns:
    """Columns of text as columns of a type."""

    def __init__(self, spec: TypeSpec, names: list[str]) -> None:
        self.spec = spec
        fields = source_fields(spec)
        self._fields = [
            (n, fields.get(name)) for n, name in enumerate(names) if name != "commit_id"
        ]
        kept = [name for name in names if name != "commit_id"]
        types = [_csv_type(field) for _, field in self._fields]
        self._schema = pa.schema(list(zip(kept, types, strict=True)))
        self._conformer = conform(spec, self._schema)

    def batch(self, rows: pa.Table) -> pa.RecordBatch:
        arrays, wrong = [], []
        for n, column in self._fields:
            array, problems = _from_cells(column, rows.column(n).combine_chunks())
            arrays.append(array)
            wrong += [problem.say(self._schema.names[len(arrays) - 1], 0) for problem in problems]
        if wrong:
            raise ValidationError("; ".join(wrong))
        return self._conformer.batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))


def _csv_type(column: FieldSpec | None) -> pa.DataType:
    if column is None:
        return pa.string()  # refused by `conform`, with its name
    return pa.json_(pa.string()) if column.storage == "json" else arrow_type(column.storage)


def _from_cells(column: FieldSpec | None, cells: pa.Array) -> tuple[pa.Array, list[Any]]:
    if column is None:
        return cells, []
    if column.storage == "json":
        return pa.ExtensionArray.from_storage(pa.json_(pa.string()), cells), []
    if column.storage == "str" and not column.nullable:
        return pc.fill_null(cells, ""), []
    return from_text(column.storage, cells)


# --- Parquet ----------------------------------------------------------------------------------


def _read_parquet(file: InputFile, types: ImportTypes, problems: Problems, sink: RowSink) -> int:
    name = file.type_name
    assert name is not None
    count = 0

    def add(wrong: str, row: int | None = None) -> None:
        problems.add(InputProblem(file.label, wrong, row=row, type_name=name))

    try:
        with pq.ParquetFile(file.path, pre_buffer=False) as opened:
            columns = [column for column in opened.schema_arrow.names if column != "commit_id"]
            spec = types.named(name, columns, file.kind)
            if spec is None:
                kind: Kind = "relation" if "left_key" in columns else "entity"
                add(types.unknown(file.kind or kind, name))
                return 0
            kept = [f for f in opened.schema_arrow if f.name != "commit_id"]
            conformer = conform(spec, pa.schema(kept))
            problems.notes += zone_notes(spec, [pa.schema(kept)])
            for batch in opened.iter_batches(_BATCH_ROWS):
                rows = batch.select(columns)
                rows = pa.RecordBatch.from_arrays(rows.columns, schema=pa.schema(kept))

                def convert(begin: int, end: int, rows: pa.RecordBatch = rows) -> pa.RecordBatch:
                    return conformer.batch(rows.slice(begin, end - begin))

                def report(row: int, wrong: str, first: int = count) -> None:
                    add(wrong, first + row + 1)

                for made in sift(rows.num_rows, convert, report):
                    sink.add(spec, made)
                count += rows.num_rows
    except ValidationError as error:
        add(_plain(error))
    except (pa.ArrowException, OSError) as error:
        add(f"cannot be read as Parquet: {' '.join(str(error).split())}")
    return count
