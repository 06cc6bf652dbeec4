"""Locations load and run without a warning of Dagster's that we cause: beta, preview, superseded.

In a process of its own, with Python's own filters: what a user sees by default.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import logging, sys
import dagster as dg
from dagster._core.remote_representation.external_data import RepositorySnap
import {module} as location

definitions = location.defs.load_fn()
repository = definitions.get_repository_def()
RepositorySnap.from_def(repository)  # what a code server hands out
with dg.DagsterInstance.ephemeral() as instance:
    for job in {jobs}:
        result = repository.get_job(job).execute_in_process(instance=instance)
        assert result.success, job
"""


@pytest.mark.parametrize(
    ("module", "jobs"),
    [
        ("ontologia_dagster.definitions", ["ontology_drain_events", "ontology_metrics"]),
        ("ontologia_dagster.demo.definitions", []),
    ],
)
def test_a_location_is_quiet(module: str, jobs: list[str], tmp_path: Path) -> None:
    program = tmp_path / "load.py"
    program.write_text(PROGRAM.format(module=module, jobs=jobs))
    environment = {
        **{name: text for name, text in os.environ.items() if name != "PYTHONWARNINGS"},
        "PYTHONPATH": str(ROOT),
        "ONTOLOGIA_STORAGE_URI": str(tmp_path / "store"),
        "DAGSTER_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stderr.splitlines() if "Warning:" in line]
    assert told == []
