"""Spark Connect: a client without a JVM writes and reads through a server on loopback."""

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

from jobs.ingest import DriftPolicy, IngestOrder, Source
from storage_engine import initialize_storage
from tests.servers import free_ports
from tests.spark_support import SETTINGS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
_START_S = 120


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
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "spark-internal"],
            env={
                **os.environ,
                "SPARK_HOME": str(home),
                "PYSPARK_PYTHON": sys.executable,
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


def test_ingest_and_read(server: str, tmp_path: Path) -> None:
    storage = tmp_path / "onto"
    initialize_storage(storage)
    _run("tests/spark/connect_client.py", server, str(storage), str(tmp_path / "checkpoint"))
    (tmp_path / "samples.csv").write_text("id,number\njob1,7\njob2,many\n")
    order = IngestOrder(
        storage_uri=str(storage),
        type="Sample",
        models="tests.spark.read_world",
        source=Source("csv", (str(tmp_path / "samples.csv"),), schema="id STRING, number BIGINT"),
        on_bad_rows="quarantine",
        drift=DriftPolicy(retyped="quarantine"),
        expectations=({"unique": "id"}, {"referential": {"column": "id", "type": "Sample"}}),
    )
    said = _run("jobs/ingest.py", f"--remote={server}", "--json", *order.to_arguments())
    result = json.loads(said.splitlines()[-1])
    assert (result["inserted"], result["quarantined"]) == (1, 1)


def _run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / program), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout
