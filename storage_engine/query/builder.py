"""The typed query builder: what `session.query()` returns.

    session.query().entities(Customer).where(Customer.tier == "Gold").limit(10).collect()

Builders are immutable: every step returns a new one, so that a query can be kept and refined in
several ways. Mistakes are reported by the step that makes them; the storage is asked by the
terminal methods alone (`collect`, `first`, `to_arrow`, `batches`, `explain`, aggregates).
`left(Subscription).tier` names a field of the entities that a relation connects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import pyarrow as pa

from storage_engine.model.arrow import table_to_rows
from storage_engine.model.declarations import Entity, Relation, Side, Stored, spec_of
from storage_engine.model.expressions import Filter, Operand
from storage_engine.model.field import FieldRef
from storage_engine.model.spec import Kind, TypeSpec
from storage_engine.model.validation import INT64_MAX, unknown_name
from storage_engine.query import aggregates as functions
from storage_engine.query.aggregates import Aggregate, Having, own_place
from storage_engine.query.conditions import value_kind
from storage_engine.query.reference import Reference, checked_reference
from storage_engine.query.results import (
    Executor,
    Path,
    Plan,
    Result,
    StoredVersions,
    hydrate,
    objects,
    paths,
    targets,
)
from storage_engine.query.spec import Order, QuerySpec, When

if TYPE_CHECKING:
    from storage_engine.schema.upgraders import UpgraderSource

E = TypeVar("E", bound=Entity)


def left(relation: type[Relation[E, Any]]) -> type[E]:
    """The left entity of a relation in a filter: `left(Subscription).tier == "Gold"`.

    Type checkers see the entity class, so that its fields are known; all that works with the
    result is to take fields from it.
    """
    return _EndpointFields(relation, "left")  # type: ignore[return-value]


def right(relation: type[Relation[Any, E]]) -> type[E]:
    """The right entity of a relation in a filter."""
    return _EndpointFields(relation, "right")  # type: ignore[return-value]


class _EndpointFields:
    def __init__(self, relation: type[Relation[Any, Any]], side: Side) -> None:
        spec = spec_of(relation)
        if spec.kind != "relation":
            raise TypeError(f"{side}(...) takes a relation class; {spec.name} is an entity")
        entity = relation.__endpoints__[0 if side == "left" else 1]
        self._spec: TypeSpec = spec_of(entity)
        self._side: Side = side
        self._relation = spec.name

    def __repr__(self) -> str:
        return f"{self._side}({self._relation})"

    def __getattr__(self, name: str) -> FieldRef[Any]:
        spec = self._spec
        if name.startswith("__") or name not in {f.name for f in spec.fields}:
            names = [f.name for f in spec.fields]
            raise AttributeError(f"{self!r} is a {spec.name}: {unknown_name(name, names)}")
        return FieldRef(spec, name, source=self._side, relation=self._relation)


S = TypeVar("S", bound=Stored)
En = TypeVar("En", bound=Entity)
Re = TypeVar("Re", bound=Relation[Any, Any])


@dataclass(frozen=True)
class Query:
    """The beginning of a query: says what is asked for."""

    executor: Executor
    bind: Callable[[Any], TypeSpec] = spec_of  # refuses classes that are not to be asked for
    versions: StoredVersions | None = None

    def entities(self, cls: type[En]) -> EntityQuery[En]:
        """Entities of a class."""
        spec = QuerySpec(_typed(cls, "entity", self.bind))
        return EntityQuery(self.executor, spec, self.versions)

    def relations(self, cls: type[Re]) -> RowQuery[Re]:
        """Relations of a class."""
        spec = QuerySpec(_typed(cls, "relation", self.bind))
        return RowQuery(self.executor, spec, self.versions)

    def raw(
        self, type_name: str, schema_version: int | None = None, *, kind: Kind | None = None
    ) -> RawQuery:
        """Rows of one schema version of a stored type (the newest unless told), as dicts: no class
        is needed. `kind` tells an entity type from a relation type of the same name."""
        spec, number = _versions(self.versions).stored(type_name, schema_version, kind)
        return RawQuery(self.executor, QuerySpec(spec, when=When(schema_version=number)))


@dataclass(frozen=True)
class _Steps:
    """What queries of rows and of paths have in common."""

    executor: Executor
    spec: QuerySpec

    def where(self, condition: Filter) -> Self:
        """Keep the rows for which the condition is true. Several add up."""
        check_filter(self.spec.type, condition)
        return self._with(where=self.spec.and_where(condition))

    def order_by(self, *fields: FieldRef[Any], desc: bool = False) -> Self:
        """Sort by these fields, NULLs last; another call adds keys after them."""
        if not fields:
            raise TypeError("order_by needs at least one field")
        keys = [Order(self._own(field, "order_by"), bool(desc)) for field in fields]
        for key in keys:
            value_kind(key.operand)
        return self._with(order=(*self.spec.order, *keys))

    def limit(self, count: int) -> Self:
        """At most so many."""
        return self._with(limit=_whole(count, "limit"))

    def offset(self, count: int) -> Self:
        """Leave out the first so many."""
        return self._with(offset=_whole(count, "offset"))

    def as_of(self, reference: Reference) -> Self:
        """As things were: at a commit, at an instant, or at a tag."""
        return self._with(when=self._when(When(as_of=checked_reference(reference))))

    def explain(self) -> Plan:
        """How the storage would answer; `print` it."""
        return self.executor.explain(self.spec)

    def _with(self, **changes: Any) -> Self:
        return replace(self, spec=replace(self.spec, **changes))

    def _when(self, when: When) -> When:
        before = self.spec.when
        if not before.latest and before != when:
            raise ValueError(f"{when} contradicts {before}, given earlier; use one of them")
        return when

    def _own(self, field: object, use: str) -> Operand:
        operand = own_place(field, use)
        _check_owner(self.spec.type, operand)
        return operand


@dataclass(frozen=True)
class RowQuery(_Steps, Generic[S]):
    """A query of entities or relations."""

    versions: StoredVersions | None = None

    def upgraded(self, upgraders: UpgraderSource | None = None) -> Self:
        """Read what was stored under older schema versions, too, through upgraders: with `as_of`
        before the last migration, and in history.

        `upgraders` are as for `migrate`, all that were declared unless told. Filters, order and
        aggregates act on the upgraded rows. MissingUpgraderError where nothing leads from a
        version that is asked for to the class.
        """
        return replace(self, executor=_versions(self.versions).upgraded(upgraders))

    def with_history(self) -> Self:
        """Every version, by commit and identity."""
        return self._with(when=self._when(When(history=True)))

    def history_since(self, commit_id: int) -> Self:
        """Every version that came after a commit; below 0 counts as 0, as in `as_of`."""
        since = min(max(_integer(commit_id, "history_since"), 0), INT64_MAX)
        return self._with(when=self._when(When(history=True, since=since)))

    # --- rows ---------------------------------------------------------------------------------

    def collect(self) -> Result[S]:
        """All of them, as objects."""
        return objects(self.executor, self.spec, self.executor.rows(self.spec))

    def first(self) -> S | None:
        """The first one, None when there is none."""
        limit = 1 if self.spec.limit is None else min(1, self.spec.limit)
        answer = self.limit(limit).collect()
        return answer[0] if answer else None

    def to_arrow(self) -> pa.Table:
        """All of them, as an Arrow table: `commit_id`, identity columns, fields."""
        rows = self.executor.rows(self.spec)
        return pa.Table.from_batches(rows.batches, schema=rows.schema)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Arrow record batches as they come, in bounded memory."""
        return self.executor.rows(self.spec).batches

    def objects(self) -> Iterator[S]:
        """Objects as they come, in bounded memory; endpoints are loaded batch by batch."""
        for batch in self.executor.rows(self.spec).batches:
            yield from hydrate(self.executor, self.spec, pa.Table.from_batches([batch]))

    # --- aggregates ---------------------------------------------------------------------------

    def count(self) -> int:
        """The number of rows."""
        return int(self._one(functions.count()))

    def count_where(self, condition: Filter) -> int:
        """The number of rows for which a further condition is true."""
        return self.where(condition).count()

    def sum(self, field: FieldRef[Any]) -> Any:
        """The sum of a numeric field, None without values."""
        return self._one(functions.sum(field))

    def avg(self, field: FieldRef[Any]) -> float | None:
        """The mean of a numeric field, None without values."""
        mean: float | None = self._one(functions.avg(field))
        return mean

    def min(self, field: FieldRef[Any]) -> Any:
        """The least value of a field, None without values."""
        return self._one(functions.min(field))

    def max(self, field: FieldRef[Any]) -> Any:
        """The greatest value of a field, None without values."""
        return self._one(functions.max(field))

    def avg_len(self, field: FieldRef[Any]) -> float | None:
        """The mean number of elements of a list field, None without lists."""
        mean: float | None = self._one(functions.avg_len(field))
        return mean

    def group_by(self, *fields: FieldRef[Any]) -> GroupedQuery:
        """Rows with the same values of these fields together."""
        self._check_aggregates("group_by")
        if not fields:
            raise TypeError("group_by needs at least one field")
        groups: dict[str, Operand] = {}
        for field in fields:
            operand = self._own(field, "group_by")
            value_kind(operand)
            name = ".".join((operand.name, *operand.path))
            if name in groups:
                raise ValueError(f"group_by: {name} is given twice")
            groups[name] = operand
        return GroupedQuery(self.executor, replace(self.spec, groups=tuple(groups.items())))

    def _one(self, aggregate: Aggregate) -> Any:
        self._check_aggregates(aggregate.function)
        if aggregate.operand is not None:
            _check_owner(self.spec.type, aggregate.operand)
        spec = replace(self.spec, aggregates=(("value", aggregate),))
        value = self.executor.aggregate(spec).column("value")[0].as_py()
        operand = aggregate.operand
        if aggregate.function not in ("min", "max") or operand is None or operand.spec is None:
            return value
        return value if operand.path else operand.spec.restored(value)

    def _check_aggregates(self, use: str) -> None:
        given = {"order_by": self.spec.order, "limit": self.spec.limit, "offset": self.spec.offset}
        for name, value in given.items():
            if value not in ((), None, 0):
                raise ValueError(f"{use} takes all rows that match; leave out {name}")


