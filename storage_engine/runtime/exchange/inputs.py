"""What an import is given: a folder, a file or a pipe, and which types its files are of."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Literal, get_args

from storage_engine.errors import ConfigurationError, TypeDroppedError
from storage_engine.model.spec import Kind, TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.repository.protocol import Repository, TypeRef
from storage_engine.runtime import migration
from storage_engine.runtime.exchange.summary import (
    FILE_FORMATS,
    KINDS,
    PARTIAL,
    SUMMARY_FILE,
    ExportSummary,
    FileFormat,
    file_sha256,
    named_type,
    read_summary,
)

PIPE = "<stdin>"
PROBLEMS_SHOWN = 100
_SUFFIXES: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


@dataclass(frozen=True, slots=True)
class InputProblem:
    """What is wrong with a line of a text file, a row of a Parquet file, or a file."""

    file: str
    problem: str
    line: int | None = None
    row: int | None = None  # of a Parquet file, from 1
    type_name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "line": self.line,
            "row": self.row,
            "type_name": self.type_name,
            "problem": self.problem,
        }

    def __str__(self) -> str:
        place = f" line {self.line}" if self.line else f" row {self.row}" if self.row else ""
        return f"{self.file}{place}: {self.problem}"


class EnoughProblems(Exception):
    """So many that looking for more would tell nobody anything."""


@dataclass(slots=True)
class Problems:
    """All problems of an input, up to a bound; and what is no problem, but may surprise."""

    limit: int = PROBLEMS_SHOWN
    listed: list[InputProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, problem: InputProblem) -> None:
        self.listed.append(problem)
        if len(self.listed) >= self.limit:
            raise EnoughProblems


FileState = tuple[int, int, int]


def file_state(path: Path) -> FileState:
    """What does not stay when somebody writes to a file, or puts another in its place."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file. `type_name` and `kind` are what its name, a summary or the user says of it."""

    path: Path
    label: str
    file_format: FileFormat
    type_name: str | None = None
    kind: Kind | None = None
    rows: int | None = None  # that a summary tells of it
    state: FileState | None = None  # before anything of it was read


@dataclass(frozen=True, slots=True)
class ImportInput:
    """All files of an import, and the summary that came with them."""

    files: Sequence[InputFile]
    summary: ExportSummary | None = None
    notes: Sequence[str] = ()

    def changed(self) -> list[InputFile]:
        """Files that are not as they were: what was read of them is neither one nor the other."""
        return [
            file
            for file in self.files
            if file.state is not None and file_state(file.path) != file.state
        ]

    def digest(self) -> str:
        """Of what is in the files, and what they are taken for."""
        whole = sha256()
        for file in self.files:
            told = (file.file_format, file.type_name, file.kind, file_sha256(file.path))
            whole.update(repr(told).encode())
        return whole.hexdigest()


def open_input(
    given: str | Path | IO[bytes],
    *,
    file_format: str | None,
    type_name: str | None,
    scratch: Path,
    problems: Problems,
) -> ImportInput:
    """The files that are meant. A pipe is put into a file first, as it can be read only once."""
    if file_format is not None and file_format not in FILE_FORMATS:
        raise ConfigurationError(
            f"import format {file_format!r} is unknown: use {', '.join(FILE_FORMATS)}"
        )
    kind, name = named_type(type_name)
    if not isinstance(given, str | Path):
        return _piped(given, PIPE, file_format, (name, kind), scratch)
    if not str(given):
        raise ConfigurationError("the input is empty: name a folder or a file")
    path = Path(given)
    if path.is_dir():
        if type_name is not None or file_format is not None:
            raise ConfigurationError(
                f"{path} is a folder, whose files say what they are: leave out type and format"
            )
        return _folder(path, problems)
    if path.is_fifo():  # as the shell makes them of <(zcat rows.jsonl.gz)
        with path.open("rb") as pipe:
            suffix = _SUFFIXES.get(path.suffix.lower())
            return _piped(pipe, str(path), file_format or suffix, (name, kind), scratch)
    if not path.is_file():
        what = "is no file" if path.exists() else "is not there"
        raise ConfigurationError(f"{path} {what}: name a folder or a file to import")
    detected = file_format or _SUFFIXES.get(path.suffix.lower())
    if detected is None and path.suffix.lower() in _COMPRESSED:
        raise ConfigurationError(
            f"{path} is compressed: decompress it first, or into a pipe (--input - --format ...)"
        )
    if detected is None:
        raise ConfigurationError(
            f"{path}: the name does not tell what is in it: give the format "
            f"(--format {'|'.join(FILE_FORMATS)})"
        )
    if name is None and detected != "jsonl":
        name, kind = _type_of_name(path)
    file = InputFile(path, path.name, _checked(detected), name, kind, state=file_state(path))
    return ImportInput([_with_type(file)])


def _piped(
    pipe: IO[bytes],
    label: str,
    file_format: str | None,
    of_type: tuple[str | None, Kind | None],
    scratch: Path,
) -> ImportInput:
    path = scratch / "piped"
    with path.open("wb") as file:
        shutil.copyfileobj(pipe, file, 1 << 20)
    return ImportInput([_with_type(InputFile(path, label, _piped_format(file_format), *of_type))])


def _checked(file_format: str) -> FileFormat:
    return next(each for each in FILE_FORMATS if each == file_format)


def _piped_format(file_format: str | None) -> FileFormat:
    if file_format is None:
        raise ConfigurationError(
            f"a pipe does not tell what is in it: give the format "
            f"(--format {'|'.join(FILE_FORMATS)})"
        )
    return _checked(file_format)


