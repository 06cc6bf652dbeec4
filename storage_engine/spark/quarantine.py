"""The side table of rows that were not written: what came, from which file, why, by which job.

Files are Parquet with one schema, whatever the type, so that the side table can be read as one.
They are complete before anything is published.

A row is kept as it was in its source, before it was mapped and cast, so that a person can repair
and replay it: `row` is JSON with the source's columns (`columns` is "source"), `line` the text of
one that could not be read. Rows whose source is not known (a DataFrame of the user's, or what a
transform has made) have the columns of the type ("type").
"""

from __future__ import annotations

import json
import logging
import math
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.config import OntologiaConfig
from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.protocol import ObjectStoreError

log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        pa.field("type_name", pa.string(), nullable=False),
        pa.field("row", pa.string(), nullable=False),
        pa.field("columns", pa.string(), nullable=False),
        pa.field("line", pa.string()),
        pa.field("file", pa.string()),
        pa.field("reasons", pa.list_(pa.string()), nullable=False),
        pa.field("attempt", pa.string(), nullable=False),
        pa.field("base_commit_id", pa.int64(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("job", pa.map_(pa.string(), pa.string()), nullable=False),
    ]
)


SOURCE, TYPE = "source", "type"  # whose columns a row has


@dataclass(frozen=True)
class SetAside:
    """What is kept of a row."""

    row: str  # JSON
    columns: str = TYPE
    line: str | None = None
    file: str | None = None

    def to_text(self) -> str:
        return json.dumps(astuple(self))

    @classmethod
    def parse(cls, text: str) -> SetAside:
        return cls(*json.loads(text))

    def shown(self) -> str:
        where = f" in {self.file}" if self.file else ""
        return f"{self.line or self.row}{where}"


def set_aside(
    rows: pa.RecordBatch, origin: pa.StructArray | None, numbers: Sequence[int]
) -> list[SetAside]:
    """Of the rows with these numbers, what is kept: `origin` where it is known, else they
    themselves."""
    places = pa.array(numbers, pa.int64())
    made = rows.take(places)
    own: list[Any] = list(_objects(made.schema.names, made.columns, len(numbers)))
    if origin is None:
        return [SetAside(as_json(row)) for row in own]
    chosen = origin.take(places)
    lines, files = chosen.field("line").to_pylist(), chosen.field("file").to_pylist()
    record = chosen.field("record")
    names = [field.name for field in record.type]
    columns = [record.field(number) for number in range(len(names))]
    records = list(_objects(names, columns, len(numbers)))
    return [
        _of_source(record, line, file) if is_told else SetAside(as_json(row))
        for is_told, row, record, line, file in zip(
            chosen.is_valid().to_pylist(), own, records, lines, files, strict=True
        )
    ]


def _of_source(record: Mapping[str, Any], line: bytes | None, file: str | None) -> SetAside:
    """A line that is JSON is the row; another one stands beside it."""
    if line is None:
        return SetAside(as_json(record), SOURCE, None, file)
    text = line.decode("utf-8", "backslashreplace")
    if _is_object(text):
        return SetAside(text, SOURCE, None, file)
    return SetAside(as_json(record), SOURCE, text, file)


def _is_object(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        parsed = json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return False
    return isinstance(parsed, dict)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _objects(
    names: Sequence[str], columns: Sequence[pa.Array], count: int
) -> Iterator[dict[str, Any]]:
    """Rows as Python objects, text where Python has none."""
    values = [_values(column) for column in columns]
    for number in range(count):
        yield {name: of[number] for name, of in zip(names, values, strict=True)}


def _values(column: pa.Array) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
        return values
    except (
        KeyError,
        OverflowError,
        ValueError,
    ):  # a time beyond Python's, or text that is not UTF-8
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes().decode("utf-8", "backslashreplace")
    except (OverflowError, ValueError):
        return pa.array([scalar]).cast(pa.string())[0].as_py()


def as_json(row: Mapping[str, Any]) -> str:
    """A row as JSON text, whatever is in it: bytes in base64, times in ISO 8601, and what JSON has
    no numbers for as "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    isoformat = getattr(value, "isoformat", None)
    return isoformat() if isoformat is not None else str(value)


@dataclass(frozen=True)
class Quarantine:
    """Where bad rows go, and what is said of the job with each of them."""

    uri: str  # of a store
    prefix: str  # of keys in it, "" or ending in "/"
    type_name: str
    attempt: str
    base_commit_id: int
    started_at: str
    job: tuple[tuple[str, str], ...] = ()

    def key(self, label: str) -> str:
        return f"{self.prefix}{self.attempt}-{label}.parquet"


class QuarantineFile:
    """The bad rows of one task."""

    def __init__(
        self, quarantine: Quarantine, config: OntologiaConfig, label: str, folder: Path
    ) -> None:
        self._quarantine = quarantine
        self._config = config
        self._key = quarantine.key(label)
        self._path = folder / "quarantine.parquet"
        self._writer = pq.ParquetWriter(self._path, SCHEMA, compression="zstd")

    def write(self, rows: Sequence[SetAside], reasons: Sequence[Sequence[str]]) -> None:
        facts = self._quarantine
        count = len(rows)
        table = pa.Table.from_arrays(
            [
                pa.repeat(facts.type_name, count),
                pa.array([row.row for row in rows], pa.string()),
                pa.array([row.columns for row in rows], pa.string()),
                pa.array([row.line for row in rows], pa.string()),
                pa.array([row.file for row in rows], pa.string()),
                pa.array(reasons, pa.list_(pa.string())),
                pa.repeat(facts.attempt, count),
                pa.repeat(pa.scalar(facts.base_commit_id, pa.int64()), count),
                pa.array([facts.started_at] * count).cast(SCHEMA.field("started_at").type),
                pa.array([list(facts.job)] * count, SCHEMA.field("job").type),
            ],
            schema=SCHEMA,
        )
        self._writer.write_table(table)

    def close(self) -> str:
        """Upload; returns the key."""
        self._writer.close()
        store = open_store(self._quarantine.uri, self._config)
        try:
            store.put_file(self._key, self._path)
        finally:
            store.close()
        return self._key


def tidy(quarantine: Quarantine, config: OntologiaConfig, kept: Iterable[str]) -> None:
    """Delete what this write has set aside, except `kept`: task attempts that failed leave files
    too, and a write that fails has set nothing aside."""
    store = open_store(quarantine.uri, config)
    try:
        wanted = set(kept)
        keys = [info.key for info in store.list(quarantine.key("").removesuffix(".parquet"))]
        doomed = [key for key in keys if key not in wanted]
        if doomed:
            store.delete_many(doomed)
    except (ObjectStoreError, StorageBackendError) as error:
        log.warning("leftovers stay in the side table %s: %s", quarantine.uri, error)
    finally:
        store.close()
