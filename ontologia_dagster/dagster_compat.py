"""Materialisations of partitions, each with a data version of its own.

A partition's version is the commit that last changed one of its rows, so that a run which left it
as it was, in a range with others or by itself, re-triggers nothing. Dagster gives all partitions
of one result the same version. Where they differ its own events are switched off and ours take
their place, with the same tags.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster._core.definitions.data_version import DATA_VERSION_TAG
from dagster._core.definitions.source_asset import SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION

if TYPE_CHECKING:
    from ontologia_dagster.declaration import OntologyAsset

_NO_EVENTS = SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION  # an output with it makes none


def materialised(
    context: dg.AssetExecutionContext,
    declared: OntologyAsset,
    shared: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
    versions: Mapping[str, int],
) -> Iterator[dg.MaterializeResult[None]]:
    """The result of a run on these partitions: metadata that all have, that of each, and the
    commit that each is at."""
    if len(set(versions.values())) == 1:
        for key, metadata in own.items():
            context.add_asset_metadata(metadata, partition_key=key)
        version = str(next(iter(versions.values())))
        yield dg.MaterializeResult(metadata=shared, data_version=dg.DataVersion(version))
        return
    tags = _tags(context, declared)
    for key, metadata in own.items():
        context.log_event(
            dg.AssetMaterialization(
                asset_key=declared.asset_key,
                partition=key,
                metadata={**shared, **metadata},
                tags={**tags, DATA_VERSION_TAG: str(versions[key])},
            )
        )
    # What comes after it in the run (its checks, assets downstream) waits for this.
    yield dg.MaterializeResult(metadata={_NO_EVENTS: True})


def _tags(context: dg.AssetExecutionContext, declared: OntologyAsset) -> dict[str, str]:
    """As Dagster's own events have them: the code version, and what the inputs were."""
    from dagster._core.execution.plan.execute_step import (
        _build_data_version_tags,
        _get_input_provenance_data,
    )

    step = context.op_execution_context.get_step_execution_context()
    inputs = _get_input_provenance_data(declared.asset_key, step)
    return _build_data_version_tags(dg.DataVersion("0"), declared.code_version, inputs, True)
