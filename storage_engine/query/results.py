"""What a storage answers to a query, and what users get of it.

The builder makes a `QuerySpec`, an `Executor` (the border between the language and the engines)
answers it in Arrow, and the terminal methods make objects of that. `query.compiler` compiles specs
to SQL for engines that speak it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import pyarrow as pa

from storage_engine.errors import IntegrityError, SchemaMetadataError
from storage_engine.model.arrow import table_to_objects
from storage_engine.model.declarations import Entity, Relation, Side, Stored, spec_of
from storage_engine.model.spec import Kind, TypeSpec
from storage_engine.query.spec import QuerySpec, When

if TYPE_CHECKING:
    from storage_engine.schema.upgraders import UpgraderSource

Diagnostic = Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """An answer in rows.

    schema:       `commit_id` (int64), then the type's row schema (`model.arrow.row_schema`)
    batches:      read once; closing the iterator early (`close()` on a generator, or dropping it)
                  ends the work behind it. Memory stays bounded whatever the size of the answer.
    diagnostics:  remarks on the answer, such as {"reason": "commit_before_activation",
                  "activation_commit_id": 7}; known before the first batch
    """

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    diagnostics: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True)
class Traversal:
    """An answer in paths.

    sources:    rows of the queried entity type, as `Rows.schema` has them
    relations:  for each step of `spec.via`, rows of that relation type, the same way
    paths:      int64 columns `source`, `step_0`, `step_1`, ...: row numbers in the tables above,
                one row per path, in the order of the answer
    commit_id:  of the state that was looked at, so that what is loaded later is of the same
    """

    sources: pa.Table
    relations: tuple[pa.Table, ...]
    paths: pa.Table
    diagnostics: tuple[Diagnostic, ...] = ()
    commit_id: int | None = None


@dataclass(frozen=True)
class Plan:
    """How a query would be answered: for people as text, for programs as facts."""

    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


class Executor(Protocol):
    """Answers queries on one storage, or on one pinned state of it. Thread-safe.

    Every method resolves `spec.when` itself: a commit id is clamped to 0..head, an instant means
    the last commit at or before it, a str names a tag (unknown: ValueError with the nearest
    names). A pinned executor refuses references after its own commit.
    """

    def rows(self, spec: QuerySpec) -> Rows:
        """The rows of `spec.type` that pass `spec.where`, ordered by `spec.order` and then by
        identity (history: by commit and identity), cut by offset and limit.

        Conditions see rows as they are in the window: a filter on values must not be applied
        before the newest version of each identity is known. `spec.via` and `spec.aggregates` are
        empty.
        """

    def aggregate(self, spec: QuerySpec) -> pa.Table:
        """One row per group with the columns of `spec.groups`, then of `spec.aggregates`, by
        name, ordered by group (NULL last); exactly one row when there are no groups.

        Columns have the Arrow types of their kinds: `count` int64; `avg`, `avg_len` float64;
        `sum` int64 or float64, OverflowError when an int64 cannot hold it; `min`, `max` and group
        keys as `model.columns.ARROW_TYPES`. `order`, `limit`, `offset` and `via` are empty.
        """

    def traverse(self, spec: QuerySpec) -> Traversal:
        """All paths from the entities that `rows` would give (its where, order, offset and limit
        are about those) along the relations of `spec.via`.

        Step n follows relations whose left key is the entity reached by step n-1 and reaches
        their right key; the other way round if n is in `spec.backwards`. Only complete paths
        count. Relations are seen in the same window as entities; history modes are refused by the
        builder. Order: by source as in `rows`, then by the relations' identities, step by step.
        """

    def endpoints(
        self, spec: QuerySpec, side: Literal["left", "right"], keys: pa.Array
    ) -> pa.Table:
        """For the relation type `spec.type`, the endpoint entities with these keys (distinct,
        any number), as `Rows.schema` has them, at most one row a key, in any order.

        As of the same commit for latest and as_of; the newest version for history modes. Keys
        without an entity are left out.
        """

    def explain(self, spec: QuerySpec) -> Plan:
        """How `rows`, `aggregate` or `traverse` would answer, without doing it."""


Parameters = Sequence[Any] | Mapping[str, Any]


class SqlExecutor(Executor, Protocol):
    """Answers SQL, too."""

    def sql(self, statement: str, parameters: Parameters | None = None) -> Rows:
        """One SELECT (or EXPLAIN of one) in DuckDB's language, over a table for each stored type:
        its visible rows, as `Rows.schema` has them. What else a statement reaches for is refused
        (SqlNotAllowedError), and a mistake in it is a ValueError that names the tables."""


class StoredVersions(Protocol):
    """What is stored of types beside their current schema version."""

    def stored(
        self, name: str, schema_version: int | None, kind: Kind | None
    ) -> tuple[TypeSpec, int]:
        """A type as a version of it was stored, with the version's number: the newest unless
        told. ConfigurationError names those that exist."""

    def upgraded(self, upgraders: UpgraderSource | None) -> Executor:
        """Answers of all versions, brought up to the class."""


def endpoint_spec(
    relation: TypeSpec,
    side: Literal["left", "right"],
    stored: Callable[[tuple[str, str]], Sequence[TypeSpec]],
) -> TypeSpec:
    """The entity type at a relation's end: as the class has it; without one, as it is stored.

    `stored` looks a type up by kind and name, and gives none where there is none."""
    cls = relation.python_class
    if cls is not None:
        return spec_of(cls.__endpoints__[0 if side == "left" else 1])  # type: ignore[attr-defined]
    name = relation.left if side == "left" else relation.right
    for spec in stored(("entity", name or "")):
        return spec
    raise SchemaMetadataError(
        f"{relation.name} has {name} at its {side} end, of which nothing is stored yet"
    )


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
        """The entity in which the path ends; IntegrityError where it is not stored, as a relation
        may come before its entity."""
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
