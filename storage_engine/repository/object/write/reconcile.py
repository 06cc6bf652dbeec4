"""What a commit request comes to on a given head: refused, applied before, nothing, or deltas.

Evaluating writes nothing. It runs without the lock first, so that the common refusals and no-ops
never take it, and again under the lock for whatever has moved since.

Intent meets latest state in one vectorised join per type, never a query per row. A row is new when
its identity is unknown, changed when any field differs, and otherwise nothing. Values are compared
by `IS DISTINCT FROM`, so NULL equals NULL.

Where others have drafted commits that are to be published with this one, their rows are what it
meets, before those that are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog.chain import Chain, HeadVersion
from storage_engine.commitlog.records import Head, TypeHead, TypeRef
from storage_engine.errors import ConcurrentWriteError, ExpectedVersionMismatchError
from storage_engine.model.arrow import row_schema
from storage_engine.model.columns import distinct_from
from storage_engine.model.spec import TypeSpec
from storage_engine.query.dialects import quoted
from storage_engine.repository.object.commit_history import applied
from storage_engine.repository.object.read.latest import ResidentType, Versions
from storage_engine.repository.object.stored_schema import aligned, check_schema
from storage_engine.repository.protocol import AppliedUnit, CommitRequest, Identity, Snapshot

if TYPE_CHECKING:
    import duckdb

    from storage_engine.repository.object.write.bulk import BulkParts, PartsSource

INSERT_FLAG = "__insert"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome on one head. `applied` is set when the unit of work had been done."""

    version: HeadVersion
    deltas: Mapping[TypeRef, tuple[TypeSpec, Delta]]
    bulk: Mapping[TypeRef, tuple[TypeSpec, BulkParts]]
    register: tuple[TypeSpec, ...] = ()
    applied: AppliedUnit | None = None

    @property
    def empty(self) -> bool:
        return not self.deltas and not self.bulk


class DraftedRows(Protocol):
    """What the drafts before this one have written, by type."""

    @property
    def stored(self) -> Head:
        """The head that all of them build on."""

    def of(self, ref: TypeRef) -> ResidentType | None: ...


