"""Where objects live. Every key of the storage is made here and nowhere else."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from urllib.parse import quote

HEAD = "meta/head.json"
LOCK = "meta/locks/ontology_write.json"
ENGINE = "meta/engine.json"
TYPES = "meta/schema/types.json"
REGISTRY = "meta/schema/registry.json"
LAYOUT_CATALOG = "meta/type_layout_catalog.json"
TAGS = "meta/tags/"
FOLDERS = {"entity": "entities", "relation": "relations"}


def new_id() -> str:
    """A short random identifier of a write attempt."""
    return secrets.token_hex(4)


def new_write_id() -> str:
    """Unique per write, so that no two versions of an object have equal bytes (and ETags)."""
    return secrets.token_hex(16)


def attempt_prefix(commit_id: int, attempt: str) -> str:
    return f"commits/{commit_id}-{attempt}"


def manifest(commit_id: int, attempt: str) -> str:
    return f"{attempt_prefix(commit_id, attempt)}/manifest.json"


def checkpoint(commit_id: int, attempt: str) -> str:
    return f"meta/checkpoints/{commit_id}-{attempt}.json"


def index(kind: str, name: str) -> str:
    return f"meta/indices/{FOLDERS[kind]}/{name}.json"


def schema_versions(kind: str, name: str) -> str:
    return f"meta/schema/versions/{FOLDERS[kind]}/{name}.json"


def attempt_heartbeat(attempt: str) -> str:
    return f"meta/attempts/{attempt}.json"


def tag(name: str) -> str:
    return f"{TAGS}{name}.json"


def data_file(
    prefix: str,
    kind: str,
    name: str,
    engine_version: str,
    schema_version_id: int,
    part: int | None,
) -> str:
    """`part` is None when the type has one file in this commit (the seeds' key)."""
    stem = f"{prefix}/{FOLDERS[kind]}/{name}"
    if engine_version == "v2":
        stem = f"{stem}/v{schema_version_id}"
    return f"{stem}.parquet" if part is None else f"{stem}/part-{part:05d}.parquet"


def staged_prefix(attempt: str) -> str:
    return f"staged/{attempt}"


def staged_part(attempt: str, kind: str, name: str, version: int, label: str) -> str:
    """A part that somebody other than the driver stages: `label` is unique in the attempt."""
    return f"{staged_prefix(attempt)}/{FOLDERS[kind]}/{name}/v{version}/part-{label}.parquet"


def quarantine(kind: str, name: str, attempt: str) -> str:
    """The folder of rows that a write has set aside; garbage collection leaves it alone."""
    return f"quarantine/{FOLDERS[kind]}/{name}/{attempt}/"


def snapshot(kind: str, name: str, low: int, high: int) -> str:
    """What the keys of a snapshot of commits `low` to `high` begin with."""
    return f"snapshots/{FOLDERS[kind]}/{name}-{low}-{high}"


def compaction_lease(kind: str, name: str) -> str:
    return f"meta/compaction/{FOLDERS[kind]}/{name}.json"


# -- the event bus --------------------------------------------------------------------------------


def segment(name: str) -> str:
    """Any text as one part of a key. Names that begin with `_` stay free for our own objects."""
    quoted = quote(name, safe="")
    return f"%{ord(quoted[0]):02X}{quoted[1:]}" if quoted[:1] in {".", "_"} else quoted


def events(namespace: str) -> str:
    return f"events/{namespace}/"


def event_time(moment: datetime) -> str:
    """A time as event keys begin with it: they sort by time."""
    text = moment.astimezone(UTC).isoformat(timespec="microseconds")
    return text.replace(":", "-")


def event(namespace: str, moment: datetime, event_id: str) -> str:
    return f"{events(namespace)}{event_time(moment)}_{segment(event_id)}.json"


def claims(namespace: str, event_id: str) -> str:
    return f"claims/{namespace}/{segment(event_id)}/"


def claim(namespace: str, event_id: str, handler_id: str) -> str:
    return f"{claims(namespace, event_id)}{segment(handler_id)}.json"


def dead_letter(namespace: str, event_id: str, handler_id: str) -> str:
    return f"dead_letters/{namespace}/{segment(event_id)}/{segment(handler_id)}.json"


def event_session(namespace: str, session_id: str) -> str:
    return f"sessions/{namespace}/{segment(session_id)}.json"


def projected(namespace: str) -> str:
    """Up to which commit the outbox has been projected. Sorts after every event."""
    return f"{events(namespace)}_projected.json"


def position(namespace: str, handler_id: str) -> str:
    """How far a handler has come. Sorts after every event."""
    return f"{events(namespace)}_positions/{segment(handler_id)}.json"
