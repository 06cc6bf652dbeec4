"""The location's storages: head, checks, jobs, schedules and sensors of each.

Types are declared beside this file, in YAML (`dg scaffold defs
ontologia_dagster.components.OntologyTypeComponent customers`) or in Python (`build_type`).
"""

import dagster as dg

from ontologia_dagster.alerts import failed_runs_sensor
from ontologia_dagster.environments import Environments
from ontologia_dagster.platform import STORAGE, build_platform


@dg.definitions
def storages() -> dg.Definitions:
    current = Environments.load().current
    keys = [STORAGE, *(f"{STORAGE}_{tenant}" for tenant in current.tenants)]
    return dg.Definitions.merge(
        dg.Definitions(sensors=[failed_runs_sensor()]),
        *(build_platform(storage=key, handlers=current.handlers) for key in keys),
    )
