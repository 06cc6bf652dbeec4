"""The code location: everything under `defs/`, with the resources of its environment."""

from pathlib import Path

import dagster as dg

from ontologia_dagster.bindings import location_resources


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions.merge(
        dg.load_from_defs_folder(path_within_project=Path(__file__).parent),
        # One process and one JVM for all steps of a run.
        dg.Definitions(resources=location_resources(), executor=dg.in_process_executor),
    )
