"""Rows of one type through its schema versions, for the change feed and for `diff`: as they were
stored, brought up to the latest version, and compared across a migration.

Where rows cannot be brought up, nothing is raised: they are told as they were stored, and say why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.errors import MigrationError, MissingUpgraderError
from storage_engine.model.arrow import row_schema
from storage_engine.model.expressions import Comparison, Filter, In, Operand
from storage_engine.model.spec import TypeSpec
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.protocol import Identity, ReadWindow, Repository
from storage_engine.schema.lineage import Lineage, Stage
from storage_engine.schema.migration import is_same
from storage_engine.schema.rewrite import Rewrite
from storage_engine.schema.upgraders import Upgrader, UpgraderKey

Change = dict[str, Any]
Failed = Mapping[Identity, str]  # why a row could not be brought up


@dataclass(frozen=True)
class ComparedRows:
    """New rows beside old ones: for each the place of the old one, None where there is none, and
    whether it differs. `failed` has the identities that no upgrader could bring up, and why."""

    new: pa.Table
    old: pa.Table
    places: Sequence[int | None]
    changed: pa.Array
    failed: Failed

    def numbers(self) -> list[int]:
        """The rows that differ."""
        return [n for n, differs in enumerate(self.changed.to_pylist()) if differs]


@dataclass(frozen=True)
class TypeLine:
    """A type from its creation on, with its present form."""

    repository: Repository
    line: Lineage
    upgraders: Mapping[UpgraderKey, Upgrader]
    declared: TypeSpec | None = None

    @cached_property
    def final(self) -> TypeSpec:
        return self.line.final(self._declared)

    @property
    def _declared(self) -> TypeSpec | None:
        fits = self.declared is not None and is_same(self.line.last.spec, self.declared)
        return self.declared if fits else None

    @property
    def name(self) -> str:
        return self.line.last.ref[1]

    @property
    def simple(self) -> bool:
        """Whether there is nothing beside the current version."""
        return len(self.line.stages) == 1 and self.line.last.until is None

    def asked(self, stage: Stage, when: When, **terms: Any) -> QuerySpec:
        """A question about the rows of one stage."""
        version = None if self.simple else stage.number
        limited = When(when.as_of, when.history, when.since, version)
        return QuerySpec(stage.spec, when=limited, **terms)

    # --- rows as changes ------------------------------------------------------------------------

    def described(self, stage: Stage, table: pa.Table) -> list[Change]:
        """Rows as commit, type, identity and fields, brought up where that is possible."""
        try:
            upgrade = self._upgrade(stage)
        except MissingUpgraderError as error:
            return self._as_stored(stage, table, str(error))
        if upgrade is None:
            return described(self.final, self.name, table)
        try:
            return described(self.final, self.name, _with_commits(table, upgrade))
        except MigrationError:
            return [change for row in _singly(table) for change in self._one(stage, row, upgrade)]

    def _one(self, stage: Stage, row: pa.Table, upgrade: Rewrite) -> list[Change]:
        try:
            return described(self.final, self.name, _with_commits(row, upgrade))
        except MigrationError as error:
            return self._as_stored(stage, row, str(error))

    def _as_stored(self, stage: Stage, table: pa.Table, reason: str) -> list[Change]:
        changes = described(stage.spec, self.name, table)
        for change in changes:
            change |= {"schema_version": stage.number, "not_upgraded": reason}
        return changes

    def upgraded(self, stage: Stage, table: pa.Table) -> tuple[pa.Table, Failed]:
        """Rows in their present form, and those that no upgrader can bring there;
        MissingUpgraderError where nothing leads up from the stage."""
        upgrade = self._upgrade(stage)
        return (table, {}) if upgrade is None else _brought_up(table, upgrade, self.final)

    def _upgrade(self, stage: Stage) -> Rewrite | None:
        """None: the rows are what they are."""
        if stage is self.line.last:
            return None
        return self.line.rewrite(stage, self.upgraders, self._declared)

    # --- across migrations ----------------------------------------------------------------------

    def compared(self, stage: Stage, new: pa.Table, before: Stage, commit_id: int) -> ComparedRows:
        """Rows of a stage, ordered by identity, beside those that an earlier stage had as of a
        commit, brought up to the same version. MissingUpgraderError where nothing leads up."""
        line = self.line.upto(stage)
        declared = self._declared if stage is self.line.last else None
        upgrade = line.rewrite(before, self.upgraders, declared)
        stored = self.within(before, commit_id, new)
        old, failed = _brought_up(stored, upgrade, stage.spec)
        places = _places(stage.spec.identity, new, old)
        fields = [field.name for field in stage.spec.fields]
        return ComparedRows(new, old, places, _changed(new, old, places, fields), failed)

    def within(self, stage: Stage, commit_id: int, rows: pa.Table) -> pa.Table:
        """What a stage had as of a commit between the first and the last of these identities."""
        column = stage.spec.identity[0]
        keys = rows.column(column)
        place = _key(stage.spec, column)
        span = Comparison(place, ">=", keys[0].as_py()) & Comparison(place, "<=", keys[-1].as_py())
        return self._table(stage, When(as_of=commit_id), where=span)

    def stored(self, stage: Stage, commit_id: int, identities: Sequence[Identity]) -> set[Identity]:
        """Which of these a stage had as of a commit: none before its first, which needs no read, as
        in a feed from the beginning of many types."""
        if not identities or commit_id < stage.since:
            return set()
        if self.simple:
            names = list(self.final.identity)
            columns = [pa.array(each, pa.string()) for each in zip(*identities, strict=True)]
            keys = pa.table(columns, names=names)
            window = ReadWindow(as_of=commit_id)
            return _identities(self.final, self.repository.read(self.final, window, keys=keys))
        column = stage.spec.identity[0]
        firsts = tuple(sorted({identity[0] for identity in identities}))
        where = In(_key(stage.spec, column), firsts)
        table = self._table(stage, When(as_of=commit_id), where=where)
        return set(identities) & _identities(stage.spec, table)

    def batches(self, stage: Stage, when: When, upto: int, **terms: Any) -> Iterator[pa.Table]:
        """The rows of a stage, as stored."""
        answer = self.repository.executor(upto).rows(self.asked(stage, when, **terms))
        for batch in answer.batches:
            yield pa.Table.from_batches([batch])

    def _table(self, stage: Stage, when: When, where: Filter | None = None) -> pa.Table:
        answer = self.repository.executor().rows(self.asked(stage, when, where=where))
        return pa.Table.from_batches(answer.batches, schema=answer.schema)


def differing(spec: TypeSpec, new: pa.Table, old: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The new rows that have no old one, or another value in a field, and the old ones of those."""
    places = _places(spec.identity, new, old)
    changed = _changed(new, old, places, [field.name for field in spec.fields])
    numbers = [n for n, differs in enumerate(changed.to_pylist()) if differs]
    there = [place for n in numbers if (place := places[n]) is not None]
    return new.take(pa.array(numbers, pa.int64())), old.take(pa.array(there, pa.int64()))


