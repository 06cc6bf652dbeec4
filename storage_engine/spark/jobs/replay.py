"""Rows that an earlier run has set aside, and a person has put right, take the way of a source.

A side table is read by the driver: it is small, or there is more to put right than rows. Rows that
have their source's columns are cast and mapped as the order says; those that have the type's
columns are written as they are. A line that could not be read is read again, unless its `row` was
filled in. What is still bad is bad again, with the file that it first came from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from storage_engine.errors import ConfigurationError, ValidationError
from storage_engine.model.csv_text import KEPT_OF_RECORD, MALFORMED, CsvRows
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.open import open_store, parse_uri
from storage_engine.objectstore.protocol import ObjectStoreError
from storage_engine.spark.ingest_spec import IngestSpec
from storage_engine.spark.jobs.csv_source import csv_dialect, with_nulls
from storage_engine.spark.jobs.mapping import MappedRows, mapped
from storage_engine.spark.jobs.program import storage_config
from storage_engine.spark.jobs.source_lines import source_columns
from storage_engine.spark.jobs.sources import (
    Opened,
    declared_schema,
    json_columns,
    open_source,
    text_types,
)
from storage_engine.spark.jobs.text_lines import FACT_FIELDS, FAULT, FILE, LINE, VALUE, json_fault
from storage_engine.spark.quarantine import SOURCE, TYPE, SetAside
from storage_engine.spark.schema import spark_schema
from storage_engine.spark.staged_parts import REASONS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ESCAPED_BYTE = re.compile(r"\\x[89a-f][0-9a-f]")

Replayed = tuple[MappedRows, tuple[str, int | str] | None]


def replayed(spark: SparkSession, spec: IngestSpec, type_spec: TypeSpec, place: str) -> Replayed:
    """The rows of a side table for the writer, and the unit of work that they are."""
    # What a replay has set aside again, in the same place, is the same row.
    rows = list({row.to_text(): row for row in read_side_table(place, type_spec.name)}.values())
    if not rows and not _is_there(place):
        raise ConfigurationError(
            f"{place}: there is no such folder or file; name the one that the run has told"
        )
    if not rows:
        raise ConfigurationError(
            f"{place}: there are no rows of {type_spec.name} that were set aside; name the folder "
            "or file that the run has told"
        )
    of_source = [row for row in rows if row.columns == SOURCE]
    of_type = [row for row in rows if row.columns == TYPE]
    parts: list[MappedRows] = []
    if of_source:
        parts.append(mapped(_opened(spark, spec, of_source), spec, type_spec))
    if of_type:
        parts.append(_written(spark, type_spec, of_type))
    frame = parts[0].frame
    for part in parts[1:]:
        frame = frame.unionByName(part.frame, allowMissingColumns=True)
    drift = tuple(sentence for part in parts for sentence in part.drift)
    return MappedRows(frame, drift), _unit_of_work(spec, rows)


def read_side_table(place: str, type_name: str) -> Iterator[SetAside]:
    """The rows of a type, as they are now."""
    base, name = place.rstrip("/"), ""
    if PurePosixPath(base).suffix in (".parquet", ".jsonl"):
        base, _, name = base.rpartition("/")
    store = open_store(base or "/" if place.startswith("/") else base or ".", storage_config())
    try:
        keys = sorted(info.key for info in store.list(name))
        for key in keys:
            if PurePosixPath(key).suffix not in (".parquet", ".jsonl"):
                continue
            for row in _rows(store.get(key).data, f"{base}/{key}"):
                if row.get("type_name") in (type_name, None):
                    yield _set_aside(row, f"{base}/{key}")
    except ObjectStoreError as error:
        raise ConfigurationError(f"{place}: cannot be read: {error}") from error
    finally:
        store.close()


def _is_there(place: str) -> bool:
    """Told of a directory; a bucket knows no folders."""
    path = parse_uri(place).path
    return path is None or path.exists()


def _rows(content: bytes, label: str) -> list[dict[str, Any]]:
    try:
        if label.endswith(".parquet"):
            rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(content)).to_pylist()
            return rows
        return [json.loads(line) for line in content.decode().splitlines() if line.strip()]
    except (pa.ArrowException, ValueError) as error:
        raise ValidationError(f"{label}: cannot be read: {error}") from error


def _set_aside(row: Any, label: str) -> SetAside:
    """A row of the side table, whose `row` a person may have written as an object."""
    if not isinstance(row, dict) or "row" not in row or row.get("columns") not in (SOURCE, TYPE):
        raise ValidationError(
            f"{label}: this is no side table: its rows have row, columns ({SOURCE} or {TYPE}), "
            "line and file"
        )
    text = row["row"]
    try:
        record = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ValidationError(f"{label}: row {text!r} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValidationError(f"{label}: row {text!r} is not a JSON object")
    return SetAside(json.dumps(record), row["columns"], row.get("line"), row.get("file"))


def _unit_of_work(spec: IngestSpec, rows: Sequence[SetAside]) -> tuple[str, int | str] | None:
    """Not that of the run that has set the rows aside, which was applied."""
    if spec.idempotency is None:
        return None
    texts = sorted(row.to_text() for row in rows)  # whatever their files are called
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    return f"{spec.idempotency[0]}/replay", digest[:32]


# -- rows with their source's columns ------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """`values` is None where the line cannot be read."""

    values: dict[str, Any] | None
    names: list[str]
    line: str | None
    file: str | None
    fault: str | None = None


def _opened(spark: SparkSession, spec: IngestSpec, rows: Sequence[SetAside]) -> Opened:
    source = spec.source
    read = _csv_record if source.format == "csv" else _json_record
    records = [read(row, source.options) for row in rows]
    declared = declared_schema(source)
    if source.format == "csv":
        names = list(dict.fromkeys(name for record in records for name in record.names))
        return Opened(with_nulls(_texts(spark, records, names), source), textual=True)
    if declared is not None:
        fields = _declared_fields(records, declared, as_text=source.format == "json")
    else:
        fields = _source_fields(spark, spec)
    textual = source.format == "json" and declared is not None
    lines = _lines(spark, records)
    return Opened(json_columns(lines, fields, [], {}), textual=textual)


def _csv_record(row: SetAside, options: Mapping[str, str]) -> _Row:
    record, labels = _labelled(row)
    names = list(record)
    if row.line is None or any(value is not None for value in record.values()):
        return _Row(record | labels, [*names, *labels], None, row.file)
    if (fault := _not_as_it_was(row.line)) is not None:
        return _Row(None, [*names, *labels], row.line, row.file, fault)
    dialect = replace(csv_dialect(options), encoding="utf-8")  # as the side table has it
    rows = CsvRows(dialect, row.file or "", names, header=False, begins=False)
    tables = [*rows.feed(row.line.encode()), *rows.close()]
    read = [made for table in tables for made in table.to_pylist()]
    if rows.bad or len(read) != 1:
        fault = rows.bad[0].fault if rows.bad else MALFORMED
        return _Row(None, [*names, *labels], row.line, row.file, fault)
    return _Row(read[0] | labels, [*names, *labels], None, row.file)


def _not_as_it_was(line: str) -> str | None:
    """Why a line that is still as it was set aside cannot be read from the side table."""
    if len(line.encode()) >= KEPT_OF_RECORD - len("\r\n"):
        return "line is not whole: the side table has its beginning alone; write its row instead"
    if (byte := _ESCAPED_BYTE.search(line)) is not None:
        return f"line has {byte[0]} for a byte that is no text; write the text that it stands for"
    return None


def _json_record(row: SetAside, _: Mapping[str, str]) -> _Row:
    record, labels = _labelled(row)
    if row.line is None or any(value is not None for value in record.values()):
        return _Row(record | labels, [*record, *labels], None, row.file)
    fault = json_fault(row.line.encode())
    values = json.loads(row.line) | labels if fault is None else None
    return _Row(values, list(values or record | labels), row.line, row.file, fault)


def _labelled(row: SetAside) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file has of a row, and what the names of its folders say (`day=2024-01-01`)."""
    record: dict[str, Any] = json.loads(row.row)
    folders = (row.file or "").split("/")[:-1]
    labels = {
        name: record[name] for name in record if any(f.startswith(f"{name}=") for f in folders)
    }
    return {name: value for name, value in record.items() if name not in labels}, labels


