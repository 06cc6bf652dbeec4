"""One object: what it is, what it is related to, and how it came to be."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from storage_engine.explore.links import commit_path, object_path, segment, type_path, with_query
from storage_engine.explore.rows import Identity, Row, identity_column
from storage_engine.explore.view import ShownType, StorageView
from storage_engine.model.expressions import Comparison
from storage_engine.repository.protocol import CommitRecord
from storage_engine.schema.lineage import Stage

RELATED = 8  # of each relation type and direction
RELATION_TYPES = 20
VERSIONS = 20

RUN_ID = "dagster/run_id"
ASSET = "dagster/asset_key"

Side = Literal["left", "right"]
_OTHER: Mapping[Side, Side] = {"left": "right", "right": "left"}
# Fields by which people call an object, the first that there is.
_NAMES = ("name", "title", "label", "display_name", "full_name")


def called(row: Row) -> str | None:
    """The name of an object, where it has one beside its key."""
    for name in _NAMES:
        value = row["fields"].get(name)
        if isinstance(value, str) and value and value not in row["identity"]:
            return value
    return None


# --- relations ----------------------------------------------------------------------------------


def relations(entity: ShownType, identity: Identity) -> tuple[list[dict[str, Any]], int]:
    """By relation type and direction, the first relations of an entity; and how many relation
    types were left out."""
    sides: tuple[Side, Side] = ("left", "right")
    ways = [
        (relation, side)
        for relation in entity.view.relation_types
        for side in sides
        if (relation.spec.left if side == "left" else relation.spec.right) == entity.name
    ]
    groups = [
        _group(entity.view, relation, side, identity[0]) for relation, side in ways[:RELATION_TYPES]
    ]
    return [group for group in groups if group["related"]], max(0, len(ways) - RELATION_TYPES)


def _group(view: StorageView, relation: ShownType, side: Side, key: str) -> dict[str, Any]:
    """The relations in which an entity is at one side."""
    spec = relation.spec
    rows, _ = relation.rows(
        Comparison(identity_column(spec, f"{side}_key"), "==", key), limit=RELATED + 1
    )
    far = _OTHER[side]
    other_type = (spec.left if far == "left" else spec.right) or ""
    place = 0 if far == "left" else 1
    names = _names(view, relation, far, [row["identity"][place] for row in rows[:RELATED]])
    label = view.label(("entity", other_type))
    return {
        "relation": relation.label,
        "direction": "outgoing" if side == "left" else "incoming",
        "other_type": label,
        "more": len(rows) > RELATED,
        "all_url": with_query(type_path(relation.label), [(side, segment(key))]),
        "related": [
            {
                "key": row["identity"][place],
                "name": names.get(row["identity"][place]),
                "instance": row["identity"][2] or None,
                "url": object_path(label, (row["identity"][place],)),
                "relation_url": relation.url(tuple(row["identity"])),
                "commit_id": row["commit_id"],
            }
            for row in rows[:RELATED]
        ],
    }


def _names(
    view: StorageView, relation: ShownType, side: Side, keys: Sequence[str]
) -> Mapping[str, str | None]:
    """What the entities at the other end are called; those that are not stored are left out."""
    other = relation.spec.left if side == "left" else relation.spec.right
    if not keys or ("entity", other or "") not in view.histories:
        return {}
    entity = view.shown(("entity", other or ""))
    identities = [(key,) for key in dict.fromkeys(keys)]
    rows = entity.rows_at(view.commit_id, identities)
    return {identity[0]: called(row) for identity, row in rows.items()}


# --- versions -----------------------------------------------------------------------------------


def timeline(shown: ShownType, identity: Identity, *, before: int | None) -> dict[str, Any]:
    """The versions of an object, newest first: a page of them, those of commits before `before`.

    Each says which commit made it, by which run or handler, and what it changed.
    """
    kept: deque[tuple[Stage, Row]] = deque(maxlen=VERSIONS + 1)
    total = 0
    for stage, row in shown.versions(identity):
        total += 1
        if before is None or row["commit_id"] < before:
            kept.append((stage, row))
    pairs = list(kept)
    more = len(pairs) > VERSIONS
    entries = []
    for number in range(len(pairs) - 1, int(more) - 1, -1):
        stage, row = pairs[number]
        earlier = pairs[number - 1] if number else None
        entries.append(
            {
                **commit_facts(shown.view, row["commit_id"]),
                "operation": "insert" if earlier is None else "update",
                "schema_version": stage.number,
                "changes": changes(stage, row, *(earlier or (None, None))),
            }
        )
    return {
        "total": total,
        "versions": entries,
        "older": entries[-1]["commit_id"] if more and entries else None,
    }


def commit_facts(view: StorageView, commit_id: int) -> dict[str, Any]:
    """Of the commit that made something: when, by whom, in which run, for which event."""
    record = view.storage.commit(commit_id)
    facts: dict[str, Any] = {"commit_id": commit_id, "commit_url": commit_path(commit_id)}
    return facts if record is None else facts | origin(record)


def origin(record: CommitRecord) -> dict[str, Any]:
    return {
        "created_at": record.created_at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "runtime_id": record.runtime_id,
        "kind": record.kind,
        "run_id": record.metadata.get(RUN_ID),
        "asset": record.metadata.get(ASSET),
        "handled": [dict(event) for event in record.handled or ()],
    }


def changes(
    stage: Stage, row: Row, before: Stage | None, earlier: Row | None
) -> list[dict[str, Any]]:
    """The fields that differ, with both values. Fields are the same by their ids, whatever their
    names were."""
    was: dict[int, tuple[str, Any]] = {}
    if before is not None and earlier is not None:
        was = {f.field_id: (f.name, earlier["fields"][f.name]) for f in before.spec.fields}
    differing: list[dict[str, Any]] = []
    for field in stage.spec.fields:
        name, old = was.pop(field.field_id, (field.name, None))
        new = row["fields"][field.name]
        if earlier is None or not same(old, new):
            change = {"field": field.name, "before": old, "after": new}
            differing.append(change if name == field.name else {**change, "renamed_from": name})
    gone = [{"field": name, "before": old, "after": None} for name, old in was.values()]
    return differing + gone


def same(old: Any, new: Any) -> bool:
    """In JSON 1, 1.0 and true are three values, which Python takes for one."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(same(old[name], new[name]) for name in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(same, old, new))
    return type(old) is type(new) and bool(old == new)