@dataclass(frozen=True)
class RawQuery(RowQuery[Any]):
    """A query of one schema version of a type, by the names that the version has.

        session.query().raw("Customer", schema_version=1).where(q.field("age") > 3)

    Rows are dicts of Python values: keys and fields, a relation's with `left_key` and `right_key`.
    """

    commit_ids: bool = False

    def field(self, name: str) -> FieldRef[Any]:
        """A field of this version, for conditions, order and aggregates."""
        reference: FieldRef[Any] = FieldRef(self.spec.type, name)
        assert reference.operand is not None  # a name that is not there is refused here
        return reference

    def with_commit_ids(self) -> Self:
        """Rows get another key, `commit_id`: the commit that wrote them."""
        return replace(self, commit_ids=True)

    def upgraded(self, upgraders: UpgraderSource | None = None) -> NoReturn:
        raise TypeError(
            "raw rows are as their version has them; upgraded() is for queries of a class"
        )

    def collect(self) -> Result[dict[str, Any]]:
        """All of them, as dicts."""
        rows = self.executor.rows(self.spec)
        table = pa.Table.from_batches(rows.batches, schema=rows.schema)
        return Result(self._dicts(table), rows.diagnostics)

    def objects(self) -> Iterator[dict[str, Any]]:
        """Dicts as they come, in bounded memory."""
        for batch in self.executor.rows(self.spec).batches:
            yield from self._dicts(pa.Table.from_batches([batch]))

    def _dicts(self, table: pa.Table) -> list[dict[str, Any]]:
        rows = table_to_rows(self.spec.type, table)
        if not self.commit_ids:
            return rows
        numbers = table.column("commit_id").to_pylist()
        return [{"commit_id": n, **row} for n, row in zip(numbers, rows, strict=True)]

    def _when(self, when: When) -> When:
        return super()._when(replace(when, schema_version=self.spec.when.schema_version))