class Evaluator:
    """Evaluates one request, keeping what stays true from one head to the next."""

    def __init__(
        self,
        chain: Chain,
        versions: Versions,
        request: CommitRequest,
        bulk: Mapping[TypeRef, PartsSource],
        check_log: Callable[[Head], None],
    ) -> None:
        """`check_log` refuses a head that this engine may not write after."""
        self._chain = chain
        self._check_log = check_log
        self._versions = versions
        self._request = request
        self._bulk = bulk
        self._deltas: dict[TypeRef, tuple[TypeHead | None, Delta]] = {}  # as of the type's head

    def evaluate(self, version: HeadVersion, drafted: DraftedRows | None = None) -> Evaluation:
        """On a head; with `drafted`, on one that is not stored, of which these are the rows that
        the store does not have."""
        head = version.head
        request = self._request
        self._check_log(head)
        if request.idempotency is not None:
            earlier = applied(self._chain, head, request.idempotency)
            if earlier is not None:
                return Evaluation(version, {}, {}, applied=earlier)
        heads = self._chain.type_heads_at(head)
        self._check_expected(heads)
        stored = drafted.stored if drafted is not None else head
        stored_heads = self._chain.type_heads_at(stored) if drafted is not None else heads
        deltas: dict[TypeRef, tuple[TypeSpec, Delta]] = {}
        parts: dict[TypeRef, tuple[TypeSpec, BulkParts]] = {}
        register = []
        for item in request.inputs:
            spec, top = item.spec, heads.get(item.spec.ref)
            if check_schema(self._chain, head, spec, top):
                register.append(spec)
            spec = aligned(self._chain, head, spec, top)
            if item.table is not None:
                intents = item.table.select(row_schema(spec).names)
                newer = drafted.of(spec.ref) if drafted is not None else None
                try:
                    delta = self._delta(spec, stored, stored_heads.get(spec.ref), intents)
                except ConcurrentWriteError as error:
                    if newer is not None:
                        self._refuse_both(error, spec, newer, intents)
                    raise
                if newer is not None:
                    delta = self._over_drafted(spec, newer, intents, delta)
                if delta.rows.num_rows:
                    deltas[spec.ref] = (spec, delta)
            else:
                bulk_parts = self._bulk[spec.ref].parts(head, top, snapshot=self._refusing())
                if bulk_parts.rows:
                    parts[spec.ref] = (spec, bulk_parts)
        changed = {*deltas, *parts}
        return Evaluation(
            version, deltas, parts, tuple(spec for spec in register if spec.ref in changed)
        )

    def _delta(self, spec: TypeSpec, head: Head, top: TypeHead | None, intents: pa.Table) -> Delta:
        if (earlier := self._deltas.get(spec.ref)) is not None and earlier[0] == top:
            return earlier[1]
        if top is None:
            delta = all_new(spec, intents)
        else:
            delta = self._against_stored(spec, head, intents, as_of=top.commit_id)
        self._deltas[spec.ref] = (top, delta)
        return delta

    def _against_stored(
        self, spec: TypeSpec, head: Head, intents: pa.Table, *, as_of: int
    ) -> Delta:
        snapshot = self._request.snapshot
        if snapshot is not None and not snapshot.concerns(spec.ref, as_of):
            snapshot = None  # nothing of this type was changed since by somebody else
        since = snapshot.since(spec.ref) if snapshot is not None else as_of
        resident = self._versions.resident(spec, head, keys=intents)
        if resident is not None:
            return _against_rows(spec, resident, intents, snapshot, since)

        def compare() -> Delta:
            with self._versions.open(spec, head, intents, intents=intents) as stored:
                if snapshot is not None and snapshot.refuses:
                    snapshot.check(spec.ref, changed_since(stored.cursor, spec, since))
                delta = reconcile(stored.cursor, spec, unique=stored.unique)
                if snapshot is not None and delta.updated:
                    later = changed_since(stored.cursor, spec, since)
                    written = {*zip(*map(_values, delta.rows.select(spec.identity)), strict=True)}
                    delta = replace(
                        delta,
                        overtaken=tuple(
                            change
                            for change in snapshot.changed(spec.ref, later)
                            if change[0] in written
                        ),
                    )
                return delta

        return self._versions.duck.within_memory(
            intents.nbytes, compare, columns=2 * len(row_schema(spec))
        )

    def _over_drafted(
        self, spec: TypeSpec, newer: ResidentType, intents: pa.Table, delta: Delta
    ) -> Delta:
        """A delta against what is stored, corrected where a draft has written the identity."""
        met = pc.is_valid(newer.positions(intents))
        if not pc.any(met).as_py():
            return delta
        snapshot = self._request.snapshot
        if snapshot is not None and not snapshot.concerns(spec.ref, newer.upto):
            snapshot = None
        since = snapshot.since(spec.ref) if snapshot is not None else newer.upto
        again = _against_rows(spec, newer, intents.filter(met), snapshot, since)
        return delta.without(newer).joined(spec, again)

    def _refuse_both(
        self, error: ConcurrentWriteError, spec: TypeSpec, newer: ResidentType, intents: pa.Table
    ) -> None:
        """Name what drafts have changed beside what was found to be stored."""
        snapshot = self._request.snapshot
        assert snapshot is not None
        changed = {
            identity if isinstance(identity, tuple) else (identity,)
            for identity in error.identities
        }
        later = resident_changed_since(newer, intents, snapshot.since(spec.ref))
        changed |= {identity for identity, _ in snapshot.changed(spec.ref, later)}
        stated = zip(*map(_values, intents.select(spec.identity)), strict=True)
        snapshot.check(spec.ref, ((each, newer.upto) for each in stated if each in changed))

    def _refusing(self) -> Snapshot | None:
        """Bulk rows are compared with what others did only where that is asked for."""
        snapshot = self._request.snapshot
        return snapshot if snapshot is not None and snapshot.refuses else None

    def _check_expected(self, heads: Mapping[TypeRef, TypeHead]) -> None:
        for (kind, name), expected in self._request.expect.items():
            top = heads.get((kind, name))
            actual = top.changed_by if top is not None else 0
            if actual != expected:
                raise ExpectedVersionMismatchError(type=name, expected=expected, actual=actual)


@dataclass(frozen=True, slots=True)
class Delta:
    """The rows that a commit must write, which of them are new, and which of the others somebody
    else has changed since the writer knew them (with the commits that did)."""

    rows: pa.Table
    new: pa.ChunkedArray  # for each row
    overtaken: tuple[tuple[Identity, int], ...] = ()

    @property
    def inserted(self) -> int:
        return pc.sum(self.new).as_py() or 0

    @property
    def updated(self) -> int:
        return int(self.rows.num_rows) - self.inserted

    def without(self, rows: ResidentType) -> Delta:
        """Without the identities that are in `rows`."""
        kept = pc.is_null(rows.positions(self.rows))
        gone = {*rows.identities(self.rows.filter(pc.invert(kept)))}
        overtaken = [
            change
            for change in self.overtaken
            if (change[0] if len(change[0]) > 1 else change[0][0]) not in gone
        ]
        return Delta(self.rows.filter(kept), self.new.filter(kept), tuple(overtaken))

    def joined(self, spec: TypeSpec, other: Delta) -> Delta:
        """With the rows of another, which has none of ours."""
        rows = pa.concat_tables([self.rows, other.rows])
        new = pa.chunked_array([*self.new.chunks, *other.new.chunks], pa.bool_())
        ordered = _ordered(spec, rows, new)
        return replace(ordered, overtaken=tuple(sorted([*self.overtaken, *other.overtaken])))


