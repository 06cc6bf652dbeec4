"""Where the demo keeps things, and what its assets are called."""

from __future__ import annotations

import os
from pathlib import Path

HOME_VARIABLE = "ONTOLOGIA_HOME"
SOURCE_VARIABLE = "ONTOLOGIA_DEMO_SOURCE"
GROUP = "flights"
DELIVERY = "flight_data"


def home() -> Path:
    """The folder of everything that is generated: storage, files delivered, Dagster's instance."""
    return Path(os.environ.get(HOME_VARIABLE) or ".ontologia").resolve()


def landing_folder() -> Path:
    """Where the source's files are delivered."""
    return home() / "landing"


def dagster_home() -> Path:
    return home() / "dagster"
