"""The schemas of types as a storage has them, whoever wrote it.

The log says what they are. One that was begun by another implementation may not: then the
catalogs do, and where these say it in words that we do not know, the columns of the files. So
every type that has rows can be read without a class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import Documents
from storage_engine.commitlog.records import Head, TypeHead, TypeRef
from storage_engine.errors import IntegrityError, SchemaMetadataError
from storage_engine.model.columns import ARROW_TYPES
from storage_engine.model.spec import (
    SYSTEM_COLUMNS,
    FieldSpec,
    Storage,
    TypeSpec,
    build_type_spec,
)
from storage_engine.objectstore.protocol import ObjectNotFound
from storage_engine.repository.object.read.files import same_values

_NULLABLE: dict[Storage, Any] = {
    "str": build_type_spec(str | None),
    "int": build_type_spec(int | None),
    "float": build_type_spec(float | None),
    "bool": build_type_spec(bool | None),
    "datetime": build_type_spec(datetime | None),
    "date": build_type_spec(date | None),
    "bytes": build_type_spec(bytes | None),
    "json": build_type_spec(Any),
}


def type_refs(chain: Chain, head: Head) -> Set[TypeRef]:
    """Kind and name of the types that the storage has."""
    return state.type_heads(chain, head).keys()


def stored_types(
    chain: Chain, documents: Documents, head: Head, refs: Sequence[TypeRef]
) -> list[TypeSpec]:
    """Of the named types those that the storage has."""
    heads = state.type_heads(chain, head)
    asked = [(ref, heads[ref]) for ref in refs if ref in heads]
    return chain.store.parallel.map(lambda item: _stored(chain, documents, head, *item), asked)


def _stored(
    chain: Chain, documents: Documents, head: Head, ref: TypeRef, top: TypeHead
) -> TypeSpec:
    record = state.schema_record(chain, head, ref, top)
    if record is not None:
        return TypeSpec.from_schema_dict(record["schema"])
    for schema in _catalogued(documents, ref, top.schema_version_id):
        try:
            spec = TypeSpec.from_schema_dict(schema)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # of another implementation
        if spec.ref == ref:
            return spec
    return _from_file(ref, *_newest_file(chain, ref, top))


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
    storage: Storage = next(
        (s for s in _NULLABLE if same_values(ARROW_TYPES[s], column.type)), "json"
    )
    return FieldSpec(
        name=column.name,
        type_spec=_NULLABLE[storage],
        storage=storage,
        nullable=True,
        index=False,
        field_id=number,
        required=False,
    )
