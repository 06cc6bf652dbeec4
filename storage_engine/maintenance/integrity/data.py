"""The data of a storage against its log: files, and (`--deep`) rows.

Files must be there, whole, and of the content, rows and columns that the log says. Rows must be as
many per commit as the log says, fit the schema, and have both ends where they are relations.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.commitlog.records import CommitFile, Entry, TypeRef
from storage_engine.config import MIB
from storage_engine.errors import IntegrityError
from storage_engine.maintenance.integrity.log import Log
from storage_engine.maintenance.integrity.report import IntegrityReport, MissingEnds, Progress
from storage_engine.maintenance.rows import versions_of
from storage_engine.model.columns import EngineVersion, parquet_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.query.dialects import quoted
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.wording import counted

_IN_FLIGHT = 64 * MIB
_CHUNK = 1 * MIB


@dataclass(frozen=True, slots=True)
class _FileFacts:
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
    seen: set[str],
) -> None:
    """All files of the state as of head, each read once, but for those that were `seen` before.
    What compaction replaced is not needed any more, and may be gone."""
    specs = log.specs()
    named = [f for entries in log.entries().values() for e in entries for f in e.files]
    files = [f for f in named if f.path not in seen]
    seen |= {f.path for f in files}
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
            spec = specs.get((*file.ref, file.schema_version_id))
            if spec is not None and looked.schema is not None:
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


def _look(store: ObjectStore, file: CommitFile) -> _FileFacts | None:
    local = store.local_path(file.path)
    try:
        if local is not None:
            size, digest = _hash_file(local)
            return _FileFacts(size, digest, *_footer(local))
        data = store.get(file.path).data
    except (ObjectNotFound, FileNotFoundError, NotADirectoryError):
        return None
    return _FileFacts(len(data), hashlib.sha256(data).hexdigest(), *_footer(io.BytesIO(data)))


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


def _compare(file: CommitFile, looked: _FileFacts, report: IntegrityReport) -> None:
    if file.bytes and looked.size != file.bytes:
        _note(report, file, "size_mismatch", f"has {looked.size} bytes, the log {file.bytes}")
    if file.content_sha256 and looked.sha256 != file.content_sha256:
        _note(report, file, "hash_mismatch", "has other content than was published")
    if looked.rows is None:
        _note(report, file, "not_parquet", "cannot be read as a Parquet file")
    elif file.row_count >= 0 and looked.rows != file.row_count:
        there = counted(looked.rows, "row")
        _note(report, file, "rows_differ", f"has {there}, the log {file.row_count}")


def _compare_schema(
    file: CommitFile,
    stored: pa.Schema,
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
        f"{field.name} is {stored.field(field.name).type}, should be {field.type}"
        if field.name in stored.names
        else f"{field.name} is missing"
        for field in expected
        if field.name not in stored.names or stored.field(field.name).type != field.type
    ]
    problems += [f"{name} is not declared" for name in stored.names if name not in expected.names]
    if problems:
        _note(report, file, "schema_mismatch", "; ".join(problems))


def _note(report: IntegrityReport, file: CommitFile, reason: str, message: str) -> None:
    report.note("file", reason, message, key=file.path, type_name=file.type_name)


_KEYS_AT_ONCE = 2_000_000
EXAMPLES = 20  # of missing keys that are kept
_TOLD = 3


class RowCheck:
    """Checks the rows of one object storage, one type after the other."""

    def __init__(
        self,
        repository: ObjectRepository,
        log: Log,
        report: IntegrityReport,
        progress: Progress,
    ) -> None:
        self._repository = repository
        self._report = report
        self._progress = progress
        self._log = log
        self._entries = log.entries()
        self._specs = self._current()
        damaged = {f.key for f in report.findings if f.area == "file"}
        self._readable = {
            ref: not any(f.path in damaged for e in self._entries.get(ref, ()) for f in e.files)
            for ref in self._specs
        }

    def run(self) -> None:
        refs = sorted(self._specs)
        dropped = self._log.dropped()
        for number, ref in enumerate(refs):
            self._progress("types", number, len(refs))
            if not self._readable[ref]:
                continue  # its files are reported already
            spec = self._specs[ref]
            with self._unreadable_noted(spec):
                for version, entries in self._versions_of(spec):
                    self._check_rows(version, entries)
                if ref[0] == "relation" and ref not in dropped:
                    for side in ("left", "right"):
                        self._check_ends(spec, side)

    @contextmanager
    def _unreadable_noted(self, spec: TypeSpec) -> Iterator[None]:
        """Values that do not fit the declared columns can already stop the scan."""
        import duckdb  # here: importing storage_engine stays light

        try:
            yield
        except (duckdb.Error, pa.ArrowException, ValueError, IntegrityError) as error:
            self._readable[spec.ref] = False
            self._rows(spec, "schema_mismatch", f"rows cannot be read: {error}", None)

    def _current(self) -> dict[TypeRef, TypeSpec]:
        """Types by their current schema. v1 logs without recorded schemas are left out."""
        specs = self._log.specs()
        versions = {
            ref: max((v for k, n, v in specs if (k, n) == ref), default=None)
            for ref in self._entries
        }
        return {
            ref: specs[(*ref, version)] for ref, version in versions.items() if version is not None
        }

    def _versions_of(self, spec: TypeSpec) -> list[tuple[TypeSpec, Sequence[Entry]]]:
        """The type as each of its versions has it, with the rows of that version. Of a log that
        records one version all rows, however its writers count."""
        specs = {
            v: s for (kind, name, v), s in self._log.specs().items() if (kind, name) == spec.ref
        }
        entries = self._entries[spec.ref]
        if len(specs) == 1:
            return [(spec, entries)]
        by_version: dict[int, list[Entry]] = {}
        for entry in entries:
            by_version.setdefault(entry.schema_version_id, []).append(entry)
        return [
            (specs[v], of_version) for v, of_version in sorted(by_version.items()) if v in specs
        ]

    def _entries_of(self, ref: TypeRef) -> Sequence[Entry]:
        """v2 keeps schema versions apart; the current one is what typed reads cover."""
        entries = self._entries[ref]
        if self._repository.engine_version == "v1":
            return entries
        recorded = [v for kind, name, v in self._log.specs() if (kind, name) == ref]
        current = max(recorded or [e.schema_version_id for e in entries])
        return [e for e in entries if e.schema_version_id == current]

    # -- rows ---------------------------------------------------------------------------------

    def _check_rows(self, spec: TypeSpec, entries: Sequence[Entry]) -> None:
        keys = ", ".join(quoted(name) for name in spec.identity)
        with versions_of(self._repository, spec, entries) as cursor:
            by_commit = dict(
                cursor.execute("SELECT commit_id, count(*) FROM versions GROUP BY 1").fetchall()
            )
            self._compare_counts(spec, entries, by_commit)
            twice = cursor.execute(
                f"SELECT count(*), min(commit_id) FROM (SELECT {keys}, commit_id FROM versions "
                f"GROUP BY {keys}, commit_id HAVING count(*) > 1)"
            ).fetchone()
            if twice and twice[0]:
                message = f"{twice[0]} identities are twice in one commit"
                self._rows(spec, "identity_twice", message, twice[1])
            for reason, what, condition in _conditions(spec):
                broken = cursor.execute(
                    f"SELECT count(*), min(commit_id) FROM versions WHERE {condition}"
                ).fetchone()
                if broken and broken[0]:
                    self._rows(spec, reason, f"{counted(broken[0], 'row')}: {what}", broken[1])
        self._report.checked["rows"] += sum(by_commit.values())

    def _compare_counts(
        self, spec: TypeSpec, entries: Sequence[Entry], by_commit: dict[int, int]
    ) -> None:
        expected: Counter[int] = Counter()
        for _, manifest in self._log.commits:
            if any(e.contains(manifest.commit_id) for e in entries):
                files: Sequence[CommitFile] = manifest.files_of(spec.ref)
                if any(f.row_count < 0 for f in files):
                    return  # the log does not say
                expected[manifest.commit_id] += sum(f.row_count for f in files)
        expected += Counter()  # drops commits that did not touch the type
        for number in sorted({*expected, *by_commit}):
            if expected.get(number, 0) != by_commit.get(number, 0):
                rows = counted(by_commit.get(number, 0), "row")
                message = f"{rows}, the manifest says {expected.get(number, 0)}"
                self._rows(spec, "rows_differ", message, number)

    def _rows(self, spec: TypeSpec, reason: str, message: str, commit_id: int | None) -> None:
        self._report.note("rows", reason, message, commit_id=commit_id, type_name=spec.name)

    # -- endpoints ----------------------------------------------------------------------------

    def _check_ends(self, relation: TypeSpec, side: str) -> None:
        name = relation.left if side == "left" else relation.right
        end: TypeRef = ("entity", str(name))
        column = f"{side}_key"
        spec = self._specs.get(end)
        if spec is None and end in self._entries:
            spec = TypeSpec(kind="entity", name=end[1], fields=())
        if not self._readable.get(end, True):
            return
        rows = sum(f.row_count for e in self._entries.get(end, ()) for f in e.files)
        parts = max(1, rows // _KEYS_AT_ONCE)
        identity = ", ".join(quoted(name) for name in relation.identity)
        missing = concerned = 0
        examples: list[tuple[str, int]] = []
        for part in range(parts):
            keys = self._keys(spec, part, parts)
            with versions_of(
                self._repository, _keys_of(relation), self._entries_of(relation.ref), ends=keys
            ) as cursor:
                answer = cursor.execute(
                    f"SELECT {column}, count(*) FROM (SELECT DISTINCT {identity} FROM versions "
                    f"WHERE hash({column}) % {parts} = {part}) v "
                    f"ANTI JOIN ends ON v.{column} = ends.entity_key GROUP BY 1 ORDER BY 1"
                )
                while rows_found := answer.fetchmany(10_000):
                    missing += len(rows_found)
                    concerned += sum(row[1] for row in rows_found)
                    examples += rows_found[: EXAMPLES - len(examples)]
        if missing:
            keyed = relation.instance_key is not None
            ends = MissingEnds(side, str(name), missing, concerned, tuple(examples), keyed)
            note_missing_ends(self._report, relation.name, ends)

    def _keys(self, spec: TypeSpec | None, part: int, parts: int) -> pa.Table:
        """The identities of one part of the entities: bounded, however many there are."""
        if spec is None:
            return pa.table({"entity_key": pa.array([], pa.string())})
        entries = self._entries_of(spec.ref)
        with versions_of(self._repository, _keys_of(spec), entries) as cursor:
            return cursor.execute(
                "SELECT DISTINCT entity_key FROM versions "
                f"WHERE hash(entity_key) % {parts} = {part}"
            ).to_arrow_table()


def _keys_of(spec: TypeSpec) -> TypeSpec:
    """Enough of a type to read its identities, of whatever version."""
    return TypeSpec(spec.kind, spec.name, ())


def note_missing_ends(report: IntegrityReport, relation: str, ends: MissingEnds) -> None:
    """What is said of relations that name entities which are not there."""
    more = " ..." if ends.missing > _TOLD else ""
    shown = f"{', '.join(key for key, _ in ends.examples[:_TOLD])}{more}"
    message = (
        f"{counted(ends.missing, f'{ends.side} key')} without {ends.type_name}: {shown} "
        f"({counted(ends.concerned, 'relation')})"
    )
    report.note("endpoints", "missing_endpoint", message, type_name=relation, ends=ends)


def _conditions(spec: TypeSpec) -> list[tuple[str, str, str]]:
    """Reason, words and SQL of what no row may be."""
    conditions = [
        ("null_identity", f"{name} is null", f"{quoted(name)} IS NULL") for name in spec.identity
    ]
    if spec.primary_key is not None:
        conditions.append(
            (
                "identity_differs",
                f"{spec.primary_key} is not the entity's key",
                f"{quoted(spec.primary_key)} IS DISTINCT FROM entity_key",
            )
        )
    for field in spec.fields:
        name = quoted(field.name)
        if not field.nullable:
            conditions.append(
                ("null_value", f"{field.name} is null and may not be", f"{name} IS NULL")
            )
        if field.storage == "json":
            broken = f"{name} IS NOT NULL AND NOT json_valid({name})"
            conditions.append(("not_json", f"{field.name} holds text that is no JSON", broken))
    return conditions
