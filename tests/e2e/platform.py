"""Both locations as people run them: webserver, daemon and code servers, on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import dagster as dg

from ontologia_dagster.demo.definitions import demo_definitions
from ontologia_dagster.demo.expected import Expected
from tests.servers import free_ports

T = TypeVar("T")

LOCATIONS = 2  # of the workspace
_PATIENCE_S = 300.0  # a loaded machine is slow; on a quiet one it takes seconds


@contextmanager
def dagster_ui(log: Path) -> Iterator[str]:
    """`make ui`, without make: the address at which it answers."""
    (port,) = free_ports(1)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ontologia_dagster.demo", "ui", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _answers(address, process, log), "the webserver answers")
        yield address
    finally:
        end(process)


def until(found: Callable[[], T], what: str) -> T:
    """What `found` comes to as soon as it is true."""
    deadline = time.monotonic() + _PATIENCE_S
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.5)
    return value


def _answers(address: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text(errors="replace")
    query = {"query": "{ repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }"}
    request = urllib.request.Request(
        f"{address}/graphql",
        data=json.dumps(query).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answered = json.load(answer)["data"]["repositoriesOrError"]
            return len(answered.get("nodes", ())) == LOCATIONS
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, to all of its processes; then for good."""
    for sent, patience in ((signal.SIGINT, 30.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, sent)
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def dagster_knows_all_of_it(instance: dg.DagsterInstance, source: Expected) -> None:
    """Every month of flights has its rows; runs are of jobs that the location has, and none goes
    on or waits."""
    flights = dg.AssetKey("flight")
    assert instance.get_materialized_partitions(flights) == set(source.flights_by_month)
    for month, rows in source.flights_by_month.items():
        records = instance.fetch_materializations(
            dg.AssetRecordsFilter(flights, asset_partitions=[month]), limit=1
        ).records
        told = records[0].asset_materialization
        assert told is not None
        assert told.metadata["dagster/partition_row_count"].value == rows
    runs = instance.get_runs()
    ended = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE}
    assert {run.status for run in runs} <= ended
    jobs = {one.name for one in demo_definitions().resolve_all_job_defs()}
    assert {run.job_name for run in runs} <= jobs
