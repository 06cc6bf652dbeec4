"""Through Pipes and spark-submit, on a cluster: a range, a kill after the CAS, a cancel. The kill
in process too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest

from storage_engine import Session, initialize_storage
from tests.dagster import worker
from tests.dagster.world import ORDERS, facts, rows, version

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "orders.csv").write_text(ORDERS)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    initialize_storage(str(tmp_path / "store"))
    return tmp_path


@contextmanager
def started(folder: Path, master: str, how: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a process of its own, which does not outlive the test."""
    home = folder / "home"
    with (folder / "worker.log").open("wb") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.dagster.worker", str(home), str(folder), master, how],
            cwd=ROOT,
            env={**os.environ, "DAGSTER_HOME": str(home)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield worker
    finally:
        if worker.poll() is None:
            worker.terminate()  # and with it the driver
            worker.wait(240)


def running(folder: Path) -> list[str]:
    """Command lines of processes that work on this storage."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if entry.name.isdigit() and str(folder / "store") in line:
            found.append(line)
    return found


@pytest.mark.parametrize("where", ["cluster", "in_process"])
def test_a_run_killed_after_its_commit_is_retried_without_writing_again(
    folder: Path, where: str, request: pytest.FixtureRequest
) -> None:
    master = request.getfixturevalue("spark_master") if where == "cluster" else worker.IN_PROCESS
    with started(folder, master, "killed") as killed:
        assert killed.wait(240) == -signal.SIGKILL, (folder / "worker.log").read_text()[-3000:]
    with dg.DagsterInstance.from_config(str(folder / "home")) as instance:
        [record] = instance.get_run_records()
        run = record.dagster_run
        assert run.status == dg.DagsterRunStatus.STARTED
        assert instance.get_latest_materialization_event(dg.AssetKey("order")) is None
        with Session(str(folder / "store")) as session:
            [commit] = session.list_commits()
        assert commit["metadata"]["dagster/run_id"] == run.run_id

        instance.report_run_failed(run)  # as run monitoring does
        again = dg.ReexecutionOptions(parent_run_id=run.run_id)
        made = worker.reconstructable(str(folder), master, slow=False)
        with dg.execute_job(
            made, instance, tags=worker.RANGE, reexecution_options=again
        ) as retried:
            result = retried
        events = [event for event in result.all_events if event.is_step_materialization]

    written = [event.step_materialization_data.materialization for event in events]
    found = {m.partition: facts(m.metadata) for m in written}
    assert {key: said["dagster/partition_row_count"] for key, said in found.items()} == {
        "2013-01-01": 2,
        "2013-02-01": 1,
    }
    assert {version(m) for m in written} == {"1"}
    assert {said["commit"] for said in found.values()} == {"1"}
    done_before = {"what": "unit of work was done before", "value": "yes"}
    assert all(done_before in rows(said["details"]) for said in found.values())
    with Session(str(folder / "store")) as session:
        assert [commit["id"] for commit in session.list_commits()] == [1]


def test_cancelling_the_run_ends_the_driver(folder: Path, spark_master: str) -> None:
    deadline = time.monotonic() + 200
    with started(folder, spark_master, "slow") as slow:
        while not (folder / worker.MARK).exists():
            assert slow.poll() is None, (folder / "worker.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert running(folder)

        slow.send_signal(signal.SIGINT)
        slow.wait(240)

    while running(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert running(folder) == []
    with dg.DagsterInstance.from_config(str(folder / "home")) as instance:
        [record] = instance.get_run_records()
        assert record.dagster_run.is_finished
    with Session(str(folder / "store")) as session:
        assert session.list_commits() == []
