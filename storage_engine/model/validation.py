"""Type descriptions turned into Pydantic validators, and their errors into sentences.

The validators are built from type specs, not from annotations, so that a value means the same
whether its class is at hand or only a stored schema. Promise: what passes can be stored without
loss. Python input is taken in Pydantic's lax mode; JSON text and Arrow values in strict mode.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any

import orjson
from pydantic_core import (
    CoreConfig,
    CoreSchema,
    PydanticCustomError,
    SchemaValidator,
    core_schema,
)
from pydantic_core import ValidationError as PydanticError

from storage_engine.errors import ValidationError
from storage_engine.model.decimals import Precision
from storage_engine.model.scalars import read_literal, read_time, read_uuid

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_DEPTH = 200  # below the nesting limit of the JSON encoder, so that it is met here

# min_length=0 makes Pydantic look at the characters, and so refuse lone surrogates.
TEXT_SCHEMA = core_schema.str_schema(min_length=0)
KEY_SCHEMA = core_schema.str_schema(min_length=1)

_CONFIG = CoreConfig(val_json_bytes="base64")  # a typed dict does not inherit it


def validator(type_spec: Mapping[str, Any]) -> SchemaValidator:
    """The validator of one value; built once per distinct type description."""
    text = orjson.dumps(type_spec, option=orjson.OPT_SORT_KEYS)
    cached = _validators.get(text)
    if cached is None:
        builder = SchemaBuilder()
        cached = _validators[text] = builder.finish(builder.value(type_spec))
    return cached


_validators: dict[bytes, SchemaValidator] = {}


class SchemaBuilder:
    """Collects the definitions of recursive TypedDicts while schemas are built."""

    def __init__(self) -> None:
        self._definitions: list[CoreSchema] = []
        self._made = 0

    def finish(self, schema: CoreSchema) -> SchemaValidator:
        if self._definitions:
            schema = core_schema.definitions_schema(schema, self._definitions)
        return SchemaValidator(schema, _CONFIG)

    def value(self, spec: Mapping[str, Any], env: Mapping[str, str] | None = None) -> CoreSchema:
        env = env or {}
        match spec["kind"]:
            case "primitive":
                return _PRIMITIVES[spec["name"]]
            case "union":
                return self._union(spec["members"], env)
            case "list":
                return core_schema.list_schema(self.value(spec["item"], env))
            case "dict":
                return core_schema.dict_schema(TEXT_SCHEMA, self.value(spec["value"], env))
            case "typed_dict":
                return self._typed_dict(spec, env)
            case "decimal":
                precision = Precision(spec["precision"], spec["scale"])
                return _reading("decimal", partial(_decimal, precision))
            case "literal":
                values = spec["values"]
                read = partial(read_literal, frozenset(values), type(values[0]))
                return _reading("literal", read)
            case _:
                return core_schema.definition_reference_schema(env[spec["name"]])

    def _union(self, members: Sequence[Mapping[str, Any]], env: Mapping[str, str]) -> CoreSchema:
        rest = [self.value(m, env) for m in members if m.get("name") != "NoneType"]
        inner = rest[0] if len(rest) == 1 else core_schema.union_schema(list(rest))
        return inner if len(rest) == len(members) else core_schema.nullable_schema(inner)

    def _typed_dict(self, spec: Mapping[str, Any], env: Mapping[str, str]) -> CoreSchema:
        self._made += 1
        ref = f"{spec['name']}:{self._made}"
        inner = {**env, spec["name"]: ref}
        fields = {
            key: core_schema.typed_dict_field(
                self.value(field["type"], inner), required=field["required"]
            )
            for key, field in spec["fields"].items()
        }
        # Unknown keys are refused: dropping them silently would lose data.
        self._definitions.append(
            core_schema.typed_dict_schema(fields, extra_behavior="forbid", ref=ref, config=_CONFIG)
        )
        return core_schema.definition_reference_schema(ref)


def _reading(kind: str, read: Callable[[Any], Any]) -> CoreSchema:
    """The same in Pydantic's lax and strict mode: a text is taken for what it says, exactly."""

    def check(value: Any) -> Any:
        try:
            return read(value)
        except ValueError as error:
            raise PydanticCustomError(kind, "{problem}", {"problem": str(error)}) from None

    return core_schema.no_info_plain_validator_function(check)


def _decimal(precision: Precision, value: Any) -> Decimal:
    if isinstance(value, float):
        raise ValueError("is a float, which is not exact; write a Decimal, an int or a str")
    if isinstance(value, bool) or not isinstance(value, Decimal | int | str):
        raise ValueError("is not a decimal number")
    return precision.read(value)


