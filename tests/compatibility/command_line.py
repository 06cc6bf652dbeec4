"""`onto` as users start it: by the console script that pyproject.toml names, and nothing else.

Which module it lives in may change; the name, the arguments and the JSON may not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """What a run left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document that a run with `--json` printed; a run that failed raises."""
        assert self.code == 0, f"exit code {self.code}: {self.out}{self.err}"
        return json.loads(self.out)


def console_script() -> Callable[[], object]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["scripts"]["onto"].partition(":")
    found: Callable[[], object] = getattr(import_module(module), name)
    return found


def onto(*args: str | Path) -> Done:
    """In this process, which spares a second of imports."""
    script, code = console_script(), 0
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["onto", *map(str, args)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            script()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Done(code, out.getvalue(), err.getvalue())


def onto_process(*args: str | Path) -> Done:
    """In a process of its own, which may die."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ONTOLOGIA_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compatibility.command_line", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
        env={**clean, "PYTHONPATH": str(ROOT)},
    )
    return Done(done.returncode, done.stdout, done.stderr)


if __name__ == "__main__":
    console_script()()
