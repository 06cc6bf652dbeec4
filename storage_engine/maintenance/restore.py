"""Going back, forwards: a new commit that makes the state of an older one the latest.

Each identity whose latest row differs from its row back then gets the old row as a new version.
History stays, and identities that came later stay too, because nothing is ever deleted; a plan
names them. Rows are found in files by DuckDB, or in SQLite by the repository's own reads, and
stream through the ordinary commit, so memory is bounded and a crash leaves a whole commit or none;
done again, nothing is left to do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog.type_heads import LiveTypes
from storage_engine.errors import (
    ExpectedVersionMismatchError,
    HeadMismatchError,
    SchemaMetadataError,
    SchemaOutdatedError,
)
from storage_engine.maintenance.rows import current_entries, stored_types, versions_of
from storage_engine.model.columns import row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.query.dialects import quoted
from storage_engine.query.reference import Reference
from storage_engine.repository.protocol import (
    LATEST,
    CommitRequest,
    CommitResult,
    ReadWindow,
    Repository,
    TypeInput,
)

if TYPE_CHECKING:
    import duckdb

    from storage_engine.repository.object.engine import ObjectRepository

_BATCH_ROWS = 64 * 1024
_KEYS_AT_ONCE = 10_000
_COMMITS_AT_ONCE = 64


class ObjectRows:
    """An object storage as of the head at hand, resolved from the log."""

    def __init__(self, repository: ObjectRepository) -> None:
        self._repository = repository
        self._head = repository.chain.read_head().head
        self.head_commit_id = self._head.commit_id

    def types(self) -> list[tuple[TypeSpec, int]]:
        heads = self._repository.chain.type_heads_at(self._head)
        specs = stored_types(self._repository, self._head)
        unknown = sorted(LiveTypes(heads) - {spec.ref for spec in specs})
        if unknown:
            names = ", ".join(name for _, name in unknown)
            raise SchemaMetadataError(
                f"the log does not say what {names} looks like, as its first writer did not "
                "record schemas: commit a change with the class once, then restore"
            )
        return [(spec, heads[spec.ref].commit_id) for spec in specs]

    def differing(self, spec: TypeSpec, commit_id: int) -> int:
        with self._versions(spec) as cursor:
            counted = cursor.execute(
                f"SELECT count(*) FROM ({_differing(spec)})", {"at": commit_id}
            ).fetchone()
            return int(counted[0]) if counted else 0

    def created_after(
        self, spec: TypeSpec, commit_id: int, limit: int
    ) -> tuple[int, list[tuple[str, ...]]]:
        keys = _keys(spec)
        later = f"SELECT {keys} FROM versions GROUP BY {keys} HAVING min(commit_id) > $at"
        with self._versions(spec) as cursor:
            counted = cursor.execute(f"SELECT count(*) FROM ({later})", {"at": commit_id})
            total = counted.fetchone()
            shown = cursor.execute(
                f"{later} ORDER BY {keys} LIMIT {int(limit)}", {"at": commit_id}
            ).fetchall()
        return int(total[0]) if total else 0, [tuple(row) for row in shown]

    @contextmanager
    def old_rows(self, spec: TypeSpec, commit_id: int) -> Iterator[Iterator[pa.RecordBatch]]:
        schema = row_schema(spec)
        with self._versions(spec) as cursor:
            rows = cursor.execute(_differing(spec), {"at": commit_id})
            reader = rows.to_arrow_reader(_BATCH_ROWS)
            tables = (pa.Table.from_batches([batch]).cast(schema) for batch in reader)
            yield (batch for table in tables for batch in table.to_batches())

    def _versions(self, spec: TypeSpec) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        entries = current_entries(self._repository, self._head, spec)
        return versions_of(self._repository, spec, entries)


def _keys(spec: TypeSpec) -> str:
    return ", ".join(quoted(name) for name in spec.identity)


def _differing(spec: TypeSpec) -> str:
    """Rows as of $at whose identity has another row now. Joins and narrow groups: they spill."""
    keys = _keys(spec)
    columns = ", ".join(f"o.{quoted(name)}" for name in row_schema(spec).names)
    differs = " OR ".join(
        f"o.{quoted(f.name)} IS DISTINCT FROM n.{quoted(f.name)}" for f in spec.fields
    )
    return f"""
        WITH newest AS (
            SELECT {keys}, max(commit_id) AS now, max(commit_id) FILTER (commit_id <= $at) AS old
            FROM versions GROUP BY {keys} HAVING max(commit_id) > $at AND min(commit_id) <= $at
        )
        SELECT {columns}
        FROM newest k
        JOIN versions o ON {_same(spec, "o")} AND o.commit_id = k.old
        JOIN versions n ON {_same(spec, "n")} AND n.commit_id = k.now
        WHERE {differs or "false"}
    """


def _same(spec: TypeSpec, alias: str) -> str:
    return " AND ".join(f"{alias}.{quoted(n)} = k.{quoted(n)}" for n in spec.identity)


class SqliteRows:
    """A SQLite storage, read in slices of commits and keys."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.head_commit_id = repository.head_commit_id()

    def types(self) -> list[tuple[TypeSpec, int]]:
        return [(s, self._repository.type_head(s)) for s in self._repository.known_types()]

    def differing(self, spec: TypeSpec, commit_id: int) -> int:
        return sum(rows.num_rows for rows in self._differing(spec, commit_id))

    def created_after(
        self, spec: TypeSpec, commit_id: int, limit: int
    ) -> tuple[int, list[tuple[str, ...]]]:
        total = 0
        shown: list[tuple[str, ...]] = []
        for keys in self._changed(spec, commit_id):
            old = _identities(
                spec, self._repository.read(spec, ReadWindow(as_of=commit_id), keys=keys)
            )
            later = sorted(_identities(spec, keys) - old)
            total += len(later)
            shown += later[: max(0, limit - len(shown))]
        return total, shown

    @contextmanager
    def old_rows(self, spec: TypeSpec, commit_id: int) -> Iterator[Iterator[pa.RecordBatch]]:
        """Spooled to a file first: while it is committed, the only connection may be in use."""
        schema = row_schema(spec)
        with tempfile.TemporaryDirectory(prefix="ontologia-restore-") as folder:
            path = Path(folder) / "rows.arrow"
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for rows in self._differing(spec, commit_id):
                    writer.write_table(rows)
            with pa.memory_map(str(path)) as source:
                reader = pa.ipc.open_file(source)
                yield (reader.get_batch(n) for n in range(reader.num_record_batches))

    def _differing(self, spec: TypeSpec, commit_id: int) -> Iterator[pa.Table]:
        names = row_schema(spec).names
        for keys in self._changed(spec, commit_id):
            old = self._repository.read(spec, ReadWindow(as_of=commit_id), keys=keys).select(names)
            if not old.num_rows:
                continue
            # Both come ordered by identity; every identity of then is still there.
            now = self._repository.read(spec, LATEST, keys=old.select(list(spec.identity)))
            same = None
            for field in spec.fields:
                equal = _equal(old.column(field.name), now.column(field.name))
                same = equal if same is None else pc.and_(same, equal)
            if same is not None:
                yield old.filter(pc.invert(same))

    def _changed(self, spec: TypeSpec, commit_id: int) -> Iterator[pa.Table]:
        """Identities with a version since, each once, some thousands at a time."""
        columns = list(spec.identity)
        seen: set[tuple[str, ...]] = set()
        for since in range(commit_id, self.head_commit_id, _COMMITS_AT_ONCE):
            window = ReadWindow(history=True, since=since, as_of=since + _COMMITS_AT_ONCE)
            seen |= _identities(spec, self._repository.read(spec, window))
        ordered = sorted(seen)
        for start in range(0, len(ordered), _KEYS_AT_ONCE):
            chunk = ordered[start : start + _KEYS_AT_ONCE]
            yield pa.table(
                [pa.array(values, pa.string()) for values in zip(*chunk, strict=True)],
                names=columns,
            )


