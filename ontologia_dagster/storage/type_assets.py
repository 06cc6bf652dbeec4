"""The assets of a storage, by what their definitions say of themselves.

Jobs and sensors of a storage find its types and checks this way, wherever they were declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from ontologia_dagster.declaration import CompactionSpec, OntologyAsset, PartitionSpec

TYPE = "ontologia/type"
STORAGE = "ontologia/storage"
PARTITION_BY = "ontologia/partition_by"
COMPACTION = "ontologia/compaction"


@dataclass(frozen=True)
class TypeAsset:
    """An asset that is a type of a storage."""

    key: dg.AssetKey
    type_name: str
    partition_by: PartitionSpec | None = None
    compaction: CompactionSpec | None = None


def definition_metadata(declared: OntologyAsset) -> dict[str, Any]:
    """What an asset's definition says, to be found again."""
    metadata: dict[str, Any] = {TYPE: declared.type, STORAGE: declared.storage}
    if declared.partitions is not None:
        metadata[PARTITION_BY] = declared.partitions.model_dump(mode="json")
    if declared.compaction is not None:
        metadata[COMPACTION] = declared.compaction.model_dump(mode="json")
    return metadata


def declared_types(definitions: dg.Definitions, storage: str) -> list[str]:
    """The types of a storage that some definitions have assets for, before they are a location."""
    types: dict[str, None] = {}
    for asset in definitions.assets or ():
        for spec in asset.specs if isinstance(asset, dg.AssetsDefinition) else ():
            if spec.metadata.get(STORAGE) == storage and TYPE in spec.metadata:
                types[spec.metadata[TYPE]] = None
    return list(types)


def checks_of(repository: dg.RepositoryDefinition, storage: str) -> list[dg.AssetCheckKey]:
    """The checks of a storage's assets. Those of assets that belong to no storage are the first
    storage's, so that each has one who looks at it."""
    graph = repository.asset_graph
    owner = {key: _plain_metadata(graph, key).get(STORAGE) for key in graph.get_all_asset_keys()}
    first = min(filter(None, owner.values()), default=None)
    return sorted(
        key
        for key in graph.asset_check_keys
        if (owner.get(key.asset_key) or first) in (storage, None)
    )


def find_type_assets(repository: dg.RepositoryDefinition, storage: str) -> list[TypeAsset]:
    assets = []
    graph = repository.asset_graph
    for key in sorted(graph.materializable_asset_keys):
        metadata = _plain_metadata(graph, key)
        if metadata.get(STORAGE) == storage and TYPE in metadata:
            assets.append(
                TypeAsset(
                    key,
                    metadata[TYPE],
                    _parse(PartitionSpec, metadata, PARTITION_BY),
                    _parse(CompactionSpec, metadata, COMPACTION),
                )
            )
    return assets


def _plain_metadata(graph: Any, key: dg.AssetKey) -> dict[str, Any]:
    return {name: _plain(value) for name, value in graph.get(key).metadata.items()}


def _parse(model: Any, metadata: Mapping[str, Any], name: str) -> Any:
    return model(**metadata[name]) if name in metadata else None


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, dg.MetadataValue) else value
