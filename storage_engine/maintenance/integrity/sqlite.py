"""A SQLite storage: the file sound, ids without gaps, rows as the commits say, both ends there."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.errors import IntegrityError, OntologiaError
from storage_engine.maintenance.integrity.data import missing_ends
from storage_engine.maintenance.integrity.report import IntegrityReport, Progress
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.protocol import ReadWindow
from storage_engine.repository.sqlite import tags as sqlite_tags
from storage_engine.repository.sqlite.data_table import quoted
from storage_engine.repository.sqlite.engine import SqliteRepository
from storage_engine.repository.sqlite.stored import StoredRow

_COMMITS_AT_ONCE = 64
_EXAMPLES = 3


def check_sqlite(repository: SqliteRepository, report: IntegrityReport, progress: Progress) -> None:
    try:
        report.head_commit_id = repository.head_commit_id()
    except IntegrityError as error:
        report.note("chain", "unreadable_head", str(error))
        return
    with repository.reading("verify") as connection:
        if connection is None:
            return
        pragma = "integrity_check" if report.deep else "quick_check"
        for (answer,) in connection.execute(f"PRAGMA {pragma}(100)"):
            if answer != "ok":
                report.note("database", "damaged", str(answer), key=repository.path)
        try:
            specs = repository.known_types()
        except IntegrityError as error:
            report.note("database", "unreadable_schema", str(error))
            return
        written = _check_commits(connection, report)
        for spec in specs:
            _check_counts(repository, connection, spec, written, report)
        _check_tags(connection, report)
    if report.deep:
        _check_rows(repository, report, progress)


def _check_tags(connection: sqlite3.Connection, report: IntegrityReport) -> None:
    try:
        tags = sqlite_tags.stored_tags(connection)
    except IntegrityError as error:
        report.note("tag", "unreadable_tag", str(error))
        return
    for tag in tags:
        report.checked["tags"] += 1
        if tag.commit_id > report.head_commit_id:
            message = f"{tag.name} names commit {tag.commit_id}, which is not there"
            report.note("tag", "wrong_commit", message)


def _check_commits(
    connection: sqlite3.Connection, report: IntegrityReport
) -> dict[tuple[str, str, int], int]:
    """The chain; rows that each commit says it wrote, by kind, type and commit."""
    written: dict[tuple[str, str, int], int] = {}
    before: datetime | None = None
    rows = connection.execute(
        "SELECT id, parent_id, created_at, types, metadata FROM commits ORDER BY id"
    )
    for expected, (number, parent, created_at, types, metadata) in enumerate(rows, start=1):
        report.checked["commits"] += 1
        if number != expected:
            report.note("chain", "broken_chain", f"commit {expected} is missing", commit_id=number)
            break
        if parent != (number - 1 or None):
            message = f"names parent {parent}, should be {number - 1 or None}"
            report.note("chain", "wrong_parent", message, commit_id=number)
        place = StoredRow("commits", number)
        try:
            created = place.instant("created_at", created_at)
            changes = place.changes("types", types)
            place.texts("metadata", metadata)
        except IntegrityError as error:
            report.note("chain", "unreadable_commit", str(error), commit_id=number)
            continue
        if before is not None and created < before:
            report.note("chain", "time_goes_back", "is older than its parent", commit_id=number)
        before = created
        for change in changes:
            written[change.kind, change.type_name, number] = change.inserted + change.updated
    return written


def _check_counts(
    repository: SqliteRepository,
    connection: sqlite3.Connection,
    spec: TypeSpec,
    written: Mapping[tuple[str, str, int], int],
    report: IntegrityReport,
) -> None:
    counted: dict[int, int] = {}
    for table in repository.all_tables(connection, *spec.ref):
        rows = connection.execute(
            f"SELECT h.commit_id, COUNT(*) FROM main.{quoted(table.name)} AS h "
            f"WHERE {table.of_type('h')} GROUP BY h.commit_id",
            table.parameters,
        )
        for number, count in rows:
            if isinstance(number, int):
                counted[number] = counted.get(number, 0) + count
            else:
                message = f"{count} rows have {number!r} for a commit"
                report.note("rows", "rows_differ", message, type_name=spec.name)
    expected = {
        number: n for (kind, name, number), n in written.items() if (kind, name) == spec.ref
    }
    report.checked["rows"] += sum(counted.values())
    for number in sorted({*expected, *counted}):
        if expected.get(number, 0) != counted.get(number, 0):
            message = f"{counted.get(number, 0)} rows, the commit says {expected.get(number, 0)}"
            report.note("rows", "rows_differ", message, commit_id=number, type_name=spec.name)


def _check_rows(repository: SqliteRepository, report: IntegrityReport, progress: Progress) -> None:
    """Every row decodes to its declared columns; the ends of relations are there."""
    specs = repository.known_types()
    keys: dict[str, set[str]] = {}
    for number, spec in enumerate(sorted(specs, key=lambda s: s.kind)):  # entities come first
        progress("types", number, len(specs))
        ends: dict[str, set[str]] = {"left": set(), "right": set()}
        mine = keys.setdefault(spec.name, set()) if spec.kind == "entity" else set()
        for since in range(0, report.head_commit_id, _COMMITS_AT_ONCE):
            window = ReadWindow(history=True, since=since, as_of=since + _COMMITS_AT_ONCE)
            try:
                rows = repository.read(spec, window)
            except (OntologiaError, ValueError, TypeError) as error:
                report.note("rows", "schema_mismatch", str(error), type_name=spec.name)
                continue
            for field in spec.fields:
                nulls = rows.column(field.name).null_count
                if nulls and not field.nullable:
                    message = f"{nulls} rows: {field.name} is null and may not be"
                    report.note("rows", "null_value", message, type_name=spec.name)
            if spec.kind == "entity":
                mine.update(rows.column("entity_key").to_pylist())
            else:
                for side, named in ends.items():
                    named.update(rows.column(f"{side}_key").to_pylist())
        for side, named in ends.items():
            name = str(spec.left if side == "left" else spec.right)
            missing = sorted(named - keys.get(name, set()))
            if missing:
                concerned = _concerned(repository, spec, f"{side}_key", missing, report)
                message = missing_ends(side, name, len(missing), concerned, missing[:_EXAMPLES])
                report.note("endpoints", "missing_endpoint", message, type_name=spec.name)


def _concerned(
    repository: SqliteRepository,
    spec: TypeSpec,
    column: str,
    keys: list[str],
    report: IntegrityReport,
) -> int:
    """How many relations have one of these keys; read again, as only few storages have any."""
    relations: set[tuple[str, ...]] = set()
    wanted = pa.array(keys, pa.string())
    for since in range(0, report.head_commit_id, _COMMITS_AT_ONCE):
        window = ReadWindow(history=True, since=since, as_of=since + _COMMITS_AT_ONCE)
        rows = repository.read(spec, window)
        rows = rows.filter(pc.is_in(rows.column(column), value_set=wanted))
        relations.update(zip(*(rows.column(c).to_pylist() for c in spec.identity), strict=True))
    return len(relations)
