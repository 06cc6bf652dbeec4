"""An executor over plain Python objects: the contract of `Executor`, done the simple way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa

from storage_engine.model.arrow import ARROW_TYPES, objects_to_table, row_schema
from storage_engine.model.spec import TypeSpec
from storage_engine.query.compiler import result_kinds
from storage_engine.query.results import Plan, Rows, Traversal
from storage_engine.query.spec import QuerySpec, When
from storage_engine.testing import evaluator

Version = tuple[int, Any]  # commit, object


@dataclass
class MemoryExecutor:
    """Versions by type; every call is remembered in `asked`."""

    versions: dict[tuple[str, str], list[Version]] = field(default_factory=dict)
    specs: dict[tuple[str, str], TypeSpec] = field(default_factory=dict)
    asked: list[tuple[str, QuerySpec]] = field(default_factory=list)
    tags: dict[str, int] = field(default_factory=dict)

    def put(self, commit_id: int, spec: TypeSpec, *things: Any) -> None:
        self.specs[spec.ref] = spec
        self.versions.setdefault(spec.ref, []).extend((commit_id, thing) for thing in things)

    def rows(self, spec: QuerySpec) -> Rows:
        self.asked.append(("rows", spec))
        table = self._table(spec.type, self._found(spec))
        return Rows(table.schema, iter(table.to_batches(max_chunksize=2)), self._remarks(spec))

    def aggregate(self, spec: QuerySpec) -> pa.Table:
        self.asked.append(("aggregate", spec))
        found = [thing for _, thing in self._found(spec)]
        groups: dict[tuple[Any, ...], list[Any]] = {} if spec.groups else {(): found}
        if spec.groups:
            keys = [(operand, False) for _, operand in spec.groups]
            for thing in evaluator.ordered(found, keys, _identity):
                key = tuple(evaluator.value_at(operand, thing) for operand, _ in keys)
                groups.setdefault(key, []).append(thing)
        answers = [
            (*key, *(self._compute(one, members) for _, one in spec.aggregates))
            for key, members in groups.items()
        ]
        kinds = result_kinds(spec)
        columns = [
            pa.array([answer[n] for answer in answers], ARROW_TYPES[kind])  # type: ignore[index]
            for n, (_, kind) in enumerate(kinds)
        ]
        return pa.Table.from_arrays(columns, names=[name for name, _ in kinds])

    def traverse(self, spec: QuerySpec) -> Traversal:
        self.asked.append(("traverse", spec))
        sources = self._found(replace(spec, via=(), backwards=frozenset()))
        paths: list[tuple[tuple[int, ...], str]] = [
            ((n,), thing.id) for n, (_, thing) in enumerate(sources)
        ]
        tables = []
        for number, relation in enumerate(spec.via):
            start, end = (f"{side}_key" for side in spec.ends(number))
            found = self._found(QuerySpec(relation, when=spec.when))
            tables.append(self._table(relation, found))
            paths = [
                ((*path, n), getattr(link, end))
                for path, reached in paths
                for n, (_, link) in enumerate(found)
                if getattr(link, start) == reached
            ]
        names = ["source", *(f"step_{n}" for n in range(len(spec.via)))]
        columns = [pa.array([path[n] for path, _ in paths], pa.int64()) for n in range(len(names))]
        return Traversal(
            self._table(spec.type, sources),
            tuple(tables),
            pa.Table.from_arrays(columns, names=names),
        )

    def endpoints(
        self, spec: QuerySpec, side: Literal["left", "right"], keys: pa.Array
    ) -> pa.Table:
        self.asked.append((f"endpoints {side}", spec))
        name = spec.type.left if side == "left" else spec.type.right
        entity = self.specs["entity", str(name)]
        when = When(as_of=spec.when.as_of)
        wanted = set(keys.to_pylist())
        found = [v for v in self._visible(entity, when) if v[1].id in wanted]
        return self._table(entity, found)

    def explain(self, spec: QuerySpec) -> Plan:
        return Plan(f"scan {spec.type.name}", spec.as_json())

    # --- the simple way -----------------------------------------------------------------------

    def _visible(self, spec: TypeSpec, when: When) -> list[Version]:
        versions = self.versions.get(spec.ref, [])
        upto = self.tags[when.as_of] if isinstance(when.as_of, str) else when.as_of
        if isinstance(upto, int):
            versions = [v for v in versions if v[0] <= upto]
        if when.history:
            versions = [v for v in versions if v[0] > (when.since or 0)]
            return sorted(versions, key=lambda v: (v[0], _identity(v[1])))
        newest = {_identity(thing): (commit, thing) for commit, thing in versions}
        return [newest[key] for key in sorted(newest)]

    def _found(self, spec: QuerySpec) -> list[Version]:
        found = self._visible(spec.type, spec.when)
        if spec.where is not None:
            found = [v for v in found if self._matches(spec, v[1])]
        commits = {id(thing): commit for commit, thing in found}
        places = {id(thing): n for n, (_, thing) in enumerate(found)}
        ordered = evaluator.ordered(
            [thing for _, thing in found],
            [(key.operand, key.descending) for key in spec.order],
            lambda thing: places[id(thing)],
        )
        end = None if spec.limit is None else spec.offset + spec.limit
        return [(commits[id(thing)], thing) for thing in ordered[spec.offset : end]]

    def _matches(self, spec: QuerySpec, thing: Any) -> bool:
        ends: dict[str, list[Any]] = {"left": [], "right": []}
        if spec.type.kind == "relation":
            for side, name in (("left", spec.type.left), ("right", spec.type.right)):
                versions = self._visible(self.specs["entity", str(name)], spec.when)
                key = getattr(thing, f"{side}_key")
                ends[side] = [other for _, other in versions if other.id == key]
        assert spec.where is not None
        return evaluator.matches(spec.where, thing, left=ends["left"], right=ends["right"])

    def _compute(self, one: Any, members: Sequence[Any]) -> Any:
        if one.operand is None:
            return len(members)
        values = [evaluator.value_at(one.operand, thing) for thing in members]
        return evaluator.aggregate(one.function, values)

    def _table(self, spec: TypeSpec, found: Sequence[Version]) -> pa.Table:
        table = objects_to_table(spec, [thing for _, thing in found])
        commits = pa.array([commit for commit, _ in found], pa.int64())
        made = table.add_column(0, pa.field("commit_id", pa.int64(), nullable=False), commits)
        assert made.schema.names == ["commit_id", *row_schema(spec).names]
        return made

    def _remarks(self, spec: QuerySpec) -> tuple[dict[str, Any], ...]:
        if spec.when.as_of == 0:
            return ({"reason": "commit_before_activation", "activation_commit_id": 1},)
        return ()


def _identity(thing: Any) -> tuple[str, ...]:
    if hasattr(thing, "left_key"):
        return (thing.left_key, thing.right_key, thing.instance_key)
    return (thing.id,)
