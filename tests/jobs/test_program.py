"""`python -m storage_engine.spark.jobs`, and its file as spark-submit gets it: what an installed
wheel offers, whatever modules the user's project has beside it. Without Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage_engine.spark.jobs import __main__ as program
from storage_engine.spark.jobs import ingest

ROOT = Path(__file__).parents[2]
FILE = str(Path(program.__file__))


def start(*command: str, folder: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


PROGRAMS = "{ingest,stream,compact,merge,migrate}"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, f"usage: python -m storage_engine.spark.jobs {PROGRAMS} ..."),
        (["--help"], 0, "usage: python -m storage_engine.spark.jobs"),
        (["ingst"], 2, "no program 'ingst'; did you mean ingest?"),
        (["--order=a.yaml"], 2, "no program '--order=a.yaml'\nusage"),
    ],
)
def test_which_program(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(arguments) == code
    assert said in capsys.readouterr().err


def test_the_rest_is_the_program_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x"])
    assert program.main(["ingest", "--help"]) == 0
    assert "--target-part-bytes" in capsys.readouterr().out
    assert program.main(["ingest", "--colum=a=b"]) == 2
    told = capsys.readouterr().err
    assert "did you mean --column?" in told
    assert "see python -m storage_engine.spark.jobs ingest --help" in told
    assert program.main(["stream", "--type=A"]) == 2
    assert "--checkpoint" in capsys.readouterr().err
    seen: list[list[str]] = []

    def take(argv: list[str]) -> int:
        seen.append(argv)
        return 3

    monkeypatch.setattr(ingest, "main", take)
    assert program.main(["ingest", "--type", "A"]) == 3
    assert seen == [["--type", "A"]]


def test_modules_of_a_project_with_our_names_are_in_nobodys_way(tmp_path: Path) -> None:
    broken = "raise ImportError('this is the module of the project')\n"
    (tmp_path / "jobs").mkdir()
    for name in ("jobs/__init__", "jobs/ingest", "program", "arguments", "sources", "mapping"):
        (tmp_path / f"{name}.py").write_text(broken)
    # The project's models may be called as one of ours is.
    (tmp_path / "ingest.py").write_text(
        "from storage_engine.model import Entity, Field\n"
        "class Customer(Entity):\n    id: Field[str] = Field(primary_key=True)\n"
    )
    wrong = ("ingest", "--storage-uri=store", "--source=a.csv", "--models=ingest", "--type=Nobody")
    module = start("-m", "storage_engine.spark.jobs", *wrong, folder=tmp_path)
    file = start(FILE, *wrong, folder=tmp_path, path=str(tmp_path))
    for done in (module, file):
        assert done.stderr == "error: type 'Nobody' is not in ingest, which has Customer\n"
        assert (done.returncode, done.stdout) == (2, "")
