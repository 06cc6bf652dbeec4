"""`onto` as a process for every command, for the price of a fork: what takes long, the imports, is
done once. `python -m tests.cli.forks` reads lines of JSON, `Forks` writes them."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Self

import storage_engine
from tests.cli.support import ROOT, Done

_PATIENCE_S = 120.0


class Forks:
    """Runs `onto` in a folder, with its own environment, streams and exit code each time."""

    def __init__(self, cwd: Path, **environ: str) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ONTOLOGIA_")}
        self._streams = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.forks", self._streams.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**clean, "PYTHONPATH": str(ROOT), **environ},
        )

    def onto(self, *args: str | Path, stdin: str = "", until_line: bool = False) -> Done:
        """`until_line`: interrupted, as by Ctrl-C, when it has printed something."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"args": [str(arg) for arg in args], "stdin": stdin, "until_line": until_line}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Done(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.communicate(timeout=_PATIENCE_S)
        self._streams.cleanup()


def _serve(folder: str) -> None:
    _import_all()
    from storage_engine.cli.main import main

    answers = os.fdopen(os.dup(1), "w")
    streams = [Path(folder, name) for name in ("in", "out", "err")]
    for line in sys.stdin:
        asked = json.loads(line)
        for path in streams:
            path.write_text(asked["stdin"] if path.name == "in" else "")
        pid = os.fork()
        if pid == 0:
            answers.close()
            for number, path in enumerate(streams):
                os.dup2(os.open(path, os.O_RDWR), number)
            sys.stdin = open(0)  # noqa: SIM115 - what was read ahead is the parent's
            sys.argv = ["onto", *asked["args"]]
            _run(main)
        code = _end(pid, streams[1] if asked["until_line"] else None)
        out, err = (path.read_text() for path in streams[1:])
        answers.write(json.dumps({"code": code, "out": out, "err": err}) + "\n")
        answers.flush()


def _import_all() -> None:
    """So that no process has to."""
    for module in pkgutil.walk_packages(storage_engine.__path__, "storage_engine."):
        if not module.name.startswith("storage_engine.spark"):
            importlib.import_module(module.name)


def _run(main: Callable[[], None]) -> NoReturn:
    """Without the interpreter's own end: threads that Arrow had before the fork are not here, and
    would be waited for."""
    code: Any = 1
    try:
        main()
    except SystemExit as ending:
        code = ending.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(pid: int, until_line: Path | None) -> int:
    """Its exit code. What hangs is killed: the test shall tell which line it was."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        elif until_line is not None and "\n" in until_line.read_text():
            os.kill(pid, signal.SIGINT)
            until_line = None
        time.sleep(0.005)


if __name__ == "__main__":
    _serve(sys.argv[1])