def to_utc(value: datetime) -> datetime:
    """The same instant as a plain datetime in UTC; a naive one is taken to be UTC already."""
    if getattr(value, "nanosecond", 0):
        raise PydanticCustomError("datetime_precision", "has nanoseconds, stored are microseconds")
    try:
        value = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError:
        raise PydanticCustomError("datetime_range", "lies outside years 1 to 9999 in UTC") from None
    if type(value) is datetime and not value.fold:
        return value
    return datetime.combine(value.date(), value.time(), UTC).replace(fold=0)  # pandas subclasses


def json_value(value: Any, depth: int = 0) -> Any:
    """A private copy of a value for `Any`: JSON's own types and nothing else."""
    if value is None or value is True or value is False:
        return value
    if depth > MAX_DEPTH:
        raise PydanticCustomError(
            "json_depth", "is nested more than {limit} levels deep", {"limit": MAX_DEPTH}
        )
    if isinstance(value, str):
        return _json_text(value)
    if isinstance(value, int):
        if INT64_MIN <= value <= INT64_MAX:
            return int(value)
        raise PydanticCustomError("int_range", _SAID["less_than_equal"])
    if isinstance(value, float):
        if value - value == 0.0:  # neither NaN nor infinite
            return float(value)
        raise PydanticCustomError("finite_number", _SAID["finite_number"])
    if isinstance(value, list):
        return [json_value(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_json_key(key): json_value(item, depth + 1) for key, item in value.items()}
    raise PydanticCustomError(
        "json_value",
        "{kind} is not a JSON value; declare the field with its own type",
        {"kind": type(value).__name__},
    )


def _json_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "string_unicode",
            _SAID["string_unicode"],
        ) from None
    return str.__str__(value)


def _json_key(key: Any) -> str:
    if not isinstance(key, str):
        raise PydanticCustomError(
            "json_key", "has a key of type {kind}; keys must be str", {"kind": type(key).__name__}
        )
    return _json_text(key)


_PRIMITIVES: dict[str, CoreSchema] = {
    "str": TEXT_SCHEMA,
    "int": core_schema.int_schema(ge=INT64_MIN, le=INT64_MAX),
    "float": core_schema.float_schema(allow_inf_nan=False),
    "bool": core_schema.bool_schema(),
    "datetime": core_schema.no_info_after_validator_function(
        to_utc, core_schema.datetime_schema(microseconds_precision="error")
    ),
    "date": core_schema.date_schema(),
    "time": _reading("time", read_time),
    "bytes": core_schema.bytes_schema(),
    "uuid": _reading("uuid", read_uuid),
    "NoneType": core_schema.none_schema(),
    "Any": core_schema.no_info_plain_validator_function(json_value),
}

# --- what the user reads ----------------------------------------------------------------------

_SAID = {
    "missing": "is required",
    "string_too_short": "must not be empty",
    "string_unicode": "contains a lone surrogate, which UTF-8 cannot hold",
    "less_than_equal": "is beyond 64 bits (int64)",
    "greater_than_equal": "is beyond 64 bits (int64)",
    "finite_number": "must be finite, not NaN or infinity",
}


def explain(
    error: PydanticError,
    *,
    type_name: str,
    identity: Any,
    arguments: Iterable[str],
    within: tuple[str, ...] = (),
) -> ValidationError:
    """One error that names the type, the identity and every bad field.

    `within` is the place of the validated value where it is not a whole record.
    """
    names = list(arguments)
    sentences: dict[str, None] = {}  # ordered, without the repetitions that unions cause
    fields: dict[str, None] = {}
    for item in error.errors(include_url=False):
        loc = (*within, *item["loc"])
        name = str(loc[0])
        fields[name] = None
        if item["type"] == "extra_forbidden" and len(loc) == 1:
            sentences[unknown_name(name, names)] = None
        else:
            sentences[f"{_path(loc)}: {say(item)}"] = None
    who = type_name if identity is None else f"{type_name} {_identity(identity)}"
    return ValidationError(
        f"{who}: {'; '.join(sentences)}",
        type=type_name,
        identity=identity,
        field=", ".join(fields),
    )


def say(item: Mapping[str, Any]) -> str:
    """One Pydantic error as the end of a sentence that begins with the field."""
    kind = item["type"]
    if kind == "missing":
        return _SAID[kind]
    message = _SAID.get(kind) or str(item["msg"])
    shown = repr(item["input"])
    return f"{message} (got {shown if len(shown) <= 60 else shown[:57] + '...'})"


def unknown_name(name: str, names: Iterable[str], *, what: str = "field") -> str:
    """`unknown field 'nmae', did you mean 'name'?`"""
    folded = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), list(folded), n=1)
    return f"unknown {what} {name!r}" + (f", did you mean {folded[near[0]]!r}?" if near else "")


def _identity(identity: Any) -> str:
    if isinstance(identity, tuple):
        return " -> ".join(repr(part) for part in identity)
    return repr(identity)


def _path(loc: tuple[int | str, ...]) -> str:
    parts = [f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc]
    return "".join(parts).removeprefix(".")
