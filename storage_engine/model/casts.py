"""Lossless conversion of one Arrow column to a field's column.

`plan_cast` decides by types alone, once per source; the cast then looks at values, a whole column
at a time. Promise: a cast either keeps every value exactly or says which rows it could not keep,
the first of them and why. Only JSON columns are built value by value, in Python, and validated in
Pydantic's strict mode: a bulk source is converted, never coerced.

    str       any string type, dictionaries of them
    int       any integer type; floats and decimals that are whole (pandas makes ints with gaps
              floats, Spark makes uint64 decimals), within 64 bits
    float     any float type; integers up to 2**53
    bool      booleans
    datetime  timestamps of any unit and zone; without zone they are UTC; whole microseconds only
    date      date32, date64
    time      times of day of any unit, whole microseconds only; texts of ISO 8601, as Spark has no
              such type
    decimal   decimals and integers of any width, and texts of decimal numbers, with no more digits
              than declared
    bytes     any binary type, dictionaries of them
    json      nested or scalar values, taken as they are; a string column is JSON text, except
              where `str` itself is a declared member (`str | int`): there it is the value;
              a column of Arrow's JSON extension type is always JSON text

A text or int column of an enum or `Literal` is looked through for other values, one of UUIDs for
other texts; these may also be Arrow's own UUIDs, or 16 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import ValidationError as PydanticError

from storage_engine.model.canonical import dumps
from storage_engine.model.columns import ARROW_TYPES, arrow_type
from storage_engine.model.decimals import Precision, decimal_type
from storage_engine.model.field_types import classify, is_uuid, scalar_spec, takes_strings
from storage_engine.model.scalars import UUID_TEXT, listed, read_time
from storage_engine.model.spec import Storage
from storage_engine.model.validation import INT64_MAX, say, validator


@dataclass(frozen=True, slots=True)
class Problem:
    """`first` is a row number, counted from 0, within the batch."""

    what: str
    count: int
    first: int
    mask: pa.Array | None = field(default=None, compare=False, repr=False)  # the rows, if known
    details: Mapping[int, str] = field(default_factory=dict, compare=False, repr=False)  # by row

    @property
    def kind(self) -> str:
        """What is wrong, without what differs from row to row."""
        return self.what.partition(",")[0]

    def rows(self) -> list[int]:
        """The faulty rows, where whoever found the problem says which they are."""
        return pc.indices_nonzero(self.mask).to_pylist() if self.mask is not None else []

    def say(self, column: str, offset: int) -> str:
        rows = "1 row" if self.count == 1 else f"{self.count} rows"
        where = "row" if self.count == 1 else "first row"
        return f"column {column!r} {self.what} in {rows} ({where} {offset + self.first})"


def masked(mask: pa.Array, what: str) -> Problem | None:
    """The problem of the rows where `mask` is true; None when there are none."""
    count = pc.sum(mask).as_py()
    if not count:
        return None
    first = int(pc.index(mask, value=True).as_py())
    return Problem(what, int(count), first, pc.fill_null(mask, False))


@dataclass(frozen=True)
class JsonCast:
    """Turns a column into canonical JSON of `type_spec`; `text`: the column holds JSON text."""

    type_spec: Mapping[str, Any]
    text: bool

    def __call__(self, column: pa.Array) -> tuple[pa.Array, list[Problem]]:
        check = validator(self.type_spec)
        absent = not self.text and _has_struct(column.type)
        made: list[str | None] = []
        faults: list[tuple[int, str]] = []
        for row, value in enumerate(_values(column)):
            if value is None:
                made.append(None)
                continue
            try:
                if isinstance(value, _Unreadable):
                    raise value
                if self.text:
                    valid = check.validate_json(value, strict=True)
                else:
                    given = value
                    if absent:
                        given = drop_absent(self.type_spec, value, {}, column.type)
                    valid = check.validate_python(given, strict=True)
                made.append(None if valid is None else dumps(valid))
            except PydanticError as error:
                faults.append((row, _first_message(error)))
            except _Unreadable as error:
                faults.append((row, str(error)))
        if not faults:
            return pa.array(made, pa.string()), []
        row, message = faults[0]
        details = dict(faults)
        problem = Problem(
            f"does not fit its type, {message},",
            len(faults),
            row,
            pa.array([number in details for number in range(len(column))], pa.bool_()),
            details,
        )
        return pa.nulls(len(column), pa.string()), [problem]


class _Unreadable(Exception):
    """An Arrow value that has no Python form, such as nanoseconds without pandas."""


def _values(column: pa.Array) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
        return values
    except (ValueError, KeyError):  # one bad value spoils all: find out which
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except KeyError as error:
        return _Unreadable(f"repeated map key {error}")
    except ValueError as error:
        return _Unreadable(str(error))


def _first_message(error: PydanticError) -> str:
    item = error.errors(include_url=False)[0]
    path = "".join(f"[{p!r}]" for p in item["loc"])
    return f"{path} {say(item)}".strip()


def _has_struct(source: pa.DataType) -> bool:
    if pa.types.is_map(source):
        return _has_struct(source.item_type)
    if pa.types.is_struct(source):
        return True
    return any(_has_struct(source.field(i).type) for i in range(source.num_fields))


def _inner(source: pa.DataType, key: str = "") -> pa.DataType:
    """The type of what is in a value of this type."""
    if pa.types.is_struct(source):
        return source.field(key).type
    if pa.types.is_map(source):
        return source.item_type
    return source.value_type if pa.types.is_nested(source) else source


def drop_absent(
    type_spec: Mapping[str, Any], value: Any, env: Mapping[str, Any], source: pa.DataType
) -> Any:
    """Without the nulls that stand for "no such key".

    A struct has every key in every row, so a key that a record lacks comes as null. Where null is
    not a value of that key, it can only mean absence. In a map, a null is one.
    """
    is_map = pa.types.is_map(source)
    match type_spec["kind"]:
        case "ref":
            return drop_absent(env[type_spec["name"]], value, env, source)
        case "union":
            nested = [m for m in type_spec["members"] if m["kind"] in _FITS]
            fitting = [m for m in nested if isinstance(value, _FITS[m["kind"]])]
            return drop_absent(fitting[0], value, env, source) if len(fitting) == 1 else value
        case "list" if isinstance(value, list):
            return [drop_absent(type_spec["item"], item, env, _inner(source)) for item in value]
        case "dict" if isinstance(value, dict):
            item = type_spec["value"]
            keep_null = is_map or classify(item)[1]
            return {
                key: drop_absent(item, v, env, _inner(source, key))
                for key, v in value.items()
                if v is not None or keep_null
            }
        case "typed_dict" if isinstance(value, dict):
            inner = {**env, type_spec["name"]: type_spec}
            return {
                key: drop_absent(field["type"], v, inner, _inner(source, key)) if field else v
                for key, v in value.items()
                for field in [type_spec["fields"].get(key)]
                if v is not None or is_map or _null_is_meant(field)
            }
        case _:
            return value


_FITS: dict[str, type] = {"list": list, "dict": dict, "typed_dict": dict, "ref": dict}


def _null_is_meant(field: Mapping[str, Any] | None) -> bool:
    """Required keys keep their null, so that validation reports it instead of absence."""
    return field is None or bool(field["required"]) or classify(field["type"])[1]


Check = tuple[Callable[[pa.Array], pa.Array], str]  # the rows at fault, and what is wrong
Caster = Callable[[pa.Array], tuple[pa.Array, list[Problem]]]

_EXACT = 2**53  # up to here every integer is a float
_DIGITS = 76  # of the widest decimal
_FRACTION, _BEYOND = "is not a whole number", "is beyond 64 bits"
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # years 1 to 9999, which Python can hold
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY_MS = 86_400_000


@dataclass(frozen=True)
class Cast:
    """Checks, then a conversion that is only run when no check found anything."""

    target: pa.DataType
    convert: Callable[[pa.Array], pa.Array]
    checks: tuple[Check, ...] = ()

    def __call__(self, column: pa.Array) -> tuple[pa.Array, list[Problem]]:
        problems = [p for find, what in self.checks if (p := masked(find(column), what))]
        if problems:
            return pa.nulls(len(column), self.target), problems
        return self.convert(column), []


def plan_cast(storage: Storage, type_spec: Mapping[str, Any], source: pa.DataType) -> Caster | None:
    """How a column of type `source` becomes the field's; None when it cannot without loss."""
    if isinstance(source, pa.BaseExtensionType):
        if storage == "json" and isinstance(source, pa.JsonType):
            return _after(lambda c: c.storage, JsonCast(type_spec, text=True))
        return _after(lambda c: c.storage, plan_cast(storage, type_spec, source.storage_type))
    if pa.types.is_dictionary(source):
        plan = plan_cast(storage, type_spec, source.value_type)
        return _after(lambda c: c.dictionary_decode(), plan)
    if pa.types.is_run_end_encoded(source):
        return _after(pc.run_end_decode, plan_cast(storage, type_spec, source.value_type))
    target = arrow_type(storage)
    if pa.types.is_null(source):
        return Cast(target, lambda c: pa.nulls(len(c), target))
    if storage == "json":
        return JsonCast(type_spec, text=_is_string(source) and not takes_strings(type_spec))
    decimals = decimal_type(storage)
    if decimals is not None:
        return _decimal(source, decimals)
    scalar = scalar_spec(type_spec)
    if is_uuid(scalar):
        return _uuid(source)
    make = _SCALARS[storage]
    plan = make(source)
    if plan is not None and scalar["kind"] == "literal":
        return partial(_one_of, scalar["values"], plan)
    return plan


