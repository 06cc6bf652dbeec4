"""`export.json`, the summary of an export: what is in it, and whether it is whole.

It is the first and the last that is written of an export. Until the end it says `complete: false`,
so that a folder, whatever became of its writer, is never taken for a whole export when it is not.
JSON lines in a pipe say the same by a first and a last line.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from uuid import uuid4

import orjson

from storage_engine.errors import ConfigurationError
from storage_engine.model.spec import Kind, TypeSpec

FileFormat = Literal["jsonl", "csv", "parquet"]

FILE_FORMATS: tuple[FileFormat, ...] = ("jsonl", "csv", "parquet")
KINDS: tuple[Kind, ...] = get_args(Kind)
SUMMARY_FILE = "export.json"
FIRST_LINE, LAST_LINE = "export", "export_end"  # the only members of these lines
PARTIAL = ".partial"
FORMAT_VERSION = 1
_BLOCK_BYTES = 1 << 20
_LEFT_BEHIND = re.compile(r"\.[0-9a-f]{8}\.partial$")


@dataclass(frozen=True, slots=True)
class ExportedType:
    """One type of an export, and the file that has its rows."""

    spec: TypeSpec
    schema_version_id: int
    file: str = ""
    rows: int = 0
    bytes: int = 0
    sha256: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.spec.kind,
            "type_name": self.spec.name,
            "file": self.file,
            "rows": self.rows,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "schema_version_id": self.schema_version_id,
            "schema": self.spec.schema_dict(),
        }


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What an export has: rows of types as of one commit."""

    file_format: FileFormat
    source: str
    commit_id: int
    types: Sequence[ExportedType]
    history_since: int | None = None
    with_metadata: bool = False
    complete: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "complete": self.complete,
            "file_format": self.file_format,
            "source": self.source,
            "commit_id": self.commit_id,
            "history_since": self.history_since,
            "with_metadata": self.with_metadata,
            "types": [each.as_dict() for each in self.types],
        }

    @classmethod
    def from_dict(cls, stored: Any, where: str) -> ExportSummary:
        """ConfigurationError for what is none, or of a newer program."""
        version = stored.get("format_version") if isinstance(stored, dict) else None
        if not isinstance(version, int):
            raise ConfigurationError(f"{where}: is no summary of an export: it has no version")
        if version > FORMAT_VERSION:
            raise ConfigurationError(
                f"{where}: was written by a newer program (export format {version}, this one "
                f"reads {FORMAT_VERSION}): upgrade ontologia"
            )
        try:
            return cls(
                file_format=FILE_FORMATS[FILE_FORMATS.index(stored["file_format"])],
                source=stored["source"],
                commit_id=stored["commit_id"],
                types=tuple(_exported_type(each) for each in stored["types"]),
                history_since=stored["history_since"],
                with_metadata=stored["with_metadata"],
                complete=stored["complete"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{where}: cannot be read ({type(error).__name__}: {error}); export again, or "
                "delete it to import the other files as they are"
            ) from None


def _exported_type(stored: Mapping[str, Any]) -> ExportedType:
    file = stored["file"]
    if not isinstance(file, str) or file != Path(file).name or file == "..":
        raise ValueError(f"{file!r} is no name of a file beside it")
    return ExportedType(
        spec=TypeSpec.from_schema_dict(stored["schema"]),
        schema_version_id=stored["schema_version_id"],
        file=file,
        rows=stored["rows"],
        bytes=stored["bytes"],
        sha256=stored["sha256"],
    )


def named_type(given: str | None) -> tuple[Kind | None, str | None]:
    """`NAME`, `entity:NAME` or `relation:NAME`."""
    if given is None:
        return None, None
    kind, colon, name = given.rpartition(":")
    if not colon:
        return None, name
    for each in KINDS:
        if each == kind:
            return each, name
    raise ConfigurationError(f"type {given!r}: write NAME, entity:NAME or relation:NAME")


def read_summary(folder: Path) -> ExportSummary | None:
    """Of a folder; None where there is none. One that is not complete says so."""
    path = folder / SUMMARY_FILE
    try:
        stored = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"{path}: is not JSON ({error}): export again") from None
    return ExportSummary.from_dict(stored, str(path))


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_BLOCK_BYTES):
            digest.update(data)
    return digest.hexdigest()


class ExportFolder:
    """Where an export goes. Files have names of their own until all are there; an export that was
    there before stays whole until then."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.path = path
        self._token = uuid4().hex[:8]
        self._files: dict[str, Path] = {}
        self._made = False
        if path.exists() and not path.is_dir():
            raise ConfigurationError(f"{path} is a file: name a folder for the export")
        self._before: ExportSummary | None = None
        try:
            self._before = read_summary(path) if path.is_dir() else None
        except ConfigurationError:
            if not overwrite:
                raise
        if path.is_dir() and not overwrite:
            self._refuse_contents()

    def _refuse_contents(self) -> None:
        if self._before is not None:
            what = f"an export of commit {self._before.commit_id}"
            if not self._before.complete:
                what = "an export that was never finished, or is still being written"
        elif any(self.path.iterdir()):
            what = "other files"
        else:
            return
        raise ConfigurationError(
            f"{self.path} has {what}: choose an empty folder, or write over it (--overwrite)"
        )

    def begin(self, summary: ExportSummary) -> None:
        """From here on the folder says that it is not whole, unless it has an export that is."""
        self._made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.iterdir():
            if _LEFT_BEHIND.search(left.name):  # by one that was stopped
                left.unlink(missing_ok=True)
        if self._before is None or not self._before.complete:
            self._write_summary(summary)

    def partial(self, name: str) -> Path:
        """Where to write a file before it has its name."""
        self._files[name] = self.path / f"{name}.{self._token}{PARTIAL}"
        return self._files[name]

    def finish(self, unfinished: ExportSummary, summary: ExportSummary) -> None:
        """Give all files their names, the summary last."""
        if self._before is not None and self._before.complete:
            self._write_summary(unfinished)
        for name, path in self._files.items():
            os.replace(path, self.path / name)
        before = {each.file for each in self._before.types} if self._before else set()
        for name in before - {*self._files, ""}:
            (self.path / Path(name).name).unlink(missing_ok=True)
        self._write_summary(summary)
        self._files.clear()

    def abandon(self) -> None:
        """After a failure: what was there before stays, and nothing else."""
        with contextlib.suppress(OSError):
            for path in self._files.values():
                path.unlink(missing_ok=True)
            if self._before is None:
                (self.path / SUMMARY_FILE).unlink(missing_ok=True)
            if self._made:
                self.path.rmdir()

    def _write_summary(self, summary: ExportSummary) -> None:
        path = self.path / f"{SUMMARY_FILE}.{self._token}{PARTIAL}"
        with path.open("wb") as file:
            file.write(orjson.dumps(summary.as_dict(), option=orjson.OPT_INDENT_2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, self.path / SUMMARY_FILE)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
