"""Rows on stdout: a table for people, or JSON, CSV and Arrow for programs, in bounded memory.

A result that is cut short does not look whole: JSON stays without its end or ends in `error`, an
Arrow stream breaks off in the middle of a message. CSV has no end to miss; there the exit code
tells.

Values of declared types are written as in canonical JSON: datetimes in ISO 8601 with microseconds,
bytes in base64, decimals as texts with all their digits. What SQL computes beyond that becomes the
nearest thing: decimals are numbers, and NaN and infinity, which JSON lacks, are null there.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from enum import StrEnum
from itertools import islice
from typing import IO, Any

import orjson
import pyarrow as pa
import typer

from storage_engine.cli.output import BROKEN_PIPE, Output, moment
from storage_engine.model.canonical import leaf
from storage_engine.model.csv_text import quoted_cell
from storage_engine.query.results import Diagnostic

_UNTOUCHED: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_null,
)


def json_values(column: pa.Array, *, nested: bool = False, declared: bool = False) -> list[Any]:
    """A column in JSON's own types. `nested`: its texts are JSON already; `declared`: it is that
    of a field."""
    values = plain_values(column)
    if nested:
        return [None if value is None else orjson.loads(value) for value in values]
    if any(test(column.type) for test in _UNTOUCHED):
        return values
    if declared and pa.types.is_decimal(column.type):
        return [None if value is None else leaf(value) for value in values]
    return [json_value(value) for value in values]


def plain_values(column: pa.Array) -> list[Any]:
    """A column as Python values; as text where Python has none, such as nanoseconds."""
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        values = column.cast(pa.string()).to_pylist()
    return values


def json_value(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case datetime() | date() | time() | bytes():
            return leaf(value)
        case Decimal():
            return _number(value)
        case list():
            return [json_value(item) for item in value]
        case tuple():  # an entry of a map
            return [json_value(item) for item in value]
        case Mapping():
            return {str(key): json_value(item) for key, item in value.items()}
        case _:
            return str(value)


def _number(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def text_value(value: Any) -> str:
    """One value on a line of text."""
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case float():
            return repr(value)
        case datetime() | date() | time() | bytes() | Decimal():
            return leaf(value)
        case list() | Mapping():
            return json.dumps(json_value(value), ensure_ascii=False)
        case _:
            return str(value)


def csv_cell(value: Any) -> str:
    return quoted_cell(None if value is None else text_value(value))


def table_cell(value: Any) -> Any:
    """For people: numbers stay numbers, so that they are set to the right."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    if isinstance(value, Decimal):
        return value
    if isinstance(value, datetime) and not value.microsecond and value.tzinfo is not None:
        return moment(value)
    return text_value(value)


class Format(StrEnum):
    table = "table"
    json = "json"
    csv = "csv"
    arrow = "arrow"


@dataclass(frozen=True)
class OutputColumn:
    """One column of the result, and the column of the batches that it is taken from."""

    name: str
    source: int
    nested: bool = False  # texts that are JSON
    place: tuple[str | int, ...] = ()  # in a row's JSON document; its name unless told
    declared: bool = False  # of a field, not what SQL has computed


@dataclass(frozen=True)
class Answer:
    """What a command found.

    members:  what the JSON document says besides its rows
    limit:    how many rows a table shows at most; `batches` have one more if there are more
    more:     whether something is left out that is not in the batches
    """

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    columns: Sequence[OutputColumn]
    members: Mapping[str, Any] = field(default_factory=dict)
    diagnostics: Sequence[Diagnostic] = ()
    limit: int | None = None
    more: bool = False


def write(output: Output, form: Format, answer: Answer) -> None:
    for note in answer.diagnostics:
        output.note(describe(note))
    match form:
        case Format.table:
            _table(output, answer)
        case Format.json:
            members = {**answer.members, "diagnostics": [dict(d) for d in answer.diagnostics]}
            output.stream(members, (_documents(answer, batch) for batch in answer.batches))
        case Format.csv:
            _csv(output, answer)
        case Format.arrow:
            _arrow(output, answer)


def describe(note: Diagnostic) -> str:
    if note.get("reason") == "commit_before_activation":
        return (
            "nothing to see: the type's current schema came with commit "
            f"{note['activation_commit_id']}, which is later"
        )
    if note.get("reason") == "type_dropped":
        return (
            f"nothing to see: the type was dropped by commit {note['dropped_commit_id']}; "
            "--schema-version shows what it had"
        )
    return ", ".join(f"{name}: {value}" for name, value in note.items())


def refuse_terminal(form: Format, ctx: typer.Context) -> None:
    if form is Format.arrow and sys.stdout.isatty():
        ctx.fail(
            "Arrow is binary: send it to a file or a program (> rows.arrow), not to a terminal"
        )


# --- for people -------------------------------------------------------------------------------


def _table(output: Output, answer: Answer) -> None:
    limit = answer.limit
    rows = list(islice(_rows(answer, table_cell), None if limit is None else limit + 1))
    if rows:
        output.table([column.name for column in answer.columns], rows[:limit])
    else:
        output.line("No rows.")
    if len(rows) > len(rows[:limit]) or answer.more:
        output.line("More rows not shown: raise --limit.")


def _rows(answer: Answer, convert: Callable[[Any], Any]) -> Iterator[list[Any]]:
    for batch in answer.batches:
        columns = [plain_values(batch.column(column.source)) for column in answer.columns]
        for row in zip(*columns, strict=True):
            yield [convert(value) for value in row]


# --- for programs -----------------------------------------------------------------------------


def _documents(answer: Answer, batch: pa.RecordBatch) -> list[Any]:
    columns = [
        json_values(batch.column(column.source), nested=column.nested, declared=column.declared)
        for column in answer.columns
    ]
    rows = zip(*columns, strict=True)
    if not any(column.place for column in answer.columns):
        names = [column.name for column in answer.columns]
        return [dict(zip(names, row, strict=True)) for row in rows]
    return [_placed(answer.columns, row) for row in rows]


def _placed(columns: Sequence[OutputColumn], row: Iterable[Any]) -> dict[str, Any]:
    """Values where their columns say: a text is a key, a number is a place in a list."""
    made: dict[str, Any] = {}
    for column, value in zip(columns, row, strict=True):
        match column.place:
            case (str(part), str(name)):
                made.setdefault(part, {})[name] = value
            case (str(part), int(number), str(name)):
                items: list[dict[str, Any]] = made.setdefault(part, [])
                items += ({} for _ in range(number + 1 - len(items)))
                items[number][name] = value
            case _:
                made[column.name] = value
    return made


def _csv(output: Output, answer: Answer) -> None:
    output.text(",".join(csv_cell(column.name) for column in answer.columns) + "\n")
    for batch in answer.batches:
        columns = [
            [csv_cell(value) for value in plain_values(batch.column(column.source))]
            for column in answer.columns
        ]
        lines = [",".join(row) for row in zip(*columns, strict=True)]
        output.text("\n".join(line or '""' for line in lines) + "\n" if lines else "")


def _arrow(output: Output, answer: Answer) -> None:
    fields = [
        answer.schema.field(column.source).with_name(column.name) for column in answer.columns
    ]
    schema = pa.schema(fields)
    sink: IO[bytes] = sys.stdout.buffer
    try:
        with output.unfinished(sink):
            writer = pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema)
            for batch in answer.batches:
                arrays = [batch.column(column.source) for column in answer.columns]
                writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
                sink.flush()
            writer.close()
            sink.flush()
    except BrokenPipeError:
        raise typer.Exit(BROKEN_PIPE) from None
