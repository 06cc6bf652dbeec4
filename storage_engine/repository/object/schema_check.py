"""A class against the schema that is stored of its type.

Readers and writers refuse a class that differs. One whose fields or members of unions only stand
in another order is read with the order and ids that the files have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage_engine.commitlog import state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import Head, TypeHead, sha256
from storage_engine.errors import SchemaOutdatedError
from storage_engine.model.canonical import canonical_json
from storage_engine.model.spec import TypeSpec, schema_differences

FIRST_VERSION = 1


def layout_sha256(spec: TypeSpec) -> str:
    return sha256(canonical_json(spec.schema_dict()).encode())


def aligned(chain: Chain, head: Head, spec: TypeSpec, top: TypeHead | None) -> TypeSpec:
    """The type with the field order and ids that its files have: a line moved in a class is no
    change of schema, and must not be one of columns."""
    if top is None or not top.layout_sha256 or top.layout_sha256 == layout_sha256(spec):
        return spec
    record = state.schema_record(chain, head, spec.ref, top)
    return spec.aligned(record["schema"]) if record is not None else spec


def check_schema(chain: Chain, head: Head, spec: TypeSpec, top: TypeHead | None) -> bool:
    """Refuse a class that differs from what is stored; True when nothing is stored of it yet."""
    if top is None or not top.schema_sha256:
        return True
    if top.schema_sha256 == spec.schema_sha256:
        return False
    record = state.schema_record(chain, head, spec.ref, top)
    if record and spec.aligned(record["schema"]).schema_sha256 == top.schema_sha256:
        return False
    raise _schema_outdated(spec, top.schema_version_id, record["schema"] if record else {})


def _schema_outdated(
    spec: TypeSpec, stored_version: int, stored: Mapping[str, Any]
) -> SchemaOutdatedError:
    differences = schema_differences(dict(stored), spec.schema_dict()) if stored else []
    listed = "; ".join(differences) or "its stored schema differs"
    return SchemaOutdatedError(
        f"class {spec.name} differs from schema version {stored_version} in the storage: {listed}. "
        "Declare the class as it was stored, or store the new one under another name",
        type=spec.name,
        stored_version=stored_version,
        differences=differences,
    )