def _identities(spec: TypeSpec, rows: pa.Table) -> set[tuple[str, ...]]:
    return set(zip(*(rows.column(name).to_pylist() for name in spec.identity), strict=True))


def _equal(left: pa.ChunkedArray, other: pa.ChunkedArray) -> pa.ChunkedArray:
    """NULL equals NULL."""
    both_null = pc.and_(pc.is_null(left), pc.is_null(other))
    return pc.or_(pc.fill_null(pc.equal(left, other), False), both_null)


_ATTEMPTS = 5
EXAMPLES = 20


@dataclass(frozen=True, slots=True)
class TypeRestore:
    """What restoring does to one type."""

    kind: str
    type_name: str
    restored: int  # identities that get their old row back
    created_after: int  # identities that came later, and stay
    examples: tuple[tuple[str, ...], ...] = ()  # of the latter, by identity

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "type_name": self.type_name,
            "restored": self.restored,
            "created_after": self.created_after,
            "examples": [list(identity) for identity in self.examples],
        }


@dataclass(frozen=True, slots=True)
class Restore:
    """A plan, or (with `applied`) what was done; `new_commit_id` is None when nothing differed."""

    uri: str
    reference: str
    commit_id: int
    head_commit_id: int
    types: tuple[TypeRestore, ...]
    applied: bool = False
    new_commit_id: int | None = None
    notes: tuple[str, ...] = ()  # of that commit

    @property
    def restored(self) -> int:
        return sum(item.restored for item in self.types)

    @property
    def created_after(self) -> int:
        return sum(item.created_after for item in self.types)

    def as_dict(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "reference": self.reference,
            "commit_id": self.commit_id,
            "head_commit_id": self.head_commit_id,
            "applied": self.applied,
            "new_commit_id": self.new_commit_id,
            "restored": self.restored,
            "created_after": self.created_after,
            "types": [item.as_dict() for item in self.types],
            "notes": list(self.notes),
        }


