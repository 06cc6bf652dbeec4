"""Rows of one schema version made into rows of another: by themselves where the change is additive,
through upgraders otherwise.

Additive changes are made column by column, in Arrow. Whatever comes out is checked against the
new type before anything is stored. Promise: a rewrite has the identities that it was given, in
their order, or raises `MigrationError` with the type, the identity and the old row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.errors import MigrationError, ValidationError
from storage_engine.model.arrow import row_schema, rows_to_table, table_to_rows
from storage_engine.model.canonical import dumps
from storage_engine.model.casts import Caster, JsonCast, Problem, plan_cast
from storage_engine.model.conform import conform, input_fields
from storage_engine.model.field_types import unordered
from storage_engine.model.record import RecordPlan, make_plan
from storage_engine.model.spec import FieldSpec, TypeSpec
from storage_engine.schema.diff import source_fields
from storage_engine.schema.upgraders import Upgrader
from storage_engine.wording import counted

Rewrite = Callable[[pa.Table], pa.Table]  # from the one row schema to the other
_SHOWN = 500  # characters of an old row in a message


def rewrite(stored: TypeSpec, target: TypeSpec, steps: Sequence[Upgrader]) -> Rewrite:
    """How rows of `stored` become rows of `target`. Without steps the change is additive."""
    if not steps:
        return _Additive(stored, target)
    return _Upgraded(stored, target, steps)


class _Additive:
    """Column by column: as it is, cast, or made up from the default."""

    def __init__(self, stored: TypeSpec, target: TypeSpec) -> None:
        self._stored = stored
        self._target = target
        self._schema = row_schema(target)
        sources = source_fields(stored, target)
        self._casts: list[tuple[FieldSpec, str, Caster | None]] = []
        added: list[FieldSpec] = []
        for field in target.fields:
            if field.name in sources:
                before = stored.field(sources[field.name])
                self._casts.append((field, before.name, _cast(before, field, stored)))
            else:
                added.append(field)
        # Made up as for a bulk source that lacks these columns.
        self._added = [field.name for field in added]
        filler = TypeSpec(target.kind, target.name, tuple(added), **_keys(target))
        self._keys = [field.name for field in input_fields(filler) if field.name not in self._added]
        self._fill = conform(filler, _key_schema(self._keys)) if added else None

    def __call__(self, table: pa.Table) -> pa.Table:
        made: dict[str, pa.ChunkedArray] = {n: table.column(n) for n in self._target.identity}
        for field, source, cast in self._casts:
            column = table.column(source)
            if cast is None:
                made[field.name] = column
                continue
            chunks = []
            offset = 0
            for chunk in column.chunks:
                values, problems = cast(chunk)
                if problems:
                    raise self._refusal(table, offset, field, problems[0])
                chunks.append(values)
                offset += len(chunk)
            made[field.name] = pa.chunked_array(chunks, self._schema.field(field.name).type)
        if self._fill is not None:
            keys = pa.record_batch(
                [pa.repeat("k", table.num_rows) for _ in self._keys], schema=_key_schema(self._keys)
            )
            filled = self._fill.batch(keys)
            made |= {n: pa.chunked_array([filled.column(n)]) for n in self._added}
        columns = [made[name] for name in self._schema.names]
        for field in self._target.fields:
            if not field.nullable and made[field.name].null_count:
                first = int(pc.index(pc.is_null(made[field.name]), value=True).as_py())
                problem = Problem("is null", 1, 0)
                raise self._refusal(table, first, field, problem)
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _refusal(
        self, table: pa.Table, offset: int, field: FieldSpec, problem: Problem
    ) -> MigrationError:
        return row_error(
            self._stored, table, offset + problem.first, f"field {field.name!r} {problem.what}"
        )


def _cast(before: FieldSpec, now: FieldSpec, stored: TypeSpec) -> Caster | None:
    """None: the column stays as it is."""
    same = unordered(before.type_spec) == unordered(now.type_spec)
    if same and before.storage == now.storage:
        return None
    if now.storage == "json":
        text = before.storage == "json"
        return _ExactFloats(JsonCast(now.type_spec, text=text), text=text)
    column = row_schema(stored).field(before.name).type
    cast = plan_cast(now.storage, now.type_spec, column)
    if cast is None:
        raise MigrationError(
            f"{stored.name}: field {now.name!r} cannot become {now.storage} by itself",
            type=stored.name,
        )
    return cast


class _ExactFloats:
    """A cast into JSON that refuses what a column's would: an integer that its float is not."""

    def __init__(self, cast: Caster, *, text: bool) -> None:
        self._cast = cast
        self._text = text

    def __call__(self, column: pa.Array) -> tuple[pa.Array, list[Problem]]:
        values, problems = self._cast(column)
        if problems or not (self._text or pa.types.is_integer(column.type)):
            return values, problems
        long = pc.match_substring_regex(column.cast(pa.string()), _LONG_INTEGER)
        for row in pc.indices_nonzero(pc.fill_null(long, False)).to_pylist():
            before, after = column[row].as_py(), values[row].as_py()
            if _is_rounded(
                orjson.loads(before) if self._text else before,
                None if after is None else orjson.loads(after),
            ):
                what = "has an integer that a float cannot hold exactly"
                return values, [Problem(what, 1, row)]
        return values, []


