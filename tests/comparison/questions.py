"""Random questions of queries: how each is asked of a session, and what the model says to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal

import pyarrow as pa
from hypothesis import strategies as st

from storage_engine.errors import IntegrityError
from storage_engine.model.declarations import spec_of
from storage_engine.model.expressions import (
    NUMBERS,
    ORDERED,
    SCALARS,
    Filter,
    TypePlace,
    base_kind,
    base_kinds,
)
from storage_engine.model.field_types import is_uuid
from storage_engine.query import aggregates
from storage_engine.query.aggregates import Aggregate, Having
from storage_engine.query.builder import Query
from storage_engine.query.conditions import value_kind
from storage_engine.query.spec import QuerySpec
from storage_engine.testing.evaluator import value_at
from tests.comparison.model import Model, Seen, Version, comparable, versioned_schema
from tests.comparison.schemas import Schema, Type
from tests.comparison.storages import Storage
from tests.comparison.values import LITERALS, Pool, Ref, Values
from tests.query.worlds import REFS

Mode = Literal["latest", "as_of", "instant", "history", "since"]


class Refused(Exception):
    """The question has no answer, and storages must say so by ValueError."""


@dataclass(frozen=True)
class Time:
    """When a question is about. An instant is given by a commit and a distance from it in
    microseconds, because each storage has clocks of its own. `view` is a pinned one's commit."""

    mode: Mode = "latest"
    commit: int = 0
    distance: int = 0
    view: int | None = None

    def instant(self, storage: Storage) -> datetime:
        known = storage.created_at
        if not known:
            return datetime(2026, 1, 1, tzinfo=UTC)
        if self.commit < 1:
            return known[0] - timedelta(days=1)
        return known[min(self.commit, len(known)) - 1] + timedelta(microseconds=self.distance)

    def step(self, query: Any, storage: Storage) -> Any:
        match self.mode:
            case "as_of":
                return query.as_of(self.commit)
            case "instant":
                return query.as_of(self.instant(storage))
            case "history":
                return query.with_history()
            case "since":
                return query.history_since(max(self.commit, 0))
        return query

    def begin(self, storage: Storage) -> Query:
        if self.view is None or self.view not in storage.views:
            return storage.session.query()
        return storage.views[self.view].query()

    def seen(self, model: Model, storage: Storage) -> Seen:
        pinned = self.view if self.view in storage.views else None
        upto = model.head if pinned is None else pinned
        if self.mode == "as_of":
            if pinned is not None and self.commit > pinned:
                raise Refused
            upto = min(max(self.commit, 0), upto)
        if self.mode == "instant":
            instant = self.instant(storage)
            asked = sum(moment <= instant for moment in storage.created_at)
            if asked > upto:
                raise Refused
            upto = asked
        if self.mode == "since":
            return Seen(upto, max(self.commit, 0), history=True)
        return Seen(upto, history=self.mode == "history")


