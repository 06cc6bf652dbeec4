"""Where the demo keeps things, and what its assets are called."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from ontologia_dagster.environments import STORAGE_URI_VARIABLE

HOME_VARIABLE = "ONTOLOGIA_HOME"
SOURCE_VARIABLE = "ONTOLOGIA_DEMO_SOURCE"
GROUP = "flights"
DELIVERY = "flight_data"
_LOCAL_S3 = "s3"


def settle(*, local_s3: bool = False) -> None:
    """Give the storage that was chosen a home of its own, for this process and its children.

    Dagster's record of what is materialised and the files delivered belong to one storage: what is
    known of one would hide commits of another.
    """
    root = home()
    default = str(root / "store")
    chosen = os.environ.get(STORAGE_URI_VARIABLE) or default
    if local_s3:
        os.environ[HOME_VARIABLE] = str(root / _LOCAL_S3)
    elif chosen != default:
        os.environ[HOME_VARIABLE] = str(root / _readable(chosen))
    os.environ[STORAGE_URI_VARIABLE] = chosen


def home() -> Path:
    """The folder of everything that is generated: storage, files delivered, Dagster's instance."""
    return Path(os.environ.get(HOME_VARIABLE) or ".ontologia").resolve()


def landing_folder() -> Path:
    """Where the source's files are delivered."""
    return home() / "landing"


def dagster_home() -> Path:
    return home() / "dagster"


def _readable(uri: str) -> str:
    """A folder's name for a storage: its URI, as far as a name can hold it."""
    digest = hashlib.sha256(uri.encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', uri).strip('-')[-60:]}-{digest}"