_LONG_INTEGER = r"\d{16}"  # shorter ones are exact


def _is_rounded(before: Any, after: Any) -> bool:
    match before, after:
        case int(), float():
            return before != after
        case list(), list():
            return any(map(_is_rounded, before, after))
        case dict(), dict():
            return any(_is_rounded(value, after.get(key)) for key, value in before.items())
    return False


class _Upgraded:
    """Through one upgrader after the other, then checked against the target."""

    def __init__(self, stored: TypeSpec, target: TypeSpec, steps: Sequence[Upgrader]) -> None:
        self._stored = stored
        self._target = target
        self._steps = steps
        keys = [f.name for f in input_fields(target)][: _key_count(target)]
        self._plan: RecordPlan = make_plan(target.name, target.fields, keys=keys)

    def __call__(self, table: pa.Table) -> pa.Table:
        if table.num_rows == 0:
            return row_schema(self._target).empty_table()
        rows: list[dict[str, Any]] | None = None
        columns: pa.Table | None = input_table(self._stored, table)
        for step in self._steps:
            if step.batch:
                columns = columns if columns is not None else self._as_table(step, rows or [])
                columns = self._run_batch(step, columns, table)
                rows = None
            else:
                if rows is None:
                    first = step is self._steps[0]
                    rows = table_to_rows(self._stored, table) if first else _as_rows(columns)
                rows = self._run_rows(step, rows, table)
                columns = None
        made = self._checked_table(columns, table) if rows is None else self._checked(rows, table)
        self._check_identity(table, made)
        return made

    def _run_rows(
        self, step: Upgrader, rows: list[dict[str, Any]], table: pa.Table
    ) -> list[dict[str, Any]]:
        made = []
        for number, row in enumerate(rows):
            try:
                upgraded = step.function(row)
            except Exception as error:  # whatever a user's function raises
                raise self._failed(step, table, number, error) from error
            if not isinstance(upgraded, Mapping):
                what = f"gave {type(upgraded).__name__} instead of a dict"
                hint = "; rows cannot be left out" if upgraded is None else ""
                raise row_error(self._stored, table, number, f"upgrader {step.name} {what}{hint}")
            made.append(dict(upgraded))
        return made

    def _run_batch(self, step: Upgrader, columns: pa.Table, table: pa.Table) -> pa.Table:
        try:
            made = step.function(columns)
        except Exception as error:  # whatever a user's function raises
            number = _culprit(step, columns)
            raise self._failed(step, table, number, error) from error
        if not isinstance(made, pa.Table):
            raise MigrationError(
                f"{self._stored.name}: upgrader {step.name} gave {type(made).__name__} instead of "
                "an Arrow table; nothing was published",
                type=self._stored.name,
            )
        if made.num_rows != columns.num_rows:
            raise MigrationError(
                f"{self._stored.name}: upgrader {step.name} made {counted(made.num_rows, 'row')} "
                f"of {columns.num_rows}; nothing was published. Each row stays one, with its key",
                type=self._stored.name,
            )
        return made

    def _as_table(self, step: Upgrader, rows: list[dict[str, Any]]) -> pa.Table:
        """What upgraders of rows made, for one of tables: with what any of the rows has."""
        columns = {}
        for name in dict.fromkeys(name for row in rows for name in row):
            try:
                if not isinstance(name, str):
                    raise TypeError("a field's name is a str")
                columns[name] = _as_column([row.get(name) for row in rows])
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise MigrationError(
                    f"{self._stored.name}: the values of {name!r} make no column for upgrader "
                    f"{step.name} (from version {step.from_version}), which takes a table: "
                    f"{error}; nothing was published. The upgrader before it must give each field "
                    "one type",
                    type=self._stored.name,
                ) from error
        return pa.table(columns)

    def _failed(
        self, step: Upgrader, table: pa.Table, number: int, error: Exception
    ) -> MigrationError:
        what = f"upgrader {step.name} (from version {step.from_version}) failed with "
        return row_error(self._stored, table, number, f"{what}{type(error).__name__}: {error}")

    def _checked(self, rows: list[dict[str, Any]], table: pa.Table) -> pa.Table:
        valid = []
        for number, row in enumerate(rows):
            try:
                valid.append(self._plan.validate(row))
            except ValidationError as error:
                raise row_error(
                    self._stored, table, number, f"what its upgrader made does not fit: {error}"
                ) from error
        return rows_to_table(self._target, valid)

    def _checked_table(self, columns: pa.Table | None, table: pa.Table) -> pa.Table:
        assert columns is not None
        try:
            conformer = conform(self._target, columns.schema)
        except ValidationError as error:
            raise row_error(
                self._stored, table, 0, f"what its upgrader made does not fit: {error}"
            ) from error
        batches, number = [], 0
        for batch in columns.to_batches():
            sifted = conformer.sift(batch)
            if sifted.faults:
                at, faults = min(sifted.faults.items())
                fault = faults[0]
                what = f"{fault.what} {fault.detail}".strip()
                raise row_error(
                    self._stored, table, number + at, f"what its upgrader made does not fit: {what}"
                )
            batches.append(sifted.rows)
            number += batch.num_rows
        return pa.Table.from_batches(batches, schema=row_schema(self._target))

    def _check_identity(self, table: pa.Table, made: pa.Table) -> None:
        for name in self._target.identity:
            same = pc.equal(table.column(name), made.column(name))
            if pc.all(same).as_py() is False:
                number = int(pc.index(same, value=False).as_py())
                now = made.column(name)[number].as_py()
                raise row_error(
                    self._stored, table, number, f"its upgrader made it {now!r}; keys cannot change"
                )