class RestoreSource(Protocol):
    """The rows of a storage as of one head, as restoring needs them."""

    head_commit_id: int

    def types(self) -> list[tuple[TypeSpec, int]]:
        """Every type with the commit that last changed it."""

    def differing(self, spec: TypeSpec, commit_id: int) -> int:
        """How many identities have another row now than as of the commit."""

    def created_after(
        self, spec: TypeSpec, commit_id: int, limit: int
    ) -> tuple[int, list[tuple[str, ...]]]:
        """How many identities came later, and the first of them."""

    def old_rows(
        self, spec: TypeSpec, commit_id: int
    ) -> AbstractContextManager[Iterator[pa.RecordBatch]]:
        """Those rows as they were."""


def restore(
    repository: Repository,
    reference: Reference,
    *,
    apply: bool = False,
    examples: int = EXAMPLES,
) -> Restore:
    """Plan what a restore would do, or do it.

    Raises UnknownTagError or ConfigurationError for a reference that means no commit, and
    SchemaOutdatedError when a type has been migrated to another schema version since; beside
    writers that come first each time, HeadMismatchError, and nothing was published.
    """
    commit_id = repository.require_commit(reference)
    for _ in range(_ATTEMPTS):
        with _rows(repository) as rows:
            _check_versions(repository, commit_id)
            plan = _plan(repository, rows, reference, commit_id, examples)
            if not apply:
                return plan
            try:
                made = _commit(repository, rows, plan, reference)
            except ExpectedVersionMismatchError:
                continue  # another commit came first: look again at what differs
        return Restore(
            plan.uri,
            plan.reference,
            plan.commit_id,
            plan.head_commit_id,
            plan.types,
            applied=True,
            new_commit_id=made.commit_id if made is not None else None,
            notes=tuple(made.notes) if made is not None else (),
        )
    raise HeadMismatchError(_ATTEMPTS)


def _plan(
    repository: Repository, rows: RestoreSource, reference: Reference, commit_id: int, examples: int
) -> Restore:
    types = []
    for spec, last in rows.types():
        if last <= commit_id:
            continue  # nothing of it changed since
        count, shown = rows.created_after(spec, commit_id, examples)
        differing = rows.differing(spec, commit_id)
        if count or differing:
            types.append(TypeRestore(*spec.ref, differing, count, tuple(shown)))
    return Restore(repository.uri, str(reference), commit_id, rows.head_commit_id, tuple(types))


def _commit(
    repository: Repository, rows: RestoreSource, plan: Restore, reference: Reference
) -> CommitResult | None:
    touched = {(item.kind, item.type_name) for item in plan.types if item.restored}
    if not touched:
        return None
    types = rows.types()
    metadata = {"restored_from": str(plan.commit_id)}
    if not isinstance(reference, int):
        metadata["restored_ref"] = str(reference)
    inputs = [
        TypeInput(spec, stream=_stream(rows, spec, plan.commit_id))
        for spec, _ in types
        if spec.ref in touched
    ]
    # All types are expected to stand as they were looked at, those that need nothing as well.
    expect = {spec.ref: last for spec, last in types}
    return repository.commit(
        CommitRequest(inputs, metadata=metadata, expect=expect, holder={"operation": "restore"})
    )


def _stream(rows: RestoreSource, spec: TypeSpec, commit_id: int) -> Iterator[pa.RecordBatch]:
    with rows.old_rows(spec, commit_id) as batches:
        yield from batches


@contextmanager
def _rows(repository: Repository) -> Iterator[RestoreSource]:
    if (objects := repository.objects) is not None:
        repository.flush()
        yield ObjectRows(objects)
    else:
        yield SqliteRows(repository)


def _check_versions(repository: Repository, commit_id: int) -> None:
    """Rows of older schema versions cannot be compared with those of the new ones."""
    crossed = [
        history
        for history in repository.type_histories().values()
        if (current := history.current) is not None
        and current.activation_commit_id > commit_id
        and (len(history.versions) > 1 or history.renamed_from is not None)
    ]
    if crossed:
        names = ", ".join(history.name for history in crossed)
        last = crossed[0].last
        raise SchemaOutdatedError(
            f"{names} changed schema after commit {commit_id} (at commit "
            f"{last.activation_commit_id}), so its rows of then have other columns: restore "
            "to a commit since, or write the old values with the new class",
            type=crossed[0].name,
            stored_version=last.version,
        )
