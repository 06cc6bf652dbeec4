"""What terminal methods return: objects out of Arrow rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pyarrow as pa

from storage_engine.errors import IntegrityError
from storage_engine.model.arrow import table_to_objects
from storage_engine.model.declarations import Entity, Relation, Side, Stored, spec_of
from storage_engine.model.spec import TypeSpec
from storage_engine.query.executor import Diagnostic, Executor, Rows, Traversal
from storage_engine.query.spec import QuerySpec, When

T = TypeVar("T")
S = TypeVar("S", bound=Stored)


class Result(list[T]):
    """A list of what was found; `diagnostics` has remarks on it, usually none."""

    def __init__(self, items: Iterable[T] = (), diagnostics: Sequence[Diagnostic] = ()) -> None:
        super().__init__(items)
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)


@dataclass(frozen=True)
class Path(Generic[T]):
    """One path of a traversal: where it starts, the relations along it, and where it ends.

    Entities on the way are loaded when the first is asked for, those of all paths together.
    """

    source: T
    relations: tuple[Relation[Any, Any], ...]
    ends: tuple[Side, ...] = field(default=(), repr=False)  # the side that each step ends at

    @property
    def target(self) -> Any:
        """The entity in which the path ends."""
        return getattr(self.relations[-1], self.ends[-1])

    @property
    def entities(self) -> tuple[Any, ...]:
        """The source and the entity that each step ends at."""
        reached = zip(self.relations, self.ends, strict=True)
        return (self.source, *(getattr(relation, side) for relation, side in reached))


def objects(executor: Executor, spec: QuerySpec, rows: Rows) -> Result[Any]:
    """The rows as objects of the queried class."""
    table = pa.Table.from_batches(rows.batches, schema=rows.schema)
    return Result(hydrate(executor, spec, table), rows.diagnostics)


def hydrate(executor: Executor, spec: QuerySpec, table: pa.Table) -> list[Any]:
    made = table_to_objects(spec.type, table)
    if spec.type.kind == "relation":
        _Endpoints(executor, spec, made).attach()
    return made


def paths(executor: Executor, spec: QuerySpec, traversal: Traversal) -> Result[Path[Any]]:
    """The paths as objects; rows that several paths share become one object."""
    sources = table_to_objects(spec.type, traversal.sources)
    seen = _seen(spec, traversal)
    steps: list[list[Any]] = []
    for relation, table in zip(spec.via, traversal.relations, strict=True):
        steps.append(hydrate(executor, QuerySpec(relation, when=seen), table))
    ends = tuple(spec.ends(n)[1] for n in range(len(steps)))
    columns = [traversal.paths.column("source").to_pylist()]
    columns += [traversal.paths.column(f"step_{n}").to_pylist() for n in range(len(steps))]
    made = [
        Path(sources[row[0]], tuple(step[n] for step, n in zip(steps, row[1:], strict=True)), ends)
        for row in zip(*columns, strict=True)
    ]
    return Result(made, traversal.diagnostics)


def targets(executor: Executor, spec: QuerySpec, traversal: Traversal) -> Result[Any]:
    """The entities in which paths end, each once, in the order of the paths. A relation may have
    come before its entity: what is not stored is left out."""
    relation, side, keys = target_keys(spec, traversal)
    table = executor.endpoints(QuerySpec(relation, when=_seen(spec, traversal)), side, keys)
    entities = dict(
        zip(
            table.column("entity_key").to_pylist(),
            table_to_objects(_endpoint(relation, side), table),
            strict=True,
        )
    )
    there = [entities[key] for key in keys.to_pylist() if key in entities]
    return Result(there, traversal.diagnostics)


def target_keys(spec: QuerySpec, traversal: Traversal) -> tuple[TypeSpec, Side, pa.Array]:
    """The last relation type, the side of it where paths end, and the distinct keys there, in the
    order of the paths."""
    last = len(spec.via) - 1
    side = spec.ends(last)[1]
    rows = traversal.paths.column(f"step_{last}")
    keys = traversal.relations[last].column(f"{side}_key").take(rows).unique()
    return spec.via[last], side, keys


def _seen(spec: QuerySpec, traversal: Traversal) -> When:
    """What is loaded later is of the state that the paths were found in."""
    return spec.when if traversal.commit_id is None else When(as_of=traversal.commit_id)


def _endpoint(relation: TypeSpec, side: Side) -> TypeSpec:
    cls = relation.python_class
    assert cls is not None
    return spec_of(cls.__endpoints__[0 if side == "left" else 1])  # type: ignore[attr-defined]


class _Endpoints:
    """Loads the endpoints of all relations of one result at once, when the first is asked for."""

    def __init__(self, executor: Executor, spec: QuerySpec, relations: Sequence[Any]) -> None:
        self._executor = executor
        self._spec = spec
        self._relations = relations
        self._loaded: dict[Side, dict[str, Entity]] = {}

    def attach(self) -> None:
        for relation in self._relations:
            relation._attach_endpoints(self.load)

    def load(self, relation: Relation[Any, Any], side: Side) -> Entity:
        if side not in self._loaded:
            self._loaded[side] = self._all(side)
        key = str(getattr(relation, f"{side}_key"))
        entity = self._loaded[side].get(key)
        if entity is None:
            raise IntegrityError(
                f"{self._spec.type.name} {relation.left_key!r} -> {relation.right_key!r}: its "
                f"{side} entity {key!r} is not in the storage"
            )
        return entity

    def _all(self, side: Side) -> dict[str, Entity]:
        keys = sorted({str(getattr(relation, f"{side}_key")) for relation in self._relations})
        table = self._executor.endpoints(self._spec, side, pa.array(keys, pa.string()))
        entities = table_to_objects(_endpoint(self._spec.type, side), table)
        return dict(zip(table.column("entity_key").to_pylist(), entities, strict=True))
