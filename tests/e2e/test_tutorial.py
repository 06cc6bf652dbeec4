"""docs/tutorial.md, followed to the letter: its files written, its commands run, in order, in one
shell, and what it shows of their output seen. What the text does not say is not done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(
    r"^```(?P<language>\w+)(?P<what> run fails| run| shows)?\n(?P<text>.*?)^```$", re.M | re.S
)
_NAMED = re.compile(r"# (?P<path>[\w/]+\.\w+)\n")
_MARK = "@@ block"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Script:
    """All of it for a shell, and what its commands must print."""

    text: str = ""
    files: int = 0
    commands: int = 0
    blocks: int = 0
    shown: dict[int, list[str]] = field(default_factory=dict)

    def write(self, text: str) -> None:
        named = _NAMED.match(text)
        assert named, f"a block neither run nor written to a file: {text[:80]}"
        self.files += 1
        path = named["path"]
        self.text += f"mkdir -p {Path(path).parent}\n"  # as an editor does
        self.text += f"cat > {path} <<'END OF FILE'\n{text.removeprefix(named[0])}END OF FILE\n"

    def run(self, text: str, *, fails: bool) -> None:
        self.commands += len(text.splitlines())
        self.blocks += 1
        self.text += f"echo '{_MARK} {self.blocks}'\n"
        self.text += f"if {text.strip()}; then exit 99; fi\n" if fails else text

    def show(self, text: str) -> None:
        self.shown[self.blocks] = [line for line in text.splitlines() if line.strip()]


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_the_tutorial_works_as_written(tmp_path: Path) -> None:
    script = read_tutorial()
    assert (script.files, script.commands, len(script.shown)) > (10, 15, 3)  # it was really found
    ours = ("ONTOLOGIA_", "DAGSTER_", "PYTHONPATH", "PYSPARK_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # As `source .venv/bin/activate` does; JAVA_HOME is as whoever runs the tests has it.
    environment["PYTHONPATH"] = str(ROOT)  # this checkout, whichever one is installed
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", script.text],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
    assert (tmp_path / "shop-project" / ".ontologia" / "store").is_dir()
    printed = _COLOUR.sub("", done.stdout).split(_MARK)
    for number, lines in script.shown.items():
        appear(lines, printed[number])


def appear(lines: list[str], printed: str) -> None:
    """Each in turn; `...` stands for anything."""
    rest = printed.splitlines()
    for line in lines:
        pattern = re.compile(".*?".join(re.escape(part) for part in line.split("...")))
        while rest and not pattern.search(rest[0]):
            rest.pop(0)
        assert rest, f"{line!r} is not in what was printed, or not in its place:\n{printed}"
        rest.pop(0)


def read_tutorial() -> Script:
    script = Script()
    for block in _BLOCK.finditer(TUTORIAL.read_text()):
        match block["what"]:
            case " run" | " run fails" as what:
                script.run(block["text"], fails=what == " run fails")
            case " shows":
                script.show(block["text"])
            case _:
                script.write(block["text"])
    return script