def _with_type(file: InputFile) -> InputFile:
    if file.file_format == "jsonl" and file.type_name is not None:
        raise ConfigurationError(
            "the records of JSON lines say of which type they are: leave out the type"
        )
    if file.file_format != "jsonl" and file.type_name is None:
        raise ConfigurationError(
            f"{file.label}: {file.file_format} does not say of which type its rows are: name it "
            "(--type)"
        )
    return file


def _type_of_name(path: Path) -> tuple[str, Kind | None]:
    """`Customer.csv`, or `Customer.entity.csv`."""
    name, _, kind = path.stem.partition(".")
    for each in KINDS:
        if each == kind:
            return name, each
    return path.stem, None


# --- folders ----------------------------------------------------------------------------------


def _folder(folder: Path, problems: Problems) -> ImportInput:
    summary = read_summary(folder)
    if summary is None:
        return ImportInput(_loose_files(folder))
    if not summary.complete:
        raise ConfigurationError(
            f"{folder} has an export that was never finished, or is still being written: export "
            "again (--overwrite)"
        )
    files: list[InputFile] = []
    for each in summary.types:
        path = folder / Path(each.file).name
        if not path.is_file():
            problems.add(InputProblem(each.file, f"is missing: {SUMMARY_FILE} tells of it"))
            continue
        state = file_state(path)
        if path.stat().st_size != each.bytes or file_sha256(path) != each.sha256:
            problems.add(
                InputProblem(
                    each.file,
                    f"is not the file that {SUMMARY_FILE} tells of ({each.bytes} bytes): copy it "
                    f"again, or delete {SUMMARY_FILE} if it was changed on purpose",
                )
            )
            continue
        spec = each.spec
        files.append(
            InputFile(path, each.file, summary.file_format, spec.name, spec.kind, each.rows, state)
        )
    names = {SUMMARY_FILE, *(each.file for each in summary.types)}
    others = sorted(path.name for path in folder.iterdir() if path.name not in names)
    notes = [f"not part of the export, and left alone: {', '.join(others[:5])}"] if others else []
    return ImportInput(files, summary, notes)


def _loose_files(folder: Path) -> list[InputFile]:
    """Of a folder that was not made by an export."""
    files = []
    for path in sorted(folder.iterdir()):
        if path.name.endswith(PARTIAL):
            raise ConfigurationError(
                f"{path} is from an export that was never finished: export again"
            )
        file_format = _SUFFIXES.get(path.suffix.lower())
        if file_format is None or not path.is_file():
            continue
        name, kind = (None, None) if file_format == "jsonl" else _type_of_name(path)
        files.append(InputFile(path, path.name, file_format, name, kind, state=file_state(path)))
    if not files:
        raise ConfigurationError(f"{folder} has no files to import ({', '.join(_SUFFIXES)})")
    return files


# --- types ------------------------------------------------------------------------------------


class ImportTypes:
    """The types that rows can be of: as declared, else as stored, else as an export tells."""

    def __init__(self, repository: Repository, declared: Mapping[TypeRef, TypeSpec]) -> None:
        self._repository = repository
        self._declared = declared
        self._told: dict[TypeRef, TypeSpec] = {}
        self._resolved: dict[TypeRef, TypeSpec | None] = {}
        self.look()

    def look(self) -> None:
        """What is stored by now: others may have stored a type since."""
        self._histories = self._repository.type_histories()

    def tell(self, summary: ExportSummary) -> None:
        """What an export says of its types."""
        self._told.update({each.spec.ref: each.spec for each in summary.types})

    def is_stored(self, ref: TypeRef) -> bool:
        history = self._histories.get(ref)
        return history is not None and history.current is not None

    def get(self, kind: Kind, name: str) -> TypeSpec | None:
        """None where the type is not known. SchemaOutdatedError and TypeDroppedError where the
        storage has it otherwise, or no more."""
        ref = (kind, name)
        if ref not in self._resolved:
            self._resolved[ref] = self._resolve(ref)
        return self._resolved[ref]

    def _resolve(self, ref: TypeRef) -> TypeSpec | None:
        history = self._histories.get(ref)
        spec = self._declared.get(ref)
        if spec is None and history is not None:
            if history.current is None:
                raise TypeDroppedError(
                    type=history.name,
                    dropped_commit_id=history.dropped_commit_id or 0,
                    renamed_to=history.renamed_to,
                )
            return history.current.spec
        spec = spec or self._told.get(ref)
        if spec is not None:
            migration.validate(self._repository, [spec])
        return spec

    def named(self, name: str, columns: Sequence[str], kind: Kind | None) -> TypeSpec | None:
        """The type of a table with these columns."""
        if kind is None:
            kind = "relation" if {"left_key", "right_key"} <= {*columns} else "entity"
        return self.get(kind, name)

    def unknown(self, kind: Kind, name: str) -> str:
        """What to say of a type that is not known."""
        refs = [*self._declared, *self._told, *(r for r in self._histories if self.is_stored(r))]
        names = sorted({n for k, n in refs if k == kind})
        hint = unknown_name(name, names, what=f"{kind} type")
        declare = "name the module that declares it (--models)"
        if self._declared:
            declare = "declare it in the module of --models"
        return f"{hint}{'' if hint.endswith('?') else ';'} {declare}"


OnConflict = Literal["abort", "skip", "upsert"]
ON_CONFLICT: tuple[OnConflict, ...] = get_args(OnConflict)