def input_table(spec: TypeSpec, table: pa.Table) -> pa.Table:
    """Rows by the names that people use (a key by its own), JSON fields in Arrow's JSON type."""
    columns: dict[str, pa.ChunkedArray] = {}
    sources = {"entity_key": spec.primary_key, "instance_key": spec.instance_key}
    for name in spec.identity:
        if (shown := sources.get(name, name)) is not None:
            columns[shown] = table.column(name)
    for field in spec.fields:
        column = table.column(field.name)
        columns[field.name] = column.cast(pa.json_()) if field.storage == "json" else column
    return pa.table(columns)


def row_error(spec: TypeSpec, table: pa.Table, number: int, what: str) -> MigrationError:
    """Names the type, the identity and the row as it was."""
    row = table_to_rows(spec, table.slice(number, 1))[0]
    keys = tuple(table.column(name)[number].as_py() for name in spec.identity)
    identity = keys[0] if spec.kind == "entity" else keys if spec.instance_key else keys[:2]
    shown = repr(row)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    return MigrationError(
        f"{spec.name} {identity!r}: {what}; nothing was published. The row was {shown}",
        type=spec.name,
        identity=identity,
        old=row,
    )


def _culprit(step: Upgrader, columns: pa.Table) -> int:
    """The row that a batch upgrader fails on, found by halving; the first if none does alone."""
    low, count = 0, columns.num_rows
    while count > 1:
        half = count // 2
        if _fails(step, columns.slice(low, half)):
            count = half
        elif _fails(step, columns.slice(low + half, count - half)):
            low, count = low + half, count - half
        else:
            return low
    return low


def _fails(step: Upgrader, columns: pa.Table) -> bool:
    try:
        step.function(columns)
    except Exception:  # noqa: BLE001 - whatever a user's function raises
        return True
    return False


def _as_rows(columns: pa.Table | None) -> list[dict[str, Any]]:
    """Between a batch upgrader and one of rows: nobody knows the type there."""
    assert columns is not None
    names = columns.column_names
    values = []
    for column in columns.columns:
        if isinstance(column.type, pa.JsonType):
            texts = column.cast(pa.string()).to_pylist()
            values.append([None if text is None else orjson.loads(text) for text in texts])
        else:
            values.append(column.to_pylist())
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def _as_column(values: list[Any]) -> pa.Array:
    """Lists and dicts in Arrow's JSON type, as in the tables that come from the storage."""
    if any(isinstance(value, list | dict) for value in values):
        texts = [None if value is None else dumps(value) for value in values]
        return pa.array(texts, pa.string()).cast(pa.json_())
    return pa.array([str(value) if isinstance(value, UUID) else value for value in values])


def _keys(spec: TypeSpec) -> dict[str, Any]:
    return {
        "primary_key": spec.primary_key,
        "instance_key": spec.instance_key,
        "left": spec.left,
        "right": spec.right,
    }


def _key_count(spec: TypeSpec) -> int:
    if spec.kind == "entity":
        return 1
    return 3 if spec.instance_key else 2


def _key_schema(names: Sequence[str]) -> pa.Schema:
    return pa.schema([pa.field(name, pa.string()) for name in names])
