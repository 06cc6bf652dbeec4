"""Engine v1 keeps the rows of all schema versions together, each in the JSON of its own version.

Whoever reads sees them in the current one: payloads of older versions are brought forward where
SQLite comes upon them, so that filters and aggregates see what the reader will. Fields are followed
by their ids, through renames. That works where the change is additive; for a row that would need
an upgrader, or whose new field has no stored default, the read ends with a `SchemaOutdatedError`.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from storage_engine.errors import IntegrityError, OntologiaError
from storage_engine.model.canonical import decode, dumps, encode
from storage_engine.model.field_types import unordered
from storage_engine.model.spec import MISSING, FieldSpec, TypeSpec
from storage_engine.model.validation import validator
from storage_engine.schema.forward import not_forward, refusal
from storage_engine.schema.history import SchemaVersion

_FUNCTION = "ontologia_forward"
_RAISED = "user-defined function raised exception"  # all that sqlite3 says of it
_EXACT = 2**53  # integers up to it are floats as well

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Forward:
    """How a statement asks for the payload of a row in the current version."""

    token: str
    version: int

    def column(self, alias: str, name: str) -> str:
        stored = f'{alias}."{name}"'
        return (
            f"CASE WHEN {alias}.schema_version_id = {self.version} THEN {stored} "
            f"ELSE {_FUNCTION}('{self.token}', {alias}.schema_version_id, {stored}) END"
        )


def forward(versions: Sequence[SchemaVersion]) -> Forward | None:
    """What brings rows of these versions of a type, oldest first, to the last one; None where
    there is only one."""
    *older, current = versions
    if not older:
        return None
    token = hashlib.sha256(
        "".join(f"{v.version}:{v.schema_sha256}:{_ids(v.spec)}" for v in versions).encode()
    ).hexdigest()
    if token not in _steps:
        _steps[token] = {v.version: _Step(v, current) for v in older}
    return Forward(token, current.version)


def install(connection: sqlite3.Connection) -> None:
    """Give a connection the function that `Forward.column` names."""
    connection.create_function(_FUNCTION, 3, _brought_forward, deterministic=True)


@contextmanager
def refusals() -> Iterator[None]:
    """What the function raises reaches the caller as it is."""
    _raised.error = None
    try:
        yield
    except sqlite3.OperationalError as error:
        raised: BaseException | None = _raised.error
        if raised is not None and str(error) == _RAISED:
            _raised.error = None
            raise raised from None
        raise


class _Raised(threading.local):
    error: BaseException | None = None


_raised = _Raised()
_steps: dict[str, dict[int, _Step]] = {}  # by token: as many as there are versions of types


def _brought_forward(token: str, version: Any, payload: Any) -> str:
    try:
        step = _steps[token].get(version)
        if step is None:
            raise IntegrityError(
                f"a row has schema version {version!r}, which the storage does not know; restore "
                "it from a backup (`onto verify --deep` looks for more)"
            )
        return step(payload)
    except BaseException as error:
        _raised.error = error
        raise


class _Step:
    """From the payload of one version to that of the current one."""

    def __init__(self, before: SchemaVersion, current: SchemaVersion) -> None:
        self._before, self._current = before, current
        self._refusal = refusal(before.spec, current.spec)
        stored = {f.field_id: f for f in before.spec.fields}
        self._fields = [
            (f.name, stored.get(f.field_id), _default(f), _converter(stored.get(f.field_id), f))
            for f in current.spec.fields
            if self._refusal is None
        ]

    def __call__(self, payload: Any) -> str:
        if self._refusal is not None:
            raise self._outdated(self._refusal)
        values = orjson.loads(payload)
        made = {}
        for name, source, default, convert in self._fields:
            if source is None:
                made[name] = default
                continue
            value = values.get(source.name, _default(source))
            if convert is not None and value is not None:
                try:
                    value = convert(value)
                except (ValueError, TypeError) as error:
                    raise self._outdated(f"field {name!r}: {error}") from error
            made[name] = value
        return dumps(made)

    def _outdated(self, why: str) -> OntologiaError:
        spec, version = self._current.spec, self._before.version
        return not_forward(spec, self._before.spec, version, why)


def _converter(before: FieldSpec | None, now: FieldSpec) -> Convert | None:
    """From the JSON form of one type to that of the other; None where they are the same."""
    if before is None or unordered(before.type_spec) == unordered(now.type_spec):
        return None
    if (before.storage, now.storage) == ("int", "float"):
        return _as_float
    return partial(_converted, before, now)


def _converted(before: FieldSpec, now: FieldSpec, value: Any) -> Any:
    decoded = decode(before.type_spec, value)
    return encode(now.type_spec, validator(now.type_spec).validate_python(decoded, strict=True))


def _as_float(value: Any) -> float:
    if abs(value) > _EXACT:
        raise ValueError(f"{value} is not exact as a float")
    return float(value)


def _default(field: FieldSpec) -> Any:
    return None if field.default is MISSING else field.default


def _ids(spec: TypeSpec) -> str:
    return ",".join(f"{f.name}={f.field_id}" for f in spec.fields)
