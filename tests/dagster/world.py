"""What the Dagster tests share: storages, sources, declarations, and facts of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from ontologia_dagster.declaration import OntologyAsset, PartitionSpec, SourceSpec
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.resources.spark import SparkResource
from ontologia_dagster.storage.alerts import Notifier
from storage_engine import initialize_storage

MODELS = "tests.dagster.shop"
ORDERS = """id,day,total
1,2013-01-02,10
2,2013-01-30,20
3,2013-02-01,30
4,2013-03-31,40
5,2013-04-01,50
"""


def storage(folder: Path, **options: Any) -> OntologyResource:
    uri = str(folder / "store")
    initialize_storage(uri)
    return OntologyResource(storage_uri=uri, **options)


CUSTOMERS = "id,name\nc1,Ada\nc2,Bo\n"


def customers(folder: Path, text: str | None = CUSTOMERS, **more: Any) -> OntologyAsset:
    """`text` None: the source stays as it is."""
    path = folder / "customers.csv"
    if text is not None:
        path.write_text(text)
    source = SourceSpec(format="csv", paths=[str(path)])
    return OntologyAsset(
        type="Customer", models=MODELS, source=source, **{"columns": {"visits": "0"}, **more}
    )


def orders(folder: Path, text: str = ORDERS, **more: Any) -> OntologyAsset:
    path = folder / "orders.csv"
    path.write_text(text)
    return OntologyAsset(
        type="Order",
        models=MODELS,
        source=SourceSpec(format="csv", paths=[str(path)]),
        columns={"day": "CAST(day AS DATE)", "total": "CAST(total AS BIGINT)"},
        partitions=PartitionSpec(kind="monthly", field="day", start="2013-01-01", end="2013-05-01"),
        **more,
    )


def resources(ontology: OntologyResource, **more: Any) -> dict[str, Any]:
    return {"ontology": ontology, "spark": SparkResource(), "notifier": Notifier(), **more}


def evaluated(
    definitions: dg.Definitions,
    sensor: str,
    bound: Mapping[str, Any],
    instance: dg.DagsterInstance,
    cursor: str | None = None,
) -> Any:
    """One tick of a sensor, as the daemon makes it."""
    whole = dg.Definitions.merge(definitions, dg.Definitions(resources=bound))
    with dg.build_sensor_context(
        instance=instance, resources=dict(bound), definitions=whole, cursor=cursor
    ) as context:
        return whole.get_sensor_def(sensor).evaluate_tick(context)


def remote_job(location: str, name: str) -> Any:
    """Where a run comes from that Dagster started from a code location."""
    from dagster._core.remote_origin import (
        RegisteredCodeLocationOrigin,
        RemoteJobOrigin,
        RemoteRepositoryOrigin,
    )

    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin(location), "__repository__")
    return RemoteJobOrigin(repository, name)


def facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.value for name, value in metadata.items()}


def materialisations(result: Any) -> list[dg.AssetMaterialization]:
    return [event.step_materialization_data.materialization for event in _events(result)]


def _events(result: Any) -> Sequence[Any]:
    return result.get_asset_materialization_events()


def version(materialisation: dg.AssetMaterialization) -> str:
    assert materialisation.tags is not None
    return materialisation.tags["dagster/data_version"]


def rows(table: Any) -> list[dict[str, Any]]:
    """Of a table in metadata."""
    return [dict(record.data) for record in table.records]


def ingest_job(folder: str) -> dg.JobDefinition:
    """Of a folder with a storage and its source, for `dg.build_reconstructable_job`."""
    from ontologia_dagster.ingestion.asset import ingestion_asset

    path = Path(folder)
    asset = ingestion_asset(customers(path, None))
    return dg.Definitions(
        assets=[asset],
        jobs=[
            dg.define_asset_job("ingest", selection=[asset], executor_def=dg.in_process_executor)
        ],
        resources=resources(OntologyResource(storage_uri=str(path / "store"))),
    ).resolve_job_def("ingest")
