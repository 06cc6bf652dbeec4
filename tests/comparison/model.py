"""What the storages must say, in plain Python: a list of versions, and queries over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa

from storage_engine.model import TypeSpec, row_schema
from storage_engine.model.arrow import objects_to_table
from storage_engine.model.columns import arrow_type
from storage_engine.model.decimals import MAX_PRECISION
from storage_engine.model.declarations import spec_of
from storage_engine.model.expressions import NUMBERS, Operand
from storage_engine.model.scalars import lowered
from storage_engine.model.validation import INT64_MAX, INT64_MIN
from storage_engine.query.aggregates import (
    Aggregate,
    Having,
    HavingComparison,
    HavingMany,
    HavingNot,
)
from storage_engine.query.compiler import result_kinds
from storage_engine.query.spec import QuerySpec
from storage_engine.testing import evaluator

Identity = tuple[str, ...]
Ref = tuple[str, str]


@dataclass(frozen=True)
class Seen:
    """Commits after `since`, up to `upto`; all versions, or the newest of each identity."""

    upto: int
    since: int = 0
    history: bool = False


@dataclass(frozen=True)
class Version:
    commit_id: int
    thing: Any
    row: dict[str, Any]  # as stored: nested values as canonical JSON

    @property
    def identity(self) -> Identity:
        return tuple(self.row[name] for name in spec_of(type(self.thing)).identity)


def row_of(thing: Any) -> dict[str, Any]:
    row: dict[str, Any] = comparable(objects_to_table(spec_of(type(thing)), [thing]))[0]
    return row


def comparable(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as dicts; instants as microseconds, which Arrow gives quickly and for every year."""
    for n, column in enumerate(table.schema):
        if pa.types.is_timestamp(column.type):
            table = table.set_column(n, column.name, table.column(n).cast(pa.int64()))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def versioned_schema(spec: TypeSpec) -> pa.Schema:
    return pa.schema([pa.field("commit_id", pa.int64(), nullable=False), *row_schema(spec)])


@dataclass
class Model:
    head: int = 0
    versions: dict[Ref, list[Version]] = field(default_factory=dict)  # by commit and identity

    # --- writing --------------------------------------------------------------------------------

    def commit(self, things: Iterable[Any], *, event: bool = False) -> int | None:
        """The last statement about an identity counts, and only if it changes something."""
        versions = [Version(self.head + 1, thing, row_of(thing)) for thing in things]
        stated = {(spec_of(type(v.thing)).ref, v.identity): v for v in versions}
        changed = [
            (ref, version)
            for (ref, identity), version in stated.items()
            if (old := self._newest(ref, identity)) is None or old.row != version.row
        ]
        if not changed and not event:
            return None
        self.head += 1
        for ref, version in sorted(changed, key=lambda item: item[1].identity):
            self.versions.setdefault(ref, []).append(version)
        return self.head

    def _newest(self, ref: Ref, identity: Identity) -> Version | None:
        found = [v for v in self.versions.get(ref, ()) if v.identity == identity]
        return found[-1] if found else None

    def activation(self, spec: TypeSpec) -> int | None:
        """The first commit of a type."""
        found = self.versions.get(spec.ref)
        return found[0].commit_id if found else None

    # --- rows -----------------------------------------------------------------------------------

    def visible(self, spec: TypeSpec, seen: Seen) -> list[Version]:
        found = [v for v in self.versions.get(spec.ref, ()) if v.commit_id <= seen.upto]
        if not seen.history:
            newest = {version.identity: version for version in found}
            found = [newest[identity] for identity in sorted(newest)]
        return [v for v in found if v.commit_id > seen.since]

    def rows(self, spec: QuerySpec, seen: Seen) -> list[Version]:
        found = list(self._matching(spec, seen))  # in the order of ties, which sorting keeps
        for key in reversed(spec.order):
            known = [v for v in found if _sorted_by(key.operand, v.thing) is not None]
            known.sort(
                key=lambda v: _sorted_by(key.operand, v.thing),
                reverse=key.descending,  # which keeps the order of ties
            )
            found = known + [v for v in found if _sorted_by(key.operand, v.thing) is None]
        end = None if spec.limit is None else spec.offset + spec.limit
        return found[spec.offset : end]

    def _matching(self, spec: QuerySpec, seen: Seen) -> Iterator[Version]:
        ends: list[list[Version]] = [[], []]
        if spec.type.kind == "relation":
            cls: Any = spec.type.python_class
            ends = [self.visible(spec_of(end), seen) for end in cls.__endpoints__]
        for version in self.visible(spec.type, seen):
            if spec.where is None:
                yield version
                continue
            sides = [
                [end.thing for end in versions if end.identity[0] == key]
                for versions, key in zip(ends, version.identity, strict=False)
            ]
            left, right = sides if len(sides) == 2 else ([], [])
            if evaluator.matches(spec.where, version.thing, left=left, right=right):
                yield version

    def table(self, spec: TypeSpec, found: Sequence[Version]) -> pa.Table:
        table = objects_to_table(spec, [version.thing for version in found])
        commits = pa.array([version.commit_id for version in found], pa.int64())
        columns = [commits, *table.columns]
        return pa.Table.from_arrays(columns, schema=versioned_schema(spec))

    # --- aggregates -----------------------------------------------------------------------------

    def aggregate(self, spec: QuerySpec, seen: Seen) -> pa.Table:
        found = [version.thing for version in self._matching(spec, seen)]
        groups: dict[tuple[Any, ...], list[Any]] = {} if spec.groups else {(): found}
        if spec.groups:
            for thing in found:
                key = tuple(_sorted_by(operand, thing) for _, operand in spec.groups)
                groups.setdefault(key, []).append(thing)
        answers = [
            (*key, *(_compute(one, groups[key]) for _, one in spec.aggregates))
            for key in sorted(groups, key=lambda key: [(v is None, v) for v in key])
            if spec.having is None or _having(spec.having, groups[key]) is True
        ]
        kinds = result_kinds(spec)
        columns = [
            pa.array([answer[n] for answer in answers], arrow_type(kind))
            for n, (_, kind) in enumerate(kinds)
        ]
        return pa.Table.from_arrays(columns, names=[name for name, _ in kinds])

    # --- paths ----------------------------------------------------------------------------------

    def paths(self, spec: QuerySpec, seen: Seen) -> list[tuple[Version, ...]]:
        sources = self.rows(_without_via(spec), seen)
        paths: list[tuple[tuple[Version, ...], str]] = [((s,), s.identity[0]) for s in sources]
        for number, relation in enumerate(spec.via):
            steps = self.visible(relation, seen)
            start, end = (1, 0) if number in spec.backwards else (0, 1)
            paths = [
                ((*path, step), step.identity[end])
                for path, reached in paths
                for step in steps
                if step.identity[start] == reached
            ]
        return [path for path, _ in paths]

    # --- changes --------------------------------------------------------------------------------

    def changes(self, since: int = 0) -> list[dict[str, Any]]:
        """Every version after a commit, as the change feed has it."""
        found = []
        for ref in sorted(self.versions):
            known: set[Identity] = set()
            for version in self.versions[ref]:
                operation = "update" if version.identity in known else "insert"
                known.add(version.identity)
                if version.commit_id > since:
                    change = {**_described(version), "operation": operation}
                    found.append((version.commit_id, *ref, version.identity, change))
        return [item[-1] for item in sorted(found, key=lambda item: item[:-1])]

    def diff(self, before: int, after: int) -> list[dict[str, Any]]:
        found = []
        for ref in sorted(self.versions):
            spec = spec_of(type(self.versions[ref][0].thing))
            old = {v.identity: v for v in self.visible(spec, Seen(before))}
            for version in self.visible(spec, Seen(after)):
                earlier = old.get(version.identity)
                if earlier is not None and earlier.row == version.row:
                    continue
                change = _described(version)
                fields = change.pop("fields")
                change |= {"operation": "insert", "before": None, "after": fields}
                if earlier is not None:
                    names = [n for n in fields if earlier.row[n] != version.row[n]]
                    before_fields = _described(earlier)["fields"]
                    change["operation"] = "update"
                    change["before"] = {name: before_fields[name] for name in names}
                    change["after"] = {name: fields[name] for name in names}
                found.append(change)
        return found


