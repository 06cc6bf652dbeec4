"""`meta/engine.json`: which engine and format wrote a storage, and how to bring it forward.

A storage of another program without it is v1, format 0. Reading never writes; the first commit
runs the steps from the stored format to ours, one by one, each safe to run again. A newer format
is refused.

Which engine a log is written with is also part of its log id, and so of head: `init --force`
changes both in one swap, and no moment, crash or rival leaves a log to the engine of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.json_object import write_conditionally
from storage_engine.commitlog.parsing import optional_int, parsing
from storage_engine.commitlog.records import Head, from_json, timestamp, to_json
from storage_engine.commitlog.series import FORMAT, FORMAT_OF_BRANCHES
from storage_engine.errors import IntegrityError, StorageBackendError, UnsupportedEngineError
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore

ENGINE_VERSIONS = ("v1", "v2")
_ATTEMPTS = 8
BACKEND = "s3"  # the layout's name, on any object store
_LOG_ID = re.compile(r"(v\d+)-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Stamp:
    engine_version: str
    format: int
    backend: str = BACKEND


def new_log_id(engine_version: str) -> str:
    return f"{engine_version}-{layout.new_write_id()}"


def engine_of(log_id: str) -> str | None:
    """The engine of a log, by its id; None when that does not tell, as in older storages."""
    match = _LOG_ID.fullmatch(log_id)
    return match[1] if match is not None else None


def stamp_for(store: ObjectStore, stamp: Stamp | None, head: Head) -> Stamp:
    """The engine and format of the log that `head` belongs to, given what `read_stamp` found."""
    engine_version = engine_of(head.log_id)
    if engine_version is not None:
        resolved = replace(stamp or Stamp(engine_version, 0), engine_version=engine_version)
        _check(store.uri, resolved)
        return resolved
    if stamp is None and head.log_id and head.commit_id == 0:
        raise UnsupportedEngineError(
            f"{store.uri} has a head and no {layout.ENGINE}: an `onto init` was interrupted, or is "
            "at work; try again, or run `onto init --force`",
            backend=BACKEND,
            engine_version="",
            format=0,
        )
    return stamp or Stamp("v1", 0)


def read_stamp(store: ObjectStore) -> Stamp | None:
    """What `meta/engine.json` says, if it is there: `stamp_for` tells what that means."""
    try:
        stored = store.get(layout.ENGINE)
    except ObjectNotFound:
        return None
    raw = from_json(stored.data, key=layout.ENGINE)
    stamp = Stamp(str(raw.get("engine_version")), _format_in(raw), str(raw.get("backend")))
    _check(store.uri, stamp)
    return stamp


def _format_in(raw: Mapping[str, Any]) -> int:
    """Absent in a stamp that another program has written."""
    with parsing(layout.ENGINE, "stamp"):
        return optional_int(raw, "format", 0)


def stamp_bytes(store: ObjectStore, engine_version: str, write_id: str) -> bytes:
    return to_json(
        {
            "backend": BACKEND,
            "engine_version": engine_version,
            "created_at": timestamp(store.now()),
            "format": FORMAT,
            "write_id": write_id,
        }
    )


def is_stamped(data: bytes, engine_version: str) -> bool:
    """Whether a stamp says what this program would write for the engine."""
    try:
        raw = from_json(data, key=layout.ENGINE)
    except IntegrityError:
        return False
    stamp = (raw.get("backend"), raw.get("engine_version"), raw.get("format"))
    return stamp == (BACKEND, engine_version, FORMAT)


def bring_forward(store: ObjectStore, stamp: Stamp) -> Stamp:
    """Bring the storage to the current format; called before writing, free when it is there."""
    while stamp.format < FORMAT:
        _STEPS[stamp.format](store, stamp)
        stamp = replace(stamp, format=stamp.format + 1)
    return stamp


def allow_branches(store: ObjectStore, stamp: Stamp) -> Stamp:
    """Before there is a branch: a program that knows of none must not collect what it needs, nor
    commit on what is protected. A storage without branches stays open to it."""
    for _ in range(_ATTEMPTS):
        stored = store.get(layout.ENGINE)
        raw = from_json(stored.data, key=layout.ENGINE)
        if _format_in(raw) >= FORMAT_OF_BRANCHES:
            return replace(stamp, format=_format_in(raw))
        write_id = layout.new_write_id()
        data = to_json({**raw, "format": FORMAT_OF_BRANCHES, "write_id": write_id})
        write_conditionally(store, layout.ENGINE, data, write_id=write_id, etag=stored.etag)
    raise StorageBackendError(
        f"{layout.ENGINE} of {store.uri} is written by others all the time: try again",
        operation="create branch",
        key=layout.ENGINE,
        retryable=True,
    )


def _raise_format(store: ObjectStore, stamp: Stamp) -> None:
    """0 -> 1: a v1 storage from before engine versions gets its stamp.
    1 -> 2: nothing that is there changes; what is written from now on (hashes along the chain,
    marks in head, buckets, pages) must not be written over by a program that does not know it.
    2 -> 3: the same. A program that does not know of migrations and dropped types would read rows
    of another version, and write to types that have ended.
    """
    write_id = layout.new_write_id()
    data = stamp_bytes(store, stamp.engine_version, write_id)
    try:
        stored = store.get(layout.ENGINE)
    except ObjectNotFound:
        etag = None
    else:
        raw = from_json(stored.data, key=layout.ENGINE)
        if _format_in(raw) > stamp.format:
            return  # another writer has taken this step, and perhaps more
        etag = stored.etag
        data = to_json({**raw, "format": FORMAT, "write_id": write_id})
    # Lost means that another writer has just taken the same step.
    write_conditionally(store, layout.ENGINE, data, write_id=write_id, etag=etag)


_STEPS: dict[int, Callable[[ObjectStore, Stamp], None]] = dict.fromkeys(
    range(FORMAT), _raise_format
)


def _check(uri: str, stamp: Stamp) -> None:
    facts = {
        "backend": stamp.backend,
        "engine_version": stamp.engine_version,
        "format": stamp.format,
    }
    if stamp.format > FORMAT_OF_BRANCHES:
        raise UnsupportedEngineError(
            f"{uri} has storage format {stamp.format} ({layout.ENGINE}), this version knows up to "
            f"{FORMAT_OF_BRANCHES}: upgrade ontologia first",
            **facts,  # type: ignore[arg-type]
        )
    if stamp.engine_version not in ENGINE_VERSIONS or stamp.backend != BACKEND:
        raise UnsupportedEngineError(
            f"{uri} was written by engine {stamp.backend}/{stamp.engine_version}, this version "
            f"knows {', '.join(f'{BACKEND}/{v}' for v in ENGINE_VERSIONS)}: upgrade ontologia "
            f"first, or check {layout.ENGINE}",
            **facts,  # type: ignore[arg-type]
        )
