"""The schemas of types as a storage has them, whoever wrote it, and a class against them.

The log says what they are. One that was begun by another implementation may not: then the
catalogs do, and where these say it in words that we do not know, the columns of the files. So
every type that has rows can be read without a class.

Readers and writers refuse a class that differs. One whose fields or members of unions only stand
in another order is read with the order and ids that the files have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import Documents
from storage_engine.commitlog.records import Head, TypeHead, TypeRef
from storage_engine.commitlog.schema_log import purged_upto
from storage_engine.commitlog.type_heads import LiveTypes
from storage_engine.errors import (
    IntegrityError,
    SchemaMetadataError,
    TypeDroppedError,
    UnsupportedTypeError,
)
from storage_engine.model.columns import ARROW_TYPES
from storage_engine.model.decimals import Precision
from storage_engine.model.spec import (
    SYSTEM_COLUMNS,
    FieldSpec,
    Storage,
    TypeSpec,
    build_type_spec,
    classify,
)
from storage_engine.objectstore.protocol import ObjectNotFound
from storage_engine.repository.object.read.files import same_values
from storage_engine.schema.diff import not_renamed_yet, outdated
from storage_engine.schema.history import SchemaVersion, TypeHistory
from storage_engine.schema.migration import StoredState

_NULLABLE: dict[Storage, Any] = {
    "str": build_type_spec(str | None),
    "int": build_type_spec(int | None),
    "float": build_type_spec(float | None),
    "bool": build_type_spec(bool | None),
    "datetime": build_type_spec(datetime | None),
    "date": build_type_spec(date | None),
    "time": build_type_spec(time | None),
    "bytes": build_type_spec(bytes | None),
    "json": build_type_spec(Any),
}


def type_refs(chain: Chain, head: Head) -> Set[TypeRef]:
    """Kind and name of the types that the storage has, without those that were dropped."""
    return LiveTypes(chain.type_heads_at(head))


def stored_types(
    chain: Chain, documents: Documents, head: Head, refs: Sequence[TypeRef]
) -> list[TypeSpec]:
    """Of the named types those that the storage has."""
    heads = chain.type_heads_at(head)
    tops = [(ref, heads.get(ref)) for ref in refs]
    asked = [(ref, top) for ref, top in tops if top is not None and not top.is_dropped]
    return chain.store.parallel.map(lambda item: _stored(chain, documents, head, *item), asked)


def _stored(
    chain: Chain, documents: Documents, head: Head, ref: TypeRef, top: TypeHead
) -> TypeSpec:
    record = state.schema_record(chain, head, ref, top)
    if record is not None:
        return recorded_spec(ref, top, record)
    for schema in _catalogued(documents, ref, top.schema_version_id):
        try:
            spec = TypeSpec.from_schema_dict(schema)
        except (KeyError, TypeError, ValueError, AttributeError, UnsupportedTypeError):
            continue  # of another implementation
        if spec.ref == ref:
            return spec
    return _from_file(ref, *_newest_file(chain, ref, top))


def type_histories(
    chain: Chain, documents: Documents, head: Head, refs: Sequence[TypeRef] | None
) -> dict[TypeRef, TypeHistory]:
    """The schema versions of types, dropped ones included. One of another implementation has the
    version that is current, and no other is known."""
    heads = chain.type_heads_at(head)
    asked = sorted(heads) if refs is None else list(dict.fromkeys(refs))
    records = state.schema_records(chain, head, asked)
    histories = {}
    for ref in asked:
        top = heads.get(ref)
        if top is None:
            continue
        versions = records.get(ref) or {}
        if top.schema_version_id in versions:
            histories[ref] = _history(ref, top, versions)
        else:
            spec = _stored(chain, documents, head, ref, top)
            version = SchemaVersion(
                top.schema_version_id,
                spec,
                top.schema_sha256 or spec.schema_sha256,
                top.activation_commit_id,
            )
            histories[ref] = TypeHistory(*ref, (version,))
    return histories


def recorded_histories(
    chain: Chain, head: Head, refs: Sequence[TypeRef] | None = None
) -> dict[TypeRef, TypeHistory]:
    """The same from the log alone: without types whose schemas it does not record."""
    heads = chain.type_heads_at(head)
    records = state.schema_records(chain, head, refs)
    return {
        ref: _history(ref, top, versions)
        for ref, versions in records.items()
        if (top := heads.get(ref)) is not None and top.schema_version_id in versions
    }


def _history(ref: TypeRef, top: TypeHead, versions: Mapping[int, Mapping[str, Any]]) -> TypeHistory:
    kind, name = ref
    purged = purged_upto({ref: versions}).get(ref, 0)
    made = []
    for number in sorted(versions):
        record = versions[number]
        spec = recorded_spec(ref, replace(top, schema_version_id=number), record)
        made.append(
            SchemaVersion(
                number,
                spec,
                record.get("schema_sha256") or spec.schema_sha256,
                record["activation_commit_id"],
                record.get("superseded_at_commit_id"),
                record.get("created_at"),
                record.get("renamed_from"),
                purged if record["activation_commit_id"] <= purged else None,
            )
        )
    return TypeHistory(
        kind,
        name,
        tuple(made),
        dropped_commit_id=top.dropped_commit_id,
        renamed_to=top.renamed_to,
    )


def stored_state(
    chain: Chain, documents: Documents, head: Head
) -> Callable[[TypeRef], StoredState | None]:
    """What a migration is planned on, as of a head."""
    heads = chain.type_heads_at(head)

    def state_of(ref: TypeRef) -> StoredState | None:
        top = heads.get(ref)
        if top is None:
            return None
        digest = top.schema_sha256 or _stored(chain, documents, head, ref, top).schema_sha256
        return StoredState(top.schema_version_id, digest, top.is_dropped)

    return state_of


def recorded_spec(ref: TypeRef, top: TypeHead, record: Mapping[str, Any]) -> TypeSpec:
    """The type as the log has recorded it, which is truth: IntegrityError where it says nothing
    that we know. Manifests of before their hashes were kept may have been changed unseen."""
    try:
        return TypeSpec.from_schema_dict(record["schema"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        kind, name = ref
        raise IntegrityError(
            f"the log's schema of the {kind} {name}, version {top.schema_version_id}, registered "
            f"by commit {top.activation_commit_id}, cannot be read ({error!r}): `onto verify` "
            "names the object, restore it from a copy of the storage",
            key=top.manifest_path,
        ) from error


def _catalogued(documents: Documents, ref: TypeRef, version: int) -> Iterator[Any]:
    """What the catalogs say; one that cannot be read says nothing."""
    kind, name = ref
    history: Mapping[str, Any] = {}
    registry: Mapping[str, Any] = {}
    with suppress(SchemaMetadataError):
        history = documents.read(layout.schema_versions(kind, name)) or {}
    with suppress(SchemaMetadataError):
        registry = documents.read(layout.REGISTRY) or {}
    versions = history.get("versions")
    for entry in versions if isinstance(versions, list) else ():
        if isinstance(entry, Mapping) and entry.get("schema_version_id") == version:
            yield entry.get("schema")
    of_kind = registry.get(kind)
    entry = of_kind.get(name) if isinstance(of_kind, Mapping) else None
    if isinstance(entry, Mapping):
        yield entry.get("schema")


def _newest_file(chain: Chain, ref: TypeRef, top: TypeHead) -> tuple[str, bytes]:
    path = chain.manifest(top.link).files_of(ref)[0].path
    try:
        return path, chain.store.get(path).data
    except ObjectNotFound:
        raise IntegrityError(f"{path} is named by the log but missing", key=path) from None


def _from_file(ref: TypeRef, path: str, data: bytes) -> TypeSpec:
    """What the columns of a file say: nothing of keys and ends, but enough to read its rows."""
    try:
        columns = pq.read_schema(pa.BufferReader(data))
    except (OSError, pa.ArrowException) as error:
        raise IntegrityError(f"{path} is no Parquet file: {error}", key=path) from error
    kind, name = ref
    fields = tuple(
        _field(column, number)
        for number, column in enumerate(columns, start=1)
        if column.name not in SYSTEM_COLUMNS
    )
    return TypeSpec("entity" if kind == "entity" else "relation", name, fields)


def _field(column: pa.Field, number: int) -> FieldSpec:
    if pa.types.is_decimal128(column.type) and 0 <= column.type.scale <= column.type.precision:
        digits = Precision(column.type.precision, column.type.scale)
        type_spec = build_type_spec(Decimal | None, decimals=digits)
    else:
        kinds = (s for s in _NULLABLE if same_values(ARROW_TYPES[s], column.type))
        type_spec = _NULLABLE[next(kinds, "json")]
    return FieldSpec(
        name=column.name,
        type_spec=type_spec,
        storage=classify(type_spec)[0],
        nullable=True,
        index=False,
        field_id=number,
        required=False,
    )


FIRST_VERSION = 1


def aligned(chain: Chain, head: Head, spec: TypeSpec, top: TypeHead | None) -> TypeSpec:
    """The type with the field order and ids that its files have: a line moved in a class is no
    change of schema, and must not be one of columns."""
    if top is None or not top.layout_sha256 or top.layout_sha256 == spec.layout_sha256:
        return spec
    record = state.schema_record(chain, head, spec.ref, top)
    if record is None:
        return spec
    recorded_spec(spec.ref, top, record)
    return spec.aligned(record["schema"])


def check_schema(chain: Chain, head: Head, spec: TypeSpec, top: TypeHead | None) -> bool:
    """Refuse a class that differs from what is stored, one of a type that was dropped, and a new
    name for a type that still has the old one; True when nothing is stored of it yet."""
    if top is not None and top.dropped_commit_id is not None:
        raise TypeDroppedError(
            type=spec.name, dropped_commit_id=top.dropped_commit_id, renamed_to=top.renamed_to
        )
    if top is None and spec.renamed_from is not None:
        old = chain.type_heads_at(head).get((spec.kind, spec.renamed_from))
        if old is not None and not old.is_dropped:
            raise not_renamed_yet(spec, old.schema_version_id)
    if top is None or not top.schema_sha256:
        return True
    if top.schema_sha256 == spec.schema_sha256:
        return False
    record = state.schema_record(chain, head, spec.ref, top)
    stored = recorded_spec(spec.ref, top, record) if record else None
    if record and spec.aligned(record["schema"]).schema_sha256 == top.schema_sha256:
        return False
    raise outdated(spec, top.schema_version_id, stored)
