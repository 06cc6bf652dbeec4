"""What the page of a type's asset says before its first run, from declaration and class.

The declaration goes first, what the class says comes after. Models are imported for it; where they
cannot be, the page says less, and a run says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ontologia_dagster.declaration import OntologyAsset, definition_metadata
from ontologia_dagster.downstream.metadata import column_schema
from storage_engine.errors import ConfigurationError
from storage_engine.runtime.arguments import declared_types

if TYPE_CHECKING:
    from storage_engine.model.spec import TypeSpec


def page_attributes(declared: OntologyAsset) -> dict[str, Any]:
    """Attributes of the asset: description, owners, tags, kinds, metadata."""
    spec = declared_spec(declared)
    metadata = {**definition_metadata(declared), "dagster/table_name": declared.type}
    if spec is None:
        return {
            "description": declared.description,
            "owners": list(declared.owners),
            "tags": dict(declared.tags),
            "kinds": {"spark", "parquet"},
            "metadata": metadata,
        }
    return {
        "description": declared.description or spec.description,
        "owners": list(declared.owners or spec.owners),
        "tags": {**spec.tags, **declared.tags},
        "kinds": {spec.kind, "spark", "parquet"},
        "metadata": {**metadata, "dagster/column_schema": column_schema(spec)},
    }


def declared_spec(declared: OntologyAsset) -> TypeSpec | None:
    """The type as its class has it; None where the module does not say which it is."""
    try:
        types = declared_types(declared.models, option="models")
    except ConfigurationError:
        return None
    matches = [spec for (_, name), spec in types.items() if name == declared.type]
    return matches[0] if len(matches) == 1 else None
