"""The data files: there, whole, of the content, rows and columns that the log says."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.commitlog.records import CommitFile
from storage_engine.config import MIB
from storage_engine.maintenance.integrity.log import Log
from storage_engine.maintenance.integrity.report import IntegrityReport, Progress
from storage_engine.model.columns import EngineVersion, parquet_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.port import ObjectNotFound, ObjectStore

_IN_FLIGHT = 64 * MIB
_CHUNK = 1 * MIB


@dataclass(frozen=True, slots=True)
class _Looked:
    size: int
    sha256: str
    rows: int | None  # None: no Parquet file
    schema: pa.Schema | None


def check_files(
    store: ObjectStore,
    log: Log,
    engine_version: EngineVersion,
    report: IntegrityReport,
    progress: Progress,
) -> None:
    """All files of the state as of head, each read once. What compaction replaced is not needed
    any more, and may be gone."""
    schemas = log.schemas()
    files = [f for entries in log.entries().values() for e in entries for f in e.files]
    done = 0
    for batch in _batches(files):
        for file, looked in zip(
            batch, store.parallel.map(lambda f: _look(store, f), batch), strict=True
        ):
            done += 1
            if looked is None:
                _note(report, file, "missing_file", "the log names it")
                continue
            report.checked["files"] += 1
            report.checked["bytes"] += looked.size
            _compare(file, looked, report)
            stored = schemas.get((*file.ref, file.schema_version_id))
            if stored is not None and looked.schema is not None:
                spec = TypeSpec.from_schema_dict(stored)
                _compare_schema(file, looked.schema, spec, engine_version, report)
        progress("files", done, len(files))


def _batches(files: Iterable[CommitFile]) -> Iterator[list[CommitFile]]:
    """So many at once that what is in memory stays bounded."""
    held: list[CommitFile] = []
    size = 0
    for file in files:
        if held and (size + file.bytes > _IN_FLIGHT or len(held) >= 256):
            yield held
            held, size = [], 0
        held.append(file)
        size += file.bytes
    if held:
        yield held


def _look(store: ObjectStore, file: CommitFile) -> _Looked | None:
    local = store.local_path(file.path)
    try:
        if local is not None:
            size, digest = _hash_file(local)
            return _Looked(size, digest, *_footer(local))
        data = store.get(file.path).data
    except (ObjectNotFound, FileNotFoundError, NotADirectoryError):
        return None
    return _Looked(len(data), hashlib.sha256(data).hexdigest(), *_footer(io.BytesIO(data)))


def _hash_file(path: Path) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def _footer(source: Path | io.BytesIO) -> tuple[int | None, pa.Schema | None]:
    try:
        with pq.ParquetFile(source) as file:
            return int(file.metadata.num_rows), file.schema_arrow
    except (pa.ArrowInvalid, OSError):
        return None, None


def _compare(file: CommitFile, looked: _Looked, report: IntegrityReport) -> None:
    if file.bytes and looked.size != file.bytes:
        _note(report, file, "size_mismatch", f"has {looked.size} bytes, the log {file.bytes}")
    if file.content_sha256 and looked.sha256 != file.content_sha256:
        _note(report, file, "hash_mismatch", "has other content than was published")
    if looked.rows is None:
        _note(report, file, "not_parquet", "cannot be read as a Parquet file")
    elif file.row_count >= 0 and looked.rows != file.row_count:
        _note(report, file, "rows_differ", f"has {looked.rows} rows, the log {file.row_count}")


def _compare_schema(
    file: CommitFile,
    found: pa.Schema,
    spec: TypeSpec,
    engine_version: EngineVersion,
    report: IntegrityReport,
) -> None:
    expected = parquet_schema(
        spec,
        engine_version=engine_version,
        with_commit_id=file.commit_id_source == "column",
    )
    problems = [
        f"{field.name} is {found.field(field.name).type}, should be {field.type}"
        if field.name in found.names
        else f"{field.name} is missing"
        for field in expected
        if field.name not in found.names or found.field(field.name).type != field.type
    ]
    problems += [f"{name} is not declared" for name in found.names if name not in expected.names]
    if problems:
        _note(report, file, "schema_mismatch", "; ".join(problems))


def _note(report: IntegrityReport, file: CommitFile, reason: str, message: str) -> None:
    report.note("file", reason, message, key=file.path, type_name=file.type_name)
