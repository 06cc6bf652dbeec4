"""A type of the ontology as a YAML file: `defs.yaml` becomes asset, check, job, schedule, sensor.

    type: ontologia_dagster.components.OntologyTypeComponent
    attributes:
      type: Customer
      models: shop.models
      source: {format: csv, paths: ["data/customers/*.csv"]}

`dg scaffold defs ontologia_dagster.components.OntologyTypeComponent customers --type Customer
--models shop.models` writes a first one.
"""

from __future__ import annotations

from typing import Any

import dagster as dg
from pydantic import BaseModel, Field

from ontologia_dagster.declaration import OntologyAsset
from ontologia_dagster.ingestion.asset import build_type


class ScaffoldParams(BaseModel):
    """What `dg scaffold` asks for; everything has a default that can be edited later."""

    type: str = Field(default="Customer", description="The stored name of the type")
    models: str = Field(default="my_project.models", description="The module that declares it")
    source_format: str = Field(default="csv", description="csv, json, parquet or jdbc")
    source_path: str = Field(default="data/*.csv", description="Where the files are")


class OntologyTypeScaffolder(dg.Scaffolder[ScaffoldParams]):
    """Writes a declaration that loads as it is, and shows what else can be said."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        params = request.params
        dg.scaffold_component(
            request,
            {
                "type": params.type,
                "models": params.models,
                "source": {"format": params.source_format, "paths": [params.source_path]},
                "columns": {},
                "on_bad_rows": "fail",
                "expectations": [],
            },
        )


@dg.scaffold_with(OntologyTypeScaffolder)
class OntologyTypeComponent(OntologyAsset, dg.Component):
    """An entity or relation type that Spark ingests from files or a database.

    Yields the asset, its index check, a job, and as declared a schedule and a source sensor.
    """

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        return build_type(self)

    @classmethod
    def get_spec(cls) -> Any:
        return dg.ComponentTypeSpec(tags=["ontologia", "spark"])
