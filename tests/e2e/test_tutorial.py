"""docs/tutorial.md, followed to the letter: its files written and its commands run, in order, in
one shell. What the text does not say is not done."""

from __future__ import annotations

import os
import re
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
    files, commands, script = as_script()
    assert (files, commands) > (10, 15)  # it was really found
    ours = ("ONTOLOGIA_", "DAGSTER_", "PYTHONPATH", "PYSPARK_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # As `source .venv/bin/activate` does; JAVA_HOME is as whoever runs the tests has it.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eux", "-o", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-6000:]}"
    assert (tmp_path / "shop-project" / ".ontologia" / "store").is_dir()


def as_script() -> tuple[int, int, str]:
    """How many files it writes, how many commands it runs, and all of it for a shell."""
    files, commands, script = 0, 0, ""
    for found in _BLOCK.finditer(TUTORIAL.read_text()):
        text = found["text"]
        if found["run"]:
            commands += len(text.splitlines())
            script += text
            continue
        named = _NAMED.match(text)
        assert named, f"a block neither run nor written to a file: {text[:80]}"
        files += 1
        path = named["path"]
        script += f"mkdir -p {Path(path).parent}\n"  # as an editor does
        script += f"cat > {path} <<'END OF FILE'\n{text.removeprefix(named[0])}END OF FILE\n"
    return files, commands, script
