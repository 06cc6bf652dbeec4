"""The examples of docs/events.md run, and do what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/examples/events.py"), "--storage", str(tmp_path / "s")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    for said in (
        "the day is closed",
        "thank you for o1 (number 1 in its chain)",
        "shop.bill gave up: ValueError: order o2 has a negative amount",
        "4 handled, 1 failed",
        "commit 2: {'handler': 'bill'}",
    ):
        assert said in done.stdout


def test_what_a_handler_leaves_is_as_documented() -> None:
    """The page shows the program's output, line by line."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/examples/handler_semantics.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert f"```\n{done.stdout}```\n" in (ROOT / "docs/events.md").read_text()
