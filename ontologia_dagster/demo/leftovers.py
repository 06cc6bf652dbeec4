"""What a killed `make run` or `make ui` left behind in Dagster.

A run whose process died stays "started", and keeps its place in its pool: the next run would wait
for it for ever. Each program holds a lock as long as it lives, so that the next one can tell runs
that go on from runs that are dead, and end those.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from storage_engine.errors import ConfigurationError

RUN, UI, SERVER = "run", "ui", "server"
_NOT_BEGUN_OR_ENDED = (
    dg.DagsterRunStatus.QUEUED,  # the next daemon takes it
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
)
# Runs that `make run` executes in its own process; all others are the UI's.
OWN_RUN = {"ontologia/executed_by": "make run"}


@contextmanager
def alive(folder: Path, program: str) -> Iterator[None]:
    """Hold the program's lock: one of a kind works in a folder at a time.

    The lock ends with this process, also when it turns into another program (`exec`).
    """
    path = _lock_file(folder, program)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _locked(descriptor):
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
        return not _locked(descriptor)
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
        instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
        ended += 1
    return ended


def _lock_file(folder: Path, program: str) -> Path:
    return folder / f"{program}.lock"


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
