"""A sample of the corpus of dirty sources through an ingestion asset: as Spark and Session do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest

from ontologia_dagster.declaration import OntologyAsset, SourceSpec
from ontologia_dagster.ingestion.asset import ingestion_asset
from ontologia_dagster.resources.ontology import OntologyResource
from tests.dagster.world import facts, materialisations, resources
from tests.jobs.dirty import BY_NAME
from tests.jobs.test_dirty_sources import kept_of, laid_out, named, new_storage, stored

pytestmark = pytest.mark.spark

SAMPLE = [
    "line break in quotes",
    "quote never closed in the middle",
    "Latin-1",
    "time without a day",
    "header in capitals, one mapped",
    "zip that is cut short",
    "JSON, two objects in a line",
    "Parquet, files with different columns",
    "Parquet, not a number and infinite",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_through_an_asset(name: str, spark: Any, tmp_path: Path) -> None:
    case = BY_NAME[name]
    laid_out(case, tmp_path)
    uri = new_storage(tmp_path)
    more: dict[str, Any] = {**case.members}
    if case.schema is not None:
        more["drift"] = {"retyped": "quarantine"}
    declared = OntologyAsset(
        type="Dirty",
        models="tests.jobs.dirty",
        source=SourceSpec(
            format=case.format,  # type: ignore[arg-type]
            paths=[named(case, tmp_path)],
            row_schema=case.schema,
            options=case.options,
        ),
        on_bad_rows="quarantine",
        **more,
    )
    result = dg.materialize(
        [ingestion_asset(declared)],
        resources=resources(OntologyResource(storage_uri=uri)),
        raise_on_error=False,
    )
    assert result.success == (case.refused is None)
    assert stored(uri) == case.rows
    if case.refused is not None:
        return
    [made] = materialisations(result)
    told = facts(made.metadata)
    assert told.get("rows_quarantined", 0) == sum(case.bad.values())
    if case.bad:
        kept = kept_of(pq.read_table(told["quarantine"]).to_pylist(), tmp_path)
        assert case.kept is not None
        assert kept == sorted(case.kept)
