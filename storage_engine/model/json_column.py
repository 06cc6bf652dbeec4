"""Arrow columns of any shape, or JSON text, as columns of canonical JSON text.

Values are validated in Pydantic's strict mode: a bulk source is converted, never coerced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pydantic_core import ValidationError as PydanticError

from storage_engine.model.canonical import dumps
from storage_engine.model.problems import Problem
from storage_engine.model.type_spec import classify
from storage_engine.model.validation import say, validator


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
                    given = drop_absent(self.type_spec, value, {}) if absent else value
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
    if pa.types.is_struct(source):
        return True
    return any(_has_struct(source.field(i).type) for i in range(source.num_fields))


def drop_absent(type_spec: Mapping[str, Any], value: Any, env: Mapping[str, Any]) -> Any:
    """Without the nulls that stand for "no such key".

    A struct has every key in every row, so a key that a record lacks comes as null. Where null is
    not a value of that key, it can only mean absence.
    """
    match type_spec["kind"]:
        case "ref":
            return drop_absent(env[type_spec["name"]], value, env)
        case "union":
            nested = [m for m in type_spec["members"] if m["kind"] in _FITS]
            fitting = [m for m in nested if isinstance(value, _FITS[m["kind"]])]
            return drop_absent(fitting[0], value, env) if len(fitting) == 1 else value
        case "list" if isinstance(value, list):
            return [drop_absent(type_spec["item"], item, env) for item in value]
        case "dict" if isinstance(value, dict):
            item = type_spec["value"]
            keep_null = classify(item)[1]
            return {
                key: drop_absent(item, v, env)
                for key, v in value.items()
                if v is not None or keep_null
            }
        case "typed_dict" if isinstance(value, dict):
            inner = {**env, type_spec["name"]: type_spec}
            return {
                key: drop_absent(field["type"], v, inner) if field else v
                for key, v in value.items()
                for field in [type_spec["fields"].get(key)]
                if v is not None or _null_is_meant(field)
            }
        case _:
            return value


_FITS: dict[str, type] = {"list": list, "dict": dict, "typed_dict": dict, "ref": dict}


def _null_is_meant(field: Mapping[str, Any] | None) -> bool:
    """Required keys keep their null, so that validation reports it instead of absence."""
    return field is None or bool(field["required"]) or classify(field["type"])[1]
