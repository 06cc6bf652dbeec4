"""The demo's location as people run it: webserver, daemon and code server, on loopback."""

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

from tests.servers import free_ports

T = TypeVar("T")

_PATIENCE_S = 150.0  # a loaded machine is slow; on a quiet one it takes seconds


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
        _end(process)


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
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bool(json.load(answer)["data"]["repositoriesOrError"].get("nodes"))
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, to all of its processes; then for good."""
    for sent, patience in ((signal.SIGINT, 30.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, sent)
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return