def delta_sql(spec: TypeSpec, *, unique: bool, only: str | None = None) -> str:
    """New and changed rows of `intents` against `versions`, with an insert flag.

    Only joins and a narrow GROUP BY: these spill, where a window over whole rows would not.
    `unique`: no identity has two versions, so all of them are the latest. `only`: a condition on
    changed rows `i` and the latest ones `l`, under which they replace them.
    """
    names = row_schema(spec).names
    keys = ", ".join(quoted(name) for name in spec.identity)
    columns = ", ".join(f"i.{quoted(name)}" for name in names)
    changed = " OR ".join(
        f"i.{quoted(f.name)} IS DISTINCT FROM l.{quoted(f.name)}" for f in spec.fields
    )
    if changed and only is not None:
        changed = f"({changed}) AND {only}"
    newest = f"""
        SELECT {keys}, max(commit_id) AS commit_id
        FROM versions SEMI JOIN intents USING ({keys}) GROUP BY {keys}
    """
    latest = f"FROM versions SEMI JOIN ({newest}) USING ({keys}, commit_id)"
    return f"""
        WITH latest AS ({"FROM versions" if unique else latest})
        SELECT {columns}, l.commit_id IS NULL AS {INSERT_FLAG}
        FROM intents i LEFT JOIN latest l USING ({keys})
        WHERE l.commit_id IS NULL{f" OR {changed}" if changed else ""}
    """


def reconcile(cursor: duckdb.DuckDBPyConnection, spec: TypeSpec, *, unique: bool) -> Delta:
    """The delta of the registered table `intents`, in memory, ordered by identity."""
    order = ", ".join(quoted(name) for name in spec.identity)
    flagged = cursor.execute(f"{delta_sql(spec, unique=unique)} ORDER BY {order}").to_arrow_table()
    return split(spec, flagged)


def reconcile_resident(spec: TypeSpec, resident: ResidentType, intents: pa.Table) -> Delta:
    """The same against rows in memory, without the cost of planning a query."""
    positions = resident.positions(intents)
    stored = resident.rows_at(positions)
    unknown = pc.is_null(positions)
    write = unknown
    for field in spec.fields:
        write = pc.or_(write, distinct_from(intents.column(field.name), stored.column(field.name)))
    return _ordered(spec, intents.filter(write), pa.chunked_array([unknown]).filter(write))


def resident_changed_since(
    resident: ResidentType, intents: pa.Table, since: int
) -> Iterator[tuple[Identity, int]]:
    """As `changed_since`, of rows in memory."""
    stored = resident.rows_at(resident.positions(intents))
    later = pc.fill_null(pc.greater(stored.column("commit_id"), since), False)
    commit_ids = stored.column("commit_id").filter(later).to_pylist()
    for identity, commit_id in zip(
        resident.identities(intents.filter(later)), commit_ids, strict=True
    ):
        yield identity if isinstance(identity, tuple) else (identity,), commit_id


def _values(column: pa.ChunkedArray) -> list[str]:
    return column.to_pylist()  # type: ignore[no-any-return]


def all_new(spec: TypeSpec, rows: pa.Table) -> Delta:
    """Nothing is stored yet: every row is an insert."""
    return _ordered(spec, rows, pa.chunked_array([pa.repeat(pa.scalar(True), rows.num_rows)]))


def split(spec: TypeSpec, flagged: pa.Table) -> Delta:
    """Take the insert flag off a delta."""
    rows = flagged.select(row_schema(spec).names).cast(row_schema(spec))
    return Delta(rows, flagged.column(INSERT_FLAG))


def _ordered(spec: TypeSpec, rows: pa.Table, new: pa.ChunkedArray) -> Delta:
    """By identity."""
    if rows.num_rows < 2:
        return Delta(rows, new)
    order = pc.sort_indices(rows, [(name, "ascending") for name in spec.identity])
    return Delta(rows.take(order), new.take(order))


def _against_rows(
    spec: TypeSpec,
    stored: ResidentType,
    intents: pa.Table,
    snapshot: Snapshot | None,
    since: int,
) -> Delta:
    """Against rows in memory; refuses, or notes, what `snapshot` finds changed after `since`."""
    if snapshot is not None and snapshot.refuses:
        snapshot.check(spec.ref, resident_changed_since(stored, intents, since))
    delta = reconcile_resident(spec, stored, intents)
    if snapshot is None:
        return delta
    later = resident_changed_since(stored, delta.rows, since)
    return replace(delta, overtaken=tuple(snapshot.changed(spec.ref, later)))


def changed_since(
    cursor: duckdb.DuckDBPyConnection, spec: TypeSpec, since: int
) -> Iterator[tuple[Identity, int]]:
    """Identities of `intents` that have a version later than `since`, with the latest such."""
    keys = ", ".join(quoted(name) for name in spec.identity)
    rows = cursor.execute(
        f"SELECT {keys}, max(commit_id) FROM versions v SEMI JOIN intents i USING ({keys}) "
        f"WHERE v.commit_id > ? GROUP BY {keys} ORDER BY {keys}",
        [since],
    )
    while (row := rows.fetchone()) is not None:
        yield row[:-1], row[-1]
