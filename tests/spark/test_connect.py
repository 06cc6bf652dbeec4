"""Spark Connect: a client without a JVM writes and reads through a server on loopback, and so do
the programs. One test, because the server takes its time to come up."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyspark
import pytest

from storage_engine import Session, initialize_storage
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.spark.jobs.ingest import DriftPolicy, IngestSpec, Source
from tests.servers import free_ports
from tests.spark.read_world import Sample, expected
from tests.spark_support import SETTINGS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
EARLY = Path(__file__).with_name("early_python.py")
_START_S = 300


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    settings = {
        **SETTINGS,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.local.dir": str(tmp_path / "local"),
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
    }
    home = Path(pyspark.__file__).parent
    command = [str(home / "bin/spark-submit"), "--master", "local[2]"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    log = tmp_path / "server.log"
    python = tmp_path / "python"  # of the server's workers
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {EARLY} "$@"\n')
    python.chmod(0o755)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "spark-internal"],
            env={
                **os.environ,
                "SPARK_HOME": str(home),
                "PYSPARK_PYTHON": str(python),
                "PYTHONPATH": str(ROOT),  # the server runs Python workers that import our types
            },
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
        )
    try:
        _await(port, process, log)
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _await(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no Connect server:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


def test_a_client_and_the_programs(server: str, tmp_path: Path) -> None:
    storage = tmp_path / "onto"
    initialize_storage(storage)
    _run("tests/spark/connect_client.py", server, str(storage), str(tmp_path / "checkpoint"))
    (tmp_path / "samples.csv").write_text("id,number\njob1,7\njob2,many\n")
    order = IngestSpec(
        storage_uri=str(storage),
        type="Sample",
        models="tests.spark.read_world",
        source=Source(
            format="csv",
            paths=(str(tmp_path / "samples.csv"),),
            row_schema="id STRING, number BIGINT",
        ),
        on_bad_rows="quarantine",
        drift=DriftPolicy(retyped="quarantine"),
        expectations=({"unique": "id"}, {"referential": {"column": "id", "type": "Sample"}}),
    )
    said = _run("jobs/ingest.py", f"--remote={server}", "--json", *order.to_arguments())
    result = json.loads(said.splitlines()[-1])
    assert (result["inserted"], result["quarantined"]) == (1, 1)
    follow(server, storage, tmp_path)
    compact(server, storage)


def follow(server: str, storage: Path, folder: Path) -> None:
    """`jobs/stream.py`: batches run on the server. Without a name for the query it says what
    Connect does not tell."""
    (folder / "in").mkdir()
    (folder / "in" / "1.csv").write_text("id,number\nfollowed,7\n")
    order = IngestSpec(
        storage_uri=str(storage),
        type="Sample",
        models="tests.spark.read_world",
        source=Source(
            format="csv", paths=(str(folder / "in"),), row_schema="id STRING, number BIGINT"
        ),
    )
    arguments = [f"--remote={server}", "--json", *order.to_arguments()]
    nameless = [*arguments, f"--checkpoint={folder / 'nameless'}"]
    error = json.loads(_run("jobs/stream.py", *nameless, code=2))["error"]
    assert "Spark Connect does not tell a batch the id of its query; name the" in error["message"]
    named = [*arguments, f"--checkpoint={folder / 'named'}", "--app-id=files"]
    with Session(storage) as session:
        head = session.repository.head_commit_id()
        assert json.loads(_run("jobs/stream.py", *named))["batches"] == 1
        assert session.repository.head_commit_id() == head + 1
        [found] = [row for row in expected(session, Sample) if row["id"] == "followed"]
        assert found["number"] == 7


def compact(server: str, storage: Path) -> None:
    """`jobs/compact.py`: the server merges and proves, the client publishes."""
    with Session(storage) as session:
        before = expected(session, Sample, commit_id=True, history=True)
    arguments = [f"--storage-uri={storage}", "--min-entries=2", "--spark-above=1", "--apply"]
    said = json.loads(_run("jobs/compact.py", f"--remote={server}", "--json", *arguments))
    assert {run["outcome"] for run in said["report"]["runs"]} == {"published"}
    assert "Sample" in {run["type_name"] for run in said["report"]["runs"]}
    with Session(storage) as session:
        assert expected(session, Sample, commit_id=True, history=True) == before
        assert verify_storage(session.repository, deep=True).ok


def _run(program: str, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / program), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, f"{done.stdout[-2000:]}{done.stderr[-5000:]}"
    return done.stdout