@dataclass(frozen=True)
class Rows:
    """A query of entities or relations."""

    of: Type
    where: Filter | None
    order: tuple[tuple[Ref, bool], ...]
    limit: int | None
    offset: int
    time: Time
    form: Literal["collect", "arrow", "objects", "batches", "first"]
    via: tuple[Type, ...] = ()
    backwards: tuple[bool, ...] = ()

    def query(self, storage: Storage) -> Any:
        begin = self.time.begin(storage)
        kind = self.of.spec.kind
        query: Any = begin.entities(self.of.cls) if kind == "entity" else None
        query = query or begin.relations(self.of.cls)
        if self.where is not None:
            query = query.where(self.where)
        for ref, descending in self.order:
            query = query.order_by(ref, desc=descending)
        if self.limit is not None:
            query = query.limit(self.limit)
        if self.offset:
            query = query.offset(self.offset)
        query = self.time.step(query, storage)
        for relation, backwards in zip(self.via, self.backwards, strict=True):
            # Said where it must be: elsewhere the side that fits is found.
            both = relation.ends[0] is relation.ends[1]
            query = query.via(relation.cls, backwards=backwards and both)
        return query

    def check(self, model: Model, storage: Storage) -> None:
        query = self.query(storage)
        try:
            seen = self.time.seen(model, storage)
        except Refused:
            _expect(ValueError, query.collect)
            return
        if self.via:
            self._check_paths(model, storage, query, seen)
        else:
            self._check_rows(model, storage, query, seen)

    def _check_rows(self, model: Model, storage: Storage, query: Any, seen: Seen) -> None:
        expected = model.rows(query.spec, seen)
        match self.form:
            case "collect":
                found = query.collect()
                _same_objects(found, expected)
                assert list(found.diagnostics) == self._remarks(model, storage, query.spec, seen)
                if self.of.spec.kind == "relation":
                    _same_endpoints(model, found, seen)
            case "objects":
                _same_objects(list(query.objects()), expected)
            case "first":
                first = query.first()
                _same_objects([] if first is None else [first], expected[:1])
            case _:
                table = query.to_arrow() if self.form == "arrow" else _joined(self.of, query)
                wanted = model.table(self.of.spec, expected)
                assert table.schema.equals(wanted.schema, check_metadata=True)
                assert comparable(table) == comparable(wanted)

    def _check_paths(self, model: Model, storage: Storage, query: Any, seen: Seen) -> None:
        expected = model.paths(query.spec, seen)
        found = query.collect()
        assert list(found.diagnostics) == self._remarks(model, storage, query.spec, seen)
        _same_objects([path.source for path in found], [path[0] for path in expected])
        for n, _ in enumerate(self.via):
            steps = [path.relations[n] for path in found]
            _same_objects(steps, [path[n + 1] for path in expected])
            _same_endpoints(model, steps, seen)
        self._check_targets(model, query, found, seen)

    def _check_targets(self, model: Model, query: Any, found: Any, seen: Seen) -> None:
        relation, side = self.via[-1], 0 if self.backwards[-1] else 1
        versions = {v.identity[0]: v for v in model.visible(spec_of(relation.ends[side]), seen)}
        reached = [getattr(p.relations[-1], ("left_key", "right_key")[side]) for p in found]
        there = [versions[key] for key in dict.fromkeys(reached) if key in versions]
        _same_objects(list(query.targets()), there)
        for path, key in zip(found, reached, strict=True):
            if key in versions:
                _same_objects([path.target], [versions[key]])
            else:
                _expect(IntegrityError, partial(getattr, path, "target"))

    def _remarks(
        self, model: Model, storage: Storage, spec: QuerySpec, seen: Seen
    ) -> list[dict[str, Any]]:
        """On the first type that the answer looks at and that is not there yet."""
        if not storage.has_activations:
            return []
        looked_at = [spec.type]
        if self.of.spec.kind == "relation":
            asked = zip((spec.left, spec.right), self.of.ends, strict=True)
            looked_at += [spec_of(end) for asks, end in asked if asks]
        for one in [*looked_at, *spec.via]:
            activation = model.activation(one)
            if activation is not None and seen.upto < activation:
                return [{"reason": "commit_before_activation", "activation_commit_id": activation}]
        return []


@dataclass(frozen=True)
class Aggregates:
    """A query of aggregates, grouped or not."""

    of: Type
    where: Filter | None
    groups: tuple[Ref, ...]
    columns: tuple[Aggregate, ...]
    having: Having | None
    time: Time

    def check(self, model: Model, storage: Storage) -> None:
        query = Rows(self.of, self.where, (), None, 0, self.time, "collect").query(storage)
        spec: QuerySpec = query.spec
        if self.groups:
            grouped = query.group_by(*self.groups)
            if self.having is not None:
                grouped = grouped.having(self.having)
            spec = grouped.spec
        named = {f"column_{n}": one for n, one in enumerate(self.columns)}
        spec = replace(spec, aggregates=tuple(named.items()))

        def ask() -> pa.Table:
            if self.groups:
                return grouped.agg(**named)
            return storage_executor(query).aggregate(spec)

        try:
            wanted = model.aggregate(spec, self.time.seen(model, storage))
        except Refused:
            _expect(ValueError, ask)
            return
        except OverflowError:
            _expect(OverflowError, ask)
            return
        found = ask()
        assert found.schema.equals(wanted.schema)
        assert comparable(found) == comparable(wanted)
        if self.groups:
            return
        for name, one in named.items():  # the same by the method of that name
            method = getattr(query, one.function)
            operand = one.operand
            value = method() if operand is None else None
            if value is not None:
                assert value == wanted.column(name)[0].as_py()


def storage_executor(query: Any) -> Any:
    """What a query asks; several aggregates at once, without groups, have no method."""
    return query.executor