@dataclass(frozen=True)
class EntityQuery(RowQuery[En]):
    """A query of entities, which can go on along relations."""

    def via(self, relation: type[Relation[Any, Any]], *, backwards: bool = False) -> PathQuery[En]:
        """Follow relations of a class from these entities, from whichever side they are on.

        Relations of a type with itself are followed from left to right, unless `backwards`.
        """
        if self.spec.when.history:
            raise ValueError(f"traversals see one state; leave out {self.spec.when}")
        return PathQuery[En](self.executor, self.spec).via(relation, backwards=backwards)


@dataclass(frozen=True)
class PathQuery(_Steps, Generic[En]):
    """A traversal. Filter, order and paging are about the entities that paths start from."""

    def via(self, relation: type[Relation[Any, Any]], *, backwards: bool = False) -> PathQuery[En]:
        """Follow relations of a class from the entities reached so far, from whichever side."""
        step = _typed(relation, "relation")
        call = f"via({step.name}{', backwards=True' if backwards else ''})"
        return replace(self, spec=self.spec.followed(step, backwards=backwards, call=call))

    def targets(self) -> Result[Entity]:
        """The entities in which paths end, each once, in the order of the paths."""
        return targets(self.executor, self.spec, self.executor.traverse(self.spec))

    def collect(self) -> Result[Path[En]]:
        """All complete paths."""
        return paths(self.executor, self.spec, self.executor.traverse(self.spec))

    def first(self) -> Path[En] | None:
        """The first path, None when there is none."""
        answer = self.collect()
        return answer[0] if answer else None

    def __getattr__(self, name: str) -> NoReturn:
        if name in _ROWS_ONLY:
            raise TypeError(f"{name} is not available on traversals")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_ROWS_ONLY = frozenset(
    name for name in vars(RowQuery) if not name.startswith("_") and name not in vars(PathQuery)
)


