"""Bulk sources of `Session.ingest`: Arrow data, data frames and files, as rows of a type.

What can be known without reading all rows is checked when a source is opened (at `ingest()`), for
all its parts together; rows are read at `commit()`, a batch at a time, and checked then. Problems
with a file name the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage_engine.errors import ValidationError
from storage_engine.model.arrow import Conformer, conform
from storage_engine.model.conform import zone_notes
from storage_engine.model.declarations import Stored
from storage_engine.model.spec import TypeSpec

MAX_BATCH_ROWS = 65_536

_TAKES = (
    "ingest takes an Arrow table, record batch or RecordBatchReader, a pandas or Polars DataFrame, "
    "anything else with __arrow_c_stream__, the path of a .parquet, .csv, .jsonl or .ndjson file, "
    "or a list of these"
)


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One table, frame or file. `read` gives batches in `schema`, from the beginning each time
    unless `once`. `sample`: the schema says little, so look at the first batch as well."""

    schema: pa.Schema
    read: Callable[[], Iterable[pa.RecordBatch]]
    label: str = ""  # how messages name it
    once: bool = False
    sample: bool = False


class BulkSource:
    """All parts of one `ingest()`, checked against the type."""

    def __init__(self, spec: TypeSpec, parts: Sequence[SourcePart]) -> None:
        self._spec = spec
        self._parts = parts
        self._spent = False
        problems = [error for part in parts if (error := self._check(part)) is not None]
        if problems:
            raise ValidationError(
                "; ".join(str(error) for error in problems),
                type=spec.name,
                field=", ".join(dict.fromkeys(e.field for e in problems if e.field)),
            )

    @property
    def notes(self) -> list[str]:
        """What may surprise in its columns."""
        return zone_notes(self._spec, (part.schema for part in self._parts))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows in the type's row schema, at most `MAX_BATCH_ROWS` at a time."""
        if self._spent and any(part.once for part in self._parts):
            raise ValidationError(
                f"{self._spec.name}: a source that can be read only once was used up by a commit "
                "that failed; discard() the intents and ingest it again",
                type=self._spec.name,
            )
        self._spent = True
        for part in self._parts:
            yield from self._rows(part)

    def _rows(self, part: SourcePart) -> Iterator[pa.RecordBatch]:
        conformer = conform(self._spec, part.schema)
        with _explained(self._spec, part.label):
            batches = iter(part.read())
        # Only our own reading is explained: an error of whoever takes the batches passes by.
        while (made := self._next(batches, conformer, part.label)) is not None:
            yield from made

    def _next(
        self, batches: Iterator[pa.RecordBatch], conformer: Conformer, label: str
    ) -> list[pa.RecordBatch] | None:
        with _explained(self._spec, label):
            batch = next(batches, None)
            if batch is None:
                return None
            starts = range(0, batch.num_rows, MAX_BATCH_ROWS)
            return [conformer.batch(batch.slice(start, MAX_BATCH_ROWS)) for start in starts]

    def _check(self, part: SourcePart) -> ValidationError | None:
        try:
            with _explained(self._spec, part.label):
                conformer = conform(self._spec, part.schema)
            if part.sample:
                with _explained(self._spec, part.label):
                    batches = iter(part.read())
                self._next(batches, conformer, part.label)
        except ValidationError as error:
            return error
        return None


def open_source(spec: TypeSpec, given: Any) -> BulkSource:
    """Whatever the user gave, checked against the type; ValidationError says all that is wrong."""
    if isinstance(given, list | tuple):
        if not given:
            raise ValidationError(f"{spec.name}: the list of sources is empty", type=spec.name)
        parts = [_part(spec, item, f"source {n}") for n, item in enumerate(given)]
        return BulkSource(spec, parts)
    return BulkSource(spec, [_part(spec, given, "")])