# --- parts --------------------------------------------------------------------------------------


def _without_via(spec: QuerySpec) -> QuerySpec:
    return QuerySpec(
        spec.type, spec.where, spec.order, limit=spec.limit, offset=spec.offset, when=spec.when
    )


def _sorted_by(operand: Operand, thing: Any) -> Any:
    """The value by which rows are sorted and grouped; int and float together count as float."""
    value = evaluator.value_at(operand, thing)
    return float(value) if value is not None and operand.kinds == NUMBERS else value


def _compute(one: Aggregate, members: Sequence[Any]) -> Any:
    if one.operand is None:
        return len(members)
    if one.function in ("count", "avg_len"):
        values = [evaluator.value_at(one.operand, thing) for thing in members]
    else:
        values = [_sorted_by(one.operand, thing) for thing in members]
    found = evaluator.aggregate(one.function, values)
    too_large = isinstance(found, int) and not INT64_MIN <= found <= INT64_MAX
    if isinstance(found, Decimal) and one.function == "sum":
        too_large = len(found.as_tuple().digits) > MAX_PRECISION
    if too_large:
        raise OverflowError(f"{one!r} is {found}")
    return found


def _having(node: Having, members: Sequence[Any]) -> bool | None:
    match node:
        case HavingNot():
            inner = _having(node.part, members)
            return None if inner is None else not inner
        case HavingMany():
            parts = [_having(part, members) for part in node.parts]
            decisive = node.op == "or"
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
        case HavingComparison():
            value = _compute(node.aggregate, members)
            return None if value is None else _COMPARE[node.op](value, node.value)
    raise TypeError(node)


_COMPARE = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _described(version: Version) -> dict[str, Any]:
    """A version as `diff` and `changes` show it."""
    spec = spec_of(type(version.thing))
    names = ("key",) if spec.kind == "entity" else spec.identity
    values = vars(version.thing)
    return {
        "commit_id": version.commit_id,
        "kind": spec.kind,
        "type_name": spec.name,
        **dict(zip(names, version.identity, strict=True)),
        "fields": {
            f.name: lowered(values[f.name])
            if f.storage != "json" or version.row[f.name] is None
            else orjson.loads(version.row[f.name])
            for f in spec.fields
        },
    }