def _texts(spark: SparkSession, records: Sequence[_Row], names: Sequence[str]) -> DataFrame:
    columns = {name: [_text((r.values or {}).get(name)) for r in records] for name in names}
    table = {name: pa.array(values, pa.string()) for name, values in columns.items()}
    schema = StructType([*(StructField(name, StringType()) for name in names), *FACT_FIELDS])
    return spark.createDataFrame(pa.table({**table, **_facts(records)}), schema)


def _text(value: Any) -> str | None:
    """A value of a CSV file, whatever JSON a person has written for it."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _lines(spark: SparkSession, records: Sequence[_Row]) -> DataFrame:
    texts = [None if r.values is None else json.dumps(r.values) for r in records]
    table = pa.table({VALUE: pa.array(texts, pa.string()), **_facts(records)})
    return spark.createDataFrame(
        table, StructType([StructField(VALUE, StringType()), *FACT_FIELDS])
    )


def _facts(records: Sequence[_Row]) -> dict[str, pa.Array]:
    lines = [r.line.encode() if r.line is not None and r.fault else None for r in records]
    return {
        FILE: pa.array([r.file for r in records], pa.string()),
        LINE: pa.array(lines, pa.binary()),
        FAULT: pa.array([r.fault for r in records], pa.string()),
    }


def _declared_fields(
    records: Sequence[_Row], declared: StructType, *, as_text: bool
) -> list[StructField]:
    """The declared columns that rows have, and others, so that drift is seen again."""
    types = {field.name: field.dataType for field in declared.fields}
    names = dict.fromkeys(name for record in records for name in record.names)
    return [
        StructField(name, text_types(kind) if as_text else kind)
        for name in names
        for kind in [types.get(name, StringType())]
    ]


def _source_fields(spark: SparkSession, spec: IngestSpec) -> list[StructField]:
    """Of a source without a declared schema; its files must still be there to tell them."""
    try:
        frame = open_source(spark, spec.source).frame
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error}. To replay without the source, declare its columns (source.schema)"
        ) from error
    names = source_columns(frame)
    return [field for field in frame.schema.fields if field.name in names]


# -- rows with the type's columns ----------------------------------------------------------------


def _written(spark: SparkSession, type_spec: TypeSpec, rows: Sequence[SetAside]) -> MappedRows:
    records = [
        _Row(record, list(record), None, row.file)
        for row in rows
        for record in [json.loads(row.row)]
    ]
    names = {name for record in records for name in record.names}
    fields = [field for field in spark_schema(type_spec).fields if field.name in names]
    strangers = sorted(names - {field.name for field in fields})
    if strangers:
        raise ValidationError(
            f"{type_spec.name}: rows of the side table have {', '.join(strangers)}, which the "
            "type does not have"
        )
    frame = json_columns(_lines(spark, records), fields, [], {})
    kept = [F.col(field.name) for field in fields]
    spoiled = F.array_compact(F.array(F.col(FAULT))).alias(REASONS)
    return MappedRows(frame.select(*kept, spoiled))
