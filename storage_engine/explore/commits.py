"""Commits, newest first, and what one of them changed, row by row and field by field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage_engine.explore.links import commit_path, event_path, identity_path, type_path
from storage_engine.explore.objects import called, changes, origin
from storage_engine.explore.rows import Identity
from storage_engine.explore.view import NothingThere, ShownType, StorageView
from storage_engine.repository.protocol import CommitRecord, TypeRef

COMMITS = 50  # on a page of the list
CHANGED = 25  # rows of each type on a page of a commit
EVENTS = 50


def listed(view: StorageView, before: int | None) -> dict[str, Any]:
    """A page of commits, newest first: those before a commit, or the latest."""
    upto = view.head if before is None else min(before - 1, view.head)
    records = view.repository.commits_between(max(upto - COMMITS, 0), upto) if upto > 0 else []
    newest_first = [described(record, view) for record in reversed(records)]
    oldest = records[0].id if records else 0
    return {
        "commits": newest_first,
        "older": oldest if oldest > 1 else None,
        "tags": _tags(view),
    }


def _tags(view: StorageView) -> dict[int, list[str]]:
    """By commit."""
    tags: dict[int, list[str]] = {}
    for tag in view.repository.list_tags():
        tags.setdefault(tag.commit_id, []).append(tag.name)
    return tags


def described(record: CommitRecord, view: StorageView) -> dict[str, Any]:
    return {
        "id": record.id,
        "url": commit_path(record.id),
        "parent_id": record.parent_id,
        "metadata": dict(record.metadata),
        **origin(record),
        "written": [
            {
                "type": view.label((rows.kind, rows.type_name)),
                "kind": rows.kind,
                "rows": rows.rows,
                "inserted": rows.inserted,
                "updated": rows.updated,
            }
            for rows in record.written
        ],
    }


def commit(
    view: StorageView, commit_id: int, only: str | None, after: Sequence[Any]
) -> dict[str, Any]:
    """One commit with what it changed: the first rows of each type, or of one type those after an
    identity."""
    record = view.storage.commit(commit_id)
    if record is None:
        there = f"1 to {view.head} are there" if view.head else "there are none yet"
        raise NothingThere(f"there is no commit {commit_id}", f"Of the commits, {there}.")
    sent = view.repository.sent_events(commit_id)
    wanted = view.type(only).ref if only is not None else None
    diffs = []
    for rows in record.written:
        ref = (rows.kind, rows.type_name)
        if ref in view.histories and wanted in (None, ref):
            shown = view.shown(ref)
            start = shown.identity(after) if after and wanted is not None else None
            diffs.append(_diff(shown, record, start))
    return {
        **described(record, view),
        "is_head": commit_id == view.head,
        "tags": _tags(view).get(commit_id, []),
        "handled": [
            {**dict(event), "url": event_path(str(event["namespace"]), str(event["event_id"]))}
            for event in record.handled or ()
        ],
        "sent": [
            {
                "id": event["id"],
                "type": event["type"],
                "url": event_path(str(event.get("namespace", "default")), str(event["id"])),
            }
            for event in sent[:EVENTS]
        ],
        "sent_total": len(sent),
        "types": [_type_facts(view, ref) for ref in _named_only(record, view)],
        "diffs": diffs,
    }


def _named_only(record: CommitRecord, view: StorageView) -> list[TypeRef]:
    """Types that a commit changed without writing rows of them, as a drop does."""
    written = {(rows.kind, rows.type_name) for rows in record.written}
    return [
        ref
        for ref, history in view.histories.items()
        if ref not in written
        and (
            history.dropped_commit_id == record.id
            or any(version.activation_commit_id == record.id for version in history.versions)
        )
    ]


def _type_facts(view: StorageView, ref: TypeRef) -> dict[str, Any]:
    label = view.label(ref)
    return {"type": label, "url": type_path(label, "schema")}


def _diff(shown: ShownType, record: CommitRecord, after: Identity | None) -> dict[str, Any]:
    rows, stage = shown.written(record.id, limit=CHANGED + 1, after=after)
    more, rows = len(rows) > CHANGED, rows[:CHANGED]
    identities = [tuple(row["identity"]) for row in rows]
    earlier = shown.rows_at(record.id - 1, identities)
    before = shown.line.at(record.id - 1) if record.id > 1 else None
    described_rows = []
    for row, identity in zip(rows, identities, strict=True):
        assert stage is not None, "there are rows of it"
        old = earlier.get(identity)
        described_rows.append(
            {
                "identity": list(identity),
                "name": called(row),
                "url": shown.url(identity),
                "operation": "insert" if old is None else "update",
                "changes": changes(stage, row, before if old is not None else None, old),
            }
        )
    return {
        "type": shown.label,
        "kind": shown.ref[0],
        "url": type_path(shown.label),
        "schema_version": stage.number if stage is not None else None,
        "migrated": stage is not None and stage.continued and stage.since == record.id,
        "rows": described_rows,
        "after": identity_path(identities[-1]) if more else None,
    }
