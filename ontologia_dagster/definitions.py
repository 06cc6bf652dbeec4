"""The code location: the types under `defs/`, the platform of each storage, and the resources of
its environment."""

from pathlib import Path

import dagster as dg

from ontologia_dagster.declaration import one_process_executor
from ontologia_dagster.resources.environments import Environments
from ontologia_dagster.storage.storage_defs import (
    build_platforms,
    handler_modules,
    location_resources,
)


@dg.definitions
def defs() -> dg.Definitions:
    environments = Environments.load()
    package = Path(__file__).parent
    types = dg.load_from_defs_folder(path_within_project=package)
    return dg.Definitions.merge(
        types,
        build_platforms(environments.current, types, handlers=handler_modules(package / "defs")),
        # One process and one JVM for all steps of a run.
        dg.Definitions(resources=location_resources(environments), executor=one_process_executor),
    )
