"""What users declare: entities, relations, events and their fields, as data and as Arrow.

Declaring (`Entity`, `Relation`, `Event`, `Field`) turns classes into type specs (`TypeSpec`),
which everything else is driven by: validation, canonical JSON, Arrow and Parquet schemas, bulk
input. Knows nothing of storages.
"""

from storage_engine.model.arrow import (
    ARROW_TYPES,
    SQLITE_TYPES,
    Conformer,
    conform,
    fields_json,
    objects_to_table,
    parquet_schema,
    row_schema,
    table_from_fields_json,
    table_to_objects,
)
from storage_engine.model.canonical import canonical_json, decode, encode
from storage_engine.model.columns import SYSTEM_FIELD_IDS
from storage_engine.model.declarations import (
    Entity,
    EntityMeta,
    Event,
    Relation,
    RelationMeta,
    spec_of,
)
from storage_engine.model.field import Field, FieldRef
from storage_engine.model.spec import (
    MISSING,
    SYSTEM_COLUMNS,
    FieldSpec,
    Kind,
    Storage,
    TypeSpec,
    build_type_spec,
    classify,
)

__all__ = [
    "ARROW_TYPES",
    "MISSING",
    "SQLITE_TYPES",
    "SYSTEM_COLUMNS",
    "SYSTEM_FIELD_IDS",
    "Conformer",
    "Entity",
    "EntityMeta",
    "Event",
    "Field",
    "FieldRef",
    "FieldSpec",
    "Kind",
    "Relation",
    "RelationMeta",
    "Storage",
    "TypeSpec",
    "build_type_spec",
    "canonical_json",
    "classify",
    "conform",
    "decode",
    "encode",
    "fields_json",
    "objects_to_table",
    "parquet_schema",
    "row_schema",
    "spec_of",
    "table_from_fields_json",
    "table_to_objects",
]