# --- comparing ----------------------------------------------------------------------------------


def _expect(error: type[Exception], ask: Callable[[], object]) -> None:
    try:
        found = ask()
    except error:
        return
    raise AssertionError(f"{error.__name__} expected, got {found!r}")


def _joined(of: Type, query: Any) -> pa.Table:
    return pa.Table.from_batches(list(query.batches()), schema=versioned_schema(of.spec))


def _same_objects(found: Sequence[Any], expected: Sequence[Version]) -> None:
    assert [_shown(thing) for thing in found] == [
        (version.commit_id, version.identity, version.thing) for version in expected
    ]


def _shown(thing: Any) -> tuple[int, tuple[str, ...], Any]:
    """Commit and identity by `meta()`."""
    meta = thing.meta()
    assert meta.type_name == spec_of(type(thing)).name
    if hasattr(meta, "key"):
        return meta.commit_id, (meta.key,), thing
    return meta.commit_id, (meta.left_key, meta.right_key, meta.instance_key), thing


def _same_endpoints(model: Model, relations: Sequence[Any], seen: Seen) -> None:
    """`.left` and `.right`: as of the same commit; the newest version in history reads."""
    for number, side in enumerate(("left", "right")):
        for relation in relations:
            end = spec_of(type(relation).__endpoints__[number])
            versions = model.visible(end, Seen(seen.upto))
            key = getattr(relation, f"{side}_key")
            expected = [version for version in versions if version.identity == (key,)]
            try:
                found = [getattr(relation, side)]
            except IntegrityError:
                found = []
            _same_objects(found, expected)


# --- random filters -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Asking:
    """What random questions are made from: a schema, and objects whose values filters may hit."""

    schema: Schema
    things: Sequence[Any]
    commits: int

    @property
    def pool(self) -> Pool:
        return self.schema.pool

    def known(self, ref: Ref) -> list[Any]:
        """Values of one place in the objects at hand."""
        operand = ref.operand
        if operand.existential:
            return []
        owned = [thing for thing in self.things if spec_of(type(thing)).ref == operand.owner]
        return [v for thing in owned if (v := value_at(operand, thing)) is not None]

    def literals(self, ref: Ref, kinds: frozenset[str]) -> Values:
        """Values to compare a place of such kinds with."""
        made = _literals(self.pool, ref.place)
        known = [v for v in self.known(ref) if not isinstance(v, bool | list | dict)]
        fitting = [v for v in known if type(v).__name__.lower() in base_kinds(kinds)]
        return st.one_of(*([st.sampled_from(fitting)] if fitting else []), *made)


def _literals(pool: Pool, place: TypePlace) -> list[Values]:
    """By the kinds of a place; enums and UUIDs take no others than their own."""
    members = [spec for spec, _ in place.members]
    own = [st.sampled_from(spec["values"]) for spec in members if spec["kind"] == "literal"]
    own += [REFS for spec in members if is_uuid(spec)]
    if own:
        return own
    kinds = sorted(base_kinds(place.kinds) & ORDERED)
    return [LITERALS[kind](pool) for kind in kinds]


@st.composite
def filters(draw: st.DrawFn, asking: Asking, one: Type) -> Filter:
    own = asking.schema.own_places(one)
    others = asking.schema.places(one)[len(own) :]
    groups = [places for places in (own, own, others) if places]  # one may have none of its own
    return _filter(draw, asking, groups, depth=2)


def _filter(draw: st.DrawFn, asking: Asking, places: list[list[Ref]], depth: int) -> Filter:
    """A condition, or several put together; `places` to choose from, by what they belong to."""
    match draw(st.sampled_from(_FORMS if depth else ["test", "not"])):
        case "test":
            ref = draw(st.sampled_from(draw(st.sampled_from(places))))
            return draw(draw(st.sampled_from(_tests(asking, ref)))())
        case "not":
            return ~_filter(draw, asking, places, max(depth - 1, 0))
        case form:
            one, other = (_filter(draw, asking, places, depth - 1) for _ in range(2))
            return one & other if form == "and" else one | other


_FORMS = ["test", "test", "test", "not", "not", "and", "and", "or"]

Making = Callable[[], st.SearchStrategy[Filter]]


