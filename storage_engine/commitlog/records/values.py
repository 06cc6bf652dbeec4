"""What all records are made of: JSON, hashes, times, and names of objects with their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

import orjson

from storage_engine.commitlog import layout
from storage_engine.commitlog.parsing import (
    FieldError,
    optional_object,
    optional_text,
    require_int,
    require_path,
    require_text,
)
from storage_engine.errors import IntegrityError

TypeRef = tuple[str, str]  # (kind, type name)
UnitVersion = int | str  # of a unit of work

KINDS = tuple(layout.FOLDERS)


def to_json(payload: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(payload)
    except TypeError as error:
        # Read from an object of somebody else's: orjson reads deeper than it writes.
        if "recursion" not in str(error).lower():
            raise
        raise IntegrityError(
            "what the storage has to carry on is nested too deeply to be written again; "
            "`onto verify` says which object it stands in"
        ) from error


def from_json(data: bytes, *, key: str) -> dict[str, Any]:
    try:
        payload = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise IntegrityError(f"{key} is not valid JSON: {error}", key=key) from error
    if not isinstance(payload, dict):
        raise IntegrityError(f"{key} is not a JSON object", key=key)
    return payload


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def timestamp(moment: datetime) -> str:
    if moment.tzinfo is not UTC:
        moment = moment.astimezone(UTC)
    return moment.isoformat(timespec="microseconds")


def parse_timestamp(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """Names the latest checkpoint and proves its content."""

    path: str
    sha256: str
    commit_id: int

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        return cls(
            require_path(raw, "path"), require_text(raw, "sha256"), require_int(raw, "commit_id")
        )


@dataclass(frozen=True, slots=True)
class ManifestLink:
    """Names a manifest and, where its hash was known, proves its content."""

    commit_id: int
    path: str
    sha256: str = ""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        return cls(
            require_int(raw, "commit_id", minimum=1),
            require_path(raw, "path"),
            optional_text(raw, "sha256", ""),
        )


def optional_checkpoint_ref(raw: Mapping[str, Any]) -> CheckpointRef | None:
    ref = optional_object(raw, "checkpoint")
    return CheckpointRef.parse(ref) if ref else None


def optional_link(raw: Mapping[str, Any], name: str) -> ManifestLink | None:
    link = optional_object(raw, name)
    return ManifestLink.parse(link) if link else None


def parse_marks(raw: Mapping[str, Any], name: str = "marks") -> dict[str, UnitVersion]:
    marks = optional_object(raw, name) or {}
    return {app_id: parse_version(marks, app_id) for app_id in marks}


def parse_version(raw: Mapping[str, Any], name: str) -> UnitVersion:
    version = raw.get(name)
    if type(version) not in (int, str):
        raise FieldError(name, "an integer or a text", version)
    return version  # type: ignore[return-value]
