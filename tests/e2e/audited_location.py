"""A location that is published audited, for the real daemon: runs are asked for by files."""

# No `from __future__ import annotations`: Dagster reads annotations of sensors as objects.

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg

from ontologia_dagster.storage import publication
from ontologia_dagster.storage.publication_defs import publish_config
from tests.dagster import audited

FOLDER = "TEST_AUDITED_FOLDER"
KILLED = "test/killed"  # a run's tag: its process is killed when head has been swung
_tell = publication._tell


def tell_or_die(context: Any, *given: Any) -> None:
    if KILLED in context.run.tags and context.run.parent_run_id is None:
        audited.die()
    _tell(context, *given)


vars(publication)["_tell"] = tell_or_die


def asking(begin: str) -> dg.SensorDefinition:
    """Asks for a run for each file that begins like this, with the tags that it has."""

    @dg.sensor(
        name="asked",
        job_name=audited.JOB,
        minimum_interval_seconds=1,
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    def asked(_context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest]:
        for file in sorted(Path(os.environ[FOLDER]).glob(f"{begin}-*.json")):
            yield dg.RunRequest(run_key=file.name, tags=json.loads(file.read_text()))

    return asked


@dg.sensor(
    job_name="ontology_publish_branch",
    minimum_interval_seconds=1,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
def merging(_context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest]:
    """Has a branch published that a file names, as a person does it in the launchpad."""
    for file in sorted(Path(os.environ[FOLDER]).glob("merge-*.txt")):
        config = publish_config("ontology", file.read_text())
        yield dg.RunRequest(run_key=file.name, run_config=config)


@dg.definitions
def defs() -> dg.Definitions:
    folder = Path(os.environ[FOLDER])
    return dg.Definitions.merge(
        audited.definitions(folder, running=True), dg.Definitions(sensors=[asking("ask"), merging])
    )