@dataclass(frozen=True)
class GroupedQuery:
    """Groups of rows, waiting to be told what to compute of each."""

    executor: Executor
    spec: QuerySpec

    def having(self, condition: Having) -> GroupedQuery:
        """Keep the groups for which the condition is true. Several add up."""
        given: object = condition
        if isinstance(given, Filter):
            raise TypeError(f"{given!r} is about rows; put it in where(...) before group_by")
        if not isinstance(given, Having):
            raise TypeError(
                f"having takes a condition such as sum(Order.total) > 10, not {condition!r}"
            )
        for aggregate in condition.aggregates():
            self._check(aggregate)
        both = condition if self.spec.having is None else self.spec.having & condition
        return replace(self, spec=replace(self.spec, having=both))

    def agg(self, **columns: Aggregate) -> pa.Table:
        """One row per group: its keys, then these columns; ordered by the keys, NULL last."""
        return self.executor.aggregate(self._asked(columns))

    def explain(self, **columns: Aggregate) -> Plan:
        """How the storage would answer `agg` with the same arguments."""
        return self.executor.explain(self._asked(columns))

    def _asked(self, columns: Mapping[str, Aggregate]) -> QuerySpec:
        if not columns:
            raise TypeError("agg needs at least one column: agg(n=count())")
        taken = {name for name, _ in self.spec.groups}
        for name, aggregate in columns.items():
            if not isinstance(aggregate, Aggregate):
                raise TypeError(
                    f"agg({name}=...) takes an aggregate such as count(), not {aggregate!r}"
                )
            if name in taken:
                raise ValueError(f"agg: {name} is already the name of a group key")
            self._check(aggregate)
        return replace(self.spec, aggregates=tuple(columns.items()))

    def _check(self, aggregate: Aggregate) -> None:
        if aggregate.operand is not None:
            _check_owner(self.spec.type, aggregate.operand)


# --- checks -----------------------------------------------------------------------------------


def _versions(versions: StoredVersions | None) -> StoredVersions:
    if versions is None:
        raise TypeError("older schema versions are asked for through session.query()")
    return versions


def check_filter(spec: TypeSpec, condition: object) -> None:
    """Refuse what is not a condition on rows of this type."""
    if isinstance(condition, Having):
        raise TypeError(f"{condition!r} is about groups; put it in having(...) after group_by")
    if isinstance(condition, FieldRef):
        raise TypeError(
            f"{condition!r} alone is no condition; write {condition!r}.is_true() or compare it"
        )
    if not isinstance(condition, Filter):
        raise TypeError(f"where takes a condition such as Customer.age > 30, not {condition!r}")
    for operand in condition.operands():
        _check_owner(spec, operand)


def _check_owner(spec: TypeSpec, operand: Operand) -> None:
    if operand.source == "self":
        if operand.owner != spec.ref:
            raise ValueError(f"{operand!r} is not a field of {spec.name}, which is queried")
    elif operand.relation != spec.name or spec.kind != "relation":
        raise ValueError(
            f"{operand!r} is about the endpoints of {operand.relation}; {spec.name} is queried"
        )


def _typed(cls: Any, kind: str, bind: Callable[[Any], TypeSpec] = spec_of) -> TypeSpec:
    spec = bind(cls)
    if spec.kind != kind:
        raise TypeError(f"{spec.name} is declared as {spec.kind}, not as {kind}")
    return spec


def _integer(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} takes a whole number, not {value!r}")
    return value


def _whole(value: object, name: str) -> int:
    value = _integer(value, name)
    if not 0 <= value <= INT64_MAX:
        raise ValueError(f"{name} takes a number from 0 on, not {value}")
    return value
