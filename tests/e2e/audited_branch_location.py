"""The same location once more, on a branch of its own, as for a pull request."""

import os
from pathlib import Path

import dagster as dg

from tests.dagster import audited
from tests.e2e.audited_location import FOLDER, asking

BRANCH = "pr/12"


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions.merge(
        audited.definitions(Path(os.environ[FOLDER]), running=True, branch=BRANCH),
        dg.Definitions(sensors=[asking("pr")]),
    )
