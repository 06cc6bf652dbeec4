"""docs/tutorial.md, done as it says: its files written, its programs and commands run in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
_BLOCK = re.compile(r"^```(?P<language>\w+)(?P<run> run)?\n(?P<text>.*?)^```$", re.M | re.S)
_NAMED = re.compile(r"# (?P<path>[\w/]+\.\w+)\n")


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_the_tutorial_works_as_written(tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ONTOLOGIA_", "DAGSTER_"))
    }
    environment |= {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
        "DAGSTER_HOME": str(tmp_path / "instance"),
    }
    (tmp_path / "instance").mkdir()
    written, run = 0, 0
    for language, runs, text in blocks():
        if not runs:
            named = _NAMED.match(text)
            assert named, f"a block neither run nor written to a file: {text[:80]}"
            path = tmp_path / named["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.removeprefix(named[0]))
            if path.suffix == ".py":
                (path.parent / "__init__.py").touch()
            written += 1
            continue
        commands = (
            [[sys.executable, "-c", text]]
            if language == "python"
            else [shlex.split(line) for line in text.splitlines()]
        )
        for command in commands:
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=400,
            )
            assert done.returncode == 0, (
                f"{command[:3]}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
            run += 1
    assert (written, run) > (7, 8)  # it was really found


def blocks() -> list[tuple[str, str, str]]:
    return [(m["language"], m["run"], m["text"]) for m in _BLOCK.finditer(TUTORIAL.read_text())]
