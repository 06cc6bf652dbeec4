"""Rules that hold on each side of a merge and not together.

Only what changed is looked at. A rule on single rows is asked of the rows that come. Two rows that
must not be alike were changed one on each side, or a side has them alike already: so the rows that
come are compared among themselves and with what the target has changed since the two agreed. A
reference is looked up by key; where the merge ends a type, so are those that the target has made
to it meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from itertools import chain
from math import isnan
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog.records import TypeRef, parse_timestamp
from storage_engine.errors import ValidationError
from storage_engine.model.arrow import table_to_rows
from storage_engine.model.expectations import (
    Bound,
    Expectation,
    InRange,
    Matches,
    NotNull,
    RefersTo,
    Unique,
)
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.object.merge.report import Conflict
from storage_engine.repository.object.merge.rows import identities, shown_identity
from storage_engine.repository.object.merge.sides import MergeSide
from storage_engine.repository.object.read.plan import CommitWindow
from storage_engine.schema.rewrite import input_table

if TYPE_CHECKING:
    from storage_engine.repository.object.merge.comparison import TypeComparison, TypeResult

Rules = Mapping[TypeRef, Sequence[Expectation]]


@dataclass(frozen=True)
class MergedType:
    """What a merge makes of a type, and how it came to that."""

    comparison: TypeComparison
    result: TypeResult


def broken_rules(
    rules: Rules,
    types: Mapping[TypeRef, MergedType],
    untouched: Callable[[TypeRef], TypeComparison],
) -> Iterator[Conflict]:
    """`types` are those that the merge changes; `untouched` compares another."""
    for ref, expectations in rules.items():
        compared = types.get(ref)
        if compared is None or compared.result.schema.dropped:
            ended = [e for e in expectations if isinstance(e, RefersTo) and _ends(types, e)]
            comparison = untouched(ref)
            if ended and comparison.target.top is not None and compared is None:
                yield from _Check(comparison, None, types).run(ended)
        elif compared.result.written:
            yield from _Check(compared.comparison, compared.result, types).run(expectations)


def _ends(types: Mapping[TypeRef, MergedType], expectation: RefersTo) -> bool:
    compared = types.get(("entity", expectation.type_name))
    return compared is not None and compared.result.schema.dropped is not None


class _Check:
    """One type's rules on the rows that come (`result`), and on the target's own beside them."""

    def __init__(
        self,
        comparison: TypeComparison,
        result: TypeResult | None,
        types: Mapping[TypeRef, MergedType],
    ) -> None:
        self._comparison = comparison
        self._types = types
        if result is not None:
            self._spec = result.spec
            self._rows = comparison.brought(result)
            self._reader = comparison.reader(result.schema)
        else:
            self._spec = comparison.target.spec
            self._reader = comparison.target_reader()
            self._rows = self._reader.empty()

    def run(self, expectations: Sequence[Expectation]) -> Iterator[Conflict]:
        given = input_table(self._spec, self._rows)
        _require_fit(self._spec, given.schema, expectations)
        for expectation in expectations:
            match expectation:
                case Unique():
                    yield from self._unique(expectation)
                case RefersTo():
                    yield from self._referential(expectation)
                case _:
                    column = given.column(expectation.column)
                    for place in _breaking(expectation, column):
                        yield self._broken(expectation, self._rows, place)

    def _unique(self, expectation: Unique) -> Iterator[Conflict]:
        """The rows that come and share their values with another."""
        beside = self._target_rows()
        coming = self._rows.num_rows
        together = pa.concat_tables([self._rows, beside])
        columns = input_table(self._spec, together).select(list(expectation.columns))
        seen: dict[tuple[Any, ...], list[int]] = {}
        for place, values in enumerate(_tuples(columns)):
            if None not in values:
                seen.setdefault(values, []).append(place)
        for places in seen.values():
            for place in places if len(places) > 1 else ():
                if place < coming:
                    other = next(p for p in reversed(places) if p != place)
                    yield self._broken(expectation, together, place, other, other >= coming)

    def _referential(self, expectation: RefersTo) -> Iterator[Conflict]:
        rows = self._rows
        if _ends(self._types, expectation):
            rows = pa.concat_tables([rows, self._target_rows()])
        column = input_table(self._spec, rows).column(expectation.column)
        keys = column.unique().drop_null().cast(pa.string())
        there = pc.is_in(column, value_set=self._present(expectation.type_name, keys))
        dangling = pc.and_(pc.is_valid(column), pc.invert(there))
        for place in pc.indices_nonzero(dangling).to_pylist():
            yield self._broken(expectation, rows, place)

    def _present(self, type_name: str, keys: pa.Array) -> pa.Array:
        """Those of the keys that entities of a type have once the merge is done."""
        ref = ("entity", type_name)
        compared = self._types.get(ref)
        target = self._comparison.target
        present = [pa.array([], pa.string())]
        side = MergeSide(target.repository, target.head, ref)
        ended = compared is not None and compared.result.schema.dropped is not None
        if side.top is not None and not side.top.is_dropped and not ended:
            window = CommitWindow(side.head.commit_id)
            rows = side.read(side.spec, window, pa.table({"entity_key": keys}))
            present += rows.column("entity_key").chunks
        if compared is not None and compared.result.written:
            brought = compared.comparison.brought(compared.result)
            present += brought.column("entity_key").chunks
        return pa.concat_arrays(present)

    def _target_rows(self) -> pa.Table:
        """What the target has changed meanwhile and the merge leaves as it is."""
        beside = self._comparison.changed_on_target(self._reader)
        keys = self._rows.select(list(self._spec.identity))
        kept = self._comparison.where(beside, keys, negate=True)
        return kept.select(self._rows.schema.names)

    def _broken(
        self,
        expectation: Expectation,
        rows: pa.Table,
        place: int,
        other: int | None = None,
        on_target: bool = True,
    ) -> Conflict:
        (identity,) = identities(self._spec, rows.slice(place, 1))
        theirs = table_to_rows(self._spec, rows.slice(place, 1))[0]
        ours = None
        what = f"{shown_identity(self._spec, identity)} breaks a rule: {expectation.describe()}"
        if other is not None:
            (alike,) = identities(self._spec, rows.slice(other, 1))
            where = self._comparison.target if on_target else self._comparison.source
            what += f", and {shown_identity(self._spec, alike)} of {where.branch!r} has the same"
            ours = table_to_rows(self._spec, rows.slice(other, 1))[0] if on_target else None
        return Conflict(
            "broken_expectation",
            self._spec.kind,
            self._spec.name,
            what,
            identity,
            None,
            ours,
            theirs,
            tuple(expectation.columns),
        )


# -- single rows ----------------------------------------------------------------------------------


def _breaking(expectation: NotNull | InRange | Matches, column: pa.ChunkedArray) -> list[int]:
    """The places of the rows that break it."""
    match expectation:
        case NotNull():
            places = pc.indices_nonzero(pc.is_null(column)).to_pylist()
        case InRange(_, low, high):
            places = _outside(column, low, high)
        case Matches(_, pattern):
            whole = re.compile(pattern)
            values = column.to_pylist()
            fits = {v: whole.fullmatch(v) is not None for v in set(values) if v is not None}
            places = [n for n, v in enumerate(values) if v is not None and not fits[v]]
    return list(places)


def _outside(column: pa.ChunkedArray, low: Bound | None, high: Bound | None) -> list[int]:
    least, most = (_bound(bound, column.type) for bound in (low, high))

    def outside(value: Any) -> bool:
        if isinstance(value, float) and isnan(value):
            return most is not None  # greater than all others
        return (least is not None and value < least) or (most is not None and value > most)

    return [n for n, v in enumerate(column.to_pylist()) if v is not None and outside(v)]


def _bound(bound: Bound | None, kind: pa.DataType) -> Any:
    """Texts are dates, times or texts, as the column is."""
    if not isinstance(bound, str):
        return Decimal(repr(bound)) if isinstance(bound, float) and _is_decimal(kind) else bound
    if pa.types.is_timestamp(kind):
        return parse_timestamp(bound)
    if pa.types.is_date(kind):
        return date.fromisoformat(bound)
    return time.fromisoformat(bound) if pa.types.is_time(kind) else bound


def _is_decimal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind))


def _tuples(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    columns = [
        (column.cast(pa.string()) if isinstance(column.type, pa.JsonType) else column).to_pylist()
        for column in table.columns
    ]
    return zip(*columns, strict=True)


def _require_fit(spec: TypeSpec, schema: pa.Schema, expectations: Sequence[Expectation]) -> None:
    """All that does not fit, at once."""
    wrong = list(chain.from_iterable(_unfit(each, schema) for each in expectations))
    if wrong:
        raise ValidationError(
            f"{spec.name}: expectations do not fit: {'; '.join(wrong)} (columns: "
            f"{', '.join(schema.names)})",
            type=spec.name,
        )


def _unfit(expectation: Expectation, schema: pa.Schema) -> Iterator[str]:
    missing = [name for name in expectation.columns if name not in schema.names]
    if missing:
        yield f"{expectation.describe()}: there is no column {', '.join(missing)}"
        return
    kind = schema.field(expectation.columns[0]).type
    match expectation:
        case InRange(column, low, high):
            texts = [isinstance(bound, str) for bound in (low, high) if bound is not None]
            numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or _is_decimal(kind)
            try:
                parsed = numeric != any(texts) and [_bound(b, kind) for b in (low, high)]
            except ValueError:
                parsed = False
            if parsed is False:
                yield f"{expectation.describe()}: {column} is {kind}"
        case Matches(column) | RefersTo(column) if not pa.types.is_string(kind):
            yield f"{expectation.describe()}: {column} is {kind}, not a text"
        case _:
            return