def _part(spec: TypeSpec, given: Any, label: str) -> SourcePart:
    if isinstance(given, pa.Table):
        return SourcePart(
            given.schema, lambda: given.to_batches(max_chunksize=MAX_BATCH_ROWS), label
        )
    if isinstance(given, pa.RecordBatch):
        return SourcePart(given.schema, lambda: [given], label)
    if isinstance(given, pa.RecordBatchReader):
        return SourcePart(given.schema, lambda: given, label, once=True)
    if isinstance(given, str | os.PathLike):
        return _file(spec, Path(os.fsdecode(given)))
    if _is_frame(given, "pandas", "DataFrame"):
        return _part(spec, _from_pandas(spec, given, label), label)
    if _is_frame(given, "polars", "LazyFrame"):
        raise _refused(spec, "a Polars LazyFrame has no rows yet; pass lazy_frame.collect()")
    if _is_frame(given, "polars", "DataFrame"):
        return _part(spec, pa.table(given), label)
    if hasattr(given, "__arrow_c_stream__") and not isinstance(given, type):
        with _explained(spec, label or type(given).__name__):
            # Of an unknown producer we only know that it gives its rows once.
            reader = pa.RecordBatchReader.from_stream(given)
        return _part(spec, reader, label)
    if isinstance(given, Stored):
        raise _refused(spec, "objects go to ensure(), not to ingest()")
    raise _refused(spec, f"{_TAKES}; got {type(given).__name__}")


def _from_pandas(spec: TypeSpec, frame: Any, label: str) -> pa.Table:
    """Columns without the index; None and NaN are null."""
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        problem = f"{label or 'pandas DataFrame'}: {_words(error)}"
        raise _refused(spec, problem) from error


def _is_frame(given: Any, library: str, name: str) -> bool:
    """Whether it is such a frame, without importing a library that the user did not."""
    cls = getattr(sys.modules.get(library), name, None)
    return isinstance(cls, type) and isinstance(given, cls)


# --- files ------------------------------------------------------------------------------------


def _parquet(_: TypeSpec, path: Path) -> SourcePart:
    import pyarrow.parquet as pq

    def read() -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield from file.iter_batches(batch_size=MAX_BATCH_ROWS)

    with pq.ParquetFile(path) as file:
        return SourcePart(file.schema_arrow, read, str(path))


def _csv(spec: TypeSpec, path: Path) -> SourcePart:
    from storage_engine.runtime.text_files import CsvFile

    file = CsvFile(spec, path)
    return SourcePart(file.schema, file.read, str(path))


def _json_lines(spec: TypeSpec, path: Path) -> SourcePart:
    from storage_engine.runtime.text_files import JsonLinesFile

    file = JsonLinesFile(spec, path, batch_rows=MAX_BATCH_ROWS)
    return SourcePart(file.schema, file.read, str(path), sample=True)


_FORMATS: dict[str, Callable[[TypeSpec, Path], SourcePart]] = {
    ".parquet": _parquet,
    ".csv": _csv,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
}


def _file(spec: TypeSpec, path: Path) -> SourcePart:
    endings = ", ".join(_FORMATS)
    if "://" in str(path) or str(path).startswith(("s3:/", "http:/", "https:/")):
        raise _refused(spec, f"{path}: ingest reads local files; download it, or read it to Arrow")
    make = _FORMATS.get(path.suffix.lower())
    if path.is_dir():
        raise _refused(spec, f"{path} is a directory; give its files as a list")
    if make is None:
        raise _refused(spec, f"{path}: the name must end in one of {endings}")
    with _explained(spec, str(path)):
        return make(spec, path)


# --- what the user reads ----------------------------------------------------------------------


@contextmanager
def _explained(spec: TypeSpec, label: str) -> Iterator[None]:
    """Name the part that an error is about, and turn errors of readers into ours."""
    where = f"{label}: " if label else ""
    try:
        yield
    except ValidationError as error:
        raise ValidationError(
            f"{where}{error}", type=spec.name, identity=error.identity, field=error.field
        ) from None
    except OSError as error:
        raise _refused(spec, f"{where}cannot be read: {error.strerror or error}") from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _refused(spec, f"{where}cannot be read: {_words(error)}") from error


def _words(error: Exception) -> str:
    """The message on one line."""
    parts = error.args if isinstance(error, pa.ArrowException) else (error,)
    return " ".join(" ".join(str(part).split()) for part in parts)


def _refused(spec: TypeSpec, problem: str) -> ValidationError:
    return ValidationError(f"{spec.name}: {problem}", type=spec.name)
