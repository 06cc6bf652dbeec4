"""Bulk input: Arrow batches from anywhere, as rows of a declared type.

The source's schema is checked once, its batches one by one, and everything wrong is reported
together. Promise: values arrive exactly or not at all, and scalar columns never become Python
objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import ValidationError as PydanticError

from storage_engine.errors import ValidationError
from storage_engine.model.canonical import decode, dumps
from storage_engine.model.casts import Caster, Problem, masked, plan_cast
from storage_engine.model.columns import arrow_type, row_schema
from storage_engine.model.field_types import describe
from storage_engine.model.scalars import lowered
from storage_engine.model.spec import MISSING, FieldSpec, TypeSpec
from storage_engine.model.validation import say, unknown_name, validator

_STR = {"kind": "primitive", "name": "str"}

Fill = Callable[[int], pa.Array]
Maker = Callable[[pa.RecordBatch], tuple[pa.Array, list[Problem]]]


def conform(spec: TypeSpec, source_schema: pa.Schema) -> Conformer:
    """Check a source's schema against a type; ValidationError lists all that does not fit.

    Columns are the field names; a relation also has `left_key`, `right_key` and its instance key
    under its own name. A column may be missing where the field has a default or can be null.
    """
    wanted = input_fields(spec)
    wrong: dict[str, list[str]] = {}
    columns: dict[str, Maker] = {}
    for target in wanted:
        positions = source_schema.get_all_field_indices(target.name)
        if len(positions) > 1:
            wrong[target.name] = [f"column {target.name!r} is there {len(positions)} times"]
        elif positions:
            source = source_schema.field(positions[0]).type
            cast = plan_cast(target.storage, target.type_spec, source)
            if cast is not None:
                columns[target.name] = partial(_cast_column, target, positions[0], cast)
            else:
                needs = describe(target.type_spec)
                problem = f"column {target.name!r} is {source}, which cannot become {needs}"
                if pa.types.is_decimal(source):
                    problem += " without loss: cast it where it comes from"
                wrong[target.name] = [problem]
        elif (fill := _fill(target)) is not None:
            columns[target.name] = partial(_fill_column, fill)
        else:
            wrong[target.name] = [f"column {target.name!r} is missing"]
    names = [target.name for target in wanted]
    for name in dict.fromkeys(source_schema.names):
        if name not in names:
            wrong[name] = [unknown_name(name, names, what="column")]
    if wrong:
        _refuse(spec, wrong)
    return Conformer(spec, source_schema, columns)


@dataclass(frozen=True, slots=True)
class RowFault:
    """What is wrong with one row: `what` is the same for all rows of its kind."""

    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SiftedBatch:
    """A batch in two: the rows that fit, in the row schema, and by row number the ones that do
    not. `fits` tells them apart; None when all do."""

    rows: pa.RecordBatch
    fits: pa.Array | None
    faults: Mapping[int, Sequence[RowFault]]


class Conformer:
    """Turns the batches of one source into row-schema batches. Use one per source: it counts
    rows, so that errors name the row of the whole source, from 0."""

    def __init__(self, spec: TypeSpec, source_schema: pa.Schema, columns: dict[str, Maker]) -> None:
        self.spec = spec
        self.schema = row_schema(spec)
        self._source_schema = source_schema
        self._columns = columns
        self._rows = 0

    def batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch in the type's row schema; ValidationError lists every faulty column."""
        if not batch.schema.equals(self._source_schema):
            raise ValidationError(
                f"{self.spec.name}: a batch has other columns than its source announced",
                type=self.spec.name,
            )
        made: dict[str, pa.Array] = {}
        wrong: dict[str, list[str]] = {}
        for name, make in self._columns.items():
            made[name], problems = make(batch)
            if problems:
                wrong[name] = [p.say(name, self._rows) for p in problems]
        if wrong:
            _refuse(self.spec, wrong)
        self._rows += batch.num_rows
        return pa.RecordBatch.from_arrays(self._in_row_order(made, batch), schema=self.schema)

    def sift(self, batch: pa.RecordBatch) -> SiftedBatch:
        """Like `batch`, but rows that do not fit are told instead of refused."""
        made, faults = self._attempt(batch)
        if not faults:
            rows = pa.RecordBatch.from_arrays(self._in_row_order(made, batch), schema=self.schema)
            return SiftedBatch(rows, None, {})
        fits = pa.array([row not in faults for row in range(batch.num_rows)], pa.bool_())
        # What remains is looked at again: values that did not convert hid what they would be.
        rest = self.sift(batch.filter(fits))
        if rest.fits is not None:
            numbers = pc.indices_nonzero(fits).to_pylist()
            faults = {
                **faults,
                **{numbers[row]: list(of_row) for row, of_row in rest.faults.items()},
            }
            fits = pa.array([row not in faults for row in range(batch.num_rows)], pa.bool_())
        return SiftedBatch(rest.rows, fits, faults)

    def identities(self, batch: pa.RecordBatch) -> list[list[str | None]]:
        """Of rows that may not fit otherwise: the parts of each identity, None for those that
        cannot be told."""
        sources = {"entity_key": self.spec.primary_key, "instance_key": self.spec.instance_key}
        parts: list[list[str | None]] = []
        for column in self.spec.identity:
            source = sources.get(column, column)
            if source is None:
                parts.append([""] * batch.num_rows)
            else:
                made, problems = self._columns[source](batch)
                wrong = {row for problem in problems for row in problem.rows()}
                texts = enumerate(made.to_pylist())
                parts.append([None if row in wrong else text or None for row, text in texts])
        return [list(row) for row in zip(*parts, strict=True)]

    def _attempt(
        self, batch: pa.RecordBatch
    ) -> tuple[dict[str, pa.Array], dict[int, list[RowFault]]]:
        made: dict[str, pa.Array] = {}
        faults: dict[int, list[RowFault]] = {}
        for name, make in self._columns.items():
            made[name], problems = make(batch)
            for problem in problems:
                what = f"column {name!r} {problem.kind}"
                for row in problem.rows():
                    faults.setdefault(row, []).append(RowFault(what, problem.details.get(row, "")))
        return made, faults

    def _in_row_order(self, made: dict[str, pa.Array], batch: pa.RecordBatch) -> list[pa.Array]:
        sources = {"entity_key": self.spec.primary_key, "instance_key": self.spec.instance_key}
        arrays = []
        for column in self.spec.identity:
            source = sources.get(column, column)
            arrays.append(made[source] if source else pa.repeat("", batch.num_rows))
        return arrays + [made[f.name] for f in self.spec.fields]