def _tests(asking: Asking, ref: Ref) -> list[Making]:
    """Every kind of condition that a place takes."""
    kinds = ref.operand.kinds
    found: list[Making] = [lambda: st.sampled_from([ref.is_null(), ref.is_not_null()])]
    if "bool" in kinds:
        found.append(lambda: st.sampled_from([ref.is_true(), ref.is_false()]))
    if base_kinds(kinds) & ORDERED:
        found += [partial(_compared, asking, ref, op) for op in _OPS]
        found.append(lambda: st.lists(asking.literals(ref, kinds), max_size=3).map(ref.in_))
    if ref.place.holds_text:
        found.append(lambda: _parts(asking, ref).map(ref.startswith))
        found.append(lambda: _parts(asking, ref).map(ref.endswith))
    if "list" in kinds:
        element = ref.place.items(repr(ref)).kinds
        if base_kinds(element) & SCALARS or "str" in kinds:
            found.append(lambda: _elements(asking, ref, element).map(ref.contains))
    elif ref.place.holds_text:
        found.append(lambda: _parts(asking, ref).map(ref.contains))
    return found


def _compared(asking: Asking, ref: Ref, op: str) -> st.SearchStrategy[Filter]:
    return asking.literals(ref, ref.operand.kinds).map(getattr(ref, op))


def _elements(asking: Asking, ref: Ref, element: frozenset[str]) -> Values:
    """What a list at a place may have in it; a part of a text where that may be there instead."""
    held = [v for items in asking.known(ref) if isinstance(items, list) for v in items]
    held = [v for v in held if type(v).__name__ in element & SCALARS]
    made = [st.sampled_from(held)] if held else []
    made += _literals(asking.pool, ref.place.items(repr(ref)))
    made += [st.booleans()] if "bool" in element else []
    made += [asking.pool.texts] if "str" in ref.operand.kinds else []
    return st.one_of(*made)


_OPS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")


def _parts(asking: Asking, ref: Ref) -> st.SearchStrategy[str]:
    """Beginnings, ends and middles of the texts at hand, and other texts."""
    texts = [text for text in asking.known(ref) if isinstance(text, str)]
    if not texts:
        return asking.pool.texts
    cut = st.tuples(st.sampled_from(texts), st.integers(0, 70), st.integers(0, 2)).map(
        lambda t: (t[0][: t[1]], t[0][-t[1] :], t[0][1 : t[1]])[t[2]]
    )
    return asking.pool.texts | cut


# --- random questions ---------------------------------------------------------------------------


def times(asking: Asking, *, history: bool = True) -> st.SearchStrategy[Time]:
    modes = [
        "latest",
        "latest",
        "as_of",
        "as_of",
        "instant",
        *(["history", "since"] if history else []),
    ]
    commits = st.integers(-1, asking.commits + 1)
    return st.builds(
        Time,
        mode=st.sampled_from(modes),  # type: ignore[arg-type]
        commit=commits,
        distance=st.sampled_from([0, 0, 1, -1]),
        view=st.none() | st.none() | st.integers(1, asking.commits),
    )


def _sortable(ref: Ref) -> bool:
    try:
        value_kind(ref.operand)
    except TypeError:
        return False
    return not ref.operand.existential


_ANSWERS = ["collect", "collect", "collect", "arrow", "arrow", "objects", "batches", "first"]
_LIMITS = st.sampled_from([None, None, None, None, None, 0, 1, 2, 3])
_OFFSETS = st.sampled_from([0, 0, 0, 1, 2])


@st.composite
def rows(draw: st.DrawFn, asking: Asking) -> Rows:
    one = draw(st.sampled_from(asking.schema.types))
    return Rows(
        one,
        draw(st.none() | filters(asking, one)),
        _order(draw, asking, one),
        draw(_LIMITS),
        draw(_OFFSETS),
        draw(times(asking)),
        draw(st.sampled_from(_ANSWERS)),  # type: ignore[arg-type]
    )


@st.composite
def narrow(draw: st.DrawFn, asking: Asking) -> Rows:
    """Questions by which whole files can be left out: one or two conditions on columns."""
    one = draw(st.sampled_from(asking.schema.types))
    places = asking.schema.own_places(one)
    where = None
    if places:
        tests = [_filter(draw, asking, [places], 0) for _ in range(draw(st.integers(1, 2)))]
        where = tests[0] if len(tests) == 1 else tests[0] & tests[1]
    return Rows(one, where, (), None, 0, draw(times(asking)), "arrow")


