"""The first example that a user runs works, and its last lines are true."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from storage_engine import open_repository

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/first_ontology.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
    )


def test_the_first_example_runs(tmp_path: Path) -> None:
    storage = tmp_path / "store"
    done = run("--storage", str(storage))

    assert (done.returncode, done.stderr) == (0, "")
    for said in (
        "commit 1: Person, 2 inserted, 0 updated",
        "commit 2: Person, 0 inserted, 1 updated",
        "no commit",
        "commit 3: Person, 1000 inserted, 0 updated",
        "commit 3 had done it already",
        "ada -> acme: director",
        "knows mathematics: Ada",
        "stints at Acme: 2",
        "Ada knows Grace since 1950",
        "unknown: 1000",
        "ada: {'city': 'London'} -> {'city': 'Paris'}",
        f"onto info --storage-uri {storage}",
    ):
        assert said in done.stdout
    repository = open_repository(storage)
    assert repository.head_commit_id() == 3
    repository.close()

    again = run("--storage", str(storage))
    assert again.returncode == 1
    assert "already holds an ontology" in again.stderr
    assert "Traceback" not in again.stderr


def test_the_example_of_a_schema_change_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/examples/schema_change.py"), "--storage", "shop.db"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "validate: Customer: field 'tier' added (str)",
        "rows to rewrite: {'Customer': 1}",
        "versions: {'Customer': 2} by commit 2",
        "versions: {'Customer': 3} by commit 4",
        "now: [('Ada Lovelace', 'Gold')]",
        "as of commit 1: ['Ada Byron']",
        "as it was: [{'id': 'c1', 'first': 'Ada', 'last': 'Byron'}]",
        "change: 1 insert Ada Byron",
        "change: 3 update Ada Lovelace",
    ]
