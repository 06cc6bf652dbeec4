"""Exports: rows of types, as of one commit, into files or a pipe.

Everything is read as of one commit, type by type, in bounded memory: in the schema version that
was current then, by identity (a history by commit and identity). A folder gets a file for each type
and `export.json`; a pipe gets JSON lines of all types, between a first and a last line that say so,
or one type as CSV or Parquet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import orjson
import pyarrow as pa

from storage_engine.errors import ConfigurationError, StorageBackendError
from storage_engine.query.reference import Reference, checked_reference
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.protocol import Repository
from storage_engine.runtime.exchange.summary import (
    FILE_FORMATS,
    FIRST_LINE,
    LAST_LINE,
    ExportedType,
    ExportFolder,
    ExportSummary,
    FileFormat,
    named_type,
)
from storage_engine.runtime.exchange.writers import HashedSink, open_writer
from storage_engine.runtime.reads import stored_history
from storage_engine.schema.history import TypeHistory
from storage_engine.transfer.ends import is_inside

ExportProgress = Callable[[str, int], None]  # the type's name, rows so far of all types


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote."""

    summary: ExportSummary
    output: str
    notes: Sequence[str] = ()

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.summary.types)

    def as_dict(self) -> dict[str, Any]:
        described = self.summary.as_dict()
        types = [{k: v for k, v in t.items() if k != "schema"} for t in described["types"]]
        return {
            **described,
            "output": self.output,
            "rows": self.rows,
            "types": types,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class _ReadType:
    """A type to export, with how its rows are asked for."""

    exported: ExportedType
    query: QuerySpec


def export_types(
    repository: Repository,
    output: str | Path | IO[bytes],
    *,
    types: Iterable[str] | None = None,
    file_format: str = "jsonl",
    as_of: Reference | None = None,
    history_since: int | None = None,
    with_metadata: bool = False,
    overwrite: bool = False,
    progress: ExportProgress | None = None,
) -> ExportReport:
    """See `Session.export`."""
    if file_format not in FILE_FORMATS:
        raise ConfigurationError(
            f"export format {file_format!r} is unknown: use {', '.join(FILE_FORMATS)}"
        )
    checked: FileFormat = file_format
    if as_of is not None and history_since is not None:
        raise ConfigurationError("as_of and history_since contradict each other: use one of them")
    if history_since is not None and (type(history_since) is not int or history_since < 0):
        raise ConfigurationError(f"history_since takes a commit id from 0 on, not {history_since}")
    folder: ExportFolder | None = None
    if isinstance(output, str | os.PathLike):
        if not os.fspath(output) or "\0" in os.fspath(output):
            raise ConfigurationError(f"{os.fspath(output)!r} is no name of a folder: name one")
        if repository.objects is not None and is_inside(Path(output), repository.uri):
            raise ConfigurationError(
                f"{output} is among the objects of {repository.uri}: name a folder beside it"
            )
        folder = _folder(output, overwrite=overwrite)
    if as_of is None:
        commit_id = repository.head_commit_id()
    else:
        commit_id = repository.require_commit(checked_reference(as_of, "export"))
    names = None if types is None else list(dict.fromkeys(types))
    reads, notes = _reads(repository, commit_id, names, history_since)
    summary = ExportSummary(
        checked,
        repository.uri,
        commit_id,
        [read.exported for read in reads],
        history_since,
        with_metadata,
        complete=False,
    )
    run = _ExportRun(repository, summary, reads, progress)
    if folder is not None:
        return ExportReport(run.into(folder), str(folder.path), tuple(notes))
    assert not isinstance(output, str | os.PathLike)
    return ExportReport(run.piped(output), "-", tuple(notes))


def _folder(path: str | os.PathLike[str], *, overwrite: bool) -> ExportFolder:
    try:
        return ExportFolder(Path(path), overwrite=overwrite)
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename or path}: {error.strerror or error}: name another folder"
        ) from error


def _reads(
    repository: Repository, commit_id: int, names: Sequence[str] | None, since: int | None
) -> tuple[list[_ReadType], list[str]]:
    """The types as of a commit, entities first."""
    if names is None:
        histories = list(repository.type_histories().values())
    else:
        histories = []
        for name in names:
            kind, plain = named_type(name)
            history = stored_history(repository, plain or "", kind)
            if history not in histories:
                histories.append(history)
    reads: list[_ReadType] = []
    notes: list[str] = []
    for history in sorted(histories, key=lambda each: each.ref):
        read = _read_type(history, commit_id, since)
        if read is not None:
            reads.append(read)
            notes += _left_out(history, read, since)
        elif names is not None:
            raise ConfigurationError(_nothing_of(history, commit_id))
    return reads, notes


