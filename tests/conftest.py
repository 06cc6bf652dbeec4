"""Fixtures for all suites: S3 servers, started when first asked for, and a cache of their own.

Temporary files are in memory where the machine has such a place, which takes two thirds off the
time of tests that commit to directories and SQLite: they wait for the disk at every write. Give
TMPDIR to have them elsewhere.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from storage_engine.schema import upgraders
from tests.servers import aws_environment, moto_s3, seaweedfs_s3
from tests.spark_support import spark

__all__ = ["aws_environment", "moto_s3", "seaweedfs_s3", "spark"]

_IN_MEMORY = "/dev/shm"
_ROOM = 4 << 30
if (
    "TMPDIR" not in os.environ
    and os.access(_IN_MEMORY, os.W_OK | os.X_OK)
    and shutil.disk_usage(_IN_MEMORY).free >= _ROOM
):
    os.environ["TMPDIR"] = tempfile.tempdir = _IN_MEMORY  # for processes that tests start, too

# The JVMs of tests live for seconds, and never earn back what the optimising compiler takes: a
# third less processor time for Spark's tests.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# How long it takes to draw examples says nothing on a machine with much else to do.
settings.register_profile(
    "busy", settings(), suppress_health_check=[HealthCheck.too_slow], deadline=None
)
settings.load_profile("busy")

# What a shell starts in the background ignores SIGINT, and so does all that it starts in its turn:
# tests of Ctrl-C would wait for ever.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the collector need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not the cache of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def upgraders_of_the_test() -> Iterator[None]:
    """Upgraders count for the whole process once they are declared: those of a test end with it."""
    before = dict(upgraders._declared)
    upgraders._declared.clear()  # also of those that other modules declare when they are imported
    yield
    upgraders._declared.clear()
    upgraders._declared.update(before)
