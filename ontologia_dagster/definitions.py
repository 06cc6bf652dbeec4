"""The code location: everything under `defs/`, with the resources that it names."""

from pathlib import Path

import dagster as dg

from ontologia_dagster.resources import OntologyResource, default_storage_uri


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions.merge(
        dg.load_from_defs_folder(path_within_project=Path(__file__).parent),
        dg.Definitions(resources={"ontology": OntologyResource(storage_uri=default_storage_uri())}),
    )