def described(spec: TypeSpec, name: str, table: pa.Table) -> list[Change]:
    """Rows as commit, type, identity and fields; nested fields as they are in JSON."""
    nested = {field.name for field in spec.fields if field.storage == "json"}
    keys = ("key",) if spec.kind == "entity" else spec.identity
    changes = []
    for row in table.to_pylist():
        change = {"commit_id": row["commit_id"], "kind": spec.kind, "type_name": name}
        change |= {key: row[column] for key, column in zip(keys, spec.identity, strict=True)}
        change["fields"] = {
            field.name: orjson.loads(row[field.name])
            if field.name in nested and row[field.name] is not None
            else row[field.name]
            for field in spec.fields
        }
        changes.append(change)
    return changes


def _with_commits(table: pa.Table, upgrade: Rewrite) -> pa.Table:
    made = upgrade(table.drop_columns(["commit_id"]))
    return made.add_column(0, table.schema.field("commit_id"), table.column("commit_id"))


def _brought_up(table: pa.Table, upgrade: Rewrite, target: TypeSpec) -> tuple[pa.Table, Failed]:
    """The rows that can be brought up to a version, and the others with the reason."""
    failed: dict[Identity, str] = {}
    try:
        return _with_commits(table, upgrade), failed
    except MigrationError:
        pass
    schema = pa.schema([table.schema.field("commit_id"), *row_schema(target)])
    made = [schema.empty_table()]
    for row in _singly(table):
        try:
            made.append(_with_commits(row, upgrade))
        except MigrationError as error:
            identity = tuple(row.column(name)[0].as_py() for name in target.identity)
            failed[identity] = str(error)
    return pa.concat_tables(made), failed


def _singly(table: pa.Table) -> Iterator[pa.Table]:
    for number in range(table.num_rows):
        yield table.slice(number, 1)


def _identities(spec: TypeSpec, table: pa.Table) -> set[Identity]:
    columns = [table.column(name).to_pylist() for name in spec.identity]
    return set(zip(*columns, strict=True))


def _key(spec: TypeSpec, column: str) -> Operand:
    return Operand(spec.ref, column, frozenset({"str"}), identity=column, declared="str")


def _places(identity: Sequence[str], new: pa.Table, old: pa.Table) -> list[int | None]:
    """For each new row the place of the old one of its identity."""
    if new.num_rows == old.num_rows and all(
        new.column(name).equals(old.column(name)) for name in identity
    ):
        return list(range(new.num_rows))
    columns = [old.column(name).to_pylist() for name in identity]
    places = {key: number for number, key in enumerate(zip(*columns, strict=True))}
    wanted = zip(*(new.column(name).to_pylist() for name in identity), strict=True)
    return [places.get(key) for key in wanted]


def _changed(
    new: pa.Table, old: pa.Table, places: Sequence[int | None], fields: Sequence[str]
) -> pa.Array:
    """Whether a row has no old one, or another value in one of the fields."""
    taken = pa.array(places, pa.int64())
    changed = pc.is_null(taken)
    for name in fields:
        before, now = old.column(name).take(taken), new.column(name)
        same = pc.if_else(
            pc.is_null(before), pc.is_null(now), pc.fill_null(pc.equal(before, now), False)
        )
        changed = pc.or_(changed, pc.invert(same))
    return changed.combine_chunks() if isinstance(changed, pa.ChunkedArray) else changed