def _order(draw: st.DrawFn, asking: Asking, one: Type) -> tuple[tuple[Ref, bool], ...]:
    keys = [ref for ref in asking.schema.own_places(one) if _sortable(ref)]
    if not keys:
        return ()
    by = st.tuples(st.sampled_from(keys), st.booleans())
    return tuple(draw(st.lists(by, max_size=2)))


@st.composite
def paths(draw: st.DrawFn, asking: Asking) -> Rows:
    relations = asking.schema.relations
    ways = [(one, backwards) for one in relations for backwards in (False, True)]
    steps = [draw(st.sampled_from(ways))]
    for _ in range(draw(st.integers(0, 2))):
        reached = _end(*steps[-1])
        following = [(one, back) for one, back in ways if _end(one, not back) is reached]
        steps.append(draw(st.sampled_from(following)))
    first, backwards = steps[0]
    source = asking.schema.of(_end(first, not backwards))
    return Rows(
        source,
        draw(st.none() | filters(asking, source)),
        _order(draw, asking, source),
        draw(_LIMITS),
        draw(_OFFSETS),
        draw(times(asking, history=False)),
        "collect",
        tuple(one for one, _ in steps),
        tuple(backwards for _, backwards in steps),
    )


def _end(relation: Type, backwards: bool) -> Any:
    return relation.ends[0 if backwards else 1]


@st.composite
def aggregations(draw: st.DrawFn, asking: Asking) -> Aggregates:
    one = draw(st.sampled_from(asking.schema.types))
    places = asking.schema.own_places(one)
    columns = st.sampled_from(_aggregates(asking, places))
    keys = [ref for ref in places if _sortable(ref)]
    groups: list[Ref] = []
    if keys:
        wanted = st.lists(st.sampled_from(keys), max_size=2, unique_by=_group_name)
        groups = draw(wanted)
    return Aggregates(
        one,
        draw(st.none() | filters(asking, one)),
        tuple(groups),
        tuple(draw(st.lists(columns, min_size=1, max_size=3))),
        draw(st.none() | _conditions(asking, columns)) if groups else None,
        draw(times(asking)),
    )


def _group_name(ref: Ref) -> str:
    return ".".join((ref.operand.name, *ref.operand.path))


def _aggregates(asking: Asking, places: Sequence[Ref]) -> list[Aggregate]:
    """All that can be asked of these places; sums of floats where their order does not matter."""
    found = [aggregates.count()]
    for ref in places:
        if ref.operand.existential:
            continue
        kinds = ref.operand.kinds
        found.append(aggregates.count(ref))
        if kinds and kinds <= NUMBERS:
            if asking.pool.exact or kinds == {"int"}:
                found.append(aggregates.sum(ref))
            if asking.pool.exact:
                found.append(aggregates.avg(ref))
        if base_kinds(kinds) == {"decimal"}:
            found.append(aggregates.sum(ref))
            if kinds == {"decimal(9,2)"}:  # of longer ones the last bit may differ
                found.append(aggregates.avg(ref))
        if _sortable(ref) and base_kind(value_kind(ref.operand)) in ORDERED:
            found += [aggregates.min(ref), aggregates.max(ref)]
        if "list" in kinds:
            found.append(aggregates.avg_len(ref))
    return found


def _conditions(asking: Asking, columns: st.SearchStrategy[Aggregate]) -> st.SearchStrategy[Having]:
    def compared(one: Aggregate) -> st.SearchStrategy[Having]:
        values = LITERALS[base_kind(one.kind)](asking.pool)
        if one.operand is not None and one.function in ("min", "max"):
            known = [v for t in asking.things if (v := _maybe(one, t)) is not None]
            values = st.sampled_from(known) | values if known else values
        if one.kind == "int":
            values = st.integers(-1, 4) | values
        return st.tuples(st.sampled_from(_OPS), values).map(
            lambda drawn: getattr(one, drawn[0])(drawn[1])
        )

    return st.recursive(
        columns.flatmap(compared),
        lambda inner: (
            st.builds(lambda a, b: a & b, inner, inner)
            | st.builds(lambda a, b: a | b, inner, inner)
            | st.builds(lambda a: ~a, inner)
        ),
        max_leaves=2,
    )


def _maybe(one: Aggregate, thing: Any) -> Any:
    operand = one.operand
    if operand is None or spec_of(type(thing)).ref != operand.owner:
        return None
    return value_at(operand, thing)
