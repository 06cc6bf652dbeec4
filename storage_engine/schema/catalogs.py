"""Projections of the schema state: types.json, registry.json, version histories, layouts, and the
markers of dropped types.

Written after the CAS by the commit that changed a schema, rebuilt from the chain by anyone; no
reader needs them to be right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.json_object import Document, Documents
from storage_engine.commitlog.parsing import is_name
from storage_engine.commitlog.records import TypeRef, timestamp
from storage_engine.errors import SchemaMetadataError
from storage_engine.schema.history import TypeHistory

_RECORD_TYPES = {"schema_version_id": int, "type_kind": str, "type_name": str}
_LAYOUT = ("schema_version_id", "type_kind", "type_name")  # what a layout is of

Record = Mapping[str, Any]  # kind, type_name, schema_version_id, schema_sha256, schema


def known_types(documents: Documents) -> list[TypeRef]:
    """Enumerate types.json; SchemaMetadataError when it is missing or malformed."""
    document = documents.read(layout.TYPES)
    if document is None:
        raise SchemaMetadataError(f"{layout.TYPES} is missing", key=layout.TYPES)
    if not (_names(document.get("entities")) and _names(document.get("relations"))):
        raise SchemaMetadataError(
            f"{layout.TYPES} must list names under 'entities' and 'relations'", key=layout.TYPES
        )
    return [(kind, name) for kind, folder in layout.FOLDERS.items() for name in document[folder]]


def empty_types(now: datetime) -> Document:
    return {"entities": [], "relations": [], "updated_at": timestamp(now)}


def catalog_writes(
    documents: Documents,
    registered: Sequence[tuple[int, Record]],
    *,
    types: Iterable[TypeRef],
    engine_version: str,
    now: datetime,
) -> list[Callable[[], None]]:
    """One independent write per catalog object that these registrations, each with its commit,
    change.

    `types` are all types of the log, so that types.json ends up complete even when it was lost.
    v1 leaves a malformed one to its owner: it is what lists the types there. v2 writes it anew,
    and raises to say so.
    """
    if not registered:
        return []

    def write_types() -> None:
        try:
            documents.update(layout.TYPES, lambda d: _with_names(d, types, now))
        except SchemaMetadataError as error:
            done = "left as it is"
            if engine_version != "v1":
                write_types_anew(documents, types, now)
                done = "written anew"
            raise SchemaMetadataError(f"{error}; {done}", key=layout.TYPES) from error

    writes = [
        write_types,
        lambda: documents.update(layout.REGISTRY, lambda d: _with_schemas(d, registered)),
    ]
    if engine_version == "v2":
        writes.append(
            lambda: documents.update(layout.LAYOUT_CATALOG, lambda d: _with_layouts(d, registered))
        )
    return writes + [_version_write(documents, r, commit_id, now) for commit_id, r in registered]


def history_writes(
    documents: Documents,
    histories: Mapping[TypeRef, TypeHistory],
    *,
    types: Iterable[TypeRef],
    engine_version: str,
    now: datetime,
) -> list[Callable[[], None]]:
    """One independent write per catalog object that says something else of these types than their
    histories do. `types` are all that there are now."""
    if not histories:
        return []
    return [
        lambda key=key, change=change: documents.update(key, change)  # type: ignore[misc]
        for key, change in history_changes(
            histories, types=types, engine_version=engine_version, now=now
        ).items()
    ]


def history_changes(
    histories: Mapping[TypeRef, TypeHistory],
    *,
    types: Iterable[TypeRef],
    engine_version: str,
    now: datetime,
) -> dict[str, Callable[[Document | None], Document | None]]:
    """By key, how a catalog is brought to what the histories say; None where it says so."""
    changes: dict[str, Callable[[Document | None], Document | None]] = {
        layout.TYPES: lambda d: _with_names(d, types, now, without=_ended(histories)),
        layout.REGISTRY: lambda d: _differing(d, _registry(d, histories)),
    }
    if any(h.dropped_commit_id is not None or len(h.versions) > 1 for h in histories.values()):
        changes[layout.DROPPED] = lambda d: _differing(d, _dropped(d, histories))
    if engine_version == "v2":
        changes[layout.LAYOUT_CATALOG] = lambda d: _differing(_in_order(d), _layouts(d, histories))
    for ref, history in histories.items():
        changes[layout.schema_versions(*ref)] = partial(_versions, history)
    return changes


def _ended(histories: Mapping[TypeRef, TypeHistory]) -> set[TypeRef]:
    return {ref for ref, history in histories.items() if history.current is None}


def _differing(before: Document | None, after: Document) -> Document | None:
    stated = {key: value for key, value in (before or {}).items() if key != "write_id"}
    return None if stated == after else after


def _registry(document: Document | None, histories: Mapping[TypeRef, TypeHistory]) -> Document:
    merged = _by_kind(document)
    for (kind, name), history in histories.items():
        current = history.current
        if current is None:
            merged[kind].pop(name, None)
            continue
        merged[kind][name] = {
            "schema_version_id": current.version,
            "schema_sha256": current.schema_sha256,
            "schema": current.spec.schema_dict(),
        }
    return merged


def _dropped(document: Document | None, histories: Mapping[TypeRef, TypeHistory]) -> Document:
    markers = [
        marker
        for marker in _records(document, "dropped", ("type_kind", "type_name"))
        if (marker["type_kind"], marker["type_name"]) not in histories
    ]
    markers += [
        {
            "type_kind": history.kind,
            "type_name": history.name,
            "schema_version_id": history.last.version,
            "dropped_commit_id": history.dropped_commit_id,
            "renamed_to": history.renamed_to,
            "purged": history.purged,
        }
        for history in histories.values()
        if history.dropped_commit_id is not None
    ]
    return {"dropped": sorted(markers, key=lambda m: (m["type_kind"], m["type_name"]))}


def _layouts(document: Document | None, histories: Mapping[TypeRef, TypeHistory]) -> Document:
    layouts = [
        entry
        for entry in _records(document, "layouts", _LAYOUT)
        if (entry["type_kind"], entry["type_name"]) not in histories
    ]
    layouts += [
        {
            "type_kind": history.kind,
            "type_name": history.name,
            "schema_version_id": version.version,
            "activation_commit_id": version.activation_commit_id,
            "is_current": version is history.current,
        }
        for history in histories.values()
        for version in history.versions
    ]
    return {"layouts": sorted(layouts, key=_layout_order)}


def _in_order(document: Document | None) -> Document | None:
    """As it stands, in the order in which layouts are compared: commits add theirs at the end."""
    try:
        return document and {**document, "layouts": sorted(document["layouts"], key=_layout_order)}
    except (KeyError, TypeError):
        return document  # not what it should be: it differs


def _layout_order(entry: Document) -> list[Any]:
    return [entry[name] for name in reversed(_LAYOUT)]


def _versions(history: TypeHistory, document: Document | None) -> Document | None:
    versions = []
    for version in history.versions:
        described = version.as_dict()
        if version.superseded_at_commit_id is None:
            del described["superseded_at_commit_id"]
        versions.append(described)
    after = {"type_kind": history.kind, "type_name": history.name, "versions": versions}
    return None if _timeless(document) == _timeless(after) else after


def _timeless(document: Document | None) -> Document:
    """Of a version history what the log decides: the time is its writer's where that was one of
    before, or of a checkpoint that does not keep it."""
    versions = _records(document, "versions", ("schema_version_id",))
    return {
        **{k: v for k, v in (document or {}).items() if k != "write_id"},
        "versions": [{k: v for k, v in r.items() if k != "created_at"} for r in versions],
    }


def write_types_anew(documents: Documents, types: Iterable[TypeRef], now: datetime) -> None:
    """Put types.json in place of one that is missing or says nothing; one that is good by now
    stays."""

    def is_good(document: Document | None) -> bool:
        return document is not None and (
            _names(document.get("entities")) and _names(document.get("relations"))
        )

    documents.replace_broken(
        layout.TYPES, _with_names(None, types, now) or empty_types(now), is_good
    )


def _version_write(
    documents: Documents, record: Record, commit_id: int, now: datetime
) -> Callable[[], None]:
    version = {
        "schema_version_id": record["schema_version_id"],
        "schema_sha256": record["schema_sha256"],
        "schema": record["schema"],
        "activation_commit_id": commit_id,
        "created_at": timestamp(now),
    }

    def change(document: Document | None) -> Document:
        versions = _records(document, "versions", ("schema_version_id",))
        others = [v for v in versions if v["schema_version_id"] != version["schema_version_id"]]
        return {
            "type_kind": record["kind"],
            "type_name": record["type_name"],
            "versions": sorted([*others, version], key=lambda v: v["schema_version_id"]),
        }

    key = layout.schema_versions(record["kind"], record["type_name"])
    first = record["schema_version_id"] == 1
    return lambda: documents.update(key, change, expect_absent=first)


def _with_names(
    document: Document | None,
    types: Iterable[TypeRef],
    now: datetime,
    *,
    without: Collection[TypeRef] = (),
) -> Document | None:
    document = document or empty_types(now)
    if not (_names(document.get("entities")) and _names(document.get("relations"))):
        raise SchemaMetadataError(f"{layout.TYPES} is malformed", key=layout.TYPES)
    names = {
        folder: sorted(
            {
                *(name for name in document[folder] if (kind, name) not in without),
                *(name for k, name in types if k == kind),
            }
        )
        for kind, folder in layout.FOLDERS.items()
    }
    if all(names[folder] == document[folder] for folder in names):
        return None
    return {**document, **names, "updated_at": timestamp(now)}


def _with_schemas(document: Document | None, registered: Sequence[tuple[int, Record]]) -> Document:
    merged = _by_kind(document)
    for _, record in registered:
        merged[record["kind"]][record["type_name"]] = {
            "schema_version_id": record["schema_version_id"],
            "schema_sha256": record["schema_sha256"],
            "schema": record["schema"],
        }
    return merged


def _by_kind(document: Document | None) -> Document:
    merged: Document = {}
    for kind in layout.FOLDERS:
        stored = (document or {}).get(kind)
        merged[kind] = dict(stored) if isinstance(stored, dict) else {}
    return merged


def _with_layouts(document: Document | None, registered: Sequence[tuple[int, Record]]) -> Document:
    layouts = _records(document, "layouts", _LAYOUT)
    for commit_id, record in registered:
        ref = (record["kind"], record["type_name"])
        others = []
        for entry in layouts:
            if (entry["type_kind"], entry["type_name"]) == ref:
                if entry["schema_version_id"] == record["schema_version_id"]:
                    continue
                entry["is_current"] = False
            others.append(entry)
        layouts = [
            *others,
            {
                "type_kind": ref[0],
                "type_name": ref[1],
                "schema_version_id": record["schema_version_id"],
                "activation_commit_id": commit_id,
                "is_current": True,
            },
        ]
    return {"layouts": layouts}


def _records(document: Document | None, field: str, required: Sequence[str]) -> list[Document]:
    """The objects of a list, without those that have another shape: what nobody can read is
    left out when the catalog is written anew."""
    stored = (document or {}).get(field)
    if not isinstance(stored, list):
        return []
    return [
        dict(record)
        for record in stored
        if isinstance(record, dict)
        and all(type(record.get(name)) is _RECORD_TYPES[name] for name in required)
    ]


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(is_name(name) for name in value)
