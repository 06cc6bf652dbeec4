"""Stored JSON, parsed by a schema: types and ranges, not only names.

Each function takes one field out of a parsed JSON object and raises FieldError, a ValueError that
says which field, what it should be and what it is. `parsing` makes that an IntegrityError which
names the object too, and lets nothing else through that a wrong shape can raise:

    raw = from_json(data, key=key)
    with parsing(key, "head object"):
        return Head(commit_id=require_int(raw, "commit_id"), ...)

Optional fields that are null count as absent, as older writers left them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, overload

from storage_engine.errors import IntegrityError
from storage_engine.objectstore.protocol import is_key

LARGEST_INT = 2**63 - 1
_SHOWN = 40
_SCALARS = (str, int, float, bool, type(None))


class FieldError(ValueError):
    """A field of a stored object is not what it should be."""

    def __init__(self, field: str, expected: str, value: object = ...) -> None:
        actual = "is absent" if value is ... else f"is {_shown(value)}"
        super().__init__(f"{field} should be {expected} and {actual}")


@contextmanager
def parsing(key: str, what: str) -> Iterator[None]:
    """Whatever a wrong shape raises inside becomes an IntegrityError: `key` is no `what`."""
    try:
        yield
    except FieldError as error:
        raise IntegrityError(f"{key} is not a valid {what}: {error}", key=key) from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise IntegrityError(f"{key} is not a valid {what}: {error!r}", key=key) from error


# -- fields that must be there ----------------------------------------------------------------


def require_int(
    raw: Mapping[str, Any], field: str, *, minimum: int = 0, maximum: int = LARGEST_INT
) -> int:
    value = raw.get(field, ...)
    # The exact type: True is an int too, and JSON numbers with a fraction are no counts.
    if type(value) is not int or not minimum <= value <= maximum:
        upper = "" if maximum == LARGEST_INT else f" and at most {maximum}"
        raise FieldError(field, f"an integer of at least {minimum}{upper}", value)
    return value


def require_text(raw: Mapping[str, Any], field: str) -> str:
    """Text that is not empty."""
    value = raw.get(field, ...)
    if type(value) is not str or not value:
        raise FieldError(field, "a text", value)
    return value


def require_path(raw: Mapping[str, Any], field: str) -> str:
    """The key of an object: one that a store takes, and that leads out of no folder."""
    value = raw.get(field, ...)
    if type(value) is not str or not is_key(value):
        raise FieldError(field, "the path of an object", value)
    return value


def is_name(value: object) -> bool:
    """Whether it can be the name of a type, which is part of paths."""
    return type(value) is str and "/" not in value and is_key(value)


def require_name(raw: Mapping[str, Any], field: str) -> str:
    value = raw.get(field, ...)
    if not is_name(value):
        raise FieldError(field, "the name of a type", value)
    return str(value)


def require_choice(raw: Mapping[str, Any], field: str, choices: Sequence[str]) -> str:
    value = raw.get(field, ...)
    if type(value) is not str or value not in choices:
        raise FieldError(field, f"one of {', '.join(choices)}", value)
    return value


def require_time(raw: Mapping[str, Any], field: str) -> str:
    """A point in time, as the text that is stored."""
    value = raw.get(field, ...)
    if type(value) is not str or not _is_time(value):
        raise FieldError(field, "a time in ISO 8601", value)
    return value


def require_list(raw: Mapping[str, Any], field: str) -> list[Any]:
    value = raw.get(field, ...)
    if type(value) is not list:
        raise FieldError(field, "a list", value)
    return value


def require_object(raw: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = raw.get(field, ...)
    if type(value) is not dict:
        raise FieldError(field, "an object", value)
    return value


def require_objects(raw: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """A list of objects."""
    items = require_list(raw, field)
    for at, item in enumerate(items):
        if type(item) is not dict:
            raise FieldError(f"{field}[{at}]", "an object", item)
    return items


# -- fields that may be absent or null --------------------------------------------------------


@overload
def optional_int(
    raw: Mapping[str, Any], field: str, *, minimum: int = 0, maximum: int = LARGEST_INT
) -> int | None: ...
@overload
def optional_int(
    raw: Mapping[str, Any],
    field: str,
    default: int,
    *,
    minimum: int = 0,
    maximum: int = LARGEST_INT,
) -> int: ...
def optional_int(
    raw: Mapping[str, Any],
    field: str,
    default: int | None = None,
    *,
    minimum: int = 0,
    maximum: int = LARGEST_INT,
) -> int | None:
    if raw.get(field) is None:
        return default
    return require_int(raw, field, minimum=minimum, maximum=maximum)


@overload
def optional_text(raw: Mapping[str, Any], field: str) -> str | None: ...
@overload
def optional_text(raw: Mapping[str, Any], field: str, default: str) -> str: ...
def optional_text(raw: Mapping[str, Any], field: str, default: str | None = None) -> str | None:
    """Text, which may be empty."""
    value = raw.get(field)
    if value is None:
        return default
    if type(value) is not str:
        raise FieldError(field, "a text", value)
    return value


def optional_path(raw: Mapping[str, Any], field: str) -> str | None:
    return None if raw.get(field) is None else require_path(raw, field)


def optional_time(raw: Mapping[str, Any], field: str) -> str | None:
    return None if raw.get(field) is None else require_time(raw, field)


def optional_bool(raw: Mapping[str, Any], field: str, default: bool) -> bool:
    value = raw.get(field)
    if value is None:
        return default
    if type(value) is not bool:
        raise FieldError(field, "true or false", value)
    return value


def optional_list(raw: Mapping[str, Any], field: str) -> list[Any]:
    return [] if raw.get(field) is None else require_list(raw, field)


def optional_object(raw: Mapping[str, Any], field: str) -> dict[str, Any] | None:
    return None if raw.get(field) is None else require_object(raw, field)


def optional_objects(raw: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    return [] if raw.get(field) is None else require_objects(raw, field)


def optional_texts(raw: Mapping[str, Any], field: str) -> dict[str, str]:
    """An object whose values are texts, such as a commit's metadata."""
    values = optional_object(raw, field) or {}
    for name, value in values.items():
        if type(value) is not str:
            raise FieldError(f"{field}.{name}", "a text", value)
    return values


def optional_stats(raw: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Of a file: for each column least and greatest value and the number of nulls."""
    return _bounds(raw, "stats", 3, _SCALARS, "values")


def optional_key_range(raw: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Of a file: for each column of its identity the least and the greatest key, if known."""
    return _bounds(raw, "key_range", 2, (str, type(None)), "keys")


def _bounds(
    raw: Mapping[str, Any], field: str, length: int, kinds: Collection[type], what: str
) -> dict[str, list[Any]]:
    bounds = optional_object(raw, field) or {}
    for name, values in bounds.items():
        if (
            type(values) is not list
            or len(values) != length
            or any(type(value) not in kinds for value in values)
        ):
            raise FieldError(f"{field}.{name}", f"a list of {length} {what}", values)
    return bounds


def _is_time(text: str) -> bool:
    """Whether it is one everywhere: the first and last day of all times are not."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return False
    return True


def _shown(value: object) -> str:
    """A value in a sentence: short, whatever is in it."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            text = repr(value[: _SHOWN + 1])
        case int() | float():
            text = repr(value)
        case list():
            return f"a list of {len(value)}"
        case dict():
            return f"an object of {len(value)} fields"
        case _:
            return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
