"""Spark Connect: a client without a JVM writes and reads through a server on loopback."""

from __future__ import annotations

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
    initialize_storage(tmp_path / "onto")
    client = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests/spark/connect_client.py"),
            server,
            str(tmp_path / "onto"),
            str(tmp_path / "checkpoint"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert client.returncode == 0, client.stderr[-5000:]
