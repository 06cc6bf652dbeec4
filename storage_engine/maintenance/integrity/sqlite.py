"""A SQLite storage: the file sound, ids without gaps, rows as the commits say, both ends there."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.errors import IntegrityError, OntologiaError
from storage_engine.maintenance.integrity.data import EXAMPLES, note_missing_ends
from storage_engine.maintenance.integrity.report import IntegrityReport, MissingEnds, Progress
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.sqlite import tags as sqlite_tags
from storage_engine.repository.sqlite.data_table import quoted
from storage_engine.repository.sqlite.engine import SqliteRepository
from storage_engine.repository.sqlite.stored import StoredRow
from storage_engine.repository.sqlite.type_histories import endings
from storage_engine.schema.history import SchemaVersion, TypeHistory, TypeRef
from storage_engine.wording import counted

_COMMITS_AT_ONCE = 64


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
            repository.known_types()
            histories = list(repository.type_histories().values())
            for message in repository.layout_problems(connection):
                report.note("database", "wrong_layout", message)
        except IntegrityError as error:
            report.note("database", "unreadable_schema", str(error))
            return
        purges = {(e.kind, e.name): e.commit_id for e in endings(connection) if e.purged}
        written = _check_commits(connection, report)
        for history in histories:
            _check_counts(repository, connection, history, written, purges, report)
        _check_tags(connection, report)
    if report.deep:
        _check_rows(repository, histories, purges, report, progress)


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
    history: TypeHistory,
    written: Mapping[tuple[str, str, int], int],
    purges: Mapping[TypeRef, int],
    report: IntegrityReport,
) -> None:
    counted: dict[int, int] = {}
    for table in repository.all_tables(connection, *history.ref):
        try:
            rows = connection.execute(
                f"SELECT h.commit_id, COUNT(*) FROM main.{quoted(table.name)} AS h "
                f"WHERE {table.of_type('h')} GROUP BY h.commit_id",
                table.parameters,
            )
        except sqlite3.OperationalError as error:
            report.note("rows", "unreadable_table", str(error), type_name=history.name)
            continue
        for number, count in rows:
            if isinstance(number, int):
                counted[number] = counted.get(number, 0) + count
            else:
                message = f"{count} rows have {number!r} for a commit"
                report.note("rows", "rows_differ", message, type_name=history.name)
    purged = purges.get(history.ref, 0)
    expected = {
        number: n
        for (kind, name, number), n in written.items()
        if (kind, name) == history.ref and number > purged
    }
    report.checked["rows"] += sum(counted.values())
    for number in sorted({*expected, *counted}):
        if expected.get(number, 0) != counted.get(number, 0):
            message = f"{counted.get(number, 0)} rows, the commit says {expected.get(number, 0)}"
            report.note("rows", "rows_differ", message, commit_id=number, type_name=history.name)


def _check_rows(
    repository: SqliteRepository,
    histories: Sequence[TypeHistory],
    purges: Mapping[TypeRef, int],
    report: IntegrityReport,
    progress: Progress,
) -> None:
    """Every row decodes to the columns of its version; the ends of relations are there."""
    keys: dict[str, set[str]] = {}
    for number, history in enumerate(sorted(histories, key=lambda h: h.kind)):  # entities first
        progress("types", number, len(histories))
        mine = keys.setdefault(history.name, set()) if history.kind == "entity" else set()
        ends: dict[tuple[str, str], set[str]] = {}  # side and type: keys
        for version in history.versions:
            spec = version.spec
            for rows in _rows_of(repository, version, report):
                for field in spec.fields:
                    nulls = rows.column(field.name).null_count
                    if nulls and not field.nullable:
                        message = f"{counted(nulls, 'row')}: {field.name} is null and may not be"
                        report.note("rows", "null_value", message, type_name=spec.name)
                if spec.kind == "entity":
                    mine.update(rows.column("entity_key").to_pylist())
                elif history.current is not None:
                    for side, name in (("left", spec.left), ("right", spec.right)):
                        named = ends.setdefault((side, str(name)), set())
                        named.update(rows.column(f"{side}_key").to_pylist())
        for (side, name), named in ends.items():
            missing = sorted(named - keys.get(name, set()))
            if missing and ("entity", name) not in purges:
                concerned = _concerned(repository, history, f"{side}_key", missing, report)
                shown = tuple((key, concerned[key]) for key in missing[:EXAMPLES])
                keyed = history.last.spec.instance_key is not None
                absent = MissingEnds(side, name, len(missing), concerned.total(), shown, keyed)
                note_missing_ends(report, history.name, absent)


def _rows_of(
    repository: SqliteRepository, version: SchemaVersion, report: IntegrityReport
) -> Iterator[pa.Table]:
    """The rows of one schema version, those of some commits at a time; what cannot be read is
    noted."""
    first = version.activation_commit_id
    last = (version.superseded_at_commit_id or report.head_commit_id + 1) - 1
    for since in range(max(first - 1, 0), last, _COMMITS_AT_ONCE):
        upto = min(since + _COMMITS_AT_ONCE, last)
        when = When(history=True, since=since, as_of=upto, schema_version=version.version)
        try:
            answer = repository.executor().rows(QuerySpec(version.spec, when=when))
            yield pa.Table.from_batches(list(answer.batches), schema=answer.schema)
        except (OntologiaError, ValueError, TypeError) as error:
            report.note("rows", "schema_mismatch", str(error), type_name=version.spec.name)


def _concerned(
    repository: SqliteRepository,
    history: TypeHistory,
    column: str,
    keys: list[str],
    report: IntegrityReport,
) -> Counter[str]:
    """How many relations have each of these keys; read again, as only few storages have any."""
    relations: set[tuple[str, ...]] = set()
    wanted = pa.array(keys, pa.string())
    for version in history.versions:
        for rows in _rows_of(repository, version, report):
            chosen = rows.filter(pc.is_in(rows.column(column), value_set=wanted))
            identities = (chosen.column(c).to_pylist() for c in version.spec.identity)
            relations.update(zip(*identities, strict=True))
    place = history.last.spec.identity.index(column)
    return Counter(relation[place] for relation in relations)
