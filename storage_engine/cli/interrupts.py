"""Ctrl-C ends a query at once, even one that is deep inside a database engine.

Python tells a program of a signal between two of its own instructions. Inside DuckDB and SQLite
there may be none for minutes, and DuckDB reports an interrupt as an error of its own. So the
signal also wakes a thread, which ends the process when nobody else has after a moment. That is
safe for commands that only read; their temporary files are in a folder that goes with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

GRACE_S = 1.0  # to end in order, before the process is ended
_EXIT_CODE = 130


@contextlib.contextmanager
def prompt_interrupts(abandon: Callable[[], None]) -> Iterator[None]:
    """Around work that only reads. `abandon` is called before the process is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are for the main thread
        return
    interrupted = threading.Event()
    finished = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> NoReturn:
        interrupted.set()
        raise KeyboardInterrupt

    def watch() -> None:
        while number := woken.recv(1):  # empty: the other end was closed
            if number[0] == signal.SIGINT and not finished.wait(GRACE_S):
                try:
                    abandon()
                    shutil.rmtree(scratch, ignore_errors=True)
                finally:
                    os._exit(_EXIT_CODE)

    tempdir = tempfile.tempdir
    scratch = tempfile.mkdtemp(prefix="onto-")
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    fd_before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    before = signal.signal(signal.SIGINT, on_signal)
    try:
        tempfile.tempdir = scratch
        yield
    except Exception:
        if interrupted.is_set():  # the engine's way of saying so
            raise KeyboardInterrupt from None
        raise
    finally:
        finished.set()
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(fd_before)
        wake.close()
        watcher.join()
        woken.close()
        tempfile.tempdir = tempdir
        shutil.rmtree(scratch, ignore_errors=True)