def _after(first: Callable[[pa.Array], pa.Array], plan: Caster | None) -> Caster | None:
    return None if plan is None else lambda column: plan(first(column))


def _is_string(source: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(source)
        or pa.types.is_large_string(source)
        or pa.types.is_string_view(source)
    )


def _str(source: pa.DataType) -> Cast | None:
    if not _is_string(source):
        return None
    check = (_not_utf8, "is not valid UTF-8")
    return Cast(pa.string(), lambda c: c.cast(pa.string()), (check,))


def _not_utf8(column: pa.Array) -> pa.Array:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        raw = column.cast(pa.binary()).to_pylist()
        return pa.array([v is not None and not _decodes(v) for v in raw], pa.bool_())
    return pa.repeat(False, len(column))


def _decodes(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _int(source: pa.DataType) -> Cast | None:
    target = pa.int64()
    if pa.types.is_uint64(source):
        check = (
            lambda c: pc.greater(c, pa.scalar(INT64_MAX, pa.uint64())),
            _BEYOND,
        )
        return Cast(target, lambda c: c.cast(target), (check,))
    if pa.types.is_integer(source):
        return Cast(target, lambda c: c.cast(target))
    if pa.types.is_floating(source):
        return Cast(target, _to_int64, ((_not_whole, _FRACTION), (_beyond_int64, _BEYOND)))
    if pa.types.is_decimal(source) and source.precision - source.scale <= _DIGITS:
        checks = ((_not_whole_decimal, _FRACTION), (_decimal_beyond_int64, _BEYOND))
        return Cast(target, lambda c: _whole_part(c).cast(target), checks)
    return None


def _not_whole(column: pa.Array) -> pa.Array:
    values = column.cast(pa.float64())
    return pc.invert(pc.and_(pc.equal(pc.trunc(values), values), pc.is_finite(values)))


def _beyond_int64(column: pa.Array) -> pa.Array:
    """Of finite ones: no float lies between the greatest integer and 2**63."""
    values = column.cast(pa.float64())
    outside = pc.or_(pc.less(values, -(2.0**63)), pc.greater_equal(values, 2.0**63))
    return pc.and_(outside, pc.is_finite(values))


def _to_int64(column: pa.Array) -> pa.Array:
    # Arrow's safe cast takes whole floats beyond 2**53 for inexact; that they fit was looked at.
    return column.cast(pa.float64()).cast(pa.int64(), safe=False)


def _whole_part(column: pa.Array) -> pa.Array:
    return column.cast(pa.decimal256(_DIGITS, 0), safe=False)


def _not_whole_decimal(column: pa.Array) -> pa.Array:
    if column.type.scale <= 0:
        return pa.repeat(False, len(column))
    wide = pa.decimal256(_DIGITS, column.type.scale)
    return pc.not_equal(_whole_part(column).cast(wide), column.cast(wide))


def _decimal_beyond_int64(column: pa.Array) -> pa.Array:
    whole = _whole_part(column)
    low, high = (pa.scalar(Decimal(n), whole.type) for n in (-INT64_MAX - 1, INT64_MAX))
    return pc.or_(pc.less(whole, low), pc.greater(whole, high))


def _float(source: pa.DataType) -> Cast | None:
    target = pa.float64()
    if pa.types.is_floating(source):
        check = (lambda c: pc.invert(pc.is_finite(c.cast(target))), "is NaN or infinite")
        return Cast(target, lambda c: c.cast(target), (check,))
    if pa.types.is_integer(source):
        check = (_inexact, "is an integer that a float cannot hold exactly")
        return Cast(target, lambda c: c.cast(target), (check,) if source.bit_width == 64 else ())
    return None


def _inexact(column: pa.Array) -> pa.Array:
    above = pc.greater(column, pa.scalar(_EXACT, column.type))
    if pa.types.is_unsigned_integer(column.type):
        return above
    return pc.or_(above, pc.less(column, pa.scalar(-_EXACT, column.type)))


def _bool(source: pa.DataType) -> Cast | None:
    return Cast(pa.bool_(), lambda c: c) if pa.types.is_boolean(source) else None


def _datetime(source: pa.DataType) -> Cast | None:
    if not pa.types.is_timestamp(source):
        return None
    # Both with and without a zone, the numbers are instants in UTC.
    per_second = _PER_SECOND[source.unit]
    checks: list[Check] = []
    if source.unit != "ns":  # nanoseconds in 64 bits end in 2262
        low, high = _FIRST_DAY * 86_400 * per_second, (_LAST_DAY + 1) * 86_400 * per_second - 1
        outside = partial(_outside, low=low, high=high)
        checks.append((outside, "lies outside years 1 to 9999"))
    else:
        checks.append((_sub_micro, "is finer than microseconds"))
    return Cast(ARROW_TYPES["datetime"], partial(_to_micros, per_second=per_second), tuple(checks))


def _outside(column: pa.Array, *, low: int, high: int) -> pa.Array:
    ticks = column.view(pa.int64())
    return pc.or_(pc.less(ticks, low), pc.greater(ticks, high))


def _sub_micro(column: pa.Array) -> pa.Array:
    ticks = column.view(pa.int64())
    return pc.not_equal(pc.multiply(pc.divide(ticks, 1000), 1000), ticks)


def _to_micros(column: pa.Array, *, per_second: int) -> pa.Array:
    ticks = column.view(pa.int64())
    if per_second > 10**6:
        ticks = pc.divide(ticks, per_second // 10**6)
    else:
        ticks = pc.multiply(ticks, 10**6 // per_second)
    return ticks.view(ARROW_TYPES["datetime"])


def _date(source: pa.DataType) -> Cast | None:
    target = pa.date32()
    if pa.types.is_date32(source):
        check: Check = (_outside_days, "lies outside years 1 to 9999")
        return Cast(target, lambda c: c, (check,))
    if pa.types.is_date64(source):
        low, high = _FIRST_DAY * _DAY_MS, (_LAST_DAY + 1) * _DAY_MS - 1
        outside = partial(_outside, low=low, high=high)
        checks = (
            (outside, "lies outside years 1 to 9999"),
            (_within_day, "has a time of day"),
        )
        return Cast(target, lambda c: c.cast(target), checks)
    return None


def _outside_days(column: pa.Array) -> pa.Array:
    days = column.view(pa.int32())
    return pc.or_(pc.less(days, _FIRST_DAY), pc.greater(days, _LAST_DAY))


def _within_day(column: pa.Array) -> pa.Array:
    ticks = column.view(pa.int64())
    return pc.not_equal(pc.multiply(pc.divide(ticks, _DAY_MS), _DAY_MS), ticks)


def _bytes(source: pa.DataType) -> Cast | None:
    is_binary = (
        pa.types.is_binary(source)
        or pa.types.is_large_binary(source)
        or pa.types.is_binary_view(source)
        or pa.types.is_fixed_size_binary(source)
    )
    return Cast(pa.binary(), lambda c: c.cast(pa.binary())) if is_binary else None


def _time(source: pa.DataType) -> Caster | None:
    target = ARROW_TYPES["time"]
    if _is_string(source):
        return _time_of_text
    if not pa.types.is_time(source):
        return None
    last = 86_400 * _PER_SECOND[source.unit] - 1
    checks: list[Check] = [(partial(_outside_clock, last=last), "lies outside of a day")]
    if source.unit == "ns":
        checks.append((_sub_micro, "is finer than microseconds"))
    return Cast(target, lambda c: c.cast(target), tuple(checks))


def _time_of_text(column: pa.Array) -> tuple[pa.Array, list[Problem]]:
    return _read_each(read_time, column, ARROW_TYPES["time"], "is not a time of day")


def _read_each(
    read: Callable[[Any], Any], column: pa.Array, target: pa.DataType, what: str
) -> tuple[pa.Array, list[Problem]]:
    made: list[Any] = []
    faults: dict[int, str] = {}
    for row, scalar in enumerate(column):
        try:
            value = scalar.as_py()
            made.append(None if value is None else read(value))
        except ValueError:  # text that is not UTF-8, too
            faults[row] = f"got {_shown_value(scalar)}"
            made.append(None)
    problems = [_faulty(what, faults, len(column))] if faults else []
    return pa.array(made, target), problems


def _outside_clock(column: pa.Array, *, last: int) -> pa.Array:
    ticks = column.view(pa.int32() if pa.types.is_time32(column.type) else pa.int64())
    return pc.or_(pc.less(ticks, 0), pc.greater(ticks, last))


def _decimal(source: pa.DataType, target: Precision) -> Caster | None:
    if pa.types.is_integer(source) or pa.types.is_decimal(source):
        return partial(_to_decimal, target)
    return partial(_decimal_of, target) if _is_string(source) else None


def _to_decimal(target: Precision, column: pa.Array) -> tuple[pa.Array, list[Problem]]:
    try:
        made = column.cast(target.arrow)
        made.validate(full=True)  # a cast to the same scale does not look at the digits
        return made, []
    except pa.ArrowInvalid:  # of wide integers by their type, whatever the values are
        return _decimal_of(target, column)


def _decimal_of(target: Precision, column: pa.Array) -> tuple[pa.Array, list[Problem]]:
    what = f"is no decimal of {target.precision} digits with {target.scale} after the point"
    return _read_each(target.read, column, target.arrow, what)


def _uuid(source: pa.DataType) -> Caster | None:
    if pa.types.is_fixed_size_binary(source) and source.byte_width == 16:
        return _uuid_of_bytes
    return _uuid_of_text if _is_string(source) else None


def _uuid_of_bytes(column: pa.Array) -> tuple[pa.Array, list[Problem]]:
    texts = [None if raw is None else str(UUID(bytes=raw)) for raw in column.to_pylist()]
    return pa.array(texts, pa.string()), []


def _uuid_of_text(column: pa.Array) -> tuple[pa.Array, list[Problem]]:
    wrong = _not_utf8(column)
    if not pc.any(wrong).as_py():
        wrong = pc.invert(pc.match_substring_regex(column, UUID_TEXT))
    if not pc.any(pc.fill_null(wrong, False)).as_py():
        return pc.ascii_lower(column.cast(pa.string())), []
    return _refused(column, wrong, "is not a UUID")


def _one_of(values: list[Any], plan: Caster, column: pa.Array) -> tuple[pa.Array, list[Problem]]:
    array, problems = plan(column)
    if problems:
        return array, problems
    allowed = pc.is_in(array, value_set=pa.array(values, array.type))
    wrong = pc.and_(pc.invert(allowed), pc.is_valid(array))
    if not pc.any(wrong).as_py():
        return array, []
    return _refused(array, wrong, "is not one of its values", f" (it has {listed(values)})")


def _refused(
    column: pa.Array, wrong: pa.Array, what: str, hint: str = ""
) -> tuple[pa.Array, list[Problem]]:
    rows = pc.indices_nonzero(pc.fill_null(wrong, False)).to_pylist()
    faults = {row: f"got {_shown_value(column[row])}{hint}" for row in rows}
    return pa.nulls(len(column), column.type), [_faulty(what, faults, len(column))]


def _shown_value(scalar: pa.Scalar) -> str:
    try:
        shown = repr(scalar.as_py())
    except UnicodeDecodeError:
        return "a text that is not UTF-8"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _faulty(what: str, faults: Mapping[int, str], rows: int) -> Problem:
    first = min(faults)
    mask = pa.array([row in faults for row in range(rows)], pa.bool_())
    return Problem(f"{what}, {faults[first]},", len(faults), first, mask, faults)


_SCALARS: dict[Storage, Callable[[pa.DataType], Caster | None]] = {
    "str": _str,
    "int": _int,
    "float": _float,
    "bool": _bool,
    "datetime": _datetime,
    "date": _date,
    "time": _time,
    "bytes": _bytes,
}