def _cast_column(
    target: FieldSpec, index: int, cast: Caster, batch: pa.RecordBatch
) -> tuple[pa.Array, list[Problem]]:
    array, problems = cast(batch.column(index))
    if problems:
        return array, problems
    checks = (
        None if target.nullable else masked(pc.is_null(array), "is null"),
        masked(pc.equal(array, ""), "is empty") if target.field_id == _KEY else None,
    )
    return array, [p for p in checks if p is not None]


def _fill_column(fill: Fill, batch: pa.RecordBatch) -> tuple[pa.Array, list[Problem]]:
    return fill(batch.num_rows), []


_KEY = 0  # stands for a field id: key columns are wanted as str fields that may not be empty


def input_fields(spec: TypeSpec) -> list[FieldSpec]:
    """The columns that a source can have, keys first."""
    roles = (
        (spec.primary_key,)
        if spec.kind == "entity"
        else ("left_key", "right_key", spec.instance_key)
    )
    keys = [key for key in roles if key is not None]
    made = [
        FieldSpec(key, _STR, "str", nullable=False, index=False, field_id=_KEY, required=True)
        for key in keys
    ]
    return made + [f for f in spec.fields if f.name not in keys]


def zone_notes(spec: TypeSpec, schemas: Iterable[pa.Schema]) -> list[str]:
    """Which columns hold times without a zone: what they mean may surprise."""
    times = {field.name for field in spec.fields if field.storage == "datetime"}
    without = dict.fromkeys(
        column.name
        for schema in schemas
        for column in schema
        if column.name in times and pa.types.is_timestamp(column.type) and column.type.tz is None
    )
    return [f"{spec.name}.{name}: times without a zone were read as UTC" for name in without]


def _fill(field: FieldSpec) -> Fill | None:
    """How a missing column is made up; None when it cannot be."""
    target = arrow_type(field.storage)
    if field.default is not MISSING:
        value = _stored(field, decode(field.type_spec, field.default))
        return lambda rows: pa.repeat(pa.scalar(value, target), rows)
    factory = field.default_factory
    if factory is not None:
        # Each row gets its own, as each object would: the factory may count, or make ids.
        return lambda rows: pa.array([_made(field, factory()) for _ in range(rows)], target)
    return (lambda rows: pa.nulls(rows, target)) if field.nullable else None


def _made(field: FieldSpec, value: Any) -> Any:
    try:
        return _stored(field, validator(field.type_spec).validate_python(value))
    except PydanticError as error:
        problem = say(error.errors(include_url=False)[0])
        raise ValidationError(
            f"{field.name}: the result of default_factory does not fit: {problem}", field=field.name
        ) from None


def _stored(field: FieldSpec, value: Any) -> Any:
    return dumps(value) if field.storage == "json" and value is not None else lowered(value)


def _refuse(spec: TypeSpec, wrong: dict[str, list[str]]) -> NoReturn:
    problems = "; ".join(sentence for sentences in wrong.values() for sentence in sentences)
    raise ValidationError(f"{spec.name}: {problems}", type=spec.name, field=", ".join(wrong))
