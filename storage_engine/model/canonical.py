"""Canonical JSON: one text for one value, and values of declared types to and from it.

Canonical means sorted keys, no spaces, UTF-8, finite floats, integers within int64. Values that
JSON lacks are written as strings: datetimes in ISO 8601, UTC, always with microseconds; dates in
ISO 8601; times of day in ISO 8601 with microseconds; bytes in standard base64; UUIDs in lower case;
decimals with all their digits and no exponent. Enums are their values. Promise:
`decoder(t)(dumps(v))` equals v, for every validated value v of type t, but that enum members come
back as their values.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import orjson
from pydantic_core import PydanticCustomError

from storage_engine.errors import ValidationError
from storage_engine.model.decimals import text_of
from storage_engine.model.field_types import has_encoded_leaves, has_literals
from storage_engine.model.scalars import lowered
from storage_engine.model.validation import json_value, validator

_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATETIME


def canonical_json(value: Any) -> str:
    """The canonical text of a plain JSON value; ValidationError for anything else."""
    try:
        return dumps(json_value(value))
    except PydanticCustomError as error:
        raise ValidationError(f"not canonical JSON: {error.message()}") from None


def encode(type_spec: Mapping[str, Any], value: Any) -> Any:
    """A validated value in its JSON-able form."""
    return _encode(value) if has_encoded_leaves(type_spec) or has_literals(type_spec) else value


def decoder(type_spec: Mapping[str, Any]) -> Callable[[str | bytes], Any]:
    """A function from stored JSON text to the value that it stands for."""
    if has_encoded_leaves(type_spec):
        return partial(validator(type_spec).validate_json, strict=True)
    return orjson.loads


def decode(type_spec: Mapping[str, Any], encoded: Any) -> Any:
    """The inverse of `encode`."""
    return decoder(type_spec)(dumps(encoded))


def dumps(value: Any) -> str:
    """Canonical text of a value that passed a validator; datetimes and bytes are written too."""
    return orjson.dumps(value, default=leaf, option=_OPTIONS).decode()


def leaf(value: Any) -> str:
    """How a value that JSON lacks is written as a string."""
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, time):
        return value.isoformat(timespec="microseconds")
    if isinstance(value, Decimal):
        return text_of(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _encode(value: Any) -> Any:
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    value = lowered(value)
    return leaf(value) if isinstance(value, date | time | bytes | Decimal) else value
