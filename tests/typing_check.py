"""Runs mypy, as strictly as users may, on a snippet that must pass and on one full of mistakes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]

CONFIG = """
[mypy]
strict = True
explicit_package_bases = True
[mypy-storage_engine.*]
follow_imports = silent
[mypy-pyarrow.*]
ignore_missing_imports = True
"""

Errors = dict[str, dict[int, str]]  # by file and line


def mypy_errors(folder: Path, good: str, bad: Iterable[str]) -> Errors:
    """Errors in `good`, and in `good` with the lines of `bad` below it, from one run: starting
    mypy is what takes time. All runs share what mypy has found out about the library."""
    (folder / "good.py").write_text(good)
    (folder / "bad.py").write_text(good + "\n".join(bad) + "\n")
    (folder / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "good.py", "bad.py"]
    cache = ROOT / ".mypy_cache" / "test_typing"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time: the second finds most of it done
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(cache)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert not done.stderr, done.stderr
    assert "checked 2 source files" in done.stdout, done.stdout
    found: Errors = {"good.py": {}, "bad.py": {}}
    for line in done.stdout.splitlines():
        path, _, rest = line.partition(":")
        if path in found and "error:" in rest:
            found[path][int(rest.partition(":")[0])] = rest
    return found


def check_mistakes(errors: Errors, good: str, bad: Mapping[str, str]) -> None:
    """Each line of `bad` has an error of its kind, and no other line has any."""
    found = dict(errors["bad.py"])
    for line, (code, kind) in enumerate(bad.items(), start=good.count("\n") + 1):
        assert f"[{kind}]" in found.pop(line, "nothing"), code
    assert found == {}
