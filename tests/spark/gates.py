"""Spark jobs that stop where a test wants them to, and go on when it says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


class Gate:
    """Holds a job where its rows are read, until it is opened."""

    def __init__(self, folder: Path) -> None:
        self.reached = folder / "reached"
        self.opened = folder / "opened"

    def __call__(self) -> None:
        import time

        self.reached.touch()
        while not self.opened.exists():
            time.sleep(0.05)


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Started at once, on a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future
