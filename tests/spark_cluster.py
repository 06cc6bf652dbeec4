"""A standalone Spark cluster on loopback: a master and two workers, each a process of its own, at
addresses of their own (127.0.0.1, 127.0.0.2): Spark runs no second copy of a task on one host.

with spark_cluster(tmp_path) as cluster:
    done = cluster.submit("jobs/ingest.py", *arguments)
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ontologia_dagster.demo.local_s3 import free_ports

ROOT = Path(__file__).parents[1]
_START_S = 300.0
_REGISTERED = re.compile(r"Registering worker", re.I)


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    master: str
    home: Path
    environment: Mapping[str, str]

    def submit(
        self,
        program: str,
        *arguments: str,
        conf: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = 480,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of this repository through spark-submit, to its end."""
        settings = {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
            **(conf or {}),
        }
        listed = [
            part for name, value in settings.items() for part in ("--conf", f"{name}={value}")
        ]
        return subprocess.run(
            [
                str(self.home / "bin" / "spark-submit"),
                "--master",
                self.master,
                *listed,
                str(ROOT / program),
                *arguments,
            ],
            env={**self.environment, **(environment or {})},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@contextmanager
def spark_cluster(folder: Path, *, workers: int = 2) -> Iterator[Cluster]:
    """Starts the processes in a folder of their own, and ends them."""
    import pyspark

    home = Path(pyspark.__file__).parent
    (port,) = free_ports(1)
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
        # It would listen on a port of its own, the same for every cluster of this machine.
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
        "PYTHONPATH": str(ROOT),
    }
    for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "PYSPARK_GATEWAY_PORT"):
        environment.pop(name, None)
    master = f"spark://127.0.0.1:{port}"
    started: list[subprocess.Popen[bytes]] = []
    log = folder / "master.log"
    try:
        started.append(
            _start(
                home,
                "master.Master",
                ["--host", "127.0.0.1", "--port", f"{port}", "--webui-port", "0"],
                environment,
                log,
            )
        )
        _wait(lambda: _listens(port), "the master to listen", log)
        for number in range(workers):
            at = ["--host", f"127.0.0.{number + 1}", "--webui-port", "0"]
            arguments = [*at, "--cores", "1", "--memory", "1g", master]
            worker = folder / f"worker-{number}.log"
            started.append(_start(home, "worker.Worker", arguments, environment, worker))
        _wait(
            lambda: len(_REGISTERED.findall(log.read_text(errors="replace"))) >= workers,
            f"{workers} workers to register",
            log,
        )
        yield Cluster(master, home, environment)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(
    home: Path, program: str, arguments: list[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{program}", *arguments],
            env=environment,
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(ready: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"waited in vain for {what}: {log.read_text(errors='replace')[-2000:]}"
            )
        time.sleep(0.2)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
