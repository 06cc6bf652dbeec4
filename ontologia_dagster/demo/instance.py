"""Where the demo keeps things: its folder, the Dagster instance that `make run` and `make ui` share
in it, and what a killed one of them left behind.

A run whose process died stays "started", and keeps its place in its pool: the next run would wait
for it for ever. Each program holds a lock as long as it lives, so that the next one can tell runs
that go on from runs that are dead, and end those.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from ontologia_dagster import EVENTS_POOL, INGEST_POOL, MAINTENANCE_POOL
from ontologia_dagster.dagster_compat import free_slots, limit_pool
from storage_engine.errors import ConfigurationError
from storage_engine.repository.open import STORAGE_URI_VARIABLE

HOME_VARIABLE = "ONTOLOGIA_HOME"
SOURCE_VARIABLE = "ONTOLOGIA_DEMO_SOURCE"
DEMO_STORAGE_VARIABLE = "ONTOLOGIA_DEMO_STORAGE_URI"
# The key of its resource, and so the beginning of all names that belong to its storage: two
# locations of a workspace that both had `ontology/log` would be one asset to Dagster.
STORAGE = "flights"
GROUP = "flights"
DELIVERY = "flight_data"
RUN, UI, SERVER = "run", "ui", "server"
# Runs that `make run` executes in its own process; all others are the UI's.
OWN_RUN = {"ontologia/executed_by": "make run"}
POOL_LIMITS: Mapping[str, int] = {INGEST_POOL: 1, MAINTENANCE_POOL: 1, EVENTS_POOL: 1}
SETTINGS: Mapping[str, Any] = {
    "telemetry": {"enabled": False},
    "nux": {"enabled": False},  # no letter box in front of the first page
    # One run with Spark fills a small machine; others wait their turn instead of failing.
    "concurrency": {
        "runs": {"max_concurrent_runs": 2},
        "pools": {"granularity": "op", "default_limit": 1},
    },
    # A run whose process died is marked as failed, so that the next can begin.
    "run_monitoring": {
        "enabled": True,
        "start_timeout_seconds": 180,
        "max_runtime_seconds": 7200,
        "poll_interval_seconds": 30,
    },
    "retention": {"sensor": {"purge_after_days": {"skipped": 7, "success": 30}}},
}
_LOCAL_S3 = "s3"
_NOT_BEGUN_OR_ENDED = (
    dg.DagsterRunStatus.QUEUED,  # the next daemon takes it
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
)


def choose_home(*, local_s3: bool = False) -> None:
    """Give the storage that was chosen a home of its own, for this process and its children.

    Dagster's record of what is materialised and the files delivered belong to one storage: what is
    known of one would hide commits of another.
    """
    root = home()
    own = str(root / STORAGE)
    told = os.environ.get(DEMO_STORAGE_VARIABLE) or os.environ.get(STORAGE_URI_VARIABLE)
    chosen = told or own
    if local_s3:
        os.environ[HOME_VARIABLE] = str(root / _LOCAL_S3)
    elif chosen != own and root.name != _readable(chosen):
        os.environ[HOME_VARIABLE] = str(root / _readable(chosen))
    os.environ[DEMO_STORAGE_VARIABLE] = chosen
    # The location beside it, which `make ui` opens too, stays away from the demo's storage.
    os.environ[STORAGE_URI_VARIABLE] = str(home() / "store")


def demo_storage_uri() -> str:
    """The demo's storage: what `make run` and `make ui` were told, or a folder of its own."""
    return os.environ.get(DEMO_STORAGE_VARIABLE) or str(home() / STORAGE)


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


def prepare_instance(home: Path | None = None) -> Path:
    """Make the folder ready; settings that someone changed there are kept."""
    home = home or dagster_home()
    home.mkdir(parents=True, exist_ok=True)
    settings = home / "dagster.yaml"
    if not settings.exists():
        text = yaml.safe_dump(dict(SETTINGS), sort_keys=False)
        settings.write_text(f"# Written by Ontologia's demo; yours to change.\n{text}")
    return home


def open_instance(home: Path | None = None) -> dg.DagsterInstance:
    """The instance, with the limits of its pools set. DAGSTER_HOME names it from here on."""
    home = prepare_instance(home)
    os.environ["DAGSTER_HOME"] = str(home)
    instance = dg.DagsterInstance.from_config(str(home))
    for pool, limit in POOL_LIMITS.items():
        limit_pool(instance, pool, limit)
    return instance


# -- who is alive ---------------------------------------------------------------------------------


@contextmanager
def hold(folder: Path, program: str) -> Iterator[None]:
    """Hold the program's lock: one of a kind works in a folder at a time.

    The lock ends with this process, also when it turns into another program (`exec`).
    """
    path = _lock_file(folder, program)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _try_lock(descriptor):
            holder = path.read_text().strip()
            raise ConfigurationError(
                f"{folder} is in use ({program}, process {holder}): wait for its end, or name "
                "another folder with ONTOLOGIA_HOME"
            )
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        os.set_inheritable(descriptor, True)
        yield
    finally:
        os.close(descriptor)


def is_alive(folder: Path, program: str) -> bool:
    descriptor = os.open(_lock_file(folder, program), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def end_dead_runs(instance: dg.DagsterInstance, folder: Path, program: str) -> int:
    """Mark runs that nobody executes any more as failed, and free their places in pools.

    Call it while holding the lock of `program`: what that kind of program ran before is dead, and
    what the other kind runs is dead unless one is alive.
    """
    other_alive = is_alive(folder, UI if program == RUN else RUN)
    ended = 0
    going = [status for status in dg.DagsterRunStatus if status not in _NOT_BEGUN_OR_ENDED]
    for run in instance.get_runs(dg.RunsFilter(statuses=going)):
        kind = RUN if OWN_RUN.items() <= run.tags.items() else UI
        if kind != program and other_alive:
            continue
        instance.report_run_failed(run, f"`make {kind}`, which executed this run, was ended.")
        free_slots(instance, run.run_id)
        ended += 1
    return ended


def _lock_file(folder: Path, program: str) -> Path:
    return folder / f"{program}.lock"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
