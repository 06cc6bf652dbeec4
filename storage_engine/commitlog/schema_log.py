"""The schema versions of types, folded commit by commit from what manifests say of them.

A record is what the commit registered, with when it became current and, where it is no more, with
what ended it. Checkpoints keep records so; those of before format 3 lack the commits, and there
every type had one version, which its first commit made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from storage_engine.commitlog.records import Checkpoint, Manifest, TypeRef

SchemaRecord = Mapping[str, Any]
SchemaRecords = dict[TypeRef, dict[int, SchemaRecord]]  # by version


def recorded(checkpoint: Checkpoint | None, refs: Iterable[TypeRef] | None = None) -> SchemaRecords:
    """The records of a checkpoint, to be folded on."""
    if checkpoint is None:
        return {}
    schemas = checkpoint.schemas
    wanted = schemas if refs is None else [ref for ref in refs if ref in schemas]
    return {
        ref: {
            version: record
            if "activation_commit_id" in record
            else {**record, "activation_commit_id": _first_commit(checkpoint, ref)}
            for version, record in schemas[ref].items()
        }
        for ref in wanted
    }


def fold(schemas: SchemaRecords, step: Manifest) -> None:
    """Take in what a commit says, which is the next one."""
    for record in step.schema.get("registered", ()):
        versions = schemas.setdefault((record["kind"], record["type_name"]), {})
        number = record["schema_version_id"]
        began = record.get("activation_commit_id", step.commit_id)
        began = versions.get(number, {}).get("activation_commit_id", began)
        for older in [v for v in versions if v != number]:
            versions[older] = {"superseded_at_commit_id": step.commit_id, **versions[older]}
        versions[number] = {
            **record,
            "activation_commit_id": began,
            "created_at": step.created_at,
        }
    for drop in step.schema.get("dropped", ()):
        versions = schemas.get((drop["kind"], drop["type_name"]), {})
        if not versions:
            continue
        last = max(versions)
        ended = {"superseded_at_commit_id": step.commit_id, "dropped_commit_id": step.commit_id}
        if drop.get("renamed_to"):
            ended["renamed_to"] = drop["renamed_to"]
        versions[last] = {**ended, **versions[last]}
        if drop.get("purge"):
            versions[last] = {**versions[last], "purged": True}


def purged_upto(
    schemas: Mapping[TypeRef, Mapping[int, SchemaRecord]],
) -> dict[TypeRef, int]:
    """Types whose rows were purged, and the commit up to which: a type of the name that was
    created anew has its own."""
    return {
        ref: max(ended)
        for ref, versions in schemas.items()
        if (ended := [r["dropped_commit_id"] for r in versions.values() if r.get("purged")])
    }


def _first_commit(checkpoint: Checkpoint, ref: TypeRef) -> int:
    entries = checkpoint.entries.get(ref, ())
    return entries[0].min_commit_id if entries else 1