def _read_type(history: TypeHistory, commit_id: int, since: int | None) -> _ReadType | None:
    if history.dropped_commit_id is not None and history.dropped_commit_id <= commit_id:
        return None
    version = history.active_at(commit_id)
    if version is None:
        return None
    number = None if version is history.current else version.version
    when = When(history=since is not None, since=since, schema_version=number)
    return _ReadType(
        ExportedType(version.spec, version.version), QuerySpec(version.spec, when=when)
    )


def _nothing_of(history: TypeHistory, commit_id: int) -> str:
    if history.dropped_commit_id is not None and history.dropped_commit_id <= commit_id:
        return (
            f"{history.name} was dropped by commit {history.dropped_commit_id}: export it as of "
            f"commit {history.dropped_commit_id - 1}"
        )
    return f"{history.name} was not there yet at commit {commit_id}"


def _left_out(history: TypeHistory, read: _ReadType, since: int | None) -> list[str]:
    """Of a history: what other schema versions have."""
    version = read.exported.schema_version_id
    if since is None:
        return []
    older = [
        v.version
        for v in history.versions
        if v.version < version and (v.superseded_at_commit_id or 0) - 1 > since
    ]
    if not older:
        return []
    numbers = ", ".join(map(str, older))
    return [
        f"{history.name}: only what was written under schema version {version} is in it; what was "
        f"written before (version {numbers}) is in an export as of an earlier commit"
    ]


class _ExportRun:
    """Writes the rows of one export."""

    def __init__(
        self,
        repository: Repository,
        summary: ExportSummary,
        reads: Sequence[_ReadType],
        progress: ExportProgress | None,
    ) -> None:
        self._executor = repository.executor(summary.commit_id)
        self._summary = summary
        self._reads = reads
        self._progress = progress or (lambda _name, _rows: None)
        self._rows = 0

    def into(self, folder: ExportFolder) -> ExportSummary:
        try:
            folder.begin(self._summary)
            written = [
                self._file(folder, read, name)
                for read, name in zip(self._reads, self._file_names(), strict=True)
            ]
            whole = replace(self._summary, types=written, complete=True)
            folder.finish(self._summary, whole)
        except OSError as error:
            folder.abandon()
            raise StorageBackendError(
                f"{folder.path}: cannot be written: {error.strerror or error}", operation="export"
            ) from error
        except BaseException:
            folder.abandon()
            raise
        return whole

    def _file(self, folder: ExportFolder, read: _ReadType, name: str) -> ExportedType:
        with folder.partial(name).open("wb") as file:
            sink = HashedSink(file)
            rows = self._write(read, sink)
            file.flush()
            os.fsync(file.fileno())
        return replace(read.exported, file=name, rows=rows, bytes=sink.bytes, sha256=sink.sha256)

    def piped(self, output: IO[bytes]) -> ExportSummary:
        """One after the other."""
        if self._summary.file_format == "jsonl":
            output.write(orjson.dumps({FIRST_LINE: self._summary.as_dict()}) + b"\n")
        elif len(self._reads) != 1:
            names = ", ".join(read.exported.spec.name for read in self._reads) or "none"
            raise ConfigurationError(
                f"{self._summary.file_format} in a pipe has one type, and there are {names}: name "
                "it (--type), write JSON lines, or write into a folder"
            )
        written = []
        for read in self._reads:
            sink = HashedSink(output)
            rows = self._write(read, sink)
            written.append(replace(read.exported, rows=rows, bytes=sink.bytes, sha256=sink.sha256))
        if self._summary.file_format == "jsonl":
            output.write(orjson.dumps({LAST_LINE: {"rows": self._rows}}) + b"\n")
        output.flush()
        return replace(self._summary, types=written, complete=True)

    def _write(self, read: _ReadType, sink: HashedSink) -> int:
        spec = read.exported.spec
        writer = open_writer(
            self._summary.file_format, spec, sink, with_metadata=self._summary.with_metadata
        )
        rows = 0
        for batch in self._executor.rows(read.query).batches:
            writer.write(pa.Table.from_batches([batch]))
            rows += batch.num_rows
            self._rows += batch.num_rows
            self._progress(spec.name, self._rows)
        writer.close()
        return rows

    def _file_names(self) -> list[str]:
        """By the type's name, with the kind where two share it."""
        specs = [read.exported.spec for read in self._reads]
        names = [spec.name.lower() for spec in specs]
        ending = self._summary.file_format
        return [
            f"{spec.name}.{spec.kind}.{ending}"
            if names.count(spec.name.lower()) > 1
            else f"{spec.name}.{ending}"
            for spec in specs
        ]
