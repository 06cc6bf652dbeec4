"""What takes how much room in a storage: objects and bytes by kind of object, data files by type,
and those that branches have written by branch.

Counted from the listing, so that what nothing refers to any more counts too: `onto gc` tells that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.objectstore.protocol import ObjectInfo
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.protocol import Repository

_KINDS = {
    layout.COMMITS: "commits",
    layout.SNAPSHOTS: "snapshots",
    layout.STAGED: "staged parts",
    layout.CHECKPOINTS: "checkpoints",
    layout.PAGES: "pages of commits",
    layout.ATTEMPTS: "heartbeats",
    layout.LEASES: "compaction leases",
    layout.LINES: "tickets of writers that wait",
    layout.INDICES: "indices",
    layout.SCHEMA: "schema",
    layout.TAGS: "tags",
    layout.BRANCHES: "branches",
    layout.QUARANTINE: "quarantine",
    layout.EVENTS: "events",
    layout.CLAIMS: "claims",
    layout.DEAD_LETTERS: "dead letters",
    layout.SESSIONS: "workers",
}
MANIFESTS = "manifests"
CONTROL = "head, lock and stamp"
FOREIGN = "not ours"
DELETED = "a deleted branch"
_SQLITE_FILES = {"": "database", "-wal": "write-ahead log", "-shm": "shared memory"}


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one kind of object; of data files, of one type."""

    what: str
    type_kind: str | None
    type_name: str | None
    objects: int
    bytes: int
    # What a branch has written of its own; a merge adopts such files without moving them.
    branch: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def usage(repository: Repository) -> list[Usage]:
    """What takes most room first."""
    if (objects := repository.objects) is not None:
        return _tally(list(objects.store.list("")), objects)
    assert repository.database is not None
    path = Path(repository.database.path).expanduser()
    return [
        Usage(what, None, None, 1, file.stat().st_size)
        for suffix, what in _SQLITE_FILES.items()
        if (file := path.with_name(path.name + suffix)).is_file()
    ]


def _tally(listed: Sequence[ObjectInfo], repository: ObjectRepository) -> list[Usage]:
    counts: dict[tuple[str | None, ...], tuple[int, int]] = {}
    names: dict[str, str] = {}
    if any(info.key.startswith(layout.BRANCHES) for info in listed):
        names = {branch.incarnation: branch.name for branch in repository.branches.list()[1:]}
    for info in listed:
        incarnation = _incarnation(info.key)
        branch = names.get(incarnation, DELETED) if incarnation else None
        key = (*_kind_of(info.key), branch)
        objects, size = counts.get(key, (0, 0))
        counts[key] = (objects + 1, size + info.size)
    tallied = [
        Usage(str(what), type_kind, type_name, objects, size, branch)
        for (what, type_kind, type_name, branch), (objects, size) in counts.items()
    ]
    return sorted(
        tallied, key=lambda each: (-each.bytes, each.what, each.type_name or "", each.branch or "")
    )


def _incarnation(key: str) -> str:
    """Of the branch that wrote an object; empty: none, or nobody can tell."""
    if key.startswith(layout.COMMITS):
        attempt = layout.commit_attempt(key)
        return attempt.incarnation if attempt is not None else ""
    if key.startswith(layout.STAGED):
        return layout.attempt_incarnation(layout.staged_attempt(key))
    if key.startswith(layout.CHECKPOINTS):
        return layout.checkpoint_incarnation(key)
    branch = layout.branch_of(key) if key.startswith(layout.BRANCHES) else None
    return branch.incarnation if branch is not None else ""


def _kind_of(key: str) -> tuple[str, str | None, str | None]:
    for prefix, what in _KINDS.items():
        if not key.startswith(prefix):
            continue
        if prefix not in layout.DATA_PREFIXES:
            return what, None, None
        if (snapshot := layout.snapshot_of(key)) is not None:
            return what, snapshot.kind, snapshot.type_name
        if (of_type := layout.data_file_type(key)) is not None:
            return what, *of_type
        return MANIFESTS if prefix == layout.COMMITS else what, None, None
    control = key in (layout.HEAD, layout.LOCK, layout.ENGINE, layout.LAYOUT_CATALOG)
    return (CONTROL if control else FOREIGN), None, None
